"""``run --dry-run``: a spec's trials and longest time."""

from __future__ import annotations

import math
from typing import Literal

from bssearch.analysis.shape import Model
from bssearch.commands.known_workloads import refuse_where_in_no_file
from bssearch.commands.opening import check_parts
from bssearch.records import ProbeRecord
from bssearch.search.confirmation import CONFIGURATIONS_PER_BATCH
from bssearch.search.growing import REPEATED
from bssearch.search.pruners.base import make_pruner
from bssearch.search.pruners.controller import first_slack
from bssearch.spec import StudySpec, checked
from bssearch.training.course import EVALUATION_SHARE

# About how many search trials run to the full limit under any pruner; see `bssearch.search.samplers.allocation`.
UNCAPPED_TRIALS = 4


def most_finalists(spec: StudySpec) -> int:
    """Return the upper bound of `finalists`."""
    return CONFIGURATIONS_PER_BATCH * spec.confirm.top + 5


def longest_trial_seconds(limit: float, probe: ProbeRecord) -> float:
    """Return a full trial's seconds of training and evaluation."""
    if probe.step_seconds is None or probe.evaluation_seconds is None or probe.eval_every_steps is None:
        return limit
    looks = 1 + math.ceil(limit / (probe.eval_every_steps * probe.step_seconds))  # one before the first step
    return limit + looks * probe.evaluation_seconds


def longest_seconds(spec: StudySpec, trial: float | None = None) -> tuple[float, float]:
    """Return the longest wall seconds of search and of the rest.

    ``trial``: a full trial's; by default evaluation takes `EVALUATION_SHARE`.
    """
    trial = trial or spec.budget.trial_train_seconds / (1 - EVALUATION_SHARE)
    search = spec.budget.trials * trial / spec.executor.least_slots
    if spec.budget.wall_seconds is not None:
        search = min(search, spec.budget.wall_seconds + trial)
    return search, (most_finalists(spec) * confirmation_runs(spec) + schedule_runs(spec)) * trial


def confirmation_runs(spec: StudySpec) -> int:
    """Return the most confirmation runs per finalist."""
    return spec.confirm.max_runs or spec.confirm.runs


def schedule_runs(spec: StudySpec) -> int:
    """Return the trials with growing batches, repeats included."""
    if spec.space.batch_schedule is None:
        return 0
    return spec.budget.schedule_trials + REPEATED * spec.confirm.runs


def pruned_seconds(spec: StudySpec, default_seconds: float, trial: float) -> float:
    """Return the study's wall seconds if nothing beats the default.

    Its time then caps all but `UNCAPPED_TRIALS` search trials of ``trial`` seconds.
    """
    full = spec.budget.trial_train_seconds
    capped = min(full, first_slack(spec) * default_seconds) if make_pruner(spec.pruner).caps else full
    search = spec.budget.trials * capped / spec.executor.least_slots
    repeats = most_finalists(spec) * spec.confirm.runs + schedule_runs(spec)
    confirmation = repeats * min(full, default_seconds)
    return (search + confirmation + UNCAPPED_TRIALS * (full - capped)) * trial / full


class DryRun(Model):
    """A study's trials, limits, and longest wall seconds with full trials."""

    study: str
    workload: str
    objective: str
    target: str
    batch_sizes: list[int]
    searched: list[str]
    trials: int
    trial_train_seconds: float
    slots: int | Literal["auto"]
    finalists: int
    confirmation_runs: int
    evaluation_share: float
    longest_search_s: float
    longest_confirmation_s: float

    @property
    def longest_s(self) -> float:
        """Return the longest total time."""
        return self.longest_search_s + self.longest_confirmation_s


def dry_run(spec: StudySpec) -> DryRun:
    """Return a run's plan without device, store or workload; raise `SpecError` or `UsageError`."""
    spec = checked(spec)
    check_parts(spec)
    refuse_where_in_no_file(spec)
    search, confirmation = longest_seconds(spec)
    return DryRun(
        study=spec.name,
        workload=spec.workload,
        objective=spec.objective,
        target=spec.record_target.in_words,
        batch_sizes=list(spec.batch_sizes),
        searched=[dimension.name for dimension in spec.space.dimensions()],
        trials=spec.budget.trials,
        trial_train_seconds=spec.budget.trial_train_seconds,
        slots=spec.executor.slots,
        finalists=most_finalists(spec),
        confirmation_runs=confirmation_runs(spec),
        evaluation_share=EVALUATION_SHARE,
        longest_search_s=search,
        longest_confirmation_s=confirmation,
    )
