"""Memory of devices by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from bssearch.errors import UsageError

MIB = 2**20

CONTEXT_BYTES = 512 * MIB  # memory of a CUDA context and kernels; about half a GiB on each device


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device; memory and compute capability may be None."""

    name: str
    memory_bytes: int | None
    capability: tuple[int, int] | None

    @property
    def is_cuda(self) -> bool:
        """True for a GPU."""
        return self.capability is not None

    @property
    def has_flash(self) -> bool:
        """True with flash attention and bf16 (compute capability ≥ 8.0)."""
        return self.capability is not None and self.capability >= (8, 0)

    def lacks(self, precision: str) -> bool:
        """True if a GPU has no tensor cores for a precision: bf16 needs 8.0, fp8 8.9 (Ada)."""
        least = {"bf16": (8, 0), "fp8": (8, 9)}.get(precision)
        return least is not None and self.capability is not None and self.capability < least

    @property
    def workspace_bytes(self) -> int:
        """Bytes of cuBLAS's workspaces for the forward and backward threads.

        32 MiB each from Hopper (9.0) on, 8.1 MiB before (``CUBLAS_WORKSPACE_CONFIG`` :4096:8 and :4096:2:16:8).
        """
        if self.capability is None:
            return 0
        return 2 * (32 * MIB if self.capability >= (9, 0) else 8 * MIB + 128 * 1024)

    @property
    def taken_bytes(self) -> int:
        """Bytes taken before the first tensor; the context counts if the memory is known."""
        return self.workspace_bytes + (CONTEXT_BYTES if self.memory_bytes is not None else 0)


# MiB of memory as in ``nvidia-smi``, and compute capability
_MIB_AND_CAPABILITY: Mapping[str, tuple[int, tuple[int, int]]] = MappingProxyType(
    {
        "gtx-1080-ti": (11264, (6, 1)),
        "p100-16gb": (16384, (6, 0)),
        "v100-16gb": (16384, (7, 0)),
        "v100-32gb": (32768, (7, 0)),
        "t4": (15360, (7, 5)),
        "rtx-2080-ti": (11264, (7, 5)),
        "a100-40gb": (40960, (8, 0)),
        "a100-80gb": (81920, (8, 0)),
        "a10": (23028, (8, 6)),
        "a40": (46068, (8, 6)),
        "rtx-a6000": (49140, (8, 6)),
        "rtx-3060-12gb": (12288, (8, 6)),
        "rtx-3080-10gb": (10240, (8, 6)),
        "rtx-3090": (24576, (8, 6)),
        "l4": (23034, (8, 9)),
        "l40s": (46068, (8, 9)),
        "rtx-4060-8gb": (8188, (8, 9)),
        "rtx-4070": (12282, (8, 9)),
        "rtx-4080": (16376, (8, 9)),
        "rtx-4090": (24564, (8, 9)),
        "h100-80gb": (81559, (9, 0)),
        "h100-nvl": (95830, (9, 0)),
        "gh200-96gb": (97871, (9, 0)),
        "h200": (143771, (9, 0)),
        "b200": (183359, (10, 0)),
        "rtx-5090": (32607, (12, 0)),
    }
)

ALIASES: Mapping[str, str] = MappingProxyType(
    {"a100": "a100-80gb", "h100": "h100-80gb", "v100": "v100-16gb", "p100": "p100-16gb", "gh200": "gh200-96gb"}
)

# cuda: any GPU of compute capability ≥ 8.0; cpu: a machine without a GPU
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "cuda": Device("cuda", None, (8, 0)),
        "cpu": Device("cpu", None, None),
        **{name: Device(name, mib * MIB, capability) for name, (mib, capability) in _MIB_AND_CAPABILITY.items()},
    }
)


def device_named(name: str) -> Device:
    """Return a device by name; `UsageError` lists the nearest names."""
    wanted = name.lower().replace(" ", "-").replace("_", "-").removeprefix("nvidia-")
    wanted = ALIASES.get(wanted, wanted)
    if wanted in DEVICES:
        return DEVICES[wanted]
    parts = [one for one in DEVICES if wanted and wanted in one]
    near = parts or get_close_matches(wanted, DEVICES, n=4, cutoff=0.4) or list(DEVICES)
    raise UsageError(f"unknown device = {name!r}; choose from {', '.join(near)}")


def smallest_with(memory_bytes: int, *, bf16: bool = False) -> Device | None:
    """Return the smallest device with these bytes free, or None; ``bf16`` requires bf16."""
    known = [one for one in DEVICES.values() if one.memory_bytes is not None and (one.has_flash or not bf16)]
    fitting = [one for one in known if one.memory_bytes and one.memory_bytes - one.taken_bytes >= memory_bytes]
    return min(fitting, key=lambda one: one.memory_bytes or 0, default=None)
