"""Running out of memory, how much was used, and how much may be."""

from __future__ import annotations

import ctypes
import re
import resource
import threading
from pathlib import Path
from typing import ClassVar

import psutil
import torch

from bssearch.records import MemoryBasis

MMAP_THRESHOLD_BYTES = 2**20
"""Under a limit on the CPU every block from here on is a mapping of its own, which goes back once it is freed.

glibc moves that threshold up to 32 MiB as it goes. A worker that has run several batch sizes then keeps a heap full of
holes: for the perceptron of `studies/fashion_mnist_cpu.yaml` it took 1.21 GiB where a new one took 0.96.
"""

_M_MMAP_THRESHOLD = -3  # mallopt(3)

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")

SAMPLING_SECONDS = 0.01
"""Between two samples of the resident set, where the kernel keeps no mark that can be reset: a choice. A sample takes
some 20 µs, 0.2 % of it."""

_PHRASES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "STATUS_ALLOC_FAILED",
    "DEVICE_ALLOCATION_FAILED",
    "HOST_ALLOCATION_FAILED",
)
_PHRASES_OF_A_FULL_DEVICE = ("unable to find an engine", "CUBLAS_STATUS_NOT_INITIALIZED")
"""What cuDNN says where no kernel's workspace fits, and cuBLAS where its handle does not: with memory to spare either
means something else, such as shapes that no kernel takes or a broken driver."""

FULL_DEVICE = 0.1
"""The share of a device's memory below which it is full for these phrases: a choice."""

UNUSED_SHARE = 0.2
"""The share of a device's memory from which it is said that the allocator holds it for nothing: a choice."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that the host or the device had no memory left.

    PyTorch's CPU allocator, cuBLAS and cuDNN say so in a plain RuntimeError.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if any(phrase in text for phrase in _PHRASES):
        return True
    return any(phrase in text for phrase in _PHRASES_OF_A_FULL_DEVICE) and _is_device_full()


def _is_device_full() -> bool:
    """Return whether next to nothing is free on the GPU that this process uses, or nobody can say."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # after some failures no call to the driver works
        return True
    return free < FULL_DEVICE * total


def reset_peak_memory(device: torch.device) -> None:
    """Let the peak count from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the most memory that tensors held on the device since the reset; None on the CPU, which does not tell."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


class DeviceMemoryMeter:
    """What tensors held on a GPU."""

    basis: ClassVar[MemoryBasis] = MemoryBasis.DEVICE

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Count from here."""
        reset_peak_memory(self._device)

    restart = start

    def peak_bytes(self) -> int | None:
        """Return the most memory that tensors held."""
        return peak_memory_bytes(self._device)

    def close(self) -> None:
        """Nothing is open."""


class ResidentMemoryMeter:
    """How far this process's resident set grew: the kernel's high-water mark, which is reset (proc_pid_clear_refs(5)).

    What earlier trials have freed is given back to the system first: else a trial would take it again unseen, and the
    second of two alike would seem to need nothing.
    """

    basis: ClassVar[MemoryBasis] = MemoryBasis.RESIDENT

    def __init__(self) -> None:
        self._from: int | None = None

    def start(self) -> None:
        """Count from what the process holds now."""
        trim_heap()
        self.restart()
        self._from = _resident_bytes("VmRSS")

    def restart(self) -> None:
        """Forget the peak so far."""
        _reset_high_water_mark(CLEAR_REFS)

    def peak_bytes(self) -> int | None:
        """Return the growth at the high-water mark."""
        peak = _resident_bytes("VmHWM")
        return None if self._from is None or peak is None else max(0, peak - self._from)

    def close(self) -> None:
        """Nothing is open."""


class SampledMemoryMeter:
    """How far this process's resident set grew, from samples that a thread takes every `SAMPLING_SECONDS`."""

    basis: ClassVar[MemoryBasis] = MemoryBasis.RESIDENT_SAMPLED

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._from: int | None = None
        self._peak = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    def start(self) -> None:
        """Count from what the process holds now."""
        trim_heap()
        self._from = self._peak = self._resident()
        if not self._thread.is_alive():
            self._thread.start()

    def restart(self) -> None:
        """Forget the peak so far."""
        self._peak = self._resident()

    def peak_bytes(self) -> int | None:
        """Return the growth at the largest sample."""
        return None if self._from is None else max(0, max(self._peak, self._resident()) - self._from)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _sample(self) -> None:
        while not self._closed.wait(SAMPLING_SECONDS):
            self._peak = max(self._peak, self._resident())

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)


PeakMemoryMeter = DeviceMemoryMeter | ResidentMemoryMeter | SampledMemoryMeter
"""Measures the peak memory of one trial: what `MemoryBasis` says, in bytes.

``start`` it before the trial's model is made; ``restart`` forgets the peak so far, not what it counts from.
"""


def peak_memory_meter(device: torch.device, clear_refs: Path = CLEAR_REFS) -> PeakMemoryMeter:
    """Return what measures a trial's peak memory on a device."""
    if device.type == "cuda":
        return DeviceMemoryMeter(device)
    try:
        _reset_high_water_mark(clear_refs)
    except OSError:  # another system, or a container that does not permit it
        return SampledMemoryMeter()
    return ResidentMemoryMeter()


def trim_heap() -> None:
    """Give the pages of the heap that hold nothing back to the system, where the C library can (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reset_high_water_mark(clear_refs: Path) -> None:
    """Set ``VmHWM`` to what is resident now; raise `OSError` where that is not permitted."""
    clear_refs.write_text("5")


def limit_memory(device: torch.device, limit_bytes: int) -> None:
    """Let this process have no more than so much memory, as on a smaller device; a limit above what there is is none.

    On a GPU it is what PyTorch's allocator reserves. The CPU has no limit on resident memory: there it is the data
    segment (``RLIMIT_DATA``: heap and private writable mappings, the interpreter's and the libraries' own with them,
    touched or not), beyond which an allocation fails; see `MMAP_THRESHOLD_BYTES` for what else changes there.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        return
    _give_back_what_is_freed()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _give_back_what_is_freed() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it, other C libraries need not
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def allocation_retries(device: torch.device) -> int:
    """Return how often the allocator had to give everything back and ask again: at the edge of a GPU's memory.

    0 on the CPU, which has no such allocator.
    """
    return int(torch.cuda.memory_stats(device)["num_alloc_retries"]) if device.type == "cuda" else 0


def unused_memory(device: torch.device, peak_bytes: int | None) -> str | None:
    """Return that the allocator held much more of a GPU at its peak than tensors did; None where it did not.

    What it holds beside them is lost to larger micro-batches: holes between tensors, and the workspaces with which
    kernels were tried. Much is `UNUSED_SHARE` of the device's memory.
    """
    if device.type != "cuda" or peak_bytes is None:
        return None
    reserved = torch.cuda.max_memory_reserved(device)
    total = torch.cuda.get_device_properties(device).total_memory
    if reserved - peak_bytes < UNUSED_SHARE * total:
        return None
    held, used = reserved / 2**30, peak_bytes / 2**30
    return f"the allocator held {held:.3g} GiB of the device's {total / 2**30:.3g} for {used:.3g} GiB of tensors"


def peak_process_memory_bytes(device: torch.device, status: Path = STATUS) -> int | None:
    """Return the peak of a process that has done but one thing: on a GPU what tensors held, else its resident memory.

    On the CPU it is the whole process's since its start (``VmHWM``); None where the system does not say.
    """
    return peak_memory_bytes(device) if device.type == "cuda" else _resident_bytes("VmHWM", status)


def _resident_bytes(field: str, status: Path = STATUS) -> int | None:
    """Return a field of proc_pid_status(5) in bytes, None where the system does not say."""
    if not status.is_file():
        return None
    found = re.search(rf"^{field}:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
