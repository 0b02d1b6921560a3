"""How far a confirmation has come: what every configuration has had of its runs, and which plainly miss the target."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bssearch.analysis.objectives.base import Objective
from bssearch.analysis.objectives.time_to_target import TIME
from bssearch.records import Configuration, Phase, TrialRecord, TrialState
from bssearch.records.intervals import at_most

ENOUGH_RUNS = 3
"""Confirmation runs of each configuration without which there is no interval, and so no verdict: a choice."""

FEWEST_ALIKE = 3
"""Runs that are like another one of their configuration, before their seeds count as ignored: a choice."""

HALF = 0.5
"""The share of its runs in which a configuration must reach the target to have a median, and so to be recommended."""


@dataclass(frozen=True, slots=True)
class PlainMiss:
    """A configuration of which ``reached`` of ``runs`` with fresh seeds reached the target: plainly below one half.

    Plainly: the upper 95 % bound of the share lies below `HALF` (Clopper & Pearson 1934, one-sided). It is looked at
    after each run: of configurations that reach in half of their runs 3 % are given up after five misses in a row and
    5 % within ten runs, of those that reach in three of four 0.1 %.
    """

    configuration: Configuration
    reached: int
    runs: int

    @property
    def at_most(self) -> float:
        """Return the upper 95 % bound of the share of runs that reach the target."""
        return at_most(self.reached, self.runs)


def plain_misses(trials: Iterable[TrialRecord], objective: Objective = TIME) -> list[PlainMiss]:
    """Return the configurations in confirmation that plainly miss the target, in the order in which they began.

    Each seed counts once; runs that failed, were lost or cancelled, or ran out of memory say nothing.
    """
    found = []
    for runs in _runs_by_configuration(trials).values():
        told = {run.seed: run for run in reversed(runs) if says_something(run)}  # of a seed its first run
        reached = sum(_has_reached(run, objective) for run in told.values())
        if told and at_most(reached, len(told)) < HALF:
            found.append(PlainMiss(runs[0].configuration, reached, len(told)))
    return found


def ignore_their_seeds(groups: Iterable[Sequence[TrialRecord]]) -> bool:
    """Return whether runs of one configuration are alike whatever their seed: what trains makes nothing of it.

    ``groups`` are the runs of each configuration. Alike are those with the same steps and metric to the last digit; it
    takes three runs that are like another one, and none that is not.
    """
    alike = 0
    for runs in groups:
        ended = {run.seed: (run.outcome.steps, run.outcome.final_metric) for run in runs if run.outcome is not None}
        if len(set(ended.values())) > 1:
            return False
        alike += max(0, len(ended) - 1)
    return alike >= FEWEST_ALIKE


def plainly_missed(miss: PlainMiss) -> str:
    """Return for people what a configuration misses, and how sure that is."""
    one = miss.configuration
    return (
        f"batch {one.batch_size} (lr {one.learning_rate:.3g}) reached the target in {miss.reached} of {miss.runs} runs "
        f"with fresh seeds, so that at most {miss.at_most:.0%} of them do (95 % confidence)"
    )


def too_few_runs(runs: int, wanted: int | None) -> str:
    """Return for people that so many runs give no interval, and what gives one.

    ``wanted`` is how many the spec asks for; None where runs were made elsewhere.
    """
    made = f"the optimum has {runs} confirmation run{'s' if runs > 1 else ''}"
    none = f"no interval, which takes {ENOUGH_RUNS}"
    if wanted is None:
        return f"{made}: {none}"
    if wanted < ENOUGH_RUNS:
        return f"{made}, as confirm.runs = {wanted} asks: {none}; `confirm.runs: {ENOUGH_RUNS}` gives one"
    return f"{made} that ended by themselves: {none}; bssearch study confirm adds runs"


def says_something(trial: TrialRecord) -> bool:
    """Return whether a trial came to an end that tells of its configuration, paused ones left out."""
    ended = trial.state.is_finished and not trial.state.is_missing
    return ended and trial.state not in {TrialState.OOM, TrialState.PAUSED}


def fewest_runs(trials: Iterable[TrialRecord], confirmation_runs: int, objective: Objective = TIME) -> int:
    """Return how many of its runs every configuration in confirmation has had; failed ones count, lost ones do not.

    One that plainly misses the target needs no more than it has had.
    """
    trials = list(trials)
    missed = {one.configuration.key for one in plain_misses(trials, objective)}
    had = [len(_had(runs)) for key, runs in _runs_by_configuration(trials).items() if key not in missed]
    return min(had, default=confirmation_runs)


def begun_late(trials: Iterable[TrialRecord], confirmation_runs: int, objective: Objective = TIME) -> dict[str, int]:
    """Return the batch sizes, by the configurations' keys, of what lacks runs and began when all others had had theirs.

    Finalists begin in the first round of runs, before any has had all of its; with a single run each that cannot be
    told, and nothing is late.
    """
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


def _has_reached(run: TrialRecord, objective: Objective) -> bool:
    return run.state is TrialState.REACHED or objective.figure(run) is not None


def _runs_by_configuration(trials: Iterable[TrialRecord]) -> dict[str, list[TrialRecord]]:
    """Return the confirmation runs of each configuration, by number."""
    found: dict[str, list[TrialRecord]] = defaultdict(list)
    for trial in sorted(trials, key=lambda one: one.number):
        if trial.phase is Phase.CONFIRM:
            found[trial.configuration.key].append(trial)
    return found


def _had(runs: Sequence[TrialRecord]) -> dict[int, int]:
    """Return by seed the number of the first run that ended by itself."""
    ended = [run for run in runs if run.state.is_finished and run.state not in {TrialState.LOST, TrialState.CANCELLED}]
    return {run.seed: run.number for run in reversed(ended)}


def _complete_at(runs: Sequence[TrialRecord], wanted: int) -> float:
    """Return the number of the run with which a configuration had had all of its, ∞ where it has not."""
    numbers = sorted(_had(runs).values())
    return numbers[wanted - 1] if len(numbers) >= wanted else math.inf
