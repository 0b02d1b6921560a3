"""Confirmation runs, and plain misses of the target."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bssearch.analysis.objectives import TIME, Objective
from bssearch.records import Configuration, Phase, TrialRecord, TrialState, grouped
from bssearch.records.intervals import at_most

ENOUGH_RUNS = 3  # for an interval

FEWEST_ALIKE = 3  # equal runs from which seeds count as ignored

HALF = 0.5  # share of runs that must reach the target for a median


@dataclass(frozen=True, slots=True)
class PlainMiss:
    """A configuration that plainly misses the target with fresh seeds: in more than half of its runs.

    The one-sided upper 95 % bound of its share is below `HALF` (Clopper & Pearson 1934), tested after each run.
    """

    configuration: Configuration
    reached: int
    runs: int

    @property
    def at_most(self) -> float:
        """Upper 95 % bound of the share of runs that reach the target."""
        return at_most(self.reached, self.runs)


def plain_misses(trials: Iterable[TrialRecord], objective: Objective = TIME) -> list[PlainMiss]:
    """Configurations that plainly miss the target, in the order of their first runs, each seed once."""
    found = []
    for runs in _runs_by_configuration(trials).values():
        told = {run.seed: run for run in reversed(runs) if says_something(run)}  # of a seed its first run
        reached = sum(run.state is TrialState.REACHED or objective.figure(run) is not None for run in told.values())
        if told and at_most(reached, len(told)) < HALF:
            found.append(PlainMiss(runs[0].configuration, reached, len(told)))
    return found


def ignore_their_seeds(groups: Iterable[Sequence[TrialRecord]]) -> bool:
    """True if `FEWEST_ALIKE` runs have equal steps and metric whatever their seed, and none differs."""
    alike = 0
    for runs in groups:
        ended = {run.seed: (run.outcome.steps, run.outcome.final_metric) for run in runs if run.outcome is not None}
        if len(set(ended.values())) > 1:
            return False
        alike += max(0, len(ended) - 1)
    return alike >= FEWEST_ALIKE


def plainly_missed(miss: PlainMiss) -> str:
    """Plain miss as a sentence."""
    one = miss.configuration
    return (
        f"batch {one.batch_size} (lr {one.learning_rate:.3g}) reached the target in {miss.reached} of {miss.runs} runs "
        f"with fresh seeds, so at most {miss.at_most:.0%} of its runs reach it (95 % confidence)"
    )


def too_few_runs(runs: int, wanted: int | None) -> str:
    """Sentence about too few runs; ``wanted`` is None for imported studies."""
    made = f"the optimum has {runs} confirmation run{'s' if runs > 1 else ''}"
    none = f"an interval needs {ENOUGH_RUNS}"
    if wanted is None:
        return f"{made}; {none}"
    if wanted < ENOUGH_RUNS:
        return f"{made}, as confirm.runs = {wanted} asks; {none}: set `confirm.runs: {ENOUGH_RUNS}`"
    return f"{made} that finished; {none}: `bssearch study confirm` adds runs"


def says_something(trial: TrialRecord) -> bool:
    """True if a trial ended by itself, neither paused nor out of memory."""
    ended = trial.state.is_finished and not trial.state.is_missing
    return ended and trial.state not in {TrialState.OOM, TrialState.PAUSED}


def fewest_runs(trials: Iterable[TrialRecord], confirmation_runs: int, objective: Objective = TIME) -> int:
    """Fewest ended runs of any configuration in confirmation, plain misses excluded."""
    trials = list(trials)
    missed = {one.configuration.key for one in plain_misses(trials, objective)}
    had = [len(_had(runs)) for key, runs in _runs_by_configuration(trials).items() if key not in missed]
    return min(had, default=confirmation_runs)


def begun_late(trials: Iterable[TrialRecord], confirmation_runs: int, objective: Objective = TIME) -> dict[str, int]:
    """Keys and batch sizes of configurations that began after all others were complete, and lack runs."""
    trials = list(trials)
    by_configuration = _runs_by_configuration(trials)
    enough = min(confirmation_runs, ENOUGH_RUNS)
    lacking = {key: runs for key, runs in by_configuration.items() if len(_had(runs)) < enough}
    if confirmation_runs < 2 or not lacking or len(lacking) == len(by_configuration):
        return {}
    missed = {one.configuration.key for one in plain_misses(trials, objective)}
    complete = max(
        _complete_at(runs, confirmation_runs if key not in missed else enough)
        for key, runs in by_configuration.items()
        if key not in lacking
    )
    if any(runs[0].number < complete for runs in lacking.values()):
        return {}
    return {key: runs[0].configuration.batch_size for key, runs in lacking.items()}


def _runs_by_configuration(trials: Iterable[TrialRecord]) -> dict[str, list[TrialRecord]]:
    ordered = sorted((one for one in trials if one.phase is Phase.CONFIRM), key=lambda one: one.number)
    return grouped((one.configuration.key, one) for one in ordered)


def _had(runs: Sequence[TrialRecord]) -> dict[int, int]:
    ended = [run for run in runs if run.state.is_finished and run.state not in {TrialState.LOST, TrialState.CANCELLED}]
    return {run.seed: run.number for run in reversed(ended)}


def _complete_at(runs: Sequence[TrialRecord], wanted: int) -> float:
    numbers = sorted(_had(runs).values())
    return numbers[wanted - 1] if len(numbers) >= wanted else math.inf
