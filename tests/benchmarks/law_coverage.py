"""Claim: the 90 % interval of B_crit holds the truth in 85 to 95 % of 1,000 studies with log-normal noise.

Run as ``python tests/benchmarks/law_coverage.py``. Six batch sizes, octaves around B_crit, five runs each, 4 % noise;
exits 1 outside the bar.
"""

if not __package__:
    __import__("from_clone")

import math

import numpy as np

from bssearch.analysis.law.batch_model import LawPoint, fit_law
from tests.benchmarks.harness import script
from tests.factories import not_none

BAR = (0.85, 0.95)
REPLICATES = 1000
B_CRIT = 2**12.5
E_MIN = 1e6
SIZES = tuple(2**exponent for exponent in range(10, 16))
RUNS, CV = 5, 0.04


def drawn(random: np.random.Generator) -> list[LawPoint]:
    """Return a study's runs."""
    deviation = math.sqrt(math.log1p(CV**2))
    laws = {size: E_MIN * (1 + size / B_CRIT) for size in SIZES}
    return [
        LawPoint(size, tuple((law * np.exp(random.normal(0, deviation, RUNS))).tolist())) for size, law in laws.items()
    ]


def main() -> bool:
    """Print the share of intervals that hold the truth; return False if it misses the bar."""
    random = np.random.default_rng(1)
    fits = [not_none(fit_law(drawn(random))) for _ in range(REPLICATES)]
    covered = sum((fit.b_crit_low or 0.0) <= B_CRIT <= (fit.b_crit_high or math.inf) for fit in fits) / REPLICATES
    print(f"{covered:.1%} of the intervals hold the truth; bar: {BAR[0]:.0%} to {BAR[1]:.0%}")
    return BAR[0] <= covered <= BAR[1]


if __name__ == "__main__":
    script(main, __doc__)
