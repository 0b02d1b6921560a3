"""How much of a study is left at most, and about how long that takes: from what is stored, whoever ran it when."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from bssearch.records import Configuration, Phase, TrialState
from bssearch.search.confirmation import most_left
from bssearch.search.history import History


@dataclass(frozen=True, slots=True)
class Left:
    """The most ``runs`` that follow, running ones included, and their wall ``seconds``.

    The seconds are None before a trial has ended by which they could be told.
    """

    runs: int
    seconds: float | None


def search_left(history: History) -> Left:
    """Return what is left of a search that goes on to the end of its budget.

    A trial takes as long as those that have ended did on the average, by the clock of the whole search, pauses between
    its runs left out: as many slots as it had are in that.
    """
    budget = history.spec.budget
    open_ones = len(history.in_state(TrialState.RUNNING, TrialState.PAUSED, TrialState.QUEUED))
    done = history.spent - open_ones
    left = max(0, budget.trials - done)
    seconds = history.busy_seconds / done * left if done > 0 else None
    if budget.wall_seconds is not None:
        seconds = min(math.inf if seconds is None else seconds, max(0.0, budget.wall_seconds - history.busy_seconds))
    return Left(left, seconds)


def confirmation_left(history: History) -> Left:
    """Return what is left of the confirmation at most, one run at a time: neighbours and further runs too.

    A run takes the median of those of its configuration so far, the search's own among them.
    """
    runs = most_left(history)
    return Left(len(runs), math.fsum(_expected_seconds(history, one) for one in runs))


def _expected_seconds(history: History, configuration: Configuration) -> float:
    """Return the wall seconds of a run: of its own kind, else of the best trial at its batch size, else its limit."""
    full = {TrialState.REACHED, TrialState.EXHAUSTED, TrialState.DIVERGED}
    own = [
        trial.outcome.wall_seconds
        for trial in history.all_trials
        if trial.configuration.key == configuration.key
        and trial.phase in {Phase.SEARCH, Phase.CONFIRM}
        and trial.state in full
        and trial.outcome is not None
    ]
    if own:
        return statistics.median(own)
    best = history.best_at(configuration.batch_size)
    if best is not None and best.outcome is not None:
        return best.outcome.wall_seconds
    return history.spec.budget.trial_train_seconds
