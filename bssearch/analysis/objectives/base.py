"""The interface of an objective: the figure of a trial that a study minimises.

A new objective is a subclass of `Objective` and a line in `bssearch.registry` or an entry point
``bssearch.objectives``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from bssearch import registry
from bssearch.analysis.objectives.seconds import Basis, CommonSeconds, Kind, common_seconds, trial_basis
from bssearch.errors import SpecError
from bssearch.records import ProbeRecord, Target, TrialRecord
from bssearch.records.intervals import FLAT_RATIO
from bssearch.records.step_times import PooledStepTime, StepSeconds
from bssearch.spec import StudySpec

LARGEST_LOG_RATIO = 300.0
"""Squares stay finite in double precision."""


@dataclass(frozen=True)
class Objective(ABC):
    """A figure of a trial to minimise.

    Figures are compared by `log`: a difference of log 1.05 is 5 %. With ``common``, all seconds are of that kind; see
    `between`.
    """

    name: ClassVar[str]
    own_unit: ClassVar[str] = ""
    """With a leading space."""

    comparative: ClassVar[tuple[str, str]] = ("better", "worse")
    """Smaller and larger."""

    equal: ClassVar[str] = "the same as"
    phrase: ClassVar[str] = "with {}"

    axis_title: ClassVar[str]
    exceeds: ClassVar[str] = "more"
    """Above a lower bound."""

    digits: ClassVar[int] = 3
    """Significant digits."""

    trials_race: ClassVar[bool] = False
    """Whether the figure grows with train seconds at the same rate at every batch size. Pausing, racing and the
    sampler's model of time apply only then.
    """

    stops_at_target: ClassVar[bool] = True
    """Whether a trial ends at its target instead of its limit."""

    has_ratios: ClassVar[bool] = True

    target: Target | None = None
    price_per_device_hour: float | None = None
    common: CommonSeconds | None = None

    @property
    def unit(self) -> str:
        """Unit of `shown`, with a leading space."""
        return self.own_unit

    @property
    def noun(self) -> str:
        """ "time" in "1.3× the time of the optimum"."""
        return self.name.partition("_")[0]

    @property
    def label(self) -> str:
        """Name as a heading."""
        return self.name.replace("_", " ").capitalize()

    def title(self, metric: str, wanted: str) -> str:
        """Heading of a figure against batch size; ``wanted`` is the target in words."""
        return f"{self.noun.capitalize()} to {wanted}"

    def sentence(self, metric: str, reaches_target: str, figure: str) -> str:
        """Result in words: "reaches accuracy ≥ 0.9" becomes "reaches accuracy ≥ 0.9 in 2 s"."""
        return f"{reaches_target} {self.phrase.format(figure)}"

    @abstractmethod
    def figure(self, trial: TrialRecord) -> float | None:
        """Figure; None if the trial missed the target or the figure was not measured."""

    @abstractmethod
    def bound(self, trial: TrialRecord) -> float | None:
        """Lower bound of a stopped trial's figure, from its last miss."""

    def shown(self, figure: float) -> float:
        """Figure in the unit shown to users."""
        return figure

    def in_own_unit(self) -> Objective:
        """Objective whose figures are in the shown unit and have ratios."""
        return self

    def log(self, figure: float) -> float | None:
        """Figure on a scale with equal seed-to-seed spread; None for zero."""
        return math.log(figure) if figure > 0 else None

    def from_log(self, value: float) -> float:
        """Invert `log`."""
        return math.exp(min(value, 2 * LARGEST_LOG_RATIO))

    def ratio(self, figure: float, other: float) -> float:
        """How many times worse a figure is than another."""
        return figure / other

    def is_flat(self, figure: float, least: float) -> bool:
        """True within 5 % of the least."""
        return figure <= FLAT_RATIO * least

    def between(
        self, runs: Sequence[TrialRecord], step_seconds: StepSeconds, others: Iterable[TrialRecord] = ()
    ) -> Self:
        """Objective that compares runs by the same kind of seconds; see `common_seconds`."""
        common = common_seconds(runs, step_seconds, others)
        return self if common is None else replace(self, common=common)

    def basis(self, trial: TrialRecord) -> Basis:
        """Source of a trial's seconds."""
        is_product = self.common is not None and self.common.step_time(trial) is not None
        return "steps_x_step_time" if is_product else trial_basis(trial)

    def step_time(self, trial: TrialRecord) -> PooledStepTime[Kind] | None:
        """Step time of a trial's figure; None if its own seconds count."""
        return None

    def predicted(self, steps: float, batch_size: float, step_seconds: float | None) -> float | None:
        """Figure of a number of steps on one device, if they determine it."""
        return None

    def seconds_as_good_as(self, best: TrialRecord | None, probe: ProbeRecord, full: float) -> float:
        """Train seconds after which a trial cannot beat the best; infinite without a figure yet.

        ``full``, a trial's limit, if figures are known only at the end.
        """
        return math.inf if best is None else full

    def check_target(self, trial: TrialRecord) -> None:
        """Raise `SpecError` if a trial met the target before its first step."""
        if self.target is None or trial.outcome is None or trial.outcome.steps_to_target != 0:
            return
        raise SpecError(
            f"target.value = {self.target.value:g} is met before the first step: "
            f"trial {trial.number} starts with {self.target.metric} = {trial.outcome.best_metric:.4g}",
            hint="set a harder target, under a new name; this one needs no training",
        )

    def check_measured(self, trial: TrialRecord, device_name: str) -> None:
        """Raise `LaunchError` if a trial shows that the device cannot measure the figure."""
        return


def make_objective(name: str, target: Target | None = None, price_per_device_hour: float | None = None) -> Objective:
    """Objective by its name; raises `UsageError` if unknown."""
    kind = registry.load_class("objectives", name, Objective)  # type: ignore[type-abstract]
    return kind(target=target, price_per_device_hour=price_per_device_hour)


def objective_of(spec: StudySpec, target: Target | None = None) -> Objective:
    """Objective of a spec, for its own or an easier target."""
    return make_objective(spec.objective, target or spec.record_target, spec.price_per_device_hour)
