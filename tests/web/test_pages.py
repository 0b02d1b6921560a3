"""Pages of a database, also of a missing, faulty or foreign database."""

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

from bssearch import DatabaseError, TargetNotReachedError, open_store
from bssearch.commands.trials import status
from bssearch.figures.svg import ACCENT
from bssearch.records import Lease
from bssearch.records.text import number as in_digits
from bssearch.search.finding import answer
from bssearch.settings import DATABASE_URL_VARIABLE
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
        assert "<svg" in text

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
        for part in ("bssearch trial rerun task 1", "<svg", "learning_rate"):
            assert part in text

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
