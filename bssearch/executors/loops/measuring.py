"""Descriptions and measurements of a user's loop."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from bssearch.errors import UsageError, require, required
from bssearch.executors.base import Answer, Assign, Reply
from bssearch.executors.failures import failed, program_refused
from bssearch.executors.loops.assignment import (
    HOW_TO_EVALUATE,
    Assignment,
    Line,
    LoopStages,
    Metrics,
    ended_by,
    number_of,
)
from bssearch.executors.loops.trial_run import (
    HostClock,
    LoopClock,
    NoiseNearTarget,
    TrialRun,
    contention_meter,
    other_devices,
)
from bssearch.records import (
    GradientNoise,
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
    StepTime,
    StepTimeRequest,
    TrialEnded,
    TrialRequest,
    constant_configurations,
)
from bssearch.records.noise_scale import FEWEST_PASSES
from bssearch.training.advisor import Weights
from bssearch.training.contention import CorePace, ReferenceKernel
from bssearch.training.course import Approach, eval_every_steps, first_line
from bssearch.training.environment import describe_program
from bssearch.training.loop import batch_norm_layers
from bssearch.training.memory import is_out_of_memory, peak_memory_bytes, peak_process_memory_bytes, reset_peak_memory
from bssearch.training.probes import (
    GROWTH,
    LEAST_SHARE,
    PATIENCE,
    PRECISION,
    RUN_SECONDS,
    RUNS,
    SEGMENT_SECONDS,
    STEPS,
    WARM_UP_STEPS,
    TimedRun,
    at_full_pace,
    is_settled,
    timing_of,
    why_contended,
)


class Looked(Assignment):
    """A loop that bssearch describes or measures. A batch size schedule stays at its first stage."""

    is_look = True

    def __init__(self, assign: Assign, line: Line) -> None:
        super().__init__(constant_configurations(assign.configuration)[0], assign)
        self._assign = assign
        self._line = line
        self._torch_device = torch.device(assign.device)

    def is_due(self, step: int) -> bool:
        return True

    def stepped(self, step: int, samples: int | None) -> None:
        self._line.progressed()

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        self._line.progressed()
        number_of(metrics, self._assign.program.metric)

    def looped(self, step: int, because: str = "") -> None:
        raise UsageError(
            f"the loop ended after step {step}, before the end of the measurement{ended_by(because)}",
            hint="loop while not trial.should_stop, or over trial.batches(loader)",
        )

    def _answer(self, answer: Answer) -> None:
        self.is_over = True
        self._line.send(answer)


class DescribedLoop(Looked):
    """Describes a loop at the first evaluation after a step."""

    def __init__(self, assign: Assign, line: Line) -> None:
        super().__init__(assign, line)
        # Before the search, refuse a schedule that the loop cannot follow.
        self.stages = LoopStages(assign.configuration)
        self._metrics: dict[str, float] = {}
        self._steps = 0
        self._warnings: list[str] = []
        self._batch_norm_layers = 0
        self._starts_at_peak: bool | None = None

    def modelled(self, modules: Sequence[nn.Module], tokens: Weights) -> None:
        self._batch_norm_layers = sum(map(batch_norm_layers, modules))

    def warned(self, sentence: str) -> None:
        self._warnings.append(sentence)

    def first_rate(self, is_peak: bool) -> None:
        self._starts_at_peak = is_peak

    def stepped(self, step: int, samples: int | None) -> None:
        super().stepped(step, samples)
        self._steps = step

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        """Keep the first metrics, and send the description after the first step."""
        super().evaluated(step, metrics, loss)
        if not self._metrics:
            for name in metrics:
                with suppress(UsageError):  # no number
                    self._metrics[str(name)] = number_of(metrics, name)
            self._first = step
        if self._steps:
            described = describe_program(
                self._torch_device,
                self._metrics,
                self._metrics if self._first == 0 else {},
                memory_limit_bytes=self._assign.memory_limit_bytes,
                revision=self._assign.revision,
                batch_norm_layers=self._batch_norm_layers,
                notice="; ".join(self._warnings) or None,
            )
            self._answer(replace(described, starts_at_peak=self._starts_at_peak))

    def looped(self, step: int, because: str = "") -> None:
        require(
            step,
            f"the loop took no step{ended_by(because)}",
            hint="loop over trial.batches(loader), or pass callbacks=[TrialCallback(trial)] to a Trainer",
        )
        raise UsageError(
            f"the loop ended after step {step} without an evaluation",
            hint=HOW_TO_EVALUATE,
        )


class MeasuredMemory(Looked):
    """Measures the peak memory of `STEPS` steps and an evaluation."""

    def __init__(self, assign: Assign, line: Line) -> None:
        super().__init__(assign, line)
        reset_peak_memory(self._torch_device)

    def is_due(self, step: int) -> bool:
        return step >= STEPS

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        super().evaluated(step, metrics, loss)
        peak, micro = peak_process_memory_bytes(self._torch_device), self.configuration.micro_batch_size
        self._answer(MemoryUse(micro_batch_size=micro, fits=True, peak_memory_bytes=peak))

    def ran_out_of_memory(self, error: BaseException) -> bool:
        micro = self.configuration.micro_batch_size
        self._answer(MemoryUse(micro_batch_size=micro, fits=False, peak_memory_bytes=None, reason=first_line(error)))
        return True


class TimedLoop(Looked):
    """Times steps and evaluations as in a trial; see `bssearch.training.probes`."""

    def __init__(self, request: StepTimeRequest, assign: Assign, line: Line, *, clock: HostClock | None = None) -> None:
        super().__init__(assign, line)
        self._request = request
        self._threads = request.threads * self.configuration.world_size
        self._clock = LoopClock(clock or HostClock(self._torch_device), self._threads)
        self._core = CorePace() if self._torch_device.type == "cpu" else None
        self.contention = contention_meter(self._torch_device, self._threads, self._core, other_devices(assign))
        self._reference = ReferenceKernel(self._torch_device, self._threads)
        self._first: list[float] = []
        self._evaluations: list[float] = []
        self._untimed_steps = 0
        self._runs: list[TimedRun] = []
        self._last = 0.0
        self._steps = self._cadence = 0
        reset_peak_memory(self._torch_device)

    def begin(self) -> None:
        self._clock.train()

    def is_due(self, step: int) -> bool:
        """True at step 0, when the warm-up ends, and then at least as often as in a trial."""
        later = step - WARM_UP_STEPS
        return step == 0 or (later >= 0 and later % max(1, self._cadence) == 0)

    def pause(self) -> None:
        self._clock.enter("evaluation")

    def resume(self) -> None:
        self._clock.train()
        self._last = self._clock.clock.train_seconds_so_far

    def stepped(self, step: int, samples: int | None) -> None:
        """Measure the time of steps, in groups of about `RUN_SECONDS`."""
        super().stepped(step, samples)
        before, self._steps = self._steps, step
        taken = step - before
        is_due = any(self.is_due(one) for one in range(before + 1, step + 1))
        is_short_row = 0 < (self._untimed_steps + taken) * min(self._first, default=0.0) < RUN_SECONDS
        if before >= WARM_UP_STEPS and is_short_row and not is_due:
            self._untimed_steps += taken
            return
        self._clock.clock.synchronize()
        now = self._clock.clock.train_seconds_so_far
        passed, self._last = now - self._last, now
        if before < WARM_UP_STEPS:
            self._first.append(passed / taken)
            if step >= WARM_UP_STEPS:
                self.contention.start()
                if self._core is not None:
                    self._core.look()
            return
        self._keep(passed, self._untimed_steps + taken)

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        """Time an evaluation, and answer if the step time is known."""
        before = self._clock.clock.seconds("evaluation")
        self._clock.pause()
        super().evaluated(step, metrics, loss)
        self._evaluations.append(self._clock.clock.seconds("evaluation") - before)
        if step < WARM_UP_STEPS:
            return
        if not self._cadence:
            guess, seconds = max(min(self._first), 1e-9), self._request.trial_train_seconds
            most = max(1, math.ceil(SEGMENT_SECONDS / guess))
            wanted = most if seconds is None else eval_every_steps(guess, self._evaluations[-1], seconds)
            self._cadence = max(1, min(most, wanted))
        elif self._is_known():
            self._tell()

    def ran_out_of_memory(self, error: BaseException) -> bool:
        self._clock.pause()
        self._answer(StepTime.where_memory_ran_out(self.configuration))
        return True

    def _keep(self, seconds: float, steps: int) -> None:
        self._untimed_steps = 0
        self._clock.pause()
        look = 0.0 if self._core is None else self._core.look()
        self._reference.look()
        self._runs.append(TimedRun(seconds / steps, steps, look))
        self.resume()

    def _is_known(self) -> bool:
        fewest, most = RUNS
        counted, limit = at_full_pace(self._runs, self._core), self._request.seconds_limit
        spent = sum(run.seconds * run.count for run in self._runs)
        if len(self._runs) >= most or (len(self._runs) >= fewest and spent >= PATIENCE * limit):
            return True
        is_enough = len(counted) >= fewest and spent >= LEAST_SHARE * limit
        return is_enough and (spent >= limit or is_settled(counted, self._request.precision))

    def _tell(self) -> None:
        clock, threads = self._clock.clock, self._threads
        step = timing_of(self._runs, self._core, self._request.precision)
        share = clock.undelayed_train_seconds(threads)
        total = clock.seconds("train")
        reason = why_contended(self.contention.stop(), step.slow, clock, threads)
        self._answer(
            StepTime(
                batch_size=self.configuration.batch_size,
                micro_batch_size=self.configuration.micro_batch_size,
                world_size=self.configuration.world_size,
                step_seconds=step.median,
                step_seconds_low=step.low,
                step_seconds_high=step.high,
                settled=step.settled,
                steps_timed=step.count_all,
                undelayed_step_seconds=None if share is None or not total else step.median * min(1.0, share / total),
                reference_seconds=self._reference.seconds,
                evaluation_seconds=statistics.median(self._evaluations[1:] or self._evaluations),
                peak_memory_bytes=peak_memory_bytes(self._torch_device),
                contended=reason is not None,
                reason=reason,
            )
        )


class MeasuredNoise(Looked):
    """Measures the gradient noise scale; see `NoiseNearTarget`."""

    def __init__(self, request: NoiseRequest, assign: Assign, line: Line) -> None:
        super().__init__(assign, line)
        self._request = request
        self.seed = request.seed
        self._approach = Approach(request.target)
        self.noise: NoiseNearTarget | None = None
        self._began = math.inf
        self._found: NoiseMeasurement | None = None
        self._look_at = 2 * FEWEST_PASSES

    def modelled(self, modules: Sequence[nn.Module], tokens: Weights) -> None:
        if any(parameter.requires_grad for one in modules for parameter in one.parameters()):
            self.noise = NoiseNearTarget(modules, self.configuration, self._request.target, tokens, holds=True)

    def begin(self) -> None:
        self._began = time.perf_counter()

    def is_due(self, step: int) -> bool:
        return step % self._request.eval_every_steps == 0

    def stepped(self, step: int, samples: int | None) -> None:
        super().stepped(step, samples)
        if self.noise is not None:
            self.noise.stepped()
        if self.configuration.world_size == 1:  # ranks end together, at an evaluation
            self._end_if_known()

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        """Start the measurement near the target, or at the time limit."""
        super().evaluated(step, metrics, loss)
        self._end_if_known()
        metric = number_of(metrics, self._request.target.metric)
        limit, is_near = self._request.train_seconds_limit, self._approach.is_near(metric)
        if self._found is not None or not (is_near or time.perf_counter() - self._began >= limit):
            return
        noise = required(
            self.noise,
            "cannot measure the gradient noise, because the loop did not name its model, or its ranks train different "
            "parameters",
            hint="call trial.state(model=model, optimizer=optimizer), and train the same parameters on each rank",
        )
        self._began = time.perf_counter()
        noise.measure(True)
        self._found = NoiseMeasurement(
            batch_size=self.configuration.batch_size,
            micro_batch_size=self.configuration.micro_batch_size,
            step=step,
            metric=metric,
            noise=GradientNoise(),
            reason=None if is_near else f"the limit of {limit:.4g} s passed before the target was near",
        )

    def _end_if_known(self) -> None:
        if self._found is None or self.noise is None:
            return
        is_over = time.perf_counter() - self._began >= self._request.noise_seconds_limit
        if self.noise.advisor.measured_steps >= self._look_at:
            self._look_at = math.ceil(GROWTH * self._look_at)
            is_over = is_over or self.noise.advisor.noise.relative_half_width <= PRECISION
        if is_over:
            self._answer(replace(self._found, noise=self.noise.result()))


def work_of(assign: Assign, line: Line) -> TrialRun | Looked:
    match assign.work:
        case TrialRequest() as request:
            return TrialRun(request, assign, line)
        case StepTimeRequest() as request:
            return TimedLoop(request, assign, line)
        case MemoryRequest():
            return MeasuredMemory(assign, line)
        case NoiseRequest() as request:
            return MeasuredNoise(request, assign, line)
        case _:
            return DescribedLoop(assign, line)


def end_work(
    work: Assignment, assign: Assign, line: Line, error: BaseException | None, close: Callable[[], None]
) -> None:
    """Report the end of the user's code. If ``error`` is None, call ``close`` first."""
    if error is None and not work.is_over:
        try:
            close()
        except UsageError as lacks:
            error = lacks
    if work.is_over:
        work.finish()
    elif error is not None and not (is_out_of_memory(error) and work.ran_out_of_memory(error)):
        line.send(failure_of(assign, error))


def failure_of(assign: Assign, error: BaseException) -> Reply:
    if isinstance(assign.work, TrialRequest):
        return TrialEnded(assign.work.number, failed(error))
    return program_refused(error, assign.memory_limit_bytes)
