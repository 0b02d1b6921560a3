"""``probe memory``: the largest micro-batch that fits, sizes doubled, then bisected, each run in a process of its own.

No size is named that was not run: what is between the largest that fits and the smallest that does not is not known.

A size fits if it leaves the reserve of `bssearch.training.probes.memory` free; it does not if all of the memory is too
little. One in between is neither, for processes that do the same differ by a little: it is *marginal*. Where marginal
sizes alone span more than `BRACKET`, both of its ends are brought next to them instead, within `FINE`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from bssearch.analysis.law.affine_step_time import MemoryFit, fit_memory
from bssearch.commands.launch import Launch
from bssearch.commands.opening import OpenStudy, opened
from bssearch.commands.probe.report import ProbeReport
from bssearch.records import MemoryRequest, MemoryUse
from bssearch.registry import Option
from bssearch.search.calibration import default_at, nothing_fits
from bssearch.spec import StudySpec
from bssearch.spec.space import MemoryBoundary

BRACKET = 1.05
"""The search ends where the smallest size that does not fit is at most this many times the largest that fits: a
choice."""

FINE = 1.01
"""The same ratio on both sides of marginal sizes: a choice, as these are narrower than `BRACKET` themselves."""

GIB, MIB = 2**30, 2**20
COLUMNS = ("micro_batch", "fits", "peak_gib", "reason")


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


def memory(
    spec: StudySpec,
    launch: Launch,
    *,
    limit_gib: Annotated[
        float | None,
        Option(
            "Pretend a device with so much memory; on the CPU a limit on the process's data segment.",
            min=0.001,
            metavar="GIB",
        ),
    ] = None,
) -> ProbeReport:
    """Find the largest micro-batch that fits, in fresh processes.

    Each size takes three optimizer steps and an evaluation.
    """
    with opened(spec, replace(launch, pretended_gib=limit_gib)) as study:
        found = probe_memory(study)
    return ProbeReport(
        document={"study": spec.name, "limit_gib": limit_gib, **asdict(found)},
        rows=[asdict(use) for use in found.uses],
        table=[
            {
                "micro_batch": use.micro_batch_size,
                "fits": "yes" if use.fits else "marginal" if use in found.marginal else "no",
                "peak_gib": None if use.peak_memory_bytes is None else use.peak_memory_bytes / GIB,
                "reason": use.reason,
            }
            for use in sorted([*found.uses, *found.marginal], key=lambda use: use.micro_batch_size)
        ],
        columns=COLUMNS,
        sentences=list(sentences(found, is_cpu=study.environment.device_type == "cpu")),
    )


def sentences(found: MemoryProbe, *, is_cpu: bool) -> Iterator[str]:
    """Yield the boundary between the sizes, the line through their peaks, and what the peaks are."""
    if found.whole_training_part_fits:
        yield f"The whole training part fits at once: {found.ceiling} samples."
    else:
        above = found.smallest_that_does_not
        yield f"The largest micro-batch that fits is {found.largest_that_fits}; " + (
            "none is known not to." if above is None else f"{above} does not."
        )
    if found.marginal:
        yield "A marginal size ran, but only without a reserve for what a longer training needs: it does not count."
    if found.fit is not None:
        yield (
            f"Peak memory = {found.fit.fixed_bytes / GIB:.3g} GiB + {found.fit.bytes_per_sample / MIB:.3g} MiB "
            f"a sample (no size is further than {found.fit.largest_residual:.1%} from it)."
        )
    if is_cpu:
        yield "The peak is the process's resident memory with all libraries; a limit is on its data segment."


def probe_memory(study: OpenStudy) -> MemoryProbe:
    """Find the largest micro-batch of a study's default configuration that fits; see `bssearch.training.probes.memory`.

    Each size is stored, and told to the study's listener, as soon as it has been run, and none is run again on a device
    of the same kind and memory. Raises `LaunchError` where not even one sample fits.
    """
    spec, executor, store, environment = study.spec, study.executor, study.store, study.environment

    def tell(use: MemoryUse) -> None:
        study.listener.note(f"micro-batch {use.micro_batch_size}: {'fits' if use.fits else use.reason}")

    ceiling = executor.describe().train_samples or spec.batch_sizes[-1]
    uses = store.memory(spec.name, environment)
    marginal: list[MemoryUse] = []
    smallest = min(spec.batch_sizes)
    while (size := next_size(uses, smallest=smallest, ceiling=ceiling, marginal=sizes_of(marginal))) is not None:
        request = MemoryRequest(configuration=default_at(spec, size, size).configuration, threads=spec.executor.threads)
        use = executor.measure_memory(replace(request, reserve=True))
        if not use.fits:
            without_reserve = executor.measure_memory(request)
            if without_reserve.fits:
                use = replace(use, reason=f"only without a reserve: {use.reason}")
                marginal.append(use)
                tell(use)
                continue
            use = without_reserve
        store.save_memory(spec.name, environment, use)
        uses.append(use)
        tell(use)
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
