"""The assignment of devices to slots."""

import torch

from bssearch.errors import LaunchError, require
from bssearch.training.environment import device_name
from bssearch.training.nvml import device_uuid, other_processes

# CUDA memory outside the allocator: 0.5 GiB for context and kernels, 0.25 GiB for workspaces
CONTEXT_BYTES = 768 * 2**20


def device_of(wanted: str, slot: int, allow_busy: bool = False) -> tuple[torch.device, int]:
    """Make a slot's device current, and return the device and the number of usable devices.

    ``auto`` falls back to the CPU. Raises `LaunchError` if the device is missing, or busy without ``allow_busy``.
    """
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    choice = (cuda or ["cpu" if wanted == "auto" else "cuda"]) if wanted in {"auto", "cuda"} else [wanted]
    require(
        choice[0] in {"cpu", *cuda},
        f"no device {wanted!r}; this machine has {', '.join(['cpu', *cuda])}",
        hint="choose auto, or a device of this machine",
        error=LaunchError,
    )
    users = {device: other_processes(device) or [] for device in map(torch.device, choice)}
    idle = [device for device, others in users.items() if not others]
    busy = "; ".join(
        f"{device} by " + ", ".join(f"process {pid} ({name})" for pid, name in others)
        for device, others in users.items()
    )
    require(
        idle or allow_busy,
        f"devices in use: {busy}; times on a shared device are not reliable",
        hint="wait for these processes, choose another device, or use --allow-busy to share the device",
        error=LaunchError,
    )
    devices = idle or list(users)
    device = devices[slot % len(devices)]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device, len(devices)


def memory_limit_of_slot(
    device: torch.device, slot: int, slots: int, devices: int, limit_bytes: int | None
) -> int | None:
    """Return a slot's memory limit in bytes, or None if unlimited.

    Slots on one CUDA device share the device's memory, minus `CONTEXT_BYTES` per slot.
    """
    sharers = len(range(slot % devices, slots, devices))
    if device.type != "cuda" or sharers <= 1:
        return limit_bytes
    share = max(0, torch.cuda.get_device_properties(device).total_memory // sharers - CONTEXT_BYTES)
    return share if limit_bytes is None else min(share, limit_bytes)


def uuid_of(device: str) -> str | None:
    """Return the GPU's UUID as in ``nvidia-smi -L``, or None if the device is a CPU."""
    return device_uuid(torch.device(device)) if device.startswith("cuda") else None


def name_of(device: str) -> str:
    return device_name(torch.device(device))
