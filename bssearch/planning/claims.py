"""What is often said of batch sizes and is not so, or not always: what is right instead, and its source."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bssearch.scaling import LearningRateRule, is_said_to_need_warmup
from bssearch.space import split_batch
from bssearch.space.parts import RelativeLearningRate
from bssearch.spec import StudySpec

Topic = Literal["accumulation", "start"]

LARGE_BATCH = 8192
"""From this batch size on layerwise optimizers are said to be needed."""

QUOTED_BATCH = 1024
"""The least batch size of which falls in accuracy are quoted."""

MANY_STEPS = 16
"""Beyond so many accumulation steps gradients are said to go stale."""

ADAM_LIKE = ("adam", "adamw", "adamax", "nadam", "radam", "lamb")
"""Optimizers with running means of the gradient and of its square."""

LAYERWISE = ("lars", "lamb")


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim put right: a ``code`` for programs, what is ``said``, what is ``right`` in a line, and its ``source``."""

    code: str
    said: str
    right: str
    source: str
    topics: tuple[Topic, ...] = ()

    @property
    def message(self) -> str:
        """Return the claim put right, with its source, in a line."""
        return f"“{self.said}”: {self.right} ({self.source})"


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "gradients_not_of_batch",
        "gradients take memory ∝ batch",
        "gradients are as large as the parameters at every batch size; what grows with the micro-batch are activations",
        "Rajbhandari et al. 2020, arXiv 1910.02054, § 3; measured here: 8.02 MiB at batch 8, 64 and 512",
        ("start",),
    ),
    Claim(
        "eighty_percent_feasible",
        "80 % of memory is the optimal batch",
        "it is feasible, not optimal: with steps of α + β·B seconds the least time is at B = √(B_crit·α/β)",
        "McCandlish et al. 2018, arXiv 1812.06162, with the step's seconds; Shallue et al. 2019, arXiv 1811.03600",
        ("start",),
    ),
    Claim(
        "accumulation_not_stale",
        "gradients accumulated over more than 16 steps are stale",
        "the weights do not move meanwhile: 64 steps differ from one batch by 5e-16; batch normalisation and means "
        "over unequal micro-batches are what differs",
        "measured here; huggingface/transformers#34191",
        ("accumulation", "start"),
    ),
    Claim(
        "accumulation_cost",
        "accumulation is 1.5 to 2 times slower",
        "no law: it computes the same, and costs what micro-batches fill the device less; `bssearch audit` times it",
        "measured per study; Lightning-AI/pytorch-lightning#4092 for a missing no_sync",
        ("accumulation",),
    ),
    Claim(
        "layerwise_not_needed",
        "batches above 8k need LARS or LAMB",
        "tuned Nesterov momentum and Adam match or exceed them at 32k",
        "Nado et al. 2021, arXiv 2102.06356",
    ),
    Claim(
        "linear_rule",
        "the learning rate goes ∝ batch",
        "for SGD well below the noise scale, with warmup; the gain saturates as 1/(1 + B_noise/B)",
        "Goyal et al. 2017, arXiv 1706.02677; McCandlish et al. 2018, arXiv 1812.06162",
    ),
    Claim(
        "sqrt_rule",
        "Adam's learning rate goes ∝ √batch",
        "only with 1 − β ∝ batch and ε ∝ 1/√batch, while κ(1 − β) < 1; with β₂'s half-life kept, 2× over κ = 512 was "
        "best",
        "Malladi et al. 2022, arXiv 2205.10287; Marek et al. 2025, arXiv 2507.07101",
    ),
    Claim(
        "weight_decay_rule",
        "weight decay goes ∝ √batch",
        "with AdamW only where the learning rate does: λ ∝ batch / learning rate keeps its timescale",
        "Wang & Aitchison 2024, arXiv 2405.13698; Bergsma et al. 2025, arXiv 2505.13738",
    ),
    Claim(
        "goyal_figures",
        "ResNet-50 falls from 76.0 % at batch 256 to 74.8 % at 1k and 72.0 % at 4k",
        "with scaled rate and gradual warmup it does not: 23.60 ± 0.12 % error at 256, 23.74 ± 0.09 % at 8k; at 8k "
        "26.22 % with the rate ∝ √batch, 41.67 % with it unscaled",
        "Goyal et al. 2017, arXiv 1706.02677, tables 1 and 2",
    ),
    Claim(
        "bert_base_figures",
        "BERT-base falls from 89.0 to 88.8 and 88.2 on GLUE as the batch grows",
        "that is a fixed recipe; retuned, BERT pre-trained at 32k with plain AdamW has F1 91.58 on SQuAD",
        "Nado et al. 2021, arXiv 2102.06356",
    ),
    Claim(
        "bert_base_memory",
        "BERT-base's memory is a figure",
        "its 110 M parameters take 16 bytes each with Adam, 1.64 GiB; a sample of 512 tokens adds 0.33 GiB in 16 bits "
        "and 0.61 in fp32 without fused attention, so that sequence, precision and attention belong to any figure",
        "Rajbhandari et al. 2020, arXiv 1910.02054, § 3; Korthikanti et al. 2022, arXiv 2205.05198, equation 2",
    ),
    Claim(
        "largest_not_best",
        "the more devices, the sooner",
        "from the critical batch size on, twice the batch saves a quarter of the steps at most, for 1.5× the samples",
        "McCandlish et al. 2018, arXiv 1812.06162; Shallue et al. 2019, arXiv 1811.03600",
        ("start",),
    ),
)

BY_CODE = {claim.code: claim for claim in CLAIMS}


def claims_about(topic: Topic) -> Sequence[Claim]:
    """Return the claims that a plan about a topic puts right."""
    return [claim for claim in CLAIMS if topic in claim.topics]


def claims_about_rates(
    optimizer: str, batch: int, rates: Collection[LearningRateRule], *, decays: bool
) -> Iterator[Claim]:
    """Yield what is put right for one who carries a configuration over to a batch size by such rules of its rate.

    ``decays``: weight decay is used.
    """
    if LearningRateRule.LINEAR in rates:
        yield BY_CODE["linear_rule"]
    if LearningRateRule.SQRT in rates and optimizer in ADAM_LIKE:
        yield BY_CODE["sqrt_rule"]
    if decays:
        yield BY_CODE["weight_decay_rule"]
    if optimizer in LAYERWISE or batch >= LARGE_BATCH:
        yield BY_CODE["layerwise_not_needed"]
    if batch >= QUOTED_BATCH:
        yield BY_CODE["bert_base_figures" if optimizer in ADAM_LIKE else "goyal_figures"]


def claims_about_devices(batch: int) -> Iterator[Claim]:
    """Yield what is put right for one who trains with such a batch over all devices."""
    yield BY_CODE["largest_not_best"]
    if batch >= LARGE_BATCH:
        yield BY_CODE["layerwise_not_needed"]
    if batch >= QUOTED_BATCH:
        yield BY_CODE["goyal_figures"]


def claims_of_spec(spec: StudySpec) -> Iterator[Claim]:
    """Yield the claims that somebody who wrote such a spec may rely on."""
    space, largest = spec.space, spec.batch_sizes[-1]
    steps = split_batch(largest, space.max_micro_batch_size)[1]
    names = {optimizer.name for optimizer in space.optimizers}
    if steps > MANY_STEPS:
        yield BY_CODE["accumulation_not_stale"]
    if names & {*LAYERWISE} or largest >= LARGE_BATCH:
        yield BY_CODE["layerwise_not_needed"]
    if spec.executor.memory_limit_gib is not None or space.max_micro_batch_size is not None:
        yield BY_CODE["eighty_percent_feasible"]
    if spec.training.activation_checkpointing:
        yield BY_CODE["gradients_not_of_batch"]
    if space.batch_rules.weight_decay == "sqrt":
        yield BY_CODE["weight_decay_rule"]
    rate = space.learning_rate
    if isinstance(rate, RelativeLearningRate):
        yield from _about_rule(rate, names, largest, space.batch_rules.betas)


def _about_rule(rate: RelativeLearningRate, names: set[str], largest: int, betas: str) -> Iterator[Claim]:
    """Yield what is right of the rule that a space's learning rate follows, where its conditions do not hold."""
    adam = names & {*ADAM_LIKE}
    if rate.rule is LearningRateRule.LINEAR and (adam or is_said_to_need_warmup(largest, rate.reference_batch)):
        yield BY_CODE["linear_rule"]
    if rate.rule is LearningRateRule.SQRT and adam and betas == "none":
        yield BY_CODE["sqrt_rule"]
