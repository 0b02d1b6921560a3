"""Batch-size schedules: the batch size grows in stages, by samples seen or by the gradient noise scale.

A configuration stores a schedule in these parameters:

* ``batch_schedule``: `geometric`, `linear`, `milestones`, `noise_scale` or `seesaw`
* ``batch_stages``: ``8192:64 16384:256/64`` (start sample:batch/micro-batch), without start samples in `noise_scale`
* ``batch_rate_rule``: a `bssearch.records.scaling.LearningRateRule`
* ``batch_noise_share``: with `noise_scale`, the largest batch as a multiple of the gradient noise scale
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from bssearch.errors import UsageError, require
from bssearch.records.measured import Observation
from bssearch.records.question import BATCH_SCHEDULE, BATCH_STAGES, Configuration, ParameterValue
from bssearch.records.requests import TrialRecord
from bssearch.records.scaling import LearningRateRule, learning_rate_factor

BatchScheduleName = Literal["geometric", "linear", "milestones", "noise_scale", "seesaw"]
NOISE_SCALE: BatchScheduleName = "noise_scale"
SEESAW: BatchScheduleName = "seesaw"
RATE_RULE, NOISE_SHARE = "batch_rate_rule", "batch_noise_share"
PARAMETERS = (BATCH_SCHEDULE, BATCH_STAGES, RATE_RULE, NOISE_SHARE)

MOST_STAGES = 64  # each stage has shapes to warm up and time

# a float holds 15 digits exactly
_STAGE = re.compile("(?:(?P<start>N):)?(?P<size>N)(?:/(?P<micro>N))?".replace("N", "[0-9]{1,15}"))


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a batch schedule, from ``start_samples`` on."""

    start_samples: int
    batch_size: int
    micro_batch_size: int

    @property
    def accumulation_steps(self) -> int:
        return self.batch_size // self.micro_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSchedule:
    """Stages of growing batch size.

    If `name` is ``noise_scale``, all stages start at 0 samples, and the noise scale decides when the batch size grows.
    """

    name: BatchScheduleName
    stages: tuple[Stage, ...]
    rate_rule: LearningRateRule
    noise_share: float | None = None

    @property
    def is_measured(self) -> bool:
        return self.noise_share is not None

    def rate_factor(self, batch_size: int) -> float:
        return learning_rate_factor(self.rate_rule, batch_size, self.stages[0].batch_size)

    def steps_by_stage(self, steps: float) -> list[tuple[Stage, float]]:
        """Split the first ``steps`` by stage. A stage ends with the step that reaches the next stage's start."""
        found, samples, left = [], 0, steps
        for stage, following in zip(self.stages, [*self.stages[1:], None], strict=True):
            taken = left
            if following is not None:
                taken = min(left, max(0, math.ceil((following.start_samples - samples) / stage.batch_size)))
            if taken > 0:
                found.append((stage, taken))
            left -= taken
            samples += math.ceil(taken) * stage.batch_size
        return found

    def samples_after(self, steps: float) -> float:
        return math.fsum(stage.batch_size * taken for stage, taken in self.steps_by_stage(steps))

    @property
    def text(self) -> str:
        """The stages after the first stage, in the format of ``batch_stages``."""
        return " ".join(map(self._said, self.stages[1:]))

    @property
    def in_words(self) -> str:
        first, *later = self.stages
        if self.is_measured:
            sizes = ", ".join(str(one.batch_size) for one in later)
            return f"{first.batch_size}, then {sizes}, each at most {self.noise_share:.3g} × the gradient noise scale"
        when = ", ".join(f"{one.batch_size} from {one.start_samples:,} samples on" for one in later)
        return f"{first.batch_size}, then {when}"

    def _said(self, stage: Stage) -> str:
        start = "" if self.is_measured else f"{stage.start_samples}:"
        micro = "" if stage.accumulation_steps == 1 else f"/{stage.micro_batch_size}"
        return f"{start}{stage.batch_size}{micro}"


def batch_schedule_of(configuration: Configuration) -> BatchSchedule | None:
    """Return the batch schedule of a configuration, or None if the batch size is constant.

    Raises:
        UsageError: The schedule is invalid.
    """
    if (name := configuration.parameters.get(BATCH_SCHEDULE)) is None:
        return None
    require(
        name in get_args(BatchScheduleName),
        f"{BATCH_SCHEDULE} = {name!r} must be one of {', '.join(get_args(BatchScheduleName))}",
    )
    is_measured = name == NOISE_SCALE
    text = str(configuration.parameters.get(BATCH_STAGES) or "")
    schedule = BatchSchedule(
        name=cast(BatchScheduleName, name),
        stages=(*stages_of(configuration, None), *_stages(text, is_measured=is_measured)),
        rate_rule=_rate_rule(configuration.parameters),
        noise_share=_noise_share(configuration.parameters) if is_measured else None,
    )
    _check(schedule)
    return schedule


def growing_schedule(configuration: Configuration) -> BatchSchedule:
    schedule = batch_schedule_of(configuration)
    assert schedule is not None, "the configuration has a batch schedule"
    return schedule


def stages_of(configuration: Configuration, schedule: BatchSchedule | None) -> tuple[Stage, ...]:
    return (
        (Stage(0, configuration.batch_size, configuration.micro_batch_size),) if schedule is None else schedule.stages
    )


def constant_configurations(configuration: Configuration) -> list[Configuration]:
    if (schedule := batch_schedule_of(configuration)) is None:
        return [configuration]
    parameters = {name: value for name, value in configuration.parameters.items() if name not in PARAMETERS}
    return [
        replace(
            configuration,
            batch_size=stage.batch_size,
            micro_batch_size=stage.micro_batch_size,
            accumulation_steps=stage.accumulation_steps,
            learning_rate=configuration.learning_rate * schedule.rate_factor(stage.batch_size),
            parameters=parameters,
        )
        for stage in schedule.stages
    ]


def with_batch_schedule(configuration: Configuration, schedule: BatchSchedule) -> Configuration:
    """Return the configuration with ``schedule``. Raises `UsageError` if the schedule is invalid."""
    first = schedule.stages[0]
    share = {} if schedule.noise_share is None else {NOISE_SHARE: schedule.noise_share}
    changed = replace(
        configuration,
        batch_size=first.batch_size,
        micro_batch_size=first.micro_batch_size,
        accumulation_steps=first.accumulation_steps // configuration.world_size,
        parameters={
            **{name: value for name, value in configuration.parameters.items() if name != NOISE_SHARE},
            BATCH_SCHEDULE: schedule.name,
            BATCH_STAGES: schedule.text,
            RATE_RULE: str(schedule.rate_rule),
            **share,
        },
    )
    batch_schedule_of(changed)
    return changed


def sizes_in_words(configuration: Configuration) -> str:
    return " → ".join(str(stage.batch_size) for stage in stages_of(configuration, batch_schedule_of(configuration)))


def growing(name: str, sizes: Sequence[int], from_samples: float, until_samples: float) -> list[tuple[int, int]]:
    """Return (samples, batch size) of each change. B rises linearly in `linear`, and log B in `geometric`."""
    first, last = sizes[0], sizes[-1]
    shares = [
        math.log(size / first) / math.log(last / first) if name == "geometric" else (size - first) / (last - first)
        for size in sizes[1:]
    ]
    starts = [math.ceil(from_samples + share * (until_samples - from_samples)) for share in shares]
    return list(zip(starts, sizes[1:], strict=True))


def _stages(text: str, *, is_measured: bool) -> list[Stage]:
    words = text.split()
    require(
        1 <= len(words) < MOST_STAGES,
        f"{BATCH_STAGES} = {text!r} must name 1 to {MOST_STAGES - 1} changes of the batch size",
    )
    found = []
    for word in words:
        match = _STAGE.fullmatch(word)
        if match is None or (match["start"] is None) is not is_measured:
            form = "SIZE" if is_measured else "SAMPLES:SIZE"
            raise UsageError(f"{BATCH_STAGES} = {text!r}: {word!r} must be {form} or {form}/MICRO_BATCH_SIZE")
        size = int(match["size"])
        found.append(Stage(int(match["start"] or 0), size, int(match["micro"] or size)))
    return found


def _rate_rule(parameters: Mapping[str, ParameterValue]) -> LearningRateRule:
    given = parameters.get(RATE_RULE)
    require(given in {*LearningRateRule}, f"{RATE_RULE} = {given!r} must be one of {', '.join(LearningRateRule)}")
    return LearningRateRule(str(given))


def _noise_share(parameters: Mapping[str, ParameterValue]) -> float:
    given = parameters.get(NOISE_SHARE)
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 < given < math.inf:
        raise UsageError(f"{NOISE_SHARE} = {given!r} must be a finite number > 0")
    return float(given)


def _check(schedule: BatchSchedule) -> None:
    for before, stage in zip(schedule.stages, schedule.stages[1:], strict=False):
        if stage.batch_size <= before.batch_size:
            raise UsageError(
                f"{BATCH_STAGES}: batch {stage.batch_size} must be larger than {before.batch_size}, the batch before"
            )
        least = before.start_samples + before.batch_size
        if not schedule.is_measured and stage.start_samples < least:
            raise UsageError(
                f"{BATCH_STAGES}: batch {stage.batch_size} begins after {stage.start_samples} samples; use at least "
                f"{least} samples, one step after batch {before.batch_size} begins"
            )
    for stage in schedule.stages:
        if stage.micro_batch_size < 1 or stage.batch_size % stage.micro_batch_size:
            raise UsageError(
                f"{BATCH_STAGES}: batch {stage.batch_size} must be a multiple of its micro-batch "
                f"{stage.micro_batch_size}"
            )


Point = tuple[int, int, float]  # (steps, samples, train seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStage:
    """The part of a trial that ran one stage. ``learning_rate`` is the peak learning rate."""

    start_samples: int
    batch_size: int
    micro_batch_size: int
    learning_rate: float
    steps: int
    samples: int
    train_seconds: float


def run_stages(trial: TrialRecord, curve: Sequence[Observation]) -> list[RunStage]:
    """Return the stages that a trial ran, or no stage if the batch size is constant or no step is known.

    A `noise_scale` schedule grows only at evaluations, so batch sizes are samples / steps between evaluations.
    """
    schedule = batch_schedule_of(trial.configuration)
    points = _points(trial, curve)
    if schedule is None or len(points) < 2:
        return []
    parts = _as_measured(schedule, points) if schedule.is_measured else _as_planned(schedule, points)
    return [
        RunStage(
            start_samples=start[1],
            batch_size=stage.batch_size,
            micro_batch_size=stage.micro_batch_size,
            learning_rate=trial.configuration.learning_rate * schedule.rate_factor(stage.batch_size),
            steps=end[0] - start[0],
            samples=end[1] - start[1],
            train_seconds=end[2] - start[2],
        )
        for stage, start, end in parts
    ]


def _points(trial: TrialRecord, curve: Sequence[Observation]) -> list[Point]:
    found: list[Point] = [(0, 0, 0.0)]
    ran = [(one.step, one.samples, one.train_seconds) for one in curve]
    if (end := trial.outcome) is not None:
        undelayed = end.undelayed_train_seconds  # as `Observation.train_seconds`
        ran.append((end.steps, end.samples, end.train_seconds if undelayed is None else undelayed))
    for point in ran:
        if point[0] > found[-1][0]:
            found.append(point)
    return found


def _as_planned(schedule: BatchSchedule, points: Sequence[Point]) -> list[tuple[Stage, Point, Point]]:
    found, start = [], points[0]
    for stage, steps in schedule.steps_by_stage(points[-1][0]):
        samples = start[1] + round(steps) * stage.batch_size
        end = (start[0] + round(steps), samples, _seconds_at(samples, points))
        found.append((stage, start, end))
        start = end
    return found


def _as_measured(schedule: BatchSchedule, points: Sequence[Point]) -> list[tuple[Stage, Point, Point]]:
    found: list[tuple[Stage, Point, Point]] = []
    for start, end in itertools.pairwise(points):
        size = (end[1] - start[1]) / (end[0] - start[0])
        stage = min(schedule.stages, key=lambda one: abs(one.batch_size - size))
        if found and found[-1][0] == stage:
            start = found.pop()[1]
        found.append((stage, start, end))
    return found


def _seconds_at(samples: int, points: Sequence[Point]) -> float:
    for start, end in itertools.pairwise(points):
        if samples <= end[1]:
            return start[2] + (end[2] - start[2]) * (samples - start[1]) / (end[1] - start[1])
    return points[-1][2]
