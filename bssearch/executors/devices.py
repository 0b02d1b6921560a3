"""Which device a slot runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bssearch.errors import LaunchError

if TYPE_CHECKING:
    import torch


def choose_device(wanted: str, slot: int) -> torch.device:
    """Return the device of a slot and make it the process's current one.

    ``auto`` takes turns over the CUDA devices and falls back to the CPU; ``cuda`` takes turns and does not
    fall back. Raises `LaunchError`, naming the devices there are, for one that is not there.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    present = ["cpu", *(f"cuda:{index}" for index in range(count))]
    name = wanted
    if count and wanted in {"auto", "cuda"}:
        name = f"cuda:{slot % count}"
    elif wanted == "auto":
        name = "cpu"
    if name not in present:
        raise LaunchError(
            f"device {wanted!r} is not there; this machine has {', '.join(present)}",
            hint="a device is auto, cpu, cuda or cuda:N",
        )
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
