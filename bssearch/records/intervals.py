"""Thresholds and quantiles for intervals and verdicts."""

import statistics
from collections.abc import Iterable

CONFIDENCE = 0.95

FROM_90_TO_95 = 1.96 / 1.645  # half width of a normal 95 % interval over the half width of a 90 % interval

FLAT_RATIO = 1.05  # batch sizes are equally good within this factor of the minimum


FEWEST_RUNS = 3  # runs for an interval over seeds; with two runs, Student's t would be 12.7

FEWEST_SIZES = 3  # points for a fit of two parameters; two points fit exactly


def median_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def at_most(count: int, runs: int) -> float:
    """Return the one-sided 95 % upper bound of the share ``count`` / ``runs`` (Clopper & Pearson 1934)."""
    from scipy.special import betaincinv

    return 1.0 if count >= runs else float(betaincinv(count + 1, runs - count, CONFIDENCE))


def student_t(degrees_of_freedom: float, confidence: float = CONFIDENCE) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, (1 + confidence) / 2))
