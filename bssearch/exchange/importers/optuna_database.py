"""Reads a study from a database of Optuna 5, without writing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sqlalchemy import URL, create_engine, inspect
from sqlalchemy.exc import SQLAlchemyError

from bssearch.errors import BSSearchError, DatabaseError, NotFoundError, SchemaError, UsageError
from bssearch.storage.connection.urls import parse_url, shown, sqlite_file, without_secrets

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial

METRIC_NAMES = "study:metric_names"


@dataclass(frozen=True, slots=True)
class OptunaTrials:
    """An Optuna study; ``place`` names its database, without a password."""

    name: str
    place: str
    directions: Sequence[str]
    metric_names: Sequence[str]
    user_attributes: Mapping[str, Any]
    trials: Sequence[FrozenTrial]


def read_optuna_study(file: str, study: str | None = None) -> OptunaTrials:
    """Read a study, by default the only one.

    Raises `NotFoundError`, `UsageError` if it is not an Optuna database or the study is ambiguous, `SchemaError` for
    another version of Optuna, `DatabaseError`.
    """
    url = optuna_database(file or ".")
    _check_file(url)
    with _failures(url), _reading(url) as storage:
        ids = {storage.get_study_name_from_id(one._study_id): one._study_id for one in storage.get_all_studies()}
        name = _named(study, list(ids), url)
        attributes = storage.get_study_system_attrs(ids[name])
        trials = storage.get_all_trials(ids[name], deepcopy=False)
        for trial in trials:
            _check_numbers(trial)
        return OptunaTrials(
            name=name,
            place=shown(url),
            directions=[one.name.lower() for one in storage.get_study_directions(ids[name])],
            metric_names=[str(one) for one in attributes.get(METRIC_NAMES) or ()],
            user_attributes=storage.get_study_user_attrs(ids[name]),
            trials=trials,
        )


def optuna_database(file: str) -> URL:
    """Return the URL of a database or SQLite file; raise `UsageError`."""
    is_url = ":" in file or "=" in file
    return parse_url(file if is_url else URL.create("sqlite", database=file))


@contextmanager
def optuna_storage(url: URL, *, address: URL | None = None) -> Iterator[RDBStorage]:
    """Open Optuna's storage; raise `SchemaError` for another version.

    Missing tables are created, unless ``address`` opens the database another way.
    """
    import optuna

    opened = (address or url).render_as_string(hide_password=False)
    try:
        storage = optuna.storages.RDBStorage(opened, skip_table_creation=address is not None)
    except RuntimeError as error:
        raise SchemaError(
            f"another version of Optuna made the tables of {shown(url)}: {without_secrets(str(error), url)}",
            hint="upgrade them with: optuna storage upgrade --storage URL",
        ) from None
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _check_numbers(trial: FrozenTrial) -> None:
    """Raise ValueError for values that are not numbers, and names that are not texts: SQLite stores any type."""
    for name in (*trial.params, *trial.user_attrs, *trial.system_attrs):
        if not isinstance(name, str):
            raise ValueError(f"trial {trial.number} has the name {name!r:.60}; expected a text")
    reports = trial.intermediate_values
    for number in (*(trial.values or ()), *reports, *reports.values(), *trial.constraints.values()):
        if not isinstance(number, int | float):
            raise ValueError(f"trial {trial.number} has the value {number!r}; expected a number")


def _check_file(url: URL) -> None:
    path = sqlite_file(url)
    if path is not None and path.is_dir():
        raise UsageError(f"{path} is a folder, not a database")
    if path is not None and not path.exists():
        raise NotFoundError(f"no file {str(path)!r}")


@contextmanager
def _failures(url: URL) -> Iterator[None]:
    try:
        yield
    except BSSearchError:
        raise
    except Exception as error:  # rows that Optuna did not write raise any exception
        told = error.__cause__ or error
        first = without_secrets(str(getattr(told, "orig", None) or told).strip().partition("\n")[0], url)
        if sqlite_file(url) is None and isinstance(error, SQLAlchemyError):
            raise DatabaseError(f"cannot read {shown(url)}: {first}") from None
        raise UsageError(
            f"{shown(url)} is not a readable Optuna database: {first}",
            hint="convert a journal with optuna.copy_study",
        ) from None


@contextmanager
def _reading(url: URL) -> Iterator[RDBStorage]:
    address = _read_only(url)
    _check_tables(address, shown(url))
    with optuna_storage(url, address=address) as storage:
        yield storage


def _read_only(url: URL) -> URL:
    path = sqlite_file(url)
    if path is None:
        return url
    return URL.create("sqlite", database=f"file:{quote(str(path.absolute()))}", query={"mode": "ro", "uri": "true"})


def _check_tables(url: URL, name: str) -> None:
    """Raise `UsageError` if a table is missing: Optuna would create it."""
    tables = table_names(url)
    if not {"studies", "trials", "version_info", "alembic_version"} <= tables:
        own = "bss_study" in tables
        raise UsageError(
            f"{name} is {'a bssearch database' if own else 'not an Optuna database'}",
            hint="--db reads it" if own else None,
        )


def table_names(url: URL) -> set[str]:
    """Return the names of a database's tables."""
    engine = create_engine(url)
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def _named(study: str | None, names: list[str], url: URL) -> str:
    listed = ", ".join(map(repr, sorted(names))) or "none"
    if study is None and len(names) == 1:
        return names[0]
    if study is None and names:
        raise UsageError(f"name the Optuna study: {shown(url)} has {listed}")
    if study not in names:
        raise NotFoundError(f"no Optuna study{'' if study is None else f' {study!r}'} in {shown(url)}: it has {listed}")
    return str(study)


def default_name(name: str) -> str:
    """Return a name with dashes for invalid characters."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-._")[:100] or Path(name).stem or "optuna"
