"""The HTTP server."""

from __future__ import annotations

import errno
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Sequence
from contextlib import suppress

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bssearch.errors import UsageError
from bssearch.web.app import ADMITTED, Access, create_app, is_loopback, new_token
from bssearch.web.views import Databases

# Browsers open connections in advance and leave them unused for minutes.

# Maximum open connections, below the default limit of 1,024 files per process. A browser opens up to six.
MOST_CONNECTIONS = 400

MOST_STRANGERS = 100  # Maximum open connections without an admitted request. A further one replaces the oldest.

REQUEST_S = 10.0  # Seconds to send a whole request, head and body; enough for a slow network


class Connection(H11Protocol):
    """A connection that must send each request in time, and gives way to newer ones until `Guard` admits a request."""

    opened_at: float
    _is_admitted = False
    _deadline: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Start the first request's deadline; close the oldest stranger if there are too many."""
        super().connection_made(transport)
        self.opened_at = self.loop.time()
        strangers = [one for one in self.connections if isinstance(one, Connection) and one.is_stranger]
        if len(strangers) > MOST_STRANGERS:
            min(strangers, key=lambda one: one.opened_at).transport.abort()
        self._deadline = self.loop.call_later(REQUEST_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Start or stop the request's deadline."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Start the deadline of a request that has partly arrived; uvicorn's keep-alive limit closes idle ones."""
        self._is_admitted = not self.is_stranger
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadline."""
        super().connection_lost(exc)
        self._stop_deadline()

    @property
    def is_stranger(self) -> bool:
        """True if open and `Guard` has admitted no request yet."""
        is_admitted = self._is_admitted or (self.scope is not None and ADMITTED in self.scope["state"])
        return not (is_admitted or self.transport.is_closing())

    def _watch(self) -> None:
        awaits_head = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not (awaits_head or self.conn.their_state is h11.SEND_BODY):
            self._stop_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


GRACE_S = 3  # Seconds for requests to finish after a stop

BACKLOG = 128  # The listen backlog


def serve(
    urls: Sequence[str] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    names: Sequence[str] = (),
    asks_token: bool | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Serve database pages until Ctrl-C or SIGTERM.

    A token is required if ``host`` is reachable from other machines or ``asks_token``; ``tell`` gets the address with
    it once. ``port`` 0 takes a free one; ``names`` are further host names. Raises `UsageError` if it cannot listen or a
    required token is declined.
    """
    databases = Databases(urls)
    needs_token = not is_loopback(host)
    if asks_token is False and needs_token:
        raise UsageError(
            f"--no-token: other machines reach {host}, so a token is asked for",
            hint="without one: --host 127.0.0.1, and `ssh -L` from elsewhere",
        )
    token = new_token() if asks_token or needs_token else None
    with _listening(host, port) as listener:
        port = listener.getsockname()[1]
        app = create_app(databases, Access.of(host, port, token=token, names=names))
        for line in _welcome(host, port, token, databases.names):
            tell(line)
        config = uvicorn.Config(
            app,
            access_log=False,  # it would hold the token
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            http=Connection,
            ws="none",
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=GRACE_S,
        )
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def _welcome(host: str, port: int, token: str | None, databases: Sequence[str]) -> list[str]:
    shown = socket.gethostname() if host in {"0.0.0.0", "::"} else f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}/"
    lines = [f"serving {', '.join(databases)}, read-only", address if token is None else f"{address}?token={token}"]
    if token is not None:
        lines.append("the token is shown this once; it travels unencrypted: on a network of others use ssh -L")
    return [*lines, "Ctrl-C ends it"]


def _listening(host: str, port: int) -> socket.socket:
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host} is no name or address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _not_ours(error, host, port) from None
    return listener


def _not_ours(error: OSError, host: str, port: int) -> UsageError:
    match error.errno:
        case errno.EADDRINUSE:
            return UsageError(
                f"port {port} of {host} is taken by another program", hint="--port 0 takes a free one, --port N another"
            )
        case errno.EACCES:
            return UsageError(f"--port {port} is not for every user", hint="take one from 1024 on")
        case errno.EADDRNOTAVAIL:
            return UsageError(
                f"--host {host} is no address of this machine", hint="use 0.0.0.0 for all addresses of this machine"
            )
        case _:
            return UsageError(f"--host {host} --port {port} cannot be listened on: {error.strerror}")
