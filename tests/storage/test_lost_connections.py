"""A PostgreSQL server that stops during a study or rejects the URL; no message shows the password."""

import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
from sqlalchemy import Connection, event

from bssearch import DatabaseError, NotFoundError, Store, UsageError, open_store
from bssearch.records import TrialOutcome, TrialState
from bssearch.spec.templates import SubmissionState
from bssearch.storage import database as patience, migrate, trials
from bssearch.storage.connection.engine import SERVER_OPTIONS
from tests.factories import make_curve, make_environment, make_probe, not_none
from tests.postgres import SECURED, Postgres
from tests.storage.conftest import add_study, begun, enqueue, start, start_after, start_queued, store_in
from tests.storage.test_queue import new
from tests.waiting import wait_for

ENDED = TrialOutcome(state=TrialState.CANCELLED, reason="stopped")


@pytest.fixture
def url(own_postgres: Postgres) -> str:
    own_postgres.start_if_stopped()
    return own_postgres.cleared_database()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def store(url: str, told: list[str]) -> Iterator[Store]:
    with open_store(url, notify=told.append) as opened:
        yield opened


@pytest.mark.usefixtures("toy")
def test_a_restart_between_two_calls_goes_unnoticed(store: Store, told: list[str], own_postgres: Postgres) -> None:
    own_postgres.restart()
    assert start(store) == 1
    assert told == []


@pytest.mark.usefixtures("toy")
@pytest.mark.slow
def test_all_threads_wait_for_a_missing_server_with_one_notice(
    store: Store, told: list[str], own_postgres: Postgres
) -> None:
    own_postgres.stop()
    failed: set[int] = set()
    event.listen(store._engine, "handle_error", lambda context: failed.add(threading.get_ident()))
    calls: list[Callable[[], object]] = [
        lambda: start(store),
        lambda: store.leases.heartbeat("toy", "driver", 60.0),
        lambda: store.trials.of("toy"),
    ]
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(call) for call in calls]
        wait_for(lambda: told and len(failed) == len(calls))
        assert (store.patience.is_waiting, any(one.done() for one in asked)) == (True, False)
        own_postgres.start()
        for one in asked:
            one.result()
    assert not store.patience.is_waiting
    assert [trial.number for trial in store.trials.of("toy")] == [1]
    lost, back = told
    assert "cannot be reached" in lost or "the connection was lost" in lost  # a kept connection is lost first
    assert lost.endswith("retrying for up to 15 minutes")
    assert back == f"the connection to {store.masked_url} is back"
    assert "\n" not in lost + back


@pytest.mark.usefixtures("toy")
@pytest.mark.slow
def test_a_server_that_stays_away_is_given_up(
    store: Store, told: list[str], own_postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_postgres.stop()
    monkeypatch.setattr(patience, "RETRY_FOR_S", 0.5)
    with pytest.raises(DatabaseError, match=r"cannot be reached.*retried"):
        start(store)
    assert len(told) == 1


def test_opening_and_reading_do_not_wait(url: str, told: list[str], own_postgres: Postgres) -> None:
    with open_store(url, write=False, notify=told.append) as reader:
        own_postgres.stop()
        for call in (
            lambda: open_store(url, notify=told.append),
            lambda: open_store(url, write=False),
            reader.studies.summaries,
        ):
            with pytest.raises(DatabaseError, match=r"cannot be reached|connection was lost"):
                call()
    assert told == []


@pytest.mark.slow
def test_an_answer_of_the_server_that_is_back_is_not_waited_for(
    store: Store, told: list[str], own_postgres: Postgres
) -> None:
    own_postgres.stop()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(store.trials.of, "nix")
        wait_for(lambda: told)
        own_postgres.start()
        with pytest.raises(NotFoundError):
            asked.result()
    assert len(told) == 2


@pytest.mark.usefixtures("toy")
@pytest.mark.slow
def test_ctrl_c_arrives_and_later_calls_do_not_wait(store: Store, own_postgres: Postgres) -> None:
    own_postgres.stop()

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            start(store)
    finally:
        signal.signal(signal.SIGALRM, previous)
    with pytest.raises(DatabaseError, match="cannot be reached"):
        start(store)


def test_closing_ends_the_wait_of_another_thread(url: str, told: list[str], own_postgres: Postgres) -> None:
    store = open_store(url, notify=told.append)
    own_postgres.stop()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(store.studies.summaries)
        wait_for(lambda: told)
        store.close()
        with pytest.raises(DatabaseError, match="; stopped retrying"):
            asked.result()


def test_a_restart_gives_every_lease_a_while_to_be_renewed(
    store: Store, own_postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(store, lease_owner="a", lease_seconds=-5.0)
    start(store, lease_owner="gone", lease_seconds=-5.0)
    store.leases.claim("toy", "probe", owner="a", lease_seconds=-5.0, is_alive=lambda owner: None)
    own_postgres.restart()
    monkeypatch.setattr(trials, "RESTART_GRACE_S", 60.0)
    assert store.leases.mark_lost("toy", is_alive={"gone": False}.get) == [2]
    assert not store.leases.claim("toy", "probe", owner="b", lease_seconds=60.0, is_alive=lambda owner: None)
    monkeypatch.setattr(trials, "RESTART_GRACE_S", 0.0)
    assert store.leases.mark_lost("toy", is_alive=lambda owner: None) == [1]
    assert store.leases.claim("toy", "probe", owner="b", lease_seconds=60.0, is_alive=lambda owner: None)


def _break_after_commit(store: Store, postgres: Postgres, meanwhile: Callable[[], object] = lambda: None) -> list[str]:
    """Commit the next writing transaction, then cut its connection before the client is informed."""
    cut: list[str] = []

    def commit_and_cut(connection: Connection) -> None:
        if cut or not connection.get_execution_options().get("bss_writes"):
            return
        process = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        raw: Any = connection.connection.dbapi_connection
        raw.commit()
        cut.append(str(process))
        postgres.execute(f"SELECT pg_terminate_backend({process}, 5000)")
        meanwhile()
        connection.exec_driver_sql("SELECT 1")

    event.listen(store._engine, "commit", commit_and_cut)
    return cut


def _numbers(store: Store) -> list[int]:
    return [trial.number for trial in store.trials.of("toy")]


CURVE = make_curve((0.0, 0.1), (1.0, 0.5))
AGAIN: dict[str, tuple[Callable[[Store], object], object, Callable[[Store], object], object]] = {
    "start": (start, 3, _numbers, [1, 2, 3]),
    "start after": (lambda store: start_after(store, 2, "me"), 3, _numbers, [1, 2, 3]),
    "enqueue": (enqueue, 3, _numbers, [1, 2, 3]),
    "start queued": (
        lambda store: start_queued(store, 2, "me"),
        True,
        lambda s: s.trials.get("toy", 2).lease_owner,
        "me",
    ),
    "append": (
        lambda store: store.trials.append_observations("toy", [(1, one) for one in CURVE]),
        frozenset(),
        lambda store: store.trials.observations("toy", 1),
        CURVE,
    ),
    "finish": (
        lambda store: store.trials.finish("toy", 1, ENDED, steps_x_step_time_s=None).outcome,
        ENDED,
        lambda store: store.trials.get("toy", 1).outcome,
        ENDED,
    ),
    "claim": (
        lambda store: store.leases.claim("toy", "probe", owner="me", lease_seconds=60.0, is_alive=lambda owner: None),
        True,
        lambda store: store.leases.claim("toy", "probe", owner="you", lease_seconds=60.0, is_alive=lambda owner: None),
        False,
    ),
    "create": (lambda store: add_study(store, "new").name, "new", lambda store: len(store.studies.summaries()), 2),
    "probe": (
        lambda store: store.probes.add_step_time("toy", make_environment(), make_probe(8)),
        1,
        lambda store: [(one.visit, one.batch_size) for one in store.probes.visits("toy")],
        [(1, 8)],
    ),
    "log": (
        lambda store: store.trials.save_log("toy", 1, "text"),
        None,
        lambda store: store.trials.log("toy", 1),
        "text",
    ),
    "mark lost": (
        lambda store: store.leases.mark_lost("toy", is_alive=lambda owner: False),
        [],  # they were marked by the first try
        lambda store: store.trials.get("toy", 1).state,
        TrialState.LOST,
    ),
    "rename": (
        lambda store: store.studies.rename("idle", "renamed"),
        None,
        lambda store: [study.name for study in store.studies.summaries()],
        ["toy", "renamed"],
    ),
    "rename a study that was queued": (
        lambda store: store.studies.rename("idle", "renamed"),
        None,
        lambda store: [submission.name for submission in store.queue.submissions()],
        ["renamed"],
    ),
    "submit": (
        lambda store: store.queue.submit(new("mine")).state,
        SubmissionState.WAITING,
        lambda store: [(one.name, one.state) for one in store.queue.submissions()],
        [("mine", SubmissionState.WAITING)],
    ),
    "submit again": (
        lambda store: store.queue.submit(new("over", values={"budget.trials": 9})).values,
        {"budget.trials": 9},
        lambda store: [(one.name, one.state, one.values) for one in store.queue.submissions()],
        [("over", SubmissionState.WAITING, {"budget.trials": 9})],
    ),
    "delete": (
        lambda store: store.studies.delete("idle"),
        None,
        lambda store: [study.name for study in store.studies.summaries()],
        ["toy"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["ann", "bert"])
def test_only_the_owner_submits_a_finished_study_again_once_the_server_is_back(
    store: Store, told: list[str], own_postgres: Postgres, owner: str
) -> None:
    store.queue.submit(new("mine"))
    store.queue.set_state("mine", SubmissionState.CANCELLED, "")
    own_postgres.stop()
    with ThreadPoolExecutor() as pool:
        submitted = pool.submit(store.queue.submit, new("mine", owner=owner, values={"budget.trials": 9}))
        wait_for(lambda: told)
        own_postgres.start()
        with nullcontext() if owner == "ann" else pytest.raises(UsageError, match="already submitted by ann"):
            assert submitted.result().state is SubmissionState.WAITING
    assert store.queue.submission("mine").values == {"budget.trials": 9 if owner == "ann" else 4}


@pytest.mark.parametrize("what", AGAIN)
def test_a_commit_before_the_connection_broke_is_not_repeated(
    store: Store, told: list[str], own_postgres: Postgres, what: str
) -> None:
    do, returned, look, seen = AGAIN[what]
    begun(store)
    enqueue(store)
    if what == "rename a study that was queued":
        store.queue.submit(new("idle"))
        store.queue.set_state("idle", SubmissionState.CANCELLED, "")
    if what.startswith(("rename", "delete")):
        add_study(store, "idle")
    if what == "submit again":
        store.queue.submit(new("over"))
        store.queue.set_state("over", SubmissionState.CANCELLED, "")
    cut = _break_after_commit(store, own_postgres)
    assert do(store) == returned
    assert len(cut) == 1
    assert look(store) == seen
    assert len(told) == 2


@pytest.mark.usefixtures("toy")
def test_a_committed_start_is_recognised_although_others_started_since(
    store: Store, url: str, own_postgres: Postgres
) -> None:
    with open_store(url) as other:
        _break_after_commit(store, own_postgres, meanwhile=lambda: start_after(other, 1, "you"))
        assert start_after(store, 0, "me") == 1
    assert [trial.lease_owner for trial in store.trials.of("toy")] == ["me", "you"]


@pytest.mark.usefixtures("toy")
@pytest.mark.slow
def test_a_second_try_takes_turns_as_the_first_did(store: Store, url: str, own_postgres: Postgres) -> None:
    with open_store(url) as other:
        entered, left = threading.Event(), threading.Event()

        def hold(connection: Connection, study_id: int) -> None:
            entered.set()
            time.sleep(1.5)  # longer than the pause before a second try
            left.set()

        cut = _break_after_commit(store, own_postgres, meanwhile=entered.wait)
        holder = threading.Thread(target=lambda: other.on_study("toy", hold))
        tries: list[bool] = []

        def work(connection: Connection, study_id: int) -> None:
            tries.append(left.is_set())
            if not cut:
                holder.start()

        store.on_study("toy", work)
        holder.join()
    assert tries == [False, True]


PASSWORD = "s3cr%40t"  # in a URL; the password itself is s3cr@t
SECRETS = ("s3cr%40t", "s3cr@t")


def _refused(call: Callable[[], object]) -> DatabaseError:
    """The error of a call, after a check that no text shows the password."""
    with pytest.raises(DatabaseError) as caught:
        call()
    error = caught.value
    shown = "".join([str(error), repr(error), str(error.hint), *traceback.format_exception(error)])
    # The test's own lines are shown in a traceback, but they name a constant.
    assert not [secret for secret in SECRETS if secret in shown]
    assert error.exit_code == 4
    assert "\n" not in str(error)
    return error


@pytest.fixture(scope="module")
def role(postgres: Postgres) -> str:
    postgres.execute("CREATE ROLE alice LOGIN PASSWORD 's3cr@t'")
    return "alice"


def _with_password(url: str, role: str) -> str:
    return url.replace("postgres@", f"{role}:{PASSWORD}@")


@pytest.mark.parametrize("write", [True, False])
def test_an_unknown_database_is_named(postgres: Postgres, role: str, write: bool) -> None:
    url = _with_password(postgres.url("nowhere"), role)
    assert 'database "nowhere" does not exist' in str(_refused(lambda: open_store(url, write=write)))


def test_an_unknown_user_is_named(postgres: Postgres) -> None:
    url = _with_password(postgres.create_database(), "bob")
    assert 'role "bob" does not exist' in str(_refused(lambda: open_store(url)))


def test_a_wrong_password_is_refused_and_a_right_one_is_not(postgres: Postgres, role: str) -> None:
    postgres.create_database(SECURED)
    for wrong in (postgres.url(SECURED, user=role, password="s3cr%40t2"), postgres.url(SECURED, user=role)):
        assert "password" in str(_refused(lambda url=wrong: open_store(url)))  # type: ignore[misc]
    right = postgres.url(SECURED, user=role, password=PASSWORD)
    assert "lacks the right" in str(_refused(lambda: open_store(right))), "it was let in"


def test_a_role_without_rights_sees_which_are_missing(postgres: Postgres, role: str) -> None:
    url = _with_password(postgres.create_database(), role)
    error = _refused(lambda: open_store(url))
    assert "the role 'alice' lacks the right SELECT on table bss_alembic_version" in str(error)
    assert not_none(error.hint).endswith('GRANT SELECT ON ALL TABLES IN SCHEMA public TO "alice"'), (
        "to look at it no more"
    )


def test_a_role_that_may_only_read_reads(postgres: Postgres, role: str) -> None:
    url = postgres.create_database()
    database = url.partition("@/")[2].partition("?")[0]
    store_in(url, begun)
    postgres.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO alice", database=database)
    with open_store(_with_password(url, role), write=False) as store:
        assert len(store.trials.of("toy")) == 1
    error = _refused(lambda: open_store(_with_password(url, role)))
    assert "the role 'alice' lacks the right INSERT on table bss_environment" in str(error), "before it runs anything"
    for grant in not_none(error.hint).partition(": ")[2].split("; "):
        postgres.execute(grant, database=database)
    with open_store(_with_password(url, role)) as store:
        add_study(store, "other")
        start(store)
        assert len(store.studies.summaries()) == 2, "the hint is enough to write"


def test_a_role_that_may_not_create_tables_gets_a_message(postgres: Postgres, role: str) -> None:
    url = postgres.create_database(schema=False)
    error = _refused(lambda: migrate.upgrade(_with_password(url, role)))
    assert "the role 'alice' lacks the right CREATE on schema public" in str(error)
    assert 'GRANT USAGE, CREATE ON SCHEMA public TO "alice"' in str(error.hint)


def test_a_role_without_the_schema_right_gets_a_message(postgres: Postgres, role: str) -> None:
    url = postgres.create_database()
    postgres.execute("REVOKE ALL ON SCHEMA public FROM PUBLIC", database=url.partition("@/")[2].partition("?")[0])
    for call in (open_store, migrate.upgrade):
        error = _refused(lambda call=call: call(_with_password(url, role)))  # type: ignore[misc]
        assert "the role 'alice' lacks the right" in str(error)
        assert "on schema public" in str(error)


def test_a_host_without_a_listener_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    error = _refused(lambda: open_store(f"postgresql://alice:{PASSWORD}@127.0.0.1:{port}/runs"))
    assert f"alice:***@127.0.0.1:{port}/runs cannot be reached" in str(error)
    assert "refused" in str(error)


@pytest.mark.slow
def test_a_host_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVER_OPTIONS, "connect_timeout", 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"postgresql://alice:{PASSWORD}@127.0.0.1:{server.getsockname()[1]}/runs"
        assert "cannot be reached" in str(_refused(lambda: open_store(url)))


@pytest.fixture(params=[b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR unknown command\r\n", b"J\x00\x00\x00\x0a8.0.36"])
def stranger(request: pytest.FixtureRequest) -> Iterator[int]:
    """Port of a server with another protocol."""

    def answer(server: socket.socket) -> None:
        try:
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(request.param)
        except OSError:
            return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize("query", ["", "?sslmode=disable"])
def test_a_server_that_is_not_postgresql_is_named_so(stranger: int, query: str) -> None:
    error = _refused(lambda: open_store(f"postgresql://alice:{PASSWORD}@127.0.0.1:{stranger}/runs{query}"))
    assert "is not a PostgreSQL server" in str(error)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere.invalid/runs", "nowhere.invalid/runs cannot be reached"),
        ("127.0.0.1/runs?sslmode=bogus", "bogus"),
        ("127.0.0.1/runs?nosuch=1", "nosuch"),
        (f"127.0.0.1/runs?password={PASSWORD}&sslmode=bogus", "bogus"),
    ],
)
def test_an_unknown_host_or_option_is_named(place: str, said: str) -> None:
    assert said in str(_refused(lambda: open_store(f"postgresql://alice:{PASSWORD}@{place}")))
