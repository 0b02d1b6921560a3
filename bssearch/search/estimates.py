"""How long a study can take: bounds from its budget alone, and a guess from the default's time-to-target."""

from __future__ import annotations

from bssearch.search.cadence import EVALUATION_SHARE
from bssearch.search.confirm import CONFIGURATIONS_PER_BATCH
from bssearch.spec import StudySpec

EVIDENCE_TRIALS = 4
"""About as many run to the full limit whatever the pruner says: see `bssearch.search.allocation`."""


def finalists(spec: StudySpec) -> int:
    """Return how many configurations confirmation runs at most: those of the best batch sizes, default, largest."""
    return CONFIGURATIONS_PER_BATCH * spec.confirm.top + 2


def longest_seconds(spec: StudySpec) -> tuple[float, float]:
    """Return the wall seconds of search and confirmation where every trial runs to its limit, evaluation included."""
    trial = spec.budget.trial_train_seconds / (1 - EVALUATION_SHARE)
    search = spec.budget.trials * trial / spec.executor.slots
    if spec.budget.wall_seconds is not None:
        search = min(search, spec.budget.wall_seconds + trial)
    return search, finalists(spec) * spec.confirm.runs * trial


def pruned_seconds(spec: StudySpec, default_seconds: float) -> float:
    """Return the wall seconds of a study where no better configuration than the default is found.

    Its time-to-target caps search trials, and confirmation runs take as long as it; a few evidence trials take the
    full limit.
    """
    full = spec.budget.trial_train_seconds
    capped = full if spec.pruner.name == "none" else min(full, spec.pruner.slack * default_seconds)
    search = spec.budget.trials * capped / spec.executor.slots
    confirmation = finalists(spec) * spec.confirm.runs * min(full, default_seconds)
    evidence = EVIDENCE_TRIALS * (full - capped)
    return (search + confirmation + evidence) / (1 - EVALUATION_SHARE)
