"""Reads tables of recorded curves, as `bssearch.exchange.exporters.exports` writes them."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, FiniteFloat, NonNegativeInt, ValidationError

from bssearch.errors import NotFoundError, UsageError
from bssearch.exchange.exporters.exports import (
    COLUMNS,
    PREFIX,
    RecordedTable,
    RecordedTrial,
    description_path,
)
from bssearch.records import Goal, ParameterValue, Target

LARGEST = 1e100  # largest number of a parameter: squares and sums stay finite in double precision

# Shortest limit of train seconds in a table, and longest trial: clocks resolve no less, and thirty years is more than
# any training
SHORTEST_S, LONGEST_S = 1e-9, 1e9


class Description(BaseModel):
    """The file beside a table."""

    name: str | None = None
    metric: str = "metric"
    goal: Goal
    target: FiniteFloat
    max_train_seconds: Annotated[FiniteFloat, Field(ge=SHORTEST_S)] | None = None


class Row(BaseModel):
    """One evaluation; without a metric it is NaN."""

    trial: NonNegativeInt
    seed: NonNegativeInt
    step: NonNegativeInt
    train_seconds: Annotated[FiniteFloat, Field(ge=0, le=LONGEST_S)]
    metric: Annotated[float, BeforeValidator(lambda text: text or math.nan)]


def read_table(path: Path) -> RecordedTable:
    """Return a table and the description beside it.

    Raises `NotFoundError` if a file is missing, and `UsageError` naming file, line, column and value.
    """
    beside = description_path(path)
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            about = Description.model_validate_json(beside.read_text(encoding="utf-8-sig"))
            trials = _trials(csv.DictReader(file), path.name)
    except FileNotFoundError as error:
        hint = "`bssearch export STUDY --to curves` makes a table, and its description beside it"
        raise NotFoundError(f"no file {str(error.filename)!r}", hint=hint) from None
    except ValidationError as error:
        raise UsageError(f"{beside}: {_explained(error)}") from None
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    target = Target(metric=about.metric, value=about.target, goal=about.goal)
    return RecordedTable(about.name or path.stem, target, about.max_train_seconds, trials)


def _trials(reader: csv.DictReader[str], source: str) -> tuple[RecordedTrial, ...]:
    """Return the trials of a table, each with its rows in order."""
    header = [name.strip() for name in reader.fieldnames or ()]
    if wrong := [name for name in {*header, *COLUMNS} if header.count(name) != 1]:
        raise UsageError(f"{source}:1: there must be one column {min(wrong)!r}, not {header.count(min(wrong))}")
    reader.fieldnames = header
    found: dict[int, tuple[dict[str, str], list[Row]]] = {}
    for cells in reader:
        origin = f"{source}:{reader.line_num}"
        if None in cells or None in cells.values():
            raise UsageError(f"{origin}: there must be {len(header)} cells, as in the header")
        try:
            row = Row.model_validate(cells)
        except ValidationError as error:
            raise UsageError(f"{origin}: {_explained(error)}") from None
        setting = {name: text.strip() for name, text in cells.items() if name == "seed" or name.startswith(PREFIX)}
        known, rows = found.setdefault(row.trial, (setting, []))
        if setting != known:
            raise UsageError(f"{origin}: trial {row.trial} has another seed or other parameters than above")
        if rows and row.train_seconds < rows[-1].train_seconds:
            last = rows[-1].train_seconds
            raise UsageError(
                f"{origin}: train_seconds = {row.train_seconds:g} must be >= {last:g}, that of the row before"
            )
        rows.append(row)
    if not found:
        raise UsageError(f"{source} holds no trial")
    return tuple(_trial(number, *one) for number, one in found.items())


def _trial(number: int, setting: Mapping[str, str], rows: list[Row]) -> RecordedTrial:
    parameters = {name.removeprefix(PREFIX): _parsed(text) for name, text in setting.items() if text and name != "seed"}
    steps, seconds, metrics = zip(*((row.step, row.train_seconds, row.metric) for row in rows), strict=True)
    return RecordedTrial(number, parameters, rows[0].seed, steps, seconds, metrics)


def _explained(error: ValidationError) -> str:
    """Return the first problem with its field and value."""
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))} = {problem['input']!r}: {problem['msg']}"


def _parsed(text: str) -> ParameterValue:
    """Parse a cell as true or false, a number, or a text."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if abs(value) <= LARGEST else text
    return text
