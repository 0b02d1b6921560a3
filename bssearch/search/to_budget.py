"""Trains the finalists past the target, for equal train seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bssearch.analysis.generalisation import REGULARISERS, is_to_budget
from bssearch.records import Configuration, Phase, TrialPlan
from bssearch.search.confirmation import CompletedRuns, interleaved, verdict_of
from bssearch.search.history import History
from bssearch.spec.space import Domain, SearchSpace, bounds


def next_run(runs: int) -> Callable[[History], TrialPlan | None]:
    """Plan of ``runs`` full-length runs per finalist, seeded and interleaved as in confirmation."""

    def plan(history: History) -> TrialPlan | None:
        limit = history.spec.budget.trial_train_seconds
        trials = [trial for trial in history.all_trials if is_to_budget(trial, limit)]
        made = CompletedRuns.of(history, trials)
        return next(interleaved(history, made, finalists(history), runs, Phase.TO_BUDGET), None)

    return plan


def finalists(history: History) -> list[Configuration]:
    """Best configuration of each batch size that reached the target, and the largest one's `more_regularised`."""
    verdict = verdict_of(history, [trial for trial in history.all_trials if trial.phase is Phase.CONFIRM])
    if verdict is None:
        return []
    reached = [
        one.configuration
        for size, one in verdict.by_batch.items()
        if math.isfinite(one.value) and size in history.feasible
    ]
    chosen = [history.as_run(configuration) for configuration in reached]
    if chosen:
        harder = more_regularised(history.spec.space, chosen[-1], verdict.optimal.configuration)
        chosen += [] if any(harder.trains_like(one) for one in chosen) else [harder]
    return chosen


def more_regularised(space: SearchSpace, configuration: Configuration, optimum: Configuration) -> Configuration:
    """Configuration with the optimum's regularisation scaled to its batch size.

    Dropout, weight decay and label smoothing grow by √(B / B_opt), never shrink, and stay in the space.
    """
    factor = math.sqrt(configuration.batch_size / optimum.batch_size)
    changes: dict[str, Any] = {}
    for name in REGULARISERS:
        own = getattr(configuration, name)
        changes[name] = max(own, _within(getattr(space, name), factor * getattr(optimum, name)))
    return replace(configuration, **changes)


def _within(domain: Domain, value: float) -> float:
    low, high = bounds(domain)
    choices = [choice for choice in domain if choice >= value] if isinstance(domain, tuple) else []
    return float(min(choices, default=min(max(value, low), high)))
