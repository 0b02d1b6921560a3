"""A fake module `pynvml`, and a fake CUDA device."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bssearch.training import nvml

CUDA = torch.device("cuda:0")

REASONS = {
    "GpuIdle": 0x001,
    "ApplicationsClocksSetting": 0x002,
    "SwPowerCap": 0x004,
    "HwSlowdown": 0x008,
    "SyncBoost": 0x010,
    "SwThermalSlowdown": 0x020,
    "HwThermalSlowdown": 0x040,
    "HwPowerBrakeSlowdown": 0x080,
    "DisplayClockSetting": 0x100,
}
"""Reasons for the current clock, with NVML's values (nvml.h)."""


@dataclass
class FakeNvml:
    """Devices by NVML's identifier; the device does not support figures that are None."""

    processes: dict[str, list[int]] = field(default_factory=lambda: {"GPU-0": []})
    computing: dict[str, dict[int, int]] = field(default_factory=dict)
    """Percent of a device's time for each process, since any moment."""
    lists_processes: bool = True
    reasons: int | None = 0
    millijoules: int | None = 5_000
    megahertz: int | None = 1_980
    has_driver: bool = True

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace `pynvml`, and give CUDA devices the UUIDs 0, 1, …"""
        module: Any = ModuleType("pynvml")

        class NVMLError(Exception):
            pass

        def supported(value: int | None) -> int:
            if value is None:
                raise NVMLError("Not Supported")
            return value

        def init() -> None:
            supported(1 if self.has_driver else None)

        def handle(uuid: str) -> str:
            supported(1 if uuid in self.processes else None)
            return uuid

        module.NVMLError = NVMLError
        module.NVML_CLOCK_SM = 1
        module.nvmlInit = init
        module.nvmlDeviceGetHandleByUUID = handle
        module.nvmlDeviceGetUUID = lambda uuid: uuid
        module.nvmlDeviceGetComputeRunningProcesses = lambda uuid: [
            SimpleNamespace(pid=pid) for pid in self.processes[uuid] if supported(1 if self.lists_processes else None)
        ]
        module.nvmlDeviceGetProcessUtilization = lambda uuid, since: [
            SimpleNamespace(pid=pid, smUtil=share) for pid, share in self.computing.get(uuid, {}).items()
        ]
        module.nvmlDeviceGetCurrentClocksEventReasons = lambda uuid: supported(self.reasons)
        module.nvmlDeviceGetTotalEnergyConsumption = lambda uuid: supported(self.millijoules)
        module.nvmlDeviceGetClockInfo = lambda uuid, clock: supported(self.megahertz)
        for name, bit in REASONS.items():
            setattr(module, f"nvmlClocksEventReason{name}", bit)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(uuid=str(torch.device(device).index or 0)),
        )
        nvml._library.cache_clear()
        monkeypatch.setattr(nvml, "_library", nvml._library.__wrapped__)
