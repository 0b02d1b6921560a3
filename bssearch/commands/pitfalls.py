"""Pitfalls of a spec and its workload: what prevents or distorts a comparison of batch sizes, found before trials."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bssearch.records import WorkloadDescription
from bssearch.records.scaling import WARMUP_RATIO, LearningRateRule, is_said_to_need_warmup
from bssearch.spec import StudySpec
from bssearch.spec.space import bounds, split_batch
from bssearch.spec.space.domains import RelativeLearningRate
from bssearch.spec.space.micro_batches import batch_norm_caveats
from bssearch.spec.space.optimizers import FINE_TUNING, FINE_TUNING_FACTOR, SCRATCH_RATES

Finding = tuple[str, str]  # a code and a sentence

# An untrained metric may miss the declared chance by this share of the way to the target.
CHANCE_TOLERANCE = 0.1

FINE_TUNING_BATCH = 64  # fine-tuning usually takes batches of 8 to 32


def pitfalls(spec: StudySpec, found: WorkloadDescription) -> Iterator[Finding]:
    """Yield the pitfalls of a spec, as (code, sentence)."""
    yield from about_batch_sizes(spec)
    yield from about_batch_norm(spec, found)
    yield from _about_the_learning_rate(spec)
    if spec.preset == FINE_TUNING or starts_trained(spec, found):
        yield from _about_fine_tuning(spec)


def about_batch_sizes(spec: StudySpec) -> Iterator[Finding]:
    """Yield that the space holds one batch size."""
    sizes = spec.batch_sizes
    if len(sizes) == 1:
        yield (
            "one_batch_size",
            f"space.batch_size holds {sizes[0]} alone, so no batch size is compared: give a range, such as "
            f"{{low: {max(1, sizes[0] // 16)}, high: {sizes[0]}}}",
        )


def about_batch_norm(spec: StudySpec, found: WorkloadDescription) -> Iterator[Finding]:
    """Yield distortions by batch normalisation."""
    micro_batches = {size: split_batch(size, spec.space.max_micro_batch_size)[0] for size in spec.batch_sizes}
    yield from batch_norm_caveats(
        found.model.batch_norm_layers,
        min(micro_batches.values()),
        accumulates=any(micro < size for size, micro in micro_batches.items()),
        ghost_batch_size=spec.training.ghost_batch_size,
    )


def starts_trained(spec: StudySpec, found: WorkloadDescription) -> bool:
    """True if the model's metric before training lies well between chance and the target, as with loaded weights."""
    target = spec.record_target
    info, untrained = found.metrics.get(target.metric), found.model.initial_metrics.get(target.metric)
    if info is None or info.chance is None or untrained is None or target.value == info.chance:
        return False
    return (untrained - info.chance) / (target.value - info.chance) > CHANCE_TOLERANCE


def _about_the_learning_rate(spec: StudySpec) -> Iterator[Finding]:
    space = spec.space
    default, largest, rates = spec.default.batch_size, spec.batch_sizes[-1], space.learning_rates
    reaches = f"batch sizes reach {largest}, {largest / default:.3g} × the default's {default}"
    is_far = is_said_to_need_warmup(largest, default)
    if is_far and len(rates) == 1:
        yield (
            "learning_rate_fixed",
            f"space.learning_rate = {rates[0]:g} is fixed, and {reaches}: larger batches are judged "
            "at an untuned learning rate; search it, starting from a rule",
        )
    if is_far and bounds(space.warmup_epochs)[1] == 0:
        yield (
            "no_warmup",
            f"space.warmup_epochs = 0, and {reaches}: from {WARMUP_RATIO} × on a warmup is said to be needed; "
            "search it, such as [0, 1]",
        )
    rate = space.learning_rate
    has_rule = isinstance(rate, RelativeLearningRate) and rate.rule is not LearningRateRule.NONE
    if not has_rule and split_batch(largest, space.max_micro_batch_size)[1] > 1:
        yield (
            "learning_rate_ignores_accumulation",
            f"batch {largest} accumulates micro-batches of {space.max_micro_batch_size}, and space.learning_rate "
            "does not follow the batch size: the rate belongs to the whole batch; use {low, high, rule: sqrt}",
        )


def _about_fine_tuning(spec: StudySpec) -> Iterator[Finding]:
    smallest, rates, default = spec.batch_sizes[0], spec.space.learning_rates, spec.default.learning_rate
    if smallest >= FINE_TUNING_BATCH:
        yield (
            "fine_tuning_batch_size",
            f"space.batch_size starts at {smallest}, and the model is pretrained: fine-tuning usually takes a batch 10 "
            "to 20 times smaller than from scratch; include 8 to 32",
        )
    for optimizer in spec.space.optimizers:
        usual = SCRATCH_RATES[optimizer.name]
        most, middle = usual / FINE_TUNING_FACTOR, math.sqrt(rates[0] * rates[-1]) * optimizer.learning_rate_scale
        bound = f"{most:g}, a tenth of the {usual:g} usual with {optimizer.name} from scratch"
        if middle > most:
            yield (
                "fine_tuning_learning_rate",
                f"the middle of space.learning_rate, {middle:.3g}, is above {bound}: "
                "a pretrained model is overwritten rather than tuned",
            )
        if spec.default_configuration.optimizer == optimizer.name and default > most:
            yield ("fine_tuning_learning_rate", f"default.learning_rate = {default:g} is above {bound}")
