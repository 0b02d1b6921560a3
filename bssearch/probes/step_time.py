"""How long one optimizer step and one evaluation take, alone on the device."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from bssearch.records import StepTime, StepTimeRequest
from bssearch.training.clock import Clock, Ledger, clock_for
from bssearch.training.computation import Computation
from bssearch.training.memory import is_out_of_memory, peak_memory_bytes, reset_peak_memory
from bssearch.training.trainer import Trainer
from bssearch.workloads.base import Data, Workload

WARM_UP_STEPS = 3
STEPS = (5, 30)
EVALUATIONS = (1, 3)
SECONDS = 0.5
"""Steps (and evaluations) are timed until this many seconds of them are measured, but at least the lower and at most
the upper number of times."""


def measure_step_time(request: StepTimeRequest, workload: Workload, data: Data, computation: Computation) -> StepTime:
    """Return the median seconds of a step, each timed alone, and of an evaluation of the validation part.

    The steps are those of the training loop, on training data, after three that are not counted. Out of memory is an
    answer: ``out_of_memory`` without times. Other exceptions of the workload go through.
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
    clock = clock_for(device)
    reset_peak_memory(device)
    trainer = Trainer(workload, configuration, data.train, computation, seed=0)
    for _ in range(WARM_UP_STEPS):
        trainer.step()
    steps = _times(clock, "train", trainer.step, STEPS)
    metric = next(iter(workload.metrics))
    evaluations = _times(clock, "evaluation", lambda: trainer.evaluate(data.validation, metric), EVALUATIONS)
    return StepTime(
        batch_size=configuration.batch_size,
        micro_batch_size=configuration.micro_batch_size,
        step_seconds=statistics.median(steps),
        evaluation_seconds=statistics.median(evaluations),
        steps_timed=len(steps),
        peak_memory_bytes=peak_memory_bytes(device),
    )


def _times(clock: Clock, ledger: Ledger, work: Callable[[], object], count: tuple[int, int]) -> list[float]:
    at_least, at_most = count
    times: list[float] = []
    while len(times) < at_least or (len(times) < at_most and sum(times) < SECONDS):
        before = clock.seconds(ledger)
        with clock.ledger(ledger):
            work()
        times.append(clock.seconds(ledger) - before)
    return times
