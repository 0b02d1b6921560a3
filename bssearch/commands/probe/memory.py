"""The largest micro-batch that fits, by doubling and bisection, one process per size.

A size fits if it leaves the reserve of `bssearch.training.probes.memory` free, and does not fit if it exhausts all
memory. Sizes in between are *marginal*: equal processes differ slightly.
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

BRACKET = 1.05  # largest final ratio of the smallest failing to the largest fitting size

FINE = 1.01  # the ratio on both sides of marginal sizes, which span less than `BRACKET` themselves

GIB, MIB = 2**30, 2**20
COLUMNS = ("micro_batch", "fits", "peak_gib", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProbe:
    """The micro-batch sizes that ran, and their boundary."""

    uses: tuple[MemoryUse, ...]
    largest_that_fits: int
    smallest_that_does_not: int | None
    ceiling: int  # number of training samples
    fit: MemoryFit | None
    marginal: tuple[MemoryUse, ...] = ()  # not stored

    @property
    def whole_training_part_fits(self) -> bool:
        """True if all training samples fit at once."""
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
    """Yield the boundary and the line through peaks."""
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
    """Find and store the largest micro-batch that fits; sizes known on an equal device are not repeated.

    Raises `LaunchError` if one sample does not fit.
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
    """Return the next size in [1, ceiling], None once the boundary is known.

    First ``smallest``, then double or halve until one fits and one does not, then bisect to `BRACKET`; with marginal
    sizes wider apart, bisect both gaps to `FINE`.
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
    """Return the micro-batch sizes that ran."""
    return [use.micro_batch_size for use in uses]


def boundary_of(uses: Sequence[MemoryUse]) -> MemoryBoundary:
    """Return the boundary of the sizes that ran."""
    return MemoryBoundary.of(
        (use.micro_batch_size for use in uses if use.fits), (use.micro_batch_size for use in uses if not use.fits)
    )
