"""Which bytes live when: the storages of a step with their lifetimes, and what they add up to at any batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor

import numpy as np
import numpy.typing as npt

CUDA_BLOCK_BYTES = 512
"""What PyTorch's allocator on CUDA rounds each block up to (``kMinBlockSize`` in c10/cuda/CUDACachingAllocator).

It asks the device for segments: of 2 MiB for blocks up to 1 MiB, of 20 MiB for those below 10 MiB, and of whole 2 MiB
above. ``torch.cuda.max_memory_allocated`` counts blocks, as here; what lies unused in segments is the headroom's."""


@dataclass(slots=True)
class Allocation:
    """One storage of ``size`` bytes that lives from event ``start`` until event ``end``, None where it is never freed.

    Events are counted: each storage that is made and each that is freed is one. ``phase`` is that of its making:
    build, inputs, forward, backward or optimizer. ``elements`` and ``width`` are the number of elements and the last
    dimension of its first tensor. ``term`` says what it is, where that is known.
    """

    start: int
    size: int
    phase: str
    elements: int
    width: int
    end: int | None = None
    term: str | None = None


@dataclass(frozen=True, slots=True)
class StepLifetimes:
    """The storages of a traced training step; the step begins at event ``since``."""

    micro_batch_size: int
    since: int
    allocations: Sequence[Allocation]

    def accumulating(self) -> StepLifetimes:
        """Return the step with all gradients there from its beginning, as from the second micro-batch on."""
        return replace(
            self,
            allocations=[
                replace(one, start=0, end=None) if one.term == "gradients" else one for one in self.allocations
            ],
        )

    def events_before_update(self) -> int | None:
        """Return how many events of the step come before the optimizer's; None where it makes nothing."""
        updates = (one.start for one in self.allocations if one.phase == "optimizer" and one.start > self.since)
        first = min(updates, default=None)
        return None if first is None else first - self.since

    def live_bytes(self) -> npt.NDArray[np.int64]:
        """Return the bytes that live at each event of the step."""
        last = max((one.end or one.start for one in self.allocations), default=0)
        changes = np.zeros(last + 2, dtype=np.int64)
        for one in self.allocations:
            changes[one.start] += one.size
            if one.end is not None:
                changes[one.end] -= one.size
        return np.cumsum(changes)[self.since :]

    def terms_at(self, event: int) -> dict[str, int]:
        """Return the bytes of each term that live at an event of the step, counted from its beginning."""
        found: dict[str, int] = {}
        for one in self.allocations:
            if one.start <= event + self.since and (one.end is None or event + self.since < one.end):
                name = one.term or one.phase
                found[name] = found.get(name, 0) + one.size
        return found

    def most_of(self, term: str) -> int:
        """Return the most bytes of one term that live at once during the step."""
        of_term = [one for one in self.allocations if one.term == term]
        return int(StepLifetimes(self.micro_batch_size, self.since, of_term).live_bytes().max(initial=0))


class PeakByBatch:
    """The peak of a step as a function of the micro-batch size, from traces of two sizes.

    At every event the live bytes are a line in the batch size, so that their peak is the highest of these lines: the
    optimizer's step where batches are small, the end of the forward pass where they are large. Where the two traces do
    not have the same events (a kernel was chosen by the batch size) the peak itself is taken as a line.
    """

    def __init__(self, small: StepLifetimes, large: StepLifetimes) -> None:
        self._small, self._large = small, large
        below, above = small.live_bytes(), large.live_bytes()
        if len(below) != len(above):
            below, above = below.max(keepdims=True), above.max(keepdims=True)
        self._per_sample = (above - below) / (large.micro_batch_size - small.micro_batch_size)
        self._fixed = below - small.micro_batch_size * self._per_sample

    def peak_bytes(self, micro_batch_size: int) -> int:
        """Return the peak at a micro-batch size."""
        return round(float((self._fixed + micro_batch_size * self._per_sample).max()))

    def bytes_per_sample(self, micro_batch_size: int) -> int:
        """Return by how many bytes the peak grows with one more sample."""
        return self.peak_bytes(micro_batch_size + 1) - self.peak_bytes(micro_batch_size)

    def largest(self, memory_bytes: float) -> int:
        """Return the largest micro-batch size whose peak is within so many bytes; 0 where not even one sample is."""
        if (self._fixed > memory_bytes).any():
            return 0
        grows = self._per_sample > 0
        return floor(((memory_bytes - self._fixed[grows]) / self._per_sample[grows]).min()) if grows.any() else 0

    def terms(self, micro_batch_size: int) -> Mapping[str, tuple[float, float]]:
        """Return what lives at the peak of the forward and backward pass, by term: fixed bytes, and bytes a sample."""
        if len(self._fixed) > 1:
            live = self._fixed + micro_batch_size * self._per_sample
            event = int(live[: self._small.events_before_update()].argmax())
            small, large = self._small.terms_at(event), self._large.terms_at(event)
        else:
            small, large = (one.terms_at(int(one.live_bytes().argmax())) for one in (self._small, self._large))
        return {name: self._line(small.get(name, 0), large.get(name, 0)) for name in dict.fromkeys([*small, *large])}

    def _line(self, small: int, large: int) -> tuple[float, float]:
        slope = (large - small) / (self._large.micro_batch_size - self._small.micro_batch_size)
        return small - slope * self._small.micro_batch_size, slope
