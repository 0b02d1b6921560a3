"""Common claims about batch sizes, with corrections and sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bssearch.records.scaling import LARGE_BATCH, LAYERWISE, LearningRateRule, is_said_to_need_warmup
from bssearch.spec import StudySpec
from bssearch.spec.space import split_batch
from bssearch.spec.space.domains import RelativeLearningRate

MANY_STEPS = 16  # accumulation steps beyond which gradients are said to go stale

ADAM_LIKE = ("adam", "adamw", "adamax", "nadam", "radam", "lamb")  # keep running means of the gradient and its square


@dataclass(frozen=True, slots=True)
class Note:
    """A remark: ``code`` for programs, ``message`` for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim as ``said``, the ``right`` statement, and its ``source``."""

    said: str
    right: str
    source: str

    @property
    def message(self) -> str:
        """Claim, correction and source in one line."""
        return f"“{self.said}”: {self.right} ({self.source})"


# by code
CLAIMS = {
    "gradients_not_of_batch": Claim(
        "gradients take memory ∝ batch",
        "gradients are as large as the parameters at every batch size; what grows with the micro-batch are activations",
        "Rajbhandari et al. 2020, arXiv 1910.02054, § 3; measured here: 8.02 MiB at batch 8, 64 and 512",
    ),
    "eighty_percent_feasible": Claim(
        "80 % of memory is the optimal batch",
        "it is feasible, not optimal: with steps of α + β·B seconds the least time is at B = √(B_crit·α/β)",
        "McCandlish et al. 2018, arXiv 1812.06162, with the step's seconds; Shallue et al. 2019, arXiv 1811.03600",
    ),
    "accumulation_not_stale": Claim(
        "gradients accumulated over more than 16 steps are stale",
        "the weights do not move meanwhile: 64 steps differ from one batch by 5e-16; batch normalisation and means "
        "over unequal micro-batches are what differs",
        "measured here; huggingface/transformers#34191",
    ),
    "accumulation_cost": Claim(
        "accumulation is 1.5 to 2 times slower",
        "no law: it computes the same, but micro-batches fill the device less; `bssearch study audit` times it",
        "measured per study; Lightning-AI/pytorch-lightning#4092 for a missing no_sync",
    ),
    "layerwise_not_needed": Claim(
        "batches above 8k need LARS or LAMB",
        "tuned Nesterov momentum and Adam match or exceed them at 32k",
        "Nado et al. 2021, arXiv 2102.06356",
    ),
    "linear_rule": Claim(
        "the learning rate goes ∝ batch",
        "for SGD well below the noise scale, with warmup; the gain saturates as 1/(1 + B_noise/B)",
        "Goyal et al. 2017, arXiv 1706.02677; McCandlish et al. 2018, arXiv 1812.06162",
    ),
    "sqrt_rule": Claim(
        "Adam's learning rate goes ∝ √batch",
        "only with 1 − β ∝ batch and ε ∝ 1/√batch, while κ(1 − β) < 1; with β₂'s half-life kept, 2× over κ = 512 was "
        "best",
        "Malladi et al. 2022, arXiv 2205.10287; Marek et al. 2025, arXiv 2507.07101",
    ),
    "weight_decay_rule": Claim(
        "weight decay goes ∝ √batch",
        "with AdamW only if the learning rate does: λ ∝ batch / learning rate keeps its timescale",
        "Wang & Aitchison 2024, arXiv 2405.13698; Bergsma et al. 2025, arXiv 2505.13738",
    ),
    "largest_not_best": Claim(
        "the more devices, the sooner",
        "from the critical batch size on, twice the batch saves a quarter of the steps at most, for 1.5× the samples",
        "McCandlish et al. 2018, arXiv 1812.06162; Shallue et al. 2019, arXiv 1811.03600",
    ),
}


def notes_on(codes: Mapping[str, object]) -> list[Note]:
    """Return the corrections whose code maps to a true value."""
    return [Note(code, CLAIMS[code].message) for code, bears in codes.items() if bears]


def notes_on_spec(spec: StudySpec) -> list[Note]:
    """Return the corrections that a spec's author may need."""
    space, largest = spec.space, spec.batch_sizes[-1]
    names = {optimizer.name for optimizer in space.optimizers}
    rate = space.learning_rate if isinstance(space.learning_rate, RelativeLearningRate) else None
    rule, adam = None if rate is None else rate.rule, bool(names & {*ADAM_LIKE})
    early = rate is not None and is_said_to_need_warmup(largest, rate.reference_batch)
    return notes_on(
        {
            "accumulation_not_stale": split_batch(largest, space.max_micro_batch_size)[1] > MANY_STEPS,
            "layerwise_not_needed": names & {*LAYERWISE} or largest >= LARGE_BATCH,
            "eighty_percent_feasible": spec.executor.memory_limit_gib or space.max_micro_batch_size,
            "gradients_not_of_batch": spec.training.activation_checkpointing,
            "weight_decay_rule": space.batch_rules.weight_decay == "sqrt",
            "linear_rule": rule is LearningRateRule.LINEAR and (adam or early),
            "sqrt_rule": rule is LearningRateRule.SQRT and adam and space.batch_rules.betas == "none",
        }
    )
