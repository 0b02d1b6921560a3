"""Who may see the pages, and what others are told."""

import re
from http.cookies import SimpleCookie

import pytest
from starlette.testclient import TestClient

from bssearch.web.app import HEADERS, MOST_QUERY_BYTES, Access, is_loopback
from tests.web.conftest import BASE, client_of

TOKEN = "a-token-that-nobody-guesses"


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
        ],
    )
    def test_a_foreign_name_is_refused_and_learns_nothing(self, pages: TestClient, searched: str, host: str) -> None:
        answer = pages.get("/studies", headers={"Host": host})
        assert answer.status_code == 421
        assert "task" not in answer.text
        assert searched.rpartition("/")[2] not in answer.text

    def test_a_name_in_a_refusal_is_escaped(self, pages: TestClient) -> None:
        assert "<script>" not in pages.get("/studies", headers={"Host": "<script>alert(1)</script>"}).text

    def test_a_host_of_its_own_answers_to_it_to_further_names_and_to_addresses(self, searched: str) -> None:
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
    def test_loopback_is_what_only_this_machine_reaches(self, host: str, known: bool) -> None:
        assert is_loopback(host) is known


class TestToken:
    @pytest.mark.parametrize(
        "path", ["/", "/studies", "/studies/task", "/static/web.css", "/studies/task/best.json", "/x"]
    )
    def test_nothing_is_shown_without_it(self, guarded: TestClient, path: str) -> None:
        answer = guarded.get(path)
        assert answer.status_code == 401
        assert "task" not in answer.text

    @pytest.mark.parametrize("given", ["", "wrong", TOKEN[:-1], TOKEN + "x", "ü", "%00"])
    def test_a_wrong_one_is_refused(self, guarded: TestClient, given: str) -> None:
        assert guarded.get("/studies", params={"token": given}).status_code == 401
        assert guarded.get("/studies", headers={b"Authorization": f"Bearer {given}".encode()}).status_code == 401
        assert not guarded.cookies

    def test_the_right_one_leaves_a_cookie_that_scripts_and_other_sites_cannot_use(self, guarded: TestClient) -> None:
        answer = guarded.get("/studies/task", params={"token": TOKEN, "db": "1"})
        [cookie] = SimpleCookie(answer.headers["set-cookie"]).values()
        assert cookie["httponly"]
        assert cookie["samesite"].lower() == "strict"
        assert cookie.value != TOKEN
        assert 'url=/studies/task?db=1"' in answer.text  # on to the page, without the token
        assert TOKEN not in answer.text
        assert guarded.get("/studies").status_code == 200

    def test_the_cookie_of_another_server_opens_nothing(self, searched: str, guarded: TestClient) -> None:
        other = client_of(searched, token="another")
        other.get("/studies", params={"token": "another"})
        guarded.cookies = other.cookies
        assert guarded.get("/studies").status_code == 401

    def test_programs_send_it_in_a_header(self, guarded: TestClient) -> None:
        answer = guarded.get("/studies/task/best.json", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.json()["optimal"]["batch_size"] > 0

    @pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example", "//evil.example/%2e%2e"])
    def test_it_leads_to_no_other_site(self, guarded: TestClient, path: str) -> None:
        answer = guarded.get(f"{BASE}{path}?token={TOKEN}")
        [place] = re.findall(r'url=([^"]*)"', answer.text)
        assert re.match(r"/(?![/\\])", place)


class TestRequests:
    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
    def test_nothing_but_reading_is_taken(self, pages: TestClient, method: str) -> None:
        answer = pages.request(method, "/studies/task")
        assert answer.status_code == 405
        assert answer.headers["allow"] == "GET, HEAD"

    def test_a_head_is_a_get_without_its_body(self, pages: TestClient) -> None:
        answer = pages.head("/studies")
        assert (answer.status_code, answer.text) == (200, "")

    def test_a_long_query_is_refused(self, pages: TestClient) -> None:
        assert pages.get("/studies", params={"device": "x" * MOST_QUERY_BYTES}).status_code == 414

    @pytest.mark.parametrize(
        "path",
        ["/studies", "/studies/none", "/studies/task", "/static/live.js", "/static/none", "/calculator", "/compare"],
    )
    def test_every_answer_keeps_to_this_server(self, pages: TestClient, path: str) -> None:
        answer = pages.get(path)
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
        again = pages.get(path, headers={"If-None-Match": answer.headers.get("etag", "none")})
        assert again.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]

    @pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static/"])
    def test_no_other_file_is_given(self, pages: TestClient, path: str) -> None:
        assert pages.get(path).status_code == 404

    def test_an_error_that_nobody_foresaw_tells_no_secret(
        self, pages: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("postgresql://anna:hunter2@db/x")

        monkeypatch.setattr("bssearch.web.studies.study_rows", fail)
        answer = pages.get("/studies")
        assert answer.status_code == 500
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert "hunter2" not in answer.text


def test_the_cookie_is_named_for_the_port_as_hosts_share_them() -> None:
    one, other = (Access.of("127.0.0.1", port, token=TOKEN).cookie for port in (1, 2))
    assert one != other
