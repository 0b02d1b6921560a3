"""Learning curves in training logs: names of metric, steps and seconds, resumed runs, and unlogged time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bssearch.errors import UsageError
from bssearch.exchange.importers.columns import seconds_of_unit
from bssearch.exchange.importers.imported_run import LARGEST, comma_hint
from bssearch.exchange.importers.logs import CLOCK, SPREAD_SECONDS, Log, number_in
from bssearch.exchange.importers.runs import LONGEST_S, LOSS
from bssearch.records import Observation, is_metric

# Names of optimizer steps and of seconds since a run began, the surest first, and of seconds since 1970
STEPS = (
    *("trainer/global_step", "train/global_step", "global_step", "train_step", "training_step", "step", "steps"),
    *("iteration", "iter"),
)
SECONDS = (
    *("train_seconds", SPREAD_SECONDS, "time_total_s", "_runtime", "relative time (process)", "relative time (wall)"),
    *("runtime", "elapsed_seconds", "elapsed_time", "elapsed", "wall_seconds", "seconds"),
)
CLOCKS = (CLOCK, "timestamp", "wall_time")

EPOCH = "epoch"

OF_LIGHTNING = "trainer/global_step"  # Lightning's number of the step, from 0

NOT_A_NUMBER = frozenset({"nan", "+nan", "-nan", "none", "null", "n/a", "na", "true", "false"})

DIGITS = 7  # of a metric; loggers keep it in single precision, which makes 0.9 0.89999998

MOST_NAMED = 12  # names in a message

_VALIDATION = re.compile(r"(?:metrics/)?(?:val|valid|validation|eval|test)[/_.]")
_NO_METRICS = ("runtime", "per_second", "_time", "step", "epoch")
_CHART = re.compile(r".* - .*__(?:MIN|MAX)")


def listed(names: Sequence[str]) -> str:
    """Names for a message."""
    more = len(names) - MOST_NAMED
    return ", ".join(map(repr, names[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "") or "no values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names in the logs of an import, and those of one log.

    ``step`` counts epochs if ``epoch_samples`` is given; it is "" if each log tells. ``clock`` serves without
    ``seconds``.
    """

    metric: str
    step: str
    seconds: str | None
    epoch_samples: int | None
    clock: str | None = None

    @classmethod
    def of(
        cls, logs: Sequence[Log], metric: str | None, step: str | None, seconds: str | None, epoch_samples: int | None
    ) -> Names:
        """Names given, and the metric if it is not; raise `UsageError` for names that no log has."""
        there = list(dict.fromkeys(name for log in logs for row in log.rows for name in row))
        place = logs[0].origin
        if any(map(_CHART.fullmatch, there)):
            raise UsageError(
                f"{place} is a W&B chart, which lacks the runs' settings",
                hint="export the runs' histories with their configuration, or the table of runs for `import runs`",
            )
        for option, name in (("--metric", metric), ("--step", step), ("--seconds", seconds)):
            if name is not None and name not in there:
                raise UsageError(f"{option} {name}: the logs have {listed(there)} ({place})")
        found = metric or _metric(there, place)
        if not found.isprintable():
            raise UsageError(f"the metric's name {found!r} must be printable ({place})")
        return cls(metric=found, step=step or "", seconds=seconds, epoch_samples=epoch_samples)

    def of_log(self, log: Log) -> Names:
        """Names in one log; raise `UsageError` without steps."""
        first = {name: value for row in reversed(log.rows) for name, value in row.items() if value not in (None, "")}
        there = dict.fromkeys(name for name, value in first.items() if not math.isnan(number_in(value)))
        step = self.step if self.step in there else _first(there, (EPOCH,) if self.epoch_samples else STEPS)
        if step is None:
            missing = f"{EPOCH!r}, which --epoch-samples counts" if self.epoch_samples else "optimizer steps"
            raise UsageError(
                f"the log has no {missing}: it has {listed(list(there))} ({log.origin})",
                hint="--step NAME; if it counts epochs, with --epoch-samples N",
            )
        timed = self.seconds if self.seconds in there else _first(there, SECONDS)
        return replace(self, step=step, seconds=timed, clock=None if timed else _first(there, CLOCKS))

    @property
    def sentence(self) -> str:
        """What is read."""
        steps = self.step if self.epoch_samples is None else f"{self.step} × {self.epoch_samples} / batch size"
        timed = self.seconds or (f"{self.clock}, from the first step on" if self.clock else "unknown")
        return f"metric: {self.metric}; steps: {steps}; seconds: {timed}"


def _first(there: Mapping[str, Any], wanted: Sequence[str]) -> str | None:
    lower = {name.lower(): name for name in reversed(list(there))}
    return next((lower[one] for one in wanted if one in lower), None)


def _metric(there: Sequence[str], place: str) -> str:
    logged = [one for one in there if _VALIDATION.match(one.lower()) and not one.lower().endswith(_NO_METRICS)]
    found = [one for one in logged if not LOSS.fullmatch(one)] or logged
    found = [one for one in found if "test" not in one.lower()] or found
    if len(found) != 1:
        raise UsageError(
            f"the metric is ambiguous: the logs have {listed(found or there)} ({place})", hint="--metric NAME"
        )
    return found[0]


@dataclass(frozen=True, slots=True)
class Curve:
    """Evaluations in order; whether the run diverged, and how often its steps went back."""

    observations: tuple[Observation, ...]
    has_diverged: bool
    resumes: int


def curve_of(log: Log, names: Names, batch_size: int) -> Curve:
    """Learning curve of a log; the evaluations of a resumed run replace the earlier ones from its step on."""
    found: list[Observation] = []
    offset, before, resumes = 0.0, -math.inf, 0
    has_diverged = False
    rows = list(_evaluations(log, names, batch_size))  # all are checked, those after a divergence too
    last = max((place for place, (*_, metric) in enumerate(rows) if not math.isnan(metric)), default=-1)
    for place, (step, logged, metric) in enumerate(rows):
        if math.isnan(metric) and place < last:
            continue  # a missing cell, because a run that diverges stays so
        if not is_metric(metric):
            has_diverged = True
            break
        first = found[0].step if found else math.inf
        is_resumed = bool(found) and step <= found[-1].step
        pace = _pace(found) if is_resumed else 0.0
        if is_resumed and step <= first:
            what = "are all" if step == first == found[-1].step else f"go back from {found[-1].step} to"
            raise UsageError(
                f"the steps of {names.step!r} {what} {step}: they begin anew ({log.origin})",
                hint="--run NAME names a column that tells runs apart; --step NAME another column of steps",
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
    return Curve(tuple(_timed(found, names, log)), has_diverged, resumes)


def _evaluations(log: Log, names: Names, batch_size: int) -> Iterator[tuple[int, float, float]]:
    """Yield step, logged seconds (NaN if unknown) and metric."""
    shift = 1.0 if names.step == OF_LIGHTNING else 1.0 - log.first_step
    scale = 1.0
    if names.epoch_samples is not None:
        scale = names.epoch_samples / batch_size
        counts = [_number(row, names.step, log) for row in log.rows if row.get(names.metric) not in (None, "")]
        shift = float(bool(counts) and counts[0] == 0 and all(one.is_integer() for one in counts))  # counted from 0
    step = seconds = math.nan
    for row in log.rows:
        here = _number(row, names.step, log)
        if not math.isnan(here) and here != step:
            step, seconds = here, math.nan
        timed = math.nan
        if (name := names.seconds or names.clock) is not None:
            timed = _number(row, name, log) * seconds_of_unit(names.seconds or "")
        seconds = seconds if math.isnan(timed) else timed
        if row.get(names.metric) in (None, "") or math.isnan(step):
            continue
        steps = (step + shift) * scale
        if not 0 <= steps <= LARGEST:
            raise UsageError(f"step {steps:g} must be in [0, {LARGEST}] ({log.origin})")
        yield round(steps), seconds, float(f"{_number(row, names.metric, log):.{DIGITS}g}")


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


def _timed(curve: list[Observation], names: Names, log: Log) -> list[Observation]:
    # Seconds are filled in between evaluations by their steps, and before the first one of a clock; 0 if unknown.
    known = [one for one in curve if not math.isnan(one.train_seconds)]
    if not known or (len(known) < 2 and names.clock is not None):
        return [replace(one, train_seconds=0.0) for one in curve]
    # A clock tells the time from one evaluation to the next; the steps before the first took as long as later ones.
    pace = _pace(known)
    before = 0.0 if names.clock is None else known[0].step * pace - known[0].train_seconds
    pace = pace or known[0].train_seconds / max(1, known[0].step)
    end = known[-1].train_seconds + before + pace * (curve[-1].step - known[-1].step)
    points = [(0, 0.0), *((one.step, one.train_seconds + before) for one in known), (curve[-1].step, end)]
    known_steps, known_seconds = zip(*points, strict=True)
    seconds = np.interp([one.step for one in curve], known_steps, known_seconds)
    for one, at in zip(curve, seconds, strict=True):
        if not 0 <= at <= LONGEST_S:
            raise UsageError(f"{at:g} seconds at step {one.step} must be in [0, {LONGEST_S:g}] ({log.origin})")
    return [replace(one, train_seconds=float(at)) for one, at in zip(curve, seconds, strict=True)]
