"""Whether `BatchAdvisor` finds the noise scale, and the time that it adds to a training.

Run as ``python tests/benchmarks/advisor.py``. Bars: on linear models with a known noise scale, the 95 % interval holds
the noise scale in 92 to 98 % of the trainings, and the mean of the estimates is 0.9 to 1.1 of it. This is tested for an
accumulating loop and for a loop whose batches the advisor halves. The shipped digits, in two micro-batches a step,
train at most 2 % longer with an advisor. The A/A row compares two plain loops.
"""

if not __package__:
    __import__("from_clone")

import itertools
import statistics
from collections.abc import Iterator
from functools import partial

import torch

import bssearch
from tests.benchmarks.harness import ratio, script, timed_in_turns, verdict
from tests.benchmarks.loop_overhead import print_rows
from tests.benchmarks.own_loop_overhead import Training
from tests.training.test_advisor import Backward, accumulated, at_zero, exact_scale, halved, often, samples

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


def loop(batch_size: int, steps: int, *, is_advised: bool) -> Iterator[None]:
    """Train the digits in two micro-batches a step; yield after each segment of steps."""
    training = Training(batch_size // 2)
    advisor = bssearch.BatchAdvisor(training.model, batch_size) if is_advised else None
    batches = (batch for _ in itertools.count() for batch in training.loader)
    for done in itertools.count(1):
        for inputs, targets in itertools.islice(batches, 2):
            torch.autograd.backward(training.digits.loss(training.model, inputs, targets, label_smoothing=0.0) / 2)
        if advisor is not None:
            advisor.step()
        training.optimizer.step()
        training.optimizer.zero_grad()
        if done % steps == 0:
            yield


def main(trainings: int = 300, batch_size: int = 256, steps: int = 100, pairs: int = 60) -> bool:
    """Print noise scales and times, and judge."""
    torch.set_num_threads(1)
    is_met = True
    for name, backward in (("accumulated", accumulated), ("halved", halved)):
        held, mean = estimates(backward, trainings)
        is_met = is_met and LEAST_HELD <= held <= MOST_HELD and abs(mean - 1) <= FARTHEST
        print(f"{name:<14} interval holds {held:.1%} of {trainings}, mean estimate {mean:.3f} of {exact_scale():g}")
    loops = {name: loop(batch_size, steps, is_advised=name == "advised") for name in ("plain", "again", "advised")}
    times = timed_in_turns({name: partial(next, one) for name, one in loops.items()}, pairs)
    print(f"{statistics.median(times['plain']) / steps * 1e3:.2f} ms a step, {pairs} pairs of {steps} steps, 1 thread")
    found = ratio(times["advised"], times["plain"])
    print_rows(ratio(times["again"], times["plain"]), "advised", found)
    return verdict(is_met and found[0] <= 1 + LONGER)


if __name__ == "__main__":
    script(main, __doc__)
