"""What looks suspicious of a study before it runs: its metric, its default, its batch sizes, its settings."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bssearch.analysis.law.models import about_default_model
from bssearch.commands.agreement import batch_normalisation_caveats
from bssearch.probes.cadence import EVALUATION_SHARE, FEWEST_EVALUATIONS
from bssearch.records import Goal, Observation, ProbeRecord, TrialOutcome, TrialState, WorkloadDescription
from bssearch.scaling import WARMUP_RATIO, is_said_to_need_warmup
from bssearch.space import bounds, split_batch
from bssearch.space.usual_rates import FINE_TUNING, FINE_TUNING_FACTOR, SCRATCH_RATES
from bssearch.spec import StudySpec

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
