"""Drivers pause, resume, prune and take over trials, also on several hosts that share checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import fsspec
import pytest

from bssearch import InterruptedRunError, Launch, StudySpec, TargetNotReachedError, open_store, run_study
from bssearch.executors.base import Event
from bssearch.records import (
    Lease,
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
from bssearch.search import leases
from bssearch.search.calibration import COMPARING_VISITS, FIRST_VISITS
from bssearch.search.leases import Leases
from bssearch.search.pruners.checkpoints import Checkpoints, WaitingTrials
from tests.factories import make_environment, make_plan, make_spec, make_study_record, not_none
from tests.search.law import LawExecutor, step_seconds, steps_needed, trials_in, url_in
from tests.search.pruners.stores import Troubled, troubled
from tests.waiting import Ear

STEPS = 20

HOPELESS = {"batch_size": 128, "learning_rate": 9.0, "weight_decay": 0.0, "dropout": 0.1}

HITS_UNPAUSED = 16.0  # a limit whose first rung is beyond the default's hit


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
        now = self.done[request.number] * self.every
        end = min(seconds, request.plan.train_seconds_limit)
        if now >= end:
            return [TrialEnded(request.number, self._ended(request, seconds, end))]
        self.running.append(request)
        return [TrialObserved(request.number, self._seen(request, now, seconds))]

    full = 100.0

    @property
    def every(self) -> float:
        """Train seconds between evaluations."""
        return min(0.2, self.full / STEPS)

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
        now = self.done[request.number] * self.every
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
def test_a_hopeless_trial_pauses_and_is_pruned_at_the_end(tmp_path: Path, slots: int) -> None:
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


def test_the_next_run_resumes_paused_trials(tmp_path: Path) -> None:
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


def test_without_checkpoints_hopeless_trials_are_stopped_and_the_others_go_on(tmp_path: Path) -> None:
    executor = SteppingLaw(saves=False)
    trials = run(study_spec(default=HOPELESS, budget={"trials": 30, "trial_train_seconds": 4.0}), tmp_path, executor)
    assert executor.pauses == 1
    assert not executor.resumed
    assert sum(trial.state is TrialState.REACHED for trial in trials) > 5


@pytest.mark.parametrize(("saves", "most"), [(True, 1.0), (False, 0.5)])
def test_a_default_that_never_arrives_costs_a_share_of_the_limit(tmp_path: Path, saves: bool, most: float) -> None:
    trials = run(study_spec(default=HOPELESS), tmp_path, SteppingLaw(saves=saves))
    assert trials[0].configuration.learning_rate == HOPELESS["learning_rate"]
    assert (trials[0].state, trials[0].uncapped) == (TrialState.PRUNED, False)
    assert not_none(trials[0].outcome).train_seconds <= most
    assert any(trial.state is TrialState.REACHED for trial in trials)


def test_paused_trials_stay_within_the_disk_limit(tmp_path: Path) -> None:
    waiting: list[int] = []
    allowed = 3 * 2 / 2**30  # each saved file has one or two digits
    executor = SteppingLaw(on_submit=lambda _: waiting.append(len(list((tmp_path / "waiting").rglob("trial-*")))))
    pruner = {"name": "balanced", "slack": 1.0, "checkpoint_gib": allowed}
    spec = study_spec(pruner=pruner, budget={"trials": 20, "trial_train_seconds": HITS_UNPAUSED})
    trials = run(spec, tmp_path, executor)
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
    assert go_on(20, SteppingLaw(done=executor.done)) == ended, "the same budget allows no more trials"

    with pytest.raises(InterruptedRunError):
        go_on(22, SteppingLaw(done=executor.done, interrupts_when=lambda law: len(law.requests) == 2))
    assert go_on(22, SteppingLaw(done=executor.done)) == 22, "an interrupt does not end it"


def test_confirmation_fills_slots_of_their_own_device_that_the_last_search_trials_leave_idle(tmp_path: Path) -> None:
    @dataclass
    class Notes(SteppingLaw):
        most_confirmed: int = 0
        beside: list[str] = field(default_factory=list)

        def submit(self, request: TrialRequest) -> None:
            super().submit(request)
            confirming = [one for one in self.running if one.plan.is_tested]
            self.most_confirmed = max(self.most_confirmed, len(confirming))
            if request.plan.is_tested and len(confirming) < len(self.running):
                self.beside.append(request.plan.configuration.key)

    spec = study_spec(confirm={"top": 2, "runs": 3})
    apart, shared = Notes(slots=3, slots_apart=True), Notes(slots=3)
    for executor, folder in ((apart, tmp_path / "apart"), (shared, tmp_path / "shared")):
        folder.mkdir()
        assert len(run(spec, folder, executor)) == 20
    assert len(set(apart.beside)) == 1, "only the best configuration, because step times are not compared yet"
    assert apart.most_confirmed == 3
    confirmed = {one.plan.configuration.batch_size for one in apart.requests if one.plan.phase is Phase.CONFIRM}
    compared = confirmed - {128}  # the largest size, over twice as slow as the best
    assert Counter(one.batch_size for one in apart.splits_timed) == {
        size: COMPARING_VISITS if size in compared else FIRST_VISITS for size in spec.batch_sizes
    }
    assert (shared.beside, shared.most_confirmed) == ([], 1)


def test_a_verdict_under_way_is_not_undone_by_an_interrupt(tmp_path: Path) -> None:
    class Interrupted(SteppingLaw):
        def stop(self, stop: TrialStop) -> None:
            super().stop(stop)
            if stop.state is TrialState.PAUSED and not self.pauses:
                os.kill(os.getpid(), signal.SIGINT)

    executor = Interrupted()
    with pytest.raises(InterruptedRunError):
        run(study_spec(budget={"trials": 20, "trial_train_seconds": HITS_UNPAUSED}), tmp_path, executor)
    (paused,) = trials_in(tmp_path, states=[TrialState.PAUSED])
    assert "paused by balanced at " in not_none(paused.outcome).reason


@pytest.mark.parametrize("pruner", ["median", "asha", "hyperband"])
def test_optunas_pruners_resume_interrupted_trials(tmp_path: Path, pruner: str) -> None:
    spec = study_spec(pruner={"name": pruner}, default=HOPELESS)
    first = SteppingLaw(slots=3, interrupts_when=lambda law: sum(law.done.values()) == 7)
    with pytest.raises(InterruptedRunError):
        run(spec, tmp_path, first)
    second = SteppingLaw(done=first.done, slots=1)
    assert not any(trial.state is TrialState.PAUSED for trial in run(spec, tmp_path, second))
    assert second.resumed


def test_only_search_trials_are_saved_and_only_within_the_disk_limit(tmp_path: Path) -> None:
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
def test_paused_trials_of_a_dead_driver_end_if_its_process_ended_or_its_file_is_here(
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


# Several hosts --------------------------------------------------------------------------------------------------------


FAR = "elsewhere/1/0/0/far"  # A driver on another machine; whether it is alive is unknown


def interrupt_once(law: SteppingLaw) -> None:
    """Interrupt the driver during its fourth trial."""
    if law.done.get(4) == 1:
        law.on_look = lambda _: None
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Troubled]]:
    """A store with injected faults, named by ``BSSEARCH_CHECKPOINT_DIR``."""
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", f"troubled://{tmp_path}/store")
    with troubled() as found:
        yield found


@pytest.fixture(params=["folder", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A shared place, named by ``BSSEARCH_CHECKPOINT_DIR``."""
    (tmp_path / "shared").mkdir()
    found = {
        "folder": str(tmp_path / "shared"),
        "file": f"file://{tmp_path / 'shared'}",
        "memory": f"memory://{uuid.uuid4().hex}",
    }[request.param]
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", found)
    return found


@pytest.fixture
def on_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Function that makes this process act as on another host, with that host's own folders."""

    def move(host: str) -> None:
        monkeypatch.setattr("bssearch.search.leases.socket.gethostname", lambda: host)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / host / "cache"))
        monkeypatch.setenv("BSSEARCH_STATE_DIR", str(tmp_path / host / "state"))

    move("one")
    return move


def run_noted(spec: StudySpec, folder: Path, executor: SteppingLaw) -> tuple[list[TrialRecord], list[str]]:
    """Run a study; return its search trials and messages."""
    ear = Ear()
    executor.full = spec.budget.trial_train_seconds
    run_study(spec, Launch(db=url_in(folder), listener=ear, make_executor=lambda *_: executor))
    return trials_in(folder, Phase.SEARCH), ear.notes


def interrupted(folder: Path, trials: int = 12) -> tuple[StudySpec, dict[int, int]]:
    """Interrupt a study during its fourth trial, after hits; return its spec and its trials' progress."""
    spec = study_spec(budget={"trials": trials, "trial_train_seconds": HITS_UNPAUSED})
    executor = SteppingLaw(on_look=interrupt_once)
    with pytest.raises(InterruptedRunError):
        run_noted(spec, folder, executor)
    return spec, executor.done


def outcome_of(folder: Path, number: int) -> TrialOutcome | None:
    return trials_in(folder)[number - 1].outcome


def kept(place: str) -> dict[str, str]:
    """Paths of the checkpoints in a place, by name."""
    files, root = fsspec.url_to_fs(place)
    return {path.rpartition("/")[2]: path for path in files.find(root)}


def test_a_trial_interrupted_on_one_host_goes_on_on_another(
    tmp_path: Path, place: str, on_host: Callable[[str], None]
) -> None:
    spec, done = interrupted(tmp_path)
    paused = outcome_of(tmp_path, 4)
    assert paused is not None and paused.state is TrialState.PAUSED
    assert "trial-4.pt" in kept(place)
    on_host("two")
    second = SteppingLaw(done=done)
    trials, _ = run_noted(spec, tmp_path, second)
    assert (second.requests[0].number, second.requests[0].resumes) == (4, True)
    assert len(trials) == 12
    assert not any(trial.state in {TrialState.PAUSED, TrialState.LOST} for trial in trials)
    assert not kept(place)


@pytest.mark.slow
def test_paused_trials_of_a_dead_driver_go_on_on_another_host(
    tmp_path: Path, place: str, on_host: Callable[[str], None]
) -> None:
    spec = study_spec(budget={"trials": 12, "trial_train_seconds": 0.1})
    doomed = SteppingLaw(on_look=die)
    with pytest.raises(Dies):
        run_noted(spec, tmp_path, doomed)
    waiting = {int(name.removeprefix("trial-").removesuffix(".pt")) for name in kept(place)}
    assert waiting
    on_host("two")
    executor = SteppingLaw(done=doomed.done)
    with pytest.raises(TargetNotReachedError):
        run_noted(spec, tmp_path, executor)
    assert waiting <= set(executor.resumed)


def test_two_drivers_share_paused_trials_in_one_place(
    tmp_path: Path, place: str, on_host: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bssearch.search.driver.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("bssearch.search.pruners.checkpoints.LOOK_SECONDS", 0.05)
    spec, done = study_spec(), dict[int, int]()
    slow = partial(SteppingLaw, done=done, on_look=lambda _: threading.Event().wait(0.005))
    executors = [slow(), slow(slots=2)]
    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(run_noted, spec, tmp_path, executor) for executor in executors]:
            ended.result()
    trials = trials_in(tmp_path)
    pauses = sum(one.pauses for one in executors)
    resumed = sum(len(one.resumed) for one in executors)
    assert pauses > resumed
    pruned_at_once = sum(one.prunes for one in executors)
    assert sum(trial.state is TrialState.PRUNED for trial in trials) == pauses - resumed + pruned_at_once
    assert not any(trial.state in {TrialState.PAUSED, TrialState.LOST, TrialState.FAILED} for trial in trials)
    assert not kept(place)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content[:-1] + b"?", "the file is damaged"),
        (lambda content: b"something else", "the file is not a checkpoint of bssearch"),
        (lambda content: content.replace(b'"study": "', b'"study": "0', 1)[:-1], "the file belongs to study"),
    ],
)
def test_a_trial_with_a_foreign_checkpoint_is_tried_again(
    tmp_path: Path,
    on_host: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[bytes], bytes],
    said: str,
) -> None:
    place = f"memory://{uuid.uuid4().hex}"
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", place)
    spec, done = interrupted(tmp_path, trials=8)
    path, files = kept(place)["trial-4.pt"], fsspec.filesystem("memory")
    files.pipe_file(path, change(files.cat_file(path)))
    on_host("two")
    second = SteppingLaw(done=done)
    trials, _ = run_noted(spec, tmp_path, second)
    outcome = trials[3].outcome
    assert outcome is not None and outcome.state is TrialState.LOST
    assert f"the checkpoint store {place}: downloading trial 4 failed: {said}" in outcome.reason
    assert not second.resumed
    (again,) = [trial for trial in trials if trial.retry_of == 4]
    assert again.seed == trials[3].seed
    assert not kept(place)


def test_without_its_store_the_run_goes_on_with_a_notice(
    tmp_path: Path, on_host: Callable[[str], None], trouble: type[Troubled]
) -> None:
    spec, done = interrupted(tmp_path)
    on_host("two")
    trouble.is_away = True
    second = SteppingLaw(done=done)
    trials, notes = run_noted(spec, tmp_path, second)
    assert trials[3].state is TrialState.PAUSED, "it may go on once the store is back"
    assert not second.resumed and not second.pauses
    assert sum(not trial.state.is_missing for trial in trials) == 12
    away = f"the checkpoint store troubled://{tmp_path}/store: "
    assert sum(note.startswith(f"paused trials cannot resume for now: {away}") for note in notes) == 1
    assert sum(note.startswith("stopping trials instead of pausing") and away in note for note in notes) == 1
    trouble.is_away = False
    third = SteppingLaw(done=done)
    trials, _ = run_noted(spec, tmp_path, third)
    assert third.resumed[0] == 4
    assert trials[3].state not in {TrialState.PAUSED, TrialState.LOST}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store without progress for 0.3 s counts as silent."""
    monkeypatch.setattr("bssearch.search.pruners.checkpoints.PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr("bssearch.search.pruners.checkpoints.TICK_SECONDS", 0.01)


@pytest.mark.usefixtures("impatient")
def test_a_trial_without_its_checkpoint_is_tried_again_and_a_silent_store_is_asked_no_more(
    tmp_path: Path, on_host: Callable[[str], None], trouble: type[Troubled]
) -> None:
    spec, done = interrupted(tmp_path, trials=8)
    on_host("two")
    second = SteppingLaw(done=done)
    trouble.holds = "r"
    trials, notes = run_noted(spec, tmp_path, second)
    outcome = trials[3].outcome
    assert outcome is not None and outcome.state is TrialState.LOST
    assert "downloading trial 4 failed: no progress for 0.3 s" in outcome.reason
    assert [trial.number for trial in trials if trial.retry_of == 4]
    assert sum("no progress for 0.3 s" in note for note in notes if note.startswith("paused trials cannot")) == 1


def test_a_trial_that_is_interrupted_while_its_checkpoint_arrives_stays_paused_as_it_was(
    tmp_path: Path, on_host: Callable[[str], None], trouble: type[Troubled]
) -> None:
    spec, done = interrupted(tmp_path, trials=8)
    before = outcome_of(tmp_path, 4)
    on_host("two")
    trouble.holds = "r"

    def interrupt() -> None:
        trouble.is_held.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    second = SteppingLaw(done=done)
    with pytest.raises(InterruptedRunError):
        run_noted(spec, tmp_path, second)
    assert not second.requests
    assert before is not None and before.state is TrialState.PAUSED
    assert outcome_of(tmp_path, 4) == before
    trouble.goes_on.set()
    third = SteppingLaw(done=done)
    run_noted(spec, tmp_path, third)
    assert third.resumed[0] == 4


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("is_full", True), "No space left on device"),
        (("holds", "rw"), "no progress for 0.3 s"),
    ],
    ids=["full", "silent"],
)
@pytest.mark.parametrize("is_interrupted", [False, True], ids=["to the end", "interrupted"])
def test_without_a_store_a_pausing_trial_is_stopped_and_an_interrupted_one_is_cancelled(
    tmp_path: Path,
    on_host: Callable[[str], None],
    trouble: type[Troubled],
    change: tuple[str, object],
    said: str,
    is_interrupted: bool,
) -> None:
    executor = SteppingLaw(on_submit=lambda _: setattr(trouble, *change))
    pruner = {"name": "none" if is_interrupted else "balanced", "slack": 1.0}
    spec = study_spec(pruner=pruner, budget={"trials": 20, "trial_train_seconds": 4.0})
    if is_interrupted:
        executor.on_look = interrupt_once
        with pytest.raises(InterruptedRunError):
            run_noted(spec, tmp_path, executor)
    else:
        _, notes = run_noted(spec, tmp_path, executor)
        assert sum(note.startswith("stopping trials instead of pausing") and said in note for note in notes) == 1
    outcomes = [trial.outcome for trial in trials_in(tmp_path) if trial.outcome is not None]
    (stopped,) = [one for one in outcomes if "could not be paused: the checkpoint store" in one.reason]
    assert stopped.state is (TrialState.CANCELLED if is_interrupted else TrialState.PRUNED)
    assert f"failed: {said}; check BSSEARCH_CHECKPOINT_DIR" in stopped.reason
    assert not kept(f"file://{tmp_path / 'store'}")


@pytest.fixture(params=["on another host", "in a process that serves other studies"])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[str]:
    """A driver on another host, or one in another process of this host that lives on."""
    if request.param == "on another host":
        yield FAR
        return
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        host, _, place, _, mark = leases.this_driver().rsplit("/", 4)
        yield "/".join([host, str(process.pid), place, leases._start(process.pid), mark])
        process.kill()


def test_paused_trials_of_a_live_driver_elsewhere_are_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: str
) -> None:
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / "shared"))
    spec, notes = study_spec(), list[str]()
    with open_store(url_in(tmp_path)) as store:
        store.studies.create(spec.new_study("ada"))
        lease = Lease(owner=elsewhere, seconds=60.0, user="ada", spec=None)
        store.trials.start("toy", make_plan(), environment=make_environment(), lease=lease)
        paused = TrialOutcome(state=TrialState.PAUSED, reason="slow")
        trial = store.trials.finish("toy", 1, paused, steps_x_step_time_s=None)

        def waiting_for(driver: str) -> WaitingTrials:
            return WaitingTrials(spec, store, Leases(store, "toy", driver), notes.append)

        far, near = waiting_for(elsewhere), waiting_for("here/1/0/0/near")
        file = not_none(near.file_for(1))
        file.write_bytes(b"saved")
        far.ended(trial)
        near.settle([trial], TrialState.PRUNED, for_disk=False)
        assert store.trials.get("toy", 1).state is TrialState.PAUSED
        assert file.exists()
        far.leave()
        near.settle([trial], TrialState.PRUNED, for_disk=False)
        assert store.trials.get("toy", 1).state is TrialState.PRUNED
        assert not file.exists()
    assert not notes


def test_a_folder_deleted_by_another_driver_counts_as_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / "gone"))
    monkeypatch.setattr(Path, "is_dir", lambda path, **_: True)  # it was there a moment ago
    kept = Checkpoints(make_study_record())
    kept.forget(3)
    assert not kept.held().sizes
