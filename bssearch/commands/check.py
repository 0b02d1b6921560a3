"""``check``: steps at the smallest and the largest batch size, a short trial, and what looks suspicious."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from bssearch.analysis.answer import Notice
from bssearch.analysis.shape import Model
from bssearch.commands.agreement import check_target
from bssearch.commands.estimates import longest_seconds, longest_trial_seconds, pruned_seconds
from bssearch.commands.ignored_parameters import ignored_parameters
from bssearch.commands.opening import ExecutorFactory, Launch, described
from bssearch.commands.suspicions import Evidence, dropped_share, suspicions
from bssearch.commands.unstored import run_default, step_time_of_default
from bssearch.executors.base import Executor
from bssearch.planning.claims import notes_on_spec
from bssearch.records import TrialState, WorkloadDescription
from bssearch.spec import StudySpec

TRIAL_SECONDS = 5.0
"""Train seconds of the short trial, where the study's limit is not shorter: a choice, short enough to wait for."""


class BatchCheck(Model):
    """One batch size that was tried: seconds of a step and an evaluation (null where memory ran out)."""

    batch_size: int
    micro_batch_size: int
    step_seconds: float | None
    evaluation_seconds: float | None
    dropped_share: float


class ShortTrial(Model):
    """The default configuration for ``limit_s`` train seconds at most; ``time_to_target_s`` where it got there."""

    batch_size: int
    limit_s: float
    train_seconds: float
    steps: int
    evaluations: int
    best_metric: float | None
    time_to_target_s: float | None
    state: TrialState
    reason: str


class Check(Model):
    """What a study's spec and workload are like before it runs.

    ``notes`` put right what such a spec may rely on, and say what was found of its workload on this machine.
    """

    study: str
    target: str
    device: str
    train_samples: int | None
    validation_samples: int | None
    test_samples: int | None
    parameters: int | None
    untrained: dict[str, float | None]
    batches: list[BatchCheck]
    trial: ShortTrial
    longest_trial_s: float
    longest_study_s: float
    likely_study_s: float | None
    findings: list[Notice]
    notes: list[Notice] = Field(default_factory=list)


def check(
    spec: StudySpec,
    *,
    workload: Any = None,
    folder: Path | str = ".",
    data_dir: Path | str | None = None,
    allow_busy: bool = False,
    make_executor: ExecutorFactory | None = None,
) -> Check:
    """Try a study's workload for a few seconds and return how the study will go; nothing is stored.

    ``workload`` is given as to `bssearch.run_study`. Raises what that raises before its first trial.
    """
    launch = Launch(
        workload=workload, folder=folder, data_dir=data_dir, allow_busy=allow_busy, make_executor=make_executor
    )
    with described(spec, launch) as (executor, found):
        check_target(spec, found)
        return check_study(spec, executor, found)


def check_study(spec: StudySpec, executor: Executor, found: WorkloadDescription) -> Check:
    """Time steps at the smallest, the default and the largest batch size, run the default for a few seconds.

    Then a few steps with another value of each parameter that the workload is to use itself. Nothing is stored.
    ``found`` must have passed `check_against_workload`. Raises `LaunchError` where the default configuration does not
    run, or nothing fits into memory, `WorkloadError` where the user's code fails.
    """
    default = spec.default.batch_size
    probes = {
        size: step_time_of_default(spec, executor, size)
        for size in sorted({spec.batch_sizes[0], default, spec.batch_sizes[-1]})
    }
    limit = min(TRIAL_SECONDS, spec.budget.trial_train_seconds)
    outcome, curve = run_default(spec, executor, 0, probe=probes[default], limit=limit, stop_at_target=True)
    evidence = Evidence(spec, found, list(probes.values()), outcome, curve)
    reached = outcome.time_to_target_s
    longest = longest_trial_seconds(spec.budget.trial_train_seconds, evidence.probes)
    suspicious = [*suspicions(evidence), *ignored_parameters(spec, executor, probes[default])]
    return Check(
        study=spec.name,
        target=f"{spec.target.metric} {spec.target.goal.sign} {spec.target.value:g}",
        device=found.environment.device_name,
        train_samples=found.train_samples,
        validation_samples=found.validation_samples,
        test_samples=found.test_samples,
        parameters=found.model.parameters,
        untrained=dict(found.model.initial_metrics),
        batches=[
            BatchCheck(
                batch_size=probe.batch_size,
                micro_batch_size=probe.micro_batch_size,
                step_seconds=probe.step_seconds,
                evaluation_seconds=probe.evaluation_seconds,
                dropped_share=dropped_share(found, probe.batch_size),
            )
            for probe in evidence.probes
        ],
        trial=ShortTrial(
            batch_size=default,
            limit_s=limit,
            train_seconds=outcome.train_seconds,
            steps=outcome.steps,
            evaluations=len(curve),
            best_metric=outcome.best_metric,
            time_to_target_s=reached,
            state=outcome.state,
            reason=outcome.reason,
        ),
        longest_trial_s=longest,
        longest_study_s=sum(longest_seconds(spec, longest)),
        likely_study_s=None if reached is None else pruned_seconds(spec, reached, longest),
        findings=[Notice(code=code, message=message) for code, message in suspicious],
        notes=[
            *(Notice(code=note.code, message=note.message) for note in notes_on_spec(spec)),
            *([] if found.notice is None else [Notice(code="environment", message=found.notice)]),
        ],
    )
