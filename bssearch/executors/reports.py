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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

STEP, SECONDS, LOSS = "step", "seconds", "loss"

LONGEST_LINE = 2**16
"""Bytes of a line that is looked at: a choice; of a longer one the rest is passed over."""

LARGEST_STEP = 2**53


@dataclass(frozen=True, slots=True)
class Report:
    """What a program says after so many optimizer steps; ``values`` are its metrics, and its loss, by name."""

    step: int
    values: Mapping[str, float]
    seconds: float | None = None


class ReportReader:
    """Reads reports from a stream of bytes, of which it keeps no more than a line.

    ``expressions`` map names to regular expressions with one group, ``step`` among them; none: JSON lines.
    """

    def __init__(self, expressions: Mapping[str, str]) -> None:
        self._expressions = {name: re.compile(text) for name, text in expressions.items()}
        self._found: dict[str, float] = {}
        self._rest = b""
        self._is_too_long = False

    def feed(self, chunk: bytes) -> Iterator[Report]:
        """Yield the reports that this chunk completes."""
        *whole, rest = chunk.split(b"\n")
        for end in whole:
            line, is_whole = self._rest + end, not self._is_too_long
            self._rest, self._is_too_long = b"", False
            if is_whole and len(line) <= LONGEST_LINE:
                yield from self._read(line.decode(errors="replace").strip())
        self._rest += rest
        if len(self._rest) > LONGEST_LINE:
            self._rest, self._is_too_long = b"", True

    def _read(self, line: str) -> Iterator[Report]:
        if not self._expressions:
            found = _of_json(line)
        else:
            for name, expression in self._expressions.items():
                if (match := expression.search(line)) and (value := _number(match[1])) is not None:
                    self._found[name] = value
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
    return {name: value for name, one in data.items() if (value := _number(one)) is not None}


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _report(found: Mapping[str, float]) -> Report | None:
    step, seconds = found.get(STEP), found.get(SECONDS)
    if step is None or not 0 <= step <= LARGEST_STEP or step != math.floor(step):
        return None
    if seconds is not None and not 0 <= seconds < math.inf:
        return None
    values = {name: value for name, value in found.items() if name not in {STEP, SECONDS}}
    return Report(int(step), values, seconds)
