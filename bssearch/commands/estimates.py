"""How long a study can take: bounds from its budget, and a guess from the default's time-to-target."""

from __future__ import annotations

import math
from collections.abc import Iterable

from bssearch.probes.cadence import EVALUATION_SHARE
from bssearch.pruners.controller import first_slack
from bssearch.records import ProbeRecord
from bssearch.search.confirmation import CONFIGURATIONS_PER_BATCH
from bssearch.spec import StudySpec

EVIDENCE_TRIALS = 4
"""About as many run to the full limit whatever the pruner says: see `bssearch.samplers.allocation`."""


def finalists(spec: StudySpec) -> int:
    """Return how many configurations confirmation runs at most: see `bssearch.search.confirmation.finalists`."""
    return CONFIGURATIONS_PER_BATCH * spec.confirm.top + 3


def longest_trial_seconds(limit: float, probes: Iterable[ProbeRecord]) -> float:
    """Return the seconds of training and evaluation of a trial that runs to its limit, at the batch size slowest so."""
    return max(_trial_seconds(limit, probe) for probe in probes)


def _trial_seconds(limit: float, probe: ProbeRecord) -> float:
    if probe.step_seconds is None or probe.evaluation_seconds is None or probe.eval_every_steps is None:
        return limit
    looks = 1 + math.ceil(limit / (probe.eval_every_steps * probe.step_seconds))  # one before the first step
    return limit + looks * probe.evaluation_seconds


def longest_seconds(spec: StudySpec, trial: float | None = None) -> tuple[float, float]:
    """Return the wall seconds of search and confirmation where every trial runs to its limit.

    ``trial`` is what one takes then; where it was not measured, evaluation is taken to keep within `EVALUATION_SHARE`.
    """
    trial = trial or spec.budget.trial_train_seconds / (1 - EVALUATION_SHARE)
    search = spec.budget.trials * trial / spec.executor.slots
    if spec.budget.wall_seconds is not None:
        search = min(search, spec.budget.wall_seconds + trial)
    return search, finalists(spec) * _confirmation_runs(spec) * trial


def _confirmation_runs(spec: StudySpec) -> int:
    """Return the runs that confirmation gives a finalist at most."""
    return spec.confirm.max_runs or spec.confirm.runs


def pruned_seconds(spec: StudySpec, default_seconds: float, trial: float) -> float:
    """Return the wall seconds of a study where no better configuration than the default is found.

    Its time-to-target caps search trials, and confirmation runs take as long as it; a few evidence trials take the
    full limit, and ``trial`` seconds with evaluation.
    """
    full = spec.budget.trial_train_seconds
    capped = full if spec.pruner.name == "none" else min(full, first_slack(spec) * default_seconds)
    search = spec.budget.trials * capped / spec.executor.slots
    confirmation = finalists(spec) * spec.confirm.runs * min(full, default_seconds)
    evidence = EVIDENCE_TRIALS * (full - capped)
    return (search + confirmation + evidence) * trial / full
