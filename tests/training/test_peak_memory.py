"""The peak memory of a trial on the CPU, without the memory that the process used before."""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

import pytest
import torch

from bssearch.records import MemoryBasis
from bssearch.training.memory import (
    SAMPLING_SECONDS,
    DeviceMemoryMeter,
    PeakMemoryMeter,
    ResidentMemoryMeter,
    SampledMemoryMeter,
    is_out_of_memory,
    peak_memory_meter,
    unused_memory,
)
from tests.factories import not_none

CPU = torch.device("cpu")
MIB = 2**20
OVERHEAD_KIB = 0.75
"""Memory of a tensor beside its elements, in the heap and in Python: about 700 bytes."""

Meter = type[ResidentMemoryMeter | SampledMemoryMeter]
KINDS: list[Meter] = [ResidentMemoryMeter, SampledMemoryMeter]

P = ParamSpec("P")
T = TypeVar("T")


def in_a_process_of_its_own(measure: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a new process like a worker, because other tests leave and free memory in this process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measure, *args, **kwargs).result()


def hold(mebibytes: int, *, block_kib: int = 1024) -> None:
    """Take memory in blocks, touch all blocks for longer than a sample takes, and free them."""
    blocks = [torch.ones(block_kib * 1024, dtype=torch.uint8) for _ in range(mebibytes * 1024 // block_kib)]
    time.sleep(5 * SAMPLING_SECONDS)
    del blocks


def peak_mebibytes(meter: PeakMemoryMeter, mebibytes: int, *, block_kib: int = 1024) -> float:
    """Return the peak of a trial that holds ``mebibytes``."""
    meter.start()
    hold(mebibytes, block_kib=block_kib)
    return not_none(meter.peak_bytes()) / MIB


SIZES = (64, 64, 8, 40)
"""Mebibytes of consecutive trials."""


def peaks_of_trials(kind: Meter, block_kib: int) -> list[float]:
    found = []
    for mebibytes in SIZES:
        meter = kind()
        found.append(peak_mebibytes(meter, mebibytes, block_kib=block_kib))
        meter.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "block_kib"), [(ResidentMemoryMeter, 4), (SampledMemoryMeter, 4), (SampledMemoryMeter, 1024)]
)
def test_each_trial_has_its_own_peak_whatever_ran_before(kind: Meter, block_kib: int) -> None:
    """Freed small blocks stay in the heap, and an equal second trial would reuse them unseen."""
    found = in_a_process_of_its_own(peaks_of_trials, kind, block_kib)
    a_block = 1 + OVERHEAD_KIB / block_kib
    assert found == pytest.approx([size * a_block for size in SIZES], abs=16 if block_kib < 1024 else 2)


def peak_before_and_after_a_restart(kind: Meter) -> tuple[int | None, float]:
    """Return a meter's peak before its start, and (in MiB) after a restart with 16 MiB kept and 64 MiB freed."""
    meter = kind()
    unstarted = meter.peak_bytes()
    meter.start()
    kept = torch.ones(16 * MIB, dtype=torch.uint8)
    hold(64, block_kib=64 * 1024)  # a separate mapping, returned to the system when freed
    meter.restart()
    peak = not_none(meter.peak_bytes())
    meter.close()
    assert kept.all()
    return unstarted, peak / MIB


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_memory_before_a_restart_does_not_count(kind: Meter) -> None:
    unstarted, peak = in_a_process_of_its_own(peak_before_and_after_a_restart, kind)
    assert unstarted is None, "it has not started"
    assert peak == pytest.approx(16, abs=4), "it counts from where it started"


def test_without_a_resettable_mark_the_resident_set_is_sampled(tmp_path: Path) -> None:
    assert peak_memory_meter(CPU).basis is MemoryBasis.RESIDENT
    assert peak_memory_meter(CPU, tmp_path).basis is MemoryBasis.RESIDENT_SAMPLED  # a folder: writing to it fails
    assert peak_memory_meter(torch.device("cuda")).basis is DeviceMemoryMeter.basis is MemoryBasis.DEVICE


def test_the_thread_that_samples_ends_with_the_trial() -> None:
    meter = SampledMemoryMeter()
    meter.start()
    assert meter._thread.is_alive()
    meter.close()
    meter._thread.join(timeout=5)
    assert not meter._thread.is_alive()


EDGE = "FIND was unable to find an engine to execute this computation"
NO_HANDLE = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize("text", [EDGE, f"GET was {EDGE[9:]}", NO_HANDLE])
@pytest.mark.parametrize(("free", "is_one"), [(2**28, True), (2**35, False)])
def test_messages_of_libraries_on_a_full_device_are_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, text: str, free: int, is_one: bool
) -> None:
    assert not is_out_of_memory(RuntimeError(text)), "on the CPU"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**37))
    assert is_out_of_memory(RuntimeError(text)) is is_one


@pytest.mark.parametrize(
    "text",
    [
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1154',
    ],
)
def test_a_failed_allocation_is_out_of_memory_on_any_device(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text)) and not is_out_of_memory(ValueError(text))


@pytest.mark.parametrize(("reserved_gib", "said"), [(40, False), (55, False), (57, True)])
def test_much_unused_memory_of_the_gpus_allocator_is_a_warning(
    reserved_gib: int, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, gib = torch.device("cuda:1"), 2**30
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda asked: reserved_gib * gib if asked == device else 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda asked: SimpleNamespace(total_memory=80 * gib))
    sentence = unused_memory(device, 40 * gib)
    assert (sentence is not None) == said
    if sentence is not None:
        assert "57 GiB of the device's 80 GiB for 40 GiB" in sentence
    assert unused_memory(CPU, 40 * gib) is None
