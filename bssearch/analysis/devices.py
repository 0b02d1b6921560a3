"""The best batch size on W devices.

Seconds to the target are steps S(B) × step time t(B, W). S does not depend on W.
"""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bssearch.analysis.answer import OnDevices, Ratio
from bssearch.analysis.certainty import CONTENDER, TUNING_GAP
from bssearch.analysis.law.batch_model import LawFit
from bssearch.analysis.optimum import Candidate, Estimate, Verdict, half_width, median_steps, of_runs
from bssearch.records import FEWEST_RUNS, FLAT_RATIO, Phase, ProbeRecord, TrialRecord, grouped, student_t

Part = tuple[float, float]  # (variance of a logarithm, degrees of freedom)


@dataclass(frozen=True, slots=True)
class DeviceCell:
    """A batch size on a number of devices.

    Attributes:
        predicted: Steps to the target × the probe's step time.
        seconds: Steps to the target × the runs' step time; ``predicted`` if no run exists.
        steps_parts, step_parts: Errors of log steps and of the log step time, for `half_width`.
    """

    probe: ProbeRecord
    learning_rate: float | None
    predicted: float
    seconds: float
    runs: int
    steps_parts: Sequence[Part]
    step_parts: Sequence[Part]

    @property
    def parts(self) -> list[Part]:
        return [*self.steps_parts, *self.step_parts]

    @property
    def variance(self) -> float:
        return math.fsum(variance for variance, _ in self.parts)


def by_devices(
    verdict: Verdict, law: LawFit | None, probes: Collection[ProbeRecord], trials: Sequence[TrialRecord]
) -> list[OnDevices]:
    """Return the best batch size on each timed number of devices.

    The list is empty if only one number of devices is timed, or if the optimum is not timed on the fewest devices.
    ``probes`` and ``trials`` cover all numbers of devices.
    """
    runs = [one for one in trials if one.phase is Phase.DEVICES and one.state.has_result]
    timed = grouped((one.world_size, one) for one in probes if one.step_seconds is not None)
    if len(timed) < 2:
        return []
    searched = min(timed)
    single = {one.batch_size: one for one in timed[searched] if one.is_whole}
    cells = {world_size: list(_cells(here, verdict, law, runs)) for world_size, here in sorted(timed.items())}
    own = [one for one in cells[searched] if one.probe.batch_size == verdict.optimal.configuration.batch_size]
    # an audit also times smaller micro-batches
    base = max(own, key=lambda one: one.probe.micro_batch_size, default=None)
    if base is None:
        return []
    least = measured = _measured(base, verdict.optimal.time)
    first = _row(measured, (1.0, 0.0), base, single, [])
    rows = [first.model_copy(update={"low": verdict.optimal.time.low, "high": verdict.optimal.time.high})]
    for count, here in cells.items():
        if count != searched and here:
            best = min(here, key=lambda one: one.seconds)
            least = min(least, best, key=lambda one: one.seconds)
            rows.append(_row(best, _speedup(best, base, measured), base, single, _contenders(least, here)))
    return [one.model_copy(update={"on_front": not any(_is_better(other, one) for other in rows)}) for one in rows]


def _measured(base: DeviceCell, time: Estimate) -> DeviceCell:
    parts = of_runs(time.log_deviation, time.unresolved, time.runs) if time.has_only_hits and time.runs > 1 else []
    return replace(base, seconds=time.median or base.predicted, runs=time.runs, steps_parts=parts, step_parts=[])


def _cells(
    probes: Collection[ProbeRecord], verdict: Verdict, law: LawFit | None, runs: Sequence[TrialRecord]
) -> Iterator[DeviceCell]:
    for probe in probes:
        at_size = [one for one in runs if one.configuration.batch_size == probe.batch_size]
        here = [one for one in at_size if one.configuration.world_size == probe.world_size]
        known = _steps(verdict, law, probe.batch_size, at_size)
        if known is not None and probe.step_seconds is not None:
            steps, parts = known
            step, step_parts = _step_time(probe.step_seconds, probe, here)
            candidate = verdict.by_batch.get(probe.batch_size)
            tried = [*(one.configuration for one in at_size), *([] if candidate is None else [candidate.configuration])]
            rate = tried[0].learning_rate if tried else None
            yield DeviceCell(probe, rate, steps * probe.step_seconds, steps * step, len(here), parts, step_parts)


def _step_time(timed: float, probe: ProbeRecord, runs: Sequence[TrialRecord]) -> tuple[float, list[Part]]:
    # The step time of the runs, else of the probe; a single run has the probe's error
    outcomes = [one.outcome for one in runs if one.outcome is not None]
    logs = [
        math.log(one.time_to_target_s / one.steps_to_target)
        for one in outcomes
        if one.time_to_target_s and one.steps_to_target
    ]
    step = math.exp(statistics.fmean(logs)) if logs else timed
    if len(logs) > 1:
        return step, of_runs(statistics.stdev(logs), 0.0, len(logs))
    # visits on different numbers of devices share no error
    error = probe.error
    return step, [] if error is None else [(error.own**2 + error.common**2, error.freedom)]


def _steps(
    verdict: Verdict, law: LawFit | None, batch_size: int, runs: Sequence[TrialRecord]
) -> tuple[float, Sequence[Part]] | None:
    # The precision-weighted mean of the runs' median steps and of the law's steps. If the law fits, a single search
    # trial does not count, because the search selects lucky trials; else the trial may be badly tuned.
    known: list[tuple[float, float]] = []
    candidate, deviation = verdict.by_batch.get(batch_size), verdict.seed_deviation or 0.0
    fits = law is not None and law.verdict == "fits" and batch_size <= law.largest_batch
    is_confirmed = candidate is not None and candidate.is_confirmed
    own = candidate.runs if candidate is not None and (is_confirmed or not (fits or runs)) else ()
    counted = (*own, *runs)
    if counted and (steps := median_steps(Candidate(counted[0].configuration, counted))) is not None:
        untuned = TUNING_GAP**2 if own and not is_confirmed else 0.0
        known.append((math.log(steps), deviation**2 / len(counted) + untuned))
    if law is not None and batch_size <= law.largest_batch and (ends := law.steps_interval(batch_size)) is not None:
        known.append((math.log(law.steps(batch_size)), ((math.log(ends[1] / ends[0]) / 2) / student_t(math.inf)) ** 2))
    if not known:
        return None
    if exact := [log for log, variance in known if variance == 0]:
        return math.exp(exact[0]), []
    precision = math.fsum(1 / variance for _, variance in known)
    log = math.fsum(log / variance for log, variance in known) / precision
    # the law is fitted to the same runs, so the mean may be no better than the better of both
    noise = verdict.pooled_noise
    return math.exp(log), [(min(variance for _, variance in known), math.inf if noise is None else noise[1])]


def _contenders(least: DeviceCell, cells: Collection[DeviceCell]) -> list[tuple[int, int]]:
    # The likeliest rival of `least`, if the rival may be more than 5 % faster, and `least` if among `cells`
    def beats(rival: DeviceCell) -> float:
        variance = rival.variance + least.variance
        gain = math.log(least.seconds / rival.seconds) - math.log(FLAT_RATIO)
        return statistics.NormalDist().cdf(gain / math.sqrt(variance)) if variance else float(gain > 0)

    rival = max((one for one in cells if one is not least), key=beats, default=None)
    if rival is None or beats(rival) < CONTENDER:
        return []
    known = sorted((one for one in cells if one is least or one is rival), key=lambda one: -one.variance)
    return [(one.probe.batch_size, one.probe.micro_batch_size) for one in known]


def _row(
    cell: DeviceCell,
    speedup: tuple[float, float | None],
    base: DeviceCell,
    single: Mapping[int, ProbeRecord],
    contenders: list[tuple[int, int]],
) -> OnDevices:
    probe, seconds = cell.probe, cell.seconds
    ratio, half = speedup
    spread = math.exp(half_width(cell.parts)) if cell.runs >= FEWEST_RUNS and cell.parts else None
    alone = single.get(probe.batch_size * base.probe.world_size // probe.world_size)
    step, before = probe.step_seconds or math.nan, None if alone is None else alone.step_seconds
    return OnDevices(
        world_size=probe.world_size,
        batch_size=probe.batch_size,
        micro_batch_size=probe.micro_batch_size,
        accumulation_steps=probe.batch_size // (probe.micro_batch_size * probe.world_size),
        learning_rate=cell.learning_rate,
        seconds=seconds,
        low=None if spread is None else seconds / spread,
        high=None if spread is None else seconds * spread,
        runs=cell.runs,
        predicted_s=cell.predicted,
        step_seconds=step,
        reduce_share=None if before is None or not probe.is_whole else max(0.0, 1 - before / step),
        speedup=Ratio(
            value=ratio,
            at_least=False,
            low=None if half is None else ratio * math.exp(-half),
            high=None if half is None else ratio * math.exp(half),
        ),
        efficiency=ratio * base.probe.world_size / probe.world_size,
        cost=seconds * probe.world_size,
        on_front=True,
        contenders=contenders,
    )


def _speedup(cell: DeviceCell, base: DeviceCell, measured: DeviceCell) -> tuple[float, float | None]:
    # compares measured with measured seconds, else predicted with predicted seconds
    if cell.runs:
        ratio, parts = measured.seconds / cell.seconds, [*cell.parts, *measured.parts]
        return ratio, half_width(parts) if measured.parts else None
    # errors of the steps cancel at equal batch sizes
    of_steps = [] if cell.probe.batch_size == base.probe.batch_size else [*cell.steps_parts, *base.steps_parts]
    parts = [*cell.step_parts, *base.step_parts, *of_steps]
    return base.predicted / cell.predicted, half_width(parts) if parts else None


def _is_better(other: OnDevices, one: OnDevices) -> bool:
    mine, theirs = (one.seconds, one.cost), (other.seconds, other.cost)
    return theirs != mine and other.seconds <= one.seconds and other.cost <= one.cost
