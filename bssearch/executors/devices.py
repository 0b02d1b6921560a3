"""Which device a slot runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bssearch.errors import LaunchError

if TYPE_CHECKING:
    import torch


def choose_device(wanted: str, slot: int, allow_busy: bool = False) -> torch.device:
    """Return the device of a slot and make it the process's current one.

    ``auto`` takes turns over the CUDA devices that no other program computes on, and falls back to the CPU where there
    are no CUDA devices at all; ``cuda`` takes turns and does not fall back. Raises `LaunchError`, naming the devices
    there are, for one that is not there; and, naming the programs, where another one computes on each that might be
    taken, unless ``allow_busy``.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cuda = [f"cuda:{index}" for index in range(count)]
    present = ["cpu", *cuda]
    choice = [wanted]
    if wanted in {"auto", "cuda"}:
        choice = cuda or ["cpu" if wanted == "auto" else "cuda"]
    if choice[0] not in present:
        raise LaunchError(
            f"device {wanted!r} is not there; this machine has {', '.join(present)}",
            hint="a device is auto, cpu, cuda or cuda:N",
        )
    device = _idle_one([torch.device(name) for name in choice], slot, allow_busy)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def uuid_of(device: str) -> str | None:
    """Return which one of all NVIDIA GPUs a device of this process is, as ``nvidia-smi -L`` names it; else None."""
    if not device.startswith("cuda"):
        return None
    import torch

    from bssearch.training.nvml import device_uuid

    return device_uuid(torch.device(device))


def _idle_one(devices: list[torch.device], slot: int, allow_busy: bool) -> torch.device:
    from bssearch.training.nvml import other_processes

    others = {device: other_processes(device) for device in devices}
    idle = [device for device in devices if not others[device]]
    if not idle and not allow_busy:
        busy = "; ".join(
            f"{device} by " + ", ".join(f"process {pid} ({name})" for pid, name in others[device]) for device in devices
        )
        raise LaunchError(
            f"in use: {busy}; what is timed on a device that another program computes on is worth little",
            hint="wait for it to end, choose another device, or time beside it with --allow-busy",
        )
    usable = idle or devices
    return usable[slot % len(usable)]
