"""Claim: the 90 % interval of B_crit holds the truth in 85 to 95 % of 1,000 studies with log-normal noise.

Run as ``python tests/benchmarks/law_coverage.py``. Six batch sizes, octaves around B_crit, five runs each, 4 % noise;
exits 1 outside the bar. The other rows vary the studies and have no bar. ``bounded``: share of intervals with both
ends; ``width``: median ratio of the ends; ``steps``: share of 95 % intervals of S at the largest batch size that hold
the truth. Tuning error moves all runs of a batch size together, by 4 %: the law then does not fit.
"""

if not __package__:
    __import__("from_clone")

import math
import statistics
from dataclasses import dataclass

import numpy as np

from bssearch.analysis.law.batch_model import LawPoint, fit_law
from tests.benchmarks.harness import script

BAR = (0.85, 0.95)
REPLICATES = 1000
B_CRIT = 2**12.5
E_MIN = 1e6
SIX = tuple(2**exponent for exponent in range(10, 16))


@dataclass(frozen=True)
class Study:
    """A study to draw: ``runs`` at each batch size; half of the runs miss at the ``censored`` largest sizes."""

    name: str
    cv: float = 0.04
    sizes: tuple[int, ...] = SIX
    runs: tuple[int, ...] = (5,) * 6
    censored: int = 0
    tuning_error: float = 0.0

    def draw(self, random: np.random.Generator) -> list[LawPoint]:
        deviation = math.sqrt(math.log1p(self.cv**2))
        points = []
        for size, runs in zip(self.sizes, self.runs, strict=True):
            law = E_MIN * (1 + size / B_CRIT)
            shift = random.normal(0, self.tuning_error)
            samples = law * np.exp(random.normal(shift, deviation, runs))
            limit = law if size in self.sizes[len(self.sizes) - self.censored :] else math.inf
            reached = tuple(value for value in samples.tolist() if value <= limit)
            points.append(LawPoint(size, reached, (limit,) * (runs - len(reached))))
        return points


STUDIES = [
    Study("the bar: 6 sizes x 5 runs, CV 4 %"),
    Study("CV 10 %", cv=0.1),
    Study("CV 20 %", cv=0.2),
    Study("1 run per size", runs=(1,) * 6),
    Study("1 run per size, CV 20 %", cv=0.2, runs=(1,) * 6),
    Study("3 sizes x 5 runs", sizes=SIX[::2], runs=(5,) * 3),
    Study("3 sizes x 1 run", sizes=SIX[::2], runs=(1,) * 3),
    Study("3 runs at one size, 1 elsewhere", runs=(1, 1, 3, 1, 1, 1)),
    Study("two largest half censored", censored=2),
    Study("two largest half censored, CV 20 %", cv=0.2, censored=2),
    Study("1 run per size, two largest half censored", runs=(1,) * 6, censored=2),
    Study("tuning error 4 %", tuning_error=0.04),
    Study("tuning error 4 %, 3 runs at one size", runs=(1, 1, 3, 1, 1, 1), tuning_error=0.04),
]


def measure(study: Study) -> float:
    random = np.random.default_rng(1)
    largest = study.sizes[-1]
    steps = E_MIN * (1 / largest + 1 / B_CRIT)
    covered = predicted = fitted = 0
    widths = []
    for _ in range(REPLICATES):
        fit = fit_law(study.draw(random))
        if fit is None:
            continue
        fitted += 1
        low, high = fit.b_crit_low, fit.b_crit_high
        covered += (low or 0.0) <= B_CRIT <= (high or math.inf)
        if low is not None and high is not None:
            widths.append(high / low)
        interval = fit.steps_interval(largest)
        predicted += interval is None or interval[0] <= steps <= interval[1]
    width = f"{statistics.median(widths):.2f}" if widths else "-"
    print(f"{study.name:42} {covered / fitted:8.1%} {len(widths) / fitted:8.1%} {width:>7} {predicted / fitted:8.1%}")
    return covered / fitted


def main() -> bool:
    """Print the table; return False if the first row misses the bar."""
    print(f"{'study':42} {'coverage':>8} {'bounded':>8} {'width':>7} {'steps':>8}")
    coverage, *_ = [measure(study) for study in STUDIES]
    print(f"bar: {BAR[0]:.0%} to {BAR[1]:.0%} in the first row")
    return BAR[0] <= coverage <= BAR[1]


if __name__ == "__main__":
    script(main, __doc__)
