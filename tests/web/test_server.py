"""The command ``serve`` as a process, with a real socket."""

import http.client
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.cookies import SimpleCookie
from itertools import takewhile
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from bssearch.cli import report
from bssearch.errors import UsageError
from bssearch.web.app import HEADERS, MOST_QUERY_BYTES, MOST_STRANGERS, Access, is_loopback
from tests.cli.task import command, environment, refused
from tests.factories import not_none
from tests.web.conftest import BASE, client_of
from tests.web.serving import served

STARTS_WITHIN = 60


@contextmanager
def serving(*options: str, cwd: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Started server, and the lines that it printed first."""
    process = subprocess.Popen(
        command("serve", *options),
        cwd=cwd,
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, [*takewhile(lambda line: "Ctrl-C" not in line, map(str.rstrip, not_none(process.stderr)))]
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
    def test_it_serves_until_it_is_interrupted(self, searched: str, tmp_path: Path) -> None:
        with serving("--db", searched, "--port", "0", cwd=tmp_path) as (process, lines):
            assert get(port_of(lines), "/studies/task")[0] == 200
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=STARTS_WITHIN)
        assert (process.returncode, out, errors) == (0, "", "")
        assert list(tmp_path.iterdir()) == []

    def test_a_public_server_shows_its_token_once_and_never_logs_it(self, searched: str, tmp_path: Path) -> None:
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

    def test_the_second_server_on_a_port_is_refused(self, searched: str, tmp_path: Path) -> None:
        with serving("--db", searched, "--port", "0", cwd=tmp_path) as (_, lines):
            port = port_of(lines)
            error = refused(tmp_path, "serve", "--db", searched, "--port", str(port), code=2)
            assert f"--port {port} failed" in error and "--port 0" in error
            assert get(port, "/studies")[0] == 200

    def test_a_malformed_request_does_not_stop_the_server(self, searched: str, tmp_path: Path) -> None:
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
        with served(searched) as address:
            port = int(address.rpartition(":")[2])
            with closing(socket.create_connection(("127.0.0.1", port), timeout=STARTS_WITHIN)) as raw:
                raw.sendall(sent)
                assert _is_closed(raw, sends=b"x")
            assert get(port, "/studies")[0] == 200

    def test_a_thousand_connections_without_the_token_block_no_page_of_its_holder(self, searched: str) -> None:
        refused = b"GET /studies HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        with served(searched, token="secret") as address, ExitStack() as opened:
            port = int(address.rpartition(":")[2])
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

    def test_an_admitted_connection_stays_while_others_are_closed(self, searched: str) -> None:
        with served(searched, token="secret") as address, ExitStack() as opened:
            port = int(address.rpartition(":")[2])
            kept = http.client.HTTPConnection("127.0.0.1", port, timeout=STARTS_WITHIN)
            for _ in range(2):
                kept.request("GET", "/studies", headers={"Authorization": "Bearer secret"})
                assert kept.getresponse().read().startswith(b"<!doctype")
                for _ in range(MOST_STRANGERS + 10):
                    opened.enter_context(closing(socket.create_connection(("127.0.0.1", port), STARTS_WITHIN)))
            kept.close()


def _is_closed(raw: socket.socket, *, sends: bytes) -> bool:
    """True if the server closes a connection that keeps sending single bytes."""
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
    def test_an_address_that_it_cannot_use_is_named(
        self, searched: str, tmp_path: Path, options: tuple[str, ...], named: str
    ) -> None:
        assert named in refused(tmp_path, "serve", "--db", searched, "--port", "0", *options, code=2)

    def test_a_missing_database_is_refused(self, tmp_path: Path) -> None:
        assert "none.db" in refused(tmp_path, "serve", "--db", f"sqlite:///{tmp_path / 'none.db'}", code=4)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("module", ["uvicorn", "starlette"])
    def test_a_missing_library_is_named_with_its_extra(self, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
        for name in [one for one in sys.modules if one == "bssearch.web.app" or one.startswith(f"{module}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UsageError, match=module) as refused:
            report.serve()
        assert "bssearch[serve]" in str(refused.value.hint)


VISIT = """
import sys
from starlette.testclient import TestClient
from bssearch.web.app import Access, PAGES, create_app
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


# Access ---------------------------------------------------------------------------------------------------------------


TOKEN = "a-token-of-the-tests"


@pytest.fixture
def guarded(searched: str) -> TestClient:
    return client_of(searched, token=TOKEN)


class TestHostNames:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST.", "[::1]:8765", "localhost:1"])
    def test_loopback_answers_to_its_names_whatever_the_port(self, pages: TestClient, host: str) -> None:
        assert pages.get("/studies", headers={"Host": host}).status_code == 200

    @pytest.mark.parametrize(
        "host",
        [
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost@evil.example",
            "",
            "10.0.0.7",
            "[::1",
            "[::1]evil",
            "[::1]:80:80",
            "localhost:80/evil.example",
            "127.0.0.1:x",
            "a/b",
            "<script>alert(1)</script>",
        ],
    )
    def test_a_foreign_name_is_refused_and_learns_nothing(self, pages: TestClient, searched: str, host: str) -> None:
        answer = pages.get("/studies", headers={"Host": host})
        assert answer.status_code == 421
        for secret in ("task", searched.rpartition("/")[2], "<script>"):
            assert secret not in answer.text

    def test_a_public_server_accepts_given_names_and_addresses(self, searched: str) -> None:
        client = client_of(searched, host="0.0.0.0", token=TOKEN, names=("Train.Example",))
        for host, status in {"train.example": 401, "10.0.0.7": 401, "[fe80::1]": 401, "evil.example": 421}.items():
            assert client.get("/studies", headers={"Host": host}).status_code == status, host

    @pytest.mark.parametrize(
        ("host", "known"),
        [
            ("127.0.0.1", True),
            ("127.3.2.1", True),
            ("::1", True),
            ("localhost", True),
            ("0.0.0.0", False),
            ("h", False),
        ],
    )
    def test_loopback_is_reached_only_from_this_machine(self, host: str, known: bool) -> None:
        assert is_loopback(host) is known


class TestToken:
    @pytest.mark.parametrize(
        "path", ["/", "/studies", "/studies/task", "/static/web.css", "/studies/task/best.json", "/x"]
    )
    def test_no_page_is_shown_without_the_token(self, guarded: TestClient, path: str) -> None:
        answer = guarded.get(path)
        assert answer.status_code == 401
        assert "task" not in answer.text

    @pytest.mark.parametrize("given", ["", "wrong", TOKEN[:-1], TOKEN + "x", "ü", "%00"])
    def test_a_wrong_token_is_refused(self, guarded: TestClient, given: str) -> None:
        assert guarded.get("/studies", params={"token": given}).status_code == 401
        assert guarded.get("/studies", headers={b"Authorization": f"Bearer {given}".encode()}).status_code == 401
        assert not guarded.cookies

    def test_the_token_sets_a_cookie_that_scripts_and_other_sites_cannot_use(self, guarded: TestClient) -> None:
        answer = guarded.get("/studies/task", params={"token": TOKEN, "db": "1"})
        [cookie] = SimpleCookie(answer.headers["set-cookie"]).values()
        assert (cookie["httponly"], cookie["samesite"].lower()) == (True, "strict")
        assert cookie.value != TOKEN
        assert 'url=/studies/task?db=1"' in answer.text  # to the page, without the token
        assert TOKEN not in answer.text
        assert guarded.get("/studies").status_code == 200

    def test_the_cookie_of_another_server_opens_nothing(self, searched: str, guarded: TestClient) -> None:
        other = client_of(searched, token="another")
        other.get("/studies", params={"token": "another"})
        guarded.cookies = other.cookies
        assert guarded.get("/studies").status_code == 401

    def test_programs_send_the_token_in_a_header(self, guarded: TestClient) -> None:
        answer = guarded.get("/studies/task/best.json", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.json()["optimal"]["batch_size"] > 0

    @pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example", "//evil.example/%2e%2e"])
    def test_the_token_leads_to_no_other_site(self, guarded: TestClient, path: str) -> None:
        [place] = re.findall(r'url=([^"]*)"', guarded.get(f"{BASE}{path}?token={TOKEN}").text)
        assert re.match(r"/(?![/\\])", place)


class TestRequests:
    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
    def test_only_reading_is_allowed(self, pages: TestClient, method: str) -> None:
        answer = pages.request(method, "/studies/task")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")

    def test_a_head_is_a_get_without_its_body(self, pages: TestClient) -> None:
        answer = pages.head("/studies")
        assert (answer.status_code, answer.text) == (200, "")

    def test_a_long_query_is_refused(self, pages: TestClient) -> None:
        assert pages.get("/studies", params={"device": "x" * MOST_QUERY_BYTES}).status_code == 414

    @pytest.mark.parametrize(
        "path",
        ["/studies", "/studies/none", "/studies/task", "/static/live.js", "/static/none", "/calculator", "/compare"],
    )
    def test_every_answer_has_the_security_headers(self, pages: TestClient, path: str) -> None:
        answer = pages.get(path)
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
        again = pages.get(path, headers={"If-None-Match": answer.headers.get("etag", "none")})
        assert again.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]

    @pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static/"])
    def test_no_other_file_is_served(self, pages: TestClient, path: str) -> None:
        assert pages.get(path).status_code == 404

    def test_an_unexpected_error_shows_no_secret(self, pages: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("postgresql://anna:hunter2@db/x")

        monkeypatch.setattr("bssearch.web.studies.study_rows", fail)
        answer = pages.get("/studies")
        assert (answer.status_code, answer.headers["X-Frame-Options"]) == (500, "DENY")
        assert "hunter2" not in answer.text


def test_the_cookies_name_has_the_port() -> None:
    one, other = (Access.of("127.0.0.1", port, token=TOKEN).cookie for port in (1, 2))
    assert one != other
