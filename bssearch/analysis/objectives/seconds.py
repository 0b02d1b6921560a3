"""Train seconds to the target: measured, or steps × step time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from bssearch.records import Configuration, SecondsBasis, TrialRecord, TrialState, model_parameters
from bssearch.records.step_times import (
    PooledStepTime,
    StepSeconds,
    Timed,
    TrialPace,
    pool_paces,
    split,
    steps_at_first_size,
    timed_as,
)

Basis = Literal["measured", "steps_x_step_time", "wall", "reported"]
"""Clock of bssearch, steps × step time, or a program's clock or report."""

FEW = 0.25
"""Contended share of runs; with a step time 10 % off, a geometric mean moves below 3 %."""

WHOLE = 0.98
"""Share of the limit of a whole run; device and host clocks differ by less."""


def seconds_to_target(trial: TrialRecord, basis: Basis | None = None) -> float | None:
    """Seconds to the target, if reached."""
    if trial.outcome is None or trial.state is not TrialState.REACHED:
        return None
    if (basis or trial_basis(trial)) == "steps_x_step_time":
        return trial.steps_x_step_time_s
    return trial.outcome.time_to_target_s


def trial_basis(trial: TrialRecord) -> Basis:
    """Steps × step time for a contended trial of unknown delay, else its own basis."""
    outcome = trial.outcome
    if outcome is not None and outcome.seconds_basis is not None:
        return "wall" if outcome.seconds_basis is SecondsBasis.WALL else "reported"
    disturbed = outcome is not None and outcome.contended and outcome.undelayed_train_seconds is None
    return "steps_x_step_time" if disturbed and trial.steps_x_step_time_s is not None else "measured"


Kind = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class CommonSeconds(ABC):
    """Steps × a step time, to compare runs by."""

    step_seconds: StepSeconds
    in_words: ClassVar[str]

    @abstractmethod
    def step_time(self, trial: TrialRecord) -> PooledStepTime[Kind] | None:
        """Step time of a trial's configuration (of the first size if the batch grows)."""

    def seconds(self, trial: TrialRecord, steps: int) -> float | None:
        """Seconds of a trial's first steps."""
        step_time, equal = self.step_time(trial), steps_at_first_size(trial.configuration, steps, self.step_seconds)
        return None if step_time is None or equal is None else equal * step_time.seconds


@dataclass(frozen=True, slots=True)
class Products(CommonSeconds):
    """Steps × the step time that was timed apart from the runs."""

    in_words: ClassVar[str] = "steps × the step time of their batch size"

    def step_time(self, trial: TrialRecord) -> PooledStepTime[Kind] | None:
        """Look up the trial's split and model."""
        place = *split(trial.configuration), *model_parameters(trial.configuration)
        seconds = self.step_seconds.get(place)
        return None if seconds is None else PooledStepTime(place, seconds, 0.0, math.inf, 0.0)


@dataclass(frozen=True, slots=True)
class Pooled(CommonSeconds):
    """Steps × the pooled step time of all trials of a kind, corrected for slowdowns; see `pool_paces`."""

    step_times: Mapping[Kind, PooledStepTime[Kind]]
    in_words: ClassVar[str] = "steps × step time, corrected for CPU wait and core speed"

    def step_time(self, trial: TrialRecord) -> PooledStepTime[Kind] | None:
        """Look up the trial's kind."""
        return self.step_times.get(kind_of(trial.configuration))


def kind_of(configuration: Configuration) -> Kind:
    """Properties that determine step time."""
    one = configuration
    switches = sorted(
        (name, value if isinstance(value, bool | str) else value is not None)
        for name, value in one.parameters.items()
        if not name.startswith("model.")
    )
    regularised = one.dropout > 0, one.label_smoothing > 0
    model = model_parameters(one)
    momentum = one.parameters.get("momentum", 0) == 0
    return (*split(one), one.world_size, one.optimizer, *regularised, momentum, *switches, *model)


def common_seconds(
    runs: Sequence[TrialRecord], step_seconds: StepSeconds, others: Iterable[TrialRecord] = ()
) -> CommonSeconds | None:
    """Common seconds to compare runs by; None if each run keeps its own.

    If CPU waits and the reference kernel's time are known for all runs: steps × the pooled step time of their kind,
    ``others`` included. Otherwise own seconds, unless over `FEW` of a configuration's runs were contended: then steps ×
    step time, as known now or from the newest run in the same micro-batches.
    """
    paces: dict[Kind, dict[int, TrialPace]] = defaultdict(dict)
    for trial in (*runs, *others):
        if (pace := _pace(trial, step_seconds)) is not None:
            paces[kind_of(trial.configuration)][trial.number] = pace
    told = [run for run in runs if run.outcome is not None and (run.state is TrialState.REACHED or run.outcome.steps)]
    compared = {kind_of(run.configuration) for run in told}
    if told and compared <= paces.keys() and all(run.number in paces[kind_of(run.configuration)] for run in told):
        pooled = pool_paces({kind: list(found.values()) for kind, found in paces.items()}, compared)
        return Pooled(step_seconds, pooled)
    if all(share <= FEW for share in _shared_shares(runs)):
        return None
    products = Products({**_step_seconds_of_runs(runs), **step_seconds})
    is_known = all(
        products.step_time(run) is not None
        and steps_at_first_size(run.configuration, 1, products.step_seconds) is not None
        for run in runs
    )
    return products if is_known else None


def _pace(trial: TrialRecord, step_seconds: StepSeconds) -> TrialPace | None:
    outcome = trial.outcome
    if outcome is None or not (outcome.steps and outcome.undelayed_train_seconds and outcome.reference_seconds):
        return None
    steps = steps_at_first_size(trial.configuration, outcome.steps, step_seconds)
    if steps is None:
        return None
    return TrialPace(
        steps=steps,
        step_seconds=outcome.train_seconds / steps,
        undelayed_step_seconds=outcome.undelayed_train_seconds / steps,
        reference_seconds=outcome.reference_seconds,
        contended=outcome.contended,
        number=trial.number,
    )


def _shared_shares(runs: Iterable[TrialRecord]) -> list[float]:
    shared: dict[str, list[bool]] = {}
    for run in runs:
        is_shared = run.outcome is not None and run.outcome.contended
        shared.setdefault(run.configuration.key, []).append(is_shared)
    return [sum(one) / len(one) for one in shared.values()]


def _step_seconds_of_runs(runs: Iterable[TrialRecord]) -> dict[Timed, float]:
    return {
        timed_as(run.configuration): run.steps_x_step_time_s / run.outcome.steps_to_target
        for run in sorted(runs, key=lambda run: run.number)
        if run.outcome is not None and run.outcome.steps_to_target and run.steps_x_step_time_s is not None
    }


def ran_to_its_end(trial: TrialRecord) -> bool:
    """True if a trial trained to its limit or its schedule's horizon, target reached or not."""
    if trial.outcome is None or trial.state is not TrialState.REACHED:
        return trial.state is TrialState.EXHAUSTED
    horizon = trial.configuration.parameters.get("horizon_samples")
    if isinstance(horizon, int | float) and trial.outcome.samples >= horizon:
        return True
    return trial.outcome.train_seconds >= WHOLE * trial.train_seconds_limit
