"""The train seconds of a trial to its target: measured, or steps × a step time that was timed in isolation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from bssearch.records import Configuration, StepTime, TrialRecord, TrialState

Basis = Literal["measured", "steps_x_step_time"]

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


def common_step_seconds(runs: Sequence[TrialRecord], step_seconds: StepSeconds) -> StepSeconds | None:
    """Return the step times by which runs are to be compared, None where each counts by its own seconds.

    Each keeps its own where of every configuration at most `FEW` of the runs shared their device. Otherwise the seconds
    of all are steps × step time: as it is known now (``step_seconds``), or as the newest run in the same micro-batches
    had it. Where some run has neither, each keeps its own after all.
    """
    if all(share <= FEW for share in _shared_shares(runs)):
        return None
    known = {**_step_seconds_of_runs(runs), **step_seconds}
    return known if all(split(run.configuration) in known for run in runs) else None


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
