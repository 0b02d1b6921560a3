"""Claim: learning curves predict the critical batch size and the best batch size of a harder target.

Run as ``python tests/benchmarks/beyond.py NAME.csv.gz …`` on tables of recorded curves (``export STUDY --to curves``).
A level of a table is a target that every run of some configuration reached, at all but two batch sizes. Each level
predicts the harder levels of up to four times the samples, from curves that end at the level. Predictions are compared
with the law and the times in the table. Bars: the median of predicted / actual B_crit in 0.85–1.18; the 90 % interval
covers 85 to 95 %; the recommended batch size within 10 % of the table's least time in 80 %. Exits 1 below
a bar.
"""

if not __package__:
    __import__("from_clone")

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bssearch.analysis.law.beyond import FARTHEST, LEVEL_FACTOR, BatchCurves, beyond_target, nearest_law
from bssearch.analysis.posterior import Numbers
from bssearch.errors import UsageError
from tests.benchmarks.harness import script, verdict
from tests.benchmarks.simulate.tables import read_table

NEAREST = 1.15  # times the samples: nearer targets are hardly harder
RATIO_BAR = (0.85, 1.18)
COVER_BAR = (0.85, 0.95)
WITHIN, WITHIN_BAR = 1.10, 0.80
MISSING = 2  # batch sizes that may miss a level
FEWEST = 5  # batch sizes of a level
GAINS = 300  # looked at for levels


@dataclass(frozen=True)
class Level:
    """A target and, of each batch size that reaches it, the fastest configuration and its mean log samples."""

    gain: float
    fastest: dict[int, BatchCurves]
    log_samples: dict[int, float]

    @property
    def times(self) -> dict[int, float]:
        """Seconds to the target by batch size."""
        return {size: math.exp(self.log_samples[size]) / size * one.step_seconds for size, one in self.fastest.items()}


class Table:
    """A table of recorded curves."""

    def __init__(self, path: Path) -> None:
        found = read_table(path)
        self.name, self.target = found.name, found.target
        paces: dict[int, list[float]] = {}
        tried: dict[tuple[Any, ...], list[tuple[Numbers, Numbers]]] = {}
        for trial in found.trials:
            gains = np.array([self.target.gain(metric) for metric in trial.metrics])
            best = np.maximum.accumulate(np.where(np.isfinite(gains), gains, -math.inf))
            size = int(str(trial.parameters["batch_size"]))
            key = (size, *trial.parameters.items())
            tried.setdefault(key, []).append((np.array(trial.steps, dtype=float), best))
            paces.setdefault(size, []).append(trial.train_seconds[-1] / trial.steps[-1])
        self.configurations = [
            BatchCurves(size, size, statistics.median(paces[size]), runs) for (size, *_), runs in tried.items()
        ]
        self.batch_sizes = sorted(paces)

    def levels(self) -> Iterator[Level]:
        """Yield targets `LEVEL_FACTOR` apart in samples, easiest first."""
        ends = [gains for one in self.configurations for _, gains in one.runs]
        start = float(np.median([gains[0] for gains in ends]))
        known = np.unique(np.concatenate(ends))
        known = known[(known > start) & np.isfinite(known)]
        last = -math.inf
        for gain in known[:: max(1, len(known) // GAINS)]:
            level = self._level(float(gain))
            if len(level.fastest) < max(FEWEST, len(self.batch_sizes) - MISSING):
                continue
            middle = statistics.fmean(level.log_samples.values())
            if middle >= last + math.log(LEVEL_FACTOR):
                last = middle
                yield level

    def _level(self, gain: float) -> Level:
        fastest: dict[int, BatchCurves] = {}
        logs: dict[int, float] = {}
        for one in self.configurations:
            mean = float(one.log_samples(gain).mean())
            if math.isfinite(mean) and mean < logs.get(one.batch_size, math.inf):
                fastest[one.batch_size], logs[one.batch_size] = one, mean
        return Level(gain, fastest, logs)


def cut(curves: BatchCurves, gain: float) -> BatchCurves:
    """Cut curves at a gain, as a study ends its trials."""
    ends = [int(np.searchsorted(gains, gain)) + 1 for _, gains in curves.runs]
    runs = [(steps[:end], gains[:end]) for (steps, gains), end in zip(curves.runs, ends, strict=True)]
    return BatchCurves(curves.batch_size, curves.micro_batch_size, curves.step_seconds, runs)


def log_b_crit(level: Level) -> float:
    """Return log B_crit of the law nearest to a level's samples."""
    sizes = sorted(level.log_samples)
    logs = np.array([[level.log_samples[size] for size in sizes]])
    return float(nearest_law(logs, np.array(sizes, dtype=float))[0][0])


def case(table: Table, now: Level, harder: Level) -> dict[str, float] | None:
    """Predict a harder level and compare; None if too few batch sizes or samples are between.

    Returns predicted over actual B_crit, and whether its interval and the recommendation hold.
    """
    both = now.log_samples.keys() & harder.log_samples.keys()
    farther = statistics.fmean(harder.log_samples[size] - now.log_samples[size] for size in both)
    if not math.log(NEAREST) <= farther <= math.log(FARTHEST):
        return None
    target = replace(table.target, value=table.target.gain(now.gain))
    curves = [cut(one, now.gain) for one in now.fastest.values()]
    found = beyond_target(curves, target, table.target.gain(harder.gain))
    times, actual = harder.times, math.exp(log_b_crit(harder))
    return {
        "B_crit": found.b_crit.estimate / actual,
        "covered": (found.b_crit.low or 0) <= actual <= (found.b_crit.high or math.inf),
        "time": times.get(found.optimal_batch_size, math.inf) <= WITHIN * min(times.values()),
    }


def cases(table: Table, refused: Counter[str]) -> Iterator[dict[str, float]]:
    """Yield the cases of a table; count refusals."""
    for now, harder in itertools.combinations(list(table.levels()), 2):
        try:
            found = case(table, now, harder)
        except UsageError as error:
            refused[next(reason for text, reason in REFUSALS.items() if text in str(error))] += 1
        else:
            yield from [] if found is None else [found]


REFUSALS = {
    "levels between": "too few levels",
    "show no change": "no change shown",
    "predictions end": "too far",
    "batch sizes with curves": "too few batch sizes",
    "must be easier": "beyond the metric",
}


def main(tables: list[Path]) -> bool:
    """Print a line for each table, and for all: medians of B_crit, and shares."""
    refused = Counter[str]()
    rows = [{"table": table.name, **found} for table in map(Table, tables) for found in cases(table, refused)]
    print(f"refused: {dict(refused)}")
    if not rows:
        return verdict(False)
    frame = pd.DataFrame(rows).set_index("table").astype(float)
    how = {name: "median" if name == "B_crit" else "mean" for name in frame}
    every = frame.agg(how)
    shown = pd.concat([frame.groupby("table").agg(how), every.to_frame("all").T])
    print(shown.assign(cases=[*frame.groupby("table").size(), len(frame)]).to_string(float_format="{:.2f}".format))
    met = RATIO_BAR[0] <= every["B_crit"] <= RATIO_BAR[1] and COVER_BAR[0] <= every["covered"] <= COVER_BAR[1]
    return verdict(bool(met and every["time"] >= WITHIN_BAR))


if __name__ == "__main__":
    script(main, __doc__)
