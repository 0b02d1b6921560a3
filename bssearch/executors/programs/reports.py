r"""The progress of any program, read from what it prints: JSON lines, or regular expressions over its log.

A JSON line is an object such as ``{"step": 100, "accuracy": 0.91, "seconds": 3.2, "loss": 0.4}``. Without ``seconds``,
the program's own of training, the wall clock stands for them. Expressions have one group each::

    step: 'step (\d+)'
    accuracy: 'acc=([0-9.]+)'

What several of them find makes one report when the line with its step comes.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bssearch.errors import UsageError

STEP, SECONDS, LOSS = "step", "seconds", "loss"

LONGEST_LINE = 2**16
"""Bytes of a JSON line that is looked at: a choice; a longer one is passed over."""

LONGEST_LOG_LINE = 2**12
"""The same where expressions are searched in it: a choice; many take the square of its length."""

LONGEST_NAME = 100
"""Characters of a metric's name: a choice; what has a longer one, or one that cannot be printed, is passed over."""

LARGEST_STEP = 2**40
"""A choice: a step each microsecond for twelve days; its samples are kept in 64 bits."""

LARGEST_SECONDS = 1e9
"""A choice: thirty years."""

_ENDS_OF_LINES = re.compile(rb"[\r\n]")


REPORTS_TIMED = 4
"""Reports between which steps are timed, at least: a choice."""

SECONDS_TIMED = 1.0
"""Seconds of reports between which steps are timed, at least: a choice; the clock is that of another process."""

SECONDS_ENOUGH = 10.0
"""Seconds after which fewer reports tell the time of a step, too: a choice."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a program says after so many optimizer steps; ``values`` are its metrics, and its loss, by name."""

    step: int
    values: Mapping[str, float]
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the steps of a run took, by its reports: all that it did, and whose seconds they are."""

    seconds: float
    steps: int
    is_own: bool


def pace_of(reports: Iterator[Report]) -> tuple[Pace | None, int]:
    """Return how long the steps between some reports took, None where they are too few to tell, and how many came."""
    began, count, pace = 0.0, 0, None
    first: Report | None = None
    for report in reports:
        now = time.monotonic()
        count += 1
        if first is None:
            first, began = report, now
            continue
        pace = _pace_between(first, report, now - began) or pace
        is_enough = count > REPORTS_TIMED or now - began >= SECONDS_ENOUGH
        if pace is not None and is_enough and now - began >= SECONDS_TIMED:
            break
    return pace, count


def _pace_between(first: Report, last: Report, wall_seconds: float) -> Pace | None:
    """Return how long the steps between two reports took, None where that cannot be told."""
    is_own, seconds = False, wall_seconds
    if first.seconds is not None and last.seconds is not None:
        is_own, seconds = True, last.seconds - first.seconds
    steps = last.step - first.step
    return Pace(seconds, steps, is_own) if steps > 0 and seconds > 0 else None


class ReportReader:
    """Reads reports from a stream of bytes, of which it keeps no more than a line.

    ``expressions`` map names to regular expressions with one group, ``step`` among them; none: JSON lines. ``lines`` is
    how many lines have come, ``unmatched`` which expressions have found no number in any of them, and ``misread`` what
    else they have found.
    """

    def __init__(self, expressions: Mapping[str, str]) -> None:
        self._expressions = {name: re.compile(text) for name, text in expressions.items()}
        self._longest = LONGEST_LOG_LINE if expressions else LONGEST_LINE
        self.lines = 0
        self.unmatched = dict(expressions)
        self.misread: dict[str, str] = {}
        self._found: dict[str, float] = {}
        self._rest = bytearray()
        self._is_too_long = False

    def feed(self, chunk: bytes) -> Iterator[Report]:
        """Yield the reports that this chunk completes; a carriage return ends a line, too.

        Raises `UsageError` for a step or seconds out of their bounds.
        """
        *whole, rest = _ENDS_OF_LINES.split(chunk)
        for end in whole:
            line, is_whole = bytes(self._rest) + end, not self._is_too_long
            self._rest, self._is_too_long = bytearray(), False
            self.lines += bool(line)
            if line and is_whole and len(line) <= self._longest:
                yield from self._read(line.decode(errors="replace"))
        self._rest += rest
        if len(self._rest) > self._longest:
            self._rest, self._is_too_long = bytearray(), True

    def end(self) -> Iterator[Report]:
        """Yield the report of a last line without a line end, of a program that has ended well; raise as `feed`."""
        yield from self.feed(b"\n")

    def _read(self, line: str) -> Iterator[Report]:
        if not self._expressions:
            found = _of_json(line.strip())
        else:
            for name, expression in self._expressions.items():
                if (match := expression.search(line)) is None:
                    continue
                if (value := _number(match[1])) is None:
                    self.misread[name] = str(match[1])[:LONGEST_NAME]
                else:
                    self._found[name] = value
                    self.unmatched.pop(name, None)
            if STEP not in self._found:
                return
            found, self._found = self._found, {}
        if found is not None and (report := _report(found)) is not None:
            yield report


def _of_json(line: str) -> dict[str, float] | None:
    if not line.startswith("{"):
        return None
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    return {name: value for name, one in data.items() if _is_name(name) and (value := _number(one)) is not None}


def _is_name(text: str) -> bool:
    return len(text) <= LONGEST_NAME and text.isprintable()


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def _report(found: Mapping[str, float]) -> Report | None:
    step, seconds = found.get(STEP), found.get(SECONDS)
    if step is None:
        return None
    if not 0 <= step <= LARGEST_STEP or step != math.floor(step):
        raise UsageError(f"the command reports step {step:g}: a step is a whole number from 0 to {LARGEST_STEP:g}")
    if seconds is not None and not 0 <= seconds <= LARGEST_SECONDS:
        raise UsageError(f"the command reports {seconds:g} seconds: they must be from 0 to {LARGEST_SECONDS:g}")
    values = {name: value for name, value in found.items() if name not in {STEP, SECONDS}}
    return Report(int(step), values, seconds)
