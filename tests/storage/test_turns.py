"""Turns: a thread that has locked a study chooses on all that is stored; so do three processes at the same moment."""

import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from bssearch.storage import database
from bssearch.storage.migrate import SCHEMA_HEAD
from bssearch.storage.repository import Store, open_store
from tests.factories import make_curve
from tests.postgres import Postgres
from tests.storage import racer
from tests.storage.conftest import add_study, start, start_after


@pytest.fixture
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2)


def waits(start: Future[int | None]) -> bool:
    """Return whether a start is not done after a while."""
    threading.Event().wait(0.3)
    return not start.done()


@pytest.mark.usefixtures("toy")
def test_who_starts_in_its_turn_is_the_first_and_others_have_been_slower(
    store: Store, url: str, pool: ThreadPoolExecutor
) -> None:
    with open_store(url) as other:
        with store.turn("toy"):
            others = pool.submit(start_after, other, 0, "b")
            assert waits(others)
            assert [trial.number for trial in store.trials.of("toy")] == []
            assert start_after(store, 0, "a") == 1
            assert others.result() is None, "the start has ended the turn"
        assert start_after(other, 1, "b") == 2
    assert [trial.lease_owner for trial in store.trials.of("toy")] == ["a", "b"]


@pytest.mark.usefixtures("toy")
def test_a_turn_in_which_nothing_starts_leaves_the_study_to_others(
    store: Store, url: str, pool: ThreadPoolExecutor
) -> None:
    with open_store(url) as other:
        with pytest.raises(RuntimeError, match="on purpose"), store.turn("toy"):
            others = pool.submit(start_after, other, 0, "b")
            assert waits(others)
            raise RuntimeError("on purpose")
        assert others.result() == 1


@pytest.mark.usefixtures("toy")
def test_turns_of_one_store_are_those_of_its_threads(store: Store, pool: ThreadPoolExecutor) -> None:
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


@pytest.mark.usefixtures("toy")
@pytest.mark.slow
def test_who_is_killed_in_its_turn_is_waited_for_no_longer(store: Store, url: str) -> None:
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


RACERS = 3


@dataclass
class Race:
    url: str
    counted: int
    reports: list[dict[str, Any]]


@pytest.fixture(scope="module", params=[pytest.param("sqlite", marks=pytest.mark.slow), "postgresql"])
def race(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Race:
    """Run all processes, each stage of all at once, and return what they report."""
    folder = tmp_path_factory.mktemp("race")
    url = f"sqlite:///{folder}/runs.db"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").create_database(schema=False)
    counter = folder / "counter"
    counter.write_text("0")
    processes = [_start(url, f"driver-{index}", counter) for index in range(RACERS)]
    try:
        for stage in racer.STAGES:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline().strip() == stage
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
        reports = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return Race(url, int(counter.read_text()), reports)


def _start(url: str, name: str, counter: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-m", "tests.storage.racer", url, name, str(counter)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_one_upgrades_and_the_others_find_it_done(race: Race) -> None:
    assert sorted(str(report["before"]) for report in race.reports) == [*[SCHEMA_HEAD] * (RACERS - 1), "None"]


def test_one_creates_the_study_and_the_others_are_told_so(race: Race) -> None:
    creators = [report["name"] for report in race.reports if report["created"]]
    assert len(creators) == 1
    with open_store(race.url, write=False) as store:
        assert store.studies.get("toy").created_by == creators[0]


def test_a_claim_lets_one_in_at_a_time(race: Race) -> None:
    assert race.counted == RACERS * racer.CLAIMS


def test_no_number_is_given_twice_and_none_is_lost(race: Race) -> None:
    given = {number: report["name"] for report in race.reports for number in report["numbers"]}
    assert sorted(given) == list(range(1, RACERS * racer.STARTS + 1))
    with open_store(race.url, write=False) as store:
        assert {trial.number: trial.lease_owner for trial in store.trials.of("toy")} == given


@pytest.mark.slow
def test_a_new_file_that_another_process_writes_is_waited_for(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("CREATE TABLE elsewhere (number INTEGER)")
        other.execute("BEGIN IMMEDIATE")
        ending = threading.Timer(0.3, lambda: other.execute("COMMIT"))
        ending.start()
        with open_store(f"sqlite:///{path}") as store:
            assert store.studies.summaries() == []
        ending.join()
