"""A past search's trials with their learning curves, as a table.

``NAME.csv.gz`` (or ``NAME.csv``): ``trial, param.*, seed, step, train_seconds, metric``, by trial in order of time;
empty cells are unset. ``NAME.json``: ``name``, ``metric``, ``goal``, ``target`` and ``max_train_seconds`` (a trial's
limit or null).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bssearch.errors import UsageError
from bssearch.files import check_file, replacing
from bssearch.records import ParameterValue, Target

COLUMNS = ("trial", "seed", "step", "train_seconds", "metric")
PREFIX = "param."
SUFFIXES = (".csv.gz", ".csv")

OTHER_SEPARATORS = (";", "\t", "|")  # Spreadsheets write semicolons in locales with decimal commas


@dataclass(frozen=True, slots=True)
class RecordedTrial:
    """Parameters, and evaluations in order of time."""

    number: int
    parameters: Mapping[str, ParameterValue]
    seed: int
    steps: tuple[int, ...]
    train_seconds: tuple[float, ...]
    metrics: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RecordedTable:
    """Trials and their target; ``max_train_seconds`` is a trial's limit."""

    name: str
    target: Target
    max_train_seconds: float | None
    trials: tuple[RecordedTrial, ...]


def check_separator(header: Sequence[str], origin: str) -> None:
    """Raise `UsageError` unless commas separate the columns."""
    found = next((one for one in OTHER_SEPARATORS if len(header) == 1 and one in header[0]), None)
    if found is not None:
        raise UsageError(
            f"the columns are separated by {found!r}; they must be separated by commas ({origin})",
            hint="write the table again with commas between columns, and points in decimal numbers",
        )


def write_table(table: RecordedTable, path: Path) -> list[Path]:
    """Write a table and its description; return their paths.

    Equal tables give equal bytes. Raises `UsageError` for a wrong suffix or an unwritable file.
    """
    head = {
        "name": table.name,
        "metric": table.target.metric,
        "goal": table.target.goal.value,
        "target": table.target.value,
        "max_train_seconds": table.max_train_seconds,
    }
    text = _csv_text(table.trials).encode()
    description = description_path(path)
    contents = {
        path: gzip.compress(text, mtime=0) if path.suffix == ".gz" else text,
        description: (json.dumps(head, indent=1) + "\n").encode(),
    }
    for target in contents:
        check_file(target)
    with replacing(list(contents), binary=True) as files:
        for file, content in zip(files, contents.values(), strict=True):
            file.write(content)
    return [path, description]


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


def description_path(path: Path) -> Path:
    """The description's path; raise `UsageError` for a wrong suffix."""
    for suffix in SUFFIXES:
        if path.name.endswith(suffix) and path.name != suffix:
            return path.with_name(path.name.removesuffix(suffix) + ".json")
    raise UsageError(f"{str(path)!r} is not a table of recorded curves: its name must end in {' or '.join(SUFFIXES)}")
