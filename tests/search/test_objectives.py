"""Every objective, in complete studies, after failures, pauses and interrupts, and on several devices."""

import math
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from bssearch import (
    InterruptedRunError,
    Launch,
    LaunchError,
    StudySpec,
    UsageError,
    open_store,
    plan_scale,
    registry,
    run_study,
)
from bssearch.analysis.answer import Answer
from bssearch.analysis.headline import about_devices, headline
from bssearch.analysis.objectives import Objective, objective_of
from bssearch.executors.base import Event
from bssearch.records import (
    Configuration,
    DeviceUse,
    MetricInfo,
    ModelDescription,
    Observation,
    Phase,
    StepTime,
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
    assert "reaches accuracy" in headline(found)


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


# Several devices ------------------------------------------------------------------------------------------------------


LADDER = [16, 32, 64, 128, 256, 512]


@dataclass
class Node(LawExecutor):
    """Devices that split a step's samples and reduce its gradients in ``reduce`` seconds."""

    reduce: float = 0.0005

    def step_seconds_of(self, configuration: Configuration) -> float:
        reduce = self.reduce if configuration.world_size > 1 else 0.0
        return 0.001 + 0.0001 * configuration.batch_size / configuration.world_size + reduce


def spec_of(devices: Any, **changes: Any) -> Any:
    space = {"batch_size": LADDER, "learning_rate": {"low": 0.01, "high": 1.0}}
    executor = {"devices": devices, **changes.pop("executor", {})}
    return make_spec(space=space, executor=executor, budget={"trials": 40, "trial_train_seconds": 20}, **changes)


def run_on(devices: Any, folder: Path, executor: LawExecutor) -> Answer:
    return run_study(spec_of(devices), Launch(db=url_in(folder), make_executor=lambda *_: executor))


def seconds(executor: Node, batch_size: int, world_size: int) -> float:
    """Seconds to the target with the best learning rate."""
    configuration = Configuration(
        batch_size=batch_size,
        micro_batch_size=batch_size // world_size,
        world_size=world_size,
        learning_rate=0.1 * math.sqrt(batch_size / 32),
    )
    return steps_needed(configuration) * executor.step_seconds_of(configuration)


def test_more_devices_take_larger_batches_and_the_answer_gives_savings_and_cost(tmp_path: Path) -> None:
    executor = Node()
    # seed 1, because the best at one device is more than 5 % off for 8 of 40 seeds
    launch = Launch(db=url_in(tmp_path), make_executor=lambda *_: executor)
    found = run_study(spec_of([1, 2, 4], seed=1), launch)
    assert [one.world_size for one in found.by_devices] == [1, 2, 4]
    for one in found.by_devices:
        best = min(seconds(executor, size, one.world_size) for size in LADDER if size % one.world_size == 0)
        assert one.seconds <= 1.05 * best
        assert one.runs == 3 and one.cost == one.world_size * one.seconds
        assert one.efficiency == pytest.approx(one.speedup.value / one.world_size)
    first, second, fourth = found.by_devices
    assert first.batch_size < fourth.batch_size and first.seconds > second.seconds > fourth.seconds
    assert (first.speedup.value, first.reduce_share) == (1.0, 0.0)
    assert second.reduce_share == pytest.approx(0.0005 / (0.0015 + 0.0001 * second.batch_size / 2))
    assert found.optimal.world_size == 1
    assert about_devices(found).startswith(f"On 1 process batch {first.batch_size} takes")


def test_a_batch_size_with_a_wrong_step_time_runs_as_a_rival_and_becomes_the_best(tmp_path: Path) -> None:
    best = min(LADDER, key=lambda size: seconds(Node(), size, 4))

    def timed(found: StepTime) -> StepTime:
        slowed = (found.batch_size, found.world_size) == (best, 4)
        return replace(found, step_seconds=1.1 * not_none(found.step_seconds)) if slowed else found

    *_, fourth = run_on([1, 4], tmp_path, Node(timed=timed)).by_devices
    assert (fourth.batch_size, fourth.runs) == (best, 3)
    assert fourth.seconds == pytest.approx(seconds(Node(), best, 4), rel=0.05)
    assert fourth.predicted_s == pytest.approx(1.1 * fourth.seconds, rel=0.02)


def test_the_search_trains_on_the_least_number_and_only_the_front_on_the_others(tmp_path: Path) -> None:
    executor = Node(reduce=0.05)
    found = run_on([1, 2], tmp_path, executor)
    assert {one.plan.configuration.world_size for one in executor.requests} == {1}, "two devices are slower"
    assert [one.on_front for one in found.by_devices] == [True, False]
    assert "more processes save under 5 %: 2 processes take" in about_devices(found)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((10.2, 10.0, 12.0), "; more processes save under 5 %: 2 processes take"),
        ((10.0, 5.1, 5.0), "; more than 2 save under 5 %."),
        ((10.0, 6.0, 5.0), "4 processes reach the target"),
    ],
)
def test_devices_up_to_the_last_that_save_five_percent_are_named(
    times: tuple[float, ...], said: str, tmp_path: Path
) -> None:
    found = run_on([1, 2, 4], tmp_path, Node())
    rows = [one.model_copy(update={"seconds": time}) for one, time in zip(found.by_devices, times, strict=True)]
    sentence = about_devices(found.model_copy(update={"by_devices": rows}))
    assert said in sentence and ("save under 5 %" in said or "save" not in sentence)


def test_a_study_resumes_its_runs_on_more_devices(tmp_path: Path) -> None:
    run_on([1, 2], tmp_path, Node())
    again = Node()
    found = run_on([1, 2], tmp_path, again)
    assert (again.requests, again.splits_timed) == ([], [])
    wider = Node()
    wide = run_on([1, 2, 4], tmp_path, wider)
    assert {one.world_size for one in wider.splits_timed} == {4}
    assert {one.plan.configuration.world_size for one in wider.requests} == {4}
    assert wide.optimal == found.optimal, "the answer for one device stays"


def test_with_one_device_count_every_trial_has_it(tmp_path: Path) -> None:
    executor = Node()
    found = run_on(2, tmp_path, executor)
    assert {one.plan.configuration.world_size for one in executor.requests} == {2}
    assert {one.world_size for one in executor.splits_timed} == {2}
    assert (found.by_devices, found.optimal.world_size) == ([], 2)
    assert found.optimal.micro_batch_size * 2 == found.optimal.batch_size
    best = min(LADDER, key=lambda size: seconds(executor, size, 2))
    assert seconds(executor, found.optimal.batch_size, 2) <= 1.05 * seconds(executor, best, 2)
    with open_store(url_in(tmp_path)) as store:
        (study,) = store.studies.summaries()
        assert {trial.phase for trial in store.trials.of(study.name)} == {Phase.SEARCH, Phase.CONFIRM}
        assert {one.world_size for one in store.probes.step_times(study.name)} == {2}


def test_a_plan_for_more_devices_takes_the_measured_time_of_the_reduction(tmp_path: Path) -> None:
    run_on([1, 2], tmp_path, Node(reduce=0.003))
    found = plan_scale(devices=2, batch=64, study="toy", db=url_in(tmp_path))
    assert found.rows[1].communication_s == pytest.approx(0.003, rel=0.02)
    assert found.rows[1].step_s == pytest.approx(0.001 + 0.0001 * 32 + 0.003, rel=0.02)
    (tmp_path / "one").mkdir()
    run_on(1, tmp_path / "one", Node())
    with pytest.raises(UsageError, match="exchange gradients; give bandwidth_gb_s and parameters"):
        plan_scale(devices=2, batch=64, study="toy", db=url_in(tmp_path / "one"))


@pytest.mark.parametrize(
    ("devices", "changes", "words"),
    [
        (3, {}, "batch size 16 must be a multiple of executor.devices = 3"),
        ([1, 3], {}, "executor.devices = 3 divides no batch size of"),
        (0, {}, "greater than or equal to 1"),
        ([], {}, "at least 1 item"),
        (2, {"executor": {"name": "inline"}}, "devices = 2 needs the executor local"),
    ],
)
def test_devices_that_cannot_share_a_batch_are_refused(devices: Any, changes: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        spec_of(devices, **changes)


def test_a_model_whose_batch_norms_would_see_one_device_needs_a_fixed_ghost_batch(tmp_path: Path) -> None:
    launch = Launch(db=url_in(tmp_path), make_executor=lambda *_: Node(batch_norm_layers=3))
    with pytest.raises(
        UsageError, match=r"executor\.devices = 2 may .* the model has 3 batch normalisation layers"
    ) as caught:
        run_study(spec_of([1, 2]), launch)
    assert "training.ghost_batch_size" in str(caught.value.hint)
    assert run_study(spec_of([1, 2], training={"ghost_batch_size": 16}), launch).by_devices


def test_only_a_search_on_more_devices_is_another_question() -> None:
    assert spec_of([1, 2]).question_hash == spec_of(1).question_hash
    assert spec_of(2).question_hash != spec_of(1).question_hash
