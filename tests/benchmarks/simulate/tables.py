"""Reads tables of recorded curves, as `bssearch.recorded` writes them."""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bssearch.errors import NotFoundError, UsageError
from bssearch.recorded import COLUMNS, PREFIX, RecordedTable, RecordedTrial, check_separator, description_path
from bssearch.records import Goal, ParameterValue, Target

LARGEST = 1e100
"""The largest number that a table may hold: a choice; squares and sums of such stay finite in double precision."""

SHORTEST_S, LONGEST_S = 1e-9, 1e9
"""The shortest limit of train seconds that a table may set, and the longest that a trial may take: choices; no clock
tells less, and nobody waits for thirty years."""


def read_table(path: Path) -> RecordedTable:
    """Return a table and the description beside it.

    Raises `NotFoundError` where a file is missing, and `UsageError` naming file, line, column, value and bound.
    """
    beside = description_path(path)
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig", newline="")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig", newline="") as file
        ):
            about = _description(beside)
            trials = tuple(_trials(csv.reader(file), path.name))
    except FileNotFoundError:
        raise NotFoundError(f"no table {str(path)!r}", hint="`bssearch export STUDY --to curves` makes one") from None
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not trials:
        raise UsageError(f"{path} holds no trial")
    return RecordedTable(about.name, about.target, about.max_train_seconds, trials)


class _Reader(Protocol):
    """What `csv.reader` returns."""

    line_num: int

    def __iter__(self) -> Iterator[list[str]]: ...

    def __next__(self) -> list[str]: ...


def _description(path: Path) -> RecordedTable:
    """Return what stands beside a table, as a table without trials."""
    try:
        head = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise NotFoundError(
            f"no file {str(path)!r}", hint="it holds name, metric, goal, target and max_train_seconds of the table"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(head, dict):
        raise UsageError(f"{path} must hold an object with name, metric, goal, target and max_train_seconds")
    limit = head.get("max_train_seconds")
    if limit is not None and not (_is_number(limit) and limit >= SHORTEST_S):
        raise UsageError(f"{path}: max_train_seconds = {limit!r} must be a number >= {SHORTEST_S:g}, or null")
    if not _is_number(head.get("target")):
        raise UsageError(f"{path}: target = {head.get('target')!r} must be a number, the same for all trials")
    if str(head.get("goal")) not in set(Goal):
        raise UsageError(f"{path}: goal = {head.get('goal')!r} must be {' or '.join(Goal)}")
    target = Target(metric=str(head.get("metric", "metric")), value=float(head["target"]), goal=Goal(head["goal"]))
    name = str(head.get("name") or path.stem)
    return RecordedTable(name, target, None if limit is None else float(limit), ())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _trials(rows: _Reader, source: str) -> Iterator[RecordedTrial]:
    header = [name.strip() for name in next(rows, [])]
    check_separator(header, f"{source}:1")
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise UsageError(f"{source}:1: no column {missing[0]!r}; it has {', '.join(header) or 'none'}")
    if repeated := {name for name in header if header.count(name) > 1}:
        raise UsageError(f"{source}:1: column {min(repeated)!r} stands there twice")
    place = {name: header.index(name) for name in header}
    seen: set[int] = set()
    current: _Trial | None = None
    for cells in rows:
        if not cells:
            continue
        row = _Row(f"{source}:{rows.line_num}", cells, place)
        number = row.whole("trial")
        if current is None or current.number != number:
            if current is not None:
                yield current.done()
            if number in seen:
                raise UsageError(f"{row.origin}: trial {number} goes on here; its rows must stand together")
            seen.add(number)
            current = _Trial(row)
        elif row.setting() != current.setting:
            raise UsageError(f"{row.origin}: trial {number} has another seed or other parameters than above")
        current.add(row)
    if current is not None:
        yield current.done()


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a table; ``origin`` is where it stands."""

    origin: str
    cells: Sequence[str]
    place: Mapping[str, int]

    def cell(self, name: str) -> str:
        if len(self.cells) != len(self.place):
            raise UsageError(f"{self.origin}: {len(self.cells)} cells; the header has {len(self.place)}")
        return self.cells[self.place[name]].strip()

    def whole(self, name: str) -> int:
        text = self.cell(name)
        try:
            value = int(text)
        except ValueError:
            value = -1
        if value < 0:
            raise UsageError(f"{self.origin}: {name} = {text!r} must be a whole number >= 0")
        return value

    def number(self, name: str) -> float:
        text = self.cell(name)
        try:
            return float(text)
        except ValueError:
            raise UsageError(f"{self.origin}: {name} = {text!r} must be a number") from None

    def setting(self) -> list[str]:
        """Return the cells of what is the same in all rows of a trial."""
        return [self.cell(name) for name in self.place if name == "seed" or name.startswith(PREFIX)]

    def parameters(self) -> dict[str, ParameterValue]:
        named = {name.removeprefix(PREFIX): self.cell(name) for name in self.place if name.startswith(PREFIX)}
        return {name: _parsed(text) for name, text in named.items() if text}


class _Trial:
    """A trial while its rows are read."""

    def __init__(self, first: _Row) -> None:
        self.number = first.whole("trial")
        self.setting = first.setting()
        self._parameters = first.parameters()
        self._seed = first.whole("seed")
        self._steps: list[int] = []
        self._seconds: list[float] = []
        self._metrics: list[float] = []

    def add(self, row: _Row) -> None:
        """Take in an evaluation. Raises `UsageError` where time runs backwards; one without a metric is NaN."""
        step, seconds = row.whole("step"), row.number("train_seconds")
        last = self._seconds[-1] if self._seconds else 0.0
        if not last <= seconds <= LONGEST_S:
            raise UsageError(
                f"{row.origin}: train_seconds = {seconds:g} of trial {self.number} must be >= {last:g}, that of the "
                f"row before, and <= {LONGEST_S:g}"
            )
        self._steps.append(step)
        self._seconds.append(seconds)
        self._metrics.append(row.number("metric") if row.cell("metric") else math.nan)

    def done(self) -> RecordedTrial:
        """Return the trial with all its rows."""
        return RecordedTrial(
            self.number,
            self._parameters,
            self._seed,
            tuple(self._steps),
            tuple(self._seconds),
            tuple(self._metrics),
        )


def _parsed(text: str) -> ParameterValue:
    """Return a cell as what it looks like: true or false, a number, or else the text."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if abs(value) <= LARGEST else text  # no number that can be reckoned with
    return text
