"""Cost to the target: device-hours, or their price."""

from __future__ import annotations

from bssearch.analysis.objectives.time_to_target import TimeToTarget
from bssearch.records import TrialRecord


class CostToTarget(TimeToTarget):
    """Hours × devices × the price of a device-hour, in the currency of the price; device-hours without a price."""

    name = "cost_to_target"
    comparative = ("cheaper", "dearer")
    equal = "the same as"
    phrase = "at a cost of {}"
    axis_title = "cost to the target"
    exceeds = "more"

    @property
    def unit(self) -> str:
        """Return the device-hour, or nothing where a price gives a currency that the spec does not name."""
        return " device-hours" if self.price_per_device_hour is None else ""

    def of_seconds(self, trial: TrialRecord, seconds: float) -> float:
        """Return seconds × devices × price / 3600."""
        return seconds * trial.configuration.world_size * self._price / 3600

    def predicted(self, steps: float, batch_size: float, step_seconds: float | None) -> float | None:
        """Return steps × step time × price / 3600."""
        return None if step_seconds is None else steps * step_seconds * self._price / 3600

    @property
    def _price(self) -> float:
        return self.price_per_device_hour or 1.0
