"""Turns: a thread that has locked a study chooses on all that is stored, and nobody is faster."""

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from bssearch.storage import database
from bssearch.storage.repository import Store, open_store
from tests.factories import make_curve
from tests.postgres import Postgres
from tests.storage.conftest import add_study, start, start_after


@pytest.fixture
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2)


def waits(start: Future[int | None]) -> bool:
    """Return whether a start is not done after a while."""
    threading.Event().wait(0.3)
    return not start.done()


def test_who_starts_in_its_turn_is_the_first_and_others_have_been_slower(
    store: Store, url: str, pool: ThreadPoolExecutor
) -> None:
    add_study(store)
    with open_store(url) as other:
        with store.turn("toy"):
            others = pool.submit(start_after, other, 0, "b")
            assert waits(others)
            assert [trial.number for trial in store.trials.of("toy")] == []
            assert start_after(store, 0, "a") == 1
            assert others.result() is None, "the start has ended the turn"
        assert start_after(other, 1, "b") == 2
    assert [trial.lease_owner for trial in store.trials.of("toy")] == ["a", "b"]


def test_a_turn_in_which_nothing_starts_leaves_the_study_to_others(
    store: Store, url: str, pool: ThreadPoolExecutor
) -> None:
    add_study(store)
    with open_store(url) as other:
        with pytest.raises(RuntimeError, match="on purpose"), store.turn("toy"):
            others = pool.submit(start_after, other, 0, "b")
            assert waits(others)
            raise RuntimeError("on purpose")
        assert others.result() == 1


def test_turns_of_one_store_are_those_of_its_threads(store: Store, pool: ThreadPoolExecutor) -> None:
    add_study(store)
    with store.turn("toy"):
        others = pool.submit(start_after, store, 0, "another thread")
        assert waits(others)
        assert start_after(store, 0, "a") == 1
    assert others.result() is None


DIES_IN_ITS_TURN = """
import os, sys
from bssearch.storage.repository import open_store
with open_store(sys.argv[1]) as store, store.turn("toy"):
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_who_is_killed_in_its_turn_is_waited_for_no_longer(store: Store, url: str) -> None:
    add_study(store)
    killed = subprocess.run([sys.executable, "-c", DIES_IN_ITS_TURN, url], cwd=Path.cwd(), check=False)
    assert killed.returncode == -9
    assert start_after(store, 0, "a") == 1


def test_who_hangs_in_its_turn_loses_it_to_others_and_sees_what_they_have_started(
    own_postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_postgres.create_database()
    with open_store(url) as store, open_store(url) as other:
        add_study(store)
        monkeypatch.setattr(database, "LONGEST_TURN_SECONDS", 0.2)
        with store.turn("toy"):
            assert start_after(other, 0, "b") == 1
            assert [trial.number for trial in store.trials.of("toy")] == [1]
            assert start_after(store, 0, "a") is None
        with store.turn("toy"):
            threading.Event().wait(0.5)
            assert start_after(store, 1, "a") == 2
        with store.turn("toy"):
            threading.Event().wait(0.5)


WRITES: dict[str, Callable[[Store], object]] = {
    "a heartbeat": lambda store: store.leases.heartbeat("toy", "suspended", 60.0),
    "observations": lambda store: store.trials.append_observations(
        "toy", [(1, one) for one in make_curve((0.0, 0.1))], owner="suspended"
    ),
    "a log": lambda store: store.trials.save_log("toy", 1, "text", owner="suspended"),
    "a start": lambda store: start_after(store, 1, "suspended"),
    "a shift": lambda store: store.queue.begin_shift("suspended", {"toy"}),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=[*WRITES])
def test_who_hangs_in_a_write_blocks_nobody_for_long(
    write: Callable[[Store], object], own_postgres: Postgres, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    own_postgres.start_if_stopped()
    url = own_postgres.cleared_database()
    hangs, goes_on = threading.Event(), threading.Event()
    with open_store(url) as store, open_store(url) as other:
        add_study(store)
        start(store, lease_owner="suspended")

        def hang(*_: object) -> None:
            if threading.current_thread() is not threading.main_thread() and not hangs.is_set():
                hangs.set()
                goes_on.wait()

        monkeypatch.setattr(database, "LONGEST_TURN_SECONDS", 0.2)
        event.listen(Engine, "commit", hang)
        try:
            suspended = pool.submit(write, store)
            assert hangs.wait(60)
            monkeypatch.setattr(database, "LONGEST_TURN_SECONDS", 60.0)
            others = ThreadPoolExecutor(1).submit(
                lambda: (
                    other.leases.mark_lost("toy", is_alive=lambda _: False),
                    other.queue.begin_shift("other", {"toy"}),
                )
            )
            assert others.result(timeout=60) == ([1], None)
        finally:
            goes_on.set()
            suspended.result(timeout=60)
            event.remove(Engine, "commit", hang)
        assert store.trials.observations("toy", 1) == [], "its lease was lost meanwhile"
        assert store.trials.log("toy", 1) is None
