"""Whether a micro-batch size fits into memory, found by running it."""

from __future__ import annotations

from bssearch.records import MemoryRequest, MemoryUse
from bssearch.training.computation import Computation
from bssearch.training.memory import (
    allocation_retries,
    is_out_of_memory,
    peak_process_memory_bytes,
    reset_peak_memory,
)
from bssearch.training.trainer import Trainer, warm_up
from bssearch.workloads.base import Data, Workload

STEPS = 3
"""The first step makes the optimizer's state; memory that grows from step to step shows in the next."""


def measure_memory(request: MemoryRequest, workload: Workload, data: Data, computation: Computation) -> MemoryUse:
    """Run a trial of three optimizer steps, with its warm-up and evaluations; return whether memory sufficed.

    A size at which the GPU's allocator has to give memory back and ask again counts as too large: it would thrash.
    ``peak_memory_bytes`` is that of a process which has done nothing else. Exceptions of the workload that are not
    about memory go through.
    """
    device = computation.device
    reset_peak_memory(device)
    before = allocation_retries(device)
    reason = None
    try:
        _train_and_evaluate(request, workload, data, computation)
        retries = allocation_retries(device) - before
        if retries:
            reason = f"the allocator had to give memory back and ask again {retries} times in {STEPS} steps"
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
    return MemoryUse(
        micro_batch_size=request.configuration.micro_batch_size,
        fits=reason is None,
        peak_memory_bytes=peak_process_memory_bytes(device),
        reason=reason,
    )


def _train_and_evaluate(request: MemoryRequest, workload: Workload, data: Data, computation: Computation) -> None:
    """Do what a trial does, its warm-up included: what that leaves behind is memory, too."""
    metric = next(iter(workload.metrics))
    warm_up(workload, request.configuration, data, computation, metric, seed=0)
    with Trainer(workload, request.configuration, data.train, computation, seed=0) as trainer:
        trainer.evaluate(data.validation, metric)
        for _ in range(STEPS):
            trainer.step()
        trainer.evaluate(data.validation, metric)
