"""``check``: steps at the smallest and the largest batch size, a short trial, and what looks suspicious."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from bssearch.analysis.batches import about_default_model
from bssearch.analysis.shape import Model, Notice
from bssearch.commands.agreement import batch_normalisation_caveats, check_target
from bssearch.commands.dry_run import longest_seconds, longest_trial_seconds, pruned_seconds
from bssearch.commands.opening import ExecutorFactory, Launch, described
from bssearch.commands.unstored import run_default, run_request, step_time_of_default
from bssearch.executors.base import Executor
from bssearch.planning.claims import claims_of_spec
from bssearch.probes.cadence import EVALUATION_SHARE, FEWEST_EVALUATIONS
from bssearch.records import (
    Configuration,
    Goal,
    Observation,
    ParameterValue,
    Phase,
    ProbeRecord,
    TrialOutcome,
    TrialRequest,
    TrialState,
    WorkloadDescription,
)
from bssearch.scaling import WARMUP_RATIO, is_said_to_need_warmup
from bssearch.search.seeds import trial_seed
from bssearch.space import WORKLOAD_PARAMETERS, bounds, split_batch
from bssearch.space.usual_rates import FINE_TUNING, FINE_TUNING_FACTOR, SCRATCH_RATES
from bssearch.spec import StudySpec

STEPS = 3
"""Optimizer steps of each run: a choice; dropout and label smoothing change the loss of the first one."""

LONGEST_S = 10.0
"""Seconds that all runs together may be expected to take, else none is made: a choice, no longer than the rest of a
check."""


def ignored_parameters(spec: StudySpec, executor: Executor, probe: ProbeRecord) -> Iterator[tuple[str, str]]:
    """Yield the searched parameters that change nothing here, each as (code, sentence).

    ``probe`` is the step time of the default, with its split into micro-batches. Where the runs would take too long
    that is what is said instead. Raises `LaunchError` and `InterruptedRunError`.
    """
    configuration = spec.default_configuration.in_micro_batches(probe.micro_batch_size)
    others = _other_values(spec, configuration)
    if not others:
        return
    expected = (1 + len(others)) * _seconds(probe)
    if expected > LONGEST_S:
        yield (
            "parameters_not_tried",
            f"whether the workload uses {' and '.join(others)} was not tried: {1 + len(others)} runs of {STEPS} steps "
            f"would take {expected:.3g} s, more than {LONGEST_S:g}",
        )
        return
    runs = _Runs(spec, executor)
    before = runs.losses(configuration)
    for name, value in others.items():
        if before is not None and runs.losses(_with(configuration, name, value)) == before:
            takes = "build_model" if name == "dropout" or name.startswith("model.") else "loss"
            own = _shown(configuration.parameters.get(name, getattr(configuration, name, None)))
            yield (
                "parameter_ignored",
                f"{name} is searched but changes nothing here: with {name} = {own} and {_shown(value)} the loss of "
                f"{STEPS} steps is the same to the last bit; use what {takes}() is given, or fix space.{name}",
            )


def _other_values(spec: StudySpec, configuration: Configuration) -> dict[str, ParameterValue]:
    """Return of each searched parameter that the workload is to use the value farthest from its default."""
    known = {name: _other_value(spec, configuration, name) for name in WORKLOAD_PARAMETERS}
    searched = (one for one in spec.space.dimensions() if one.name in spec.space.own_domains)
    own = {one.name: one.other_than(configuration.parameters[one.name]) for one in searched}
    return {name: value for name, value in known.items() if value} | own


def _other_value(spec: StudySpec, configuration: Configuration, name: str) -> float | None:
    """Return the end of a parameter's searched range that is farther from its default; None where it is fixed."""
    low, high = bounds(getattr(spec.space, name))
    if low == high:
        return None
    default = getattr(configuration, name)
    return float(max(low, high, key=lambda end: abs(end - default)))


def _with(configuration: Configuration, name: str, value: ParameterValue) -> Configuration:
    """Return a configuration with another value of a parameter."""
    if name in configuration.parameters:
        return replace(configuration, parameters={**configuration.parameters, name: value})
    changed: dict[str, Any] = {name: value}
    return replace(configuration, **changed)


def _shown(value: ParameterValue) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _seconds(probe: ProbeRecord) -> float:
    """Return the seconds that a run takes: a warm-up of two steps, its own, one until it stops; three evaluations."""
    return (2 + STEPS + 1) * (probe.step_seconds or 0.0) + 3 * (probe.evaluation_seconds or 0.0)


class _Runs:
    """Runs of the same few steps, from the same seed."""

    def __init__(self, spec: StudySpec, executor: Executor) -> None:
        self._spec = spec
        self._executor = executor
        self._number = 1

    def losses(self, configuration: Configuration) -> list[tuple[int, float, float | None]] | None:
        """Return step, metric and loss of each evaluation; None of a run that came to no loss."""
        self._number += 1
        request = TrialRequest(
            number=self._number,
            configuration=configuration,
            seed=trial_seed(self._spec.seed, Phase.PROBE, 0),
            target=self._spec.record_target,
            train_seconds_limit=self._spec.budget.trial_train_seconds,
            limit_state=TrialState.CAPPED,
            eval_every_steps=STEPS,
            stop_at_target=False,
            threads=self._spec.executor.threads,
        )
        _, curve = run_request(self._executor, request, until_step=STEPS)
        seen: list[Observation] = [one for one in curve if one.step <= STEPS]
        if not any(one.loss is not None for one in seen):
            return None
        return [(one.step, one.metric, one.loss) for one in seen]


CHANCE_TOLERANCE = 0.1
"""An untrained model's metric may be off the declared chance by this share of the way to the target: a choice."""

DROPPED_SHARE = 0.2
"""A batch size that leaves out this share of the training samples in each epoch is suspicious: a choice."""

FEW_STEPS = 50
"""With fewer steps in the limit of a trial hardly any learning rate shows its worth: a choice."""


@dataclass(frozen=True)
class Evidence:
    """A spec, its workload's description, the step times measured, and the outcome and curve of the short trial."""

    spec: StudySpec
    found: WorkloadDescription
    probes: Sequence[ProbeRecord]
    outcome: TrialOutcome
    curve: Sequence[Observation]


def suspicions(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield what looks suspicious of a spec and its workload, each as (code, sentence)."""
    yield from _about_the_metric(evidence)
    yield from _about_the_trial(evidence)
    yield from _about_the_batch_sizes(evidence)
    yield from _about_the_spec(evidence)
    yield from _about_the_learning_rate(evidence.spec)


def _about_the_metric(evidence: Evidence) -> Iterator[tuple[str, str]]:
    target = evidence.spec.record_target
    info = evidence.found.metrics[target.metric]
    untrained = evidence.found.model.initial_metrics.get(target.metric)
    if info.chance is None and evidence.found.train_samples is not None:  # a program has no way to declare it
        yield (
            "chance_unknown",
            f"the workload declares no chance level of {target.metric}, so trials that do not train are only stopped "
            f"at their limit" + ("" if untrained is None else f"; an untrained model has {untrained:.4g}"),
        )
    elif (
        untrained is not None
        and info.chance is not None
        and abs(untrained - info.chance) > CHANCE_TOLERANCE * abs(target.value - info.chance)
    ):
        yield (
            "chance_differs",
            f"an untrained model has {target.metric} = {untrained:.4g}, the workload declares chance = "
            f"{info.chance:.4g}: the declared value may be wrong, or the model starts from more than nothing",
        )
    if target.value == (info.high if target.goal is Goal.MAXIMIZE else info.low):
        yield (
            "target_is_the_bound",
            f"target.value = {target.value:g} is the best {target.metric} there is: `bssearch target` says what the "
            "default can reach",
        )


def _about_the_trial(evidence: Evidence) -> Iterator[tuple[str, str]]:
    outcome, target = evidence.outcome, evidence.spec.record_target
    known = {message for _, message in batch_normalisation_caveats(evidence.spec, evidence.found)}
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
    yield from batch_normalisation_caveats(spec, found)
    samples = found.train_samples or 0
    worst = max(spec.batch_sizes, key=lambda size: dropped_share(found, size))
    if dropped_share(found, worst) >= DROPPED_SHARE:
        yield (
            "incomplete_batch_dropped",
            f"batch {worst} leaves {samples % worst} of {samples} training samples out of "
            f"each epoch ({dropped_share(found, worst):.0%}): the incomplete last batch is dropped",
        )


def _about_the_spec(evidence: Evidence) -> Iterator[tuple[str, str]]:
    spec = evidence.spec
    for outside in spec.space.outside(spec.default_configuration):
        yield "default_outside_space", f"the default lies outside the space: {outside}"
    yield from about_default_model(spec)
    slowest = evidence.probes[0]
    warmup = spec.default_configuration.warmup_epochs * (evidence.found.train_samples or 0) / slowest.batch_size
    if slowest.step_seconds is not None and warmup * slowest.step_seconds > spec.budget.trial_train_seconds:
        yield (
            "warmup_outlasts_limit",
            f"the default's warmup of {spec.default_configuration.warmup_epochs:g} epochs takes "
            f"{warmup * slowest.step_seconds:.3g} s at batch {slowest.batch_size}, longer than "
            f"budget.trial_train_seconds = {spec.budget.trial_train_seconds:g}",
        )
    wanted, cores = spec.executor.least_slots * spec.executor.threads, os.cpu_count() or 1
    if evidence.found.environment.device_type == "cpu" and wanted > cores and spec.executor.address is None:
        yield (
            "more_threads_than_cores",
            f"executor.slots × executor.threads = {wanted} on {cores} cores: trials slow each other down",
        )


def _about_the_learning_rate(spec: StudySpec) -> Iterator[tuple[str, str]]:
    default, largest = spec.default.batch_size, spec.batch_sizes[-1]
    reaches = f"batch sizes reach {largest}, {largest / default:.3g} × the default's {default}"
    if is_said_to_need_warmup(largest, default):
        rates = spec.space.learning_rates
        if len(rates) == 1:
            yield (
                "learning_rate_fixed",
                f"space.learning_rate = {rates[0]:g} is held fixed for all batch sizes, and {reaches}: a larger batch "
                "is then judged at a learning rate that nobody chose for it; search it, with a rule to start from",
            )
        if bounds(spec.space.warmup_epochs)[1] == 0:
            yield (
                "no_warmup",
                f"space.warmup_epochs = 0, and {reaches}: from {WARMUP_RATIO} × on a warmup is said to be needed; "
                "search it, such as [0, 1]",
            )
    if spec.preset == FINE_TUNING:
        yield from _from_scratch(spec)


def _from_scratch(spec: StudySpec) -> Iterator[tuple[str, str]]:
    """Yield learning rates of a fine-tuning that are those of a training from scratch."""
    rates = spec.space.learning_rates
    middle = math.sqrt(rates[0] * rates[-1])
    for optimizer in spec.space.optimizers:
        usual = SCRATCH_RATES[optimizer.name]
        most = usual / FINE_TUNING_FACTOR
        bound = f"{most:g}, a tenth of the {usual:g} usual with {optimizer.name} from scratch"
        if middle * optimizer.learning_rate_scale > most:
            yield (
                "fine_tuning_learning_rate",
                f"the middle of space.learning_rate, {middle * optimizer.learning_rate_scale:.3g}, is above {bound}: "
                "a pretrained model is overwritten rather than tuned",
            )
        if spec.default_configuration.optimizer == optimizer.name and spec.default.learning_rate > most:
            yield (
                "fine_tuning_learning_rate",
                f"default.learning_rate = {spec.default.learning_rate:g} is above {bound}",
            )


def dropped_share(found: WorkloadDescription, batch_size: int) -> float:
    """Return the share of the training samples that an epoch leaves out, as its last, incomplete batch is dropped."""
    samples = found.train_samples
    return 0.0 if samples is None else samples % batch_size / samples


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
            *(Notice(code=claim.code, message=claim.message) for claim in claims_of_spec(spec)),
            *([] if found.notice is None else [Notice(code="environment", message=found.notice)]),
        ],
    )
