"""Claim: the law fits ResNet-50 and Flux.1 as published, not BERT and RetinaNet, and interpolates from three sizes.

Run as ``python tests/benchmarks/law_rcp.py``. The runs are MLPerf's (``tests/data/mlperf-rcp``), 10 to 28 per batch
size. The first table has B_crit, the verdict and the batch sizes with rising steps, over all runs. The bars for B_crit
are 95 % bootstrap intervals of a fit to one run per batch size. In the second table a law predicts samples from three
batch sizes: the smallest, the largest and the nearest to their geometric mean. Bar: a median |error| of 7 %. Exits 1
below a bar.
"""

if not __package__:
    __import__("from_clone")

import math
import statistics
from dataclasses import dataclass

from bssearch.analysis.law.batch_model import LawPoint, fit_law, rising
from tests.analysis.test_batch_model import rcp_points
from tests.benchmarks.harness import script
from tests.factories import not_none

ERROR_BAR = 0.07


@dataclass(frozen=True)
class Bar:
    """The expected result of a workload."""

    verdict: str
    b_crit: tuple[float, float] = (0, math.inf)
    rising: frozenset[int] = frozenset()


BARS = {
    "resnet": Bar("fits", b_crit=(44_400, 49_600)),
    "flux1": Bar("fits", b_crit=(2710, 4270)),
    "bert": Bar("poor"),
    "retinanet": Bar("poor", rising=frozenset({4096})),
}


def three_of(points: list[LawPoint]) -> list[LawPoint]:
    """Return the smallest, the largest, and the point nearest to their geometric mean."""
    smallest, *others, largest = sorted(points, key=lambda point: point.batch_size)
    middle = math.sqrt(smallest.batch_size * largest.batch_size)
    return [smallest, min(others, key=lambda point: abs(math.log(point.batch_size / middle))), largest]


def judge(workload: str, bar: Bar) -> bool:
    """Print the fit to all runs of a workload; return whether it meets the bar."""
    points = rcp_points(workload)
    fit = not_none(fit_law(points))
    met = fit.verdict == bar.verdict and bar.b_crit[0] <= fit.b_crit <= bar.b_crit[1]
    met = met and bar.rising <= set(rising(points))
    rises = ",".join(map(str, rising(points))) or "-"
    low, high = (f"{end:.0f}" if end is not None else "?" for end in (fit.b_crit_low, fit.b_crit_high))
    print(
        f"{workload:10} {len(points):5} {fit.b_crit:8.0f} {f'[{low}, {high}]':>18} {fit.deviation:9.3f} "
        f"{fit.max_residual:8.1%} {fit.verdict:8} {rises:8} {'ok' if met else 'MISSED'}"
    )
    return met


def errors(workload: str) -> list[float]:
    """Print and return the relative errors of the law of three batch sizes at all other sizes."""
    points = rcp_points(workload)
    three = three_of(points)
    fit = not_none(fit_law(three))
    others = [point for point in points if point not in three]
    found = {point.batch_size: point.batch_size * fit.steps(point.batch_size) / mean(point) - 1 for point in others}
    text = "  ".join(f"{size}: {error:+.1%}" for size, error in sorted(found.items()))
    print(f"{workload:10} from {', '.join(str(point.batch_size) for point in three)}:  {text}")
    return list(found.values())


def mean(point: LawPoint) -> float:
    return statistics.geometric_mean(point.samples)


def main() -> bool:
    """Print both tables; return False below a bar."""
    print(
        f"{'workload':10} {'sizes':>5} {'B_crit':>8} {'90 % interval':>18} {'deviation':>9} {'residual':>8} "
        f"{'verdict':8} {'rising':8} bar"
    )
    met = all([judge(workload, bar) for workload, bar in BARS.items()])
    print()
    error = statistics.median(abs(value) for workload in BARS for value in errors(workload))
    print(f"median |error| {error:.1%}; bar {ERROR_BAR:.0%}")
    return met and error <= ERROR_BAR


if __name__ == "__main__":
    script(main, __doc__)
