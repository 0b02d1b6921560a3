"""``run --dry-run``: what a run of a spec would do, and the longest that it can take."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from bssearch.commands.agreement import check_parts
from bssearch.commands.estimates import confirmation_runs, longest_seconds, most_finalists
from bssearch.commands.known_workloads import refuse_where_in_no_file
from bssearch.probes.cadence import EVALUATION_SHARE
from bssearch.spec import StudySpec, checked


class DryRun(BaseModel):
    """The trials of a study, their limits, and the longest it can take in wall seconds.

    That is if every trial runs to its limit, with evaluation within ``evaluation_share`` of it. ``searched`` are the
    parameters that are searched at each batch size, ``finalists`` the most configurations that are confirmed, each in
    ``confirmation_runs`` at most.
    """

    model_config = ConfigDict(frozen=True)

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
        """Return the longest that search and confirmation can take together."""
        return self.longest_search_s + self.longest_confirmation_s


def dry_run(spec: StudySpec) -> DryRun:
    """Return what a run of a spec would do, without a device, a store or the workload.

    Raises `SpecError` for a spec that is not valid, and `UsageError` for a pruner, sampler or executor that cannot be
    loaded.
    """
    spec = checked(spec)
    check_parts(spec)
    refuse_where_in_no_file(spec)
    search, confirmation = longest_seconds(spec)
    target = spec.record_target
    return DryRun(
        study=spec.name,
        workload=spec.workload,
        objective=spec.objective,
        target=f"{target.metric} {target.goal.sign} {target.value:g}",
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
