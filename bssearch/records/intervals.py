"""Quantiles and thresholds that all intervals and verdicts share."""

from __future__ import annotations

CONFIDENCE = 0.95
"""Default confidence of every interval."""

FLAT_RATIO = 1.05
"""Values within this factor of the minimum count as equally good."""


FEWEST_RUNS = 3
"""Minimum runs per side for an interval over seeds; with two, t would be 12.7."""

FEWEST_SIZES = 3
"""Minimum batch sizes for a two-parameter fit; any two points fit exactly."""


def at_most(count: int, runs: int) -> float:
    """Return the 95 % upper bound of a share ``count`` / ``runs`` (Clopper & Pearson 1934); 1 if count = runs."""
    from scipy.special import betaincinv

    return 1.0 if count >= runs else float(betaincinv(count + 1, runs - count, CONFIDENCE))


def student_t(degrees_of_freedom: float, confidence: float = CONFIDENCE) -> float:
    """Return the two-sided quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, (1 + confidence) / 2))
