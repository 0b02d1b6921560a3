"""Whether `BatchAdvisor` finds the noise scale and the saving of a doubling, and the time that it adds to a training.

Run as ``python tests/benchmarks/advisor.py``. Bars: on linear models with a known noise scale, the 95 % interval holds
the noise scale in 92 to 98 % of the trainings, and the mean of the estimates is 0.9 to 1.1 of it. This is tested for an
accumulating loop and for a loop with one micro-batch. The shipped digits train at most 2 % longer with an advisor, in
one or two micro-batches a step. The A/A row compares two plain loops. ``--trainings 0`` tests only this time.

With ``--seeds N`` the studies `fashion_mnist_cpu` and `char_lm_cpu` train to their targets at batch sizes and tuned
rates. A doubling is predicted if the range of most seeds' advice holds the saving of the mean (log) steps. Bar: 9 of 10
doublings.
"""

if not __package__:
    __import__("from_clone")

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import bssearch
from bssearch.records import student_t
from bssearch.training.advisor import BatchAdvice
from bssearch.training.computation import Computation
from bssearch.training.trainer import Trainer
from bssearch.workloads.base import resolve
from bssearch.workloads.data import Data, check_data
from tests.benchmarks.harness import ratio, script, timed_in_turns, verdict
from tests.benchmarks.loop_overhead import Training, print_rows
from tests.training.test_advisor import Backward, accumulated, at_zero, exact_scale, halved, often, samples

ROOT, CPU = Path(__file__).parents[2], torch.device("cpu")

LEAST_HELD, MOST_HELD = 0.92, 0.98
FARTHEST = 0.1  # of the mean estimate over the exact noise scale
LONGER = 0.02
STEPS = 280  # of a linear model, half of them measured: a whole window


def estimates(backward: Backward, trainings: int) -> tuple[float, float]:
    """Return the share of trainings whose interval holds the noise scale, and the mean estimate over it."""
    held, scales = [], []
    for seed in range(trainings):
        model = at_zero()
        advisor = often(model)
        for x, y in itertools.islice(samples(seed), STEPS):
            backward(advisor, model, x, y)
            advisor.step()
            model.zero_grad()
        known = advisor.report().noise_scale
        held.append((known.low or 0.0) <= exact_scale() and (known.high is None or exact_scale() <= known.high))
        scales += [] if known.scale is None else [known.scale]
    return statistics.fmean(held), statistics.fmean(scales) / exact_scale()


def loop(batch_size: int, steps: int, micro_batches: int, *, is_advised: bool) -> Iterator[None]:
    """Train the digits in some micro-batches a step; yield after each segment of steps."""
    training = Training(batch_size // micro_batches)
    advisor = bssearch.BatchAdvisor(training.model, batch_size) if is_advised else None
    batches = (batch for _ in itertools.count() for batch in training.loader)
    for done in itertools.count(1):
        for inputs, targets in itertools.islice(batches, micro_batches):
            loss = training.digits.loss(training.model, inputs, targets, label_smoothing=0.0)
            torch.autograd.backward(loss / micro_batches)
        if advisor is not None:
            advisor.step()
        training.optimizer.step()
        training.optimizer.zero_grad()
        if done % steps == 0:
            yield


# Least steps to the target of three seeds among rates 1.6 × apart, by batch size.
RATES = {
    "fashion_mnist_cpu": {32: 0.0085, 64: 0.02, 128: 0.043, 256: 0.098, 512: 0.14, 1024: 0.2},
    "char_lm_cpu": {4: 0.00125, 8: 0.0028, 16: 0.004, 32: 0.0035, 64: 0.005, 128: 0.0044},
}

WARMUP_EPOCHS = {"fashion_mnist_cpu": 0.2, "char_lm_cpu": 0.02}

EVALUATED = 512  # samples between evaluations


def trained(study: str, batch_size: int, rate: float, seed: int, *, advises: bool) -> tuple[int, BatchAdvice]:
    """Steps to a study's target, and the advice there, which does not change the steps."""
    spec = bssearch.load_spec(ROOT / f"studies/{study}.yaml")
    workload, data = loaded(spec.workload, tuple(spec.workload_settings.items()))
    at = replace(
        spec.default_configuration,
        batch_size=batch_size,
        micro_batch_size=batch_size,
        accumulation_steps=1,
        learning_rate=rate,
        warmup_epochs=WARMUP_EPOCHS[study],
    )
    ticks = itertools.count()
    with Trainer(workload, at, data.train, Computation(CPU), seed) as trainer:
        advisor = bssearch.BatchAdvisor(
            trainer.model,
            batch_size,
            optimizer=trainer.optimizers,
            dataset_size=len(data.train),
            now=lambda: float(next(ticks)),
        )
        apply = trainer.updates.apply

        def advised(only: torch.optim.Optimizer | None = None) -> None:
            advisor.step()
            apply(only)

        if advises:
            trainer.updates.apply = advised  # type: ignore[method-assign]
        while not spec.record_target.is_met_by(trainer.evaluate(data.validation, spec.target.metric)):
            for _ in range(max(1, EVALUATED // batch_size)):
                trainer.step()
        advisor.close()
        return trainer.steps, advisor.report()


@cache
def loaded(name: str, settings: tuple[tuple[str, Any], ...]) -> tuple[Any, Data]:
    workload = resolve(name, dict(settings), ROOT)
    return workload, check_data(workload.load(CPU), workload)


ADVISED = 6  # most seeds with advice; the others measure the saving


def predicted(study: str, seeds: int) -> list[bool]:
    """Whether advice predicts each doubling of a study."""
    runs = {
        size: [trained(study, size, rate, seed, advises=seed < ADVISED) for seed in range(seeds)]
        for size, rate in RATES[study].items()
    }
    found = []
    for small, large in itertools.pairwise(runs):
        logs = [[math.log(steps) for steps, _ in runs[size]] for size in (small, large)]
        share = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
        half = student_t(2 * seeds - 2) * math.sqrt(sum(statistics.variance(one) for one in logs) / seeds)
        low, high = (1 - math.exp(share + side * half) for side in (1, -1))
        ranges = [advice.saved_steps() or (None, math.inf, -math.inf) for _, advice in runs[small][:ADVISED]]
        holds = sum(one[1] <= high and low <= one[2] for one in ranges)
        exactly = sum(one[1] <= 1 - math.exp(share) <= one[2] for one in ranges)
        found.append(2 * exactly > len(ranges))
        first = "unknown" if math.isinf(ranges[0][1]) else f"{ranges[0][1]:.0%} to {ranges[0][2]:.0%}"
        print(
            f"{study} {small} to {large}: saved {1 - math.exp(share):.0%} [{low:.0%}, {high:.0%}] of the steps; first "
            f"advice {first}; of {len(ranges)}, {holds} overlap the interval and {exactly} hold the mean"
        )
    return found


def main(
    trainings: int = 300,
    batch_size: int = 256,
    steps: int = 100,
    pairs: int = 60,
    seeds: int = 0,
) -> bool:
    """Print noise scales and times, and judge."""
    torch.set_num_threads(1)
    if seeds:
        doublings = [one for study in RATES for one in predicted(study, seeds)]
        print(f"predicted {sum(doublings)} of {len(doublings)} doublings")
        return verdict(10 * sum(doublings) >= 9 * len(doublings))
    is_met = True
    for name, backward in (("accumulated", accumulated), ("one micro-batch", halved)) if trainings else ():
        held, mean = estimates(backward, trainings)
        is_met = is_met and LEAST_HELD <= held <= MOST_HELD and abs(mean - 1) <= FARTHEST
        print(f"{name:<15} interval holds {held:.1%} of {trainings}, mean estimate {mean:.3f} of {exact_scale():g}")
    for micro_batches in (1, 2):
        make = partial(loop, batch_size, steps, micro_batches)
        loops = {name: make(is_advised=name == "advised") for name in ("plain", "again", "advised")}
        times = timed_in_turns({name: partial(next, one) for name, one in loops.items()}, pairs)
        print(f"{micro_batches} micro-batches: {statistics.median(times['plain']) / steps * 1e3:.2f} ms a step")
        found = ratio(times["advised"], times["plain"])
        print_rows(ratio(times["again"], times["plain"]), "advised", found)
        is_met = is_met and found[0] <= 1 + LONGER
    return verdict(is_met)


if __name__ == "__main__":
    script(main, __doc__)
