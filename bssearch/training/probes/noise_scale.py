"""A configuration's gradient noise scale near its target."""

from __future__ import annotations

import math
import time

from bssearch.errors import LaunchError, WorkloadError
from bssearch.records import GradientNoise, NoiseMeasurement, NoiseRequest
from bssearch.records.noise_scale import FEWEST_PASSES, Interval, Pass, gradient_noise
from bssearch.training.clock import clock_for
from bssearch.training.computation import Computation
from bssearch.training.course import Approach
from bssearch.training.gradient_noise import GradientPasses
from bssearch.training.memory import is_out_of_memory
from bssearch.training.trainer import Trainer, warm_up
from bssearch.workloads.base import Data, Workload

PRECISION = 0.15  # stop once half the interval's width is within this share of the scale

PASS_BATCHES = 32  # small batches in a pass; more than in a trial, which has less time

# Look at the interval each time the passes have grown by this factor; looking after each pass would stop at chance
# minima.
GROWTH = 1.5


def measure_noise(request: NoiseRequest, workload: Workload, data: Data, computation: Computation) -> NoiseMeasurement:
    """Train until the metric is near the target, or training ends; measure the noise scale there.

    Its interval does not cover other seeds.

    Raises:
        WorkloadError: The metric is not finite, samples are too few, or the workload makes its own batches or steps.
        LaunchError: Memory runs out.
    """
    own = [name for name in ("training_step", "train_batches") if callable(getattr(workload, name, None))]
    if own:
        raise WorkloadError(
            f"the gradient noise scale cannot be measured for a workload with its own {' and '.join(own)}: "
            "it needs loss() on training samples drawn at random"
        )
    if len(data.train) < PASS_BATCHES:
        raise WorkloadError(f"the training part has {len(data.train)} samples; there must be >= {PASS_BATCHES}")
    try:
        return _measure(request, workload, data, computation)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        configuration = request.configuration
        raise LaunchError(
            f"out of memory, batch size {configuration.batch_size} in micro-batches of "
            f"{configuration.micro_batch_size}: {error}",
            hint="bssearch probe memory finds the largest micro-batch that fits",
        ) from error


def _measure(request: NoiseRequest, workload: Workload, data: Data, computation: Computation) -> NoiseMeasurement:
    configuration = request.configuration
    warm_up(workload, configuration, data, computation, request.target.metric, request.seed)
    with Trainer(workload, configuration, data.train, computation, request.seed) as trainer:
        metric, reason = _train(request, trainer, data, computation)
        passes = GradientPasses(workload, computation, trainer, configuration, data.train, request.seed)
        return NoiseMeasurement(
            batch_size=configuration.batch_size,
            micro_batch_size=configuration.micro_batch_size,
            step=trainer.steps,
            metric=metric,
            noise=_measure_passes(passes, request.noise_seconds_limit),
            reason=reason,
        )


def _train(request: NoiseRequest, trainer: Trainer, data: Data, computation: Computation) -> tuple[float, str | None]:
    approach, clock = Approach(request.target), clock_for(computation.device)
    while True:
        metric = trainer.evaluate(data.validation, request.target.metric)
        if not math.isfinite(metric):
            raise WorkloadError(f"{request.target.metric} is not finite at step {trainer.steps}")
        if approach.is_near(metric):
            return metric, None
        if clock.seconds("train") >= request.train_seconds_limit:
            return metric, f"the limit of {request.train_seconds_limit:.4g} train seconds passed before"
        if trainer.schedule.is_over(trainer.steps):
            return metric, "the schedule's horizon ended before"
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
            if Interval(noise.scale, noise.low, noise.high).relative_half_width <= PRECISION:
                return noise
            look_at = math.ceil(GROWTH * len(passes))
    return gradient_noise(passes)
