"""Whether a micro-batch size fits into memory, found by running it."""

from __future__ import annotations

import torch

from bssearch.records import MemoryRequest, MemoryUse
from bssearch.training.computation import Computation
from bssearch.training.memory import (
    allocation_retries,
    is_out_of_memory,
    limit_memory,
    peak_process_memory_bytes,
    reset_peak_memory,
)
from bssearch.training.trainer import Trainer, warm_up
from bssearch.workloads.base import Data, Workload

STEPS = 3
"""The first step makes the optimizer's state; memory that grows from step to step shows in the next."""

RESERVE = 0.01
"""The share of the memory that a size must leave free to count as one that fits."""

CPU_RESERVE_BYTES = 16 * 2**20
"""At least so much of it on the CPU. Two processes that do the same differ there in their heaps, whatever the limit: a
worker that has run trials of other sizes before held up to 9 MiB more than a new one."""


def measure_memory(
    request: MemoryRequest,
    workload: Workload,
    data: Data,
    computation: Computation,
    *,
    memory_bytes: int | None = None,
) -> MemoryUse:
    """Run a trial of three optimizer steps, with its warm-up and evaluations; return whether memory sufficed.

    With ``memory_bytes`` the process has no more than that from here on. A size at which the GPU's allocator has to
    give memory back and ask again, once its kernels are chosen, counts as too large: it would thrash.
    ``peak_memory_bytes`` is that of a process which has done nothing else; on a GPU, as in a trial, without the
    workspaces that were tried as kernels were chosen. Exceptions of the workload that are not about memory go through.
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
        peak = _train_and_evaluate(request, workload, data, computation, metric)
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
        peak_memory_bytes=peak or peak_process_memory_bytes(device),
        reason=reason,
    )


def bytes_within_reserve(device: torch.device, limit_bytes: int | None) -> int | None:
    """Return the memory less what must stay free; None on a CPU without a limit, whose end only the kernel knows."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return int((1 - RESERVE) * (total if limit_bytes is None else min(limit_bytes, total)))
    return None if limit_bytes is None else max(0, limit_bytes - max(CPU_RESERVE_BYTES, int(RESERVE * limit_bytes)))


def _train_and_evaluate(
    request: MemoryRequest, workload: Workload, data: Data, computation: Computation, metric: str
) -> int | None:
    """Do what a trial does after its warm-up; return the peak of memory."""
    with Trainer(workload, request.configuration, data.train, computation, seed=0) as trainer:
        trainer.evaluate(data.validation, metric)
        for _ in range(STEPS):
            trainer.step()
        trainer.evaluate(data.validation, metric)
        return peak_process_memory_bytes(computation.device)
