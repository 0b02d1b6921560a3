"""Studies, their import with finished trials, and their answers."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, insert, literal, literal_column, select, update
from sqlalchemy.exc import IntegrityError

from bssearch.errors import OtherDeviceError, UsageError
from bssearch.records import (
    Configuration,
    Environment,
    NewStudy,
    Observation,
    Phase,
    StudyRecord,
    TrialOutcome,
    TrialRecord,
    spec_digest,
)
from bssearch.spec.reader import check_study_name
from bssearch.storage.database import Database, StorePart, inside, patiently, reads, writes
from bssearch.storage.models import (
    FINDING_ROWS,
    OBSERVATION_ROWS,
    PROBE_ROWS,
    SPEC_ROWS,
    STUDY_ROWS,
    TRIAL_ROWS,
    VISIT_ROWS,
    leaves,
    now,
    to_columns,
)
from bssearch.storage.queue import SUBMISSION_ROWS, refuse_queued, rename_submission
from bssearch.storage.statements import (
    STUDIES,
    STUDY,
    StudySummary,
    insert_if_absent,
    mark_probed,
    no_study,
    raise_revision,
    study_record,
    study_summary,
)
from bssearch.storage.trials import check_idle


def create_study(connection: Connection, study: StudyRecord, *, again: bool) -> None:
    """Store a study; ``again`` allows an equal stored study."""
    if insert_if_absent(connection, STUDY_ROWS, to_columns(study)):
        return
    stored = connection.execute(STUDY.where(STUDY_ROWS.c.name == study.name)).mappings().first()
    if not again or stored is None or study_record(stored) != study:
        raise _taken(study.name)


def bind_study(
    connection: Connection, study_id: int, environment: Environment, environment_id: int, *, again: bool
) -> None:
    """Bind a study to a kind of device; raise `OtherDeviceError` if bound to another kind.

    ``again`` replaces the environment by an environment of the same kind.
    """
    study = study_record(connection.execute(STUDY.where(STUDY_ROWS.c.id == study_id)).mappings().one())
    same_kind = study.environment is not None and study.environment.fingerprint == environment.fingerprint
    if study.environment is None or (again and same_kind):
        connection.execute(update(STUDY_ROWS).where(STUDY_ROWS.c.id == study_id).values(environment_id=environment_id))
    elif not same_kind:
        raise OtherDeviceError(
            f"the study {study.name!r} was measured on {study.environment.fingerprint}, and this device is "
            f"{environment.fingerprint}; different devices are never pooled",
            hint="give the spec another name for this device",
        )


def _taken(name: str) -> UsageError:
    return UsageError(f"study {name!r} already exists", hint="continue this study, or choose another name")


class StudyStore(StorePart):
    """Studies: specs and bound devices."""

    def create(self, new: NewStudy) -> StudyRecord:
        """Store a study; raise `UsageError` if the name is taken."""
        study: StudyRecord | None = None

        def create() -> StudyRecord:
            nonlocal study
            with self._database.writing() as connection:
                again = study is not None
                study = study or StudyRecord.created(new, now(connection))
                create_study(connection, study, again=again)
            return study

        return self.patience.run(create)

    @patiently
    def get(self, name: str) -> StudyRecord:
        """Study of this name."""
        found = self.find(name)
        if found is None:
            with self._database.reading() as connection:
                raise no_study(connection, name)
        return found

    @inside(Database.reading)
    def find(self, connection: Connection, name: str) -> StudyRecord | None:
        """Study of this name, or None."""
        self._database.asked.update(
            connection.execute(select(STUDY_ROWS.c.name, STUDY_ROWS.c.id).where(STUDY_ROWS.c.name == name)).all()
        )
        row = connection.execute(STUDY.where(STUDY_ROWS.c.name == name)).mappings().first()
        return None if row is None else study_record(row)

    @inside(Database.reading)
    def summaries(self, connection: Connection) -> list[StudySummary]:
        """All studies with trial counts, oldest first."""
        return [study_summary(row) for row in connection.execute(STUDIES).mappings()]

    @inside(Database.reading)
    def all(self, connection: Connection) -> list[StudyRecord]:
        """All studies, oldest first."""
        return [study_record(row) for row in connection.execute(STUDY.order_by(STUDY_ROWS.c.id)).mappings()]

    def rename(self, old: str, new: str) -> None:
        """Rename a study; raise `UsageError` if the name is invalid or taken, or the study running or queued."""

        def rename(connection: Connection, study_id: int) -> None:
            refuse_queued(connection, old, "renamed")
            check_study_name(new)
            check_idle(connection, study_id, old, "renamed")
            if (
                connection.scalar(select(STUDY_ROWS.c.id).where(STUDY_ROWS.c.name == new, STUDY_ROWS.c.id != study_id))
                is not None
            ):
                raise _taken(new)
            spec = connection.execute(select(STUDY_ROWS.c.spec).where(STUDY_ROWS.c.id == study_id)).scalar_one()
            renamed = update(STUDY_ROWS).where(STUDY_ROWS.c.id == study_id).values(name=new, spec={**spec, "name": new})
            try:
                connection.execute(renamed)
            except IntegrityError:  # another process created the study in the meantime
                raise _taken(new) from None
            if old != new:
                rename_submission(connection, old, new)

        self._database.on_study(old, rename)

    def archive(self, name: str, archived: bool = True) -> None:
        """Archive or unarchive a study; raise `UsageError` if the study is running or queued."""

        def archive(connection: Connection, study_id: int) -> None:
            changed = update(STUDY_ROWS).where(STUDY_ROWS.c.id == study_id)
            if archived:
                refuse_queued(connection, name, "archived")
                check_idle(connection, study_id, name, "archived")
                connection.execute(
                    changed.where(STUDY_ROWS.c.archived_at.is_(None)).values(archived_at=now(connection))
                )
            else:
                connection.execute(changed.values(archived_at=None))

        self._database.on_study(name, archive)

    def delete(self, name: str) -> None:
        """Delete a study; raise `UsageError` if the study is running or queued."""

        def delete_all(connection: Connection, study_id: int) -> None:
            refuse_queued(connection, name, "deleted")
            check_idle(connection, study_id, name, "deleted")
            connection.execute(delete(STUDY_ROWS).where(STUDY_ROWS.c.id == study_id))
            connection.execute(delete(SUBMISSION_ROWS).where(SUBMISSION_ROWS.c.name == name))

        self._database.on_study(name, delete_all)

    @writes
    def update_spec(self, connection: Connection, study_id: int, spec: Mapping[str, object]) -> None:
        """Replace a study's spec; the caller checks that the question stays the same."""
        connection.execute(update(STUDY_ROWS).where(STUDY_ROWS.c.id == study_id).values(spec=dict(spec)))

    @writes
    def keep_spec(self, connection: Connection, study_id: int, spec: Mapping[str, object]) -> str:
        """Store a spec; return its digest."""
        digest = spec_digest(spec)
        insert_if_absent(connection, SPEC_ROWS, {"study_id": study_id, "digest": digest, "spec": dict(spec)})
        return digest

    @writes
    def bind(self, connection: Connection, study_id: int, environment: Environment, *, again: bool = False) -> None:
        """See `bind_study`."""
        environment_id = self._database.environment_id(connection, environment)
        bind_study(connection, study_id, environment, environment_id, again=again)


class FindingStore(StorePart):
    """Answers of studies, valid while their stamp equals the study's."""

    @reads
    def stamp(self, connection: Connection, study_id: int) -> str:
        """Digest of a study's spec, trials and probes."""
        return _stamp(connection, study_id)

    @writes
    def save(
        self,
        connection: Connection,
        study_id: int,
        stamp: str,
        answer: Mapping[str, object],
        *,
        is_news: bool = False,
    ) -> None:
        """Replace a study's answer; ``stamp`` must be older than the answer.

        ``is_news``: drivers notice the answer like a new probe.
        """
        fields = {"stamp": stamp, "found_at": now(connection), "answer": answer}
        if not insert_if_absent(connection, FINDING_ROWS, {"study_id": study_id, **fields}):
            connection.execute(update(FINDING_ROWS).where(FINDING_ROWS.c.study_id == study_id).values(**fields))
        if is_news:
            mark_probed(connection, study_id)

    @inside(Database.looking)
    def age_seconds(self, connection: Connection, study: str) -> float:
        """Age of a study's answer; infinity without an answer."""
        study_id = self._database.study_id(connection, study)
        found_at = connection.scalar(select(FINDING_ROWS.c.found_at).where(FINDING_ROWS.c.study_id == study_id))
        return math.inf if found_at is None else (now(connection) - found_at).total_seconds()

    @inside(Database.looking)
    def last(self, connection: Connection, study: str) -> Mapping[str, Any]:
        """A study's last answer, even if outdated; empty without an answer."""
        study_id = self._database.study_id(connection, study)
        return connection.scalar(select(FINDING_ROWS.c.answer).where(FINDING_ROWS.c.study_id == study_id)) or {}

    @reads
    def current(self, connection: Connection, study_id: int) -> Mapping[str, Any] | None:
        """A study's answer; None if missing or outdated."""
        stored = connection.execute(
            select(FINDING_ROWS.c.stamp, FINDING_ROWS.c.answer).where(FINDING_ROWS.c.study_id == study_id)
        ).first()
        if stored is None or stored.stamp != _stamp(connection, study_id):
            return None
        answer: Mapping[str, Any] = stored.answer
        return answer


def _stamp(connection: Connection, study_id: int) -> str:
    study = connection.execute(
        select(STUDY_ROWS.c.name, STUDY_ROWS.c.spec, STUDY_ROWS.c.environment_id).where(STUDY_ROWS.c.id == study_id)
    ).one()
    trials = connection.execute(
        select(TRIAL_ROWS.c.state, func.count(), func.max(TRIAL_ROWS.c.id), func.max(TRIAL_ROWS.c.ended_at))
        .where(TRIAL_ROWS.c.study_id == study_id)
        .group_by(TRIAL_ROWS.c.state)
        .order_by(TRIAL_ROWS.c.state)
    ).all()
    probes = connection.execute(
        select(func.count(), func.max(PROBE_ROWS.c.id), func.max(PROBE_ROWS.c.measured_at)).where(
            PROBE_ROWS.c.study_id == study_id
        )
    ).all()
    visits = connection.execute(
        select(func.count(), func.max(VISIT_ROWS.c.id)).where(VISIT_ROWS.c.study_id == study_id)
    ).all()
    parts = [tuple(study), *([tuple(row) for row in rows] for rows in (trials, probes, visits))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


_FIXED = (int, datetime, StrEnum)  # without float, because SQLite does not read every literal exactly
CHUNK = 1_000  # trials per statement; values equal in all trials become literals, which saves two thirds of the time


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial:
    """A finished trial to import."""

    configuration: Configuration
    phase: Phase
    seed: int
    train_seconds_limit: float
    outcome: TrialOutcome
    curve: Sequence[Observation] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStudy:
    """A study to import; its trials get the numbers 1, 2, …"""

    study: NewStudy
    environment: Environment
    trials: Sequence[FinishedTrial]


def add_study(database: Database, connection: Connection, finished: FinishedStudy, time: datetime) -> None:
    """Store a study and its trials as created at ``time``."""
    study = StudyRecord.created(finished.study, time)
    check_study_name(study.name)
    _create(connection, study)
    study_id = connection.execute(select(STUDY_ROWS.c.id).where(STUDY_ROWS.c.name == study.name)).scalar_one()
    place = {"study_id": study_id, "environment_id": database.environment_id(connection, finished.environment)}
    bind_study(connection, study_id, finished.environment, place["environment_id"], again=False)
    place["revision"] = raise_revision(connection, study_id)
    attributes = _attributes()
    read = attrgetter(*attributes.values())
    for start in range(0, len(finished.trials), CHUNK):
        trials = finished.trials[start : start + CHUNK]
        row = {**place, **to_columns(_record(trials[0], start + 1, time))}
        columns = dict(zip(attributes, zip(*map(read, trials), strict=True), strict=True))
        for state in {*columns["state"]}:
            if not state.is_finished:
                raise ValueError(f"{state} is not a final state")
        columns["number"] = tuple(range(start + 1, start + 1 + len(trials)))
        columns["parameters"] = tuple(map(dict, columns["parameters"]))
        shared = {
            name: one for name, one in row.items() if name not in columns or columns[name].count(one) == len(trials)
        }
        fixed = {name: _literal(connection, name, one) for name, one in shared.items() if isinstance(one, _FIXED)}
        varying = [name for name in columns if name not in fixed and shared.get(name, "") is not None]
        compiled: Any = (
            insert(TRIAL_ROWS).values(fixed).inline().compile(dialect=connection.dialect, column_keys=varying)
        )
        rows = zip(*(_stored(connection, name, columns[name]) for name in compiled.positiontup or varying), strict=True)
        connection.exec_driver_sql(
            str(compiled),
            [*rows] if compiled.positional else [dict(zip(varying, values, strict=True)) for values in rows],
        )
    _add_curves(connection, study_id, finished.trials)


def _add_curves(connection: Connection, study_id: int, trials: Sequence[FinishedTrial]) -> None:
    numbered = [(number, one) for number, one in enumerate(trials, 1) if one.curve]
    if not numbered:
        return
    stored = connection.execute(select(TRIAL_ROWS.c.number, TRIAL_ROWS.c.id).where(TRIAL_ROWS.c.study_id == study_id))
    ids = {row.number: row.id for row in stored}
    rows = ({"trial_id": ids[number], **asdict(one)} for number, trial in numbered for one in trial.curve)
    while chunk := list(itertools.islice(rows, CHUNK)):
        connection.execute(insert(OBSERVATION_ROWS), chunk)


def _stored(connection: Connection, name: str, values: Sequence[Any]) -> Iterable[Any]:
    # SQLAlchemy's conversion row by row takes three times as long.
    convert = TRIAL_ROWS.c[name].type.dialect_impl(connection.dialect).bind_processor(connection.dialect)
    return values if convert is None else map(convert, values)


@cache
def _attributes() -> dict[str, str]:
    # Columns that a `FinishedTrial` fills, with the paths of its attributes
    own = {"phase": "phase", "seed": "seed", "train_seconds_limit": "train_seconds_limit", "state": "outcome.state"}
    inner = leaves(Configuration, "configuration.") | leaves(TrialOutcome, "outcome.")
    return own | {name: path for name, (path, _) in inner.items()}


def _literal(connection: Connection, name: str, value: object) -> ColumnElement[Any]:
    bound = literal(value, TRIAL_ROWS.c[name].type)
    return literal_column(str(bound.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})))


def is_stored(connection: Connection, finished: FinishedStudy, time: datetime) -> bool:
    """True if `add_study` stored this study at ``time``."""
    study = StudyRecord.created(finished.study, time, finished.environment)
    row = connection.execute(STUDY.where(STUDY_ROWS.c.name == study.name)).mappings().first()
    return row is not None and study_record(row) == study


def _create(connection: Connection, study: StudyRecord) -> None:
    try:
        create_study(connection, study, again=False)
    except UsageError as error:
        raise UsageError(
            error.message,
            hint=f"delete the old study by `bssearch study delete {study.name}`, or keep both with another --name",
        ) from None


def _record(trial: FinishedTrial, number: int, time: datetime) -> TrialRecord:
    return TrialRecord(
        number=number,
        state=trial.outcome.state,
        phase=trial.phase,
        uncapped=True,  # no other trial limited this trial's time
        configuration=trial.configuration,
        sampled=None,
        seed=trial.seed,
        train_seconds_limit=trial.train_seconds_limit,
        eval_every_steps=1,
        threads=1,
        retry_of=None,
        lease_owner=None,
        lease_expires_at=None,
        created_at=time,
        ended_at=time,
        steps_x_step_time_s=None,
        outcome=trial.outcome,
    )
