"""Recorded curves: trials of a past search with their learning curves, as a table that any program can make.

``NAME.csv.gz`` (or ``NAME.csv``) has the columns ``trial, param.*, seed, step, train_seconds, metric``, the rows of a
trial one after the other in the order of time; an empty cell is not set. ``NAME.json`` beside it has ``name``,
``metric``, ``goal``, ``target`` and ``max_train_seconds``, the limit of a trial (null: as long as each ran).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from bssearch.errors import NotFoundError, UsageError
from bssearch.files import check_file, replacing
from bssearch.records import Goal, ParameterValue, Target

COLUMNS = ("trial", "seed", "step", "train_seconds", "metric")
PREFIX = "param."
LARGEST = 1e100
"""The largest number that a table may hold: a choice; squares and sums of such stay finite in double precision."""

SHORTEST_S, LONGEST_S = 1e-9, 1e9
"""The shortest limit of train seconds that a table may set, and the longest that a trial may take: choices; no clock
tells less, and nobody waits for thirty years."""
MOST_CHARACTERS = 2**27
"""Characters of a table at most: a choice; as numbers they take some 500 MB."""
MOST_LINES = 2**23
"""Lines of a table at most, empty ones too: a choice; of the shortest rows the characters allow more."""

SUFFIXES = (".csv.gz", ".csv")

OTHER_SEPARATORS = (";", "\t", "|")
"""What separates columns where commas do not; spreadsheets write semicolons where a comma marks decimals."""


@dataclass(frozen=True, slots=True)
class RecordedTrial:
    """A trial's parameters, those not set left out, and its evaluations in the order of time: three equal lengths."""

    number: int
    parameters: Mapping[str, ParameterValue]
    seed: int
    steps: tuple[int, ...]
    train_seconds: tuple[float, ...]
    metrics: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RecordedTable:
    """The trials of a past search, and what they were to reach; ``max_train_seconds`` is the limit that they had."""

    name: str
    target: Target
    max_train_seconds: float | None
    trials: tuple[RecordedTrial, ...]


def read_table(path: Path) -> RecordedTable:
    """Return a table and the description beside it.

    Raises `NotFoundError` where a file is missing, and `UsageError` naming file, line, column, value and bound.
    """
    beside = _beside(path)
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig", newline="")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig", newline="") as file
        ):
            about = _description(beside)
            trials = tuple(_trials(csv.reader(_bounded(file, path)), path.name))
    except FileNotFoundError:
        raise NotFoundError(f"no table {str(path)!r}", hint="`bssearch export STUDY --to curves` makes one") from None
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not trials:
        raise UsageError(f"{path} holds no trial")
    return RecordedTable(about.name, about.target, about.max_train_seconds, trials)


def _bounded(file: TextIO, path: Path) -> Iterator[str]:
    """Yield the lines of a table; raise `UsageError` for more than a table may hold: a small file may unfold."""
    left = MOST_CHARACTERS
    for _ in range(MOST_LINES):
        line = file.readline(left + 1)
        if not line:
            return
        left -= len(line)
        if left < 0:
            raise UsageError(f"{path} holds more than {MOST_CHARACTERS:,} characters", hint="split it into several")
        yield line
    if file.readline(1):
        raise UsageError(f"{path} holds more than {MOST_LINES:,} lines", hint="split it into several")


def check_separator(header: Sequence[str], origin: str) -> None:
    """Raise `UsageError` where the header of a table, read as separated by commas, is separated by something else."""
    found = next((one for one in OTHER_SEPARATORS if len(header) == 1 and one in header[0]), None)
    if found is not None:
        raise UsageError(
            f"the columns are separated by {found!r}; they must be separated by commas ({origin})",
            hint="write the table again with commas between columns, and points in decimal numbers",
        )


def write_table(table: RecordedTable, path: Path) -> list[Path]:
    """Write a table and its description beside it, both or none; return their paths.

    The same table gives the same bytes. Raises `UsageError` where the name does not end as that of a table must, and
    where they cannot be written.
    """
    head = {
        "name": table.name,
        "metric": table.target.metric,
        "goal": table.target.goal.value,
        "target": table.target.value,
        "max_train_seconds": table.max_train_seconds,
    }
    text = _csv_text(table.trials).encode()
    beside = _beside(path)
    contents = {
        path: gzip.compress(text, mtime=0) if path.suffix == ".gz" else text,
        beside: (json.dumps(head, indent=1) + "\n").encode(),
    }
    for target in contents:
        check_file(target)
    with replacing(list(contents), binary=True) as files:
        for file, content in zip(files, contents.values(), strict=True):
            file.write(content)
    return [path, beside]


class _Reader(Protocol):
    """What `csv.reader` returns."""

    line_num: int

    def __iter__(self) -> Iterator[list[str]]: ...

    def __next__(self) -> list[str]: ...


def _csv_text(trials: Sequence[RecordedTrial]) -> str:
    names = sorted({name for trial in trials for name in trial.parameters})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", *(f"{PREFIX}{name}" for name in names), *COLUMNS[1:]])
    for trial in trials:
        values = ["" if (value := trial.parameters.get(name)) is None else value for name in names]
        for step, seconds, metric in zip(trial.steps, trial.train_seconds, trial.metrics, strict=True):
            writer.writerow([trial.number, *values, trial.seed, step, seconds, metric])
    return text.getvalue()


def _beside(path: Path) -> Path:
    """Return the path of a table's description."""
    for suffix in SUFFIXES:
        if path.name.endswith(suffix) and path.name != suffix:
            return path.with_name(path.name.removesuffix(suffix) + ".json")
    raise UsageError(f"{str(path)!r} is no table of recorded curves: its name must end in {' or '.join(SUFFIXES)}")


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
    try:
        json.dumps(head, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{path} holds a text that is no Unicode") from None
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
