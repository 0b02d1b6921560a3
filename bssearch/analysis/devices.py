"""The best batch size on each number of devices.

The steps to the target S(B) do not depend on the number of devices W. The seconds are S(B)·t(B, W), with step times t
from W devices.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from bssearch.analysis.answer import OnDevices, Ratio
from bssearch.analysis.law.batch_model import LawFit
from bssearch.analysis.optimum import Candidate, Estimate, Verdict, half_width, median_steps, of_runs
from bssearch.records import Phase, ProbeRecord, TrialRecord, grouped
from bssearch.records.intervals import student_t

Part = tuple[float, float]  # (variance of a logarithm, degrees of freedom)


@dataclass(frozen=True, slots=True)
class Cell:
    """A batch size on a number of devices, with predicted seconds and, after runs, measured seconds.

    ``steps_parts`` and ``step_parts``: errors of log steps and of log step time, for `half_width`.
    """

    probe: ProbeRecord
    predicted: float
    steps_parts: Sequence[Part]
    step_parts: Sequence[Part]
    measured: Estimate | None

    @property
    def seconds(self) -> float:
        """Measured seconds if known, else predicted seconds."""
        median = None if self.measured is None else self.measured.median
        return self.predicted if median is None else median


def by_devices(
    verdict: Verdict, law: LawFit | None, probes: Collection[ProbeRecord], trials: Sequence[TrialRecord]
) -> list[OnDevices]:
    """The best batch size on each timed number of devices; empty without the optimum's time or a second number.

    ``probes`` and ``trials`` cover all numbers of devices.
    """
    runs = [one for one in trials if one.phase is Phase.DEVICES and one.state.has_result]
    timed = grouped((one.world_size, one) for one in probes if one.step_seconds is not None)
    if len(timed) < 2:
        return []
    searched = min(timed)
    single = {one.batch_size: one for one in timed[searched] if one.is_whole}
    cells = {world_size: _cells(here, verdict, law, runs) for world_size, here in sorted(timed.items())}
    own = [one for one in cells[searched] if one.probe.batch_size == verdict.optimal.configuration.batch_size]
    base = max(own, key=lambda one: one.probe.micro_batch_size, default=None)  # an audit times more micro-batches
    if base is None:
        return []
    base = replace(base, measured=verdict.optimal.time)
    further = [min(here, key=lambda one: one.predicted) for count, here in cells.items() if count != searched and here]
    rows = [_row(cell, base, single) for cell in (base, *further)]
    return [one.model_copy(update={"on_front": not any(_is_better(other, one) for other in rows)}) for one in rows]


def _cells(
    probes: Collection[ProbeRecord], verdict: Verdict, law: LawFit | None, runs: Sequence[TrialRecord]
) -> list[Cell]:
    found = []
    for probe in probes:
        at_size = [one for one in runs if one.configuration.batch_size == probe.batch_size]
        here = tuple(one for one in at_size if one.configuration.world_size == probe.world_size)
        measured = Candidate(here[0].configuration, here).estimate if here else None
        known = _steps(verdict, law, probe.batch_size, at_size)
        if known is not None and probe.step_seconds is not None:
            steps, parts = known
            error = probe.error
            # visits on different numbers of devices share no error
            step_parts = [] if error is None else [(error.own**2 + error.common**2, error.freedom)]
            found.append(Cell(probe, steps * probe.step_seconds, parts, step_parts, measured))
    return found


def _steps(
    verdict: Verdict, law: LawFit | None, batch_size: int, runs: Sequence[TrialRecord]
) -> tuple[float, Sequence[Part]] | None:
    # The precision-weighted mean of the runs' median steps and of the law's steps. If the law fits, a single search
    # trial does not count, because the search selects lucky trials. A law that fits poorly does not count alone.
    known: list[tuple[float, float]] = []
    candidate, deviation = verdict.by_batch.get(batch_size), verdict.seed_deviation or 0.0
    fits = law is not None and law.verdict == "fits" and batch_size <= law.largest_batch
    if candidate is not None:
        own = candidate.runs if candidate.is_confirmed or not (fits or runs) else ()
        counted = replace(candidate, runs=(*own, *runs))
        if counted.runs and (steps := median_steps(counted)) is not None:
            known.append((math.log(steps), deviation**2 / len(counted.runs)))
    if (
        law is not None
        and batch_size <= law.largest_batch
        and (known or fits)
        and (ends := law.steps_interval(batch_size)) is not None
    ):
        known.append((math.log(law.steps(batch_size)), ((math.log(ends[1] / ends[0]) / 2) / student_t(math.inf)) ** 2))
    if not known:
        return None
    if exact := [log for log, variance in known if variance == 0]:
        return math.exp(exact[0]), []
    precision = math.fsum(1 / variance for _, variance in known)
    log = math.fsum(log / variance for log, variance in known) / precision
    return math.exp(log), [(1 / precision, math.inf)]


def _row(cell: Cell, base: Cell, single: Mapping[int, ProbeRecord]) -> OnDevices:
    probe, seconds = cell.probe, cell.seconds
    speedup, half = _speedup(cell, base)
    ends = (None, None) if half is None else (speedup * math.exp(-half), speedup * math.exp(half))
    alone = single.get(probe.batch_size * base.probe.world_size // probe.world_size)
    step, before = probe.step_seconds or math.nan, None if alone is None else alone.step_seconds
    measured = cell.measured
    return OnDevices(
        world_size=probe.world_size,
        batch_size=probe.batch_size,
        micro_batch_size=probe.micro_batch_size,
        accumulation_steps=probe.batch_size // (probe.micro_batch_size * probe.world_size),
        seconds=seconds,
        low=None if measured is None else measured.low,
        high=None if measured is None else measured.high,
        runs=0 if measured is None else measured.runs,
        predicted_s=cell.predicted,
        step_seconds=step,
        reduce_share=None if before is None or not probe.is_whole else max(0.0, 1 - before / step),
        speedup=Ratio(value=speedup, at_least=False, low=ends[0], high=ends[1]),
        efficiency=speedup * base.probe.world_size / probe.world_size,
        cost=seconds * probe.world_size,
        on_front=True,
    )


def _speedup(cell: Cell, base: Cell) -> tuple[float, float | None]:
    # compares measured with measured seconds, else predicted with predicted seconds
    if cell is base:
        return 1.0, 0.0
    if cell.measured is not None and base.measured is not None and cell.measured.median and base.measured.median:
        sides = [one for one in (base.measured, cell.measured) if one.has_only_hits and one.runs > 1]
        parts = [part for one in sides for part in of_runs(one.log_deviation, one.unresolved, one.runs)]
        return base.measured.median / cell.measured.median, half_width(parts) if len(sides) == 2 else None
    # errors of the steps cancel at equal batch sizes
    of_steps = [] if cell.probe.batch_size == base.probe.batch_size else [*cell.steps_parts, *base.steps_parts]
    parts = [*cell.step_parts, *base.step_parts, *of_steps]
    return base.predicted / cell.predicted, half_width(parts) if parts else None


def _is_better(other: OnDevices, one: OnDevices) -> bool:
    mine, theirs = (one.seconds, one.cost), (other.seconds, other.cost)
    return theirs != mine and other.seconds <= one.seconds and other.cost <= one.cost
