"""Batches that grow during a trial: which size a step has follows from the samples seen before it.

A schedule is a ladder of stages, the first of them the configuration's own batch size. Between two stages only the
batch size changes, its split into micro-batches, and the learning rate, which follows a rule from one size to the next.
In a configuration it stands among the parameters, as texts and numbers that a database, an export and a command hold:

* ``batch_schedule``: `geometric`, `linear`, `milestones` or `noise_scale`
* ``batch_stages``: ``8192:64 16384:256/64``, from 8,192 samples on batches of 64, from 16,384 on of 256 in
  micro-batches of 64; under `noise_scale`, which decides by itself when, ``64 256/64``
* ``batch_rate_rule``: how the learning rate follows, `bssearch.records.scaling.LearningRateRule`
* ``batch_noise_share``: under `noise_scale`, how many times the gradient noise scale the batch may be
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from bssearch.errors import UsageError
from bssearch.records import BATCH_SCHEDULE, BATCH_STAGES, Configuration, Observation, ParameterValue, TrialRecord
from bssearch.records.scaling import LearningRateRule, learning_rate_factor

BatchScheduleName = Literal["geometric", "linear", "milestones", "noise_scale"]
NOISE_SCALE: BatchScheduleName = "noise_scale"
RATE_RULE, NOISE_SHARE = "batch_rate_rule", "batch_noise_share"
PARAMETERS = (BATCH_SCHEDULE, BATCH_STAGES, RATE_RULE, NOISE_SHARE)

MOST_STAGES = 64
"""Stages of a schedule at most: a choice; each has shapes of its own, which are warmed up and timed."""

_STAGE = re.compile("(?:(?P<start>N):)?(?P<size>N)(?:/(?P<micro>N))?".replace("N", "[0-9]{1,15}"))
"""Numbers up to 15 digits, which a float holds exactly."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps of ``batch_size`` samples in micro-batches of ``micro_batch_size``, from ``start_samples`` seen on."""

    start_samples: int
    batch_size: int
    micro_batch_size: int

    @property
    def accumulation_steps(self) -> int:
        """Return how many micro-batches make a step."""
        return self.batch_size // self.micro_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSchedule:
    """The stages of a trial, ascending in both; under `noise_scale` all begin at 0 samples, and the trial says when.

    ``noise_share`` × the gradient noise scale is the largest batch that it may have then, None under other names.
    """

    name: BatchScheduleName
    stages: tuple[Stage, ...]
    rate_rule: LearningRateRule
    noise_share: float | None = None

    @property
    def is_measured(self) -> bool:
        """Return whether the trial decides by what it measures when it grows."""
        return self.noise_share is not None

    def rate_factor(self, batch_size: int) -> float:
        """Return what the learning rate of the first stage is multiplied by at another's batch size."""
        return learning_rate_factor(self.rate_rule, batch_size, self.stages[0].batch_size)

    def steps_by_stage(self, steps: float) -> list[tuple[Stage, float]]:
        """Return how many of the first ``steps`` optimizer steps each stage has, but for those that have none.

        A stage goes on to the end of the step in which the next one begins.
        """
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
        """Return the samples that the first ``steps`` optimizer steps see; between two whole numbers by a line."""
        return math.fsum(stage.batch_size * taken for stage, taken in self.steps_by_stage(steps))

    @property
    def text(self) -> str:
        """Return the stages after the first one, as a configuration has them."""
        return " ".join(map(self._said, self.stages[1:]))

    @property
    def in_words(self) -> str:
        """Return the sizes and when each begins, for people."""
        first, *later = self.stages
        if self.is_measured:
            sizes = ", ".join(str(one.batch_size) for one in later)
            return f"{first.batch_size}, then {sizes} once within {self.noise_share:.3g} × the gradient noise scale"
        when = ", ".join(f"{one.batch_size} from {one.start_samples:,} samples on" for one in later)
        return f"{first.batch_size}, then {when}"

    def _said(self, stage: Stage) -> str:
        start = "" if self.is_measured else f"{stage.start_samples}:"
        micro = "" if stage.accumulation_steps == 1 else f"/{stage.micro_batch_size}"
        return f"{start}{stage.batch_size}{micro}"


def batch_schedule_of(configuration: Configuration) -> BatchSchedule | None:
    """Return the schedule of a configuration, None of one whose batch size stays.

    Raises `UsageError` for one that means nothing: a name, stage, rule or share that there is not, a batch that does
    not grow from stage to stage, or that is not made of its micro-batches, and a stage without a step of its own.
    """
    name = configuration.parameters.get(BATCH_SCHEDULE)
    if name is None:
        return None
    if name not in get_args(BatchScheduleName):
        raise UsageError(f"{BATCH_SCHEDULE} = {name!r} must be one of {', '.join(get_args(BatchScheduleName))}")
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


def stages_of(configuration: Configuration, schedule: BatchSchedule | None) -> tuple[Stage, ...]:
    """Return the stages of a configuration's schedule; without one all of it is one."""
    if schedule is not None:
        return schedule.stages
    return (Stage(0, configuration.batch_size, configuration.micro_batch_size),)


def constant_configurations(configuration: Configuration) -> list[Configuration]:
    """Return the configuration of each stage as one whose batch size stays, with the learning rate that it has there.

    Of one whose batch size stays it is the configuration itself. Raises what `batch_schedule_of` does.
    """
    schedule = batch_schedule_of(configuration)
    if schedule is None:
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
    """Return a configuration that begins with the schedule's first stage, its learning rate as it was.

    Raises `UsageError` where the schedule means nothing.
    """
    first = schedule.stages[0]
    share = {} if schedule.noise_share is None else {NOISE_SHARE: schedule.noise_share}
    rest = {name: value for name, value in configuration.parameters.items() if name != NOISE_SHARE}
    changed = replace(
        configuration,
        batch_size=first.batch_size,
        micro_batch_size=first.micro_batch_size,
        accumulation_steps=first.accumulation_steps // configuration.world_size,
        parameters={
            **rest,
            BATCH_SCHEDULE: schedule.name,
            BATCH_STAGES: schedule.text,
            RATE_RULE: str(schedule.rate_rule),
            **share,
        },
    )
    batch_schedule_of(changed)
    return changed


def sizes_in_words(configuration: Configuration) -> str:
    """Return the batch size of a configuration, or those of its stages: "16 → 64 → 256"."""
    if not configuration.grows:
        return str(configuration.batch_size)
    schedule = batch_schedule_of(configuration)
    return " → ".join(str(stage.batch_size) for stage in stages_of(configuration, schedule))


def growing(
    name: Literal["geometric", "linear"], sizes: Sequence[int], from_samples: float, until_samples: float
) -> list[tuple[int, int]]:
    """Return (samples, batch size) of each change along a ladder of sizes, from the first to the last of them.

    log B (`geometric`) or B (`linear`) rises from the first size at ``from_samples`` to the last one at
    ``until_samples``, and each size begins where it is reached.
    """
    first, last = sizes[0], sizes[-1]
    shares = [
        math.log(size / first) / math.log(last / first) if name == "geometric" else (size - first) / (last - first)
        for size in sizes[1:]
    ]
    starts = [math.ceil(from_samples + share * (until_samples - from_samples)) for share in shares]
    return list(zip(starts, sizes[1:], strict=True))


def _stages(text: str, *, is_measured: bool) -> list[Stage]:
    words = text.split()
    if not 1 <= len(words) < MOST_STAGES:
        raise UsageError(f"{BATCH_STAGES} = {text!r} must name 1 to {MOST_STAGES - 1} changes of the batch size")
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
    try:
        return LearningRateRule(str(given))
    except ValueError:
        raise UsageError(f"{RATE_RULE} = {given!r} must be one of {', '.join(LearningRateRule)}") from None


def _noise_share(parameters: Mapping[str, ParameterValue]) -> float:
    given = parameters.get(NOISE_SHARE)
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 < given < math.inf:
        raise UsageError(f"{NOISE_SHARE} = {given!r} must be a number > 0")
    return float(given)


def _check(schedule: BatchSchedule) -> None:
    for before, stage in zip(schedule.stages, schedule.stages[1:], strict=False):
        if stage.batch_size <= before.batch_size:
            raise UsageError(
                f"{BATCH_STAGES}: batch {stage.batch_size} after {before.batch_size}: a batch must grow, it may not "
                "shrink"
            )
        if schedule.is_measured:
            continue
        least = before.start_samples + before.batch_size
        if stage.start_samples < least:
            raise UsageError(
                f"{BATCH_STAGES}: batch {stage.batch_size} begins after {stage.start_samples} samples; it must be >= "
                f"{least}, one step of batch {before.batch_size} after that one begins"
            )
    for stage in schedule.stages:
        if stage.micro_batch_size < 1 or stage.batch_size % stage.micro_batch_size:
            raise UsageError(
                f"{BATCH_STAGES}: batch {stage.batch_size} is not made of micro-batches of {stage.micro_batch_size}"
            )


Point = tuple[int, int, float]
"""Steps, samples and train seconds of a trial until some moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStage:
    """What a trial ran of one stage, which began after ``start_samples``; ``learning_rate`` is the peak there."""

    start_samples: int
    batch_size: int
    micro_batch_size: int
    learning_rate: float
    steps: int
    samples: int
    train_seconds: float


def run_stages(trial: TrialRecord, curve: Sequence[Observation]) -> list[RunStage]:
    """Return the stages that a trial ran, in order; none of one whose batch size stays, or that took no step.

    Where the trial decided by what it measured, the sizes are the samples over the steps between its evaluations, at
    which alone it grows. Else they follow from its schedule, and the train seconds of a change between two evaluations
    lie on a line over the samples. Raises what `batch_schedule_of` does.
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
    """Return where the trial was at its beginning, at its evaluations and at its end."""
    found: list[Point] = [(0, 0, 0.0)]
    ran = [(one.step, one.samples, one.train_seconds) for one in curve]
    if trial.outcome is not None:
        end = trial.outcome
        undelayed = end.undelayed_train_seconds  # which evaluations count by, too
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
    """Return the train seconds until so many samples, between two points by a line."""
    for start, end in itertools.pairwise(points):
        if samples <= end[1]:
            return start[2] + (end[2] - start[2]) * (samples - start[1]) / (end[1] - start[1])
    return points[-1][2]
