"""Turns and leases: a driver with a lock or lease decides on the current state."""

import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from bssearch import DatabaseError, NotFoundError, Store, open_store
from bssearch.records import (
    Lease,
    TrialOutcome,
    TrialState,
    spec_digest,
)
from bssearch.storage import database
from bssearch.storage.database import environment_digest
from bssearch.storage.migrate import SCHEMA_HEAD
from tests.factories import make_curve, make_environment, make_plan, not_none
from tests.postgres import Postgres
from tests.storage import racer
from tests.storage.conftest import OUTCOME, add_study, enqueue, resume, start, start_after


@pytest.fixture
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2)


def waits(start: Future[int | None]) -> bool:
    """True if a start still waits after 0.3 s."""
    threading.Event().wait(0.3)
    return not start.done()


@pytest.mark.usefixtures("toy")
def test_the_driver_whose_turn_it_is_starts_before_the_others(store: Store, url: str, pool: ThreadPoolExecutor) -> None:
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
def test_a_turn_without_a_start_leaves_the_study_to_others(store: Store, url: str, pool: ThreadPoolExecutor) -> None:
    with open_store(url) as other:
        with pytest.raises(RuntimeError, match="on purpose"), store.turn("toy"):
            others = pool.submit(start_after, other, 0, "b")
            assert waits(others)
            raise RuntimeError("on purpose")
        assert others.result() == 1


@pytest.mark.usefixtures("toy")
def test_threads_of_one_store_take_separate_turns(store: Store, pool: ThreadPoolExecutor) -> None:
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
def test_a_driver_killed_in_its_turn_releases_it(store: Store, url: str) -> None:
    assert subprocess.run([sys.executable, "-c", DIES_IN_ITS_TURN, url], cwd=Path.cwd(), check=False).returncode == -9
    assert start_after(store, 0, "a") == 1


def test_a_driver_that_hangs_loses_its_turn_and_then_sees_the_trials_of_others(
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
def test_a_driver_that_hangs_in_a_write_blocks_others_only_briefly(
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
            assert ThreadPoolExecutor(1).submit(
                lambda: (
                    other.leases.mark_lost("toy", is_alive=lambda _: False),
                    other.queue.begin_shift("other", {"toy"}),
                )
            ).result(timeout=60) == ([1], None)
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
    """Run all processes stage by stage at the same time; return their reports."""
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
                assert not_none(process.stdout).readline().strip() == stage
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


def test_one_writer_creates_the_study_and_the_others_see_it(race: Race) -> None:
    creators = [report["name"] for report in race.reports if report["created"]]
    assert len(creators) == 1
    with open_store(race.url, write=False) as store:
        assert store.studies.get("toy").created_by == creators[0]


def test_a_claim_lets_one_in_at_a_time(race: Race) -> None:
    assert race.counted == RACERS * racer.CLAIMS


def test_numbers_are_unique_and_without_gaps(race: Race) -> None:
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


# Leases ---------------------------------------------------------------------------------------------------------------


PAUSED = TrialOutcome(state=TrialState.PAUSED, reason="others first", steps=10)


@pytest.mark.usefixtures("toy")
def test_a_trial_is_lost_when_its_lease_is_over_or_its_owner_dead(store: Store) -> None:
    start(store, lease_owner="alive")
    start(store, lease_owner="dead")
    start(store, lease_owner="late", lease_seconds=-5.0)
    start(store, lease_owner="dead")
    store.trials.finish("toy", 4, OUTCOME, steps_x_step_time_s=None)
    assert store.leases.mark_lost("toy", is_alive={"dead": False}.get) == [2, 3]
    one, dead, late, ended = store.trials.of("toy")
    assert [one.state, dead.state, late.state, ended.state] == ["running", "lost", "lost", "reached"]
    assert dead.outcome == TrialOutcome(state=TrialState.LOST, reason="the driver dead is gone")
    assert not_none(late.outcome).reason.startswith("the lease ended at ")
    assert late.ended_at is not None
    assert store.leases.mark_lost("toy", is_alive=lambda owner: True) == []


@pytest.mark.usefixtures("toy")
def test_a_lost_trial_keeps_how_far_it_had_come(store: Store) -> None:
    for _ in range(2):
        start(store)
    store.trials.append_observations("toy", [(2, one) for one in make_curve((0.0, 0.1), (1.5, 0.4))])
    store.leases.mark_lost("toy", is_alive=lambda owner: False)
    bare, seen = (trial.outcome for trial in store.trials.of("toy"))
    assert bare is not None and seen is not None
    assert (bare.steps, bare.final_metric) == (0, None)
    assert (seen.steps, seen.samples, seen.train_seconds, seen.final_metric) == (10, 320, 1.5, 0.4)


@pytest.mark.usefixtures("toy")
def test_a_heartbeat_renews_only_the_leases_of_its_owner(store: Store) -> None:
    start(store, lease_owner="a", lease_seconds=-5.0)
    start(store, lease_owner="b", lease_seconds=-5.0)
    start(store, lease_owner="a", lease_seconds=-5.0)
    store.trials.finish("toy", 3, OUTCOME, steps_x_step_time_s=None)
    store.leases.heartbeat("toy", "a", 60.0)
    assert store.trials.get("toy", 3).lease_expires_at is None
    assert store.leases.mark_lost("toy", is_alive=lambda owner: True) == []
    assert store.leases.mark_lost("toy", is_alive=lambda owner: None) == [2]


@pytest.mark.usefixtures("toy")
def test_a_driver_without_its_lease_writes_nothing_about_the_trial(store: Store) -> None:
    first, second, third = make_curve((0.0, 0.1), (1.5, 0.4), (2.0, 0.9))
    start(store, lease_owner="stopped")
    store.trials.append_observations("toy", [(1, first)], owner="stopped")
    store.trials.save_log("toy", 1, "before", owner="stopped")
    assert store.leases.mark_lost("toy", is_alive=lambda owner: False) == [1]
    start(store, lease_owner="stopped", retry_of=1)
    lost = store.trials.get("toy", 1)
    assert store.trials.append_observations("toy", [(1, second), (2, second), (1, third)], owner="stopped") == {1}
    store.trials.save_log("toy", 1, "after", owner="stopped")
    store.leases.heartbeat("toy", "stopped", 60.0)
    for outcome in (OUTCOME, PAUSED):
        with pytest.raises(DatabaseError, match="is not running but lost"):
            store.trials.finish("toy", 1, outcome, steps_x_step_time_s=None, owner="stopped")
    assert store.trials.get("toy", 1) == lost
    assert store.trials.curves("toy", [1, 2]) == {1: [first], 2: [second]}
    assert store.trials.log("toy", 1) == "before"
    assert store.trials.append_observations("toy", [(1, third)], owner="stopped") == {1}
    assert store.trials.append_observations("toy", [], owner="stopped") == frozenset()


@pytest.mark.usefixtures("toy")
def test_a_trial_resumed_by_another_driver_is_not_written(store: Store) -> None:
    first, second = make_curve((0.0, 0.1), (1.5, 0.4))
    start(store, lease_owner="first")
    store.trials.append_observations("toy", [(1, first)], owner="first")
    store.trials.finish("toy", 1, PAUSED, steps_x_step_time_s=None, owner="first")
    assert resume(store, 1, "second")
    resumed = store.trials.get("toy", 1)
    assert store.trials.append_observations("toy", [(1, second)], owner="first") == {1}
    store.trials.save_log("toy", 1, "by the first", owner="first")
    with pytest.raises(DatabaseError, match="second holds the lease"):
        store.trials.finish("toy", 1, OUTCOME, steps_x_step_time_s=None, owner="first")
    assert store.trials.get("toy", 1) == resumed
    assert store.trials.observations("toy", 1) == [first]
    assert store.trials.log("toy", 1) is None
    assert store.trials.append_observations("toy", [(1, second)], owner="second") == frozenset()
    assert store.trials.finish("toy", 1, OUTCOME, steps_x_step_time_s=None, owner="second").state == "reached"


@pytest.mark.usefixtures("toy")
def test_observations_of_an_unknown_trial_are_refused_by_name(store: Store) -> None:
    start(store)
    with pytest.raises(NotFoundError, match="no trial 2"):
        store.trials.append_observations("toy", [(2, one) for one in make_curve((0.0, 0.1))], owner="driver")
    with pytest.raises(NotFoundError, match="no trial 2"):
        store.trials.save_log("toy", 2, "text", owner="driver")


NOBODY_KNOWS: Callable[[str], bool | None] = lambda owner: None  # noqa: E731


class TestClaims:
    def claim(self, store: Store, owner: str, **changes: Any) -> bool:
        values: dict[str, Any] = {"name": "probe", "lease_seconds": 60.0, "is_alive": NOBODY_KNOWS}
        return store.leases.claim("toy", owner=owner, **{**values, **changes})

    @pytest.mark.usefixtures("toy")
    def test_one_owner_holds_a_claim_until_it_is_released(self, store: Store) -> None:
        add_study(store, "other")
        assert self.claim(store, "a")
        assert self.claim(store, "a"), "tried again"
        assert not self.claim(store, "b")
        assert self.claim(store, "b", name="confirm host")
        assert store.leases.claim("other", "probe", owner="b", lease_seconds=60.0, is_alive=NOBODY_KNOWS)
        store.leases.release("toy", "probe", owner="b")
        assert not self.claim(store, "b")
        store.leases.release("toy", "probe", owner="a")
        store.leases.release("toy", "probe", owner="a")
        assert self.claim(store, "b")

    @pytest.mark.usefixtures("toy")
    def test_a_claim_is_taken_over_from_a_dead_owner_or_after_its_lease(self, store: Store) -> None:
        assert self.claim(store, "a")
        assert not self.claim(store, "b", is_alive=lambda owner: True)
        assert self.claim(store, "b", is_alive={"a": False}.get, lease_seconds=-5.0)
        assert not self.claim(store, "c", is_alive={"b": True}.get)
        assert self.claim(store, "c")
        assert not self.claim(store, "b")

    @pytest.mark.usefixtures("toy")
    def test_a_heartbeat_extends_the_claims_of_its_owner_alone(self, store: Store) -> None:
        assert self.claim(store, "a", lease_seconds=-5.0)
        assert self.claim(store, "b", name="confirm host", lease_seconds=-5.0)
        store.leases.heartbeat("toy", "a", 60.0)
        assert not self.claim(store, "c")
        assert self.claim(store, "c", name="confirm host")

    def test_claims_of_a_missing_study_are_not_found(self, store: Store) -> None:
        with pytest.raises(NotFoundError):
            self.claim(store, "a")
        with pytest.raises(NotFoundError):
            store.leases.release("toy", "probe", owner="a")


# Whose trial ----------------------------------------------------------------------------------------------------------


FIRST = {"workload": "digits", "executor": {"slots": 1}}
SECOND = {"workload": "digits", "executor": {"slots": 4}}
HERE = make_environment()


def lease_of(store: Store, user: str, spec: Mapping[str, object]) -> Lease:
    return Lease(owner=f"driver of {user}", seconds=60.0, user=user, spec=store.studies.keep_spec("toy", spec))


@pytest.mark.usefixtures("toy")
def test_a_trial_keeps_who_started_it_and_the_spec_of_that_moment(store: Store) -> None:
    anna, ben = lease_of(store, "anna", FIRST), lease_of(store, "ben", SECOND)
    for lease in (anna, ben, anna):
        assert store.trials.start("toy", make_plan(), environment=HERE, lease=lease) is not None
    store.studies.update_spec("toy", SECOND)
    assert [trial.started_by for trial in store.trials.of("toy")] == ["anna", "ben", "anna"]
    assert [store.trials.spec("toy", number) for number in (1, 2, 3)] == [FIRST, SECOND, FIRST]
    assert store.studies.keep_spec("toy", FIRST) == store.trials.get("toy", 1).spec_digest == spec_digest(FIRST)


@pytest.mark.usefixtures("toy")
def test_a_queued_trial_belongs_to_the_driver_that_starts_it_even_after_a_pause(store: Store) -> None:
    number = enqueue(store)
    assert (store.trials.get("toy", number).started_by, store.trials.spec("toy", number)) == (None, None)
    limits = {"train_seconds_limit": 5.0, "eval_every_steps": 3, "threads": 2}
    anna, ben = lease_of(store, "anna", FIRST), lease_of(store, "ben", SECOND)
    started = store.trials.start("toy", make_plan(queued=number, **limits), environment=HERE, lease=anna)
    assert started is not None and (started.started_by, started.spec_digest) == ("anna", anna.spec)
    paused = TrialOutcome(state=TrialState.PAUSED, reason="waits", device="cuda:1", device_uuid="GPU-1")
    store.trials.finish("toy", number, paused, steps_x_step_time_s=None)
    again = store.trials.start("toy", make_plan(resumed=number, train_seconds_limit=9.0), environment=HERE, lease=ben)
    assert again is not None and (again.started_by, again.spec_digest) == ("anna", anna.spec)


@pytest.mark.usefixtures("toy")
def test_the_device_of_a_trial_is_kept_with_its_end(store: Store) -> None:
    ended = replace(OUTCOME, device="cuda:1", device_uuid="GPU-8f6f")
    number = start(store)
    store.trials.finish("toy", number, ended, steps_x_step_time_s=None)
    assert store.trials.get("toy", number).outcome == ended


@pytest.mark.usefixtures("toy")
def test_the_specs_of_a_study_go_with_it(store: Store) -> None:
    store.studies.keep_spec("toy", FIRST)
    store.studies.delete("toy")
    add_study(store)
    lease = Lease(owner="driver", seconds=60.0, spec=spec_digest(FIRST))
    assert store.trials.start("toy", make_plan(), environment=HERE, lease=lease) is not None
    assert store.trials.spec("toy", 1) is None


@pytest.mark.parametrize("changes", [{"libraries": ("timm 1.0",)}, {"git_dirty": False}, {"git_dirty": True}])
def test_an_environment_without_versions_keeps_its_digest_and_others_have_their_own(changes: dict[str, object]) -> None:
    known_before = "c81c1fa81c471568eaf6773c514e914615613356c0e75d6a5465598d46fc1eae"
    assert environment_digest(HERE) == known_before, "as a version computed it that knew no libraries"
    assert environment_digest(make_environment(**changes)) != known_before
