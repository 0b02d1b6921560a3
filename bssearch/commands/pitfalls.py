"""Pitfalls that prevent or distort a comparison of batch sizes."""

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bssearch.analysis.batches import about_default_model, about_fixed_constants
from bssearch.analysis.build_answer import NAN_DATA
from bssearch.planning.requests import MANY_STEPS
from bssearch.records import (
    WARMUP_RATIO,
    Goal,
    Observation,
    ProbeRecord,
    TrialOutcome,
    TrialState,
    WorkloadDescription,
    is_said_to_need_warmup,
)
from bssearch.records.text import percent, plural
from bssearch.spec import (
    FINE_TUNING,
    FINE_TUNING_FACTOR,
    GROUP_NORM,
    REMEDY,
    SCRATCH_RATES,
    StudySpec,
    batch_norm_caveats,
    bounds,
    split_batch,
)
from bssearch.training.course import EVALUATION_SHARE, FEWEST_EVALUATIONS

Finding = tuple[str, str]  # a code and a sentence

# Two shares of the way from the declared chance level to the target:
CHANCE_TOLERANCE = 0.1  # an untrained model may miss the chance level by this share
STARTS_TRAINED = 0.3  # above this share, the model probably has loaded weights; fresh models reach a sixth by luck

FINE_TUNING_BATCH = 64  # fine-tuning usually takes batches of 8 to 32

RANGE = 16  # ratio of the ends of a proposed range of batch sizes


def pitfalls(spec: StudySpec, found: WorkloadDescription) -> Iterator[Finding]:
    yield from about_batch_sizes(spec)
    yield from about_batch_norm(spec, found)
    micro, steps = _most_micro_batches(spec)
    if steps > MANY_STEPS:
        devices = spec.executor.devices[-1]
        each = f" on each of {devices} devices" if devices > 1 else ""
        yield (
            "many_accumulation_steps",
            f"batch {spec.batch_sizes[-1]} is split into {steps} micro-batches of {micro}{each}, so a step takes about "
            f"{steps} × the time of a micro-batch; raise space.max_micro_batch_size, or lower space.batch_size",
        )
    yield from _about_the_learning_rate(spec, found)
    fine_tuning = list(_about_fine_tuning(spec))
    if spec.preset == FINE_TUNING:
        yield from fine_tuning
    elif fine_tuning and starts_trained(spec, found):
        untrained = found.model.initial_metrics[spec.target.metric]
        yield (
            "not_for_fine_tuning",
            f"the model starts at {spec.target.metric} {untrained:.3g}, much better than chance; if the weights are "
            f"pretrained, use `preset: {FINE_TUNING}`, because {fine_tuning[0][1]}",
        )


def about_batch_sizes(spec: StudySpec) -> Iterator[Finding]:
    sizes = spec.batch_sizes
    if len(sizes) == 1:
        high = 2 ** math.ceil(math.log2(max(sizes[0], RANGE)))
        yield (
            "one_batch_size",
            f"space.batch_size has only {sizes[0]}, so the study compares no batch sizes; give a range, such as "
            f"{{low: {high // RANGE}, high: {high}}}",
        )


def about_batch_norm(spec: StudySpec, found: WorkloadDescription) -> Iterator[Finding]:
    ranks, largest = spec.executor.devices[-1], spec.space.max_micro_batch_size
    micro_batches = {size: split_batch(max(1, size // ranks), largest)[0] for size in spec.batch_sizes}
    yield from batch_norm_caveats(
        found.model.batch_norm_layers,
        min(micro_batches.values()),
        accumulates=any(micro < size for size, micro in micro_batches.items()),
        ghost_batch_size=spec.training.ghost_batch_size,
        remedy=GROUP_NORM if spec.is_program else REMEDY,
    )


def _most_micro_batches(spec: StudySpec) -> tuple[int, int]:
    return split_batch(max(1, spec.batch_sizes[-1] // spec.executor.devices[-1]), spec.space.max_micro_batch_size)


def starts_trained(spec: StudySpec, found: WorkloadDescription) -> bool:
    """Return True if the initial metric covers more than `STARTS_TRAINED` of the way from chance to the target."""
    target = spec.record_target
    info, untrained = found.metrics.get(target.metric), found.model.initial_metrics.get(target.metric)
    if info is None or info.chance is None or untrained is None or target.value == info.chance:
        return False
    return (untrained - info.chance) / (target.value - info.chance) > STARTS_TRAINED


def _about_the_learning_rate(spec: StudySpec, found: WorkloadDescription) -> Iterator[Finding]:
    space = spec.space
    default, largest, rates = spec.default.batch_size, spec.batch_sizes[-1], space.learning_rates
    reaches = f"batch sizes reach {largest}, {largest / default:.3g} × the default of {default}"
    is_far = is_said_to_need_warmup(largest, default)
    if is_far and len(rates) == 1:
        yield (
            "learning_rate_fixed",
            f"space.learning_rate = {rates[0]:g} is fixed, and {reaches}; search the learning rate, for "
            "example {low: …, high: …, rule: sqrt}",
        )
    if is_far and (found.starts_at_peak or not spec.is_program) and bounds(space.warmup_epochs)[1] == 0:
        begins = "the first step has the full learning rate" if spec.is_program else "space.warmup_epochs = 0"
        yield (
            "no_warmup",
            f"{begins}, but {reaches}; search a warmup, for example 0 to 1 epochs, because guides recommend warmup "
            f"at {WARMUP_RATIO} × the default or more",
        )
    micro, steps = _most_micro_batches(spec)
    if steps > 1 and len(rates) == 1 and len(spec.batch_sizes) > 1:
        yield (
            "learning_rate_ignores_accumulation",
            f"batch {largest} is split into micro-batches of {micro}, but space.learning_rate = {rates[0]:g} is the "
            f"same at every batch size; write space.learning_rate as {{low: …, high: …, rule: sqrt}}",
        )


def _about_fine_tuning(spec: StudySpec) -> Iterator[Finding]:
    smallest, rates, default = spec.batch_sizes[0], spec.space.learning_rates, spec.default.learning_rate
    if smallest >= FINE_TUNING_BATCH:
        yield (
            "fine_tuning_batch_size",
            f"space.batch_size starts at {smallest}, but fine-tuning usually takes batches of 8 to 32; include "
            "these sizes",
        )
    for optimizer in spec.space.optimizers:
        usual = SCRATCH_RATES[optimizer.name]
        most, middle = usual / FINE_TUNING_FACTOR, math.sqrt(rates[0] * rates[-1]) * optimizer.learning_rate_scale
        bound = f"{most:g}, a tenth of {optimizer.name}'s usual {usual:g} for training from scratch"
        if middle > most:
            yield (
                "fine_tuning_learning_rate",
                f"the middle of {optimizer.name}'s learning rates, {middle:.3g}, is above {bound}; lower "
                "space.learning_rate to keep the pretrained weights",
            )
        if spec.default_configuration.optimizer == optimizer.name and default > most:
            yield (
                "fine_tuning_learning_rate",
                f"default.learning_rate = {default:g} is above {bound}; lower the default",
            )


DROPPED_SHARE = 0.2  # a batch size that drops this share of the training samples per epoch is suspicious

FEW_STEPS = 50  # with fewer steps per trial, learning rates are hardly comparable


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckEvidence:
    """The measurements of a check."""

    spec: StudySpec
    found: WorkloadDescription
    probes: Mapping[int, ProbeRecord]
    outcome: TrialOutcome
    curve: Sequence[Observation]
    limit: float  # train seconds of the short trial


Suspicion = tuple[str, object, str]  # a code, true if the suspicion applies, and a sentence


def suspicions(evidence: CheckEvidence) -> Iterator[tuple[str, str]]:
    known = list(pitfalls(evidence.spec, evidence.found))
    for code, holds, sentence in (
        *_about_the_metric(evidence),
        *_about_the_trial(evidence, {sentence for _, sentence in known}),
        *_about_the_batch_sizes(evidence),
        *_about_the_spec(evidence),
        *((code, True, sentence) for code, sentence in known),
    ):
        if holds:
            yield code, sentence


def _about_the_metric(evidence: CheckEvidence) -> list[Suspicion]:
    target = evidence.spec.record_target
    info = evidence.found.metrics[target.metric]
    untrained = evidence.found.model.initial_metrics.get(target.metric)
    chance, start = info.chance or 0.0, untrained or 0.0
    is_declared = untrained is not None and info.chance is not None
    return [
        (
            "chance_unknown",
            # A program cannot declare its chance level.
            info.chance is None and evidence.found.train_samples is not None,
            f"the workload declares no chance level of {target.metric}, so trials without progress run to "
            "their limit; declare MetricInfo(chance=…)"
            + ("" if untrained is None else f" (an untrained model has {target.metric} = {untrained:.4g})"),
        ),
        (
            "chance_differs",
            is_declared and abs(start - chance) > CHANCE_TOLERANCE * abs(target.value - chance),
            f"an untrained model has {target.metric} = {start:.4g}, but the workload declares chance = "
            f"{chance:.4g}; correct chance, unless the model starts from trained weights",
        ),
        (
            "target_is_the_bound",
            target.value == (info.high if target.goal is Goal.MAXIMIZE else info.low),
            f"target.value = {target.value:g} is the best possible {target.metric}; run `bssearch check "
            "--suggest-target` to find a target that the default reaches",
        ),
    ]


def _about_the_trial(evidence: CheckEvidence, known: Collection[str]) -> list[Suspicion]:
    outcome, curve, target = evidence.outcome, evidence.curve, evidence.spec.record_target
    found: list[Suspicion] = [("training", sentence not in known, sentence) for sentence in outcome.warnings]
    if outcome.state is TrialState.DIVERGED:
        # The loss of step 1 precedes the first update.
        cause = (
            f"; {NAN_DATA}" if outcome.steps == 1 and not evidence.spec.is_program else "; lower default.learning_rate"
        )
        return [
            *found,
            ("default_diverges", True, f"the default configuration does not train: {outcome.reason}{cause}"),
        ]
    never_moves = len(curve) > 1 and len({one.metric for one in curve}) == 1
    low, high = (end((one.metric for one in curve), default=math.nan) for end in (min, max))
    in_other_unit = outcome.state is not TrialState.REACHED and target.is_in_other_unit(low, high)
    covered, misses = 1.0, outcome.state is not TrialState.REACHED and not in_other_unit
    if misses and not never_moves and curve and outcome.best_metric is not None:
        covered = 1 - target.shortfall(outcome.best_metric) / target.shortfall(curve[0].metric)
    first = curve[0].metric if curve else math.nan
    return [
        *found,
        (
            "metric_never_moves",
            never_moves,
            f"{target.metric} stayed at {first:.4g} over {len(curve)} evaluations and {plural(outcome.steps, 'step')}; "
            "check that the evaluation uses the trained model, or raise the learning rate",
        ),
        (
            "target_far",
            covered < 0.5 and outcome.train_seconds >= evidence.spec.budget.trial_train_seconds / 2,
            f"the default covers only {percent(max(covered, 0.0))} of the way to {target.value:g} in "
            f"{outcome.train_seconds:.3g} train seconds; run `bssearch check --suggest-target` to find a target "
            "that the default reaches",
        ),
        (
            "target_in_other_unit",
            in_other_unit,
            f"{target.metric} is {low:.4g} to {high:.4g} but target.value = {target.value:g}; if one value is in "
            f"percent, set target.value = {target.in_unit_of(high):g}",
        ),
        (
            "target_too_easy",
            outcome.time_to_target_s is not None and len(curve) <= 2,
            f"the default reaches {target.metric} {target.value:g} at step {outcome.first_hit_step}, after only "
            f"{plural(len(curve), 'evaluation')}; set a harder target to compare batch sizes",
        ),
    ]


def _about_the_batch_sizes(evidence: CheckEvidence) -> list[Suspicion]:
    spec, found = evidence.spec, evidence.found
    limit, samples = spec.budget.trial_train_seconds, found.train_samples or 0
    evaluation = max(probe.evaluation_seconds or 0.0 for probe in evidence.probes.values())
    worst = max(spec.batch_sizes, key=lambda size: dropped_share(found, size))
    about = "about " if spec.training.counts_tokens else ""  # the tokens of padding vary from epoch to epoch
    return [
        *(one for probe in evidence.probes.values() for one in _about_a_batch_size(spec, probe)),
        (
            "evaluation_dear",
            evaluation * (1 / EVALUATION_SHARE - 1) > limit / FEWEST_EVALUATIONS,
            f"an evaluation takes {evaluation:.3g} s, so {FEWEST_EVALUATIONS} evaluations take more than "
            f"{percent(EVALUATION_SHARE)} of a trial of {limit:g} s; use fewer validation samples",
        ),
        (
            "incomplete_batch_dropped",
            dropped_share(found, worst) >= DROPPED_SHARE,
            f"batch {worst} leaves {about}{samples % worst} of {samples} training {spec.training.batch_unit} out of "
            f"each epoch ({percent(dropped_share(found, worst))}), because bssearch drops the incomplete last batch; "
            "use smaller batches",
        ),
    ]


def _about_a_batch_size(spec: StudySpec, probe: ProbeRecord) -> list[Suspicion]:
    wanted, _ = split_batch(probe.batch_size, spec.space.max_micro_batch_size)
    limit = spec.budget.trial_train_seconds
    steps = limit / probe.step_seconds if probe.step_seconds else math.inf
    return [
        (
            "out_of_memory",
            probe.micro_batch_size < wanted,
            f"a micro-batch of {wanted} does not fit into memory, so batch {probe.batch_size} is split "
            f"into micro-batches of {probe.micro_batch_size}",
        ),
        (
            "few_steps",
            steps < FEW_STEPS,
            f"budget.trial_train_seconds = {limit:g} allows {math.floor(steps)} steps at batch {probe.batch_size}, "
            f"fewer than {FEW_STEPS}; raise the limit",
        ),
    ]


def _about_the_spec(evidence: CheckEvidence) -> list[Suspicion]:
    spec, slowest = evidence.spec, evidence.probes[evidence.spec.batch_sizes[0]]
    epochs, limit = spec.default_configuration.warmup_epochs, spec.budget.trial_train_seconds
    warmup = epochs * (evidence.found.train_samples or 0) / slowest.batch_size * (slowest.step_seconds or 0.0)
    wanted, cores = spec.executor.least_slots * spec.executor.threads, os.cpu_count() or 1
    space, default = spec.space, spec.default_configuration.parameters
    searched = {name for one in space.dimensions() for name in (one.name, one.name.rpartition(".")[2])}
    fixed = {name: value for name, value in default.items() if name not in searched}
    return [
        *(
            (
                "default_outside_space",
                True,
                f"the default is outside the space: {one}; correct the default or the space",
            )
            for one in space.outside(spec.default_configuration)
        ),
        *((code, True, sentence) for code, sentence in about_default_model(spec)),
        *(
            (code, True, sentence)
            for code, sentence in about_fixed_constants(
                [(size, space.carried(fixed, size)) for size in spec.batch_sizes]
            )
        ),
        (
            "warmup_outlasts_limit",
            warmup > limit,
            f"the default's warmup of {epochs:g} epochs takes {warmup:.3g} s at batch {slowest.batch_size}, longer "
            f"than budget.trial_train_seconds = {limit:g}; shorten the warmup or raise the limit",
        ),
        (
            "more_threads_than_cores",
            evidence.found.environment.device_type == "cpu" and wanted > cores and spec.executor.address is None,
            f"executor.slots × executor.threads = {wanted} on {cores} cores slows trials down; use fewer slots or "
            "threads",
        ),
    ]


def dropped_share(found: WorkloadDescription, batch_size: int) -> float:
    """Return the share of an epoch that the incomplete last batch drops, or 0 if the training set's size is unknown."""
    samples = found.train_samples
    return 0.0 if samples is None else samples % batch_size / samples
