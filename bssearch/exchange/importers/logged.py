"""Learning curves in training logs: names of metric, steps and seconds, resumed runs, and unlogged time."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bssearch.errors import UsageError, require
from bssearch.exchange.importers.columns import LONGEST_S, seconds_of_unit
from bssearch.exchange.importers.imported_run import LARGEST, comma_hint
from bssearch.exchange.importers.logs import CLOCK, SPREAD_SECONDS, Log, Row, number_in
from bssearch.exchange.importers.runs import LOSS
from bssearch.records import Observation, is_metric

# Names of optimizer steps, of seconds since a run began (the surest first), and of seconds since 1970
STEPS = (
    *("trainer/global_step", "train/global_step", "global_step", "train_step", "training_step", "step", "steps"),
    *(
        "iteration",
        "iter",
        "iterations",
        "it",
        "iters",
        "optimizer_step",
        "opt_step",
        "update",
        "updates",
        "num_updates",
        "n_updates",
        "num_steps",
        "n_steps",
    ),
)
WITHOUT_EVALUATION = ("train_seconds", "train_time", SPREAD_SECONDS)
SECONDS = (
    *(*WITHOUT_EVALUATION, "time_total_s", "_runtime", "relative time (process)", "relative time (wall)"),
    *("runtime", "elapsed_seconds", "elapsed_time", "elapsed", "wall_seconds", "seconds"),
)
CLOCKS = (CLOCK, "timestamp")
TIMES = (
    *("wall_time", "wall time", "time", "total_time", "walltime", "created_at", "datetime", "t", "sec", "secs"),
)  # a clock, seconds since the run began, or seconds of an epoch or step

# Names of the seconds of one evaluation
_OF_EVALUATION = "(?:eval|evaluation|val|valid|validation|test)"
_SECONDS_NAME = "(?:run)?(?:time|seconds|secs|duration)"
EVALUATION = re.compile(
    rf"(?:.*[/_. ])?(?:{_OF_EVALUATION}[/_. ]{_SECONDS_NAME}|{_SECONDS_NAME}[/_. ]{_OF_EVALUATION})"
    r"(?:[/_. (]+(?:s|ms|sec|seconds|min)\)?)?",
    re.IGNORECASE,
)

EPOCH = "epoch"

OF_LIGHTNING = "trainer/global_step"  # Lightning's number of the step, from 0

NOT_A_NUMBER = frozenset({"nan", "+nan", "-nan", "none", "null", "n/a", "na", "true", "false"})

DIGITS = 7  # of logged values; loggers round to single precision, which makes 0.9 0.89999998

MOST_NAMED = 12  # names in a message

_VALIDATION = re.compile(r"(?:metrics[/.])?(?:val|valid|validation|eval|test)[/_.]")
_NO_METRICS = ("runtime", "per_second", "_time", "step", "epoch")
_SCORE = re.compile(r"(?!train)(?:.*[/_. ])?(?:acc|accuracy|acc1|top1|top_1|f1|auc|bleu)")
_CHART = re.compile(r".* - .*__(?:MIN|MAX)")


def listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(map(repr, names[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "") or "no names"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of the metric, steps and seconds in the logs of an import. `of_log` returns the names in a single log.

    Attributes:
        step: "" until `of_log`, unless the user names the steps. The steps count epochs if ``epoch_samples`` is given.
        clock: name of a clock, used if ``seconds`` is None.
        evaluations: names of evaluation times that ``seconds`` or ``clock`` include.
        step_seconds: step time, used if ``seconds`` or ``clock`` include evaluations of unknown length.
    """

    metric: str
    step: str
    seconds: str | None
    epoch_samples: int | None
    clock: str | None = None
    evaluations: tuple[str, ...] = ()
    step_seconds: float | None = None
    is_training: bool = False  # seconds without evaluations

    @classmethod
    def of(
        cls, logs: Sequence[Log], metric: str | None, step: str | None, seconds: str | None, epoch_samples: int | None
    ) -> Names:
        """Check the given names and find the metric. Raises `UsageError` if a name is missing or ambiguous."""
        there = list(dict.fromkeys(name for log in logs for row in log.rows for name in row))
        place = logs[0].origin
        require(
            not any(map(_CHART.fullmatch, there)),
            f"{place} is a W&B chart, which lacks the runs' settings",
            hint="export the runs' histories with their configuration, or the table of runs for `import runs`",
        )
        for option, name in (("--metric", metric), ("--step", step), ("--seconds", seconds)):
            require(
                name is None or name in there,
                f"{option} {name}: no log has {name!r}; choose from {listed(there)} ({place})",
            )
        found = metric or _metric(there, place)
        require(found.isprintable(), f"the metric's name {found!r} must be printable; rename the metric ({place})")
        return cls(metric=found, step=step or "", seconds=seconds, epoch_samples=epoch_samples)

    def of_log(self, log: Log) -> Names:
        first = {name: value for row in reversed(log.rows) for name, value in row.items() if value not in (None, "")}
        there = dict.fromkeys(name for name, value in first.items() if not math.isnan(number_in(value)))
        usual_steps = (EPOCH,) if self.epoch_samples else STEPS
        step = self.step if self.step and self.step in there else first_name(there, usual_steps)
        if step is None:
            missing = f"column {EPOCH!r}, which --epoch-samples needs" if self.epoch_samples else "optimizer steps"
            raise UsageError(
                f"the log has no {missing}; columns with numbers: {listed(list(there))} ({log.origin})",
                hint="name the epochs with --step NAME"
                if self.epoch_samples
                else "name the steps with --step NAME; if NAME counts epochs, add --epoch-samples N; if NAME counts "
                "samples, add --epoch-samples 1",
            )
        timed = self.seconds if self.seconds in there else None
        clock = None
        if timed is None and (usual := first_name(there, SECONDS)) is not None:
            timed, clock = _kind_of_time(log, step, usual, is_usual=True)
        if timed is clock is None:
            clock = first_name(there, CLOCKS)
        if timed is clock is None and (plain := first_name(there, TIMES)) is not None:
            timed, clock = _kind_of_time(log, step, plain, is_usual=False)
        is_training = (timed or "").lower() in WITHOUT_EVALUATION
        found = replace(self, step=step, seconds=timed, clock=clock, is_training=is_training)
        if is_training or timed is clock is None:
            return found
        pace = _step_seconds(log, found)
        names = tuple(name for name in there if EVALUATION.fullmatch(name) and "total" not in name)
        if not names:
            return replace(found, step_seconds=pace, is_training=pace is not None)
        return replace(found, evaluations=() if _is_apart(log, found, names, pace) else names, is_training=True)

    @property
    def sentence(self) -> str:
        steps = self.step if self.epoch_samples is None else f"{self.step} × {self.epoch_samples} / batch size"
        timed = self.seconds or (f"{self.clock} since the first step" if self.clock else "unknown (add --seconds)")
        if self.step_seconds is not None:
            timed = f"steps × step time between evaluations, from {self.seconds or self.clock}"
        elif self.evaluations:
            timed += f" minus {', '.join(self.evaluations)}"
        elif (self.seconds or self.clock) and not self.is_training:
            timed += ", evaluations included"
        return f"metric: {self.metric}; steps: {steps}; seconds: {timed}"


def first_name(there: Mapping[str, Any], wanted: Sequence[str]) -> str | None:
    """Return the first ``wanted`` name in the log, as spelled in the log, with any prefix or unit."""
    lower = {name.lower(): name for name in reversed(list(there))}
    lower = {_AROUND_NAME.sub("", name): theirs for name, theirs in reversed(lower.items())} | lower
    return next((lower[one] for one in wanted if one in lower), None)


_AROUND_NAME = re.compile(r"^.*\.|[ _]\(?\[?(?:ms|s|sec|secs|seconds|min|minutes|h|hours)\]?\)?$")


def _kind_of_time(log: Log, step: str, name: str, *, is_usual: bool) -> tuple[str | None, str | None]:
    # Name of seconds since the run began, else of a clock, else neither: the seconds of an epoch or a step
    rows = [(number_in(row.get(step)), number_in(row.get(name))) for row in log.rows]
    rows = [(at, time) for at, time in rows if at > 0 and time > 0]
    if any(later[0] > one[0] and later[1] < one[1] for one, later in itertools.pairwise(rows)):
        return None, None
    if len(rows) < 3:
        return (name if is_usual else None), None
    (first, start), (last, end) = rows[0], rows[-1]
    if start > LONGEST_S:
        return None, name
    # Seconds of an epoch hardly grow; a whole run's seconds grow as the steps do, unless the first step has a warm-up
    growth, wanted = end / start, last / first
    is_flat = len(rows) >= FEW and wanted > 2 * GROWTH and growth < GROWTH
    is_whole = growth > wanted / 2 > 0.5 or (len(rows) >= FEW and growth > GROWTH)
    return (name if is_whole or (is_usual and not is_flat) else None), None


FEW, GROWTH = 5, 1.5  # 5 rows in rising order are hardly chance


def _step_seconds(log: Log, names: Names) -> float | None:
    # Median step time between evaluations, of rows without a metric; None if no log row is between
    rows = [
        (step, _seconds_in(row, names, log), row.get(names.metric) not in (None, ""))
        for step, row in zip(_counts(log, names), log.rows, strict=True)
    ]
    ends = {step: time for step, time, is_evaluation in reversed(rows) if is_evaluation}
    paces: list[float] = []
    steps = seconds = 0.0
    before: tuple[float, float] | None = None
    for step, time, is_evaluation in rows:
        is_training = before is not None and not is_evaluation and step > before[0] and time >= before[1]
        # A row of the evaluation's step may be logged after the evaluation: then hardly earlier than the metric
        if before is not None and is_training and not ends.get(step, math.inf) - time <= SOON * (time - before[1]):
            steps, seconds = steps + step - before[0], seconds + time - before[1]
        if is_evaluation and steps:
            paces, steps, seconds = [*paces, seconds / steps], 0.0, 0.0
        before = None if math.isnan(time) else (step, time)
    return statistics.median(paces) if len(paces) >= FEWEST_PACES and min(paces) > 0 else None


FEWEST_PACES = 2
SOON = 0.02  # a shorter evaluation hardly changes the step time


def _is_apart(log: Log, names: Names, evaluations: Sequence[str], pace: float | None) -> bool:
    # True if the step time shows that the log's seconds exclude evaluations
    known = [(_number(row, names.step, log), _seconds_in(row, names, log)) for row in log.rows]
    known = [one for one in known if not math.isnan(sum(one))]
    if pace is None or not known:
        return False
    (first, start), (last, end) = known[0], known[-1]
    spent = math.fsum(one for row in log.rows for one in _evaluation_seconds(row, evaluations, log))
    return abs(end - start - pace * (last - first)) < spent / 2


def _seconds_in(row: Mapping[str, Any], names: Names, log: Log) -> float:
    if names.seconds is not None:
        return _number(row, names.seconds, log) * seconds_of_unit(names.seconds)
    if names.clock is None:
        return math.nan
    time = _number(row, names.clock, log)
    return time / next((unit for low, unit in _UNITS_OF_CLOCKS if time > low), 1.0)


_UNITS_OF_CLOCKS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))  # nano-, micro- and milliseconds since 1970


def _metric(there: Sequence[str], place: str) -> str:
    named = [one for one in there if _VALIDATION.match(one.lower()) and not EVALUATION.fullmatch(one)]
    logged = [one for one in named if not one.lower().endswith(_NO_METRICS)]
    logged = logged or [one for one in there if _SCORE.fullmatch(one.lower())]
    found = [one for one in logged if not LOSS.fullmatch(one)] or logged
    found = [one for one in found if "test" not in one.lower()] or found
    require(
        len(found) == 1,
        f"the metric is {'ambiguous' if found else 'unknown'}: the logs have {listed(found or there)} ({place})",
        hint="choose a metric with --metric NAME",
    )
    return found[0]


@dataclass(frozen=True, slots=True)
class Curve:
    """A run's evaluations, whether the run diverged, and the numbers of resumes and of repeated steps."""

    observations: tuple[Observation, ...]
    has_diverged: bool
    resumes: int
    repeats: int


def curve_of(log: Log, names: Names, batch_size: int) -> Curve:
    """Return a log's curve. After a resume, new evaluations replace old evaluations at the same and later steps."""
    found: list[Observation] = []
    offset, before, resumes, repeats = 0.0, -math.inf, 0, 0
    has_diverged = False
    rows = list(_evaluations(log, names, batch_size))  # checks rows after a divergence, too
    has_steps = len({step for step, *_ in rows}) > 1
    last = max((place for place, (*_, metric) in enumerate(rows) if not math.isnan(metric)), default=-1)
    for place, (step, logged, metric) in enumerate(rows):
        if math.isnan(metric) and place < last:
            continue  # a missing cell, because a run that diverges stays so
        if not is_metric(metric):
            has_diverged = True
            break
        first = found[0].step if found else math.inf
        if found and step == found[-1].step and has_steps:
            repeats += found.pop().metric != metric
        is_resumed = bool(found) and step <= found[-1].step
        pace = _pace(found) if is_resumed else 0.0
        if is_resumed and step <= first:
            what = "are all" if step == first == found[-1].step else f"go back from {found[-1].step} to"
            raise UsageError(
                f"the steps of {names.step!r} {what} {step}, as if a run restarts ({log.origin})",
                hint="name the column of runs with --run NAME, or another column of steps with --step NAME; if only "
                "the learning rate separates runs, name the rate's column with --column NAME=learning_rate",
            )
        resumes += is_resumed
        if is_resumed:
            found = [one for one in found if one.step < step]
        kept = found[-1].train_seconds if found else 0.0
        if names.clock is not None and (is_resumed or not found):
            offset = kept + (pace * (step - found[-1].step) if found else 0.0) - logged
        elif names.clock is None and logged < before:
            offset = 0.0 if logged > kept else kept  # the log's clock went back to the checkpoint's time, or to 0
        before = before if math.isnan(logged) else logged
        found.append(
            Observation(
                step=step,
                samples=step * batch_size,
                train_seconds=logged + offset,
                metric=metric,
                loss=None,
                learning_rate=0.0,
            )
        )
    return Curve(tuple(_timed(found, names, log)), has_diverged, resumes, repeats)


def _evaluations(log: Log, names: Names, batch_size: int) -> Iterator[tuple[int, float, float]]:
    # Yield step, logged seconds (NaN if unknown) and metric
    shift = 1.0 if names.step == OF_LIGHTNING else 1.0 - log.first_step
    scale = 1.0
    if names.epoch_samples is not None:
        scale = names.epoch_samples / batch_size
        found = zip(_counts(log, names), log.rows, strict=True)
        counts = [step for step, row in found if row.get(names.metric) not in (None, "")]
        shift = float(bool(counts) and counts[0] == 0 and all(one.is_integer() for one in counts))  # counted from 0
    step = seconds = math.nan
    for row, evaluated in zip(log.rows, _evaluated(log, names), strict=True):
        here = _number(row, names.step, log)
        if not math.isnan(here) and here != step:
            step, seconds = here, math.nan
        timed = _seconds_in(row, names, log) - evaluated
        seconds = seconds if math.isnan(timed) else timed
        if names.step_seconds is not None:
            seconds = (step + shift) * names.step_seconds
        if row.get(names.metric) in (None, "") or math.isnan(step):
            continue
        steps = (step + shift) * scale
        if not 0 <= steps <= LARGEST:
            raise UsageError(f"step {steps:g} must be in [0, {LARGEST}] ({log.origin})")
        yield round(steps), seconds, float(f"{_number(row, names.metric, log):.{DIGITS}g}")


def _counts(log: Log, names: Names) -> list[float]:
    # Each row's number of the step; a row without a number belongs to the step before
    found: list[float] = []
    for row in log.rows:
        here = _number(row, names.step, log)
        found.append(found[-1] if found and math.isnan(here) else here)
    return found


def _evaluated(log: Log, names: Names) -> list[float]:
    # Seconds of evaluations that each row's time includes, since the log's clock began
    if not names.evaluations:
        return [0.0] * len(log.rows)
    found: list[float] = []
    by_step = {0.0: (0.0, 0.0)}  # the clock, and the evaluations' seconds until then
    step = clock = total = 0.0
    for rows in _by_step(log, names.step):
        here = _number(rows[0], names.step, log)
        step = step if math.isnan(here) else here
        times = [one for row in rows if not math.isnan(one := _seconds_in(row, names, log))]
        if times and times[0] < clock:  # a resumed run, whose clock restarts at the checkpoint's time or at 0
            at, spent = by_step[max((one for one in by_step if one < step), default=0.0)]
            total = spent if times[0] > at else 0.0
        spent_here = [math.fsum(_evaluation_seconds(row, names.evaluations, log)) for row in rows]
        after = total + math.fsum(spent_here)
        is_end = [
            spent > 0 or row.get(names.metric) not in (None, "") for row, spent in zip(rows, spent_here, strict=True)
        ]
        found += [after if one else total for one in is_end]
        total, clock = after, times[-1] if times else clock
        by_step[step] = clock, total
    return found


def _by_step(log: Log, name: str) -> Iterator[list[Row]]:
    # Rows of a step; rows without a number of the step belong to the step before
    rows: list[Row] = []
    for row in log.rows:
        if rows and row.get(name) not in (None, "", rows[0].get(name)):
            yield rows
            rows = []
        rows.append(row)
    yield rows


def _evaluation_seconds(row: Row, names: Sequence[str], log: Log) -> Iterator[float]:
    for name in names:
        if not math.isnan(spent := _number(row, name, log)):
            yield spent * seconds_of_unit(name)


def _number(row: Mapping[str, Any], name: str, log: Log) -> float:
    value = row.get(name)
    found = number_in(value)
    if math.isnan(found) and isinstance(value, str) and value and value.lower() not in NOT_A_NUMBER:
        raise UsageError(f"{name} = {value[:40]!r} must be a number ({log.origin})", hint=comma_hint(value))
    return found


def _pace(curve: Sequence[Observation]) -> float:
    known = [one for one in curve if not math.isnan(one.train_seconds)]
    if len(known) < 2:
        return 0.0
    first, last = known[0], known[-1]
    return (last.train_seconds - first.train_seconds) / (last.step - first.step)


def is_late(curve: Sequence[Observation]) -> bool:
    """Return True if the log seems to lack the run's first steps."""
    return len(curve) > 1 and curve[0].step > LATE * (curve[1].step - curve[0].step)


LATE = 5  # times the steps between evaluations


def _timed(curve: list[Observation], names: Names, log: Log) -> list[Observation]:
    # Seconds are filled in between evaluations by their steps, and before a clock's first evaluation; 0 if unknown.
    known = [one for one in curve if not math.isnan(one.train_seconds)]
    if not known or (len(known) < 2 and names.clock is not None):
        return [replace(one, train_seconds=0.0) for one in curve]
    # A clock tells the time from one evaluation to the next; the steps before the first took as long as later steps.
    pace = _pace(known)
    first = known[0].step * pace
    is_part = is_late(known) and known[0].train_seconds < first / 2  # of a run that began in another log
    before = first - known[0].train_seconds if names.clock is not None or is_part else 0.0
    pace = pace or known[0].train_seconds / max(1, known[0].step)
    end = known[-1].train_seconds + before + pace * (curve[-1].step - known[-1].step)
    points = [(0, 0.0), *((one.step, one.train_seconds + before) for one in known), (curve[-1].step, end)]
    known_steps, known_seconds = zip(*points, strict=True)
    seconds = np.interp([one.step for one in curve], known_steps, known_seconds)
    for one, at in zip(curve, seconds, strict=True):
        if not 0 <= at <= LONGEST_S:
            raise UsageError(f"{at:g} seconds at step {one.step} must be in [0, {LONGEST_S:g}] ({log.origin})")
    return [replace(one, train_seconds=float(at)) for one, at in zip(curve, seconds, strict=True)]
