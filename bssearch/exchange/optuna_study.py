"""A stored study as an Optuna study, for Optuna's plots and tools.

Optuna's state follows from a trial's state:

* Reached trials are COMPLETE, with the objective's value.
* Pruned, capped, exhausted, paused and diverged trials are PRUNED, without a value.
* Running trials are RUNNING, and queued trials are WAITING.
* Failed, lost, cancelled and out-of-memory trials are FAIL, as are reached trials without a measured value.
* If the objective is metric_in_budget, trials that used the whole budget are COMPLETE, with the best metric.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState as OptunaState
from sqlalchemy import URL, Connection, create_engine, insert, inspect, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from bssearch.analysis.objectives import Objective, objective_of
from bssearch.analysis.shape import parameters_of
from bssearch.errors import BSSearchError, DatabaseError, NotFoundError, SchemaError, UsageError, require
from bssearch.exchange.exporters.exports import Exported
from bssearch.exchange.trial_rows import observations_of
from bssearch.records import Configuration, Goal, ParameterValue, Phase, StudyRecord, TrialRecord, TrialState, grouped
from bssearch.records.text import plural
from bssearch.spec import REFERENCE_LEARNING_RATE, Dimension, SearchSpace, is_number, spec_of
from bssearch.storage.connection.engine import masked, parse_url, shown, sqlite_file, without_secrets
from bssearch.storage.repository import Store, open_store

METRIC_NAMES = "study:metric_names"


def read_optuna_study(file: str, study: str | None = None) -> OptunaStudy:
    """Read an Optuna study, by default the only study in the database."""
    url = optuna_database(file or ".")
    _check_file(url)
    with _failures_of_reading(url), _reading(url) as storage:
        ids = {storage.get_study_name_from_id(one._study_id): one._study_id for one in storage.get_all_studies()}
        name = _named(study, list(ids), url)
        trials = storage.get_all_trials(ids[name], deepcopy=False)
        for trial in trials:
            _check_numbers(trial)
        return OptunaStudy(
            name=name,
            place=shown(url),
            directions=storage.get_study_directions(ids[name]),
            metric_names=[str(one) for one in storage.get_study_system_attrs(ids[name]).get(METRIC_NAMES) or ()],
            user_attributes=storage.get_study_user_attrs(ids[name]),
            trials=trials,
        )


def optuna_database(file: str) -> URL:
    return parse_url(file if ":" in file or "=" in file else URL.create("sqlite", database=file))


@contextmanager
def optuna_storage(url: URL, *, address: URL | None = None) -> Iterator[RDBStorage]:
    """Open Optuna's storage.

    Creates missing tables if ``address`` is None. Raises `SchemaError` for tables of another Optuna version.
    """
    try:
        # A pool would keep connections open if the constructor fails.
        storage = RDBStorage(
            (address or url).render_as_string(hide_password=False),
            engine_kwargs={"poolclass": NullPool},
            skip_table_creation=address is not None,
        )
    except RuntimeError as error:
        raise SchemaError(
            f"another version of Optuna made the tables of {shown(url)}: {without_secrets(str(error), url)}",
            hint="upgrade Optuna, or upgrade the tables with: optuna storage upgrade --storage URL",
        ) from None
    try:
        yield storage
    finally:
        storage.remove_session()


def _check_numbers(trial: FrozenTrial) -> None:
    # SQLite stores any type.
    for name in (*trial.params, *trial.user_attrs, *trial.system_attrs):
        if not isinstance(name, str):
            raise ValueError(f"trial {trial.number} has a parameter or attribute named {name!r:.60}; expected a string")
    reports = trial.intermediate_values
    for number in (*(trial.values or ()), *reports, *reports.values(), *trial.constraints.values()):
        if not isinstance(number, int | float):
            raise ValueError(f"trial {trial.number} has the value {number!r}; expected a number")


def _check_file(url: URL) -> None:
    path = sqlite_file(url)
    require(path is None or not path.is_dir(), f"{path} is a folder, not a database; name a file")
    require(path is None or path.exists(), f"no file {str(path)!r}; check the path", error=NotFoundError)


@contextmanager
def _failures_of_reading(url: URL) -> Iterator[None]:
    try:
        yield
    except BSSearchError:
        raise
    except Exception as error:  # rows that Optuna did not write raise any exception
        first = _first_line(error.__cause__ or error, url)
        if sqlite_file(url) is None and isinstance(error, SQLAlchemyError):
            raise DatabaseError(f"cannot read {shown(url)}: {first}", hint="check the server and the URL") from None
        raise UsageError(
            f"{shown(url)} is not a readable Optuna database: {first}",
            hint="name an Optuna database, or copy a journal storage into a database with optuna.copy_study",
        ) from None


def _first_line(error: BaseException, url: URL) -> str:
    return without_secrets(str(getattr(error, "orig", None) or error).strip().partition("\n")[0], url)


@contextmanager
def _reading(url: URL) -> Iterator[RDBStorage]:
    # Optuna would create missing tables.
    address, path = url, sqlite_file(url)
    if path is not None:
        place = f"file:{quote(str(path.absolute()))}"
        address = URL.create("sqlite", database=place, query={"mode": "ro", "uri": "true"})
    tables = table_names(address)
    if not {"studies", "trials", "version_info", "alembic_version"} <= tables:
        own = "bss_study" in tables
        raise UsageError(
            f"{shown(url)} is {'a bssearch database' if own else 'not an Optuna database'}",
            hint="import the studies with `bssearch import study`" if own else "name a database that Optuna made",
        )
    with ExitStack() as stack:
        try:
            storage = stack.enter_context(optuna_storage(url, address=address))
        except SchemaError as error:
            if path is None:
                raise
            copy = Path(stack.enter_context(TemporaryDirectory())) / "upgraded.db"
            if not _is_upgraded(path, copy):
                raise error from None
            storage = stack.enter_context(optuna_storage(url, address=URL.create("sqlite", database=str(copy))))
        yield storage


def _is_upgraded(path: Path, copy: Path) -> bool:
    # Copy an older Optuna's file and upgrade the copy, in a process because alembic changes all loggers
    theirs = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)
    with closing(theirs), closing(sqlite3.connect(copy)) as ours:
        theirs.backup(ours)
    code = "import sys, optuna; optuna.storages.RDBStorage(sys.argv[1], skip_compatibility_check=True).upgrade()"
    return subprocess.run([sys.executable, "-c", code, f"sqlite:///{copy}"], capture_output=True).returncode == 0


def table_names(url: URL) -> set[str]:
    return set(inspect(create_engine(url, poolclass=NullPool)).get_table_names())


def _named(study: str | None, names: list[str], url: URL) -> str:
    listed = ", ".join(map(repr, sorted(names))) or "no studies"
    if study is None and len(names) == 1:
        return names[0]
    require(study is not None or not names, f"{shown(url)} has the Optuna studies {listed}; name one study")
    require(
        study in names,
        f"no Optuna study{'' if study is None else f' {study!r}'}: {shown(url)} has {listed}; name another "
        f"{'study' if names else 'database'}",
        error=NotFoundError,
    )
    return str(study)


def default_name(name: str) -> str:
    """Replace invalid characters of a study's name by dashes, unless all characters are invalid."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-._")[:100] or Path(name).stem or "optuna"


SEARCH = (Phase.SEARCH,)  # Without repeats of a configuration, which Optuna would count as independent evidence


def load_optuna_study(
    name: str,
    db: str | None = None,
    *,
    phases: Phase | str | Collection[Phase | str] = SEARCH,
    store: Store | None = None,
) -> optuna.Study:
    """Return a snapshot of the stored study as an in-memory Optuna study.

    The study minimizes the objective, except that metric_in_budget follows the metric's goal. Distributions cover the
    search space and all trials.

    Args:
        db: the database's URL.
        phases: phases of the included trials. Repeated runs (``"confirm"``, ``"audit"``) become separate trials.
        store: an open store to read instead of ``db``.

    Raises:
        NotFoundError: The database has no such study.
        DatabaseError: The database cannot be read.
        UsageError: A phase is unknown.

    Example: ``print(bssearch.load_optuna_study("digits").best_params)``
    """
    if store is None:
        with open_store(db, write=False) as opened:
            return load_optuna_study(name, phases=phases, store=opened)
    study = OptunaStudy.read(store, name, phases)
    with quiet():
        made = optuna.create_study(study_name=name, directions=study.directions)
        made.set_metric_names(list(study.metric_names))
    for key, value in study.user_attributes.items():
        made.set_user_attr(key, value)
    made.add_trials(study.trials)
    return made


@dataclass(frozen=True, slots=True)
class OptunaStudy:
    """An Optuna study's contents. ``place`` is the database's URL or path without a password."""

    name: str
    directions: Sequence[StudyDirection]
    metric_names: Sequence[str]
    user_attributes: Mapping[str, Any]
    trials: Sequence[FrozenTrial]
    place: str = ""

    @classmethod
    def read(cls, store: Store, name: str, phases: Phase | str | Collection[Phase | str] = SEARCH) -> OptunaStudy:
        wanted = phases_of(phases)
        trials = [trial for trial in store.trials.of(name) if trial.phase in wanted]
        curves = {
            number: {observation.step: observation.metric for _, observation in group}
            for number, group in groupby(observations_of(store, name, trials), key=itemgetter(0))
        }
        return cls.of(store.studies.get(name), trials, curves)

    @classmethod
    def of(
        cls, study: StudyRecord, trials: Sequence[TrialRecord], curves: Mapping[int, Mapping[int, float]]
    ) -> OptunaStudy:
        spec = spec_of(study)
        parameters = _Parameters(spec.space, [trial.configuration for trial in trials])
        objective = objective_of(spec)
        is_metric = not objective.stops_at_target
        return cls(
            name=study.name,
            directions=[StudyDirection[(study.target.goal if is_metric else Goal.MINIMIZE).name]],
            metric_names=[study.target.metric if is_metric else _value_name(objective)],
            user_attributes={
                "objective": study.objective,
                "target_metric": study.target.metric,
                "target_value": study.target.value,
                "target_goal": study.target.goal.value,
                "device": None if study.environment is None else study.environment.device_name,
                "batch_sizes": list(spec.space.rungs),
                "train_seconds_limit": spec.budget.trial_train_seconds,
            },
            trials=[
                _frozen(number, trial, curves.get(trial.number, {}), parameters, objective)
                for number, trial in enumerate(trials)
            ],
        )


def phases_of(given: Phase | str | Collection[Phase | str]) -> set[Phase]:
    names = {given} if isinstance(given, str) else {*given}
    unknown = ", ".join(sorted(map(repr, names - set(Phase))))
    require(not unknown, f"unknown phases {unknown}; choose from {', '.join(Phase)}")
    return {Phase(name) for name in names}


@contextmanager
def quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def _frozen(
    number: int, trial: TrialRecord, curve: Mapping[int, float], parameters: _Parameters, objective: Objective
) -> FrozenTrial:
    figure = objective.figure(trial)
    value = None if figure is None else objective.shown(figure)
    state = OptunaState[_state(trial, value)]
    params = parameters.of(trial.configuration)
    return FrozenTrial(
        number=number,
        state=state,
        value=value if state is OptunaState.COMPLETE else None,
        datetime_start=None if state is OptunaState.WAITING else _local(trial.created_at),
        datetime_complete=_local(trial.ended_at or trial.created_at) if state.is_finished() else None,
        params=params,
        distributions={name: parameters.distributions[name] for name in params},
        user_attrs=_attributes(trial, value),
        system_attrs={},
        intermediate_values=dict(curve),
        trial_id=number,
    )


def _value_name(objective: Objective) -> str:
    unit = objective.unit.strip()
    return f"{objective.name}_{unit.lower()}" if 0 < len(unit) <= 2 else objective.name


def _state(trial: TrialRecord, value: float | None) -> str:
    if trial.state is TrialState.RUNNING:
        return "RUNNING"
    if trial.state is TrialState.QUEUED:
        return "WAITING"
    if value is not None:
        return "COMPLETE"
    return "PRUNED" if trial.state.is_censored or trial.state is TrialState.DIVERGED else "FAIL"


def _attributes(trial: TrialRecord, value: float | None) -> dict[str, Any]:
    configuration, outcome = trial.configuration, trial.outcome
    attributes: dict[str, Any] = {
        "number": trial.number,
        "phase": trial.phase.value,
        "state": trial.state.value,
        "seed": trial.seed,
        "batch_size": configuration.batch_size,
        "micro_batch_size": configuration.micro_batch_size,
        "accumulation_steps": configuration.accumulation_steps,
    }
    if outcome is None:
        return attributes
    unmeasured = trial.state is TrialState.REACHED and value is None
    return attributes | {
        "reason": f"{outcome.reason}; the objective's value was not measured" if unmeasured else outcome.reason,
        "steps": outcome.steps,
        "steps_to_target": outcome.steps_to_target,
        "train_seconds": outcome.train_seconds,
        "time_to_target_s": outcome.time_to_target_s,
        "best_metric": outcome.best_metric,
        "test_metric": outcome.test_metric,
        "contended": outcome.contended,
    }


def _local(moment: datetime) -> datetime:
    return moment.astimezone().replace(tzinfo=None)


class _Parameters:
    # Distributions of the space, widened to all configurations.

    def __init__(self, space: SearchSpace, configurations: Sequence[Configuration]) -> None:
        self._dimensions = {one.name: one for one in space.dimensions() if one.name != REFERENCE_LEARNING_RATE}
        always = ("batch_size", "learning_rate", *self._dimensions)
        given = grouped(pair for one in configurations for pair in self._values(one).items())
        found: dict[str, list[ParameterValue]] = {name: [] for name in always} | given
        self.distributions: dict[str, BaseDistribution] = {
            name: self._distribution(name, values, space)
            for name, values in found.items()
            if name in always or len(set(values)) > 1
        }

    def of(self, configuration: Configuration) -> dict[str, Any]:
        values = self._values(configuration)
        return {
            name: next(one for one in distribution.choices if _same(values[name], one))
            if isinstance(distribution, CategoricalDistribution)
            else values[name]
            for name, distribution in self.distributions.items()
            if name in values
        }

    def _values(self, configuration: Configuration) -> dict[str, ParameterValue]:
        own = {"batch_size": configuration.batch_size, **parameters_of(configuration)}
        searched = {name: f"{configuration.optimizer}.{name}" for name in own}
        return {searched[name] if searched[name] in self._dimensions else name: value for name, value in own.items()}

    def _distribution(self, name: str, values: Sequence[ParameterValue], space: SearchSpace) -> BaseDistribution:
        if name == "batch_size":
            sizes = [*space.rungs, *(int(value or 0) for value in values)]
            return IntDistribution(min(sizes), max(sizes), log=True)
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if name == "learning_rate":
            rates = [*_learning_rates(space), *numbers]
            return FloatDistribution(min(rates), max(rates), log=True)
        dimension = self._dimensions.get(name, Dimension(name, choices=()))
        if name in self._dimensions and not dimension.choices:
            low, high = min([dimension.low, *numbers]), max([dimension.high, *numbers])
            if dimension.integer:
                return IntDistribution(round(low), round(high), log=dimension.log and low > 0)
            return FloatDistribution(low, high, log=dimension.log and low > 0)
        return CategoricalDistribution(_choices([*dimension.choices, *values]))


def _learning_rates(space: SearchSpace) -> list[float]:
    factors = [space.learning_rate_factor(size, one.name) for size in space.rungs for one in space.optimizers]
    return [rate * factor for rate in space.learning_rates for factor in factors]


def _choices(values: Iterable[ParameterValue]) -> tuple[ParameterValue, ...]:
    found: list[ParameterValue] = []
    for value in values:
        if not any(_same(value, one) for one in found):
            found.append(value)
    if all(is_number(value) for value in found):
        found.sort(key=lambda value: float(value or 0.0))
    return tuple(found)


def _same(one: ParameterValue, other: ParameterValue) -> bool:
    if is_number(one) and is_number(other):
        return math.isclose(one, other, rel_tol=1e-9)
    return type(one) is type(other) and one == other


def export_to_optuna(store: Store, name: str, file: str | None = None) -> Exported:
    """Write the search trials as an Optuna study of the same name.

    ``file`` is a URL or a SQLite path, by default ``NAME.optuna.db``. A failed export writes no trial. Raises
    `UsageError` if the study has no search trials, or if the name is taken.
    """
    url = optuna_database(file or f"{name}.optuna.db")
    study = OptunaStudy.read(store, name)
    if not study.trials:
        imported = spec_of(store.studies.get(name)).is_imported
        hint = "export the imported runs with --to csv" if imported else f"run the study: `bssearch run {name}`"
        raise UsageError(f"study {name!r} has no search trials to export", hint=hint)
    write_study(study, url)
    unfinished = sum(not trial.state.is_finished() for trial in study.trials)
    note = (
        f"note: this copy has {plural(unfinished, 'unfinished trial')}; after these trials end, export the study to "
        "another file with --file"
    )
    return Exported([masked(url)], [note] if unfinished else [])


def write_study(study: OptunaStudy, url: URL) -> None:
    path = sqlite_file(url)
    is_new = path is not None and not path.exists()
    try:
        with _failures(url, study.name):
            _refuse_others(url)
            with quiet(), optuna_storage(url) as storage, storage.engine.begin() as connection:
                _insert(connection, study)
    except BaseException:
        if is_new and path is not None:
            with suppress(OSError):  # the folder may be read-only
                path.unlink(missing_ok=True)
        raise


@contextmanager
def _failures(url: URL, name: str) -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise UsageError(
            f"{shown(url)} already has an Optuna study {name!r}",
            hint="choose another database with --file, or delete Optuna's study with: "
            f"optuna delete-study --study-name {name} --storage URL",
        ) from None
    except (SQLAlchemyError, StorageInternalError, OSError) as error:
        # The wrapped error has the reason; Optuna's own message is about the length of strings.
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        raise DatabaseError(
            f"cannot write to {shown(url)}: {_first_line(cause, url)}",
            hint="check the database, or name another database with --file",
        ) from None


def _refuse_others(url: URL) -> None:
    path = sqlite_file(url)
    if path is not None and not path.exists():
        require(
            path.absolute().parent.is_dir(),
            f"cannot write to {path}: there is no folder {path.parent}; make the folder",
            error=DatabaseError,
        )
        return
    tables = table_names(url)
    hint = "name a new SQLite file or another database with --file"
    require(
        "bss_study" not in tables,
        f"{shown(url)} is a bssearch database, which cannot hold Optuna's tables",
        hint=hint,
    )
    taken = sorted(tables & {"alembic_version", "studies", "trials"})
    if taken and "version_info" not in tables:
        raise UsageError(f"{shown(url)} has another program's table {taken[0]!r}, whose name Optuna needs", hint=hint)


def _insert(connection: Connection, study: OptunaStudy) -> None:
    # Optuna 5's tables (schema 12)
    from optuna.storages._rdb import models

    added = connection.execute(insert(models.StudyModel).values(study_name=study.name))
    assert added.inserted_primary_key is not None, "one row was inserted"
    study_id = added.inserted_primary_key[0]
    connection.execute(
        insert(models.TrialModel.__table__),
        [
            {
                "study_id": study_id,
                "number": trial.number,
                "state": trial.state,
                "datetime_start": _utc(trial.datetime_start),
                "datetime_complete": _utc(trial.datetime_complete),
            }
            for trial in study.trials
        ],
    )
    numbered = select(models.TrialModel.number, models.TrialModel.trial_id).where(
        models.TrialModel.study_id == study_id
    )
    ids: dict[int, int] = {number: trial_id for number, trial_id in connection.execute(numbered)}
    trials = [(ids[trial.number], trial) for trial in study.trials]
    tables: dict[Any, list[dict[str, Any]]] = {
        models.StudyDirectionModel: [{"study_id": study_id, "direction": study.directions[0], "objective": 0}],
        models.StudySystemAttributeModel: [_attribute("study_id", study_id, METRIC_NAMES, list(study.metric_names))],
        models.StudyUserAttributeModel: [
            _attribute("study_id", study_id, *one) for one in study.user_attributes.items()
        ],
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


def _utc(local: datetime | None) -> datetime | None:
    return None if local is None else local.astimezone(UTC).replace(tzinfo=None)
