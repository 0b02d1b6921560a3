"""Running out of memory, and how much was used."""

from __future__ import annotations

import torch

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
