"""The memory of a trial: exhaustion, peak and limit."""

import ctypes
import resource
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil
import torch

from bssearch.records import MemoryBasis
from bssearch.training.process_times import found_in

# Under a memory limit on the CPU, larger blocks are separate mappings, which `free` returns to the system. glibc raises
# the threshold up to 32 MiB, and the heap fragments: a used worker takes 1.21 GiB, a new worker 0.96 GiB.
MMAP_THRESHOLD_BYTES = 2**20

_M_MMAP_THRESHOLD = -3  # mallopt(3)

CLEAR_REFS = Path("/proc/self/clear_refs")

# Seconds between samples of the resident set if the kernel's mark cannot be reset; a sample takes about 20 µs (0.2%).
SAMPLING_SECONDS = 0.01

_PHRASES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "STATUS_ALLOC_FAILED",
    "DEVICE_ALLOCATION_FAILED",
    "HOST_ALLOCATION_FAILED",
    "NVML_SUCCESS ==",  # on MIG slices, NVML refuses PyTorch's report of a failed allocation (pytorch#112377)
)
# cuDNN's message if no workspace fits, and cuBLAS's message if the handle does not fit. With free memory, both
# messages mean other errors, such as unsupported shapes or a broken driver.
_PHRASES_OF_A_FULL_DEVICE = ("unable to find an engine", "CUBLAS_STATUS_NOT_INITIALIZED")

FULL_DEVICE = 0.1  # `_PHRASES_OF_A_FULL_DEVICE` mean a full device below this share of free memory

UNUSED_SHARE = 0.2  # warn if the allocator holds this share of the device without tensors


def is_out_of_memory(error: BaseException) -> bool:
    # PyTorch's CPU allocator, cuBLAS and cuDNN raise a plain RuntimeError if memory runs out.
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    is_ambiguous = any(phrase in text for phrase in _PHRASES_OF_A_FULL_DEVICE)
    return any(phrase in text for phrase in _PHRASES) or (is_ambiguous and _is_device_full())


def _is_device_full() -> bool:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # after some failures, every call to the driver fails
        return True
    return free < FULL_DEVICE * total


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class DeviceMemoryMeter:
    """Measures the peak memory of tensors on a GPU."""

    device: torch.device
    basis: ClassVar[MemoryBasis] = MemoryBasis.DEVICE

    def start(self) -> None:
        reset_peak_memory(self.device)

    restart = start

    def peak_bytes(self) -> int | None:
        return peak_memory_bytes(self.device)

    def close(self) -> None: ...


class ResidentMemoryMeter:
    """Measures the resident set's growth up to the kernel's high-water mark (proc_pid_clear_refs(5))."""

    basis: ClassVar[MemoryBasis] = MemoryBasis.RESIDENT

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._from: int | None = None

    def start(self) -> None:
        trim_heap()  # otherwise a trial would reuse freed memory unnoticed
        self.restart()
        self._from = self._resident()

    def restart(self) -> None:
        CLEAR_REFS.write_text("5")

    def peak_bytes(self) -> int | None:
        peak = self._highest()
        return None if self._from is None or peak is None else max(0, peak - self._from)

    def close(self) -> None: ...

    def _highest(self) -> int | None:
        return peak_resident_bytes()

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)


class SampledMemoryMeter(ResidentMemoryMeter):
    """Measures the resident set's growth by sampling every `SAMPLING_SECONDS`."""

    basis: ClassVar[MemoryBasis] = MemoryBasis.RESIDENT_SAMPLED

    def __init__(self) -> None:
        super().__init__()
        self._peak = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    def start(self) -> None:
        super().start()
        if not self._thread.is_alive():
            self._thread.start()

    def restart(self) -> None:
        self._peak = self._resident()

    def close(self) -> None:
        self._closed.set()

    def _highest(self) -> int:
        return max(self._peak, self._resident())

    def _sample(self) -> None:
        while not self._closed.wait(SAMPLING_SECONDS):
            self._peak = self._highest()


# Measures a trial's peak memory in bytes (see MemoryBasis). Call start before the model is built; restart resets the
# peak but not the baseline.
PeakMemoryMeter = DeviceMemoryMeter | ResidentMemoryMeter | SampledMemoryMeter


def peak_memory_meter(device: torch.device, clear_refs: Path = CLEAR_REFS) -> PeakMemoryMeter:
    if device.type == "cuda":
        return DeviceMemoryMeter(device)
    try:
        clear_refs.write_text("5")
    except OSError:  # another system, or a container that forbids the reset
        return SampledMemoryMeter()
    return ResidentMemoryMeter()


def trim_heap() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def limit_memory(device: torch.device, limit_bytes: int) -> None:
    """Cap this process's memory: PyTorch's reserved memory on a GPU, and the data segment on the CPU."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        return
    # The system cannot limit resident memory. RLIMIT_DATA counts heap and private writable mappings, touched or not.
    _give_back_what_is_freed()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _give_back_what_is_freed() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has this function, other C libraries may lack it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def allocation_retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device)["num_alloc_retries"]) if device.type == "cuda" else 0


def unused_memory(device: torch.device, peak_bytes: int | None) -> str | None:
    """Return a warning if the allocator held `UNUSED_SHARE` of a GPU beyond the tensors' peak."""
    if device.type != "cuda" or peak_bytes is None:
        return None
    reserved = torch.cuda.max_memory_reserved(device)
    total = torch.cuda.get_device_properties(device).total_memory
    if reserved - peak_bytes < UNUSED_SHARE * total:
        return None
    held, used = reserved / 2**30, peak_bytes / 2**30
    return f"the allocator held {held:.3g} GiB of the device's {total / 2**30:.3g} GiB for {used:.3g} GiB of tensors"


def peak_process_memory_bytes(device: torch.device) -> int | None:
    return peak_memory_bytes(device) if device.type == "cuda" else peak_resident_bytes()


def peak_resident_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    kib = found_in(status, r"^VmHWM:\s*(\d+) kB$")
    return None if kib is None else int(kib) * 1024
