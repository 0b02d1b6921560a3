"""The peak memory of a trial on the CPU: its own, whatever the process did before."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from bssearch.records import MemoryBasis
from bssearch.training.memory import (
    SAMPLING_SECONDS,
    DeviceMemoryMeter,
    PeakMemoryMeter,
    ResidentMemoryMeter,
    SampledMemoryMeter,
    peak_memory_meter,
)

CPU = torch.device("cpu")
MIB = 2**20
OVERHEAD_KIB = 0.75
"""What a tensor takes beside its elements, in the heap and in Python: some 700 bytes."""

KINDS = [ResidentMemoryMeter, SampledMemoryMeter]


def hold(mebibytes: int, *, block_kib: int = 1024) -> None:
    """Take so much memory in blocks, touch all of it for longer than a sample takes, and free it."""
    blocks = [torch.ones(block_kib * 1024, dtype=torch.uint8) for _ in range(mebibytes * 1024 // block_kib)]
    time.sleep(5 * SAMPLING_SECONDS)
    del blocks


def peak_mebibytes(meter: PeakMemoryMeter, mebibytes: int, *, block_kib: int = 1024) -> float:
    """Return what a meter says of a trial that holds so much."""
    meter.start()
    hold(mebibytes, block_kib=block_kib)
    peak = meter.peak_bytes()
    assert peak is not None
    return peak / MIB


SIZES = (64, 64, 8, 40)
"""Mebibytes that trials hold one after the other."""


def peaks_of_trials(kind: type[ResidentMemoryMeter | SampledMemoryMeter], block_kib: int) -> list[float]:
    found = []
    for mebibytes in SIZES:
        meter = kind()
        found.append(peak_mebibytes(meter, mebibytes, block_kib=block_kib))
        meter.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_kib", [4, 1024])
def test_each_trial_has_its_own_peak_whatever_ran_before(
    kind: type[ResidentMemoryMeter | SampledMemoryMeter], block_kib: int
) -> None:
    """Small blocks stay in the heap when they are freed: a second trial alike would take them again unseen.

    A process of its own, as a worker has: in that of the tests, others have left holes in the heap to be filled.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found = pool.submit(peaks_of_trials, kind, block_kib).result()
    a_block = 1 + OVERHEAD_KIB / block_kib
    assert found == pytest.approx([size * a_block for size in SIZES], abs=16 if block_kib < 1024 else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_measured_beside_a_trial_is_forgotten(kind: type[ResidentMemoryMeter | SampledMemoryMeter]) -> None:
    meter = kind()
    assert meter.peak_bytes() is None, "it has not started"
    meter.start()
    kept = torch.ones(16 * MIB, dtype=torch.uint8)
    hold(64, block_kib=64 * 1024)  # a mapping of its own, gone once it is freed
    meter.restart()
    assert (meter.peak_bytes() or 0) / MIB == pytest.approx(16, abs=4), "it counts from where it started"
    meter.close()
    del kept


def test_where_the_mark_cannot_be_reset_the_resident_set_is_sampled(tmp_path: Path) -> None:
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
