"""The reference kernel that is timed beside steps."""

import pytest
import torch

from bssearch.training.contention import ReferenceKernel

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("device", "threads", "tells"), [(CPU, 1, True), (CPU, 2, False), (GPU, 1, False)])
def test_the_kernel_is_timed_only_for_one_thread_of_a_cpu(device: torch.device, threads: int, tells: bool) -> None:
    kernel = ReferenceKernel(device, threads)
    kernel.look()
    assert (kernel.seconds is not None) is tells


def test_a_look_takes_fractions_of_a_millisecond_and_the_median_counts() -> None:
    kernel = ReferenceKernel(CPU, 1, period=0.0)
    assert kernel.state() == {"looks": []}
    for _ in range(9):
        kernel.look()
    assert 1e-6 < (kernel.seconds or 0.0) < 0.05


def test_looks_that_come_too_soon_are_left_out() -> None:
    kernel = ReferenceKernel(CPU, 1, period=3600.0)
    kernel.look()
    first = kernel.seconds
    kernel.look()
    assert kernel.state() == {"looks": [first]}


def test_looks_before_a_pause_count() -> None:
    kernel = ReferenceKernel(CPU, 1, period=0.0)
    kernel.restore({"looks": [1.0, 2.0, 3.0]})
    assert kernel.seconds == 2.0
    kernel.look()
    assert kernel.seconds == pytest.approx(1.5, abs=0.01)
