"""The stored queue on every database: order, states and rights."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from bssearch import DatabaseError, NotFoundError, Store, UsageError, open_store
from bssearch.spec.templates import NewSubmission, SubmissionState, WorkerRecord
from bssearch.storage import migrate
from bssearch.storage.connection.engine import ConnectionLostError
from bssearch.storage.migrate import Roles
from tests.postgres import Postgres
from tests.storage.conftest import add_study


def new(name: str, **changes: Any) -> NewSubmission:
    return NewSubmission(
        **{"name": name, "template": "digits", "values": {"budget.trials": 4}, "owner": "ann", **changes}
    )


def record(name: str = "worker", **changes: Any) -> WorkerRecord:
    values: dict[str, Any] = {
        "name": name,
        "user": "ann",
        "host": "node-1",
        "tags": ("gpu:h200",),
        "slots": "auto",
        "device_name": None,
        "templates": {"digits": {"budget.trials": {"type": "integer", "low": 1.0, "high": 9.0}}},
        "seen_at": datetime.now(UTC),
        "left_at": None,
        "serving": None,
        "serving_since": None,
        "is_here": True,
    }
    return WorkerRecord(**{**values, **changes})


def served(store: Store, worker: str, names: set[str], *, used: float) -> str | None:
    """Serve the next submission for one shift; return its name."""
    one = store.queue.begin_shift(worker, names)
    store.queue.end_shift(worker, used)
    return None if one is None else one.name


def test_a_submission_is_stored_as_it_was_made(store: Store) -> None:
    moment = datetime(2026, 12, 1, 8, 30, tzinfo=UTC)
    values = {"budget.trials": 4, "space.batch_size": [8, 16], "target.value": 0.97, "training.compile": True}
    found = store.queue.submit(new("toy", values=values, priority=2.5, tags=("gpu:h200", "fast"), not_before=moment))
    assert store.queue.submissions() == [found]
    assert {name: getattr(found, name) for name in ("values", "priority", "tags", "not_before", "owner")} == {
        "values": values,
        "priority": 2.5,
        "tags": ("gpu:h200", "fast"),
        "not_before": moment,
        "owner": "ann",
    }
    assert (found.state, found.served_seconds) == (SubmissionState.WAITING, 0.0)


def test_a_name_is_given_once_among_submissions_and_studies(store: Store) -> None:
    store.queue.submit(new("toy"))
    with pytest.raises(UsageError, match="'toy' was already submitted by ann from the template digits and is waiting"):
        store.queue.submit(new("toy", owner="bob"))
    add_study(store, "stored")
    with pytest.raises(UsageError, match="study 'stored' already exists"):
        store.queue.submit(new("stored"))
    with pytest.raises(UsageError, match="invalid study name 'no name'"):
        store.queue.submit(new("no name"))


@pytest.fixture
def worker(store: Store) -> None:
    """A registered worker."""
    store.queue.keep_worker(record())


@pytest.mark.usefixtures("worker")
def test_the_highest_priority_comes_first_then_the_oldest(store: Store) -> None:
    for name, owner, priority in (("old", "ann", 1.0), ("first", "ann", 3.0), ("new", "bob", 1.0), ("next", "cy", 3.0)):
        store.queue.submit(new(name, owner=owner, priority=priority))
    assert store.queue.waiting() == ["first", "next", "old", "new"]
    names = {"old", "first", "new", "next"}
    order = []
    while (one := store.queue.begin_shift("worker", names)) is not None:
        store.queue.end_shift("worker", 10.0, SubmissionState.DONE, "found")
        order.append(one.name)
    assert order == ["first", "next", "old", "new"]
    assert {one.name: one.served_seconds for one in store.queue.submissions()} == dict.fromkeys(names, 10.0)


@pytest.mark.slow
def test_workers_that_choose_together_lose_no_served_seconds(url: str) -> None:
    with open_store(url) as store:
        store.queue.submit(new("one"))

        def serve(number: int) -> None:
            with open_store(url) as own:
                own.queue.keep_worker(record(f"worker-{number}"))
                assert {served(own, f"worker-{number}", {"one"}, used=10.0) for _ in range(8)} == {"one"}

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(serve, range(4)))
        assert store.queue.submission("one").served_seconds == 320.0


@pytest.mark.usefixtures("worker")
def test_a_shift_goes_on_until_a_higher_priority_is_queued(store: Store) -> None:
    store.queue.submit(new("one"))
    assert store.queue.begin_shift("worker", {"one"}) is not None
    store.queue.submit(new("two", owner="bob"))
    assert store.queue.renew_shift("worker", {"one", "two"}, used=10.0)
    store.queue.submit(new("three", priority=2.0))
    assert store.queue.renew_shift("worker", {"one", "two"}, used=10.0), "this worker may not serve it"
    assert not store.queue.renew_shift("worker", {"one", "two", "three"}, used=10.0)
    store.queue.end_shift("worker", 5.0)
    assert [one.served_seconds for one in store.queue.submissions()] == [35.0, 0.0, 0.0]
    assert served(store, "worker", {"one", "two", "three"}, used=10.0) == "three"


@pytest.mark.usefixtures("worker")
def test_a_worker_that_asks_again_gets_the_same_study(store: Store) -> None:
    for name in ("one", "two"):
        store.queue.submit(new(name, owner=name))
    first = store.queue.begin_shift("worker", {"one", "two"})
    again = store.queue.begin_shift("worker", {"one", "two"})
    assert first is not None and again is not None and first.name == again.name
    store.queue.end_shift("worker", 1.0)
    store.queue.end_shift("worker", 1.0)
    assert sum(one.served_seconds for one in store.queue.submissions()) == 1.0


@pytest.mark.usefixtures("worker")
def test_a_worker_whose_shift_s_end_was_lost_goes_on_with_others(store: Store) -> None:
    for name in ("one", "two"):
        store.queue.submit(new(name, owner=name))
    assert store.queue.begin_shift("worker", {"one"}) is not None
    store.queue.set_state("one", SubmissionState.PAUSED, "by me")
    assert served(store, "worker", {"one", "two"}, used=4.0) == "two"
    assert store.queue.begin_shift("worker", {"two"}) is not None
    store.queue.set_state("two", SubmissionState.CANCELLED, "by me")
    assert store.queue.begin_shift("worker", {"one", "two"}) is None
    assert [one.serving for one in store.queue.workers()] == [None]


@pytest.mark.usefixtures("worker")
def test_no_choice_comes_before_its_moment(store: Store) -> None:
    store.queue.submit(new("later", not_before=datetime.now(UTC) + timedelta(hours=1)))
    store.queue.submit(new("now", not_before=datetime.now(UTC) - timedelta(hours=1)))
    assert [served(store, "worker", {"later", "now"}, used=1.0) for _ in range(2)] == ["now", "now"]
    assert store.queue.waiting() == ["now"]


@pytest.mark.usefixtures("worker")
def test_states_change_as_a_person_and_a_worker_may_change_them(store: Store) -> None:
    store.queue.submit(new("one"))
    assert store.queue.set_state("one", SubmissionState.PAUSED, "by me").reason == "by me"
    assert served(store, "worker", {"one"}, used=1.0) is None
    store.queue.set_state("one", SubmissionState.WAITING, "")
    assert store.queue.begin_shift("worker", {"one"}) is not None
    store.queue.set_state("one", SubmissionState.CANCELLED, "by me")
    store.queue.end_shift("worker", 1.0, SubmissionState.DONE, "found")  # too late
    assert store.queue.submission("one").state is SubmissionState.CANCELLED
    store.queue.set_state("one", SubmissionState.WAITING, "")
    store.queue.begin_shift("worker", {"one"})
    store.queue.end_shift("worker", 1.0, SubmissionState.DONE, "found")
    ended = store.queue.submission("one")
    assert (ended.state, ended.reason) == (SubmissionState.DONE, "found")
    with pytest.raises(UsageError, match="'one' is done and cannot become waiting"):
        store.queue.set_state("one", SubmissionState.WAITING, "")
    with pytest.raises(NotFoundError, match="no submission 'other'") as caught:
        store.queue.submission("other")
    assert caught.value.hint == "choose from the latest submissions: one"


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("priority", float("nan")),
        ("priority", float("inf")),
        ("priority", 5e-324),
        ("served_seconds", float("inf")),
        ("not_before", "infinity"),
        ("submitted_at", "-infinity"),
        ("values", '{"budget.trials": 1e400}'),
        ("values", '{"budget.trials": "\\ud800"}'),
    ],
)
def test_a_faulty_row_does_not_keep_a_worker_from_the_next_study(store: Store, column: str, value: object) -> None:
    store.queue.submit(new("odd", owner="eve"))
    is_refused = value != value and store.masked_url.startswith("sqlite")  # which makes NULL of it
    refused = pytest.raises(DatabaseError, match="NOT NULL") if is_refused else nullcontext()
    with refused, store.writing() as connection:
        connection.execute(text(f'UPDATE bss_submission SET "{column}" = :value'), {"value": value})
    with pytest.raises(UsageError, match=r"'odd' was already submitted( by eve|$)"):
        store.queue.submit(new("odd", owner="ann"))
    for name, owner in (("a", "ann"), ("of-eve", "eve")):
        store.queue.submit(new(name, owner=owner))
    names = {"odd", "a", "of-eve"}
    while (one := store.queue.begin_shift("worker", names)) is not None:
        store.queue.end_shift("worker", 10.0)
        names.remove(one.name)
    assert names <= {"odd"}
    assert "a" in [one.name for one in store.queue.submissions()]


def test_a_retried_submission_is_not_mistaken_for_an_earlier_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.queue.submit(new("mine"))
    store.queue.submit(new("theirs", owner="bob"))
    store.queue.set_state("mine", SubmissionState.CANCELLED, "")
    lost: list[bool] = []
    writing = store.writing

    def fails_once() -> Any:
        if not lost:
            lost.append(True)
            raise ConnectionLostError("the server is away")
        return writing()

    monkeypatch.setattr(store, "writing", fails_once)
    assert store.queue.submit(new("mine", values={"budget.trials": 8})).values == {"budget.trials": 8}
    lost.clear()
    with pytest.raises(UsageError, match="'theirs' was already submitted by bob"):
        store.queue.submit(new("theirs"))


def test_a_worker_whose_moments_something_else_has_written_hides_no_other(store: Store) -> None:
    for name in ("odd", "worker"):
        store.queue.keep_worker(record(name))
    with store.writing() as connection:
        connection.execute(text("UPDATE bss_worker SET seen_at = :value WHERE name = 'odd'"), {"value": "infinity"})
    assert [one.name for one in store.queue.workers()] == ["worker"]


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("templates", ["[1, 2]", "null", '"digits"', '{"digits": {"seed": {"choices": [1e400]}}}'])
def test_a_worker_with_a_faulty_row_offers_no_slots(store: Store, templates: str) -> None:
    with store.writing() as connection:
        connection.execute(text("UPDATE bss_worker SET templates = :value"), {"value": templates})
    assert [one.templates for one in store.queue.workers()] == [{}]


@pytest.mark.usefixtures("worker")
def test_a_worker_is_here_until_it_leaves_or_is_not_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.queue.keep_worker(record(device_name="H200"))
    [found] = store.queue.workers()
    assert (found.is_here, found.device_name, found.tags) == (True, "H200", ("gpu:h200",))
    assert found.templates == record().templates
    store.queue.beat("worker", left=True)
    assert [one.is_here for one in store.queue.workers()] == [False]
    store.queue.beat("worker")  # a beat that was late
    assert [one.is_here for one in store.queue.workers()] == [False]
    store.queue.keep_worker(record())
    assert [one.is_here for one in store.queue.workers()] == [True]
    monkeypatch.setattr("bssearch.storage.queue.SEEN_WITHIN_S", -1.0)
    assert [one.is_here for one in store.queue.workers()] == [False]
    monkeypatch.setattr("bssearch.storage.queue.FORGOTTEN_AFTER", timedelta(seconds=-1))
    store.queue.keep_worker(record("new"))
    assert [one.name for one in store.queue.workers()] == []


def test_a_shift_does_not_end_a_submission_made_again_since_it_began(store: Store) -> None:
    store.queue.submit(new("one"))
    store.queue.keep_worker(record())
    store.queue.begin_shift("worker", {"one"})
    store.queue.set_state("one", SubmissionState.CANCELLED, "")
    time.sleep(0.01)  # SQLite's clock counts milliseconds
    store.queue.submit(new("one", values={"budget.trials": 9}))
    assert not store.queue.renew_shift("worker", {"one"}, 2.0)
    store.queue.end_shift("worker", 1.0, SubmissionState.DONE, "the answer to what was asked before")
    found = store.queue.submission("one")
    assert (found.state, found.reason, found.served_seconds) == (SubmissionState.WAITING, "", 3.0)
    assert store.queue.begin_shift("worker", {"one"}) is not None
    store.queue.end_shift("worker", 1.0, SubmissionState.DONE, "found")
    assert store.queue.submission("one").state is SubmissionState.DONE


def test_a_queued_study_cannot_be_renamed_and_a_finished_one_can(store: Store) -> None:
    store.queue.submit(new("toy"))
    store.queue.submit(new("taken"))
    add_study(store, "toy")
    for state in (SubmissionState.WAITING, SubmissionState.PAUSED):
        store.queue.set_state("toy", state, "")
        refused = f"because the submission is {state}"
        with pytest.raises(UsageError, match=refused):
            store.studies.rename("toy", "other")
        with pytest.raises(UsageError, match=refused):
            store.studies.archive("toy")
        with pytest.raises(UsageError, match=refused):
            store.studies.delete("toy")
    store.queue.set_state("toy", SubmissionState.CANCELLED, "")
    with pytest.raises(UsageError, match="'taken' is already in the queue"):
        store.studies.rename("toy", "taken")
    store.studies.rename("toy", "other")
    store.studies.archive("other")
    assert [one.name for one in store.queue.submissions()] == ["other", "taken"]
    store.studies.delete("other")
    assert [one.name for one in store.queue.submissions()] == ["taken"]


class TestLogins:
    """On a server, a submission belongs to its login; any worker may serve it."""

    @pytest.fixture
    def team(self, postgres: Postgres) -> str:
        url = postgres.create_database()
        migrate.upgrade(url, Roles("queuing"))
        for login, role in (("una", "writer"), ("ugo", "writer"), ("uma", "owner")):
            postgres.execute(
                f"DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{login}') "
                f"THEN CREATE ROLE {login} LOGIN; END IF; END $$",
                f"GRANT queuing_{role} TO {login}",
            )
        return url

    def as_login(self, team: str, login: str) -> Store:
        return open_store(team.replace("postgres@", f"{login}@"))

    def test_another_login_serves_it_and_cannot_change_it(self, team: str) -> None:
        with self.as_login(team, "una") as una, self.as_login(team, "ugo") as ugo, self.as_login(team, "uma") as uma:
            assert una.queue.submit(new("one")).login == "una"
            ugo.queue.keep_worker(record())
            assert served(ugo, "worker", {"one"}, used=3.0) == "one"
            for state in (SubmissionState.PAUSED, SubmissionState.CANCELLED):
                with pytest.raises(DatabaseError, match=r"'one' may be cancelled, paused, .* by una, who submitted it"):
                    ugo.queue.set_state("one", state, "")
            uma.queue.set_state("one", SubmissionState.PAUSED, "")
            with pytest.raises(DatabaseError, match="may be cancelled"):
                ugo.queue.set_state("one", SubmissionState.WAITING, "")
            una.queue.set_state("one", SubmissionState.WAITING, "")
            ugo.queue.begin_shift("worker", {"one"})
            ugo.queue.end_shift("worker", 1.0, SubmissionState.FAILED, "its values are wrong")
            assert una.queue.submission("one").state is SubmissionState.FAILED

    @pytest.mark.parametrize("column", ["template", "owner", "priority", "login", "values"])
    def test_only_an_owner_changes_a_submission(self, team: str, postgres: Postgres, column: str) -> None:
        import psycopg

        with self.as_login(team, "una") as una:
            una.queue.submit(new("one"))
        database = team.partition("@/")[2].partition("?")[0]
        with (
            pytest.raises(psycopg.errors.InsufficientPrivilege),
            psycopg.connect(f"host={postgres.folder} user=una dbname={database}") as connection,
        ):
            connection.execute(f'UPDATE bss_submission SET "{column}" = "{column}"'.encode())
