"""What a study minimises: one positive figure of a trial, of which less is better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bssearch.records import Objective, Target, TrialRecord, TrialState

Basis = Literal["measured", "steps_x_step_time"]

FLAT = 1.05
"""Figures within this factor of the least are as good."""

AS_GOOD = 0.005
"""Metrics within this share of the target's value are as good."""


@dataclass(frozen=True, slots=True)
class Measure:
    """An objective, with what it takes to compute it: the target, and the price of an hour of one device.

    time_to_target: seconds. samples_to_target: samples. cost_to_target: hours × devices × price, in the currency of
    the price. energy_to_target: joules of the device, mean power × seconds. metric_in_budget: see
    `metric_figure`.
    """

    objective: Objective = Objective.TIME_TO_TARGET
    target: Target | None = None
    price_per_device_hour: float = 1.0

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
        return self._of_seconds(trial, seconds_to_target(trial))

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
        if self.objective is Objective.METRIC_IN_BUDGET or outcome.contended:
            return None
        return self._of_seconds(trial, outcome.last_miss_seconds)

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


def metric_figure(metric: float, target: Target) -> float:
    """Return a metric on a scale on which less is better and figures compare as ratios.

    It is exp(−gain · ln `FLAT` / (`AS_GOOD` · |target|)): two metrics are a factor `FLAT` apart where they differ by
    `AS_GOOD` of the target's value.
    """
    return math.exp(min(700.0, -target.gain(metric) * metric_scale(target)))


def metric_scale(target: Target) -> float:
    """Return what a metric is multiplied by before it becomes the exponent of its figure."""
    return math.log(FLAT) / (AS_GOOD * (abs(target.value) or 1.0))


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
