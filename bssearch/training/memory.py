"""Running out of memory, how much was used, and how much may be."""

from __future__ import annotations

import ctypes
import re
import resource
from pathlib import Path

import torch

MMAP_THRESHOLD_BYTES = 2**20
"""Under a limit on the CPU every block from here on is a mapping of its own, which goes back once it is freed.

glibc moves that threshold up to 32 MiB as it goes. A worker that has run several batch sizes then keeps a heap full of
holes: for the perceptron of `studies/fashion_mnist_cpu.yaml` it took 1.21 GiB where a new one took 0.96.
"""

_M_MMAP_THRESHOLD = -3  # mallopt(3)

_PHRASES = ("can't allocate memory", "not enough memory", "out of memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that the host or the device had no memory left.

    PyTorch's CPU allocator, cuBLAS and cuDNN say so in a plain RuntimeError.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)


def reset_peak_memory(device: torch.device) -> None:
    """Let the peak count from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the most memory that tensors held on the device since the reset.

    None on the CPU: what a process once held it does not give back, so its peak says nothing of one trial.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


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


def peak_process_memory_bytes(device: torch.device, status: Path = Path("/proc/self/status")) -> int | None:
    """Return the peak of a process that has done but one thing: on a GPU what tensors held, else its resident memory.

    On the CPU it is the whole process's since its start (``VmHWM``); None where the system does not say.
    """
    if device.type == "cuda":
        return peak_memory_bytes(device)
    if not status.is_file():
        return None
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
