"""Pages of a database, also of a missing, faulty or foreign one, and the server: whom it answers, and how it ends."""

import html
import http.client
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from html import unescape
from http.cookies import SimpleCookie
from itertools import takewhile
from pathlib import Path
from threading import Event
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from bssearch import DatabaseError, TargetNotReachedError, open_store
from bssearch.cli import report
from bssearch.commands.trials import status
from bssearch.errors import UsageError
from bssearch.figures.svg import ACCENT
from bssearch.records import Lease
from bssearch.records.text import number as in_digits
from bssearch.search.finding import answer
from bssearch.settings import DATABASE_URL_VARIABLE
from bssearch.web import app, studies
from bssearch.web.app import HEADERS, MOST_QUERY_BYTES, MOST_STRANGERS, Access, is_loopback
from bssearch.web.views import Answered, Document, Page, PageRequest
from tests.cli.task import command, environment, read, refused
from tests.factories import make_curve, make_environment, make_plan, make_spec, not_none, store_study
from tests.postgres import Postgres
from tests.schema import execute
from tests.storage.conftest import OUTCOME
from tests.web.conftest import BASE, client_of, make_study
from tests.web.serving import served

HOSTILE = [
    "<script>alert(1)</script>",
    "' OR 1=1 --",
    "a" * 5000,
    "\x00",
    "../../etc/passwd",
    "{{ 7*7 }}",
    "𝕏\u202e",
    "%",
    "1e999",
]


def running_study(url: str, name: str = "toy", evaluations: int = 3) -> int:
    """Store a study with one running trial that has evaluations; return the trial's number."""
    spec = make_spec(name=name)
    with open_store(url) as store:
        store_study(store, spec)
        lease = Lease(owner="here/1/1.00/x", seconds=600.0)
        trial = not_none(store.trials.start(name, make_plan(), environment=make_environment(), lease=lease))
        curve = make_curve(*((0.1 * n, 0.2 * n) for n in range(1, evaluations + 1)))
        store.trials.append_observations(name, [(trial.number, one) for one in curve])
        return trial.number


@pytest.fixture
def copy(searched: str, tmp_path: Path) -> Path:
    """A copy of the database, which a test may change."""
    return Path(shutil.copy(searched.removeprefix("sqlite:///"), tmp_path / "copy.db"))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/studies?format=json", "study list"),
        ("/studies/task/best.json", "best task"),
        ("/studies/task/trials/1?format=json", "trial show task 1"),
    ],
)
def test_json_equals_the_commands(
    pages: TestClient, searched: str, tmp_path: Path, path: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATABASE_URL_VARIABLE, searched)
    assert pages.get(path).json() == read(tmp_path, *words.split())


class TestStudies:
    def test_they_are_listed_with_links_the_newest_first(self, pages: TestClient) -> None:
        text = pages.get("/").text
        assert text.index('href="/studies/task"') < text.index('href="/studies/other"')

    def test_the_newest_study_of_several_databases_is_the_first(self, tmp_path: Path) -> None:
        older, newer = (f"sqlite:///{tmp_path / name}" for name in ("older.db", "newer.db"))
        running_study(older, "old")
        running_study(newer, "new")
        execute(tmp_path / "older.db", "UPDATE bss_study SET created_at = '2025-01-01 00:00:00.000000'")
        for urls in ((older, newer), (newer, older)):
            text = client_of(*urls).get("/studies").text
            assert text.index('href="/studies/new') < text.index('href="/studies/old')

    def test_each_has_a_small_chart_of_its_answer(self, pages: TestClient) -> None:
        text = pages.get("/").text
        row = text[text.index('href="/studies/task"') :].partition("</tr>")[0]
        [study] = [one for one in pages.get("/studies?format=json").json() if one["name"] == "task"]
        about = ", ".join(f"batch {size}: {in_digits(median)}" for size, median in study["medians"].items())
        assert f"<title>{about}</title>" in row
        assert row.count(f'fill="{ACCENT}"') == 1, "the best is marked"

    def test_the_filter_offers_what_the_database_holds(self, pages: TestClient) -> None:
        text = pages.get("/studies").text
        [device] = {row["device"] for row in pages.get("/studies?format=json").json()}
        assert f'<datalist id="offered-device"><option value="{device}"></datalist>' in text

    def test_a_filter_leaves_out_other_studies(self, pages: TestClient) -> None:
        [device] = {row["device"] for row in pages.get("/studies?format=json").json()}
        assert 'href="/studies/task"' in pages.get("/studies", params={"device": device}).text
        assert 'href="/studies/task"' not in pages.get("/studies", params={"device": "H100"}).text

    def test_archived_studies_are_shown_on_request(self, copy: Path) -> None:
        with open_store(f"sqlite:///{copy}") as store:
            store.studies.archive("other")
        client = client_of(f"sqlite:///{copy}")
        assert "/studies/other" not in client.get("/studies").text
        assert "/studies/other" in client.get("/studies?all=1").text


@pytest.fixture
def number(empty: str) -> int:
    return running_study(empty)


class TestAStudy:
    def test_the_page_has_the_answer_and_the_progress(self, pages: TestClient, searched: str) -> None:
        text = pages.get("/studies/task").text
        with open_store(searched, write=False) as store:
            best, far = answer(store, "task"), status(store, "task")
        assert f"atch {best.optimal.batch_size} reaches" in text
        assert f"{far.spent_trials} of {far.budget_trials} search trials" in text

    def test_trials_beyond_the_budget_are_no_part_of_it(self, empty: str) -> None:
        with open_store(empty) as store:
            store_study(store, make_spec(budget={"trials": 5, "trial_train_seconds": 10.0}))
            for _ in range(6):
                lease = Lease(owner="here/1/1.00/x", seconds=600.0)
                store.trials.start("toy", make_plan(), environment=make_environment(), lease=lease)
        assert "6 search trials, more than the budget of 5, 6 running." in client_of(empty).get("/studies/toy").text

    @pytest.mark.parametrize("path", ["/studies/toy", "/studies/toy/trials"])
    def test_a_study_stays_live_between_two_trials(
        self, empty: str, monkeypatch: pytest.MonkeyPatch, path: str, number: int
    ) -> None:
        with open_store(empty) as store:
            store.trials.finish("toy", number, OUTCOME, steps_x_step_time_s=None)
        between = client_of(empty).get(path)
        assert 'data-live-seconds="2.0"' in between.text
        monkeypatch.setattr(studies, "PAUSE_SECONDS", 0.0)
        later = client_of(empty).get(path, headers={"If-None-Match": between.headers["etag"]})
        assert 'data-live-seconds="15.0"' in later.text

    def test_a_study_without_an_answer_shows_its_running_trial(self, empty: str, number: int) -> None:
        text = client_of(empty).get("/studies/toy").text
        for part in ("No answer yet", f'href="/studies/toy/trials/{number}"', 'data-live-seconds="2.0"', "<svg"):
            assert part in text

    def test_a_resting_study_without_an_answer_shows_the_remedy(
        self, empty: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with open_store(empty) as store:
            store_study(store, make_spec(name="toy"))
            with pytest.raises(TargetNotReachedError) as missing:
                answer(store, "toy")
        hint = not_none(missing.value.hint)
        assert hint not in client_of(empty).get("/studies/toy").text, "a driver may be about to start a trial"
        monkeypatch.setattr(studies, "PAUSE_SECONDS", 0.0)
        assert hint in client_of(empty).get("/studies/toy").text

    def test_the_newest_version_is_not_sent_again(self, empty: str, number: int) -> None:
        client = client_of(empty)
        tag = client.get("/studies/toy").headers["etag"]
        again = client.get("/studies/toy", headers={"If-None-Match": tag})
        assert (again.status_code, again.text) == (304, "")
        with open_store(empty) as store:
            store.trials.append_observations(
                "toy", [(number, make_curve(*((0.1 * n, 0.2 * n) for n in range(1, 5)))[3])]
            )
        assert client.get("/studies/toy", headers={"If-None-Match": tag}).status_code == 200

    def test_archiving_changes_the_version(self, empty: str) -> None:
        with open_store(empty) as store:
            store.studies.create(make_spec(name="toy").new_study("anna"))
        client = client_of(empty)
        tag = client.get("/studies/toy").headers["etag"]
        with open_store(empty) as store:
            store.studies.archive("toy")
        again = client.get("/studies/toy", headers={"If-None-Match": tag})
        assert again.status_code == 200
        assert "The study is archived" in again.text

    def test_pages_are_cached_by_address_and_version(self, searched: str) -> None:
        client = client_of(searched)
        first = client.get("/studies/task").text
        assert client.get("/studies/task").text == first
        assert client.get("/studies/other").text != first
        assert "Trials of task" in client.get("/studies/task/trials").text

    def test_a_missing_study_is_named_with_similar_names(self, pages: TestClient) -> None:
        missing, as_json = pages.get("/studies/tasc"), pages.get("/studies/tasc/best.json")
        assert (missing.status_code, as_json.status_code) == (404, 404)
        assert "task" in missing.text and "tasc" in as_json.json()["error"]

    def test_the_answer_of_a_study_without_one_is_not_found(self, empty: str) -> None:
        running_study(empty)
        assert client_of(empty).get("/studies/toy/best.json").status_code == 404

    @pytest.mark.parametrize("name", HOSTILE)
    def test_hostile_names_are_not_found_and_escaped(self, pages: TestClient, name: str) -> None:
        missing = pages.get(f"/studies/{quote(name, safe='')}")
        assert missing.status_code == 404
        assert "<script>alert" not in missing.text

    @pytest.mark.parametrize("path", ["/studies", "/compare", "/studies/%3Cimg%20src=x%20onerror=alert(1)%3E"])
    def test_a_foreign_stored_name_is_escaped(self, copy: Path, path: str) -> None:
        execute(copy, "UPDATE bss_study SET name = '<img src=x onerror=alert(1)>' WHERE name = 'other'")
        assert "<img" not in client_of(f"sqlite:///{copy}").get(path).text


class TestTrials:
    def test_all_are_shown_the_newest_first(self, pages: TestClient, searched: str) -> None:
        with open_store(searched, write=False) as store:
            numbers = [trial.number for trial in store.trials.of("task")]
        text = pages.get("/studies/task/trials").text
        places = [text.index(f'href="/studies/task/trials/{number}"') for number in numbers]
        assert places == sorted(places, reverse=True)

    def test_they_are_filtered_by_phase_state_and_batch_size(self, pages: TestClient, searched: str) -> None:
        with open_store(searched, write=False) as store:
            trials = store.trials.of("task")
        one, size = trials[0], trials[0].configuration.batch_size
        asked = {"phase": one.phase.value, "state": one.state.value, "batch_size": size, "format": "json"}
        expected = [
            trial.number
            for trial in trials
            if (trial.phase, trial.state, trial.configuration.batch_size) == (one.phase, one.state, size)
        ]
        assert [row["number"] for row in pages.get("/studies/task/trials", params=asked).json()] == expected
        assert len(expected) < len(trials)

    def test_order_by_time_starts_with_the_fastest(self, pages: TestClient) -> None:
        rows = pages.get("/studies/task/trials?format=json").json()
        fastest = min((row for row in rows if row["time_to_target_s"]), key=lambda row: row["time_to_target_s"])
        text = pages.get("/studies/task/trials?order=time_to_target_s").text
        assert text.index(f'/trials/{fastest["number"]}"') < min(
            text.index(f'/trials/{row["number"]}"') for row in rows if row is not fastest
        )

    def test_many_trials_are_shown_in_linked_pages(self, pages: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("bssearch.web.studies.PAGE_TRIALS", 5)
        first = pages.get("/studies/task/trials?state=reached").text
        assert first.count("/studies/task/trials/") == 5
        assert 'href="?state=reached&amp;page=2"' in first
        assert "Newer" not in first
        assert pages.get("/studies/task/trials?page=999").status_code == 400

    @pytest.mark.parametrize(
        ("query", "named"),
        [
            ({"phase": "sleep"}, "sleep"),
            ({"state": "x"}, "reached"),
            ({"batch_size": "-4"}, "batch_size"),
            ({"batch_size": "9" * 400}, "batch_size"),
            ({"batch_size": "²"}, "batch_size"),
            ({"page": "0"}, "page"),
            ({"order": "reason"}, "order"),
            ({"db": "7"}, "db=7"),
        ],
    )
    def test_a_wrong_query_is_named(self, pages: TestClient, query: dict[str, str], named: str) -> None:
        refused = pages.get("/studies/task/trials", params=query)
        assert refused.status_code in {400, 404}
        assert named in refused.text

    def test_a_trial_shows_its_configuration_curve_and_rerun(self, pages: TestClient) -> None:
        text = pages.get("/studies/task/trials/1").text
        assert [part for part in ("bssearch trial rerun task 1", "<svg", "learning_rate") if part not in text] == []

    @pytest.mark.parametrize("number", ["0", "9999", "9" * 30, "x", "-1", "1.5", "²"])
    def test_a_missing_trial_is_not_found(self, pages: TestClient, number: str) -> None:
        assert pages.get(f"/studies/task/trials/{number}").status_code == 404


class TestAcross:
    def test_studies_are_compared_with_the_first(self, pages: TestClient) -> None:
        text = pages.get("/compare?study=task&study=other").text
        assert text.index('<a href="/studies/task">') < text.index('<a href="/studies/other">')
        rows = pages.get("/compare?study=task&study=other&format=json").json()
        assert rows[0]["ratio_to_first"]["value"] == 1
        warnings = [warning["message"] for row in rows for warning in row["warnings"]]
        assert warnings and all(unescape(text).count(warning) for warning in warnings)

    def test_too_many_are_refused(self, pages: TestClient) -> None:
        assert pages.get("/compare", params={"study": [f"s{n}" for n in range(30)]}).status_code == 400

    def test_without_a_filter_the_questions_of_the_database_are_links(self, pages: TestClient) -> None:
        asked = not_none(
            re.search(
                r'<a href="(/best[^"]*workload=[^"]*)">[^<]*accuracy ≥ [0-9.]+</a>: (\d+)', pages.get("/best").text
            )
        )
        found = pages.get(html.unescape(asked[1]))
        assert 'id="found"' in found.text
        assert found.text.count('href="/studies/') >= int(asked[2]) > 0

    def test_a_study_starts_with_its_chart(self, pages: TestClient) -> None:
        text = pages.get("/studies/task").text
        places = [text.index(part) for part in ("<h1>Train with batch", "<svg", 'id="headline"', 'id="tiles"')]
        assert places == sorted(places)

    def test_answers_across_studies_equal_the_commands(self, pages: TestClient, searched: str, tmp_path: Path) -> None:
        [device] = {row["device"] for row in pages.get("/studies?format=json").json()}
        printed = read(tmp_path, "best", "--device", device, "--db", searched)
        assert pages.get("/best", params={"device": device, "format": "json"}).json() == printed
        assert "/studies/other" in pages.get("/best", params={"device": device}).text

    @pytest.mark.parametrize("name", ["workload", "device", "target", "objective", "precision"])
    @pytest.mark.slow
    @pytest.mark.parametrize("value", HOSTILE)
    def test_hostile_conditions_are_escaped(self, pages: TestClient, value: str, name: str) -> None:
        for path in ("/best", "/studies"):
            shown = pages.get(path, params={name: value})
            assert shown.status_code in {200, 400, 404}
            assert "<script>alert" not in shown.text


def test_a_password_in_a_condition_is_not_repeated(pages: TestClient) -> None:
    shown = pages.get("/best", params={"workload": "postgresql://anna:hunter2@db/x"})
    assert shown.status_code == 404
    assert "anna:***@db" in shown.text.partition("<h1>")[2].partition("</h1>")[0]


class TestDatabases:
    def test_studies_of_two_databases_are_found_by_number(self, searched: str, tmp_path: Path) -> None:
        second = f"sqlite:///{tmp_path / 'second.db'}"
        running_study(second, "task", evaluations=1)
        client = client_of(searched, second)
        text = client.get("/studies").text
        for database in (1, 2):
            assert f'href="/studies/task?db={database}"' in text
            assert ("No answer yet" in client.get(f"/studies/task?db={database}").text) is (database == 2)
        assert client.get("/studies/task").status_code == 400  # in both
        assert 'href="/studies/task/trials?db=2"' in client.get("/studies/task?db=2").text
        assert client.get("/compare?study=1:task&study=2:task").status_code == 200

    def test_a_database_that_vanishes_is_named_until_it_is_back(self, copy: Path) -> None:
        away = copy.with_name("away.db")
        client = client_of(f"sqlite:///{copy}")
        tag = client.get("/studies/task").headers["etag"]
        copy.rename(away)
        for path in ("/studies", "/studies/task", "/best?workload=x", "/compare"):
            gone = client.get(path, headers={"If-None-Match": tag})
            assert gone.status_code == 503
            assert "no database at" in gone.text
        assert not copy.exists()
        away.rename(copy)
        assert client.get("/studies/task").status_code == 200

    def test_a_file_that_is_no_database_is_refused(self, copy: Path) -> None:
        client = client_of(f"sqlite:///{copy}")
        copy.write_bytes(b"x" * 4096)
        assert client.get("/studies").status_code == 503

    def test_a_faulty_row_is_named(self, copy: Path) -> None:
        execute(copy, "UPDATE bss_trial SET parameters = '[1' WHERE number = 3")
        faulty = client_of(f"sqlite:///{copy}").get("/studies/task/trials")
        assert faulty.status_code == 503
        assert "trial 3: parameters" in faulty.text

    def test_pages_of_a_read_only_file_write_no_file(self, searched: str, tmp_path: Path) -> None:
        (folder := tmp_path / "team").mkdir()
        copy = Path(shutil.copy(searched.removeprefix("sqlite:///"), folder / "copy.db"))
        before = copy.read_bytes()
        copy.chmod(0o444)
        folder.chmod(0o555)
        client = client_of(f"sqlite:///{copy}")
        for path in ("/studies", "/studies/task", "/studies/task/trials/1", "/compare?study=task&study=other"):
            assert client.get(path).status_code == 200
        folder.chmod(0o755)
        assert [one.name for one in folder.iterdir()] == ["copy.db"]
        assert copy.read_bytes() == before

    @pytest.mark.slow
    def test_a_server_is_read_in_read_only_transactions(self, postgres: Postgres, tmp_path: Path) -> None:
        url = postgres.create_database()
        make_study(url, tmp_path, "task")
        assert client_of(url).get("/studies/task").status_code == 200
        with (
            open_store(url, write=False) as store,
            pytest.raises(DatabaseError, match="read-only transaction"),
            store.reading() as connection,
        ):
            connection.exec_driver_sql("DELETE FROM bss_study")


def test_too_many_requests_are_refused(searched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = Event(), Event()

    def slow(asked: PageRequest) -> Answered:
        begun.set()
        may_end.wait(60)
        return Document([])

    monkeypatch.setattr(app, "MOST_AT_ONCE", 1)
    monkeypatch.setitem(app.PAGES, "/best", Page(slow))
    with client_of(searched) as pages, ThreadPoolExecutor() as reader:
        first = reader.submit(pages.get, "/best")
        assert begun.wait(60)
        refused = pages.get("/studies")
        may_end.set()
        assert (refused.status_code, first.result().status_code) == (503, 200)
        assert "Try again in a moment" in refused.text
        assert pages.get("/studies").status_code == 200


# The server -----------------------------------------------------------------------------------------------------------


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
        assert [one for one in ("task", searched.rpartition("/")[2], "<script>") if one in answer.text] == []

    def test_a_public_server_accepts_given_names_and_addresses(self, searched: str) -> None:
        client = client_of(searched, host="0.0.0.0", token=TOKEN, names=("Train.Example",))
        for host, code in {"train.example": 401, "10.0.0.7": 401, "[fe80::1]": 401, "evil.example": 421}.items():
            assert client.get("/studies", headers={"Host": host}).status_code == code, host

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
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
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
