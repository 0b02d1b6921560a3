"""A trial's evaluations: cadence, progress toward the target, and endings.

All trials of a batch size have one cadence in steps, so that equal seeds give equal steps.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bssearch.errors import UsageError
from bssearch.records import (
    COULD_NOT_PAUSE,
    LARGEST_METRIC,
    Configuration,
    Crossing,
    MetricInfo,
    Observation,
    ProbeRecord,
    StepTime,
    Target,
    TrialOutcome,
    TrialRequest,
    TrialState,
    crossing,
    is_metric,
    with_crossing,
)

# most evaluations in the full limit of train seconds, which locate the crossing to 0.1% of the limit
EVALUATIONS_PER_LIMIT = 1000

EVALUATION_SHARE = 0.2  # largest share of a trial's train and evaluation seconds

FEWEST_EVALUATIONS = 20  # fewest evaluations in the full limit, which locate the crossing to 5% of the limit


def eval_every_steps(step_seconds: float, evaluation_seconds: float, full_limit: float) -> int:
    """Return the optimizer steps from one evaluation to the next. ``full_limit`` is in train seconds."""
    by_number = full_limit / (EVALUATIONS_PER_LIMIT * step_seconds)
    # e / (n·t + e) ≤ share gives n ≥ e·(1/share − 1) / t.
    by_share = evaluation_seconds * (1 / EVALUATION_SHARE - 1) / step_seconds
    return max(1, math.ceil(min(max(by_number, by_share), full_limit / (FEWEST_EVALUATIONS * step_seconds))))


def probe_record(measured: StepTime, full_limit: float, cadence: int | None = None) -> ProbeRecord:
    if cadence is None and measured.step_seconds is not None and measured.evaluation_seconds is not None:
        cadence = eval_every_steps(measured.step_seconds, measured.evaluation_seconds, full_limit)
    return ProbeRecord(**asdict(measured), eval_every_steps=cadence)


CHANCE_MARGIN = 0.05  # a metric within this share of the way from chance to the target is no better than chance

WINDOW_SHARE = 0.9  # a metric is near the target after this share of the way from its start


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a trial. ``asked`` is True if the caller stopped the trial."""

    state: TrialState
    reason: str
    asked: bool = False


@dataclass(slots=True)
class CourseProgress:
    """Values that a pause keeps: last observation, best metric, memory peaks in bytes, and warnings.

    ``crossing`` and ``reached`` describe the crossing of the target, if any.
    """

    last: Observation | None = None
    best: float | None = None
    peaks: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    crossing: Crossing | None = None
    reached: str = ""

    @property
    def peak(self) -> int | None:
        return max(self.peaks, default=None)

    def note_peak(self, peak: int | None) -> None:
        if peak is not None:
            self.peaks.append(peak)

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, state: dict[str, Any]) -> None:
        last, crossing = state["last"], state["crossing"]
        self.last = None if last is None else Observation(**last)
        self.best, self.peaks, self.warnings = state["best"], state["peaks"], state["warnings"]
        self.crossing = None if crossing is None else Crossing(**crossing)
        self.reached = state["reached"]


@dataclass(slots=True)
class Approach:
    """Follows a metric from its value ``first`` toward the target."""

    target: Target
    first: float | None = None

    def is_near(self, metric: float) -> bool:
        """True if the metric covered `WINDOW_SHARE` of the way from the first call's metric to the target."""
        if self.first is None:
            self.first = metric
        return self.target.shortfall(metric) <= (1 - WINDOW_SHARE) * max(0.0, self.target.shortfall(self.first))


def not_finite(what: str, value: float) -> str:
    is_beyond = LARGEST_METRIC < abs(value) < math.inf
    return f"{what} = {value:g} is {f'beyond {LARGEST_METRIC:g}' if is_beyond else 'not finite'}"


def non_finite_figure(target: str, metric: float, loss_name: str, loss: float | None) -> str | None:
    """Return a message on the metric or, if the metric is finite, on the loss; None if both are finite."""
    if not is_metric(metric):
        return not_finite(target, metric)
    return None if loss is None or math.isfinite(loss) else not_finite(loss_name, loss)


def paused(ending: Ending, checkpoint: str | None, save: Callable[[str], str | None]) -> Ending:
    """Save the trial if ``ending`` is a pause, and return the ending.

    If ``checkpoint`` is None or ``save`` fails, prune the trial instead.
    """
    if ending.state is not TrialState.PAUSED:
        return ending
    if checkpoint is None:
        return replace(ending, state=TrialState.PRUNED)
    try:
        problem = save(checkpoint)
    except Exception as error:
        problem = first_line(error)
    if problem is None:
        return ending
    return replace(ending, state=TrialState.PRUNED, reason=f"{ending.reason}; {COULD_NOT_PAUSE}: {problem}")


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}".rstrip(": ")


def where(configuration: Configuration, step: int) -> str:
    size, rate = configuration.batch_size, configuration.learning_rate
    return f"batch size {size}, learning rate {rate:.4g}, step {step}"


class Course:
    """Compares a trial's evaluations with the target."""

    def __init__(self, request: TrialRequest, metric: MetricInfo | None) -> None:
        self._request, self._plan = request, request.plan
        self._metric = metric
        self.progress = CourseProgress()

    def observe(self, observation: Observation, *, is_over: bool = False) -> Ending | None:
        """Record an evaluation and return the ending, if any.

        Raises `UsageError` if the first metric meets the target, but seems to be in another unit, such as percent.
        """
        target, progress, metric = self._request.target, self.progress, observation.metric
        if progress.last is None and target.is_met_by(metric) and target.is_in_other_unit(metric, metric):
            raise UsageError(
                f"{target.metric} is {metric:g} at the first evaluation, but the target is {target.value:g}; one "
                "value may be in percent",
                hint=f"use target: {{value: {target.in_unit_of(metric):g}}}",
            )
        previous, progress.last = progress.last, observation
        if progress.best is None or target.gain(metric) > target.gain(progress.best):
            progress.best = metric
        if progress.crossing is None and target.is_met_by(metric):
            progress.crossing = crossing(previous, observation, target)
            progress.reached = f"{target.metric} = {metric:.6g} at step {observation.step}"
            if self._plan.stop_at_target:
                return Ending(TrialState.REACHED, progress.reached)
        if is_over:
            return Ending(TrialState.EXHAUSTED, f"the schedule's horizon ended at step {observation.step}")
        return None

    def limited(self, train_seconds: float) -> Ending | None:
        limit = self._plan.train_seconds_limit
        if train_seconds <= limit:
            return None
        return Ending(self._plan.limit_state, f"the limit of {limit:.4g} train seconds passed")

    def stuck_at_chance(self, train_seconds: float, where: str) -> Ending | None:
        """Return an ending if the trial stayed at chance for half of its full limit."""
        # The incumbent's limit does not count, because this limit may be shorter than a large batch's warmup.
        target, best = self._request.target, self.progress.best
        chance = None if self._metric is None else self._metric.chance
        if (
            chance is None
            or best is None
            or self.progress.crossing is not None
            or self._plan.limit_state is not TrialState.EXHAUSTED
            or train_seconds <= self._plan.train_seconds_limit / 2
            or target.gain(best) > target.gain(chance) + CHANCE_MARGIN * target.shortfall(chance)
        ):
            return None
        return Ending(
            TrialState.DIVERGED,
            f"the best {target.metric} = {best:.4g} is no better than chance ({chance:.4g}) "
            f"after half of the limit of {self._plan.train_seconds_limit:.4g} train seconds: {where}",
        )

    def reached_before(self, ending: Ending) -> Ending:
        """Return a `REACHED` ending if the trial met the target earlier, unless the caller stopped the trial."""
        if self.progress.crossing is None or ending.state is TrialState.REACHED or ending.asked:
            return ending
        return Ending(TrialState.REACHED, f"{self.progress.reached}; further training ended: {ending.reason}")

    def with_target(self, outcome: TrialOutcome) -> TrialOutcome:
        """Add the target's crossing to a `REACHED` outcome, or the last evaluation if no evaluation met the target."""
        found, last = self.progress.crossing, self.progress.last
        if found is None and last is not None:
            return replace(outcome, last_miss_step=last.step, last_miss_seconds=last.train_seconds)
        if found is None or outcome.state is not TrialState.REACHED:
            return outcome
        return with_crossing(outcome, found)
