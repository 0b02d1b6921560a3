"""The use of a device by a trial: energy, power, clock, and the reasons for which it was slowed down."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from bssearch.records import DeviceUse
from bssearch.training import nvml


class DeviceMeter:
    """Reads a device's own counters over a trial; without NVML everything is None.

    `start`, then `sample` at each evaluation while the device is still warm from the training, then `stop`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start()

    def start(self) -> None:
        """Begin anew."""
        self._joules = nvml.total_energy_joules(self._device)
        self._clocks: list[float] = []
        self._reasons: dict[str, None] | None = None

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
        return {"joules": self._joules_since_start(), "clocks": self._clocks, "reasons": reasons}

    def restore(self, state: dict[str, Any]) -> None:
        """Add what was read in an earlier part of the trial, on this device or another."""
        if self._joules is not None:
            self._joules -= state["joules"] or 0.0
        self._clocks = [*state["clocks"], *self._clocks]
        if state["reasons"] is not None:
            self._reasons = dict.fromkeys(state["reasons"]) | (self._reasons or {})

    def stop(self, wall_seconds: float) -> DeviceUse:
        """Return the use since the start, which was ``wall_seconds`` ago.

        The energy is the whole device's. It is None where the counter, which some devices step a few times a second,
        has not moved.
        """
        joules = self._joules_since_start()
        return DeviceUse(
            energy_joules=joules,
            mean_power_watts=joules / wall_seconds if joules is not None and wall_seconds > 0 else None,
            mean_clock_mhz=statistics.fmean(self._clocks) if self._clocks else None,
            throttle_reasons=None if self._reasons is None else ", ".join(self._reasons),
        )

    def _joules_since_start(self) -> float | None:
        now = nvml.total_energy_joules(self._device)
        if now is None or self._joules is None or now <= self._joules:
            return None
        return now - self._joules
