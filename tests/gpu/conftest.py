import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bssearch.spec.parts import TrainingSpec
from bssearch.training.computation import Computation

# As in a worker's environment; cuBLAS reads it once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

MakeComputation = Callable[..., Computation]

SLOWER = ("test_device_on_gpu", "test_pausing_on_gpu")
"""Files whose tests start many workers, or train many times."""

SLOWEST = "compiled"
"""A part of the names of the tests that compile, a minute each."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the quick tests of this folder first: where time is short they tell the most."""
    here = Path(__file__).parent
    items.sort(key=lambda item: rank(item.path.stem, item.name) if item.path.parent == here else 0)


def rank(file: str, name: str) -> int:
    """Return where a test of this folder stands in the order, after the tests of others."""
    return 4 if SLOWEST in name else 2 + SLOWER.index(file) if file in SLOWER else 1


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
        return Computation(device, TrainingSpec(**{"measure_noise": False, **settings}))

    yield make
    Computation(torch.device("cpu"))
