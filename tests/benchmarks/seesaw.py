"""Whether a batch that grows as the learning rate decays saves serial steps at equal samples and equal loss.

Run as ``python tests/benchmarks/seesaw.py [--seeds 10]``: about ten minutes on two cores. The workloads of the studies
`char_lm_cpu` and `fashion_mnist_cpu` train for a fixed number of samples with a cosine decay, at a constant batch size
and with the schedule `seesaw` up to four times this size (Meterez et al. 2025, arXiv 2510.14717). The peak rate is the
constant batch's best of rates 1.6 × apart, over two seeds. At batch 16 of `char_lm_cpu` the schedule grows beyond the
critical batch size.

Bar: at most 0.75 of the constant batch's steps, with a mean final loss that is not significantly larger (95 % interval
of the differences by seed).
"""

if not __package__:
    __import__("from_clone")

import statistics
from dataclasses import replace

import torch

import bssearch
from bssearch import Data, Workload
from bssearch.records import BatchSchedule, Configuration, LearningRateRule, Stage, student_t, with_batch_schedule
from bssearch.search.after_search import changes_at_decay
from bssearch.training.computation import Computation
from bssearch.training.trainer import Trainer
from tests.benchmarks.advisor import CPU, ROOT, loaded
from tests.benchmarks.harness import script, verdict

MOST_STEPS = 0.75
RATES = [1.6**power for power in range(-2, 4)]
"""Factors on the middle of the rates."""

TUNING_SEEDS = (100, 101)
CELLS = (("char_lm_cpu", 4, 8_000, 0.002), ("char_lm_cpu", 16, 8_000, 0.004), ("fashion_mnist_cpu", 64, 60_000, 0.05))
"""Study, batch size, samples, and middle of the rates."""


def seesaw(base: Configuration) -> Configuration:
    """The configuration with a batch size that grows to its double and fourfold."""
    sizes = [base.batch_size * factor for factor in (1, 2, 4)]
    later = [Stage(samples, size, size) for samples, size in changes_at_decay(base, sizes)]
    stages = (Stage(0, base.batch_size, base.batch_size), *later)
    return with_batch_schedule(base, BatchSchedule(name="seesaw", stages=stages, rate_rule=LearningRateRule.SQRT))


def trained(workload: Workload, data: Data, configuration: Configuration, seed: int) -> tuple[int, float]:
    """Steps and validation loss of a training to the end of its decay."""
    with Trainer(workload, configuration, data.train, Computation(CPU), seed) as trainer:
        while not trainer.is_over:
            trainer.step()
        return trainer.steps, trainer.evaluate(data.validation, "loss")


def compared(study: str, size: int, samples: int, middle: float, seeds: int) -> bool:
    """Print steps and losses, and judge."""
    spec = bssearch.load_spec(ROOT / f"studies/{study}.yaml")
    workload, data = loaded(spec.workload, tuple(spec.workload_settings.items()))
    base = replace(
        spec.default_configuration,
        batch_size=size,
        micro_batch_size=size,
        accumulation_steps=1,
        parameters={**spec.default_configuration.parameters, "schedule": "cosine", "horizon_samples": samples},
    )
    candidates = [replace(base, learning_rate=middle * factor) for factor in RATES]
    tuned = min(
        candidates,
        key=lambda one: statistics.fmean(trained(workload, data, one, seed)[1] for seed in TUNING_SEEDS),
    )
    runs = [[trained(workload, data, one, seed) for seed in range(seeds)] for one in (tuned, seesaw(tuned))]
    (steps, _), (fewer, _) = runs[0][0], runs[1][0]
    differences = [grown - constant for (_, constant), (_, grown) in zip(*runs, strict=True)]
    mean = statistics.fmean(differences)
    half = student_t(seeds - 1) * statistics.stdev(differences) / seeds**0.5
    print(
        f"{study}, batch {size}, rate {tuned.learning_rate:.3g}: {fewer} of {steps} steps ({fewer / steps:.2f}); "
        f"loss {statistics.fmean(loss for _, loss in runs[0]):.4f}, with seesaw {mean:+.4f} ± {half:.4f}"
    )
    return fewer <= MOST_STEPS * steps and mean <= half


def main(seeds: int = 10) -> bool:
    """Compare in all cells."""
    torch.set_num_threads(1)
    return verdict(all([compared(*cell, seeds) for cell in CELLS]))


if __name__ == "__main__":
    script(main, __doc__)
