"""Every objective, in complete studies and after failures, pauses and interrupts."""

import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bssearch import InterruptedRunError, Launch, LaunchError, StudySpec, UsageError, open_store, registry, run_study
from bssearch.analysis.answer import Answer
from bssearch.analysis.headline import headline
from bssearch.analysis.objectives import Objective, objective_of
from bssearch.executors.base import Event
from bssearch.records import (
    Configuration,
    DeviceUse,
    MetricInfo,
    ModelDescription,
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
from bssearch.search.finding import answer
from tests.executors.fake import DESCRIPTION, FakeExecutor
from tests.factories import make_spec, not_none
from tests.search.law import LawExecutor, step_seconds, steps_needed, url_in

BUDGET = {"trials": 16, "trial_train_seconds": 100.0}


def run(folder: Path, objective: str, executor: LawExecutor, **changes: object) -> Answer:
    spec = make_spec(budget=BUDGET, objective=objective, confirm={"top": 1, "runs": 2}, **changes)
    return run_study(spec, Launch(db=url_in(folder), make_executor=lambda *_: executor))


def test_the_fewest_samples_are_those_of_the_smallest_batch_size(tmp_path: Path) -> None:
    executor = LawExecutor()
    found = run(tmp_path, "samples_to_target", executor)
    assert found.optimal.batch_size == 8
    assert not_none(found.optimal.objective_value).median == found.optimal.samples_to_target
    assert "samples" in headline(found)
    capped = [one for one in executor.requests if one.plan.limit_state is TrialState.CAPPED]
    assert capped
    fewest = 100 * (1 + 30 / 8) * 8
    for request in capped:
        size = request.plan.configuration.batch_size
        assert request.plan.train_seconds_limit >= 1.3 * fewest / size * step_seconds(size) * 0.99


def test_cost_is_time_at_a_price(tmp_path: Path) -> None:
    found = run(tmp_path, "cost_to_target", LawExecutor(), price_per_device_hour=3600.0)
    assert found.optimal.batch_size in (16, 32)
    assert not_none(found.optimal.objective_value).median == pytest.approx(
        not_none(found.optimal.time_to_target_s).median
    )
    assert "at a cost of" in headline(found)
    assert [one.cost for one in found.front] == [pytest.approx(one.time_to_target_s) for one in found.front]


def test_energy_takes_a_device_that_measures_it(tmp_path: Path) -> None:
    executor = LawExecutor()
    with pytest.raises(LaunchError, match="Test CPU reports no power"):
        run(tmp_path, "energy_to_target", executor)
    assert len(executor.requests) == 1, "the rest of the budget is not spent"


def test_the_metric_in_a_budget_trains_every_trial_to_the_full_limit(tmp_path: Path) -> None:
    executor = LawExecutor()
    found = run(tmp_path, "metric_in_budget", executor)
    assert {request.plan.train_seconds_limit for request in executor.requests} == {100.0}
    assert not any(request.plan.stop_at_target for request in executor.requests)
    assert not_none(found.optimal.objective_value).median == pytest.approx(0.9, abs=0.1)
    assert found.speedup.over_default is None
    assert "comes to accuracy" in headline(found)


OBJECTIVES = registry.names("objectives")
RACING = tuple(name for name in OBJECTIVES if registry.load("objectives", name).trials_race)
TARGET = 0.9
TRIALS = 8
FULL = 4.0
EVERY = 0.2  # train seconds of a trial, and between two evaluations

WATTS = 50.0
SIZES = {"low": 8, "high": 64}
SEES = replace(
    DESCRIPTION,
    metrics={"accuracy": MetricInfo(low=0.0, high=1.0, chance=0.1)},
    model=ModelDescription(parameters=5, batch_norm_layers=0, initial_metrics={"accuracy": 0.0}),
)


def metric_at(configuration: Configuration, train_seconds: float) -> float:
    """0.99 (1 − exp(−t / τ)); τ makes the curve meet the target at the law's time."""
    met = steps_needed(configuration) * step_seconds(configuration.batch_size)
    return 0.99 * -math.expm1(math.log(1 - TARGET / 0.99) * train_seconds / met)


def curve(request: TrialRequest) -> Iterator[Observation | TrialOutcome]:
    configuration = request.plan.configuration
    for place in range(1000):
        seconds = place * EVERY
        step = round(seconds / step_seconds(configuration.batch_size))
        yield Observation(
            step=step,
            samples=step * configuration.batch_size,
            train_seconds=seconds,
            metric=metric_at(configuration, seconds),
            loss=None,
            learning_rate=configuration.learning_rate,
        )


class Curves(FakeExecutor):
    """Plays each configuration's curve on a device that draws 50 W.

    Interrupts once, when trial ``interrupted_in`` has met its target, even if the trial continues.
    """

    def __init__(self, *, slots: int = 1, interrupted_in: int = 0) -> None:
        super().__init__(curve, slots, {size: step_seconds(size) for size in (8, 16, 32, 64)}, description=SEES)
        self.stops: list[TrialState] = []
        self._interrupted_in = interrupted_in

    def stop(self, stop: TrialStop) -> None:
        self.stops.append(stop.state)
        super().stop(stop)

    def events(self, timeout: float) -> list[Event]:
        use = DeviceUse(mean_power_watts=WATTS)
        found = [
            one if isinstance(one, TrialObserved) else replace(one, outcome=replace(one.outcome, device_use=use))
            for one in super().events(timeout)
        ]
        if any(self._is_moment(event) for event in found):
            self._interrupted_in = 0
            os.kill(os.getpid(), signal.SIGINT)
        return found

    def _is_moment(self, event: Event) -> bool:
        if event.number != self._interrupted_in:
            return False
        if isinstance(event, TrialEnded):
            return True
        request = next(one for one in self.requests if one.number == event.number)
        return not request.plan.stop_at_target and event.observation.metric >= TARGET


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / "waiting"))
    return url_in(tmp_path)


def small_spec(objective: str, **changes: object) -> StudySpec:
    return make_spec(
        objective=objective,
        space={"batch_size": SIZES, "learning_rate": {"reference_batch": 32, "low": 0.02, "high": 0.5, "rule": "sqrt"}},
        budget={"trials": TRIALS, "trial_train_seconds": FULL},
        confirm={"runs": 0},
        price_per_device_hour=3600.0,
        **{"pruner": {"name": "balanced"}, "default": {"batch_size": 32, "learning_rate": 0.1}, **changes},
    )


def go(spec: StudySpec, url: str, executor: Curves) -> list[TrialRecord]:
    run_study(spec, Launch(db=url, make_executor=lambda *_: executor))
    return search_trials(spec, url)


def search_trials(spec: StudySpec, url: str) -> list[TrialRecord]:
    with open_store(url, write=False) as store:
        return list(store.trials.of(spec.name, phase=Phase.SEARCH))


def check_figures(spec: StudySpec, trials: list[TrialRecord]) -> None:
    """Assert that every trial has the value of its configuration's curve, or no value."""
    objective = objective_of(spec)
    assert any(objective.figure(trial) is not None for trial in trials)
    for trial in trials:
        figure = objective.figure(trial)
        if not counts(objective, trial):
            assert figure is None, (trial.number, trial.state)
        else:
            assert figure == pytest.approx(true_figure(objective, trial.configuration), rel=0.02), trial.number


def counts(objective: Objective, trial: TrialRecord) -> bool:
    """True if a trial reached the target or, for objectives without one, trained to the full limit."""
    if objective.stops_at_target:
        return trial.state is TrialState.REACHED
    return trial.state in {TrialState.REACHED, TrialState.EXHAUSTED} and not_none(trial.outcome).train_seconds == FULL


def true_figure(objective: Objective, configuration: Configuration) -> float:
    times = [place * EVERY for place in range(round(FULL / EVERY) + 1)]
    metrics = [metric_at(configuration, one) for one in times]
    if not objective.stops_at_target:
        return -metrics[-1]
    after = next(place for place, metric in enumerate(metrics) if metric >= TARGET)
    seconds = times[after - 1] + (TARGET - metrics[after - 1]) / (metrics[after] - metrics[after - 1]) * EVERY
    if objective.name == "samples_to_target":
        return seconds / step_seconds(configuration.batch_size) * configuration.batch_size
    return seconds * {"time_to_target": 1.0, "cost_to_target": 1.0, "energy_to_target": WATTS}[objective.name]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_resumed_trial_has_the_figure_of_its_whole_curve(url: str, objective: str) -> None:
    spec = small_spec(objective, default={"batch_size": 64, "learning_rate": 3.0})
    executor = Curves(slots=2)
    trials = go(spec, url, executor)
    check_figures(spec, trials)
    if objective in RACING:
        assert TrialState.PAUSED in executor.stops
        assert any(request.resumes for request in executor.requests)
    else:
        assert executor.stops == [], "no trial stops early without a race"
    assert len(trials) == TRIALS


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_another_target_is_answered_from_the_curves_or_refused_without_a_hit(url: str, objective: str) -> None:
    spec = small_spec(objective)
    go(spec, url, Curves())
    with open_store(url, write=False) as store:
        if not objective_of(spec).stops_at_target:
            with pytest.raises(UsageError, match="no answer for another target"):
                answer(store, spec.name, 0.5)
            return
        own, easier = answer(store, spec.name), answer(store, spec.name, 0.5)
    assert 0 < not_none(easier.optimal.objective_value).median < not_none(own.optimal.objective_value).median
    assert easier.target.value == 0.5


@pytest.mark.parametrize("objective", ["time_to_target", "metric_in_budget"])  # one ends there, one goes on
def test_an_interrupt_after_the_target_ends_no_trial_early(url: str, objective: str) -> None:
    spec = small_spec(objective, pruner={"name": "cap"})
    ends_there = objective_of(spec).stops_at_target
    with pytest.raises(InterruptedRunError):
        go(spec, url, Curves(interrupted_in=1))
    (stopped,) = search_trials(spec, url)
    assert stopped.state is (TrialState.REACHED if ends_there else TrialState.PAUSED)
    assert (objective_of(spec).figure(stopped) is not None) is ends_there
    executor = Curves()
    trials = go(spec, url, executor)
    assert executor.requests[0].resumes is not ends_there
    check_figures(spec, trials)
    assert counts(objective_of(spec), trials[0])
    assert len(trials) == TRIALS
