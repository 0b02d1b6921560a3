"""Writes a study to an Optuna database.

Rows equal those of Optuna's `RDBStorage`, in one transaction: 2,000 trials of 50 evaluations take 2 s instead of 0.1 s
each (SQLite, Optuna 5.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, insert, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from bssearch.errors import DatabaseError, UsageError
from bssearch.exchange.exporters.exports import Exported
from bssearch.exchange.importers.optuna_database import optuna_database, optuna_storage, table_names
from bssearch.exchange.optuna_study import OptunaStudy, quiet
from bssearch.spec.reader import spec_of
from bssearch.storage.connection.urls import masked, shown, sqlite_file, without_secrets
from bssearch.storage.repository import Store

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


def export_to_optuna(store: Store, name: str, file: str | None = None) -> Exported:
    """Write search trials as an Optuna study of the same name, all or none.

    ``file`` is a URL or a SQLite path, by default ``NAME.optuna.db``. Raises `UsageError` without trials, if the name
    is taken, or for another program's database; `SchemaError` for another version of Optuna; `DatabaseError`.
    """
    url = optuna_database(file or f"{name}.optuna.db")
    study = OptunaStudy.read(store, name)
    if not study.trials:
        imported = spec_of(store.studies.get(name)).is_imported
        none = "no search trials: its runs were imported as repeats" if imported else "no trials"
        raise UsageError(f"study {name!r} has {none}; there is nothing to export for Optuna")
    write_study(study, url)
    unfinished = sum(not trial.state.is_finished() for trial in study.trials)
    have = "trial has" if unfinished == 1 else "trials have"
    notes = [f"note: {unfinished} {have} not ended, and never will in this copy"] if unfinished else []
    return Exported([masked(url)], notes)


def write_study(study: OptunaStudy, url: URL) -> None:
    """Write an Optuna study, all or none; see `export_to_optuna`."""
    path = sqlite_file(url)
    is_new = path is not None and not path.exists()
    try:
        with _failures(url, study.name):
            _refuse_others(url)
            with quiet(), optuna_storage(url) as storage, storage.engine.begin() as connection:
                _insert(connection, study)
    except BaseException:
        if is_new and path is not None:
            with suppress(OSError):  # the folder cannot be written, as the error says
                path.unlink(missing_ok=True)
        raise


@contextmanager
def _failures(url: URL, name: str) -> Iterator[None]:
    from optuna.exceptions import StorageInternalError

    try:
        yield
    except IntegrityError:
        raise UsageError(
            f"{shown(url)} already has an Optuna study {name!r}",
            hint="choose another database, or delete it there: optuna delete-study --study-name NAME --storage URL",
        ) from None
    except (SQLAlchemyError, StorageInternalError, OSError) as error:
        # What Optuna wraps tells the reason; its own words are about the length of strings.
        told = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        first = str(getattr(told, "orig", None) or told).strip().partition("\n")[0]
        raise DatabaseError(f"cannot write to {shown(url)}: {without_secrets(first, url)}") from None


def _refuse_others(url: URL) -> None:
    path = sqlite_file(url)
    if path is not None and not path.exists():
        if not path.absolute().parent.is_dir():
            raise DatabaseError(f"cannot write to {path}: there is no folder {path.parent}")
        return
    tables = table_names(url)
    hint = "give a separate database with --file; it is created if missing"
    if "bss_study" in tables:
        raise UsageError(f"{shown(url)} is a bssearch database; Optuna's tables need another one", hint=hint)
    taken = sorted(tables & {"alembic_version", "studies", "trials"})
    if taken and "version_info" not in tables:
        raise UsageError(f"{shown(url)} has another program's table {taken[0]!r}, whose name Optuna needs", hint=hint)


def _insert(connection: Connection, study: OptunaStudy) -> None:
    """Fill Optuna 5's tables (schema 12)."""
    from optuna.distributions import distribution_to_json
    from optuna.storages._rdb import models
    from optuna.study import StudyDirection

    added = connection.execute(insert(models.StudyModel).values(study_name=study.name))
    assert added.inserted_primary_key is not None, "of one row it is known"
    study_id = added.inserted_primary_key[0]
    direction = StudyDirection[study.direction.upper()]
    connection.execute(
        insert(models.StudyDirectionModel), {"study_id": study_id, "direction": direction, "objective": 0}
    )
    attributes = {"study:metric_names": [study.metric_name]}
    connection.execute(
        insert(models.StudySystemAttributeModel), [_attribute("study_id", study_id, *one) for one in attributes.items()]
    )
    connection.execute(
        insert(models.StudyUserAttributeModel),
        [_attribute("study_id", study_id, *one) for one in study.user_attributes.items()],
    )
    connection.execute(insert(models.TrialModel.__table__), [_trial(study_id, trial) for trial in study.trials])
    numbered = select(models.TrialModel.number, models.TrialModel.trial_id).where(
        models.TrialModel.study_id == study_id
    )
    ids: dict[int, int] = {number: trial_id for number, trial_id in connection.execute(numbered)}
    trials = [(ids[trial.number], trial) for trial in study.trials]
    tables: dict[Any, list[dict[str, Any]]] = {
        models.TrialParamModel: [
            {
                "trial_id": trial_id,
                "param_name": name,
                "param_value": trial.distributions[name].to_internal_repr(value),
                "distribution_json": distribution_to_json(trial.distributions[name]),
            }
            for trial_id, trial in trials
            for name, value in trial.params.items()
        ],
        models.TrialValueModel: [
            {"trial_id": trial_id, "objective": 0, "value": trial.value, "value_type": "FINITE"}
            for trial_id, trial in trials
            if trial.value is not None
        ],
        models.TrialIntermediateValueModel: [
            {
                "trial_id": trial_id,
                "step": step,
                "intermediate_value": value,
                "intermediate_value_type": "FINITE",
            }
            for trial_id, trial in trials
            for step, value in trial.intermediate_values.items()
        ],
        models.TrialUserAttributeModel: [
            _attribute("trial_id", trial_id, *one) for trial_id, trial in trials for one in trial.user_attrs.items()
        ],
    }
    for table, rows in tables.items():
        if rows:
            connection.execute(insert(table), rows)


def _attribute(owner: str, owner_id: int, key: str, value: Any) -> dict[str, Any]:
    return {owner: owner_id, "key": key, "value_json": json.dumps(value)}


def _trial(study_id: int, trial: FrozenTrial) -> dict[str, Any]:
    return {
        "study_id": study_id,
        "number": trial.number,
        "state": trial.state,
        "datetime_start": _utc(trial.datetime_start),
        "datetime_complete": _utc(trial.datetime_complete),
    }


def _utc(local: datetime | None) -> datetime | None:
    return None if local is None else local.astimezone(UTC).replace(tzinfo=None)
