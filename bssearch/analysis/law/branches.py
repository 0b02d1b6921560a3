"""The local critical batch size: the largest batch size that does not worsen the metric after equal samples."""

# Branched training (Merrill et al. 2025, arXiv 2505.23971) continues a checkpoint at B, 2B, 4B, …. Unlike the paper,
# the bound comes from the spread of branches at B with other data orders.

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bssearch.errors import require
from bssearch.records import Goal
from bssearch.records.intervals import CONFIDENCE, student_t

FEWEST_REPEATS = 3  # with fewer repeats, the spread is uncertain by more than a factor of five

FEWEST_STEPS = 8  # steps of the shortest branch; momentum distorts fewer steps

EVALUATIONS = 8  # evaluations per branch; `WINDOW` has three

WINDOW = 0.25  # the mean metric is over this last share of a branch

Verdict = Literal["found", "at_least", "below", "cannot_tell"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPlan:
    """Batch sizes at which branches continue a checkpoint, B first; all branches evaluate after equal samples."""

    batch_sizes: tuple[int, ...]
    samples: int
    samples_between: int

    def is_in_window(self, samples: int) -> bool:
        return samples >= (1 - WINDOW) * self.samples


def plan_branches(batch_size: int, samples: int, octaves: int, *, largest: int | None = None) -> BranchPlan:
    """Plan branches from B up to 2^``octaves`` B; raise `UsageError` if ``octaves`` < 1 or 2B is too large."""
    require(octaves >= 1, f"octaves = {octaves} must be >= 1 to compare B and 2B")
    require(
        samples >= 2 * batch_size,
        f"samples = {samples} per branch must be >= {2 * batch_size}, one step of the batch size 2B",
    )
    require(
        largest is None or 2 * batch_size <= largest,
        f"batch_size = {batch_size} must be <= {(largest or 0) // 2}, half of the training samples",
    )
    bound = max(2 * batch_size, min(samples // FEWEST_STEPS, samples if largest is None else largest))
    sizes = [batch_size * 2**octave for octave in range(octaves + 1) if batch_size * 2**octave <= bound]
    units = samples // sizes[-1]
    return BranchPlan(
        batch_sizes=tuple(sizes),
        samples=units * sizes[-1],
        samples_between=max(1, units // EVALUATIONS) * sizes[-1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchedSize:
    """Each branch's mean metric over the last `WINDOW` of samples; None if the branch diverged."""

    batch_size: int
    ends: tuple[float | None, ...]

    @property
    def mean(self) -> float | None:
        """The mean over the branches; None if a branch diverged or no branch ran."""
        known = [end for end in self.ends if end is not None]
        return statistics.fmean(known) if known and len(known) == len(self.ends) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCriticalBatch:
    """The largest batch size with a mean metric no worse than ``bound``.

    Attributes:
        verdict: ``found`` between ``low`` and ``high``, ``at_least`` if no size is worse than ``bound``, ``below`` if
            2B is worse, or ``cannot_tell``.
        bound: `bound_of` the branches at B.
        spread: Standard deviation of the branches' metrics at B.
    """

    verdict: Verdict
    batch_size: int | None = None
    low: int | None = None
    high: int | None = None
    mean: float | None = None
    spread: float | None = None
    bound: float | None = None
    reason: str | None = None


def holds(size: BranchedSize, bound: float, goal: Goal) -> bool:
    mean = size.mean
    return mean is not None and (mean <= bound if goal is Goal.MINIMIZE else mean >= bound)


def bound_of(base: BranchedSize, goal: Goal) -> float | None:
    """Return the one-sided 95 % prediction bound for the mean metric of equally many new branches at B, if known.

    The bound is mean ± t s √(2/n), with Student's t of n − 1 degrees of freedom.
    """
    ends = [end for end in base.ends if end is not None]
    if len(ends) < max(FEWEST_REPEATS, len(base.ends)):
        return None
    spread = statistics.stdev(ends)
    if spread == 0:
        return None
    width = student_t(len(ends) - 1, 2 * CONFIDENCE - 1) * spread * math.sqrt(2 / len(ends))
    return statistics.fmean(ends) + (width if goal is Goal.MINIMIZE else -width)


def why_unknown(start: float, base: BranchedSize, goal: Goal) -> str | None:
    """Return the reason if the branches at B give no answer; ``start`` is the checkpoint's metric."""
    if None in base.ends:
        return f"a branch at the checkpoint's batch size {base.batch_size} diverged; branch from another checkpoint"
    bound = bound_of(base, goal)
    if bound is None and len(base.ends) < FEWEST_REPEATS:
        return f"branches at batch size {base.batch_size}: {len(base.ends)}; run at least {FEWEST_REPEATS}"
    if bound is None:
        return (
            f"the branches at batch size {base.batch_size} have equal metrics despite different data orders; "
            "use more samples per branch"
        )
    if holds(BranchedSize(batch_size=base.batch_size, ends=(start,)), bound, goal):
        return (
            f"the branches at batch size {base.batch_size} do not improve beyond the spread: "
            f"{start:.5g} at the checkpoint, {base.mean:.5g} at the end; use longer or more branches"
        )
    return None


def local_critical_batch(start: float, sizes: Sequence[BranchedSize], goal: Goal) -> LocalCriticalBatch:
    base = sizes[0]
    bound = bound_of(base, goal)  # larger sizes have as many branches
    ends = [end for end in base.ends if end is not None]
    spread = statistics.stdev(ends) if len(ends) > 1 else None
    too_few = f"no batch size above {base.batch_size} ran; use a device with more memory" if len(sizes) < 2 else None
    reason = why_unknown(start, base, goal) or too_few
    if reason is not None or bound is None:
        return LocalCriticalBatch(verdict="cannot_tell", mean=base.mean, spread=spread, bound=bound, reason=reason)
    holding = [base, *itertools.takewhile(lambda size: holds(size, bound, goal), sizes[1:])]
    first_failing = sizes[len(holding)].batch_size if len(holding) < len(sizes) else None
    largest = holding[-1].batch_size
    is_below = first_failing is not None and len(holding) == 1
    return LocalCriticalBatch(
        verdict="below" if is_below else "at_least" if first_failing is None else "found",
        batch_size=largest,
        low=None if is_below else largest,
        high=first_failing,
        mean=base.mean,
        spread=spread,
        bound=bound,
    )


def is_rising(found: Sequence[LocalCriticalBatch]) -> bool | None:
    """True if the local critical batch sizes never fall; None if fewer than two are known."""
    known = [one.batch_size for one in found if one.batch_size is not None]
    return None if len(known) < 2 else all(before <= after for before, after in itertools.pairwise(known))
