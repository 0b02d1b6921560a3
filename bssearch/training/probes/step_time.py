"""Seconds of a step, its update and an evaluation, undisturbed."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bssearch.records import StepTime, StepTimeRequest
from bssearch.training.clock import Clock, Ledger, clock_for
from bssearch.training.computation import Computation
from bssearch.training.contention import Contention, ContentionMeter, CorePace, ReferenceKernel
from bssearch.training.memory import is_out_of_memory, peak_memory_bytes, reset_peak_memory
from bssearch.training.nvml import is_power_capped
from bssearch.training.probes.cadence import eval_every_steps
from bssearch.training.trainer import Trainer, warm_up
from bssearch.workloads.base import Data, Workload

WARM_UP_STEPS = 5  # untimed steps, which allocate, choose algorithms and create the optimizer's state

RUN_SECONDS = 0.01  # seconds of steps timed together, so that the clock and the GPU's wait cost little

SEGMENT_SECONDS = 0.1  # longest timed stretch between two evaluations; by then caches are warm again

RUNS = (6, 1000)  # fewer than 6 runs have no 95% interval; 1000 runs of 10 ms take 10 s

# Time for at least this share of the limit: a few agreeing runs may share one slow or fast period of the machine.
LEAST_SHARE = 0.2

PATIENCE = 4  # limits to spend, evaluations included, if the core was slow too often

# Steps before a second timing at the power limit: a cool chip holds a higher clock for a second or two.
SUSTAINED_SECONDS = 3.0

UPDATE_SHARE = 0.1  # largest share of the limit for timing the update alone

# Evaluations are timed until they take this many seconds, at least once and at most three times.
EVALUATIONS = (1, 3)
EVALUATION_SECONDS = 0.5


def measure_step_time(request: StepTimeRequest, workload: Workload, data: Data, computation: Computation) -> StepTime:
    """Median seconds of a step (with interval), its update and an evaluation.

    Steps run between evaluations as in a trial, because caches are then cold (10% or more). Short runs (`RUN_SECONDS`)
    repeat until the median's 95% interval is within the precision, up to the limit. Runs on a slow core are dropped
    unless few others remain. A device at its power limit is timed again at its sustained clock. If memory runs out, the
    result has ``out_of_memory`` and no times.
    """
    try:
        return _measure(request, workload, data, computation)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return StepTime.where_memory_ran_out(request.configuration)


def _measure(request: StepTimeRequest, workload: Workload, data: Data, computation: Computation) -> StepTime:
    configuration = request.configuration
    device = computation.device
    metric = next(iter(workload.metrics))
    clock = clock_for(device)
    if computation.compiles:
        warm_up(workload, configuration, data, computation, metric, seed=0)
    reset_peak_memory(device)
    with Trainer(workload, configuration, data.train, computation, seed=0) as trainer:
        guess = min(_seconds(clock, "warmup", trainer.step) for _ in range(WARM_UP_STEPS))
        meter = ContentionMeter(device, request.threads)
        meter.start()
        reference = ReferenceKernel.where_it_tells(device, request.threads)
        timer = _Timer(clock, computation.core, reference, request.precision)

        def take_step() -> None:
            trainer.step()
            clock.pace(configuration.accumulation_steps)

        def evaluate() -> None:
            trainer.evaluate(data.validation, metric)

        evaluation = _evaluation_seconds(clock, evaluate)
        undelayed_before = clock.undelayed_train_seconds(request.threads) or 0.0
        if request.trial_train_seconds is None:
            step = timer.time("train", take_step, guess, request.seconds_limit)
        else:
            cadence = eval_every_steps(guess, evaluation, request.trial_train_seconds)
            steps = max(1, min(cadence, math.ceil(SEGMENT_SECONDS / guess)))
            step = timer.time("train", take_step, guess, request.seconds_limit, evaluate, steps)
        if is_power_capped(device):
            _sustain(clock, take_step)
            step = timer.time("train", take_step, step.median, request.seconds_limit)
        contention = meter.stop()
        undelayed = clock.undelayed_train_seconds(request.threads)
        reference_seconds = None if reference is None else reference.seconds
        guess = _seconds(clock, "other", trainer.update)
        update = timer.time("other", trainer.update, guess, UPDATE_SHARE * request.seconds_limit)
        peak = peak_memory_bytes(device)
    reason = why_contended(contention, step.slow or update.slow, clock, request.threads)
    return StepTime(
        batch_size=configuration.batch_size,
        micro_batch_size=configuration.micro_batch_size,
        step_seconds=step.median,
        step_seconds_low=step.low,
        step_seconds_high=step.high,
        settled=step.settled,
        steps_timed=step.count,
        undelayed_step_seconds=None if undelayed is None else (undelayed - undelayed_before) / step.count_all,
        reference_seconds=reference_seconds,
        host_bound_share=clock.host_bound_share,
        update_seconds=update.median,
        evaluation_seconds=evaluation,
        peak_memory_bytes=peak,
        contended=reason is not None,
        reason=reason,
    )


def _sustain(clock: Clock, step: Callable[[], object]) -> None:
    seconds = 0.0
    while seconds < SUSTAINED_SECONDS:
        seconds += _seconds(clock, "warmup", step)


def _evaluation_seconds(clock: Clock, evaluate: Callable[[], object]) -> float:
    least, most = EVALUATIONS
    times: list[float] = []
    while len(times) < least or (len(times) < most and sum(times) < EVALUATION_SECONDS):
        times.append(_seconds(clock, "evaluation", evaluate))
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class TimedRun:
    """``count`` repetitions of ``seconds`` each; ``look`` is the core's pace (0: irrelevant)."""

    seconds: float
    count: int
    look: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds with interval; of ``count_all`` repetitions, ``count`` ran at full pace."""

    median: float
    low: float
    high: float
    settled: bool
    count: int
    count_all: int
    slow: str | None


def timing_of(runs: Sequence[TimedRun], core: CorePace | None, precision: float) -> Timing:
    """Timing at full pace, or of all runs if fewer than six were; `ValueError` below six runs."""
    counted, slow = at_full_pace(runs, core), None
    if len(counted) < RUNS[0]:
        slow = f"the core was slow in {len(runs) - len(counted)} of {len(runs)} timings"
        counted = list(runs)
    times = [run.seconds for run in counted]
    low, high = median_interval(times)
    return Timing(
        median=statistics.median(times),
        low=low,
        high=high,
        settled=is_settled(counted, precision),
        count=sum(run.count for run in counted),
        count_all=sum(run.count for run in runs),
        slow=slow,
    )


def at_full_pace(runs: Sequence[TimedRun], core: CorePace | None) -> list[TimedRun]:
    """Runs at full pace."""
    slow_above = math.inf if core is None else core.slow_above
    return [run for run in runs if run.look <= slow_above]


def is_settled(runs: Sequence[TimedRun], precision: float) -> bool:
    """True if the median is known within ``precision``."""
    times = [run.seconds for run in runs]
    low, high = median_interval(times)
    return high - low <= 2 * precision * statistics.median(times)


def why_contended(contention: Contention, slow: str | None, clock: Clock, threads: int) -> str | None:
    """Why timing shared the machine, if so."""
    reasons = [contention.reason, slow]
    if clock.is_contended(threads) and contention.reason is None:
        reasons.append("other work had the processor meanwhile")
    return "; ".join(filter(None, reasons)) or None


class _Timer:
    def __init__(
        self, clock: Clock, core: CorePace | None, reference: ReferenceKernel | None, precision: float
    ) -> None:
        self._clock = clock
        self._core = core
        self._reference = reference
        self._precision = precision

    def time(
        self,
        ledger: Ledger,
        work: Callable[[], object],
        guess: float,
        limit: float,
        between: Callable[[], object] | None = None,
        in_a_row: int | None = None,
    ) -> Timing:
        """Time runs of about ``guess`` seconds until their median is known; ``between`` precedes every ``in_a_row``."""
        per_run = math.ceil(RUN_SECONDS / guess) if 0 < guess < RUN_SECONDS else 1
        in_a_row = in_a_row or per_run
        rows = math.ceil(per_run / in_a_row)

        def row() -> None:
            for _ in range(in_a_row):
                work()

        def run() -> float:
            seconds = 0.0
            for _ in range(rows):
                if between is not None:
                    _seconds(self._clock, "evaluation", between)
                seconds += _seconds(self._clock, ledger, row)
            return seconds / (rows * in_a_row)

        return self._time(run, rows * in_a_row, limit)

    def _time(self, run: Callable[[], float], per_run: int, limit: float) -> Timing:
        fewest, most = RUNS
        runs: list[TimedRun] = []
        counted: list[TimedRun] = []
        spent = 0.0
        started = self._clock.wall_seconds
        before = 0.0
        while len(runs) < most:
            is_late = spent >= limit and len(runs) >= fewest
            if len(counted) < fewest:
                is_late &= len(runs) >= 2 * fewest and self._clock.wall_seconds - started >= PATIENCE * limit
            if is_late:
                break
            seconds = run()
            after = 0.0 if self._core is None else self._core.look()
            if self._reference is not None:
                self._reference.look()
            spent += seconds * per_run
            runs.append(TimedRun(seconds, per_run, max(before, after)))
            before = after
            counted = at_full_pace(runs, self._core)
            if len(counted) >= fewest and spent >= LEAST_SHARE * limit and is_settled(counted, self._precision):
                break
        return timing_of(runs, self._core, self._precision)


def _seconds(clock: Clock, ledger: Ledger, work: Callable[[], object]) -> float:
    before = clock.seconds(ledger)
    with clock.ledger(ledger):
        work()
    return clock.seconds(ledger) - before


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A distribution-free 95% interval of the median of independent values.

    From the k-th smallest to the k-th largest, with the largest k for which P(Bin(n, ½) < k) ≤ 2.5% (David & Nagaraja,
    Order Statistics, § 7.1). Raises `ValueError` below six values.
    """
    k = _rank(len(values))
    if k < 1:
        raise ValueError(f"{len(values)} values have no 95 % interval of the median; it takes 6")
    ordered = sorted(values)
    return ordered[k - 1], ordered[-k]


@functools.cache
def _rank(count: int) -> int:
    below, ways = 0, 1
    for k in range(count):
        below += ways
        if 40 * below > 2**count:
            return k
        ways = ways * (count - k) // (k + 1)
    return 0
