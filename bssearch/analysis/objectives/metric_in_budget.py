"""The best metric within a budget."""

from __future__ import annotations

import math

from bssearch.analysis.objectives.base import LARGEST_LOG_RATIO, Objective
from bssearch.analysis.objectives.seconds import ran_to_its_end
from bssearch.errors import UsageError
from bssearch.records import ProbeRecord, Target, TrialRecord
from bssearch.records.intervals import FLAT_RATIO

AS_GOOD = 0.005
"""Share of the target's value that is 5 % by `log`."""


class MetricInBudget(Objective):
    """The best validation metric at the full limit, signed so that less is better.

    Trials that stopped early have no figure. The target's value only scales differences.
    """

    name = "metric_in_budget"
    axis_title = "metric in the budget"
    digits = 4
    stops_at_target = False
    has_ratios = False

    def title(self, metric: str, wanted: str) -> str:
        """Name the metric."""
        return f"{metric} in the budget"

    def sentence(self, metric: str, reaches_target: str, figure: str) -> str:
        """Name the metric reached."""
        return f"comes to {metric} {figure} in the budget"

    def figure(self, trial: TrialRecord) -> float | None:
        """Best metric of a completed trial, negated if more is better."""
        if trial.outcome is None or trial.outcome.best_metric is None or not ran_to_its_end(trial):
            return None
        return -self._target.gain(trial.outcome.best_metric)

    def bound(self, trial: TrialRecord) -> None:
        """None: a stopped trial could have reached any better metric."""
        return

    def shown(self, figure: float) -> float:
        """Metric."""
        return self._target.gain(-figure)

    def in_own_unit(self) -> Objective:
        """Objective of plain metrics, compared as ratios if positive."""
        return _MetricItself(self.target, self.price_per_device_hour, self.common)

    def log(self, figure: float) -> float | None:
        """Figure over `AS_GOOD` of the target's value, in units of log 1.05."""
        return figure * self._scale

    def from_log(self, value: float) -> float:
        """Invert `log`."""
        return value / self._scale

    def ratio(self, figure: float, other: float) -> float:
        """1.05 to the power of the difference in `AS_GOOD` of the target's value."""
        return math.exp(max(-LARGEST_LOG_RATIO, min(LARGEST_LOG_RATIO, (figure - other) * self._scale)))

    def is_flat(self, figure: float, least: float) -> bool:
        """True within `AS_GOOD` of the target's value."""
        return (figure - least) * self._scale <= math.log(FLAT_RATIO)

    def seconds_as_good_as(self, best: TrialRecord | None, probe: ProbeRecord, full: float) -> float:
        """Full limit: only the metric there counts."""
        return full

    def check_target(self, trial: TrialRecord) -> None:
        """A target met before the first step ends no trial."""

    @property
    def _target(self) -> Target:
        if self.target is None:
            raise UsageError("metric_in_budget needs a target: it names the metric and which way it is better")
        return self.target

    @property
    def _scale(self) -> float:
        value = abs(self._target.value) or 1.0
        return math.log(FLAT_RATIO) / max(AS_GOOD * value, 1e-100)


class _MetricItself(MetricInBudget):
    def figure(self, trial: TrialRecord) -> float | None:
        found = super().figure(trial)
        return None if found is None else self.shown(found)

    def log(self, figure: float) -> float | None:
        return Objective.log(self, figure)

    def from_log(self, value: float) -> float:
        return Objective.from_log(self, value)
