"""Runs that were made elsewhere, one a row of a table: read from CSV, and checked cell by cell."""

from __future__ import annotations

import csv
import difflib
import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bssearch.errors import NotFoundError, UsageError
from bssearch.records import Configuration, ParameterValue
from bssearch.space import REGULAR
from bssearch.space.domains import LIMITS

COLUMNS = ("batch_size", "seed", "reached", "steps", "train_seconds", "final_metric", "device", "precision")
REQUIRED = ("batch_size", "reached")
PREFIX = "param."
ALIASES = {"param.lr": "param.learning_rate"}
TYPED = ("learning_rate", *REGULAR, "optimizer")
"""The parameters for which a configuration has a field that cannot be empty."""

SPLIT = ("micro_batch_size", "accumulation_steps", "world_size")
BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
LARGEST = 2**31 - 1
LARGEST_SEED = 2**62
LONGEST_S = 1e9
MOST_RUNS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run; None is what its table does not say.

    ``steps`` and ``train_seconds`` are those to the target, or all that it ran where it missed the target. Of the
    configuration, what is not known has a placeholder in its field and None under its own name in ``parameters``.
    ``origin`` says where the run stands, such as ``runs.csv:12``.
    """

    origin: str
    configuration: Configuration
    seed: int | None = None
    reached: bool = True
    steps: int | None = None
    train_seconds: float | None = None
    final_metric: float | None = None
    device: str | None = None
    precision: str | None = None


@dataclass(frozen=True, slots=True)
class RunTable:
    """The runs of a table in its order, and what a reader of them must know, each a sentence."""

    runs: tuple[Run, ...]
    notes: tuple[str, ...]


def read_runs(path: Path) -> RunTable:
    """Read a CSV file with one row a run; columns are `COLUMNS` and ``param.NAME``, an empty cell is not known.

    Raises `NotFoundError` where there is no file, and `UsageError` naming line, column, value and bound.
    """
    return parse_runs(read_text(path), str(path))


def parse_runs(text: str, source: str) -> RunTable:
    """Return the runs of a CSV text; ``source`` is what its lines are named after. See `read_runs`."""
    rows = csv_rows(text, source)
    line, header = next(rows, (1, []))
    columns = _columns(header, f"{source}:{line}")
    runs: list[Run] = []
    without_metric: list[str] = []
    other_splits: list[str] = []
    for line, cells in rows:
        origin = f"{source}:{line}"
        if len(cells) != len(columns):
            raise UsageError(f"a row of {len(cells)} cells, where the header has {len(columns)} columns ({origin})")
        if len(runs) == MOST_RUNS:
            raise UsageError(f"more than {MOST_RUNS:,} runs ({origin})", hint="import them as several studies")
        row = _Row(dict(zip(columns, (cell.strip() for cell in cells), strict=True)), origin)
        run = row.run()
        runs.append(run)
        if run.final_metric is None and row.cells.get("final_metric"):
            without_metric.append(origin)
        if any(value not in (None, getattr(run.configuration, name)) for name, value in row.split().items()):
            other_splits.append(origin)
    if not runs:
        raise UsageError(f"no runs: {source} has no row under its header")
    notes = [f"column {number} has no name and is left out" for number, name in enumerate(header, 1) if not name]
    if without_metric:
        notes.append(f"final_metric is NaN, and so not known, {_of(without_metric, runs)}")
    if other_splits:
        notes.append(
            f"batch_size is not micro_batch_size × accumulation_steps × world_size {_of(other_splits, runs)}: "
            "taken as run without accumulation"
        )
    return RunTable(tuple(runs), tuple(notes))


def make_configuration(
    batch_size: int, values: Mapping[str, ParameterValue], origin: str, label: Callable[[str], str] = str
) -> Configuration:
    """Return the configuration of a run from its parameters by name, None where a value is not known.

    `TYPED` ones that are not known get a placeholder, and None under their own name in ``parameters``. The split into
    micro-batches is taken where its factors give the batch size. ``label`` names a parameter as its file does. Raises
    `UsageError` for a value outside what its parameter can be.
    """
    given = {name: value for name, value in values.items() if value is not None}
    typed: dict[str, Any] = {"learning_rate": 1.0, **dict.fromkeys(REGULAR, 0.0), "optimizer": "unknown"}
    for name in (one for one in TYPED if one in given):
        value = given[name]
        typed[name] = str(value) if name == "optimizer" else _within_limits(name, value, label(name), origin)
    parts = {name: integer(str(given[name]), label(name), origin, low=1) for name in SPLIT if name in given}
    micro_batch_size, accumulation_steps, world_size = _split(batch_size, parts)
    own = {name: value for name, value in values.items() if name not in (*TYPED, *SPLIT)}
    return Configuration(
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        accumulation_steps=accumulation_steps,
        world_size=world_size,
        parameters={**own, **{name: None for name in TYPED if name not in given}},
        **typed,
    )


def read_text(path: Path) -> str:
    """Return a file's text; raise `NotFoundError` where it is not there, `UsageError` where it is no UTF-8 text."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"no file {str(path)!r}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line} is not UTF-8 text: byte 0x{data[error.start]:02x}") from None


def integer(text: str, label: str, origin: str, *, low: int, high: int = LARGEST) -> int:
    """Return an integer, also one written as ``120.0``; raise `UsageError` where it is none or out of its bounds."""
    value = _float(text)
    try:
        found = int(text) if "_" not in text else None
    except ValueError:
        found = int(value) if value.is_integer() else None
    if found is None or not low <= found <= high:
        raise UsageError(f"{label} = {text!r} must be an integer in [{low}, {high}] ({origin})")
    return found


def parameter_value(text: str, label: str, origin: str) -> ParameterValue:
    """Return what a text stands for: a boolean (true, false), a number, or itself; infinities and NaN are refused."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    value = _float(text)
    if math.isnan(value) and text.lower().lstrip("+-") != "nan":
        return text
    if not math.isfinite(value):
        raise UsageError(
            f"{label} = {text!r} must be a finite number or a text ({origin})", hint="leave unknown cells empty"
        )
    try:
        return int(text)
    except ValueError:
        return value


@dataclass(frozen=True, slots=True)
class _Row:
    """The cells of a row by column."""

    cells: Mapping[str, str]
    origin: str

    def run(self) -> Run:
        """Return the run that the row is."""
        batch_size = integer(self._text("batch_size"), "batch_size", self.origin, low=1)
        reached = BOOLEANS.get(self._text("reached").lower())
        if reached is None:
            raise UsageError(
                f"reached = {self._text('reached')!r} must be one of {', '.join(BOOLEANS)} ({self.origin})"
            )
        return Run(
            origin=self.origin,
            configuration=make_configuration(batch_size, self._parameters(), self.origin, PREFIX.__add__),
            seed=self._integer("seed", low=0, high=LARGEST_SEED),
            reached=reached,
            steps=self._integer("steps", low=1 if reached else 0),
            train_seconds=self._train_seconds(reached),
            final_metric=self._final_metric(),
            device=self._text("device") or None,
            precision=self._text("precision") or None,
        )

    def split(self) -> dict[str, float | None]:
        """Return what the row says of the split of its batch."""
        return {name: float(self.cells[label]) if self.cells.get(label := PREFIX + name) else None for name in SPLIT}

    def _text(self, column: str) -> str:
        return self.cells.get(column, "")

    def _integer(self, column: str, *, low: int, high: int = LARGEST) -> int | None:
        text = self._text(column)
        return integer(text, column, self.origin, low=low, high=high) if text else None

    def _train_seconds(self, reached: bool) -> float | None:
        text = self._text("train_seconds")
        if not text:
            return None
        seconds = _float(text)
        if not (0 < seconds <= LONGEST_S or (seconds == 0 and not reached)):
            bound = f"> 0 where the target was reached, and <= {LONGEST_S:g}" if reached else f"in [0, {LONGEST_S:g}]"
            raise UsageError(f"train_seconds = {text!r} must be {bound} ({self.origin})")
        return seconds

    def _final_metric(self) -> float | None:
        text = self._text("final_metric")
        if not text or text.lower().lstrip("+-") == "nan":
            return None
        metric = _float(text)
        if not math.isfinite(metric):
            raise UsageError(
                f"final_metric = {text!r} must be a finite number, NaN, or empty where it is not known ({self.origin})"
            )
        return metric

    def _parameters(self) -> dict[str, ParameterValue]:
        texts = {name.removeprefix(PREFIX): text for name, text in self.cells.items() if name.startswith(PREFIX)}
        return {
            name: parameter_value(text, PREFIX + name, self.origin) if text else None for name, text in texts.items()
        }


def csv_rows(text: str, source: str, *, skipinitialspace: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not blank, with the line on which it begins; raise `UsageError` for what is no CSV."""
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=skipinitialspace, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise UsageError(f"{source}:{line} is not valid CSV: {error}") from None
        if cells is None:
            return
        if cells:
            yield line, cells


def _columns(header: list[str], origin: str) -> list[str]:
    """Return the columns' names, checked: those without a name are numbered."""
    names = [ALIASES.get(name.strip(), name.strip()) for name in header]
    for name, count in Counter(name for name in names if name).items():
        if count > 1:
            raise UsageError(f"the column {name!r} stands {count} times ({origin})")
        if name not in COLUMNS:
            _check_parameter(name, origin)
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        there_are = f"it has {', '.join(map(repr, names))}" if any(names) else "it has none"
        raise UsageError(
            f"the table lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}: {there_are} ({origin})",
            hint=f"the columns are {', '.join(COLUMNS)}, {PREFIX}NAME, separated by commas",
        )
    return [name or f"#{number}" for number, name in enumerate(names)]


def _check_parameter(name: str, origin: str) -> None:
    """Raise `UsageError` for a column that is not a parameter's."""
    parameter = name.removeprefix(PREFIX)
    if name == PREFIX or (name != parameter and parameter in COLUMNS):
        raise UsageError(
            f"{name!r} is no parameter's column ({origin})", hint=f"{parameter or 'NAME'} is its own column"
        )
    if name == parameter:  # without it, runs that differ in a parameter would count as repeats
        near = difflib.get_close_matches(name, [*COLUMNS, *TYPED, *SPLIT, "lr"], n=1)
        guess = near[0] if near and near[0] in COLUMNS else f"{PREFIX}{near[0] if near else name}"
        raise UsageError(
            f"unknown column {name!r} ({origin}); did you mean {guess!r}?",
            hint=f"the columns are {', '.join(COLUMNS)}; a parameter's is called {PREFIX}NAME, and commas "
            "separate them; leave out all others",
        )


def _within_limits(name: str, value: ParameterValue, label: str, origin: str) -> float:
    low, high, rule = LIMITS.get(name, (math.nextafter(0.0, 1.0), math.inf, "must be > 0"))
    if isinstance(value, str | bool | None) or not (low <= value <= high and math.isfinite(value)):
        number = "" if isinstance(value, int | float) and not isinstance(value, bool) else "a number and "
        raise UsageError(f"{label} = {value!r} {rule.replace('must be ', f'must be {number}')} ({origin})")
    return float(value)


def _split(batch_size: int, parts: Mapping[str, int]) -> tuple[int, int, int]:
    """Return the factors of `SPLIT` of which some are given; where they do not give the batch size, one micro-batch."""
    world, micro = parts.get("world_size", 1), parts.get("micro_batch_size")
    accumulation = parts.get("accumulation_steps", 1 if micro is None else max(1, batch_size // (micro * world)))
    micro = micro or max(1, batch_size // (accumulation * world))
    if micro * accumulation * world != batch_size:
        accumulation, world = 1, world if batch_size % world == 0 else 1
        micro = batch_size // world
    return micro, accumulation, world


def _float(text: str) -> float:
    """Return the number that a text is, NaN where it is none."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


def _of(origins: list[str], runs: list[Run]) -> str:
    return f"in {len(origins)} of {len(runs)} runs (the first: {origins[0]})"
