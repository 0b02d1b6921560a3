"""The train seconds of a trial to its target: measured, or steps × a step time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from bssearch.records import Configuration, SecondsBasis, TrialRecord, TrialState, model_parameters
from bssearch.records.step_times import (
    Pace,
    PooledStepTime,
    StepSeconds,
    Timed,
    pool_paces,
    split,
    steps_at_first_size,
    timed_as,
)

Basis = Literal["measured", "steps_x_step_time", "wall", "reported"]
"""Whose seconds: measured by bssearch, steps × a step time, or of a program, by the wall clock or its own report."""

FEW = 0.25
"""The largest share of a configuration's runs that may count by steps × step time beside measured ones: with a step
time that is 10 % off, a geometric mean moves by less than 3 %. The 10 % is a choice."""

WHOLE = 0.98
"""The share of its limit at which a run counts as whole, for the clocks of device and host differ by less: a choice."""


def seconds_to_target(trial: TrialRecord, basis: Basis | None = None) -> float | None:
    """Return a trial's seconds to the target, or None where it did not reach it.

    Without a basis, the measured seconds where the device was the trial's alone, else steps × step time.
    """
    if trial.outcome is None or trial.state is not TrialState.REACHED:
        return None
    if (basis or trial_basis(trial)) == "steps_x_step_time":
        return trial.steps_x_step_time_s
    return trial.outcome.time_to_target_s


def trial_basis(trial: TrialRecord) -> Basis:
    """Return whether a trial counts by its measured seconds or by steps × step time.

    By the latter where something else used the device and nobody knows for how long the trial waited for it. The
    seconds of a program are what they are.
    """
    outcome = trial.outcome
    if outcome is not None and outcome.seconds_basis is not None:
        return "wall" if outcome.seconds_basis is SecondsBasis.WALL else "reported"
    disturbed = outcome is not None and outcome.contended and outcome.undelayed_train_seconds is None
    return "steps_x_step_time" if disturbed and trial.steps_x_step_time_s is not None else "measured"


Kind = tuple[object, ...]
"""What tells configurations apart whose steps take other times; see `kind_of`."""


@dataclass(frozen=True, slots=True)
class CommonSeconds(ABC):
    """Seconds of one kind by which runs are compared: steps × a step time, whatever went on beside a run."""

    step_seconds: StepSeconds
    in_words: ClassVar[str]

    @abstractmethod
    def step_time(self, trial: TrialRecord) -> PooledStepTime[Kind] | None:
        """Return the step time of a trial's configuration with its error, None where it is not known.

        Where the batch grows it is that of the first size.
        """

    def seconds(self, trial: TrialRecord, steps: int) -> float | None:
        """Return the seconds of the first steps of a trial, None where its step times are not known."""
        step_time, equal = self.step_time(trial), steps_at_first_size(trial.configuration, steps, self.step_seconds)
        return None if step_time is None or equal is None else equal * step_time.seconds


@dataclass(frozen=True, slots=True)
class Products(CommonSeconds):
    """Steps × the step time of their split, as it was timed apart from the runs; with the error of that, if known."""

    in_words: ClassVar[str] = "steps × the step time of their batch size"

    def step_time(self, trial: TrialRecord) -> PooledStepTime[Kind] | None:
        """Return the step time of the trial's split and model."""
        place = *split(trial.configuration), *model_parameters(trial.configuration)
        seconds = self.step_seconds.get(place)
        return None if seconds is None else PooledStepTime(place, seconds, 0.0, math.inf, 0.0)


@dataclass(frozen=True, slots=True)
class Pooled(CommonSeconds):
    """Steps × the step time that all trials of a kind had, freed of what slowed them down; see `pool_paces`."""

    step_times: Mapping[Kind, PooledStepTime[Kind]]
    in_words: ClassVar[str] = (
        "steps × the seconds of a step without waits for a CPU, over those of a fixed piece of work meanwhile"
    )

    def step_time(self, trial: TrialRecord) -> PooledStepTime[Kind] | None:
        """Return the step time of the trial's kind."""
        return self.step_times.get(kind_of(trial.configuration))


def kind_of(configuration: Configuration) -> Kind:
    """Return what the time of a step depends on: the split, the model, and what is switched on, not by how much."""
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
    """Return the seconds by which runs are to be compared, None where each counts by its own.

    Where it is known of all runs that took a step how long they waited for a CPU, and what the reference kernel took,
    they are compared by steps × the step time of all trials of their kind, ``others`` too: the steps to the target
    differ by seed, the seconds of a step by what goes on beside it, and of the latter every trial tells. Where they
    are not known each run keeps its own seconds as long as of every configuration at most `FEW` of the runs shared
    their device. Else those of all are steps × step time: as it is known now (``step_seconds``), or as the newest run
    in the same micro-batches had it. Where some run has neither, each keeps its own after all.
    """
    paces: dict[Kind, dict[int, Pace]] = defaultdict(dict)
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


def _pace(trial: TrialRecord, step_seconds: StepSeconds) -> Pace | None:
    outcome = trial.outcome
    if outcome is None or not (outcome.steps and outcome.undelayed_train_seconds and outcome.reference_seconds):
        return None
    steps = steps_at_first_size(trial.configuration, outcome.steps, step_seconds)
    if steps is None:
        return None
    return Pace(
        steps=steps,
        step_seconds=outcome.train_seconds / steps,
        undelayed_step_seconds=outcome.undelayed_train_seconds / steps,
        reference_seconds=outcome.reference_seconds,
        contended=outcome.contended,
    )


def _shared_shares(runs: Iterable[TrialRecord]) -> list[float]:
    """Return for each configuration the share of its runs during which something else used the device."""
    shared: dict[str, list[bool]] = {}
    for run in runs:
        is_shared = run.outcome is not None and run.outcome.contended
        shared.setdefault(run.configuration.key, []).append(is_shared)
    return [sum(one) / len(one) for one in shared.values()]


def _step_seconds_of_runs(runs: Iterable[TrialRecord]) -> dict[Timed, float]:
    """Return the step times behind the stored products of runs, of each split and model the newest run's."""
    return {
        timed_as(run.configuration): run.steps_x_step_time_s / run.outcome.steps_to_target
        for run in sorted(runs, key=lambda run: run.number)
        if run.outcome is not None and run.outcome.steps_to_target and run.steps_x_step_time_s is not None
    }


def ran_to_its_end(trial: TrialRecord) -> bool:
    """Return whether a trial trained to its limit or to its schedule's horizon, whether or not it met its target."""
    if trial.outcome is None or trial.state is not TrialState.REACHED:
        return trial.state is TrialState.EXHAUSTED
    horizon = trial.configuration.parameters.get("horizon_samples")
    if isinstance(horizon, int | float) and trial.outcome.samples >= horizon:
        return True
    return trial.outcome.train_seconds >= WHOLE * trial.train_seconds_limit
