"""A port of loopback in front of a server's socket, whose connections a test may cut."""

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Proxy:
    """Forwards connections on ``port`` to a Unix socket, both ways, until they are cut."""

    def __init__(self, server: Path) -> None:
        self._server = str(server)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def cut(self) -> int:
        """Cut every connection; return their number."""
        with self._lock:
            cut = dict(self._open)
            for one in cut:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        for thread in cut.values():
            thread.join()
        return len(cut)

    def close(self) -> None:
        """Take no more connections, and cut the open connections."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                thread = threading.Thread(target=self._pass_on, args=(client,), daemon=True)
                with self._lock:
                    self._open[client] = thread
                thread.start()

    def _pass_on(self, client: socket.socket) -> None:
        """Forward bytes until one side ends; close the client at once if the server is away."""
        other = socket.socket(socket.AF_UNIX)
        with suppress(OSError), other:
            other.connect(self._server)
            sides = {client: other, other: client}
            while all([_pass(one, sides[one]) for one in select.select([*sides], [], [])[0]]):
                pass
        with self._lock:
            del self._open[client]
            client.close()


def _pass(source: socket.socket, sink: socket.socket) -> bool:
    """Forward received bytes; return False at the end of the source."""
    data = source.recv(2**16)
    sink.sendall(data)
    return bool(data)


@contextmanager
def proxy_of(server: Path) -> Iterator[Proxy]:
    """Proxy of a server's socket, closed at the end."""
    made = Proxy(server)
    try:
        yield made
    finally:
        made.close()
