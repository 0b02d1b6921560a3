"""Isolated measurements of step, update and evaluation seconds, of memory, and of the gradient noise scale."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bssearch.errors import LaunchError, WorkloadError, require
from bssearch.records import (
    GradientNoise,
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
    StepTime,
    StepTimeRequest,
)
from bssearch.records.noise_scale import FEWEST_PASSES, Pass, gradient_noise
from bssearch.records.text import plural
from bssearch.training.clock import Clock, Ledger, clock_for
from bssearch.training.computation import Computation
from bssearch.training.contention import Contention, ContentionMeter, CorePace, ReferenceKernel
from bssearch.training.course import Approach, eval_every_steps, first_line
from bssearch.training.gradient_noise import GradientPasses
from bssearch.training.memory import (
    allocation_retries,
    is_out_of_memory,
    limit_memory,
    peak_memory_bytes,
    peak_process_memory_bytes,
    reset_peak_memory,
)
from bssearch.training.nvml import POWER_CAP, throttle_reasons
from bssearch.training.trainer import Trainer, warm_up
from bssearch.workloads.base import Workload
from bssearch.workloads.data import Data, TokenPart

WARM_UP_STEPS = 5  # number of untimed steps, which allocate, choose algorithms and create the optimizer's state

RUN_SECONDS = 0.01  # seconds of steps timed together, so that the clock and the wait for the GPU cost little

SEGMENT_SECONDS = 0.1  # longest timed stretch between two evaluations; caches warm up in less time

RUNS = (6, 1000)  # fewer than 6 runs have no 95% interval; 1000 runs of 10 ms take 10 s

# Measure for at least this share of the limit, because the first runs may share one slow or fast period.
LEAST_SHARE = 0.2

PATIENCE = 4  # multiple of the limit for all seconds, evaluations included, if the core was slow too often

# Seconds of steps before a second timing at the power limit, because a cool chip holds a higher clock for 1 to 2 s.
SUSTAINED_SECONDS = 3.0

UPDATE_SHARE = 0.1  # largest share of the limit for timing the update alone

# Time evaluations until their sum reaches these seconds, at least once and at most three times.
EVALUATIONS = (1, 3)
EVALUATION_SECONDS = 0.5


def measure_step_time(request: StepTimeRequest, workload: Workload, data: Data, computation: Computation) -> StepTime:
    """Measure the median seconds of a step (with a 95 % interval), an update and an evaluation.

    If ``trial_train_seconds`` is given, evaluations interrupt the steps, as in a trial. At a GPU's power limit, steps
    are timed again, without evaluations. At least six short runs repeat until the interval is within ``precision`` or
    the runs take ``seconds_limit``. The limit extends if fewer than six runs had a core at full pace; otherwise, runs
    on a slow core do not count. Running out of memory is a result, not an error.
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
    threads = request.threads * configuration.world_size
    metric = next(iter(workload.metrics))
    clock = clock_for(device)
    if computation.compiles:
        warm_up(workload, configuration, data, computation, metric, seed=0)
    reset_peak_memory(device)
    with Trainer(workload, configuration, data.train, computation, seed=0) as trainer:
        guess = min(_seconds(clock, "warmup", trainer.step) for _ in range(WARM_UP_STEPS))
        meter = ContentionMeter(device, threads, others=computation.other_devices)
        meter.start()
        reference = ReferenceKernel(device, threads)
        timer = _Timer(clock, computation.core, reference, request.precision)

        def take_step() -> None:
            trainer.step()
            clock.pace(configuration.accumulation_steps)

        evaluate = functools.partial(trainer.evaluate, data.validation, metric)
        evaluation = _evaluation_seconds(clock, evaluate)
        undelayed_before = clock.undelayed_train_seconds(threads) or 0.0
        if request.trial_train_seconds is None:
            step = timer.time("train", take_step, guess, request.seconds_limit)
        else:
            cadence = eval_every_steps(guess, evaluation, request.trial_train_seconds)
            steps = max(1, min(cadence, math.ceil(SEGMENT_SECONDS / guess)))
            step = timer.time("train", take_step, guess, request.seconds_limit, evaluate, steps)
        if POWER_CAP in (throttle_reasons(device) or ()):
            seconds = 0.0
            while seconds < SUSTAINED_SECONDS:
                seconds += _seconds(clock, "warmup", take_step)
            step = timer.time("train", take_step, step.median, request.seconds_limit)
        contention = meter.stop()
        undelayed = clock.undelayed_train_seconds(threads)
        reference_seconds = reference.seconds
        guess = _seconds(clock, "other", trainer.update)
        update = timer.time("other", trainer.update, guess, UPDATE_SHARE * request.seconds_limit)
        peak = peak_memory_bytes(device)
    reason = why_contended(contention, step.slow or update.slow, clock, threads)
    return StepTime(
        batch_size=configuration.batch_size,
        micro_batch_size=configuration.micro_batch_size,
        world_size=configuration.world_size,
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


def _evaluation_seconds(clock: Clock, evaluate: Callable[[], object]) -> float:
    least, most = EVALUATIONS
    times: list[float] = []
    while len(times) < least or (len(times) < most and sum(times) < EVALUATION_SECONDS):
        times.append(_seconds(clock, "evaluation", evaluate))
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A run of ``count`` repetitions of ``seconds`` each.

    ``look`` is the longer of the `CorePace.look` seconds before and after the run, or 0 without a `CorePace`.
    """

    seconds: float
    count: int
    look: float


@dataclass(frozen=True, slots=True)
class WorkTiming:
    """The median seconds of a repetition, with the median's interval, from ``count`` of ``count_all`` repetitions."""

    median: float
    low: float
    high: float
    settled: bool
    count: int
    count_all: int
    slow: str | None


def timing_of(runs: Sequence[TimedRun], core: CorePace | None, precision: float) -> WorkTiming:
    """Return the timing of at least six runs. Omit runs on a slow core if six other runs remain."""
    counted, slow = at_full_pace(runs, core), None
    if len(counted) < RUNS[0]:
        slow = f"the core was slow in {len(runs) - len(counted)} of {len(runs)} timings"
        counted = list(runs)
    low, high = median_interval([run.seconds for run in counted])
    return WorkTiming(
        median=statistics.median(run.seconds for run in counted),
        low=low,
        high=high,
        settled=is_settled(counted, precision),
        count=sum(run.count for run in counted),
        count_all=sum(run.count for run in runs),
        slow=slow,
    )


def at_full_pace(runs: Sequence[TimedRun], core: CorePace | None) -> list[TimedRun]:
    slow_above = math.inf if core is None else core.slow_above
    return [run for run in runs if run.look <= slow_above]


def is_settled(runs: Sequence[TimedRun], precision: float) -> bool:
    times = [run.seconds for run in runs]
    low, high = median_interval(times)
    return high - low <= 2 * precision * statistics.median(times)


def why_contended(contention: Contention, slow: str | None, clock: Clock, threads: int) -> str | None:
    reasons = [contention.reason, slow]
    if clock.is_contended(threads) and contention.reason is None:
        reasons.append("other work used the CPU during the timing")
    return "; ".join(filter(None, reasons)) or None


@dataclass(frozen=True, slots=True)
class _Timer:
    clock: Clock
    core: CorePace | None
    reference: ReferenceKernel
    precision: float

    def time(
        self,
        ledger: Ledger,
        work: Callable[[], object],
        guess: float,
        limit: float,
        between: Callable[[], object] | None = None,
        in_a_row: int | None = None,
    ) -> WorkTiming:
        # Time runs of ``work`` until their median is known. One repetition takes about ``guess`` seconds; ``between``
        # runs before each ``in_a_row`` repetitions.
        per_run = math.ceil(RUN_SECONDS / guess) if 0 < guess < RUN_SECONDS else 1
        in_a_row = in_a_row or per_run
        rows = math.ceil(per_run / in_a_row)
        per_run = rows * in_a_row

        def row() -> None:
            for _ in range(in_a_row):
                work()

        fewest, most = RUNS
        runs: list[TimedRun] = []
        counted: list[TimedRun] = []
        spent = 0.0
        started = self.clock.wall_seconds
        before = 0.0
        while len(runs) < most:
            is_late = spent >= limit and len(runs) >= fewest
            if len(counted) < fewest:
                is_late &= len(runs) >= 2 * fewest and self.clock.wall_seconds - started >= PATIENCE * limit
            if is_late:
                break
            seconds = 0.0
            for _ in range(rows):
                if between is not None:
                    _seconds(self.clock, "evaluation", between)
                seconds += _seconds(self.clock, ledger, row)
            after = 0.0 if self.core is None else self.core.look()
            self.reference.look()
            spent += seconds
            runs.append(TimedRun(seconds / per_run, per_run, max(before, after)))
            before = after
            counted = at_full_pace(runs, self.core)
            if len(counted) >= fewest and spent >= LEAST_SHARE * limit and is_settled(counted, self.precision):
                break
        return timing_of(runs, self.core, self.precision)


def _seconds(clock: Clock, ledger: Ledger, work: Callable[[], object]) -> float:
    before = clock.seconds(ledger)
    with clock.ledger(ledger):
        work()
    return clock.seconds(ledger) - before


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the distribution-free 95 % interval of the median of at least six independent values."""
    # From the k-th smallest to the k-th largest value, with the largest k for which P(Bin(n, ½) < k) ≤ 2.5% (David &
    # Nagaraja, Order Statistics, § 7.1).
    from scipy.special import bdtrik

    k = math.ceil(bdtrik(0.025, len(values), 0.5))
    ordered = sorted(values)
    return ordered[k - 1], ordered[-k]


STEPS = 3  # the first step creates the optimizer's state; further steps show growth of memory

RESERVE = 0.01  # share of memory that must remain free

# Smallest reserve on the CPU, because heaps of equal processes differ: a used worker held up to 9 MiB more than a
# new worker.
CPU_RESERVE_BYTES = 16 * 2**20


def measure_memory(
    request: MemoryRequest,
    workload: Workload,
    data: Data,
    computation: Computation,
    *,
    memory_bytes: int | None = None,
) -> MemoryUse:
    """Measure the peak memory of three steps and two evaluations, under a cap of ``memory_bytes``, if any.

    On the CPU, the peak is the process's. A micro-batch does not fit if memory runs out, or if a GPU's allocator must
    retry after the warm-up.
    """
    device = computation.device
    if memory_bytes is not None:
        limit_memory(device, memory_bytes)
    reason = peak = None
    try:
        metric = next(iter(workload.metrics))
        warm_up(workload, request.configuration, data, computation, metric, seed=0)
        before = allocation_retries(device)
        reset_peak_memory(device)
        with Trainer(workload, request.configuration, data.train, computation, seed=0) as trainer:
            trainer.evaluate(data.validation, metric)
            for _ in range(STEPS):
                trainer.step()
            trainer.evaluate(data.validation, metric)
            peak = peak_process_memory_bytes(device)
        retries = allocation_retries(device) - before
        if retries:
            times = plural(retries, "time")
            reason = f"the allocator had to release memory and retry {times} in {STEPS} steps and 2 evaluations"
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = first_line(error)
    return MemoryUse(
        micro_batch_size=request.configuration.micro_batch_size,
        fits=reason is None,
        peak_memory_bytes=peak or peak_process_memory_bytes(device),
        reason=reason,
    )


def bytes_within_reserve(device: torch.device, limit_bytes: int | None) -> int | None:
    """Return a device's memory in bytes minus a reserve, or None on a CPU without a limit."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return int((1 - RESERVE) * (total if limit_bytes is None else min(limit_bytes, total)))
    return None if limit_bytes is None else max(0, limit_bytes - max(CPU_RESERVE_BYTES, int(RESERVE * limit_bytes)))


PRECISION = 0.15  # stop once half the interval's width is within this share of the scale

PASS_BATCHES = 32  # small batches in a pass; trials use fewer, because a trial has less time

# Check the interval each time the passes have grown by this factor; checks after each pass would stop at chance minima.
GROWTH = 1.5


def measure_noise(request: NoiseRequest, workload: Workload, data: Data, computation: Computation) -> NoiseMeasurement:
    """Train until the metric is near the target or training ends, then measure the noise scale.

    Raises `WorkloadError` if the workload has no noise scale, the training part is too small or a metric is not finite.
    Raises `LaunchError` if memory runs out.
    """
    remedies = {
        "training_step": "write loss() in place of training_step()",
        "train_batches": "let load() return the training samples in place of train_batches()",
    }
    own = [name for name in remedies if callable(getattr(workload, name, None))]
    require(
        not own,
        f"a workload with {'() and '.join(own)}() has no gradient noise scale, because the scale needs loss() on "
        "random training samples",
        hint=f"{' and '.join(remedies[name] for name in own)}, or compare batch sizes in a study",
        error=WorkloadError,
    )
    configuration = request.configuration
    try:
        warm_up(workload, configuration, data, computation, request.target.metric, request.seed)
        with Trainer(workload, configuration, data.train, computation, request.seed) as trainer:
            passes = GradientPasses(trainer, request.seed)
            unit = "tokens" if isinstance(data.train, TokenPart) else "samples"
            require(
                passes.small_batch(PASS_BATCHES),
                f"{len(data.train)} training {unit} are too few for {PASS_BATCHES} batches of a noise measurement",
                hint=f"give at least {PASS_BATCHES} samples" if unit == "samples" else "give more training samples",
                error=WorkloadError,
            )
            metric, reason = _train(request, trainer, data, computation)
            return NoiseMeasurement(
                batch_size=configuration.batch_size,
                micro_batch_size=configuration.micro_batch_size,
                step=trainer.steps,
                metric=metric,
                noise=_measure_passes(passes, request.noise_seconds_limit),
                reason=reason,
            )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise LaunchError(
            f"out of memory at batch size {configuration.batch_size} in micro-batches of "
            f"{configuration.micro_batch_size}: {error}",
            hint="run `bssearch probe memory` to find the largest micro-batch that fits",
        ) from error


def _train(request: NoiseRequest, trainer: Trainer, data: Data, computation: Computation) -> tuple[float, str | None]:
    approach, clock = Approach(request.target), clock_for(computation.device)
    while True:
        metric = trainer.evaluate(data.validation, request.target.metric)
        require(
            math.isfinite(metric),
            f"{request.target.metric} = {metric:g} is not finite at step {trainer.steps}",
            hint="choose a lower learning rate, or correct evaluate()",
            error=WorkloadError,
        )
        if approach.is_near(metric):
            return metric, None
        if clock.seconds("train") >= request.train_seconds_limit:
            return (
                metric,
                f"the limit of {request.train_seconds_limit:.4g} train seconds passed before the target was near",
            )
        if trainer.schedule.is_over(trainer.steps):
            return metric, "the schedule's horizon ended before the target was near"
        with clock.ledger("train"):
            for _ in range(request.eval_every_steps):
                trainer.step()
                clock.pace(request.configuration.accumulation_steps)
                if trainer.schedule.is_over(trainer.steps) or clock.train_seconds_so_far >= request.train_seconds_limit:
                    break


def _measure_passes(make: GradientPasses, seconds_limit: float) -> GradientNoise:
    started = time.perf_counter()
    passes: list[Pass] = []
    look_at = 2 * FEWEST_PASSES
    while time.perf_counter() - started < seconds_limit:
        measured = make.measure(PASS_BATCHES)
        if measured is not None:
            passes.append(measured)
        if len(passes) >= look_at:
            noise = gradient_noise(passes)
            if noise.relative_half_width <= PRECISION:
                return noise
            look_at = math.ceil(GROWTH * len(passes))
    return gradient_noise(passes)
