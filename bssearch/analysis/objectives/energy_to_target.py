"""Joules to the target."""

from __future__ import annotations

from bssearch.analysis.objectives.by_seconds import BySeconds
from bssearch.errors import LaunchError
from bssearch.records import TrialRecord, TrialState


class EnergyToTarget(BySeconds):
    """Joules of the device to the target: its mean power × the seconds. The device must report its power."""

    name = "energy_to_target"
    own_unit = " J"
    comparative = ("less energy", "more energy")
    axis_title = "joules to the target"

    def of_seconds(self, trial: TrialRecord, seconds: float) -> float | None:
        """Return mean power × seconds; None where the power is not known."""
        power = None if trial.outcome is None else trial.outcome.device_use.mean_power_watts
        return None if power is None else power * seconds

    def check_measured(self, trial: TrialRecord, device_name: str) -> None:
        """Raise `LaunchError` where a trial reached the target and the device did not report its power."""
        if trial.outcome is None or trial.state is not TrialState.REACHED or self.figure(trial) is not None:
            return
        raise LaunchError(
            f"objective = energy_to_target: {device_name} does not report its power, so that "
            f"nothing is known of what trial {trial.number} took",
            hint="a CUDA device and the extra gpu report it; time_to_target and cost_to_target take seconds alone",
        )
