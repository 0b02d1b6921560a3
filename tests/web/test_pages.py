"""What the pages show of a database, and what of one that is gone, faulty or somebody else's."""

import html
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from threading import Event
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from bssearch.commands.trials import status
from bssearch.errors import DatabaseError
from bssearch.figures.svg import ACCENT
from bssearch.records import Lease
from bssearch.records.text import number as in_digits
from bssearch.search.finding import answer
from bssearch.settings import DATABASE_URL_VARIABLE
from bssearch.storage.repository import open_store
from bssearch.web import app, studies
from bssearch.web.views import Answered, Document, Page, PageRequest
from tests.cli.task import read
from tests.factories import make_curve, make_environment, make_plan, make_spec, not_none, store_study
from tests.postgres import Postgres
from tests.schema import execute
from tests.storage.conftest import OUTCOME
from tests.web.conftest import client_of, make_study

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
    """Store a study with one trial that runs and has been evaluated; return the trial's number."""
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
def test_json_is_that_of_the_command(
    pages: TestClient, searched: str, tmp_path: Path, path: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATABASE_URL_VARIABLE, searched)
    assert pages.get(path).json() == read(tmp_path, *words.split())


class TestStudies:
    def test_they_are_listed_with_links_the_newest_first(self, pages: TestClient) -> None:
        text = pages.get("/").text
        assert text.index('href="/studies/task"') < text.index('href="/studies/other"')

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

    def test_a_filter_leaves_out_what_does_not_match(self, pages: TestClient) -> None:
        [device] = {row["device"] for row in pages.get("/studies?format=json").json()}
        assert 'href="/studies/task"' in pages.get("/studies", params={"device": device}).text
        assert 'href="/studies/task"' not in pages.get("/studies", params={"device": "H100"}).text

    def test_archived_ones_are_shown_where_asked(self, copy: Path) -> None:
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
        assert "<svg" in text

    @pytest.mark.parametrize("path", ["/studies/toy", "/studies/toy/trials"])
    def test_between_two_trials_it_is_still_live_and_only_later_at_rest(
        self, empty: str, monkeypatch: pytest.MonkeyPatch, path: str, number: int
    ) -> None:
        with open_store(empty) as store:
            store.trials.finish("toy", number, OUTCOME, steps_x_step_time_s=None)
        between = client_of(empty).get(path)
        assert 'data-live-seconds="2.0"' in between.text
        monkeypatch.setattr(studies, "PAUSE_SECONDS", 0.0)
        later = client_of(empty).get(path, headers={"If-None-Match": between.headers["etag"]})
        assert 'data-live-seconds="15.0"' in later.text

    def test_one_without_an_answer_shows_what_runs(self, empty: str, number: int) -> None:
        text = client_of(empty).get("/studies/toy").text
        assert "No answer yet" in text
        assert f'href="/studies/toy/trials/{number}"' in text
        assert 'data-live-seconds="2.0"' in text
        assert "<svg" in text

    def test_who_has_the_newest_version_is_sent_nothing(self, empty: str, number: int) -> None:
        client = client_of(empty)
        tag = client.get("/studies/toy").headers["etag"]
        again = client.get("/studies/toy", headers={"If-None-Match": tag})
        assert (again.status_code, again.text) == (304, "")
        with open_store(empty) as store:
            store.trials.append_observations(
                "toy", [(number, make_curve(*((0.1 * n, 0.2 * n) for n in range(1, 5)))[3])]
            )
        assert client.get("/studies/toy", headers={"If-None-Match": tag}).status_code == 200

    def test_that_it_was_archived_is_something_new(self, empty: str) -> None:
        with open_store(empty) as store:
            store.studies.create(make_spec(name="toy").new_study("anna"))
        client = client_of(empty)
        tag = client.get("/studies/toy").headers["etag"]
        with open_store(empty) as store:
            store.studies.archive("toy")
        again = client.get("/studies/toy", headers={"If-None-Match": tag})
        assert again.status_code == 200
        assert "The study is archived" in again.text

    def test_the_page_that_is_kept_is_that_of_its_own_address_and_version(self, searched: str) -> None:
        client = client_of(searched)
        first = client.get("/studies/task").text
        assert client.get("/studies/task").text == first
        assert client.get("/studies/other").text != first
        assert "Trials of task" in client.get("/studies/task/trials").text

    def test_one_that_is_not_there_is_named_with_its_neighbours(self, pages: TestClient) -> None:
        missing = pages.get("/studies/tasc")
        assert missing.status_code == 404
        assert "task" in missing.text

    def test_as_json_an_error_is_json(self, pages: TestClient) -> None:
        missing = pages.get("/studies/tasc/best.json")
        assert missing.status_code == 404
        assert "tasc" in missing.json()["error"]

    def test_the_answer_of_one_without_is_not_found(self, empty: str) -> None:
        running_study(empty)
        assert client_of(empty).get("/studies/toy/best.json").status_code == 404

    @pytest.mark.parametrize("name", HOSTILE)
    def test_hostile_names_are_not_found_and_escaped(self, pages: TestClient, name: str) -> None:
        missing = pages.get(f"/studies/{quote(name, safe='')}")
        assert missing.status_code == 404
        assert "<script>alert" not in missing.text

    @pytest.mark.parametrize("path", ["/studies", "/compare", "/studies/%3Cimg%20src=x%20onerror=alert(1)%3E"])
    def test_a_stored_name_that_nothing_of_ours_made_is_escaped(self, copy: Path, path: str) -> None:
        execute(copy, "UPDATE bss_study SET name = '<img src=x onerror=alert(1)>' WHERE name = 'other'")
        assert "<img" not in client_of(f"sqlite:///{copy}").get(path).text


class TestTrials:
    def test_all_are_shown_the_newest_first(self, pages: TestClient, searched: str) -> None:
        with open_store(searched, write=False) as store:
            numbers = [trial.number for trial in store.trials.of("task")]
        text = pages.get("/studies/task/trials").text
        places = [text.index(f'href="/studies/task/trials/{number}"') for number in numbers]
        assert places == sorted(places, reverse=True)

    def test_they_are_those_of_a_phase_a_state_and_a_batch_size(self, pages: TestClient, searched: str) -> None:
        with open_store(searched, write=False) as store:
            trials = store.trials.of("task")
        one = trials[0]
        size = one.configuration.batch_size
        asked = {"phase": one.phase.value, "state": one.state.value, "batch_size": size, "format": "json"}
        expected = [
            trial.number
            for trial in trials
            if (trial.phase, trial.state, trial.configuration.batch_size) == (one.phase, one.state, size)
        ]
        assert [row["number"] for row in pages.get("/studies/task/trials", params=asked).json()] == expected
        assert len(expected) < len(trials)

    def test_by_time_the_fastest_comes_first_and_those_without_a_time_last(self, pages: TestClient) -> None:
        rows = pages.get("/studies/task/trials?format=json").json()
        fastest = min((row for row in rows if row["time_to_target_s"]), key=lambda row: row["time_to_target_s"])
        text = pages.get("/studies/task/trials?order=time_to_target_s").text
        assert text.index(f'/trials/{fastest["number"]}"') < min(
            text.index(f'/trials/{row["number"]}"') for row in rows if row is not fastest
        )

    def test_many_are_shown_in_pages_that_lead_on(self, pages: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_one_shows_its_configuration_its_curve_and_how_to_run_it_again(self, pages: TestClient) -> None:
        text = pages.get("/studies/task/trials/1").text
        assert "bssearch trial rerun task 1" in text
        assert "<svg" in text
        assert "learning_rate" in text

    @pytest.mark.parametrize("number", ["0", "9999", "9" * 30, "x", "-1", "1.5", "²"])
    def test_one_that_is_not_there_is_not_found(self, pages: TestClient, number: str) -> None:
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
        asked = re.search(
            r'<a href="(/best[^"]*workload=[^"]*)">[^<]*accuracy ≥ [0-9.]+</a>: (\d+)', pages.get("/best").text
        )
        assert asked is not None
        found = pages.get(html.unescape(asked[1]))
        assert 'id="found"' in found.text
        assert found.text.count('href="/studies/') >= int(asked[2]) > 0

    def test_a_study_starts_with_its_chart(self, pages: TestClient) -> None:
        text = pages.get("/studies/task").text
        places = [text.index(part) for part in ("<h1>Train with batch", "<svg", 'id="headline"', 'id="tiles"')]
        assert places == sorted(places)

    def test_what_all_have_found_is_that_of_the_command(self, pages: TestClient, searched: str, tmp_path: Path) -> None:
        [device] = {row["device"] for row in pages.get("/studies?format=json").json()}
        told = read(tmp_path, "best", "--device", device, "--db", searched)
        assert pages.get("/best", params={"device": device, "format": "json"}).json() == told
        assert "/studies/other" in pages.get("/best", params={"device": device}).text

    @pytest.mark.parametrize("name", ["workload", "device", "target", "objective", "precision"])
    @pytest.mark.slow
    @pytest.mark.parametrize("value", HOSTILE)
    def test_hostile_conditions_are_told_and_escaped(self, pages: TestClient, value: str, name: str) -> None:
        for path in ("/best", "/studies"):
            told = pages.get(path, params={name: value})
            assert told.status_code in {200, 400, 404}
            assert "<script>alert" not in told.text


def test_a_password_that_stands_where_none_belongs_is_not_repeated(pages: TestClient) -> None:
    told = pages.get("/best", params={"workload": "postgresql://anna:hunter2@db/x"})
    assert told.status_code == 404
    assert "anna:***@db" in told.text.partition("<h1>")[2].partition("</h1>")[0]


class TestDatabases:
    def test_of_two_each_study_is_found_in_its_own(self, searched: str, tmp_path: Path) -> None:
        second = f"sqlite:///{tmp_path / 'second.db'}"
        running_study(second, "task", evaluations=1)
        client = client_of(searched, second)
        text = client.get("/studies").text
        assert 'href="/studies/task?db=1"' in text
        assert 'href="/studies/task?db=2"' in text
        assert "No answer yet" in client.get("/studies/task?db=2").text
        assert "No answer yet" not in client.get("/studies/task?db=1").text
        assert client.get("/studies/task").status_code == 400  # in both
        assert 'href="/studies/task/trials?db=2"' in client.get("/studies/task?db=2").text
        assert client.get("/compare?study=1:task&study=2:task").status_code == 200

    def test_one_that_vanishes_is_told_and_one_that_is_back_is_shown(self, copy: Path) -> None:
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

    def test_one_that_is_no_database_is_told(self, copy: Path) -> None:
        client = client_of(f"sqlite:///{copy}")
        copy.write_bytes(b"x" * 4096)
        assert client.get("/studies").status_code == 503

    def test_a_row_that_nobody_of_ours_wrote_is_told(self, copy: Path) -> None:
        execute(copy, "UPDATE bss_trial SET parameters = '[1' WHERE number = 3")
        faulty = client_of(f"sqlite:///{copy}").get("/studies/task/trials")
        assert faulty.status_code == 503
        assert "trial 3: parameters" in faulty.text

    def test_looking_writes_nothing_to_a_file_that_nobody_may_write(self, searched: str, tmp_path: Path) -> None:
        folder = tmp_path / "team"
        folder.mkdir()
        copy = folder / "copy.db"
        shutil.copy(searched.removeprefix("sqlite:///"), copy)
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
    def test_a_server_is_asked_in_transactions_that_cannot_write(self, postgres: Postgres, tmp_path: Path) -> None:
        url = postgres.create_database()
        make_study(url, tmp_path, "task")
        assert client_of(url).get("/studies/task").status_code == 200
        with (
            open_store(url, write=False) as store,
            pytest.raises(DatabaseError, match="read-only transaction"),
            store.reading() as connection,
        ):
            connection.exec_driver_sql("DELETE FROM bss_study")


def test_who_asks_while_too_many_wait_is_told_to_come_again(searched: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert "come again in a moment" in refused.text
        assert pages.get("/studies").status_code == 200
