"""The ratio of two trainings' times to the target, from paired seeds."""

import math
import statistics
from collections.abc import Sequence

from bssearch.records import student_t
from tests.evidence.task import Found

FEWEST_PAIRS = 3
"""Pairs that an interval needs, as every interval over seeds in bssearch."""


def paired_ratio(theirs: Sequence[float | None], ours: Sequence[float | None], cap: float) -> Found:
    """Return the median of theirs / ours over the common seeds, with its 95 % interval.

    Both are seconds for each seed in the same order; None is a run that missed the target within ``cap`` seconds. If
    their run missed, the pair counts as ``cap`` / ours, and ``at_least`` says that the true median may be larger. The
    interval is Student's t on the logarithms of the pairs, widened to hold their median; None below three pairs, and if
    a run missed. If one of our runs missed, the median is None.
    """
    pairs = list(zip(theirs, ours, strict=False))
    known = [(other, own) for other, own in pairs if own is not None]
    if not known or len(known) < len(pairs):
        return {"median": None, "low": None, "high": None, "pairs": len(pairs), "at_least": False}
    hits = [other / own for other, own in known if other is not None]
    ordered = sorted((math.inf if other is None else other / own) for other, own in known)
    is_miss = math.isinf(ordered[len(ordered) // 2])
    median = statistics.median((cap if other is None else other) / own for other, own in known)
    low = high = None
    if len(hits) == len(known) >= FEWEST_PAIRS:
        logs = [math.log(one) for one in hits]
        half = student_t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        mean = statistics.fmean(logs)
        low, high = min(median, math.exp(mean - half)), max(median, math.exp(mean + half))
    return {"median": median, "low": low, "high": high, "pairs": len(known), "at_least": is_miss}
