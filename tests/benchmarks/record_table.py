"""Record a table of learning curves with a batch axis, for `sampling.py` and other simulated searches.

Run as ``python tests/benchmarks/record_table.py NAME OUT.csv.gz``, half an hour on one core for each table of
`TABLES`. Every combination of batch size, learning rate and other parameters trains with three seeds, until the hardest
target or the limit. The best of a hundred cells by three seeds is luck, so cells train with `MANY` seeds until the best
`BEST` at both targets have as many. Train seconds are steps × the batch size's CPU seconds of a step measured apart, so
that neighbours on the machine do not matter. An evaluation takes place about every 60th of the limit.
"""

if not __package__:
    __import__("from_clone")

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bssearch.exchange.exporters.exports import RecordedTable, RecordedTrial, write_table
from bssearch.records import Configuration, Goal, ParameterValue, Target
from bssearch.training.computation import Computation
from bssearch.training.trainer import Trainer
from tests.benchmarks.advisor import CPU, loaded
from tests.benchmarks.harness import script
from tests.benchmarks.simulate.replay import with_target
from tests.benchmarks.simulate.table_space import table_space

EVALUATIONS = 60  # per limit
TIMED = 20  # groups of timed steps per batch size
GROUP = 8  # timed steps of a group
SEEDS, MANY, BEST = 3, 32, 8
FIELDS = ("weight_decay", "dropout", "label_smoothing")  # of a `Configuration`; other columns are parameters


@dataclass(frozen=True)
class Recording:
    """A workload, and the values of each parameter; ``hardest`` ends a run, ``limit`` is in train seconds."""

    workload: str
    settings: Mapping[str, Any]
    target: Target
    hardest: float
    limit: float
    batch_sizes: Sequence[int]
    rates: Sequence[float]
    others: Mapping[str, Sequence[float]]
    fixed: Mapping[str, ParameterValue] = field(default_factory=dict)


SGD: Mapping[str, ParameterValue] = {"optimizer": "sgd", "optimizer.momentum": 0.9, "optimizer.nesterov": True}

TABLES = {
    # a convolutional network with SGD, and two regularisers
    "digits_sgd": Recording(
        workload="digits",
        settings={},
        target=Target(metric="accuracy", value=0.97, goal=Goal.MAXIMIZE),
        hardest=0.983,
        limit=1.6,
        batch_sizes=(8, 16, 32, 64, 128, 256, 512),
        rates=(0.01, 0.03, 0.06, 0.12, 0.25, 0.5),
        others={"dropout": (0.0, 0.3), "label_smoothing": (0.0, 0.1)},
        fixed=SGD,
    ),
    # a character model with AdamW
    "chars_adamw": Recording(
        workload="char_lm",
        settings={"context": 32, "layers": 1, "heads": 2, "width": 48},
        target=Target(metric="loss", value=2.6, goal=Goal.MINIMIZE),
        hardest=2.5,
        limit=2.0,
        batch_sizes=(2, 4, 8, 16, 32, 64, 128),
        rates=(0.001, 0.002, 0.004, 0.008, 0.016, 0.032),
        others={},
        fixed={"optimizer": "adamw", "optimizer.beta2": 0.99},
    ),
    # a perceptron with SGD without momentum: large batches never get there
    "fashion_plain": Recording(
        workload="fashion_mnist",
        settings={"model": "mlp", "validation_samples": 1000},
        target=Target(metric="accuracy", value=0.83, goal=Goal.MAXIMIZE),
        hardest=0.86,
        limit=1.8,
        batch_sizes=(8, 16, 32, 64, 128, 256, 512, 1024),
        rates=(0.01, 0.03, 0.06, 0.1, 0.2),
        others={"dropout": (0.0, 0.2)},
        fixed={"optimizer": "sgd", "optimizer.momentum": 0.0},
    ),
    # a vision transformer with AdamW
    "vit_adamw": Recording(
        workload="vit_tiny",
        settings={"patch": 7, "width": 32, "depth": 2, "heads": 2, "validation_samples": 1000},
        target=Target(metric="accuracy", value=0.74, goal=Goal.MAXIMIZE),
        hardest=0.78,
        limit=3.0,
        batch_sizes=(8, 16, 32, 64, 128, 256, 512),
        rates=(0.002, 0.004, 0.008, 0.016),
        others={},
        fixed={"optimizer": "adamw", "optimizer.beta2": 0.99},
    ),
}


def configuration(recording: Recording, batch_size: int, rate: float, others: Mapping[str, float]) -> Configuration:
    """The configuration of a cell."""
    parameters = {name: value for name, value in others.items() if name not in FIELDS}
    return Configuration(
        batch_size=batch_size,
        micro_batch_size=batch_size,
        learning_rate=rate,
        parameters={**recording.fixed, **parameters},
        **{name: value for name, value in others.items() if name in FIELDS},  # type: ignore[arg-type]
    )


def step_seconds(recording: Recording, batch_size: int) -> float:
    """CPU seconds of a step, the least of some groups, because neighbours slow a core's caches."""
    workload, data = loaded(recording.workload, tuple(recording.settings.items()))
    one = configuration(recording, batch_size, recording.rates[0], {name: v[0] for name, v in recording.others.items()})
    found = []
    with Trainer(workload, one, data.train, Computation(CPU), 0) as trainer:
        for _ in range(TIMED):
            start = time.process_time()
            for _ in range(GROUP):
                trainer.step()
            found.append((time.process_time() - start) / GROUP)
    return min(found)


def curve(recording: Recording, one: Configuration, seed: int, seconds: float) -> tuple[list[int], list[float]]:
    """Steps and metrics of a run's evaluations, to the hardest target, the limit or a metric that is not finite."""
    workload, data = loaded(recording.workload, tuple(recording.settings.items()))
    cadence = max(1, round(recording.limit / EVALUATIONS / seconds))
    steps: list[int] = []
    metrics: list[float] = []
    target = replace(recording.target, value=recording.hardest)
    with Trainer(workload, one, data.train, Computation(CPU), seed) as trainer:
        while (trainer.steps + cadence) * seconds <= recording.limit or not steps:
            for _ in range(cadence):
                trainer.step()
            metric = trainer.evaluate(data.validation, target.metric)
            steps.append(trainer.steps)
            metrics.append(metric)
            if target.is_met_by(metric) or not math.isfinite(metric):
                break
    return steps, metrics


def unsure(table: RecordedTable, hardest: float) -> dict[str, Any] | None:
    """One of the best cells at either target that has few seeds."""
    for target in (table.target.value, hardest):
        space = table_space(with_target(table, target))
        best = sorted(range(len(space.cells)), key=space.seconds.__getitem__)[:BEST]
        few = [point for point in best if len(space.trials[point]) < MANY and math.isfinite(space.seconds[point])]
        if few:
            return dict(zip(space.names, space.cells[few[0]], strict=True))
    return None


def main(name: str, out: Path) -> None:
    """Record all cells, then more seeds of the best."""
    torch.set_num_threads(1)
    recording = TABLES[name]
    trials: list[RecordedTrial] = []

    def record(cell: dict[str, Any], seeds: Sequence[int]) -> None:
        size, others = cell["batch_size"], {name: cell[name] for name in recording.others}
        one = configuration(recording, size, cell["learning_rate"], others)
        for seed in seeds:
            steps, metrics = curve(recording, one, seed, step_times[size])
            clock = tuple(step * step_times[size] for step in steps)
            trials.append(RecordedTrial(len(trials), cell, seed, tuple(steps), clock, tuple(metrics)))

    step_times = {size: step_seconds(recording, size) for size in recording.batch_sizes}
    print({size: f"{1000 * seconds:.3g} ms a step" for size, seconds in step_times.items()}, flush=True)
    names = ("batch_size", "learning_rate", *recording.others)
    for values in itertools.product(recording.batch_sizes, recording.rates, *recording.others.values()):
        record(dict(zip(names, values, strict=True)), range(SEEDS))
    while True:
        table = RecordedTable(name, recording.target, recording.limit, tuple(trials))
        write_table(table, out)
        cell = unsure(table, recording.hardest)
        if cell is None:
            return
        print(cell, flush=True)
        record(cell, range(SEEDS, MANY))


if __name__ == "__main__":
    script(main, __doc__)
