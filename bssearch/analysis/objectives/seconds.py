"""The train seconds of a trial to its target: measured, freed of what disturbed them, or steps × a step time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from bssearch.records import Configuration, StepTime, TrialRecord, TrialState
from bssearch.step_times import quiet_reference

Basis = Literal["measured", "corrected", "steps_x_step_time"]

StepSeconds = Mapping[tuple[int, int], float]
"""Seconds of an optimizer step by (batch size, micro-batch size), timed in isolation."""

FEW = 0.25
"""The largest share of a configuration's runs that may count by steps × step time beside measured ones: with a step
time that is 10 % off, a geometric mean moves by less than 3 %. The 10 % is a choice."""

WHOLE = 0.98
"""The share of its limit at which a run counts as whole, for the clocks of device and host differ by less: a choice."""


def split(configuration: Configuration) -> tuple[int, int]:
    """Return (batch size, micro-batch size)."""
    return configuration.batch_size, configuration.micro_batch_size


def step_seconds_of(probes: Iterable[StepTime]) -> StepSeconds:
    """Return the measured step times; of several of a split, the first that had the device to itself."""
    timed = [(one.contended, (one.batch_size, one.micro_batch_size), one.step_seconds) for one in probes]
    known: dict[tuple[int, int], float] = {}
    for _, place, seconds in sorted(timed, key=lambda one: one[0]):
        if seconds is not None:
            known.setdefault(place, seconds)
    return known


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
    """Return whether a trial counts by its measured seconds or by steps × step time."""
    contended = trial.outcome is not None and trial.outcome.contended
    return "steps_x_step_time" if contended and trial.steps_x_step_time_s is not None else "measured"


class CommonSeconds(Protocol):
    """Seconds of one kind by which runs are compared, whether or not something else used the device during them."""

    basis: ClassVar[Basis]
    in_words: ClassVar[str]

    def holds_for(self, trial: TrialRecord) -> bool:
        """Return whether a trial has such seconds."""
        ...

    def until(self, trial: TrialRecord, steps: int, measured: float) -> float:
        """Return the seconds until a step of a trial, which was reached after so many measured ones."""
        ...

    def excess(self, trial: TrialRecord) -> float:
        """Return the logarithm by which such seconds may lie above those of a trial that has the device to itself."""
        ...


@dataclass(frozen=True, slots=True)
class Products:
    """Steps × the step time of their split, timed in isolation."""

    step_seconds: StepSeconds
    basis: ClassVar[Basis] = "steps_x_step_time"
    in_words: ClassVar[str] = "steps × the step time of their batch size"

    def holds_for(self, trial: TrialRecord) -> bool:
        """Return whether the trial's split was timed."""
        return split(trial.configuration) in self.step_seconds

    def until(self, trial: TrialRecord, steps: int, measured: float) -> float:
        """Return steps × step time."""
        return steps * self.step_seconds[split(trial.configuration)]

    def excess(self, trial: TrialRecord) -> float:
        """Return 0: the step was timed alone."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Corrected:
    """The seconds of CPU that a trial had, at the pace of a quiet machine.

    That is measured seconds × CPU seconds / train seconds × ``quiet_seconds`` / what the reference kernel took during
    the trial (`bssearch.training.reference`); ``quiet_seconds`` is what it takes on a quiet machine.
    """

    quiet_seconds: float
    basis: ClassVar[Basis] = "corrected"
    in_words: ClassVar[str] = "the seconds of CPU that they had, over the pace of a fixed piece of work meanwhile"

    def holds_for(self, trial: TrialRecord) -> bool:
        """Return whether the trial's seconds of CPU and of the kernel are known."""
        return _pace(trial) is not None

    def until(self, trial: TrialRecord, steps: int, measured: float) -> float:
        """Return the measured seconds, corrected."""
        return measured * self._factor(trial)

    def excess(self, trial: TrialRecord) -> float:
        """Return as much as was taken off: caches that others fill slow training down more than the kernel.

        Beside two busy processes on two cores the steps of digits kept 0.5 to 1.2 times what was taken off.
        """
        return max(0.0, -math.log(self._factor(trial)))

    def _factor(self, trial: TrialRecord) -> float:
        pace = _pace(trial)
        assert pace is not None, "asked only where it holds"
        return pace * self.quiet_seconds


def _pace(trial: TrialRecord) -> float | None:
    """Return the share of its train seconds in which a trial had the CPU, by the seconds of the kernel meanwhile."""
    outcome = trial.outcome
    if outcome is None or not outcome.train_seconds or not outcome.cpu_train_seconds or not outcome.reference_seconds:
        return None
    return outcome.cpu_train_seconds / outcome.train_seconds / outcome.reference_seconds


def common_seconds(runs: Sequence[TrialRecord], step_seconds: StepSeconds) -> CommonSeconds | None:
    """Return the seconds by which runs are to be compared, None where each counts by its own.

    Each keeps its own where of every configuration at most `FEW` of the runs shared their device. Otherwise all are
    corrected for what disturbed them, each run by what was measured during it. Where that was not measured they count
    as steps × step time: as it is known now (``step_seconds``), or as the newest run in the same micro-batches had it.
    Where some run has neither, each keeps its own after all.
    """
    if all(share <= FEW for share in _shared_shares(runs)):
        return None
    references = [run.outcome.reference_seconds for run in runs if run.outcome and run.outcome.reference_seconds]
    if references and all(_pace(run) is not None for run in runs):
        return Corrected(quiet_reference(references))
    products = Products({**_step_seconds_of_runs(runs), **step_seconds})
    return products if all(map(products.holds_for, runs)) else None


def _shared_shares(runs: Iterable[TrialRecord]) -> list[float]:
    """Return for each configuration the share of its runs during which something else used the device."""
    shared: dict[str, list[bool]] = {}
    for run in runs:
        is_shared = run.outcome is not None and run.outcome.contended
        shared.setdefault(run.configuration.key, []).append(is_shared)
    return [sum(one) / len(one) for one in shared.values()]


def _step_seconds_of_runs(runs: Iterable[TrialRecord]) -> dict[tuple[int, int], float]:
    """Return the step times behind the stored products of runs, of each split the newest run's."""
    return {
        split(run.configuration): run.steps_x_step_time_s / run.outcome.steps_to_target
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
