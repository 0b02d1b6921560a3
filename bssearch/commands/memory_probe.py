"""The largest micro-batch that fits: sizes doubled, then bisected, each run in a process of its own.

No size is named that was not run: what is between the largest that fits and the smallest that does not is not known.

A size fits if it leaves the reserve of `bssearch.probes.memory` free; it does not if all of the memory is too
little. One in between is neither, for processes that do the same differ by a little: it is *marginal*. Where marginal
sizes alone span more than `BRACKET`, both of its ends are brought next to them instead, within `FINE`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from bssearch.analysis.memory import MemoryFit, fit_memory
from bssearch.executors.base import Executor
from bssearch.records import Environment, MemoryRequest, MemoryUse
from bssearch.search.calibration import default_at, nothing_fits
from bssearch.space import MemoryBoundary
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store

BRACKET = 1.05
"""The search ends where the smallest size that does not fit is at most this many times the largest that does."""

FINE = 1.01
"""How close the ends come to marginal sizes that lie between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProbe:
    """The micro-batch sizes that were run, those known from before first, and what they say.

    ``smallest_that_does_not`` is None where ``ceiling``, the number of training samples, fits. ``fit`` is None below
    three sizes with a known peak. ``marginal`` are sizes that ran, but left no reserve: they are not stored.
    """

    uses: tuple[MemoryUse, ...]
    largest_that_fits: int
    smallest_that_does_not: int | None
    ceiling: int
    fit: MemoryFit | None
    marginal: tuple[MemoryUse, ...] = ()

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
    marginal: list[MemoryUse] = []
    smallest = min(spec.batch_sizes)
    while (size := next_size(uses, smallest=smallest, ceiling=ceiling, marginal=sizes_of(marginal))) is not None:
        request = MemoryRequest(configuration=default_at(spec, size, size).configuration, threads=spec.executor.threads)
        use = executor.measure_memory(request, reserve=True)
        if not use.fits:
            without_reserve = executor.measure_memory(request)
            if without_reserve.fits:
                use = replace(use, reason=f"only without a reserve: {use.reason}")
                marginal.append(use)
                on_each(use)
                continue
            use = without_reserve
        store.save_memory(spec.name, environment, use)
        uses.append(use)
        on_each(use)
    memory = boundary_of(uses)
    if memory.fits is None:
        raise nothing_fits(environment, [*uses, *marginal])
    return MemoryProbe(
        uses=tuple(uses),
        largest_that_fits=memory.fits,
        smallest_that_does_not=memory.too_large,
        ceiling=ceiling,
        fit=fit_memory(uses),
        marginal=tuple(marginal),
    )


def next_size(uses: Sequence[MemoryUse], *, smallest: int, ceiling: int, marginal: Collection[int] = ()) -> int | None:
    """Return the micro-batch size to run next, between 1 and the ceiling; None where the boundary is known.

    The smallest first; then twice the largest that fits, or half the smallest that does not, until there are both;
    then the middle of them until they are within `BRACKET`, or next to each other. Where sizes between them are
    marginal it is the middle of the wider of the two gaps beside those, until both are within `FINE`; the gap above is
    found by steps that double.
    """
    memory = boundary_of(uses)
    fits, too_large = memory.fits, memory.too_large
    between = [size for size in marginal if (fits or 0) < size < (too_large or ceiling + 1)]
    below, above = min([*between, too_large or ceiling + 1]), max([*between, fits or 0])
    if fits is None and below > ceiling:
        return min(smallest, ceiling)
    if fits is None:
        return None if below <= 1 else below // 2
    if too_large is None:
        if below > ceiling:
            return None if fits >= ceiling else min(2 * fits, ceiling)
        if above < ceiling:
            return min(ceiling, max(int(BRACKET * above), 2 * above - fits))
    if (too_large or ceiling + 1) <= max(fits + 1, BRACKET * fits):
        return None
    gaps = [(fits, below)] if too_large is None or not between else [(fits, below), (above, too_large)]
    near = FINE if between else BRACKET
    wide = [(low, high) for low, high in gaps if high > max(low + 1, near * low)]
    if not wide:
        return None
    low, high = max(wide, key=lambda gap: gap[1] / gap[0])
    return (low + high) // 2


def sizes_of(uses: Sequence[MemoryUse]) -> list[int]:
    """Return the micro-batch sizes of what was run."""
    return [use.micro_batch_size for use in uses]


def boundary_of(uses: Sequence[MemoryUse]) -> MemoryBoundary:
    """Return the boundary that sizes which were run give."""
    return MemoryBoundary.of(
        (use.micro_batch_size for use in uses if use.fits), (use.micro_batch_size for use in uses if not use.fits)
    )
