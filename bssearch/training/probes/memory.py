"""Whether a micro-batch size fits into memory."""

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

STEPS = 3  # The first step creates the optimizer's state; the next ones show memory that grows.

RESERVE = 0.01  # share of memory that must stay free

# At least this much on the CPU: heaps of alike processes differ there; a used worker held up to 9 MiB more than a new
# one.
CPU_RESERVE_BYTES = 16 * 2**20


def measure_memory(
    request: MemoryRequest,
    workload: Workload,
    data: Data,
    computation: Computation,
    *,
    memory_bytes: int | None = None,
) -> MemoryUse:
    """Run three steps; return whether memory, capped at ``memory_bytes``, sufficed.

    A size does not fit if a GPU's allocator must retry after its kernels are chosen: it would thrash. The peak excludes
    workspaces of kernels being benchmarked.
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
    """Memory less the reserve; None on a CPU without a limit."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return int((1 - RESERVE) * (total if limit_bytes is None else min(limit_bytes, total)))
    return None if limit_bytes is None else max(0, limit_bytes - max(CPU_RESERVE_BYTES, int(RESERVE * limit_bytes)))


def _train_and_evaluate(
    request: MemoryRequest, workload: Workload, data: Data, computation: Computation, metric: str
) -> int | None:
    with Trainer(workload, request.configuration, data.train, computation, seed=0) as trainer:
        trainer.evaluate(data.validation, metric)
        for _ in range(STEPS):
            trainer.step()
        trainer.evaluate(data.validation, metric)
        return peak_process_memory_bytes(computation.device)
