"""Whether a micro-batch size fits into memory, found by running it."""

from __future__ import annotations

from bssearch.records import MemoryRequest, MemoryUse
from bssearch.training.computation import Computation
from bssearch.workloads.base import Data, Workload


def measure_memory(request: MemoryRequest, workload: Workload, data: Data, computation: Computation) -> MemoryUse:
    """Run three optimizer steps and an evaluation of the validation part; return whether memory sufficed."""
    raise NotImplementedError
