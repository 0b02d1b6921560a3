"""Exports of a study to files.

Curves in ``NAME.csv.gz`` or ``NAME.csv`` have the columns ``trial, param.*, seed, step, train_seconds, metric``.
Rows are sorted by trial, then by time. An empty cell is a missing or unknown parameter. ``NAME.json`` has
``name``, ``metric``, ``goal``, ``target`` and ``max_train_seconds``, the limit of a trial in seconds or null.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bssearch.analysis.shape import parameters_of
from bssearch.errors import UsageError, require
from bssearch.exchange.trial_rows import flat_table, observations_of, traceback, trial_row
from bssearch.files import check_file, naming, replacing, write_csv
from bssearch.records import (
    Environment,
    Observation,
    ParameterValue,
    Phase,
    Target,
    TrialRecord,
    TrialState,
)
from bssearch.records.text import plural
from bssearch.spec import spec_of
from bssearch.storage.models import column_types
from bssearch.storage.repository import Store
from bssearch.storage.transfer.study_copy import SUFFIX

if TYPE_CHECKING:
    import pandas as pd


COLUMNS = ("trial", "seed", "step", "train_seconds", "metric")
PREFIX = "param."
SUFFIXES = (".csv.gz", ".csv")


@dataclass(frozen=True, slots=True)
class RecordedTrial:
    """A trial's parameters, and evaluations in order of time."""

    number: int
    parameters: Mapping[str, ParameterValue]
    seed: int
    steps: tuple[int, ...]
    train_seconds: tuple[float, ...]
    metrics: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RecordedTable:
    """Recorded trials and their target."""

    name: str
    target: Target
    max_train_seconds: float | None
    trials: tuple[RecordedTrial, ...]


def write_table(table: RecordedTable, path: Path) -> list[Path]:
    """Write a table and its JSON description. Equal tables give equal bytes."""
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
        values = [trial.parameters.get(name) for name in names]  # None is written as an empty cell
        for step, seconds, metric in zip(trial.steps, trial.train_seconds, trial.metrics, strict=True):
            writer.writerow([trial.number, *values, trial.seed, step, seconds, metric])
    return text.getvalue()


def description_path(path: Path) -> Path:
    for suffix in SUFFIXES:
        if path.name.endswith(suffix) and path.name != suffix:
            return path.with_name(path.name.removesuffix(suffix) + ".json")
    names = " or ".join(f"NAME{suffix}" for suffix in SUFFIXES)
    raise UsageError(f"{str(path)!r} is no name of a curves file; name the file {names}")


@dataclass(frozen=True, slots=True)
class Exported:
    """The files or databases that an export wrote, and notes for the user."""

    written: Sequence[str]
    notes: Sequence[str] = ()


OBSERVED = ("trial", *(one.name for one in fields(Observation)))
# Nullable pandas types by Python type; other types become text.
KINDS: Mapping[object, str] = {
    bool: "boolean",
    int: "Int64",
    float: "float64",
    datetime: "datetime64[us, UTC]",
}

TEXT = "string"
MOST_INTEGER = 2**63
LARGEST_FLOAT = int(sys.float_info.max)


def export_csv(store: Store, name: str, file: str | None = None) -> Exported:
    """Write ``NAME.csv`` with the trials, and ``NAME.observations.csv`` with the evaluations."""
    paths = _paths(name, file, ".csv")
    columns, rows = export_table(store, name)
    with replacing(paths) as files:
        with naming(paths[0]):
            write_csv(files[0], columns, rows)
        with naming(paths[1]):
            write_csv(files[1], OBSERVED, observed_rows(store, name))
    return Exported([str(path) for path in paths])


def export_parquet(store: Store, name: str, file: str | None = None) -> Exported:
    """Write ``NAME.parquet`` and ``NAME.observations.parquet`` with typed columns.

    Integers are nullable, times are in UTC, and lists are JSON.
    """
    require_parquet()
    paths = _paths(name, file, ".parquet")
    columns, rows = export_table(store, name)
    frames = [typed_frame(columns, rows), typed_frame(OBSERVED, list(observed_rows(store, name)))]
    with replacing(paths, binary=True) as files:
        for path, opened, frame in zip(paths, files, frames, strict=True):
            with naming(path):
                frame.to_parquet(opened, engine="pyarrow", index=False)
    return Exported([str(path) for path in paths])


def observed_rows(store: Store, name: str) -> Iterator[dict[str, Any]]:
    for number, one in observations_of(store, name, store.trials.of(name)):
        yield {"trial": number, **asdict(one)}


def require_parquet() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "Parquet files need pyarrow, which cannot be imported", hint="pip install 'bssearch[parquet]'"
        ) from error


def export_table(store: Store, name: str) -> tuple[list[str], list[dict[str, Any]]]:
    places = store.trials.environments(name)
    return flat_table(
        [
            {
                "study": name,
                **trial_row(trial),
                "created_at": trial.created_at,
                "ended_at": trial.ended_at,
                "traceback": traceback(trial),
                "environment": asdict(places[trial.number]) if trial.number in places else None,
            }
            for trial in store.trials.of(name)
        ]
    )


def typed_frame(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    found: dict[str, pd.Series[Any]] = {}
    for column in columns:
        values = [row.get(column) for row in rows]
        kind = column_type(column, values)
        found[column] = pd.Series([_text(one) for one in values] if kind == TEXT else values, dtype=kind)
    return pd.DataFrame(found, columns=list(columns))


def column_type(column: str, values: Sequence[Any]) -> str:
    """Return the pandas type of a column.

    A column without values has the declared type, else the text type. Integers beyond 64 bits, or mixed with floats,
    become floats. Integers beyond the float range and other mixtures become text.
    """
    kinds = {_kind_of(one) for one in values if one is not None}
    declared = _declared().get(column)
    if not kinds:
        return declared or TEXT
    if kinds <= {"Int64", "float64"} and "float64" in {declared, *kinds}:
        return "float64"
    return kinds.pop() if len(kinds) == 1 else TEXT


def _kind_of(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and not -MOST_INTEGER <= value < MOST_INTEGER:
        return "float64" if -LARGEST_FLOAT <= value <= LARGEST_FLOAT else TEXT
    return KINDS.get(type(value), TEXT)


def _text(value: Any) -> str | None:
    text = str(value) if isinstance(value, str) else json.dumps(value, allow_nan=False, default=str)
    return None if value is None else text


@cache
def _declared() -> Mapping[str, str]:
    kinds = column_types(TrialRecord) | column_types(Observation) | {"trial": int}
    kinds |= {f"environment.{name}": kind for name, kind in column_types(Environment).items()}
    options = {name: get_args(kind) or (kind,) for name, kind in kinds.items()}
    return {name: next((KINDS[one] for one in found if one in KINDS), TEXT) for name, found in options.items()}


def _paths(name: str, file: str | None, suffix: str) -> list[Path]:
    path = Path(file or f"{name}{suffix}")
    paths = [path, path.with_name(f"{path.name.removesuffix(suffix)}.observations{suffix}")]
    for one in paths:
        check_file(one)
    return paths


def export_curves(store: Store, name: str, file: str | None = None) -> Exported:
    """Write the search trials' curves, by default to ``NAME.csv.gz``, and a JSON description."""
    table = recorded_table(store, name)
    stopped, trials = {TrialState.CAPPED, TrialState.PAUSED, TrialState.PRUNED}, search_trials(store, name)
    early = sum(trial.state in stopped for trial in trials)
    note = (
        f"note: {early} of {len(trials)} search trials stopped early, so their curves are cut; to record full curves, "
        "run a study with --set pruner.name=none"
    )
    return Exported([str(path) for path in write_table(table, Path(file or f"{name}.csv.gz"))], [note] if early else [])


def recorded_table(store: Store, name: str) -> RecordedTable:
    """Return the finished search trials with curves. Raises `UsageError` if no trial has a curve."""
    study = store.studies.get(name)
    spec = spec_of(study)
    finished = {trial.number: trial for trial in search_trials(store, name)}
    recorded = [
        _recorded(finished[number], [observation for _, observation in group])
        for number, group in groupby(observations_of(store, name, list(finished.values())), key=itemgetter(0))
    ]
    one = "imported configuration with a single run" if spec.is_imported else "finished search trial"
    require(
        recorded,
        f"study {name!r} has no learning curves to export: no {one} has evaluations",
        hint="import logs with `bssearch import curves`, or export repeated runs with --to csv"
        if spec.is_imported
        else f"run the study: `bssearch run {name}`",
    )
    return RecordedTable(name, study.target, spec.budget.trial_train_seconds, tuple(recorded))


def search_trials(store: Store, name: str) -> list[TrialRecord]:
    return [trial for trial in store.trials.of(name) if trial.phase is Phase.SEARCH and trial.state.is_finished]


def _recorded(trial: TrialRecord, curve: list[Observation]) -> RecordedTrial:
    return RecordedTrial(
        number=trial.number,
        parameters={
            "batch_size": trial.configuration.batch_size,
            "micro_batch_size": trial.configuration.micro_batch_size,
            **parameters_of(trial.configuration),
        },
        seed=trial.seed,
        steps=tuple(one.step for one in curve),
        train_seconds=tuple(one.train_seconds for one in curve),
        metrics=tuple(one.metric for one in curve),
    )


def export_study(store: Store, name: str, file: str | None = None) -> Exported:
    """Write a whole study except running trials, by default to ``NAME.bssearch.jsonl.gz``.

    Equal studies give equal bytes.
    """
    path = Path(file or f"{name}{SUFFIX}")
    running = store.transfer.write(name, path)
    note = f"note: skipped {plural(len(running), 'running trial')}; export the study again after these trials end"
    return Exported([str(path)], [note] if running else [])
