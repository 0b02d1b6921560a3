"""The number formats a step can be computed in, and which of them a device has.

* ``fp32``: IEEE single precision throughout; tensor cores do not round its products.
* ``tf32``: single precision, whose matrix products and convolutions are rounded to 10 bits of mantissa (NVIDIA Ampere
  and later).
* ``bf16``, ``fp16``: single-precision weights under autocast; ``fp16`` with a loss scaler.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from bssearch.errors import LaunchError

AMPERE = (8, 0)
"""The first compute capability that has tf32 and bf16."""

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def available_precisions(device: torch.device) -> tuple[str, ...]:
    """Return the precisions that a device has. The CPU computes bf16 natively or emulates it, and has no fp16 here."""
    if device.type != "cuda":
        return "fp32", "bf16"
    if torch.cuda.get_device_capability(device) < AMPERE:
        return "fp32", "fp16"
    return "fp32", "tf32", "bf16", "fp16"


def resolve_precision(wanted: str, device: torch.device) -> str:
    """Return the precision to compute in; ``auto`` is bf16 on a CUDA device that has it, else fp32.

    Raises `LaunchError`, naming the device and what it has, for a precision that it lacks.
    """
    available = available_precisions(device)
    if wanted == "auto":
        return "bf16" if device.type == "cuda" and "bf16" in available else "fp32"
    if wanted not in available:
        raise LaunchError(
            f"precision = {wanted!r} is not available on {_describe(device)}; it has {', '.join(available)}",
            hint="tf32 and bf16 need a CUDA device of compute capability 8.0 or more (bf16 also runs on the CPU), "
            "fp16 any CUDA device",
        )
    return wanted


def autocast(precision: str, device: torch.device, *, keep_casts: bool = True) -> AbstractContextManager[object]:
    """Return what to put around a forward pass and its loss: nothing for fp32 and tf32.

    With ``keep_casts`` the weights are cast once, and must not change inside.
    """
    dtype = _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=keep_casts)


def allow_tf32(allowed: bool) -> None:
    """Let this process's matrix products and convolutions on CUDA round to tf32, or forbid it (cuDNN's default is on).

    These are PyTorch's older switches; its compiler still reads them and refuses a mixture of both kinds.
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} ({torch.cuda.get_device_name(device)}, compute capability {major}.{minor})"
