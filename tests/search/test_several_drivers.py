"""Several drivers on one study at once, each with its own store and executor, in threads."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bssearch.analysis.answer import Answer
from bssearch.commands.launch import Launch
from bssearch.commands.run import run_study
from bssearch.executors.base import Event
from bssearch.records import (
    Lease,
    Phase,
    StepTime,
    StepTimeRequest,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialRequest,
    TrialState,
)
from bssearch.search import leases
from bssearch.search.calibration import COMPARING_VISITS, FIRST_VISITS
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store, open_store
from bssearch.storage.trials import TrialStore
from tests.factories import make_spec, not_none
from tests.search.law import LawExecutor

SPEC = make_spec(budget={"trials": 24, "trial_train_seconds": 100.0}, confirm={"top": 2, "runs": 2})
MANY = make_spec(budget={"trials": 30, "trial_train_seconds": 100.0}, confirm={"runs": 0})
SHORT = make_spec(budget={"trials": 12, "trial_train_seconds": 100.0}, confirm={"runs": 0})


class SlowLaw(LawExecutor):
    """Takes longer for a trial than a driver for a look at the study, so that all have a turn; counts over all."""

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
    """A class of its own for each test: it counts over all its drivers."""
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
    assert law.probed == visits, "no visit is made twice"


@pytest.mark.slow
def test_what_a_dead_driver_leaves_behind_is_tried_again_by_one_of_the_others(
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
    """Wait as an executor does that has nothing to run."""
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
