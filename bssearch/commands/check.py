"""Before a study: a step at the smallest and the largest batch size, a short trial, and what looks suspicious."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from bssearch.analysis.answer import Notice
from bssearch.commands.estimates import longest_seconds, longest_trial_seconds, pruned_seconds
from bssearch.commands.unstored import run_default, step_time_of_default
from bssearch.executors.base import Executor
from bssearch.probes.cadence import EVALUATION_SHARE, FEWEST_EVALUATIONS
from bssearch.records import Goal, Observation, ProbeRecord, TrialOutcome, TrialState, WorkloadDescription
from bssearch.space import split_batch
from bssearch.space.batch_norm import batch_norm_caveats
from bssearch.spec import StudySpec

TRIAL_SECONDS = 5.0
"""Train seconds of the short trial, where the study's limit is not shorter."""

CHANCE_TOLERANCE = 0.1
DROPPED_SHARE = 0.2
FEW_STEPS = 50


class Model(BaseModel):
    """A part of the report: numbers are finite, missing is null."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


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
    """What a study's spec and workload are like before it runs."""

    study: str
    target: str
    device: str
    train_samples: int
    validation_samples: int
    test_samples: int
    parameters: int
    untrained: dict[str, float | None]
    batches: list[BatchCheck]
    trial: ShortTrial
    longest_trial_s: float
    longest_study_s: float
    likely_study_s: float | None
    findings: list[Notice]


@dataclass(frozen=True)
class Evidence:
    """All that the findings are drawn from."""

    spec: StudySpec
    found: WorkloadDescription
    probes: Sequence[ProbeRecord]
    outcome: TrialOutcome
    curve: Sequence[Observation]


def check_study(spec: StudySpec, executor: Executor, found: WorkloadDescription) -> Check:
    """Time steps at the smallest, the default and the largest batch size, run the default for a few seconds.

    Nothing is stored. ``found`` must have passed `check_against_workload`. Raises `LaunchError` where the default
    configuration does not run, or nothing fits into memory, `WorkloadError` where the user's code fails.
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
                dropped_share=_dropped(found, probe.batch_size),
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
        findings=[Notice(code=code, message=message) for code, message in _findings(evidence)],
    )


def _findings(evidence: Evidence) -> Iterator[tuple[str, str]]:
    yield from _about_the_metric(evidence)
    yield from _about_the_trial(evidence)
    yield from _about_the_batch_sizes(evidence)
    yield from _about_the_spec(evidence)


def _about_the_metric(evidence: Evidence) -> Iterator[tuple[str, str]]:
    target = evidence.spec.record_target
    info = evidence.found.metrics[target.metric]
    untrained = evidence.found.model.initial_metrics.get(target.metric)
    assert untrained is not None, "`check_target` refuses a metric that is not finite"
    if info.chance is None:
        yield (
            "chance_unknown",
            f"the workload declares no chance level of {target.metric}, so trials that do not train are only stopped "
            f"at their limit; an untrained model has {untrained:.4g}",
        )
    elif abs(untrained - info.chance) > CHANCE_TOLERANCE * abs(target.value - info.chance):
        yield (
            "chance_differs",
            f"an untrained model has {target.metric} = {untrained:.4g}, the workload declares chance = "
            f"{info.chance:.4g}: the declared value may be wrong, or the model starts from more than nothing",
        )
    if target.value == (info.high if target.goal is Goal.MAXIMIZE else info.low):
        yield "target_is_the_bound", f"target.value = {target.value:g} is the best {target.metric} there is"


def _about_the_trial(evidence: Evidence) -> Iterator[tuple[str, str]]:
    outcome, target = evidence.outcome, evidence.spec.record_target
    known = {message for _, message in about_batch_normalisation(evidence.spec, evidence.found)}
    for sentence in outcome.warnings:
        if sentence not in known:
            yield "training", sentence
    if outcome.state is TrialState.DIVERGED:
        yield "default_diverges", f"the default configuration does not train: {outcome.reason}"
        return
    metrics = {one.metric for one in evidence.curve}
    if len(evidence.curve) > 1 and len(metrics) == 1:
        yield (
            "metric_never_moves",
            f"{target.metric} stayed at {evidence.curve[0].metric:.4g} over {len(evidence.curve)} evaluations and "
            f"{outcome.steps} steps: does evaluate() use the model it is given, and is the learning rate large enough?",
        )
    elif outcome.state is not TrialState.REACHED and evidence.curve and outcome.best_metric is not None:
        start = target.shortfall(evidence.curve[0].metric)
        covered = 1 - target.shortfall(outcome.best_metric) / start
        if covered < 0.5 and outcome.train_seconds >= evidence.spec.budget.trial_train_seconds / 2:
            yield (
                "target_far",
                f"after {outcome.train_seconds:.3g} train seconds, half of the limit or more, the default has covered "
                f"{max(covered, 0.0):.0%} of the way to {target.value:g}: `bssearch target` says what it can reach",
            )
    if outcome.time_to_target_s is not None and len(evidence.curve) <= 2:
        yield (
            "target_too_easy",
            f"the default meets {target.metric} {target.value:g} at its first evaluation, at step "
            f"{outcome.first_hit_step}: there is little to compare; ask for a harder target",
        )


def _about_the_batch_sizes(evidence: Evidence) -> Iterator[tuple[str, str]]:
    spec, found = evidence.spec, evidence.found
    limit = spec.budget.trial_train_seconds
    for probe in evidence.probes:
        wanted, _ = split_batch(probe.batch_size, spec.space.max_micro_batch_size)
        if probe.micro_batch_size < wanted:
            yield (
                "out_of_memory",
                f"a micro-batch of {wanted} does not fit into memory: batch {probe.batch_size} accumulates "
                f"micro-batches of {probe.micro_batch_size}",
            )
        if probe.step_seconds is not None and limit < FEW_STEPS * probe.step_seconds:
            yield (
                "few_steps",
                f"budget.trial_train_seconds = {limit:g} is {limit / probe.step_seconds:.0f} steps at batch "
                f"{probe.batch_size}",
            )
    evaluation = max(probe.evaluation_seconds or 0.0 for probe in evidence.probes)
    if evaluation * (1 / EVALUATION_SHARE - 1) > limit / FEWEST_EVALUATIONS:
        yield (
            "evaluation_dear",
            f"an evaluation takes {evaluation:.3g} s: {FEWEST_EVALUATIONS} looks in a limit of {limit:g} s cost more "
            f"than {EVALUATION_SHARE:.0%} of a trial; a smaller validation part makes it cheaper",
        )
    yield from about_batch_normalisation(spec, found)
    worst = max(spec.batch_sizes, key=lambda size: _dropped(found, size))
    if _dropped(found, worst) >= DROPPED_SHARE:
        yield (
            "incomplete_batch_dropped",
            f"batch {worst} leaves {found.train_samples % worst} of {found.train_samples} training samples out of "
            f"each epoch ({_dropped(found, worst):.0%}): the incomplete last batch is dropped",
        )


def about_batch_normalisation(spec: StudySpec, found: WorkloadDescription) -> Iterator[tuple[str, str]]:
    """Yield what batch normalisation, where the model has any, does to a comparison of batch sizes."""
    micro_batches = {size: split_batch(size, spec.space.max_micro_batch_size)[0] for size in spec.batch_sizes}
    yield from batch_norm_caveats(
        found.model.batch_norm_layers,
        min(micro_batches.values()),
        accumulates=any(micro < size for size, micro in micro_batches.items()),
        ghost_batch_size=spec.training.ghost_batch_size,
    )


def _about_the_spec(evidence: Evidence) -> Iterator[tuple[str, str]]:
    spec = evidence.spec
    for outside in spec.space.outside(spec.default_configuration):
        yield "default_outside_space", f"the default lies outside the space: {outside}"
    slowest = evidence.probes[0]
    warmup = spec.default_configuration.warmup_epochs * evidence.found.train_samples / slowest.batch_size
    if slowest.step_seconds is not None and warmup * slowest.step_seconds > spec.budget.trial_train_seconds:
        yield (
            "warmup_outlasts_limit",
            f"the default's warmup of {spec.default_configuration.warmup_epochs:g} epochs takes "
            f"{warmup * slowest.step_seconds:.3g} s at batch {slowest.batch_size}, longer than "
            f"budget.trial_train_seconds = {spec.budget.trial_train_seconds:g}",
        )
    wanted, cores = spec.executor.slots * spec.executor.threads, os.cpu_count() or 1
    if evidence.found.environment.device_type == "cpu" and wanted > cores:
        yield (
            "more_threads_than_cores",
            f"executor.slots × executor.threads = {wanted} on {cores} cores: trials slow each other down",
        )


def _dropped(found: WorkloadDescription, batch_size: int) -> float:
    return found.train_samples % batch_size / found.train_samples
