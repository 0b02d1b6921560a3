"""A database of Optuna's, read and never written: one study with its trials, as Optuna 5 stores them."""

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
"""The system attribute in which Optuna keeps what `Study.set_metric_names` was told."""


@dataclass(frozen=True, slots=True)
class OptunaTrials:
    """A study of Optuna's with its trials by number; ``place`` names its database, without a password."""

    name: str
    place: str
    directions: Sequence[str]
    metric_names: Sequence[str]
    user_attributes: Mapping[str, Any]
    trials: Sequence[FrozenTrial]


def read_optuna_study(file: str, study: str | None = None) -> OptunaTrials:
    """Return a study of a database, which is a URL or the path of a SQLite file; the only one where none is named.

    Nothing is written: a SQLite file is opened for reading alone. Raises `NotFoundError` where there is no such file or
    study, `UsageError` for a file that is no database of Optuna's, for one of bssearch's own, and where several studies
    are there to choose from; `SchemaError` for the tables of another version of Optuna, and `DatabaseError` for a
    server that cannot be read.
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
    """Return the URL of a database, or of the SQLite file at a path. Raises `UsageError` for any other text."""
    is_url = ":" in file or "=" in file
    return parse_url(file if is_url else URL.create("sqlite", database=file))


@contextmanager
def optuna_storage(url: URL, *, address: URL | None = None) -> Iterator[RDBStorage]:
    """Give Optuna's storage over a database, and close its connections at the end.

    Its tables are made where there are none, unless another ``address`` of it is given by which it is opened. Raises
    `SchemaError` for the tables of another version of Optuna.
    """
    import optuna

    opened = (address or url).render_as_string(hide_password=False)
    try:
        storage = optuna.storages.RDBStorage(opened, skip_table_creation=address is not None)
    except RuntimeError as error:
        raise SchemaError(
            f"the Optuna tables of {shown(url)} are of another version: {without_secrets(str(error), url)}",
            hint="upgrade them with: optuna storage upgrade --storage URL",
        ) from None
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _check_numbers(trial: FrozenTrial) -> None:
    """Raise ValueError if a value, a report or a constraint is not a number: SQLite keeps any value it is given."""
    reports = trial.intermediate_values
    for number in (*(trial.values or ()), *reports, *reports.values(), *trial.constraints.values()):
        if not isinstance(number, int | float):
            raise ValueError(f"trial {trial.number} has the value {number!r}, which is no number")


def _check_file(url: URL) -> None:
    path = sqlite_file(url)
    if path is not None and path.is_dir():
        raise UsageError(f"{path} is a folder, not a database")
    if path is not None and not path.exists():
        raise NotFoundError(f"no file {str(path)!r}")


@contextmanager
def _failures(url: URL) -> Iterator[None]:
    """Raise our own errors for all that goes wrong in reading, without the password of the URL."""
    try:
        yield
    except BSSearchError:
        raise
    except Exception as error:  # what Optuna raises of rows that it has not written so is of any kind
        told = error.__cause__ or error
        first = without_secrets(str(getattr(told, "orig", None) or told).strip().partition("\n")[0], url)
        if sqlite_file(url) is None and isinstance(error, SQLAlchemyError):
            raise DatabaseError(f"cannot read {shown(url)}: {first}") from None
        raise UsageError(
            f"{shown(url)} cannot be read as a database of Optuna's: {first}",
            hint="of a journal make one with optuna.copy_study",
        ) from None


@contextmanager
def _reading(url: URL) -> Iterator[RDBStorage]:
    """Give Optuna's storage over a database that has its tables already; nothing is written."""
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
    """Raise `UsageError` where a database lacks a table of Optuna's: Optuna would write to it, to make its version."""
    engine = create_engine(url)
    try:
        tables = set(inspect(engine).get_table_names())
    finally:
        engine.dispose()
    if not {"studies", "trials", "version_info", "alembic_version"} <= tables:
        own = "bss_study" in tables
        raise UsageError(
            f"{name} is {'a database of bssearch' if own else 'no database of Optuna'}'s{' own' if own else ''}",
            hint="--db reads it" if own else None,
        )


def _named(study: str | None, names: list[str], url: URL) -> str:
    """Return the study that is asked for, or the only one there is."""
    listed = ", ".join(map(repr, sorted(names))) or "none"
    if study is None and len(names) == 1:
        return names[0]
    if study is None and names:
        raise UsageError(f"name the Optuna study: {shown(url)} has {listed}")
    if study not in names:
        raise NotFoundError(f"no Optuna study{'' if study is None else f' {study!r}'} in {shown(url)}: it has {listed}")
    return str(study)


def default_name(name: str) -> str:
    """Return the name of a study of ours for one of Optuna's: with dashes for what ours cannot have."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-._")[:100] or Path(name).stem or "optuna"
