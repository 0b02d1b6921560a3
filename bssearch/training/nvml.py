"""What the driver of an NVIDIA GPU says of it, by way of nvidia-ml-py: the module `pynvml`, of the extra ``gpu``.

Every function answers None or an empty list where nothing can be known: on the CPU, without the library or the driver,
and for what a device, the driver or an older library does not support.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psutil
import torch

from bssearch.records import DeviceUse
from bssearch.training import nvml

T = TypeVar("T")

POWER_CAP = "power cap"
"""A clock that the device's own power limit holds down: what matrix products in 16 bits bring a large GPU to by
themselves, and no sign of anything else at work."""

SLOWDOWNS = {
    "nvmlClocksEventReasonSwPowerCap": POWER_CAP,
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSyncBoost": "sync boost group",
    "nvmlClocksEventReasonSwThermalSlowdown": "software thermal slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
"""The reasons for a lower clock that slow a computation down; an idle device and a clock set by a person are not."""

_WORKER = "bssearch.executors.worker"


def other_processes(device: torch.device) -> list[tuple[int, str]]:
    """Return what `known_other_processes` does, and nothing also where that is unknown."""
    return known_other_processes(device) or []


def known_other_processes(device: torch.device) -> list[tuple[int, str]] | None:
    """Return process id and name of the programs computing on a device that have nothing to do with this process.

    Its ancestors and descendants have, and so have the workers of the driver that started it. None where it cannot be
    known: in a container the numbers may be those of the host, and then processes that are not seen from here are left
    out; where this process holds memory on the device but is not listed the numbers mean nothing.
    """
    listed = listed_processes(device)
    if listed is None or (os.getpid() not in listed and torch.cuda.memory_reserved(device) > 0):
        return None
    return _named(listed)


def computing_processes(device: torch.device, since: float) -> list[tuple[int, str]]:
    """Return those of `known_other_processes` that computed since a time (`time.time`), though they may hold no memory.

    NVML keeps its samples for some seconds. Nothing where it does not say, or its numbers mean nothing.
    """

    def read(library: Any, handle: Any) -> set[int]:
        samples = library.nvmlDeviceGetProcessUtilization(handle, int(since * 1e6))
        return {int(one.pid) for one in samples if one.smUtil > 0}

    found = _ask(device, read) or set()
    return _named(found) if os.getpid() in found else []


def listed_processes(device: torch.device) -> set[int] | None:
    """Return the ids of all processes that compute on a device, as NVML numbers them; None where it does not say."""

    def read(library: Any, handle: Any) -> set[int]:
        return {int(process.pid) for process in library.nvmlDeviceGetComputeRunningProcesses(handle)}

    return _ask(device, read)


def _named(processes: set[int]) -> list[tuple[int, str]]:
    """Return those of some processes that are none of ours, with their names, without those not seen from here."""
    if processes <= {os.getpid()}:
        return []
    return [(pid, name) for pid in sorted(processes - _family()) if (name := _name(pid)) is not None]


def throttle_reasons(device: torch.device) -> list[str]:
    """Return what slows a device down at this moment, in words; nothing also where that is unknown."""
    return known_throttle_reasons(device) or []


def known_throttle_reasons(device: torch.device) -> list[str] | None:
    """Return what slows a device down at this moment, in words; None where that is unknown."""

    def read(library: Any, handle: Any) -> list[str]:
        active = int(library.nvmlDeviceGetCurrentClocksEventReasons(handle))
        return [words for name, words in SLOWDOWNS.items() if active & int(getattr(library, name))]

    return _ask(device, read)


def is_power_capped(device: torch.device) -> bool:
    """Return whether a device runs at its power limit at this moment."""
    return POWER_CAP in throttle_reasons(device)


def total_energy_joules(device: torch.device) -> float | None:
    """Return the energy that the whole device has taken since the driver was loaded."""
    millijoules = _ask(device, lambda library, handle: library.nvmlDeviceGetTotalEnergyConsumption(handle))
    return millijoules / 1e3 if millijoules else None


def clock_mhz(device: torch.device) -> float | None:
    """Return the clock of the streaming multiprocessors at this moment, in MHz."""
    megahertz = _ask(device, lambda library, handle: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM))
    return float(megahertz) if megahertz else None


def device_uuid(device: torch.device) -> str:
    """Return the UUID of a CUDA device, such as ``GPU-8f6f…``; without NVML nobody tells a part of a GPU from one."""
    told = _ask(device, lambda library, handle: library.nvmlDeviceGetUUID(handle))
    if told is not None:
        return told.decode() if isinstance(told, bytes) else str(told)
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _ask(device: torch.device, read: Callable[[Any, Any], T]) -> T | None:
    library = _library() if device.type == "cuda" else None
    if library is None:
        return None
    try:
        return read(library, _handle(library, device))
    except (library.NVMLError, AttributeError):  # the latter from a library that is older than a function or a name
        return None


@functools.cache
def _library() -> Any | None:
    """Return the module, ready for use; None without it or without a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _handle(library: Any, device: torch.device) -> Any:
    """Return NVML's handle of a device, by UUID: NVML numbers all devices, torch the visible ones."""
    return _handle_of(library, str(torch.cuda.get_device_properties(device).uuid))


@functools.cache
def _handle_of(library: Any, uuid: str) -> Any:
    """Return the handle of a UUID, which NVML looks for among all devices; it stays the same."""
    try:
        return library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except library.NVMLError:
        return library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _family() -> set[int]:
    """Return the ids of this process, its ancestors, its descendants, and the workers of the same driver."""
    own = psutil.Process()
    family = {own.pid, *(parent.pid for parent in own.parents())}
    family |= {child.pid for child in own.children(recursive=True)}
    parent = own.parent()
    for sibling in parent.children() if parent else []:
        try:
            if _WORKER in sibling.cmdline():
                family |= {sibling.pid, *(child.pid for child in sibling.children(recursive=True))}
        except psutil.Error:
            continue
    return family


def _name(pid: int) -> str | None:
    """Return the name of a process, None where there is none of this number."""
    try:
        return psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return "of another user"


class DeviceMeter:
    """Reads a device's own counters over a trial; without NVML everything is None.

    `start`, then `begin` and `end` around each train segment, `sample` at each evaluation while the device is still
    warm from the training, then `stop`.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._now = now
        self.start()

    def start(self) -> None:
        """Begin anew."""
        self._joules = self._seconds = self._began = 0.0
        self._counter: float | None = None
        self._clocks: list[float] = []
        self._reasons: dict[str, None] | None = None

    def begin(self) -> None:
        """Read the counter of energy before a train segment."""
        self._counter, self._began = nvml.total_energy_joules(self._device), self._now()

    def end(self) -> None:
        """Add what the device has taken in a train segment, and its seconds."""
        before, now = self._counter, nvml.total_energy_joules(self._device)
        if before is not None and now is not None:
            self._joules += now - before
            self._seconds += self._now() - self._began

    def sample(self) -> None:
        """Read the clock and what slows the device down at this moment."""
        clock = nvml.clock_mhz(self._device)
        if clock is not None:
            self._clocks.append(clock)
        reasons = nvml.known_throttle_reasons(self._device)
        if reasons is not None:
            self._reasons = (self._reasons or {}) | dict.fromkeys(reasons)

    def state(self) -> dict[str, Any]:
        """Return what was read since the start, to be saved."""
        reasons = None if self._reasons is None else list(self._reasons)
        return {"joules": self._joules, "seconds": self._seconds, "clocks": self._clocks, "reasons": reasons}

    def restore(self, state: dict[str, Any]) -> None:
        """Add what was read in an earlier part of the trial, on this device or another."""
        self._joules += state["joules"]
        self._seconds += state["seconds"]
        self._clocks = [*state["clocks"], *self._clocks]
        if state["reasons"] is not None:
            self._reasons = dict.fromkeys(state["reasons"]) | (self._reasons or {})

    def stop(self) -> DeviceUse:
        """Return the use since the start.

        The energy is the whole device's, in the train segments alone: no compilation, evaluation or waiting. It is None
        where the counter, which some devices step a few times a second, has not moved.
        """
        joules = self._joules if self._joules > 0 else None
        return DeviceUse(
            energy_joules=joules,
            mean_power_watts=joules / self._seconds if joules is not None and self._seconds > 0 else None,
            mean_clock_mhz=statistics.fmean(self._clocks) if self._clocks else None,
            throttle_reasons=None if self._reasons is None else ", ".join(self._reasons),
        )
