"""The use of a device by a trial: energy, power, clock, and the reasons for which it was slowed down."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bssearch.records import DeviceUse
from bssearch.training import nvml


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
        if "seconds" in state:  # older files have the joules of the whole wall time
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
