"""A driver pauses, resumes, prunes and takes over trials."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bssearch.commands.launch import Launch
from bssearch.commands.run import run_study
from bssearch.errors import InterruptedRunError, TargetNotReachedError
from bssearch.executors.base import Event
from bssearch.records import (
    Observation,
    Phase,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRecord,
    TrialRequest,
    TrialState,
    TrialStop,
)
from bssearch.search.calibration import COMPARING_VISITS, FIRST_VISITS
from bssearch.spec import StudySpec
from tests.factories import make_spec, not_none
from tests.search.law import LawExecutor, step_seconds, steps_needed
from tests.search.study import trials_in, url_in

STEPS = 20


@dataclass
class SteppingLaw(LawExecutor):
    """Runs trials in parallel, one evaluation at a time; trials can be paused and resumed.

    Interrupts the driver once ``interrupts_when`` is true.
    """

    saves: bool = True
    interrupts_when: Callable[[SteppingLaw], bool] | None = None
    done: dict[int, int] = field(default_factory=dict)
    pauses: int = 0
    prunes: int = 0
    resumed: list[int] = field(default_factory=list)

    def submit(self, request: TrialRequest) -> None:
        if request.resumes:
            assert Path(not_none(request.checkpoint)).read_text() == str(self.done[request.number])
            self.resumed.append(request.number)
        else:
            self.done[request.number] = 0
        super().submit(request)

    def events(self, timeout: float) -> list[Event]:
        self.on_look(self)
        if self.interrupts_when is not None and self.interrupts_when(self):
            self.interrupts_when = None
            os.kill(os.getpid(), signal.SIGINT)
        if not self.running:
            return []
        request = self.running.pop(0)
        if request.number in self.stopped:
            return [TrialEnded(request.number, self._stopped(request, *self.stopped.pop(request.number)))]
        self.done[request.number] += 1
        seconds = steps_needed(request.plan.configuration) * step_seconds(request.plan.configuration.batch_size)
        now = self.done[request.number] / STEPS * self.full
        end = min(seconds, request.plan.train_seconds_limit)
        if now >= end:
            return [TrialEnded(request.number, self._ended(request, seconds, end))]
        self.running.append(request)
        return [TrialObserved(request.number, self._seen(request, now, seconds))]

    full = 100.0

    def _seen(self, request: TrialRequest, now: float, seconds: float) -> Observation:
        step = self.done[request.number]
        return Observation(
            step=step,
            samples=step * request.plan.configuration.batch_size,
            train_seconds=now,
            metric=0.9 * now / seconds,
            loss=None,
            learning_rate=request.plan.configuration.learning_rate,
        )

    def _stopped(self, request: TrialRequest, state: TrialState, reason: str) -> TrialOutcome:
        if state is TrialState.PAUSED:
            self.pauses += 1
            if not self.saves or request.checkpoint is None:
                state, reason = TrialState.PRUNED, f"{reason}; could not be paused: no room"
            else:
                Path(request.checkpoint).write_text(str(self.done[request.number]))
        elif state is TrialState.PRUNED:
            self.prunes += 1
        now = self.done[request.number] / STEPS * self.full
        return TrialOutcome(state=state, reason=reason, steps=self.done[request.number], train_seconds=now)

    def _ended(self, request: TrialRequest, seconds: float, end: float) -> TrialOutcome:
        reached = seconds <= request.plan.train_seconds_limit
        per_step = step_seconds(request.plan.configuration.batch_size)
        return TrialOutcome(
            state=TrialState.REACHED if reached else request.plan.limit_state,
            reason="by the law",
            steps=round(end / per_step),
            train_seconds=end,
            wall_seconds=end,
            time_to_target_s=seconds if reached else None,
            steps_to_target=round(seconds / per_step) if reached else None,
            best_metric=0.9,
            test_metric=0.89 if request.plan.is_tested else None,
        )


class Dies(BaseException):
    """Ends a driver as a kill would."""


def die(law: SteppingLaw) -> None:
    """End the driver after four pauses."""
    if law.pauses == 4:
        raise Dies


@pytest.fixture(autouse=True)
def _checkpoints_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / "waiting"))


def study_spec(**changes: object) -> StudySpec:
    return make_spec(
        **{
            "sampler": {"name": "tpe"},
            "pruner": {"name": "balanced", "slack": 1.0},
            "budget": {"trials": 20, "trial_train_seconds": 4.0},
            "confirm": {"runs": 0},
            **changes,
        }
    )


def run(spec: StudySpec, folder: Path, executor: LawExecutor) -> list[TrialRecord]:
    executor.full = spec.budget.trial_train_seconds  # type: ignore[attr-defined]
    run_study(spec, Launch(db=url_in(folder), make_executor=lambda *_: executor))
    return trials_in(folder, Phase.SEARCH)


@pytest.mark.parametrize("slots", [1, 3])
def test_what_has_no_chance_waits_and_is_pruned_at_the_end(tmp_path: Path, slots: int) -> None:
    executor = SteppingLaw(slots=slots)
    trials = run(study_spec(), tmp_path, executor)
    assert executor.pauses > 0
    assert all(trial.state.is_finished and trial.state is not TrialState.PAUSED for trial in trials)
    assert sum(trial.state is TrialState.PRUNED for trial in trials) == executor.pauses - len(executor.resumed)
    assert not list((tmp_path / "waiting").rglob("trial-*"))
    assert len(trials) == 20


def test_without_a_hit_every_trial_runs_to_its_limit_in_the_end(tmp_path: Path) -> None:
    executor = SteppingLaw()
    spec = study_spec(budget={"trials": 8, "trial_train_seconds": 0.1})
    with pytest.raises(TargetNotReachedError):
        run(spec, tmp_path, executor)
    assert {trial.state for trial in trials_in(tmp_path)} == {TrialState.EXHAUSTED}
    assert executor.pauses == len(executor.resumed) > 0


def test_the_next_run_goes_on_with_what_waits(tmp_path: Path) -> None:
    spec = study_spec(budget={"trials": 12, "trial_train_seconds": 0.1})
    doomed = SteppingLaw(on_look=die)
    with pytest.raises(Dies):
        run(spec, tmp_path, doomed)
    paused = trials_in(tmp_path, states=[TrialState.PAUSED])
    assert paused
    executor = SteppingLaw(done=doomed.done)
    with pytest.raises(TargetNotReachedError):
        run(spec, tmp_path, executor)
    assert {trial.number for trial in paused} <= set(executor.resumed)


def test_where_nothing_can_be_saved_hopeless_trials_are_stopped_and_the_others_go_on(tmp_path: Path) -> None:
    outside = {"batch_size": 128, "learning_rate": 9.0, "weight_decay": 0.0, "dropout": 0.1}
    executor = SteppingLaw(saves=False)
    trials = run(study_spec(default=outside, budget={"trials": 30, "trial_train_seconds": 4.0}), tmp_path, executor)
    assert executor.pauses == 1
    assert not executor.resumed
    assert sum(trial.state is TrialState.REACHED for trial in trials) > 5


def test_what_waits_takes_no_more_disk_than_it_may(tmp_path: Path) -> None:
    waiting: list[int] = []
    allowed = 3 * 2 / 2**30  # what is saved has one digit or two
    executor = SteppingLaw(on_submit=lambda _: waiting.append(len(list((tmp_path / "waiting").rglob("trial-*")))))
    trials = run(study_spec(pruner={"name": "balanced", "slack": 1.0, "checkpoint_gib": allowed}), tmp_path, executor)
    assert 1 <= max(waiting) <= 6
    assert executor.pauses - len(executor.resumed) > 6
    assert sum(trial.state is TrialState.PRUNED for trial in trials) == executor.pauses - len(executor.resumed)


@pytest.mark.slow
def test_a_larger_budget_of_a_study_that_ended_by_itself_is_spent(tmp_path: Path) -> None:
    def go_on(trials: int, executor: SteppingLaw) -> int:
        budget = {"trials": trials, "trial_train_seconds": 4.0, "least_improvement": 0.5}
        spec = study_spec(sampler={"name": "auto"}, budget=budget, confirm={"top": 1, "runs": 1})
        return sum(not trial.state.is_missing for trial in run(spec, tmp_path, executor))

    executor = SteppingLaw()
    ended = go_on(20, executor)
    assert ended < 20
    assert go_on(20, SteppingLaw(done=executor.done)) == ended, "the same budget asks for nothing more"

    with pytest.raises(InterruptedRunError):
        go_on(22, SteppingLaw(done=executor.done, interrupts_when=lambda law: len(law.requests) == 2))
    assert go_on(22, SteppingLaw(done=executor.done)) == 22, "nor does it end where it is interrupted in between"


def test_confirmation_fills_slots_of_their_own_device_that_the_last_search_trials_leave_idle(tmp_path: Path) -> None:
    class Notes(SteppingLaw):
        beside: int = 0
        most_confirmed: int = 0

        def submit(self, request: TrialRequest) -> None:
            super().submit(request)
            confirming = [one for one in self.running if one.plan.is_tested]
            self.most_confirmed = max(self.most_confirmed, len(confirming))
            self.beside += 0 < len(confirming) < len(self.running)

    spec = study_spec(confirm={"top": 2, "runs": 3})
    apart, shared = Notes(slots=3, slots_apart=True), Notes(slots=3)
    for executor, folder in ((apart, tmp_path / "apart"), (shared, tmp_path / "shared")):
        folder.mkdir()
        assert len(run(spec, folder, executor)) == 20
    assert apart.beside > 0
    assert apart.most_confirmed == 3
    compared = {one.plan.configuration.batch_size for one in apart.requests if one.plan.phase is Phase.CONFIRM}
    assert Counter(one.batch_size for one in apart.splits_timed) == {
        size: COMPARING_VISITS if size in compared else FIRST_VISITS for size in spec.batch_sizes
    }
    assert (shared.beside, shared.most_confirmed) == (0, 1)


def test_a_verdict_under_way_is_not_undone_by_an_interrupt(tmp_path: Path) -> None:
    class Interrupted(SteppingLaw):
        def stop(self, stop: TrialStop) -> None:
            super().stop(stop)
            if stop.state is TrialState.PAUSED and not self.pauses:
                os.kill(os.getpid(), signal.SIGINT)

    executor = Interrupted()
    with pytest.raises(InterruptedRunError):
        run(study_spec(), tmp_path, executor)
    (paused,) = trials_in(tmp_path, states=[TrialState.PAUSED])
    assert "too far behind" in not_none(paused.outcome).reason


@pytest.mark.parametrize("pruner", ["median", "asha", "hyperband"])
def test_optunas_pruners_go_on_with_what_was_interrupted(tmp_path: Path, pruner: str) -> None:
    slowly = {"batch_size": 128, "learning_rate": 9.0, "weight_decay": 0.0, "dropout": 0.1}
    spec = study_spec(pruner={"name": pruner}, default=slowly)
    first = SteppingLaw(slots=3, interrupts_when=lambda law: sum(law.done.values()) == 7)
    with pytest.raises(InterruptedRunError):
        run(spec, tmp_path, first)
    second = SteppingLaw(done=first.done, slots=1)
    assert not any(trial.state is TrialState.PAUSED for trial in run(spec, tmp_path, second))
    assert second.resumed


def test_only_search_trials_are_saved_and_only_where_they_may_take_disk(tmp_path: Path) -> None:
    saving, never = SteppingLaw(), SteppingLaw()
    for executor, room in ((saving, 10.0), (never, 0.0)):
        folder = tmp_path / str(room)
        folder.mkdir()
        pruner = {"name": "balanced", "slack": 1.0, "checkpoint_gib": room}
        budget = {"trials": 6, "trial_train_seconds": 4.0}
        run(study_spec(pruner=pruner, budget=budget, confirm={"top": 1, "runs": 1}), folder, executor)
    searching = [one for one in saving.requests if not one.plan.is_tested]
    confirming = [one for one in saving.requests if one.plan.is_tested]
    assert searching and confirming
    assert len({one.checkpoint for one in searching}) == len({one.number for one in searching})
    assert None not in {one.checkpoint for one in searching}
    assert {one.checkpoint for one in confirming} == {None}
    assert {one.checkpoint for one in never.requests} == {None}


@pytest.mark.parametrize(
    ("alive", "here", "ours"),
    [
        (False, False, True),
        (None, True, True),
        (None, False, False),
        (True, False, False),
    ],
)
def test_what_a_driver_that_is_gone_left_waiting_is_ended_where_its_process_ended_or_its_file_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool | None, here: bool, ours: bool
) -> None:
    spec, first = study_spec(), SteppingLaw(on_look=die)
    with pytest.raises(Dies):
        run(spec, tmp_path, first)
    waiting = {trial.number for trial in trials_in(tmp_path, states=[TrialState.PAUSED])}
    assert waiting
    monkeypatch.setattr("bssearch.search.pruners.checkpoints.is_alive", lambda owner: alive)
    if not here:
        monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / "elsewhere"))
    trials = run(spec, tmp_path, SteppingLaw(done=first.done))
    assert {trial.number for trial in trials if trial.state is TrialState.PAUSED} == (set() if ours else waiting)
