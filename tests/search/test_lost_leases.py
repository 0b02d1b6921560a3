"""A driver that loses the lease of a trial, what it may still store, and when a lease counts as ended."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bssearch.commands.launch import Launch
from bssearch.commands.run import run_study
from bssearch.executors.base import Event
from bssearch.records import (
    Phase,
    StepTime,
    StepTimeRequest,
    TrialEnded,
    TrialObserved,
    TrialRecord,
    TrialRequest,
    TrialState,
)
from bssearch.search.calibration import COMPARING_VISITS, FIRST_VISITS
from bssearch.search.driver import TIMING, Listener
from bssearch.search.history import History
from bssearch.search.leases import GONE_AFTER, HEARTBEAT_SECONDS, LEASE_SECONDS, Leases, living, this_driver
from bssearch.storage.repository import Store, open_store
from tests.factories import make_environment, make_spec
from tests.search.law import LawExecutor
from tests.search.study import url_in
from tests.storage.conftest import add_study, start

SPEC = make_spec(budget={"trials": 6, "trial_train_seconds": 100.0}, confirm={"runs": 0}, pruner={"checkpoint_gib": 0})
LOST = 3


@dataclass
class Slow(LawExecutor):
    """Gives one event of a trial at a time; after the second evaluation of trial 3, another driver marks it lost."""

    url: str = ""
    waiting: deque[Event] = field(default_factory=deque)
    observed: int = 0

    def events(self, timeout: float) -> list[Event]:
        if not self.waiting:
            self.waiting.extend(super().events(timeout))
        if not self.waiting:
            return []
        event = self.waiting.popleft()
        if isinstance(event, TrialObserved) and event.number == LOST:
            self.observed += 1
            if self.observed == 3:
                self.lose()
        if isinstance(event, TrialEnded):
            self.waiting.clear()
        return [event]

    def lose(self) -> None:
        with open_store(self.url) as other:
            assert other.leases.mark_lost(SPEC.name, is_alive=lambda owner: False) == [LOST]


class Ended(Listener):
    """Keeps the numbers of ended trials, and counts the observations of each trial."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.observations: Counter[int] = Counter()

    def observed(self, observed: TrialObserved) -> None:
        self.observations[observed.number] += 1

    def ended(self, trial: TrialRecord, history: History) -> None:
        self.numbers.append(trial.number)


@pytest.mark.parametrize(("looks_after", "observed"), [(60.0, 3), (-1.0, 2)], ids=["by a write", "by a look before it"])
def test_a_driver_drops_a_trial_whose_lease_it_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks_after: float, observed: int
) -> None:
    monkeypatch.setattr("bssearch.search.driver.FLUSH_SECONDS", -1.0)
    monkeypatch.setattr("bssearch.search.driver.HEARTBEAT_SECONDS", looks_after)
    url = f"sqlite:///{tmp_path}/study.db"
    executor, listener = Slow(url=url), Ended()
    run_study(SPEC, Launch(db=url, make_executor=lambda *_: executor, listener=listener))
    with open_store(url, write=False) as store:
        trials = store.trials.of(SPEC.name)
        curves = store.trials.curves(SPEC.name, [trial.number for trial in trials])
    assert sorted(listener.numbers) == [trial.number for trial in trials]
    assert listener.observations[LOST] == observed
    lost = trials[LOST - 1]
    assert lost.outcome is not None
    assert (lost.state, lost.outcome.steps) == (TrialState.LOST, 25)
    assert [one.step for one in curves[LOST]] == [0, 25]
    assert {number: len(curve) for number, curve in curves.items() if number != LOST} == {
        trial.number: 5 for trial in trials if trial.number != LOST
    }
    assert executor.stopped[LOST] == (TrialState.CANCELLED, "its lease was lost")
    assert [trial.retry_of for trial in trials if trial.retry_of] == [LOST]
    assert sum(not trial.state.is_missing for trial in trials if trial.phase is Phase.SEARCH) == SPEC.budget.trials


CONFIRMED = make_spec(budget={"trials": 5, "trial_train_seconds": 100.0}, confirm={"top": 1, "runs": 2})
CONFIRMING = f"confirm on {make_environment().host}"


def test_a_driver_writes_nothing_under_a_claim_that_it_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bssearch.search.driver.LOOK_SECONDS", 0.01)
    url = f"sqlite:///{tmp_path}/study.db"
    found = dict[str, object]()

    class Suspended(LawExecutor):
        def measure_step_time(self, request: StepTimeRequest) -> StepTime:
            self.lose(TIMING)
            return super().measure_step_time(request)

        def submit(self, request: TrialRequest) -> None:
            if request.plan.phase is Phase.CONFIRM:
                self.lose(CONFIRMING)
            super().submit(request)

        def lose(self, claim: str) -> None:
            if claim not in found:
                found[claim] = "lost"
                with open_store(url) as other:
                    assert other.leases.claim(
                        "toy", claim, owner="other", lease_seconds=60.0, is_alive=lambda owner: False
                    )

    class Waits(Listener):
        def note(self, message: str) -> None:
            for claim in (TIMING, CONFIRMING):
                if message == f"waiting for another driver ({claim})":
                    with open_store(url) as other:
                        confirmed = other.trials.of("toy", phase=Phase.CONFIRM)
                        found[claim] = len(other.probes.visits("toy")), [trial.state for trial in confirmed]
                        other.leases.release("toy", claim, owner="other")

    run_study(CONFIRMED, Launch(db=url, make_executor=lambda *_: Suspended(), listener=Waits()))
    assert found[TIMING] == (0, [])
    with open_store(url) as store:
        compared = {one.configuration.batch_size for one in store.trials.of("toy", phase=Phase.CONFIRM)}
    assert 1 < len(compared) < len(CONFIRMED.batch_sizes)
    visits = len(CONFIRMED.batch_sizes) + (COMPARING_VISITS - FIRST_VISITS) * len(compared)
    assert found[CONFIRMING] == (visits, [TrialState.REACHED])


ELSEWHERE = "another-host/4711/0a1b2c3d/99/11223344"
HOURS = -7200.0
"""A lease that ended two hours ago by the database's clock, as all do where that clock jumps ahead."""


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(url_in(tmp_path)) as opened:
        add_study(opened)
        yield opened


def watched(store: Store, clock: Clock, seconds: float, watch: Leases | None = None) -> Leases:
    """Look at every heartbeat for so many seconds."""
    watch = watch or Leases(store, "toy", clock=clock)
    watch.look()
    for _ in range(round(seconds / HEARTBEAT_SECONDS)):
        clock.now += HEARTBEAT_SECONDS
        watch.look()
    return watch


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_driver_elsewhere_is_gone_once_its_lease_was_watched_for_as_long_as_it_lasts(
    store: Store, clock: Clock
) -> None:
    start(store, lease_owner=ELSEWHERE, lease_seconds=HOURS)
    watch = watched(store, clock, LEASE_SECONDS - HEARTBEAT_SECONDS)
    assert store.leases.mark_lost("toy", is_alive=watch.is_alive) == [], (
        "the clock may have jumped, and it may renew it"
    )
    watched(store, clock, HEARTBEAT_SECONDS, watch)
    assert watch.is_alive(ELSEWHERE) is None
    assert store.leases.mark_lost("toy", is_alive=watch.is_alive) == [1]


def test_a_lease_that_has_not_ended_by_the_databases_clock_is_kept_for_two(store: Store, clock: Clock) -> None:
    start(store, lease_owner=ELSEWHERE, lease_seconds=-HOURS)
    watch = watched(store, clock, GONE_AFTER - HEARTBEAT_SECONDS)
    assert store.leases.mark_lost("toy", is_alive=watch.is_alive) == []
    watched(store, clock, HEARTBEAT_SECONDS, watch)
    assert store.leases.mark_lost("toy", is_alive=watch.is_alive) == [1]


def test_a_driver_that_renews_is_alive_whatever_the_databases_clock_says(store: Store, clock: Clock) -> None:
    start(store, lease_owner=ELSEWHERE, lease_seconds=HOURS)
    watch = Leases(store, "toy", clock=clock)
    for beat in range(20):
        store.leases.heartbeat("toy", ELSEWHERE, HOURS + beat)
        watched(store, clock, HEARTBEAT_SECONDS, watch)
        assert store.leases.mark_lost("toy", is_alive=watch.is_alive) == []


def test_a_living_process_without_its_driver_loses_its_trials_and_claims(store: Store) -> None:
    owner, clock = this_driver(), Clock()
    start(store, lease_owner=owner)
    assert store.leases.claim("toy", "probe", owner=owner, lease_seconds=60.0, is_alive=lambda _: None)
    with living(owner):
        watch = watched(store, clock, GONE_AFTER - HEARTBEAT_SECONDS)
        assert watch.is_alive(owner) is True
        watched(store, clock, HEARTBEAT_SECONDS, watch)
        assert watch.is_alive(owner) is False, "its heart has stopped"
    fresh = Leases(store, "toy", clock=clock)
    assert store.leases.mark_lost("toy", is_alive=fresh.is_alive) == [1]
    assert store.leases.claim("toy", "probe", owner="another", lease_seconds=60.0, is_alive=fresh.is_alive)


def test_a_trial_that_has_ended_is_no_lease_to_watch(store: Store, clock: Clock) -> None:
    start(store, lease_owner=ELSEWHERE, lease_seconds=HOURS)
    watch = watched(store, clock, LEASE_SECONDS)
    assert store.leases.mark_lost("toy", is_alive=lambda _: False) == [1]
    watch.look()
    start(store, lease_owner=ELSEWHERE, lease_seconds=HOURS)
    watch.look()
    assert watch.is_alive(ELSEWHERE) is True, "a new lease"
