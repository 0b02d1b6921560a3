"""Student's t, and how near two figures must be to count as equally good: what every interval and verdict shares."""

from __future__ import annotations

CONFIDENCE = 0.95
"""Confidence of every interval that does not say otherwise: the convention."""

FLAT_RATIO = 1.05
"""Figures within this factor of the least count as equally good: a choice, the 5 % that answers speak of."""


def at_most(count: int, runs: int) -> float:
    """Return the upper 95 % bound of the share of runs of which ``count`` are (Clopper & Pearson 1934); 1 for all."""
    from scipy.special import betaincinv

    return 1.0 if count >= runs else float(betaincinv(count + 1, runs - count, CONFIDENCE))


def proportion_interval(share: float, observations: float) -> tuple[float, float]:
    """Return the 95 % interval of a share seen in so many independent observations (Clopper & Pearson 1934).

    It is never a point: a share of 0 in n observations has the upper end 1 − 0.025^(1/n). ``observations`` need not be
    whole, as an effective number is not (Korn & Graubard 1998, Survey Methodology 24, p. 193). Raises ValueError for a
    share outside [0, 1] and for no observation.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share = {share} must be in [0, 1]")
    if not observations > 0:
        raise ValueError(f"observations = {observations} must be > 0")
    from scipy.special import betaincinv

    hits, misses = share * observations, (1 - share) * observations
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if hits <= 0 else float(betaincinv(hits, misses + 1, tail))
    high = 1.0 if misses <= 0 else float(betaincinv(hits + 1, misses, 1 - tail))
    return low, high


def student_t(degrees_of_freedom: float, confidence: float = CONFIDENCE) -> float:
    """Return the two-sided quantile of Student's t, by default of 95 %."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, (1 + confidence) / 2))
