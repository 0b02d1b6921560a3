"""Synthetic studies on several numbers of devices: is the chosen cell right, and do the intervals hold the truth?

Run as ``python tests/benchmarks/devices.py [--studies 60]``. Each study draws its law of steps S_min (1 + B_crit / B),
step time α + β B / W and time of the reduction. Steps vary by 10 % between seeds, a visit's step time by 5 %, a trial's
by 1 %. A cell is a batch size on a number of devices; the chosen cell has the least seconds in the answer.

Exits 1 if fewer than 95 % of the chosen cells are within 5 % of the best of all, or if the intervals of times or
speed-ups hold in fewer than 92 %. Also exits 1 if eight devices, each with a slot, are busy for less than 90 % of a
search with trials of two seconds.
"""

if not __package__:
    __import__("from_clone")

import math
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from bssearch import Launch, run_study
from bssearch.analysis.answer import Answer
from bssearch.executors.base import Event
from bssearch.records import Configuration, Phase, StepTime, StepTimeRequest, TrialRequest
from tests.benchmarks.harness import holds, script, verdict
from tests.factories import make_spec, not_none
from tests.search.law import LawExecutor

SIZES = [16, 32, 64, 128, 256, 512, 1024]
DEVICES = [1, 2, 4, 8]
SEEDS_APART, VISITS_APART, TRIALS_APART = 0.10, 0.05, 0.01
RIGHT, COVERED, BUSY = 0.95, 0.92, 0.90
TRIAL_SECONDS = 2.0


@dataclass
class Node(LawExecutor):
    """Devices with a law and step times drawn from a seed."""

    seed: int = 0
    b_crit: float = field(init=False)
    reduce: float = field(init=False)
    samples: float = field(init=False)

    def __post_init__(self) -> None:
        self.train_samples = 100_000
        self._random = random.Random(self.seed)
        self.b_crit = math.exp(self._random.uniform(math.log(30), math.log(400)))
        self.samples = math.exp(self._random.uniform(math.log(10), math.log(100)))
        self.reduce = self._random.choice([0.0, 0.0002, 0.0005, 0.001])

    def step_seconds_of(self, configuration: Configuration) -> float:
        step = 1e-5 * (self.samples + configuration.batch_size / configuration.world_size)
        return step + (self.reduce if configuration.world_size > 1 else 0.0)

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        found = super().measure_step_time(request)
        return replace(found, step_seconds=not_none(found.step_seconds) * self._noise(VISITS_APART))

    def steps(self, batch_size: int, learning_rate: float) -> float:
        best = 0.1 * math.sqrt(batch_size / 32)
        return 400 * (1 + self.b_crit / batch_size) * (1 + math.log(learning_rate / best) ** 2)

    def seconds_of(self, request: TrialRequest) -> float:
        one = request.plan.configuration
        seed = random.Random(f"{request.plan.seed}/{one.batch_size}/{one.learning_rate}")
        steps = self.steps(one.batch_size, one.learning_rate) * math.exp(seed.gauss(0, SEEDS_APART))
        return steps * self.step_seconds_of(one) * self._noise(TRIALS_APART)

    def truth(self, batch_size: int, world_size: int, learning_rate: float | None = None) -> float:
        """Return the median seconds of a cell, by default with the best learning rate."""
        rate = learning_rate or 0.1 * math.sqrt(batch_size / 32)
        one = Configuration(
            batch_size=batch_size,
            micro_batch_size=batch_size // world_size,
            world_size=world_size,
            learning_rate=rate,
        )
        return self.steps(batch_size, rate) * self.step_seconds_of(one)

    def _noise(self, deviation: float) -> float:
        return math.exp(self._random.gauss(0, deviation))


def answer_of(node: Node) -> Answer:
    spec = make_spec(
        space={"batch_size": SIZES, "learning_rate": {"low": 0.01, "high": 1.0}},
        budget={"trials": 40, "trial_train_seconds": 200},
        executor={"devices": DEVICES},
        sampler={"name": "auto"},
        pruner={"name": "balanced"},
        confirm={"runs": 3, "max_runs": 15},
        seed=node.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(db=f"sqlite:///{Path(folder) / 'study.db'}", make_executor=lambda *_: node)
        return run_study(spec, launch)


@dataclass
class EightDevices(LawExecutor):
    """Eight slots, each with a device that is busy for two seconds a trial."""

    slots: int = 8
    slots_apart: bool = True
    ends: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)

    def submit(self, request: TrialRequest) -> None:
        super().submit(request)
        self.ends.append(time.monotonic() + TRIAL_SECONDS)
        if request.plan.phase is Phase.SEARCH:
            self.spans.append((time.monotonic(), self.ends[-1]))

    def events(self, timeout: float) -> list[Event]:
        left = min(self.ends, default=math.inf) - time.monotonic()
        time.sleep(max(0.0, min(left, timeout)))
        if left > timeout:
            return []
        self.ends.pop(0)
        return super().events(timeout)

    @property
    def busy_share(self) -> float:
        """Share of the devices' time from the first trial's start until the last trial starts."""
        first, last = self.spans[0][0], self.spans[-1][0]
        busy = math.fsum(min(end, last) - start for start, end in self.spans)
        return busy / (self.slots * (last - first))


def busy_share() -> float:
    executor = EightDevices()
    budget = {"trials": 64, "trial_train_seconds": 20, "least_trials": 64}
    spec = make_spec(budget=budget, sampler={"name": "auto"}, pruner={"name": "balanced"}, confirm={"runs": 1})
    with tempfile.TemporaryDirectory() as folder:
        run_study(spec, Launch(db=f"sqlite:///{Path(folder) / 'study.db'}", make_executor=lambda *_: executor))
    return executor.busy_share


def shares_of(node: Node) -> tuple[pd.DataFrame, bool]:
    """Return the right cells and intervals of an answer, and whether its fastest cell is near the best of all."""
    found = answer_of(node)
    true = [node.truth(one.batch_size, one.world_size, one.learning_rate) for one in found.by_devices]
    least = {count: min(node.truth(size, count) for size in SIZES if size % count == 0) for count in DEVICES}
    rows = [
        {
            "devices": one.world_size,
            "batch size": node.truth(one.batch_size, one.world_size) <= 1.05 * least[one.world_size],
            "times": holds(one, seconds),
            "speed-ups": holds(one.speedup, true[0] / seconds) if one.world_size > 1 else None,
        }
        for one, seconds in zip(found.by_devices, true, strict=True)
    ]
    fastest = min(found.by_devices, key=lambda one: one.seconds)
    return pd.DataFrame(rows), node.truth(fastest.batch_size, fastest.world_size) <= 1.05 * min(least.values())


def main(studies: int = 60, first_seed: int = 0) -> bool:
    """Print the shares of right cells and of intervals that hold the truth."""
    frames, right = zip(*(shares_of(Node(seed=first_seed + seed)) for seed in range(studies)), strict=True)
    frame = pd.concat(frames).set_index("devices").astype(float)
    print("shares of batch sizes within 5 % of the best there, and of 95 % intervals that hold, by number of devices")
    print(frame.groupby("devices").mean().to_string(float_format="{:.3f}".format))
    chosen, busy, held = statistics.fmean(right), busy_share(), frame.mean()
    print(f"chosen cells within 5 % of the best of all: {chosen:.0%}")
    print(f"95 % intervals that hold, of times: {held['times']:.0%}, of speed-ups: {held['speed-ups']:.0%}")
    print(f"eight devices, trials of {TRIAL_SECONDS:g} s: busy for {busy:.0%} of the search")
    return verdict(chosen >= RIGHT and held["times"] >= COVERED and held["speed-ups"] >= COVERED and busy >= BUSY)


if __name__ == "__main__":
    script(main, __doc__)
