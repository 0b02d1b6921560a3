import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bssearch.spec import TrainingSpec
from bssearch.training.computation import Computation

# As in a worker's environment; cuBLAS reads it once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

MakeComputation = Callable[..., Computation]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the quick tests of this folder first, then tests that start workers, then tests that compile."""

    def rank(item: pytest.Item) -> int:
        starts_workers, compiles = item.path.stem == "test_device_on_gpu", "compiled" in item.name
        return (item.path.parent == Path(__file__).parent) * (1 + starts_workers + 2 * compiles)

    items.sort(key=rank)


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
