"""Pitfalls of a spec and its workload that prevent or distort a comparison of batch sizes."""

import math
from collections.abc import Iterator

from bssearch.records import WorkloadDescription
from bssearch.records.scaling import WARMUP_RATIO, is_said_to_need_warmup
from bssearch.spec import StudySpec
from bssearch.spec.space import bounds, split_batch
from bssearch.spec.space.micro_batches import GROUP_NORM, REMEDY, batch_norm_caveats
from bssearch.spec.space.optimizers import FINE_TUNING, FINE_TUNING_FACTOR, SCRATCH_RATES

Finding = tuple[str, str]  # a code and a sentence

# Two shares of the way from the declared chance level to the target:
CHANCE_TOLERANCE = 0.1  # an untrained model may miss the chance level by this share
STARTS_TRAINED = 0.3  # above this share, the model probably has loaded weights; fresh models reach a sixth by luck

FINE_TUNING_BATCH = 64  # fine-tuning usually takes batches of 8 to 32

RANGE = 16  # high over low of a proposed range of batch sizes


def pitfalls(spec: StudySpec, found: WorkloadDescription) -> Iterator[Finding]:
    """Yield the pitfalls of a spec, as (code, sentence)."""
    yield from about_batch_sizes(spec)
    yield from about_batch_norm(spec, found)
    yield from _about_the_learning_rate(spec, found)
    fine_tuning = list(_about_fine_tuning(spec))
    if spec.preset == FINE_TUNING:
        yield from fine_tuning
    elif fine_tuning and starts_trained(spec, found):
        untrained = found.model.initial_metrics[spec.target.metric]
        yield (
            "not_for_fine_tuning",
            f"the model starts at {spec.target.metric} {untrained:.3g}, well above chance; if the weights are "
            f"pretrained, use `preset: {FINE_TUNING}`: {fine_tuning[0][1]}",
        )


def about_batch_sizes(spec: StudySpec) -> Iterator[Finding]:
    """Yield a finding if the space has one batch size."""
    sizes = spec.batch_sizes
    if len(sizes) == 1:
        high = 2 ** math.ceil(math.log2(max(sizes[0], RANGE)))
        yield (
            "one_batch_size",
            f"space.batch_size has only {sizes[0]}, so the study compares no batch sizes; give a range, such as "
            f"{{low: {high // RANGE}, high: {high}}}",
        )


def about_batch_norm(spec: StudySpec, found: WorkloadDescription) -> Iterator[Finding]:
    """Yield how batch normalisation distorts the comparison."""
    ranks, largest = spec.executor.devices[-1], spec.space.max_micro_batch_size
    micro_batches = {size: split_batch(max(1, size // ranks), largest)[0] for size in spec.batch_sizes}
    yield from batch_norm_caveats(
        found.model.batch_norm_layers,
        min(micro_batches.values()),
        accumulates=any(micro < size for size, micro in micro_batches.items()),
        ghost_batch_size=spec.training.ghost_batch_size,
        remedy=GROUP_NORM if spec.is_program else REMEDY,
    )


def starts_trained(spec: StudySpec, found: WorkloadDescription) -> bool:
    """True if the untrained metric is well between chance and target."""
    target = spec.record_target
    info, untrained = found.metrics.get(target.metric), found.model.initial_metrics.get(target.metric)
    if info is None or info.chance is None or untrained is None or target.value == info.chance:
        return False
    return (untrained - info.chance) / (target.value - info.chance) > STARTS_TRAINED


def _about_the_learning_rate(spec: StudySpec, found: WorkloadDescription) -> Iterator[Finding]:
    space = spec.space
    default, largest, rates = spec.default.batch_size, spec.batch_sizes[-1], space.learning_rates
    reaches = f"batch sizes reach {largest}, {largest / default:.3g} × the default's {default}"
    is_far = is_said_to_need_warmup(largest, default)
    if is_far and len(rates) == 1:
        yield (
            "learning_rate_fixed",
            f"space.learning_rate = {rates[0]:g} is fixed, and {reaches}; search the learning rate, starting from a "
            "rule",
        )
    if is_far and (found.starts_at_peak or not spec.is_program) and bounds(space.warmup_epochs)[1] == 0:
        begins = "the first step has the whole learning rate" if spec.is_program else "space.warmup_epochs = 0"
        yield (
            "no_warmup",
            f"{begins}, and {reaches}, but the literature recommends a warmup from {WARMUP_RATIO} × on; search the "
            "warmup, for example in [0, 1]",
        )
    if split_batch(largest, space.max_micro_batch_size)[1] > 1 and len(rates) == 1 and len(spec.batch_sizes) > 1:
        yield (
            "learning_rate_ignores_accumulation",
            f"batch {largest} accumulates micro-batches of {space.max_micro_batch_size}, but space.learning_rate = "
            f"{rates[0]:g} is the same at every batch size; write {{low: …, high: …, rule: sqrt}}",
        )


def _about_fine_tuning(spec: StudySpec) -> Iterator[Finding]:
    smallest, rates, default = spec.batch_sizes[0], spec.space.learning_rates, spec.default.learning_rate
    if smallest >= FINE_TUNING_BATCH:
        yield (
            "fine_tuning_batch_size",
            f"space.batch_size starts at {smallest}, but fine-tuning usually needs a tenth of the batch size from "
            "scratch; include 8 to 32",
        )
    for optimizer in spec.space.optimizers:
        usual = SCRATCH_RATES[optimizer.name]
        most, middle = usual / FINE_TUNING_FACTOR, math.sqrt(rates[0] * rates[-1]) * optimizer.learning_rate_scale
        bound = f"{most:g}, a tenth of the {usual:g} usual with {optimizer.name} from scratch"
        if middle > most:
            yield (
                "fine_tuning_learning_rate",
                f"the middle of space.learning_rate, {middle:.3g}, is above {bound}; lower the range to keep the "
                "pretrained weights",
            )
        if spec.default_configuration.optimizer == optimizer.name and default > most:
            yield ("fine_tuning_learning_rate", f"default.learning_rate = {default:g} is above {bound}")
