"""What a study minimises: one positive figure of a trial, of which less is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bssearch.records import Configuration, Objective, StepTime, Target, TrialRecord, TrialState
from bssearch.spec import StudySpec

Basis = Literal["measured", "steps_x_step_time"]

StepSeconds = Mapping[tuple[int, int], float]
"""Seconds of an optimizer step by (batch size, micro-batch size), timed in isolation."""

FLAT = 1.05
"""Figures within this factor of the least are as good."""

FEW = 0.25
"""So large a share of runs counted by steps × a step time that is 10 % off moves a geometric mean by less than 3 %."""

AS_GOOD = 0.005
"""Metrics within this share of the target's value are as good."""


@dataclass(frozen=True, slots=True)
class Measure:
    """An objective, with what it takes to compute it: the target, and the price of an hour of one device.

    time_to_target: seconds. samples_to_target: samples. cost_to_target: hours × devices × price, in the currency of
    the price. energy_to_target: joules of the device, mean power × seconds. metric_in_budget: see
    `metric_figure`.

    Seconds of a trial are those it would take alone: the measured ones, or steps × its own step time where something
    else used the device. With ``step_seconds`` they are steps × these, contended or not; see `between`.
    """

    objective: Objective = Objective.TIME_TO_TARGET
    target: Target | None = None
    price_per_device_hour: float = 1.0
    step_seconds: StepSeconds | None = None

    def between(self, runs: Sequence[TrialRecord], step_seconds: StepSeconds) -> Measure:
        """Return the measure that compares runs by seconds of one kind.

        Each keeps its own where of every configuration at most `FEW` of the runs shared their device. Else the seconds
        of all are steps × step time: as it is known now (``step_seconds``), or as the newest run in the same
        micro-batches had it; where some run has neither, each keeps its own after all.
        """
        if all(share <= FEW for share in _shares(runs)):
            return self
        known = {**_step_seconds_of(runs), **step_seconds}
        complete = all(split(run.configuration) in known for run in runs)
        return replace(self, step_seconds=known) if complete else self

    def basis(self, trial: TrialRecord) -> Basis:
        """Return of which kind a trial's seconds are."""
        if self.step_seconds is not None and split(trial.configuration) in self.step_seconds:
            return "steps_x_step_time"
        return trial_basis(trial)

    def of(self, trial: TrialRecord) -> float | None:
        """Return a trial's figure, or None where it has none: it missed the target, or something was not measured."""
        outcome = trial.outcome
        if outcome is None:
            return None
        if self.objective is Objective.METRIC_IN_BUDGET:
            if outcome.best_metric is None or trial.state.is_missing or self.target is None:
                return None
            return metric_figure(outcome.best_metric, self.target)
        if trial.state is not TrialState.REACHED:
            return None
        if self.objective is Objective.SAMPLES_TO_TARGET:
            steps = outcome.steps_to_target
            return None if steps is None else float(steps * trial.configuration.batch_size)
        return self._of_seconds(trial, self._seconds(trial, outcome.steps_to_target, seconds_to_target(trial)))

    def bound(self, trial: TrialRecord) -> float | None:
        """Return what a stopped trial's figure is more than, by when the target was last seen to be missed.

        None where that says nothing: it did not run to its stop, or its seconds are not comparable.
        """
        outcome = trial.outcome
        if outcome is None or not trial.state.is_censored:
            return None
        if self.objective is Objective.SAMPLES_TO_TARGET:
            step = outcome.last_miss_step
            return None if step is None else float(step * trial.configuration.batch_size)
        if self.objective is Objective.METRIC_IN_BUDGET:
            return None
        measured = None if outcome.contended else outcome.last_miss_seconds
        return self._of_seconds(trial, self._seconds(trial, outcome.last_miss_step, measured))

    def _seconds(self, trial: TrialRecord, steps: int | None, own: float | None) -> float | None:
        """Return what a trial's steps take by ``step_seconds``; its own seconds where its split is not among them."""
        known = None if self.step_seconds is None else self.step_seconds.get(split(trial.configuration))
        if known is None:
            return own
        return None if steps is None else steps * known

    def _of_seconds(self, trial: TrialRecord, seconds: float | None) -> float | None:
        if seconds is None:
            return None
        if self.objective is Objective.COST_TO_TARGET:
            return seconds * trial.configuration.world_size * self.price_per_device_hour / 3600
        if self.objective is Objective.ENERGY_TO_TARGET:
            power = trial.outcome.device_use.mean_power_watts if trial.outcome is not None else None
            return None if power is None else power * seconds
        return seconds

    def shown(self, figure: float) -> float:
        """Return a figure in the unit that people know: the metric itself, where it is of a metric."""
        if self.objective is not Objective.METRIC_IN_BUDGET or self.target is None:
            return figure
        return self.target.gain(-math.log(figure) / metric_scale(self.target))


TIME = Measure()
UNITS = {
    Objective.TIME_TO_TARGET: " s",
    Objective.SAMPLES_TO_TARGET: " samples",
    Objective.COST_TO_TARGET: "",
    Objective.ENERGY_TO_TARGET: " J",
    Objective.METRIC_IN_BUDGET: "",
}


def measure_of(spec: StudySpec, target: Target | None = None) -> Measure:
    """Return what a spec asks to minimise, for its own target or an easier one."""
    return Measure(spec.objective, target or spec.record_target, spec.price_per_device_hour or 1.0)


def metric_figure(metric: float, target: Target) -> float:
    """Return a metric on a scale on which less is better and figures compare as ratios.

    It is exp(−gain · ln `FLAT` / (`AS_GOOD` · |target|)): two metrics are a factor `FLAT` apart where they differ by
    `AS_GOOD` of the target's value.
    """
    return math.exp(min(700.0, -target.gain(metric) * metric_scale(target)))


def metric_scale(target: Target) -> float:
    """Return what a metric is multiplied by before it becomes the exponent of its figure."""
    return math.log(FLAT) / (AS_GOOD * (abs(target.value) or 1.0))


def split(configuration: Configuration) -> tuple[int, int]:
    """Return (batch size, micro-batch size)."""
    return configuration.batch_size, configuration.micro_batch_size


def step_seconds_of(probes: Iterable[StepTime]) -> StepSeconds:
    """Return the step times that were measured; of several of a split, the first that had the device to itself."""
    timed = [(one.contended, (one.batch_size, one.micro_batch_size), one.step_seconds) for one in probes]
    known: dict[tuple[int, int], float] = {}
    for _, place, seconds in sorted(timed, key=lambda one: one[0]):
        if seconds is not None:
            known.setdefault(place, seconds)
    return known


def _shares(runs: Iterable[TrialRecord]) -> list[float]:
    """Return of each configuration in which share of its runs something else used the device."""
    shared: dict[str, list[bool]] = {}
    for run in runs:
        is_shared = run.outcome is not None and run.outcome.contended
        shared.setdefault(run.configuration.key, []).append(is_shared)
    return [sum(one) / len(one) for one in shared.values()]


def _step_seconds_of(runs: Iterable[TrialRecord]) -> dict[tuple[int, int], float]:
    """Return the step times that the products of runs were made with, of each split the newest run's."""
    return {
        split(run.configuration): run.steps_x_step_time_s / run.outcome.steps_to_target
        for run in sorted(runs, key=lambda run: run.number)
        if run.outcome is not None and run.outcome.steps_to_target and run.steps_x_step_time_s is not None
    }


def seconds_to_target(trial: TrialRecord, basis: Basis | None = None) -> float | None:
    """Return a trial's seconds to the target, or None where it did not reach it.

    Without a basis, the measured seconds where the device was the trial's alone, else steps × step time.
    """
    if trial.outcome is None or trial.state is not TrialState.REACHED:
        return None
    if (basis or trial_basis(trial)) == "measured":
        return trial.outcome.time_to_target_s
    return trial.steps_x_step_time_s


def trial_basis(trial: TrialRecord) -> Basis:
    """Return which of the two products counts for a trial."""
    contended = trial.outcome is not None and trial.outcome.contended
    return "steps_x_step_time" if contended and trial.steps_x_step_time_s is not None else "measured"
