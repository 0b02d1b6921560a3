"""Driver and simulation decide alike; a replayed log and a new engine give the same actions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bssearch import BSSearchError, InterruptedRunError, StudySpec, open_store, registry
from bssearch.executors.base import Event
from bssearch.records import (
    COULD_NOT_PAUSE,
    Configuration,
    Phase,
    ProbeRecord,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialRequest,
    TrialState,
    TrialStop,
)
from bssearch.search import engine as actions
from bssearch.search.driver import Driver, Listener
from bssearch.search.engine import Engine
from bssearch.search.history import History
from bssearch.search.samplers.base import Choice, Sampler
from tests.benchmarks.simulate.replay import Playing, Replay, VirtualClock
from tests.factories import make_environment, make_probe, make_spec, not_none, quick_at, store_study
from tests.search.law import LawExecutor, step_seconds, steps_needed, url_in

LISTS = {
    "batch_size": [8, 16, 32, 64, 128],
    "learning_rate": [0.03, 0.1, 0.3],
    "weight_decay": [0.0, 1e-4],
}
DEFAULT = {"batch_size": 64, "learning_rate": 0.1, "weight_decay": 0.0}


def study(
    sampler: str, pruner: str, *, trials: int = 12, slots: int = 1, pruner_disk: float = 10.0, **changes: Any
) -> StudySpec:
    return make_spec(
        space=LISTS,
        default=DEFAULT,
        sampler={"name": sampler},
        pruner={"name": pruner, "checkpoint_gib": pruner_disk},
        confirm={"top": 2, "runs": 2},
        budget={"trials": trials, "trial_train_seconds": 8.0},
        executor={"slots": slots},
        **changes,
    )


def row(configuration: Configuration, seed: int) -> Replay:
    """Recorded trial of a configuration and seed: a straight line to 0.9, by the law with noise."""
    noise = math.exp(0.2 * np.random.default_rng(seed).standard_normal())
    step = step_seconds(configuration.batch_size)
    seconds = noise * steps_needed(configuration) * step
    every = max(1, round(0.05 * seconds / step))
    steps = range(0, math.ceil(1.2 * seconds / step) + every, every)
    moments = [one * step for one in steps]
    hit = next(moment for moment in moments if moment >= seconds)
    return Replay(moments, [min(1.0, 0.9 * moment / seconds) for moment in moments], hit, math.inf, list(steps))


@dataclass
class TableExecutor(LawExecutor):
    """Replays recorded trials, one evaluation at a time; paused trials leave a checkpoint file."""

    playing: dict[int, Playing] = field(default_factory=dict)
    cannot_save: bool = False

    def submit(self, request: TrialRequest) -> None:
        self.requests.append(request)
        self.running.append(request)
        if request.resumes:
            self.playing[request.number].request = request
        else:
            self.playing[request.number] = Playing(row(request.plan.configuration, request.plan.seed), request)

    def events(self, timeout: float) -> list[Event]:
        if not self.running:
            return []
        request = min(self.running, key=lambda one: (self.playing[one.number].next_at, one.number))
        stopped = next((one for one in self.running if one.number in self.stopped), None)
        if stopped is not None:
            return [self.end(stopped.number, self.outcome(stopped, *self.stopped.pop(stopped.number)))]
        playing = self.playing[request.number]
        found = playing.advance()
        if isinstance(found, TrialOutcome):
            return [self.end(request.number, found)]
        seen = TrialObserved(request.number, found)
        if playing.has_reached and request.plan.stop_at_target:
            return [seen, self.end(request.number, playing.outcome(TrialState.REACHED, "as recorded"))]
        return [seen]

    def outcome(self, request: TrialRequest, state: TrialState, reason: str) -> TrialOutcome:
        if state is TrialState.PAUSED:
            if request.checkpoint is None or self.cannot_save:
                state, reason = TrialState.PRUNED, f"{reason}; {COULD_NOT_PAUSE}: the disk is full"
            else:
                Path(request.checkpoint).touch()
        return self.playing[request.number].outcome(state, reason)

    def end(self, number: int, outcome: TrialOutcome) -> Event:
        self.running = [one for one in self.running if one.number != number]
        return TrialEnded(number, outcome)


@dataclass(frozen=True)
class Call:
    """A call of an engine's event method."""

    event: str
    given: tuple[Any, ...]
    options: dict[str, Any]

    def on(self, engine: Engine) -> list[actions.Action]:
        answer: list[actions.Action] = getattr(engine, self.event)(*self.given, **self.options)
        return answer


EVENTS = {
    *("changed", "slot_free", "started", "evaluated", "ended", "timed"),
    *("claimed", "found_saved", "cannot_save", "interrupted"),
}


class Recorded(Engine):
    """An engine that records its calls and answers."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.journal: list[Call] = []
        self.answers: list[list[actions.Action]] = []

    def __getattribute__(self, name: str) -> Any:
        return partial(self.keep, name) if name in EVENTS else super().__getattribute__(name)

    def keep(self, event: str, *given: Any, **options: Any) -> list[actions.Action]:
        call: Callable[..., list[actions.Action]] = super().__getattribute__(event)
        self.journal.append(Call(event, given, options))
        self.answers.append(call(*given, **options))
        return self.answers[-1]


class RecordedDriver(Driver):
    """A driver with a recorded engine."""

    engine: Recorded

    def _engine(self, *_: Any) -> Recorded:
        return Recorded(self.spec, slots=self.executor.slots, device_name=self.environment.device_name)


@pytest.fixture(autouse=True)
def _checkpoints_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))


def driven(spec: StudySpec, folder: Path) -> tuple[list[TrialRecord], dict[int, ProbeRecord]]:
    with open_store(url_in(folder)) as store:
        store_study(store, spec)
        Driver(spec, store, TableExecutor(), make_environment(), Listener()).run()
        return store.trials.of(spec.name), store.probes.by_batch_size(spec.name, make_environment())


def simulated(spec: StudySpec, probes: dict[int, ProbeRecord], workers: int = 1) -> VirtualClock:
    """A finished simulation of the same study."""
    clock = VirtualClock(Engine(spec, slots=workers), row_of, probes=probes, workers=workers)
    for _ in clock.run():
        pass
    return clock


def row_of(plan: TrialPlan) -> Replay:
    return row(plan.configuration, plan.seed)


class Reopening(Sampler):
    """Expects much of another trial only after a confirmation."""

    def choose(self, history: History, batch_size: int | None = None) -> Choice | None:
        expected = 0.5 if history.of_phase(Phase.CONFIRM) else 0.001
        rate = 0.03 if len(history.trials) % 2 else 0.1
        configuration = replace(history.spec.default_configuration, learning_rate=rate)
        return Choice(configuration, None, expected_improvement=expected)


def test_a_confirmed_search_does_not_reopen() -> None:
    engine = Engine(study("random", "none", trials=100), sampler=Reopening())
    clock = VirtualClock(engine, row_of, probes={size: make_probe(size) for size in engine.spec.batch_sizes})
    for _ in clock.run():
        pass
    phases = [trial.phase for trial in clock.trials.values()]
    assert phases == sorted(phases, reverse=True) and {*phases} == {Phase.SEARCH, Phase.CONFIRM}


def decision(trial: TrialRecord) -> tuple[object, ...]:
    """Decisions about a trial and its outcome."""
    outcome = not_none(trial.outcome)
    return (
        trial.number,
        trial.state,
        trial.phase,
        trial.uncapped,
        trial.configuration,
        trial.sampled,
        trial.seed,
        trial.train_seconds_limit,
        trial.retry_of,
        pytest.approx(trial.expected_improvement),  # the last digits of BLAS may differ between calls
        outcome.train_seconds,
        outcome.steps_to_target,
    )


# Every sampler; pruners that pause, race, cap and ask Optuna. The default sampler with each other pruner is slow.
PAIRS = [("auto", "balanced"), ("tpe", "race"), ("gp", "asha"), ("random", "fast"), ("grid", "cap")]
SLOW_PAIRS = [("auto", pruner) for pruner in registry.names("pruners") if pruner != "balanced"]


@pytest.mark.parametrize(
    ("sampler", "pruner"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW_PAIRS)]
)
def test_the_driver_and_the_simulation_make_the_same_decisions(sampler: str, pruner: str, tmp_path: Path) -> None:
    spec = study(sampler, pruner)
    trials, probes = driven(spec, tmp_path)
    assert [decision(one) for one in trials] == [decision(one) for one in simulated(spec, probes).trials.values()]
    assert len({one.phase for one in trials}) == 2


class InterruptedAfter(Listener):
    """Interrupts its driver, as Ctrl-C does, after a number of trials."""

    def __init__(self, ended: int) -> None:
        self.left = ended
        self.driver: Driver | None = None

    def ended(self, trial: TrialRecord, history: object) -> None:
        self.left -= 1
        if self.left == 0 and self.driver is not None:
            self.driver.interrupts.ask()


def told(answer: Sequence[actions.Action]) -> list[object]:
    """Comparable actions: errors become their messages."""
    return [str(one) if isinstance(one, BSSearchError) else one for one in answer]


@pytest.mark.parametrize("sampler", ["auto", "tpe"])
def test_the_log_of_a_run_with_pauses_and_an_interrupt_gives_the_same_actions(sampler: str, tmp_path: Path) -> None:
    spec = study(sampler, "balanced", trials=16, slots=2)
    with open_store(url_in(tmp_path)) as store:
        store_study(store, spec)
        executor, listener = TableExecutor(slots=2), InterruptedAfter(9)
        first = RecordedDriver(spec, store, executor, make_environment(), listener)
        listener.driver = first
        with pytest.raises(InterruptedRunError):
            first.run()
        again = RecordedDriver(spec, store, executor, make_environment(), Listener())
        again.run()
        states = [trial.state for trial in store.trials.of(spec.name)]
    for run in (first.engine, again.engine):
        engine = Engine(spec, slots=2, device_name="Test CPU")
        assert list(map(told, [call.on(engine) for call in run.journal])) == list(map(told, run.answers))
    assert {"interrupted", "evaluated", "ended", "found_saved"} <= {call.event for call in first.engine.journal}
    asked = {action.state for one in first.engine.answers for action in one if isinstance(action, TrialStop)}
    assert TrialState.PAUSED in asked
    assert any(call.given[0].resumed for call in again.engine.journal if call.event == "started")
    assert TrialState.RUNNING not in states and TrialState.PAUSED not in states


def rebuilt(spec: StudySpec, seen: Sequence[Call], workers: int) -> Engine:
    """A new engine from the store's and checkpoints' state after some events."""
    trials: dict[int, TrialRecord] = {}
    evaluations: dict[int, list[tuple[float, float]]] = {}
    started: dict[int, Call] = {}
    told: dict[str, Call] = {}
    for call in seen:
        match call.event, *call.given:
            case "started", _, trial:
                trials[trial.number], started[trial.number] = trial, call
            case "ended", trial:
                trials[trial.number] = trial
                del started[trial.number]
            case "changed", changed:
                trials |= {trial.number: trial for trial in changed}
            case "evaluated", TrialObserved(number, at):
                evaluations.setdefault(number, []).append((at.train_seconds, at.metric))
            case (("found_saved" | "timed"), *_):
                told[call.event] = call
    engine = Engine(spec, slots=workers)
    engine.changed([trials[number] for number in sorted(trials)], evaluations)
    for call in [*told.values(), *started.values()]:
        call.on(engine)
    return engine


def silent(answer: Sequence[actions.Action]) -> list[actions.Action]:
    """Actions without messages to the user."""
    return [action for action in answer if not isinstance(action, actions.Tell | actions.SearchEnded)]


@dataclass
class Live:
    """A simulated study with its engine's journal and actions."""

    spec: StudySpec
    workers: int
    journal: list[Call]
    answers: list[list[actions.Action]]

    def places(self, event: str) -> list[int]:
        return [at for at, call in enumerate(self.journal) if call.event == event]

    @property
    def searched(self) -> int:
        """Number of events until the search ended."""
        return self.places("claimed")[0]


def live(spec: StudySpec, workers: int) -> Live:
    engine = Recorded(spec, slots=workers)
    probes = {size: make_probe(size, step_seconds=step_seconds(size)) for size in spec.batch_sizes}
    for _ in VirtualClock(engine, row_of, probes=probes, workers=workers).run():
        pass
    return Live(spec, workers, engine.journal, list(map(silent, engine.answers)))


CASES = [
    ("auto", "balanced", 1),
    ("tpe", "balanced", 2),
    ("random", "asha", 1),
    ("grid", "median", 1),
]


@pytest.mark.parametrize(("sampler", "pruner", "workers"), CASES)
def test_an_engine_rebuilt_in_mid_study_decides_like_the_live_one(sampler: str, pruner: str, workers: int) -> None:
    run = live(study(sampler, pruner, slots=workers), workers)
    ends = [at + 1 for at in run.places("found_saved") if at < run.searched]
    looks = [at for at in run.places("evaluated") if at < run.searched]
    for cut in [*ends[2::4], *looks[7::40]]:
        engine = rebuilt(run.spec, run.journal[:cut], run.workers)
        for at in range(cut, run.searched):
            assert silent(run.journal[at].on(engine)) == run.answers[at], f"rebuilt after {cut}, at event {at}"


@pytest.mark.parametrize(("bytes_there", "given_up"), [(2**29, 0), (2**29 + 1, 1)])
def test_paused_trials_are_given_up_when_they_exceed_the_disk_limit(bytes_there: int, given_up: int) -> None:
    run = live(study("tpe", "balanced", trials=20, pruner_disk=0.5), 1)
    at, saved = next((at, run.journal[at].given[0]) for at in run.places("found_saved") if run.journal[at].given[0])
    answer = rebuilt(run.spec, run.journal[:at], 1).found_saved(saved, bytes_there)
    assert [isinstance(action, actions.SettlePaused) for action in answer] == [True] * given_up


def test_a_plan_that_another_driver_forestalled_changes_nothing() -> None:
    run = live(study("tpe", "balanced"), 1)
    look = run.places("slot_free")[3]
    engine = rebuilt(run.spec, run.journal[:look], 1)
    first = run.journal[look].on(engine)
    assert isinstance(first[0], TrialPlan)
    assert run.journal[look].on(engine) == first


def test_a_claim_that_another_driver_holds_is_waited_for() -> None:
    run = live(study("tpe", "balanced"), 1)
    engine = rebuilt(run.spec, run.journal[: run.searched], 1)
    assert actions.ClaimConfirmation() in engine.slot_free(0.0)
    assert engine.claimed(False) == [actions.Wait(for_claim=True)]
    assert engine.slot_free(0.0) == [actions.ClaimConfirmation()]
    assert engine.claimed(True) == []
    (action,) = engine.slot_free(0.0)
    assert isinstance(action, TrialPlan) and action.phase.value == "confirm"


def test_the_quick_answer_survives_a_rewritten_history() -> None:
    engine, quick = Engine(make_spec()), quick_at(64, 32, 128, noise_scale=100.0)
    engine.changed(quick=quick)
    engine.changed()
    engine.changed(is_rewritten=True)
    assert engine.history.quick == quick
