"""What each batch size comes to in the same full train seconds: the finalists again, trained on past the target."""

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
    """Return the plan of so many runs to the full limit of each finalist, for `bssearch.search.engine`.

    The seeds are those of the confirmation, interleaved as there; what is lost, cancelled, failed or out of memory is
    made again as there.
    """

    def plan(history: History) -> TrialPlan | None:
        limit = history.spec.budget.trial_train_seconds
        trials = [trial for trial in history.all_trials if is_to_budget(trial, limit)]
        made = CompletedRuns.of(history, trials)
        return next(interleaved(history, made, finalists(history), runs, Phase.TO_BUDGET), None)

    return plan


def finalists(history: History) -> list[Configuration]:
    """Return the best configuration of each batch size that reached the target, in the micro-batches it runs in.

    Confirmed where it is, else of the best search trial; of the largest also one with more regularisation, where
    `more_regularised` gives another. Empty where no trial reached the target.
    """
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
    """Return a configuration with the optimum's regularisation carried to its batch size, where that is more.

    Dropout, weight decay and label smoothing are √(B / B_opt) times the optimum's, as the rule of thumb has it, no less
    than they are, and within the space: of choices the next above, or the highest.
    """
    factor = math.sqrt(configuration.batch_size / optimum.batch_size)
    changes: dict[str, Any] = {}
    for name in REGULARISERS:
        own = getattr(configuration, name)
        changes[name] = max(own, _within(getattr(space, name), factor * getattr(optimum, name)))
    return replace(configuration, **changes)


def _within(domain: Domain, value: float) -> float:
    """Return the value itself where a domain holds it, else what the domain has above it, at most its highest."""
    low, high = bounds(domain)
    choices = [choice for choice in domain if choice >= value] if isinstance(domain, tuple) else []
    return float(min(choices, default=min(max(value, low), high)))
