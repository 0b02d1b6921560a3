"""The split of a batch into micro-batches that fit into memory.

The boundary is monotone: where a micro-batch ran out of memory, so does every larger one. A batch that does not fit at
once accumulates smaller micro-batches, so that only a model of which not even one sample fits cannot run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isqrt
from typing import Self

from bssearch.records import ProbeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBoundary:
    """The bounds of the micro-batch size: the largest that ``fits`` and the smallest that is ``too_large``.

    Either is None where no size is known to be so; nothing is known of the sizes between them.
    """

    fits: int | None = None
    too_large: int | None = None

    @classmethod
    def of(cls, fitting: Iterable[int], too_large: Iterable[int]) -> Self:
        """Return the boundary that micro-batch sizes which ran, and which ran out of memory, give.

        A size that ran, but no smaller than one that ran out of memory, does not count as fitting.
        """
        bound = min(too_large, default=None)
        return cls(fits=max((size for size in fitting if bound is None or size < bound), default=None), too_large=bound)

    def may_fit(self, micro_batch_size: int) -> bool:
        """Return whether a size is smaller than all that ran out of memory."""
        return self.too_large is None or micro_batch_size < self.too_large

    def without(self, micro_batch_size: int) -> MemoryBoundary:
        """Return the boundary after a size ran out of memory."""
        fitting = [] if self.fits is None else [self.fits]
        too_large = [] if self.too_large is None else [self.too_large]
        return MemoryBoundary.of(fitting, [*too_large, micro_batch_size])

    @property
    def nothing_fits(self) -> bool:
        """Whether not even a micro-batch of one sample fits."""
        return self.too_large is not None and self.too_large <= 1


UNKNOWN = MemoryBoundary()
"""The boundary where nothing was ever run."""


def split_batch(batch_size: int, max_micro_batch_size: int | None) -> tuple[int, int]:
    """Return (micro-batch, accumulation steps): the largest divisor of the batch size that may run at once."""
    if max_micro_batch_size is None or batch_size <= max_micro_batch_size:
        return batch_size, 1
    micro = _largest_divisor(batch_size, max_micro_batch_size)
    return micro, batch_size // micro


def _largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number up to ``most``, which is below it, in about √number divisions."""
    root = isqrt(number)
    for count in range(-(-number // most), root + 1):
        if number % count == 0:
            return number // count
    return next(size for size in range(min(most, root), 0, -1) if number % size == 0)


def choose_micro_batch(batch_size: int, max_micro_batch_size: int | None, memory: MemoryBoundary) -> int | None:
    """Return the micro-batch size to run a batch size with, None where nothing fits.

    It is the largest divisor below the boundary and within the given maximum. Where the boundary is known, and that
    divisor is not known to fit, the largest that is known to fit is taken instead, unless it is less than half of it.
    """
    if memory.nothing_fits:
        return None
    limits = [max_micro_batch_size] if max_micro_batch_size is not None else []
    if memory.too_large is not None:
        limits.append(memory.too_large - 1)
    micro, _ = split_batch(batch_size, min(limits, default=None))
    if memory.too_large is None or memory.fits is None or micro <= memory.fits:
        return micro
    known, _ = split_batch(batch_size, memory.fits)
    return known if 2 * known >= micro else micro


def in_force(timed: Iterable[ProbeRecord], memory: MemoryBoundary) -> dict[int, ProbeRecord]:
    """Return by batch size the step time of the split that its trials run with, of all that were timed.

    It is the one with the largest micro-batch below the boundary; of several with it the first that had the device to
    itself, else the first; always with the first one's cadence, which trials keep. Batch sizes of which no such split
    was timed are left out.
    """
    found: dict[int, ProbeRecord] = {}
    for probe in timed:
        if probe.out_of_memory or not memory.may_fit(probe.micro_batch_size):
            continue
        known = found.get(probe.batch_size)
        if known is None or probe.micro_batch_size > known.micro_batch_size:
            found[probe.batch_size] = probe
        elif probe.micro_batch_size == known.micro_batch_size and known.contended and not probe.contended:
            found[probe.batch_size] = replace(probe, eval_every_steps=known.eval_every_steps)
    return found
