"""NVML's view of an NVIDIA GPU, through nvidia-ml-py (`pynvml`, extra ``gpu``).

Unknown answers are None or an empty list.
"""

from __future__ import annotations

import functools
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from bssearch.records import DeviceUse
from bssearch.training.process_times import MPS_SERVER, children_of, found_in

T = TypeVar("T")

# 16-bit matrix products alone bring a large GPU to its power limit, so a power cap does not show other work.
POWER_CAP = "power cap"

# Reasons for a lower clock that slow computation; idling and a clock set by a person do not count.
SLOWDOWNS = {
    "nvmlClocksEventReasonSwPowerCap": POWER_CAP,
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSyncBoost": "sync boost group",
    "nvmlClocksEventReasonSwThermalSlowdown": "software thermal slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}

_WORKER = "bssearch.executors.worker"
_TRIAL_MODULES = "bssearch.executors."  # modules of workers and hosts of scripts


def other_processes(device: torch.device) -> list[tuple[int, str]] | None:
    """Return the id and name of other programs that compute on a device, or None if unknown.

    The list leaves out this process's ancestors and descendants, and the driver's workers.
    """
    listed = listed_processes(device)
    if listed is None or (os.getpid() not in listed and torch.cuda.memory_reserved(device) > 0):
        return None
    return _named(listed)


def computing_processes(device: torch.device, since: float) -> list[tuple[int, str]]:
    """Return the id and name of other programs that computed after ``since``.

    ``since`` is in seconds of `time.time`.
    """
    begun = int(since * 1e6)
    samples = _ask(device, lambda library, handle: library.nvmlDeviceGetProcessUtilization(handle, begun))
    found = {int(one.pid) for one in samples or () if one.smUtil > 0}
    return _named(found) if os.getpid() in found else []


def listed_processes(device: torch.device) -> set[int] | None:
    listed = _ask(device, lambda library, handle: library.nvmlDeviceGetComputeRunningProcesses(handle))
    return None if listed is None else {int(process.pid) for process in listed}


def _named(processes: set[int]) -> list[tuple[int, str]]:
    if processes <= {os.getpid()}:
        return []
    found = [(pid, _name(pid)) for pid in sorted(processes - _family())]
    return [(pid, name) for pid, name in found if name not in {None, MPS_SERVER}]


def throttle_reasons(device: torch.device) -> list[str] | None:
    def read(library: Any, handle: Any) -> list[str]:
        active = int(library.nvmlDeviceGetCurrentClocksEventReasons(handle))
        return [words for name, words in SLOWDOWNS.items() if active & int(getattr(library, name))]

    return _ask(device, read)


def total_energy_joules(device: torch.device) -> float | None:
    millijoules = _ask(device, lambda library, handle: library.nvmlDeviceGetTotalEnergyConsumption(handle))
    return millijoules / 1e3 if millijoules else None


def clock_mhz(device: torch.device) -> float | None:
    megahertz = _ask(device, lambda library, handle: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM))
    return float(megahertz) if megahertz else None


def device_uuid(device: torch.device) -> str:
    uuid = _ask(device, lambda library, handle: library.nvmlDeviceGetUUID(handle))
    if uuid is not None:
        return uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    # without NVML, a MIG slice looks like a full GPU
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _ask(device: torch.device, read: Callable[[Any, Any], T]) -> T | None:
    library = _library() if device.type == "cuda" else None
    if library is None:
        return None
    try:
        # look a device up by UUID, because NVML numbers all devices, and torch only visible devices
        return read(library, _handle_of(library, str(torch.cuda.get_device_properties(device).uuid)))
    except (library.NVMLError, AttributeError):  # AttributeError: the library predates a function or a name
        return None


@functools.cache
def _library() -> Any | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


@functools.cache
def _handle_of(library: Any, uuid: str) -> Any:
    try:
        return library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except library.NVMLError:
        return library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _family() -> set[int]:
    own = psutil.Process()
    family = {own.pid, *(parent.pid for parent in own.parents())}
    family |= {child.pid for child in own.children(recursive=True)}
    parent = own.parent()
    for sibling in parent.children() if parent else []:
        with suppress(psutil.Error):
            if _WORKER in sibling.cmdline():
                family |= {sibling.pid, *(child.pid for child in sibling.children(recursive=True))}
    return family


def other_drivers() -> list[int]:
    """Return the process ids of other bssearch drivers that run trials on this machine."""
    running = [pid for pid in psutil.pids() if _runs_trials(pid)]
    if set(running) <= {*children_of(os.getppid())}:  # only our driver's workers: psutil takes 20 ms for the rest
        return []
    family, parents = _family(), set[int]()
    for pid in {*running} - family:
        with suppress(psutil.Error):
            parents.add(psutil.Process(pid).ppid())
    return sorted(parents - family - {*running})  # a script's or rank's parent is a worker


def _runs_trials(pid: int) -> bool:
    return found_in(Path(f"/proc/{pid}/cmdline"), rf"(?:^|\0)({re.escape(_TRIAL_MODULES)})") is not None


def _name(pid: int) -> str | None:
    try:
        return f"{psutil.Process(pid).name()}{' of another bssearch driver' if _runs_trials(pid) else ''}"
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return "of another user"


class DeviceMeter:
    """Reads a device's clock, slowdowns and energy over a trial.

    Call `sample` at evaluations, while the device is warm. The energy is summed over the device and ``others``.
    """

    def __init__(
        self, device: torch.device, now: Callable[[], float] = time.perf_counter, *, others: Iterable[torch.device] = ()
    ) -> None:
        self._device = device
        self._devices = [device, *others]
        self._now = now
        self.start()

    def start(self) -> None:
        self._joules = self._seconds = self._began = 0.0
        self._counter: float | None = None
        self._clocks: list[float] = []
        self._reasons: dict[str, None] | None = None

    def begin(self) -> None:
        self._counter, self._began = self._all_joules(), self._now()

    def end(self) -> None:
        before, now = self._counter, self._all_joules()
        if before is not None and now is not None:
            self._joules += now - before
            self._seconds += self._now() - self._began

    def _all_joules(self) -> float | None:
        found = [total_energy_joules(device) for device in self._devices]
        known = [joules for joules in found if joules is not None]
        return sum(known) if len(known) == len(found) else None

    def sample(self) -> None:
        clock = clock_mhz(self._device)
        if clock is not None:
            self._clocks.append(clock)
        reasons = throttle_reasons(self._device)
        if reasons is not None:
            self._reasons = (self._reasons or {}) | dict.fromkeys(reasons)

    def state(self) -> dict[str, Any]:
        reasons = None if self._reasons is None else list(self._reasons)
        return {"joules": self._joules, "seconds": self._seconds, "clocks": self._clocks, "reasons": reasons}

    def restore(self, state: dict[str, Any]) -> None:
        self._joules += state["joules"]
        self._seconds += state["seconds"]
        self._clocks = [*state["clocks"], *self._clocks]
        if state["reasons"] is not None:
            self._reasons = dict.fromkeys(state["reasons"]) | (self._reasons or {})

    def stop(self) -> DeviceUse:
        """Return the device use since the start, with the energy of train segments only."""
        joules = self._joules if self._joules > 0 else None
        return DeviceUse(
            energy_joules=joules,
            mean_power_watts=joules / self._seconds if joules is not None and self._seconds > 0 else None,
            mean_clock_mhz=statistics.fmean(self._clocks) if self._clocks else None,
            throttle_reasons=None if self._reasons is None else ", ".join(self._reasons),
        )
