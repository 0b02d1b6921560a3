"""Student's t, and how near two figures must be to count as equally good: what every interval and verdict shares."""

from __future__ import annotations

CONFIDENCE = 0.95
"""Confidence of every interval that does not say otherwise: the convention."""

FLAT_RATIO = 1.05
"""Figures within this factor of the least count as equally good: a choice, the 5 % that answers speak of."""


FEWEST_RUNS = 3
"""Runs of each side that an interval over seeds takes: a choice; two would have a t of 12.7."""

FEWEST_SIZES = 3
"""Batch sizes that a line or a law of two parameters takes: two are always met."""


def at_most(count: int, runs: int) -> float:
    """Return the upper 95 % bound of the share of runs of which ``count`` are (Clopper & Pearson 1934); 1 for all."""
    from scipy.special import betaincinv

    return 1.0 if count >= runs else float(betaincinv(count + 1, runs - count, CONFIDENCE))


def student_t(degrees_of_freedom: float, confidence: float = CONFIDENCE) -> float:
    """Return the two-sided quantile of Student's t, by default of 95 %."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, (1 + confidence) / 2))
