from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bssearch.records import TrainingSettings
from bssearch.training.computation import Computation

# As in a worker's environment; cuBLAS reads it once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

MakeComputation = Callable[..., Computation]


@pytest.fixture(scope="session", autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda:0")


@pytest.fixture
def computation(device: torch.device) -> Iterator[MakeComputation]:
    """Make computations on the device; afterwards the process's switches are as on the CPU."""

    def make(**settings: Any) -> Computation:
        return Computation(device, TrainingSettings(**{"measure_noise": False, **settings}))

    yield make
    Computation(torch.device("cpu"))
