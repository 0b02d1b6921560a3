"""Several drivers on one study at once, each with its own store and executor, in threads."""

import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bssearch import Launch, Store, StudySpec, open_store, run_study
from bssearch.analysis.answer import Answer
from bssearch.executors.base import Event
from bssearch.records import (
    Lease,
    Phase,
    StepTime,
    StepTimeRequest,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialRequest,
    TrialState,
)
from bssearch.search import leases
from bssearch.search.calibration import COMPARING_VISITS, FIRST_VISITS
from bssearch.search.driver import TIMING, Listener
from bssearch.search.history import History
from bssearch.search.leases import GONE_AFTER, HEARTBEAT_SECONDS, LEASE_SECONDS, Leases, living, this_driver
from bssearch.storage.trials import TrialStore
from tests.factories import make_environment, make_spec, not_none
from tests.search.law import LawExecutor, url_in
from tests.storage.conftest import add_study, start

SPEC = make_spec(budget={"trials": 24, "trial_train_seconds": 100.0}, confirm={"top": 2, "runs": 2})
MANY = make_spec(budget={"trials": 30, "trial_train_seconds": 100.0}, confirm={"runs": 0})
SHORT = make_spec(budget={"trials": 12, "trial_train_seconds": 100.0}, confirm={"runs": 0})


class SlowLaw(LawExecutor):
    """A slow executor, so that every driver gets a turn; counts over all drivers."""

    everywhere: ClassVar[Counter[str]]
    probed: ClassVar[Counter[int]]
    most_confirmations_at_once = 0
    lock = threading.Lock()

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        with self.lock:
            self.probed[request.configuration.batch_size] += 1
        return super().measure_step_time(request)

    def submit(self, request: TrialRequest) -> None:
        with self.lock:
            if request.plan.is_tested:
                self.everywhere["confirm"] += 1
                type(self).most_confirmations_at_once = max(self.most_confirmations_at_once, self.everywhere["confirm"])
        super().submit(request)

    def events(self, timeout: float) -> list[Event]:
        threading.Event().wait(0.03)
        confirming = bool(self.running and self.running[0].plan.is_tested)
        events = super().events(timeout)
        with self.lock:
            self.everywhere["confirm"] -= confirming
        return events


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bssearch.search.driver.LOOK_SECONDS", 0.05)


@pytest.fixture
def law() -> type[SlowLaw]:
    """A new class for each test, because it counts over all drivers."""
    return type("Law", (SlowLaw,), {"everywhere": Counter(), "probed": Counter(), "most_confirmations_at_once": 0})


def run_together(spec: StudySpec, url: str, executors: list[LawExecutor]) -> list[Answer]:
    def run(executor: LawExecutor) -> Answer:
        return run_study(spec, Launch(db=url, make_executor=lambda *_: executor))

    with ThreadPoolExecutor(len(executors)) as pool:
        return list(pool.map(run, executors))


@pytest.mark.slow
def test_three_drivers_share_one_budget_and_one_confirmation(url: str, law: type[SlowLaw]) -> None:
    executors: list[LawExecutor] = [law(), law(), law(slots=2)]
    answers = run_together(SPEC, url, executors)
    with open_store(url, write=False) as store:
        trials = store.trials.of(SPEC.name)
    assert [trial.number for trial in trials] == list(range(1, len(trials) + 1))
    assert (
        sum(trial.configuration == SPEC.default_configuration for trial in trials if trial.phase is Phase.SEARCH) == 1
    )
    confirmed = [(trial.configuration.key, trial.seed) for trial in trials if trial.phase is Phase.CONFIRM]
    assert len(confirmed) == len(set(confirmed)) > 0
    assert all(trial.state.is_finished for trial in trials)
    assert sum(len(executor.requests) for executor in executors) == len(trials)
    assert min(len(executor.requests) for executor in executors) > 0
    assert answers[0] == answers[1] == answers[2]
    assert law.most_confirmations_at_once == 1
    compared = {trial.configuration.batch_size for trial in trials if trial.phase is Phase.CONFIRM}
    visits = {size: COMPARING_VISITS if size in compared else FIRST_VISITS for size in SPEC.batch_sizes}
    # without comparing visits if a trial of the largest size is over twice as slow as the best
    assert law.probed in (visits, visits | {128: FIRST_VISITS}), "no visit is made twice"


@pytest.mark.slow
def test_another_driver_retries_the_trials_of_a_dead_driver(
    url: str, law: type[SlowLaw], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bssearch.search.driver.HEARTBEAT_SECONDS", 0.05)

    class Dies(BaseException):
        pass

    class Doomed(law):  # type: ignore[misc, valid-type]
        def events(self, timeout: float) -> list[Event]:
            if len(self.requests) == 4:
                raise Dies
            return super().events(timeout)  # type: ignore[no-any-return]

    monkeypatch.setattr("bssearch.search.driver.Driver._abandon", lambda driver: None)
    with pytest.raises(Dies):
        run_study(SHORT, Launch(db=url, make_executor=lambda *_: Doomed()))
    monkeypatch.undo()
    with open_store(url) as store:
        (left,) = store.trials.of(SHORT.name, states=[TrialState.RUNNING])
        assert left.number == 4
    run_together(SHORT, url, [law(), law()])
    with open_store(url, write=False) as store:
        trials = store.trials.of(SHORT.name)
    assert trials[3].state is TrialState.LOST
    assert len([trial for trial in trials if trial.retry_of == 4]) == 1
    assert sum(not trial.state.is_missing for trial in trials if trial.phase is Phase.SEARCH) == SHORT.budget.trials


def test_leases_are_renewed_while_the_main_loop_waits(
    url: str, law: type[SlowLaw], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.05)
    renewed = threading.Event()

    class Waits(law):  # type: ignore[misc, valid-type]
        def events(self, timeout: float) -> list[Event]:
            if len(self.requests) == 3 and self.running:
                with open_store(url, write=False) as store:
                    before = store.trials.get(SHORT.name, 3).lease_expires_at
                    for _ in range(100):
                        threading.Event().wait(0.02)
                        if store.trials.get(SHORT.name, 3).lease_expires_at != before:
                            renewed.set()
                            break
            return super().events(timeout)  # type: ignore[no-any-return]

    run_study(SHORT, Launch(db=url, make_executor=lambda *_: Waits()))
    assert renewed.is_set()


def rest(executor: LawExecutor) -> None:
    """Wait if no trial runs."""
    if not executor.running:
        threading.Event().wait(0.2)


@pytest.mark.slow
def test_drivers_in_each_others_way_try_no_configuration_twice_and_are_all_served(url: str) -> None:
    executors = [LawExecutor(on_look=rest) for _ in range(6)]
    answers = run_together(MANY, url, [*executors])
    with open_store(url, write=False) as store:
        trials = store.trials.of(MANY.name)
    assert [trial.number for trial in trials] == list(range(1, MANY.budget.trials + 1))
    assert set(Counter(trial.configuration.key for trial in trials).values()) == {1}
    assert sum(len(executor.requests) for executor in executors) == len(trials)
    assert all(answer == answers[0] for answer in answers)


def test_a_driver_locks_the_study_while_it_chooses_once_it_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, turn, calls = TrialStore.start, Store.turn, list[str]()
    lease = Lease(owner="faster", seconds=60.0)
    outcome = TrialOutcome(state=TrialState.CAPPED, reason="by another driver", train_seconds=1.0)

    def start_second(trials: TrialStore, study: str, plan: TrialPlan, **given: Any) -> TrialRecord | None:
        if len(calls) == 3:
            other = not_none(start(trials, study, plan, environment=given["environment"], lease=lease))
            trials.finish(study, other.number, outcome, steps_x_step_time_s=None)
        trial = start(trials, study, plan, **given)
        calls.append("refused" if trial is None else "started")
        return trial

    def noted_turn(store: Store, study: str) -> AbstractContextManager[None]:
        calls.append("turn")
        return turn(store, study)

    monkeypatch.setattr(TrialStore, "start", start_second)
    monkeypatch.setattr(Store, "turn", noted_turn)
    run_study(SHORT, Launch(db=f"sqlite:///{tmp_path}/study.db", make_executor=lambda *_: LawExecutor()))
    assert calls[:4] == ["started"] * 3 + ["refused"]
    assert calls[4:8] == ["turn", "started"] * 2


# Lost leases ----------------------------------------------------------------------------------------------------------


LEASED = make_spec(
    budget={"trials": 6, "trial_train_seconds": 100.0}, confirm={"runs": 0}, pruner={"checkpoint_gib": 0}
)
LOST = 3


@dataclass
class Slow(LawExecutor):
    """Returns one event at a time; after the second evaluation of trial 3, another driver marks it lost."""

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
            assert other.leases.mark_lost(LEASED.name, is_alive=lambda owner: False) == [LOST]


class Ended(Listener):
    """Records ended trials and counts each trial's observations."""

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
    run_study(LEASED, Launch(db=url, make_executor=lambda *_: executor, listener=listener))
    with open_store(url, write=False) as store:
        trials = store.trials.of(LEASED.name)
        curves = store.trials.curves(LEASED.name, [trial.number for trial in trials])
    assert sorted(listener.numbers) == [trial.number for trial in trials]
    assert listener.observations[LOST] == observed
    lost = trials[LOST - 1]
    assert (lost.state, not_none(lost.outcome).steps) == (TrialState.LOST, 25)
    assert [one.step for one in curves[LOST]] == [0, 25]
    assert {number: len(curve) for number, curve in curves.items() if number != LOST} == {
        trial.number: 5 for trial in trials if trial.number != LOST
    }
    assert executor.stopped[LOST] == (TrialState.CANCELLED, "the driver lost the trial's lease")
    assert [trial.retry_of for trial in trials if trial.retry_of] == [LOST]
    assert sum(not trial.state.is_missing for trial in trials if trial.phase is Phase.SEARCH) == LEASED.budget.trials


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
                if message == f"waiting for another driver to {claim}":
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
HOURS = -7200.0  # A lease that ended two hours ago, as seen after the database's clock jumped ahead


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
    """Look at every heartbeat for ``seconds``."""
    watch = watch or Leases(store, "toy", clock=clock)
    watch.look()
    for _ in range(round(seconds / HEARTBEAT_SECONDS)):
        clock.now += HEARTBEAT_SECONDS
        watch.look()
    return watch


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_driver_elsewhere_counts_as_dead_after_one_watched_lease(store: Store, clock: Clock) -> None:
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


def test_a_driver_that_renews_is_alive_by_any_database_clock(store: Store, clock: Clock) -> None:
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
