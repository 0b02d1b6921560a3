"""The command that serves: as a process of its own, with a real socket."""

import http.client
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from bssearch.cli import report
from bssearch.errors import UsageError
from bssearch.web import app
from bssearch.web.app import MOST_STRANGERS
from tests.cli.task import command, environment, refused
from tests.web.serving import served

STARTS_WITHIN = 60


@contextmanager
def serving(*options: str, cwd: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Give a server that has begun, and the lines that it said."""
    process = subprocess.Popen(
        command("serve", *options),
        cwd=cwd,
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line.rstrip())
            if "Ctrl-C" in line:
                break
        yield process, lines
    finally:
        process.kill()
        process.communicate()


def get(port: int, path: str, **headers: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=STARTS_WITHIN)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def port_of(lines: list[str]) -> int:
    [address] = [line for line in lines if line.startswith("http://")]
    return int(address.split(":")[2].partition("/")[0])


@pytest.mark.slow
class TestServing:
    def test_it_serves_until_it_is_interrupted_and_ends_in_peace(self, searched: str, tmp_path: Path) -> None:
        with serving("--db", searched, "--port", "0", cwd=tmp_path) as (process, lines):
            assert get(port_of(lines), "/studies/task")[0] == 200
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=STARTS_WITHIN)
        assert (process.returncode, out, errors) == (0, "", "")
        assert list(tmp_path.iterdir()) == []

    def test_where_others_reach_it_a_token_is_shown_once_and_never_logged(self, searched: str, tmp_path: Path) -> None:
        with serving("--db", searched, "--port", "0", "--host", "0.0.0.0", cwd=tmp_path) as (process, lines):
            [token] = {line.partition("token=")[2] for line in lines if "token=" in line}
            port = port_of(lines)
            assert get(port, "/studies")[0] == 401
            assert get(port, f"/studies?token={token}")[0] == 200
            assert get(port, "/studies", Authorization=f"Bearer {token}")[0] == 200
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=STARTS_WITHIN)
        assert token not in errors
        assert sum(token in line for line in lines) == 1

    def test_of_two_on_one_port_the_second_says_so(self, searched: str, tmp_path: Path) -> None:
        with serving("--db", searched, "--port", "0", cwd=tmp_path) as (_, lines):
            port = port_of(lines)
            told = refused(tmp_path, "serve", "--db", searched, "--port", str(port), code=2)
            assert f"port {port} of 127.0.0.1 is taken" in told
            assert "--port 0" in told
            assert get(port, "/studies")[0] == 200

    def test_a_request_of_nonsense_ends_neither_the_server_nor_others(self, searched: str, tmp_path: Path) -> None:
        with serving("--db", searched, "--port", "0", cwd=tmp_path) as (_, lines):
            port = port_of(lines)
            for nonsense in (
                b"\x16\x03\x01\x02\x00\x01",
                b"GET / HTTP/9.9\r\n\r\n",
                b"GET " + b"a" * 200_000,
                b"\r\n" * 9,
            ):
                with closing(socket.create_connection(("127.0.0.1", port), timeout=5)) as raw:
                    raw.sendall(nonsense)
            assert get(port, "/studies")[0] == 200

    def test_connections_that_ask_nothing_keep_nobody_out(self, searched: str, tmp_path: Path) -> None:
        with serving("--db", searched, "--port", "0", cwd=tmp_path) as (_, lines), ExitStack() as opened:
            port = port_of(lines)
            for _ in range(60):
                opened.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=STARTS_WITHIN)))
            assert get(port, "/studies")[0] == 200

    @pytest.mark.parametrize(
        "sent",
        [
            b"",
            b"GET /studies HTTP/1.1\r\nHost: 127.0.",
            b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET / HTTP/1.1\r\nHost: 127.0.",
            b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nbody",
        ],
        ids=["nothing", "half a head", "half a second head", "half a body"],
    )
    def test_a_connection_that_sends_no_whole_request_in_time_is_closed(
        self, searched: str, monkeypatch: pytest.MonkeyPatch, sent: bytes
    ) -> None:
        monkeypatch.setattr("bssearch.web.app.REQUEST_S", 0.1)
        with served(searched) as server:
            port = int(server.address.rpartition(":")[2])
            with closing(socket.create_connection(("127.0.0.1", port), timeout=STARTS_WITHIN)) as raw:
                raw.sendall(sent)
                assert _is_closed(raw, sends=b"x")
            assert get(port, "/studies")[0] == 200

    def test_a_thousand_connections_without_the_token_keep_its_holder_out_of_no_page(self, searched: str) -> None:
        refused = b"GET /studies HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        with served(searched, token="secret") as server, ExitStack() as opened:
            port = int(server.address.rpartition(":")[2])
            for number in range(1000):
                raw = socket.create_connection(("127.0.0.1", port), timeout=STARTS_WITHIN)
                opened.enter_context(closing(raw))
                if number % 2:
                    raw.sendall(refused)
                with suppress(OSError):  # closed by the server already
                    raw.sendall(refused[:30])
                if number % 100 == 99:
                    status, text = get(port, "/studies", Authorization="Bearer secret")
                    assert status == 200, text

    def test_a_connection_that_was_let_in_stays_while_others_are_closed(self, searched: str) -> None:
        with served(searched, token="secret") as server, ExitStack() as opened:
            port = int(server.address.rpartition(":")[2])
            kept = http.client.HTTPConnection("127.0.0.1", port, timeout=STARTS_WITHIN)
            for _ in range(2):
                kept.request("GET", "/studies", headers={"Authorization": "Bearer secret"})
                assert kept.getresponse().read().startswith(b"<!doctype")
                for _ in range(MOST_STRANGERS + 10):
                    opened.enter_context(closing(socket.create_connection(("127.0.0.1", port), STARTS_WITHIN)))
            kept.close()


def _is_closed(raw: socket.socket, *, sends: bytes) -> bool:
    """Return whether the server closes a connection that goes on sending byte by byte."""
    raw.settimeout(0.02)
    ends = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < ends:
        try:
            if raw.recv(100_000) == b"":
                return True
        except TimeoutError:
            with suppress(OSError):
                raw.sendall(sends)
        except ConnectionError:
            return True
    return False


class TestRefusing:
    @pytest.mark.parametrize(
        ("options", "named"),
        [
            (("--host", "no such host"), "no such host"),
            (("--host", "192.0.2.7"), "192.0.2.7"),
            (("--host", "0.0.0.0", "--no-token"), "--no-token"),
            (("--host", "::1%nope"), "nope"),
        ],
    )
    def test_where_it_cannot_listen_it_says_why(
        self, searched: str, tmp_path: Path, options: tuple[str, ...], named: str
    ) -> None:
        assert named in refused(tmp_path, "serve", "--db", searched, "--port", "0", *options, code=2)

    def test_without_a_database_nothing_is_served(self, tmp_path: Path) -> None:
        assert "none.db" in refused(tmp_path, "serve", "--db", f"sqlite:///{tmp_path / 'none.db'}", code=4)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("module", ["uvicorn", "starlette"])
    def test_without_its_extra_it_names_it(self, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
        ours = {"bssearch.web.app"}
        for name in [one for one in sys.modules if one in ours or one.startswith(f"{module}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UsageError, match=module) as refused:
            report.serve()
        assert "bssearch[serve]" in str(refused.value.hint)

    def test_a_port_for_the_superuser_is_named(self) -> None:
        assert "80" in app._not_ours(OSError(13, "Permission denied"), "127.0.0.1", 80).message


VISIT = """
import sys
from starlette.testclient import TestClient
from bssearch.web.app import Access
from bssearch.web.app import PAGES, create_app
from bssearch.web.views import Databases

access = Access.of("127.0.0.1", 80, token=None)
client = TestClient(create_app(Databases([sys.argv[1]]), access), base_url="http://127.0.0.1")
for path in PAGES:
    place = path.replace("{name}", "task").replace("{number}", "1")
    assert client.get(place).status_code == 200, place
print(sorted({"torch", "optuna", "sklearn"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_the_pages_import_no_training_and_no_optuna(searched: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", VISIT, searched],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[]\n", done.stderr
