"""The objectives that a study can minimise, and the seconds to the target."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from bssearch import registry
from bssearch.errors import LaunchError, SpecError, required
from bssearch.records import (
    FLAT_RATIO,
    Configuration,
    ProbeRecord,
    SecondsBasis,
    Target,
    TrialRecord,
    TrialState,
    batch_schedule_of,
    grouped,
    model_parameters,
)
from bssearch.records.step_times import (
    PooledStepTime,
    StepSeconds,
    TrialPace,
    pool_paces,
    split,
    steps_at_first_size,
    timed_as,
)
from bssearch.spec import StudySpec

# Seconds by bssearch's clock, by steps × step time, by a program's wall clock, or by a program's report
Basis = Literal["measured", "steps_x_step_time", "wall", "reported"]

FEW = 0.25  # a lower share of contended runs moves a geometric mean by less than 3 % if step times are 10 % off

WHOLE = 0.98  # a run counts as whole from this share of the limit on; device and host clocks differ by less


def seconds_to_target(trial: TrialRecord, basis: Basis | None = None) -> float | None:
    """Return the seconds to the target; None unless the trial reached the target and the seconds are known."""
    if trial.outcome is None or trial.state is not TrialState.REACHED:
        return None
    if (basis or trial_basis(trial)) == "steps_x_step_time":
        return trial.steps_x_step_time_s
    return trial.outcome.time_to_target_s


def trial_basis(trial: TrialRecord) -> Basis:
    """Return the basis of a trial's seconds.

    The basis is steps × step time only for a contended trial with unknown CPU waits and a known step time.
    """
    outcome = trial.outcome
    if outcome is not None and outcome.seconds_basis is not None:
        return "wall" if outcome.seconds_basis is SecondsBasis.WALL else "reported"
    disturbed = outcome is not None and outcome.contended and outcome.undelayed_train_seconds is None
    return "steps_x_step_time" if disturbed and trial.steps_x_step_time_s is not None else "measured"


Kind = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class CommonSeconds:
    """Seconds as steps × a common step time.

    ``pooled`` has step times by `kind_of`, corrected for slowdowns. If ``pooled`` is None, ``step_seconds`` apply.
    """

    step_seconds: StepSeconds
    pooled: Mapping[Kind, PooledStepTime[Kind]] | None = None

    @property
    def in_words(self) -> str:
        if self.pooled is None:
            return "steps × step time"
        return "steps × step time, corrected for CPU wait and core speed"

    def step_time(self, trial: TrialRecord) -> PooledStepTime[Kind] | None:
        if self.pooled is not None:
            return self.pooled.get(kind_of(trial.configuration))
        place = *split(trial.configuration), *model_parameters(trial.configuration)
        seconds = self.step_seconds.get(place)
        return None if seconds is None else PooledStepTime(place, seconds, 0.0, math.inf, 0.0)

    def seconds(self, trial: TrialRecord, steps: int) -> float | None:
        step_time, equal = self.step_time(trial), steps_at_first_size(trial.configuration, steps, self.step_seconds)
        return None if step_time is None or equal is None else equal * step_time.seconds


def kind_of(configuration: Configuration) -> Kind:
    one = configuration
    switches = sorted(
        (name, value if isinstance(value, bool | str) else value is not None)
        for name, value in one.parameters.items()
        if not name.startswith("model.")
    )
    regularised = one.dropout > 0, one.label_smoothing > 0
    model = model_parameters(one)
    return (*split(one), one.optimizer, *regularised, one.parameters.get("momentum", 0) == 0, *switches, *model)


def _common_seconds(
    runs: Sequence[TrialRecord], step_seconds: StepSeconds, others: Iterable[TrialRecord] = ()
) -> CommonSeconds | None:
    # Common seconds for comparing runs; None if runs compare by own seconds. With known CPU waits and reference kernel
    # times, runs compare by steps × the step time pooled over each kind, with `others`. Else runs compare by own
    # seconds, unless more than `FEW` of a configuration's runs were contended. Then runs compare by steps × step time,
    # from `step_seconds`, else from the newest run.
    paces: dict[Kind, dict[int, TrialPace]] = defaultdict(dict)
    for trial in (*runs, *others):
        if (pace := _pace(trial, step_seconds)) is not None:
            paces[kind_of(trial.configuration)][trial.number] = pace
    counted = [
        run for run in runs if run.outcome is not None and (run.state is TrialState.REACHED or run.outcome.steps)
    ]
    compared = {kind_of(run.configuration) for run in counted}
    if counted and compared <= paces.keys() and all(run.number in paces[kind_of(run.configuration)] for run in counted):
        return CommonSeconds(
            step_seconds, pool_paces({kind: list(found.values()) for kind, found in paces.items()}, compared)
        )
    shared = grouped((run.configuration.key, run.outcome is not None and run.outcome.contended) for run in runs)
    if all(sum(one) <= FEW * len(one) for one in shared.values()):
        return None
    of_runs = {
        timed_as(run.configuration): run.steps_x_step_time_s / run.outcome.steps_to_target
        for run in sorted(runs, key=lambda run: run.number)
        if run.outcome is not None and run.outcome.steps_to_target and run.steps_x_step_time_s is not None
    }
    products = CommonSeconds({**of_runs, **step_seconds})
    is_known = all(
        products.step_time(run) is not None
        and steps_at_first_size(run.configuration, 1, products.step_seconds) is not None
        for run in runs
    )
    return products if is_known else None


def _pace(trial: TrialRecord, step_seconds: StepSeconds) -> TrialPace | None:
    outcome = trial.outcome
    if outcome is None or not (outcome.steps and outcome.undelayed_train_seconds and outcome.reference_seconds):
        return None
    if (steps := steps_at_first_size(trial.configuration, outcome.steps, step_seconds)) is None:
        return None
    return TrialPace(
        steps=steps,
        step_seconds=outcome.train_seconds / steps,
        undelayed_step_seconds=outcome.undelayed_train_seconds / steps,
        reference_seconds=outcome.reference_seconds,
        contended=outcome.contended,
        number=trial.number,
    )


def ran_to_its_end(trial: TrialRecord) -> bool:
    """True if a trial trained to the limit or the schedule's horizon, with or without reaching the target."""
    if trial.outcome is None or trial.state is not TrialState.REACHED:
        return trial.state is TrialState.EXHAUSTED
    horizon = trial.configuration.parameters.get("horizon_samples")
    if isinstance(horizon, int | float) and trial.outcome.samples >= horizon:
        return True
    return trial.outcome.train_seconds >= WHOLE * trial.train_seconds_limit


LARGEST_LOG_RATIO = 300.0  # the square is finite in double precision


def bounded_ratio(log_ratio: float) -> float:
    return math.exp(max(-LARGEST_LOG_RATIO, min(LARGEST_LOG_RATIO, log_ratio)))


@dataclass(frozen=True)
class Objective(ABC):
    """An objective, which gives each trial a figure to minimise.

    `log` maps figures that count as 5 % apart to values log 1.05 apart.
    """

    name: ClassVar[str]
    own_unit: ClassVar[str] = ""  # with a leading space

    comparative: ClassVar[tuple[str, str]] = ("better", "worse")  # words for smaller and larger figures

    equal: ClassVar[str] = "the same as"
    phrase: ClassVar[str] = "with {}"

    axis_title: ClassVar[str]
    exceeds: ClassVar[str] = "more"  # word for figures above a lower bound

    digits: ClassVar[int] = 3  # significant digits

    # True if the figure grows with train seconds at the same rate at every batch size, as pausing, racing and the
    # time-model sampler require.
    trials_race: ClassVar[bool] = False

    stops_at_target: ClassVar[bool] = True  # True if a trial ends at the target, not at the limit

    has_ratios: ClassVar[bool] = True

    target: Target | None = None
    price_per_device_hour: float | None = None
    common: CommonSeconds | None = None

    @property
    def unit(self) -> str:
        """The unit of `shown` with a leading space; empty for a figure without unit."""
        return self.own_unit

    @property
    def noun(self) -> str:
        """The noun in a phrase such as "1.3× the time of the optimum"."""
        return self.name.partition("_")[0]

    @property
    def label(self) -> str:
        return self.name.replace("_", " ").capitalize()

    def title(self, metric: str, wanted: str) -> str:
        return f"{self.noun.capitalize()} to {wanted}"

    def sentence(self, metric: str, reaches_target: str, figure: str) -> str:
        return f"{reaches_target} {self.phrase.format(figure)}"

    @abstractmethod
    def figure(self, trial: TrialRecord) -> float | None:
        """A trial's figure, if known."""

    @abstractmethod
    def bound(self, trial: TrialRecord) -> float | None:
        """The figure at a censored trial's last evaluation, a lower bound; None if unknown."""

    def shown(self, figure: float) -> float:
        """The figure in the users' unit."""
        return figure

    def in_own_unit(self) -> Objective:
        """The objective with figures in the users' unit, for ratios."""
        return self

    def log(self, figure: float) -> float | None:
        """The figure on a scale with equal seed-to-seed spread; None unless the figure is positive."""
        return math.log(figure) if figure > 0 else None

    def log_figure(self, trial: TrialRecord) -> float | None:
        """`log` of a trial's figure; None if the figure is unknown or has no `log`."""
        figure = self.figure(trial)
        return None if figure is None else self.log(figure)

    def log_bound(self, trial: TrialRecord) -> float | None:
        """`log` of a trial's figure, else of `bound`; None if the value is unknown or has no `log`."""
        figure = self.figure(trial)
        known = self.bound(trial) if figure is None else figure
        return None if known is None else self.log(known)

    def from_log(self, value: float) -> float:
        return math.exp(min(value, 2 * LARGEST_LOG_RATIO))

    def ratio(self, figure: float, other: float) -> float:
        """The factor by which a figure is worse than another."""
        return figure / other

    def is_flat(self, figure: float, least: float) -> bool:
        return figure <= FLAT_RATIO * least

    def between(
        self, runs: Sequence[TrialRecord], step_seconds: StepSeconds, others: Iterable[TrialRecord] = ()
    ) -> Self:
        """The objective that compares ``runs`` by common step times, or by each run's own seconds."""
        common = _common_seconds(runs, step_seconds, others)
        return self if common is None else replace(self, common=common)

    def basis(self, trial: TrialRecord) -> Basis:
        is_product = self.common is not None and self.common.step_time(trial) is not None
        return "steps_x_step_time" if is_product else trial_basis(trial)

    def step_time(self, trial: TrialRecord) -> PooledStepTime[Kind] | None:
        """The common step time that gives a trial's figure, if any."""
        return None

    def predicted(self, steps: float, batch_size: float, step_seconds: float | None) -> float | None:
        """The figure after ``steps`` on one device; None if steps and step time do not determine the figure."""
        return None

    def seconds_as_good_as(self, best: TrialRecord | None, probe: ProbeRecord, full: float) -> float:
        """Train seconds after which a trial cannot beat ``best``: ``full`` by default, infinite if ``best`` is None."""
        return math.inf if best is None else full

    def target_problem(self, trial: TrialRecord) -> SpecError | None:
        """An error if a trial met the target before the first step."""
        if self.target is None or trial.outcome is None or trial.outcome.steps_to_target != 0:
            return None
        return SpecError(
            f"target.value = {self.target.value:g} is met before the first step: "
            f"trial {trial.number} starts with {self.target.metric} = {trial.outcome.best_metric:.4g}",
            hint="run a new study with a harder target",
        )

    def measurement_problem(self, trial: TrialRecord, device_name: str) -> LaunchError | None:
        """An error if a trial shows that the device cannot measure the figure."""
        return None


def make_objective(name: str, target: Target | None = None, price_per_device_hour: float | None = None) -> Objective:
    kind = registry.load_class("objectives", name, Objective)  # type: ignore[type-abstract]
    return kind(target=target, price_per_device_hour=price_per_device_hour)


def objective_of(spec: StudySpec, target: Target | None = None) -> Objective:
    return make_objective(spec.objective, target or spec.record_target, spec.price_per_device_hour)


class BySeconds(Objective):
    """An objective whose figure depends on the seconds to the target."""

    @abstractmethod
    def of_seconds(self, trial: TrialRecord, seconds: float) -> float | None: ...

    def figure(self, trial: TrialRecord) -> float | None:
        outcome = trial.outcome
        if outcome is None or trial.state is not TrialState.REACHED:
            return None
        seconds = self._product(trial, outcome.steps_to_target)
        seconds = seconds_to_target(trial) if seconds is None else seconds
        return None if seconds is None else self.of_seconds(trial, seconds)

    def bound(self, trial: TrialRecord) -> float | None:
        """The figure at a censored trial's last evaluation, if known; a contended trial needs a common step time."""
        outcome = trial.outcome
        if outcome is None or not trial.state.is_censored:
            return None
        seconds = self._product(trial, outcome.last_miss_step)
        if seconds is None and not outcome.contended:
            seconds = outcome.last_miss_seconds
        return None if seconds is None else self.of_seconds(trial, seconds)

    def step_time(self, trial: TrialRecord) -> PooledStepTime[Kind] | None:
        return None if self.common is None else self.common.step_time(trial)

    def _product(self, trial: TrialRecord, steps: int | None) -> float | None:
        return None if self.common is None or steps is None else self.common.seconds(trial, steps)


class TimeToTarget(BySeconds):
    """The train seconds to the target, corrected for other work on the device if possible."""

    name = "time_to_target"
    own_unit = " s"
    comparative = ("faster", "slower")
    equal = "as fast as"
    phrase = "in {}"
    axis_title = "train seconds to the target"
    exceeds = "longer"
    trials_race = True

    def of_seconds(self, trial: TrialRecord, seconds: float) -> float:
        return seconds

    def predicted(self, steps: float, batch_size: float, step_seconds: float | None) -> float | None:
        return None if step_seconds is None else steps * step_seconds

    def seconds_as_good_as(self, best: TrialRecord | None, probe: ProbeRecord, full: float) -> float:
        """The best trial's measured seconds to the target, even if contended; infinite if unknown."""
        seconds = None if best is None else seconds_to_target(best, "measured")
        return math.inf if seconds is None else seconds


TIME = TimeToTarget()


def least_of(trials: Iterable[TrialRecord], objective: Objective = TIME) -> TrialRecord | None:
    known = [(value, trial.number, trial) for trial in trials if (value := objective.figure(trial)) is not None]
    return min(known)[2] if known else None


class CostToTarget(TimeToTarget):
    """Device-hours × the price per device-hour, or device-hours if no price is set."""

    name = "cost_to_target"
    comparative = ("cheaper", "dearer")
    equal = "the same as"
    phrase = "at a cost of {}"
    axis_title = "cost to the target"
    exceeds = "more"

    @property
    def unit(self) -> str:
        return " device-hours" if self.price_per_device_hour is None else ""

    def of_seconds(self, trial: TrialRecord, seconds: float) -> float:
        return seconds * trial.configuration.world_size * self._price / 3600

    def predicted(self, steps: float, batch_size: float, step_seconds: float | None) -> float | None:
        return None if step_seconds is None else steps * step_seconds * self._price / 3600

    @property
    def _price(self) -> float:
        return self.price_per_device_hour or 1.0


class EnergyToTarget(BySeconds):
    """The device's mean power × the seconds to the target, in joules."""

    name = "energy_to_target"
    own_unit = " J"
    comparative = ("less energy", "more energy")
    axis_title = "joules to the target"

    def of_seconds(self, trial: TrialRecord, seconds: float) -> float | None:
        power = None if trial.outcome is None else trial.outcome.device_use.mean_power_watts
        return None if power is None else power * seconds

    def measurement_problem(self, trial: TrialRecord, device_name: str) -> LaunchError | None:
        if trial.outcome is None or trial.state is not TrialState.REACHED or self.figure(trial) is not None:
            return None
        return LaunchError(
            f"objective = energy_to_target: {device_name} reports no power, so the energy of trial {trial.number} is "
            "unknown",
            hint="use a CUDA device and install the extra gpu, or run a new study with objective time_to_target or "
            "cost_to_target",
        )


class SamplesToTarget(Objective):
    """The training samples to the target, whatever the device."""

    name = "samples_to_target"
    own_unit = " samples"
    comparative = ("fewer samples", "more samples")
    axis_title = "training samples to the target"

    def figure(self, trial: TrialRecord) -> float | None:
        if trial.outcome is None or trial.state is not TrialState.REACHED:
            return None
        return samples_after(trial, trial.outcome.steps_to_target)

    def bound(self, trial: TrialRecord) -> float | None:
        if trial.outcome is None or not trial.state.is_censored:
            return None
        return samples_after(trial, trial.outcome.last_miss_step)

    def predicted(self, steps: float, batch_size: float, step_seconds: float | None) -> float:
        return steps * batch_size

    def seconds_as_good_as(self, best: TrialRecord | None, probe: ProbeRecord, full: float) -> float:
        """The seconds for the best trial's samples at the probed batch size.

        The result is infinite if the samples are unknown, and ``full`` if the batch size is not timed.
        """
        if best is None or probe.step_seconds is None:
            return super().seconds_as_good_as(best, probe, full)
        samples = self.figure(best)
        return math.inf if samples is None else samples / probe.batch_size * probe.step_seconds


def samples_after(trial: TrialRecord, steps: int | None) -> float | None:
    """Return the planned samples in a trial's first ``steps``, scaled by the whole trial's actual / planned samples."""
    if steps is None or trial.outcome is None:
        return None
    planned = _planned(trial, steps)
    whole = _planned(trial, trial.outcome.steps)
    return planned * (trial.outcome.samples / whole) if whole and trial.outcome.samples else planned


def _planned(trial: TrialRecord, steps: int) -> float:
    schedule = batch_schedule_of(trial.configuration)
    if schedule is None or schedule.is_measured:
        return float(steps * trial.configuration.batch_size)
    return schedule.samples_after(steps)


AS_GOOD = 0.005  # this share of the target's value is a difference of 5 % by `log`


class MetricInBudget(Objective):
    """The best validation metric within the full limit of train seconds, negated if the goal is to maximise.

    Trials that ended early have no figure.
    """

    name = "metric_in_budget"
    axis_title = "metric in the budget"
    digits = 4
    stops_at_target = False
    has_ratios = False

    def title(self, metric: str, wanted: str) -> str:
        return f"{metric} in the budget"

    def sentence(self, metric: str, reaches_target: str, figure: str) -> str:
        return f"reaches {metric} {figure} in the budget"

    def figure(self, trial: TrialRecord) -> float | None:
        if trial.outcome is None or trial.outcome.best_metric is None or not ran_to_its_end(trial):
            return None
        return -self._target.gain(trial.outcome.best_metric)

    def bound(self, trial: TrialRecord) -> None:
        """None, because a stopped trial could still have reached any metric."""

    def shown(self, figure: float) -> float:
        return self._target.gain(-figure)

    def in_own_unit(self) -> Objective:
        """A copy of the objective without negated metrics, for ratios of positive metrics."""
        return _MetricItself(self.target, self.price_per_device_hour, self.common)

    def log(self, figure: float) -> float | None:
        """The figure, scaled so that `AS_GOOD` × the target's value becomes log 1.05."""
        return figure * self._scale

    def from_log(self, value: float) -> float:
        return value / self._scale

    def ratio(self, figure: float, other: float) -> float:
        """Return 1.05 to the power of the difference in units of `AS_GOOD` × the target's value."""
        return bounded_ratio((figure - other) * self._scale)

    def is_flat(self, figure: float, least: float) -> bool:
        return (figure - least) * self._scale <= math.log(FLAT_RATIO)

    def seconds_as_good_as(self, best: TrialRecord | None, probe: ProbeRecord, full: float) -> float:
        return full

    def target_problem(self, trial: TrialRecord) -> None:
        """None, because trials train past the target."""

    @property
    def _target(self) -> Target:
        return required(self.target, "metric_in_budget needs a target; pass target=Target(...)")

    @property
    def _scale(self) -> float:
        return math.log(FLAT_RATIO) / max(AS_GOOD * (abs(self._target.value) or 1.0), 1e-100)


class _MetricItself(MetricInBudget):
    def figure(self, trial: TrialRecord) -> float | None:
        found = super().figure(trial)
        return None if found is None else self.shown(found)

    def log(self, figure: float) -> float | None:
        return Objective.log(self, figure)

    def from_log(self, value: float) -> float:
        return Objective.from_log(self, value)
