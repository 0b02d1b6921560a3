"""The largest micro-batch that fits: sizes doubled, then bisected, each run in a process of its own.

No size is named that was not run: what is between the largest that fits and the smallest that does not is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bssearch.analysis.memory import MemoryFit, fit_memory
from bssearch.executors.base import Executor
from bssearch.records import Environment, MemoryRequest, MemoryUse
from bssearch.search.calibration import default_at, nothing_fits
from bssearch.space import MemoryBoundary
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store

BRACKET = 1.05
"""The search ends where the smallest size that does not fit is at most this many times the largest that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProbe:
    """The micro-batch sizes that were run, those known from before first, and what they say.

    ``smallest_that_does_not`` is None where ``ceiling``, the number of training samples, fits. ``fit`` is None below
    three sizes with a known peak.
    """

    uses: tuple[MemoryUse, ...]
    largest_that_fits: int
    smallest_that_does_not: int | None
    ceiling: int
    fit: MemoryFit | None

    @property
    def whole_training_part_fits(self) -> bool:
        """Whether even all training samples at once fit."""
        return self.largest_that_fits >= self.ceiling


def probe_memory(
    spec: StudySpec,
    executor: Executor,
    store: Store,
    environment: Environment,
    on_each: Callable[[MemoryUse], None] = lambda memory: None,
) -> MemoryProbe:
    """Find the largest micro-batch of a study's default configuration that fits; see `bssearch.probes.memory`.

    Each size is stored as soon as it has been run, and none is run again on a device of the same kind and memory.
    ``on_each`` gets each as it is run. Raises `LaunchError` where not even one sample fits.
    """
    ceiling = executor.describe().train_samples
    uses = store.memory(spec.name, environment)
    while (size := next_size(uses, smallest=min(spec.batch_sizes), ceiling=ceiling)) is not None:
        request = MemoryRequest(configuration=default_at(spec, size, size).configuration, threads=spec.executor.threads)
        use = executor.measure_memory(request)
        store.save_memory(spec.name, environment, use)
        uses.append(use)
        on_each(use)
    memory = boundary_of(uses)
    if memory.fits is None:
        raise nothing_fits(environment, uses)
    return MemoryProbe(
        uses=tuple(uses),
        largest_that_fits=memory.fits,
        smallest_that_does_not=memory.too_large,
        ceiling=ceiling,
        fit=fit_memory(uses),
    )


def next_size(uses: Sequence[MemoryUse], *, smallest: int, ceiling: int) -> int | None:
    """Return the micro-batch size to run next, between 1 and the ceiling; None where the boundary is known.

    The smallest first; then twice the largest that fits, or half the smallest that does not, until there are both;
    then the middle of them until they are within `BRACKET`, or next to each other.
    """
    memory = boundary_of(uses)
    fits, too_large = memory.fits, memory.too_large
    if fits is None and too_large is None:
        return min(smallest, ceiling)
    if too_large is None:
        assert fits is not None
        return None if fits >= ceiling else min(2 * fits, ceiling)
    if fits is None:
        return None if too_large <= 1 else too_large // 2
    return None if too_large <= max(fits + 1, BRACKET * fits) else (fits + too_large) // 2


def boundary_of(uses: Sequence[MemoryUse]) -> MemoryBoundary:
    """Return the boundary that sizes which were run give."""
    return MemoryBoundary.of(
        (use.micro_batch_size for use in uses if use.fits), (use.micro_batch_size for use in uses if not use.fits)
    )
