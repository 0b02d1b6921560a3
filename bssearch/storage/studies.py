"""Studies, their import with finished trials, and their answers."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from bssearch.errors import OtherDeviceError, UsageError
from bssearch.records import (
    Environment,
    NewStudy,
    Observation,
    Planned,
    StudyRecord,
    TrialOutcome,
    TrialRecord,
    spec_digest,
)
from bssearch.spec import check_study_name
from bssearch.storage.database import Database, StorePart, inside, patiently, reads, writes
from bssearch.storage.models import (
    FINDING_ROWS,
    OBSERVATION_ROWS,
    PROBE_ROWS,
    SPEC_ROWS,
    STUDY_ROWS,
    TRIAL_ROWS,
    VISIT_ROWS,
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
    """Store a study. Raises `UsageError` if the name is taken.

    With ``again``, an equal stored study is no error.
    """
    if insert_if_absent(connection, STUDY_ROWS, to_columns(study)):
        return
    stored = connection.execute(STUDY.where(STUDY_ROWS.c.name == study.name)).mappings().first()
    if not again or stored is None or study_record(stored) != study:
        raise _taken(study.name)


def bind_study(
    connection: Connection, study_id: int, environment: Environment, environment_id: int, *, again: bool
) -> None:
    """Bind a study to a device, precision and compile mode. Raises `OtherDeviceError` for other bound values.

    With ``again``, an environment of the same kind replaces the stored environment.
    """
    study = study_record(connection.execute(STUDY.where(STUDY_ROWS.c.id == study_id)).mappings().one())
    same_kind = study.environment is not None and study.environment.fingerprint == environment.fingerprint
    if study.environment is None or (again and same_kind):
        connection.execute(update(STUDY_ROWS).where(STUDY_ROWS.c.id == study_id).values(environment_id=environment_id))
    elif not same_kind:
        raise OtherDeviceError(
            f"the study {study.name!r} was measured on {study.environment.fingerprint}, and this run would use "
            f"{environment.fingerprint}; a study pools only trials of one device, precision and compile mode",
            hint="give the spec another name",
        )


def _taken(name: str) -> UsageError:
    return UsageError(
        f"study {name!r} already exists",
        hint=f"choose another name, or delete the study with `bssearch study delete {name}`",
    )


def _refuse_busy(connection: Connection, study_id: int, name: str, doing: str) -> None:
    refuse_queued(connection, name, doing)
    check_idle(connection, study_id, name, doing)


class StudyStore(StorePart):
    """The studies, with their specs and environments."""

    def create(self, new: NewStudy) -> StudyRecord:
        """Store a study. Raises `UsageError` if the name is taken."""
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
        found = self.find(name)
        if found is None:
            with self._database.reading() as connection:
                raise no_study(connection, name)
        return found

    @inside(Database.reading)
    def find(self, connection: Connection, name: str) -> StudyRecord | None:
        self._database.asked.update(
            connection.execute(select(STUDY_ROWS.c.name, STUDY_ROWS.c.id).where(STUDY_ROWS.c.name == name)).all()
        )
        row = connection.execute(STUDY.where(STUDY_ROWS.c.name == name)).mappings().first()
        return None if row is None else study_record(row)

    @inside(Database.reading)
    def summaries(self, connection: Connection) -> list[StudySummary]:
        """All studies with their trial counts, oldest first."""
        return [study_summary(row) for row in connection.execute(STUDIES).mappings()]

    @writes
    def rename(self, connection: Connection, study_id: int, new: str) -> None:
        """Rename a study. Raises `UsageError` if the name is invalid or taken, or the study is running or queued."""
        own = STUDY_ROWS.c.id == study_id
        old, spec = connection.execute(select(STUDY_ROWS.c.name, STUDY_ROWS.c.spec).where(own)).one()
        if old == new:  # an earlier try may have committed
            return
        _refuse_busy(connection, study_id, old, "renamed")
        check_study_name(new)
        try:
            connection.execute(update(STUDY_ROWS).where(own).values(name=new, spec={**spec, "name": new}))
        except IntegrityError:
            raise _taken(new) from None
        rename_submission(connection, old, new)

    @writes
    def archive(self, connection: Connection, study_id: int, archived: bool = True) -> None:
        """Archive or unarchive a study. Raises `UsageError` if a study to archive is running or queued."""
        own = STUDY_ROWS.c.id == study_id
        if not archived:
            connection.execute(update(STUDY_ROWS).where(own).values(archived_at=None))
            return
        _refuse_busy(connection, study_id, connection.scalars(select(STUDY_ROWS.c.name).where(own)).one(), "archived")
        archives = update(STUDY_ROWS).where(own, STUDY_ROWS.c.archived_at.is_(None))
        connection.execute(archives.values(archived_at=now(connection)))

    @writes
    def delete(self, connection: Connection, study_id: int) -> None:
        """Delete a study. Raises `UsageError` if the study is running or queued."""
        name = connection.scalar(select(STUDY_ROWS.c.name).where(STUDY_ROWS.c.id == study_id))
        if name is not None:  # an earlier try may have committed
            _refuse_busy(connection, study_id, name, "deleted")
            connection.execute(delete(STUDY_ROWS).where(STUDY_ROWS.c.id == study_id))
            connection.execute(delete(SUBMISSION_ROWS).where(SUBMISSION_ROWS.c.name == name))

    @writes
    def update_spec(self, connection: Connection, study_id: int, spec: Mapping[str, object]) -> None:
        """Replace a study's spec. The caller checks that the spec hash is unchanged."""
        connection.execute(update(STUDY_ROWS).where(STUDY_ROWS.c.id == study_id).values(spec=dict(spec)))

    @writes
    def keep_spec(self, connection: Connection, study_id: int, spec: Mapping[str, object]) -> str:
        digest = spec_digest(spec)
        insert_if_absent(connection, SPEC_ROWS, {"study_id": study_id, "digest": digest, "spec": dict(spec)})
        return digest

    @writes
    def bind(self, connection: Connection, study_id: int, environment: Environment, *, again: bool = False) -> None:
        environment_id = self._database.environment_id(connection, environment)
        bind_study(connection, study_id, environment, environment_id, again=again)


class FindingStore(StorePart):
    """The answers of studies.

    A stamp is a digest of a study's spec, trials and probes. An answer is outdated if the study's stamp has changed.
    """

    @reads
    def stamp(self, connection: Connection, study_id: int) -> str:
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
        """Store a study's answer in place of an earlier answer.

        Read ``stamp`` before computing ``answer``. If ``is_news``, drivers reload the study as after a new probe.
        """
        fields = {"stamp": stamp, "found_at": now(connection), "answer": answer}
        if not insert_if_absent(connection, FINDING_ROWS, {"study_id": study_id, **fields}):
            connection.execute(update(FINDING_ROWS).where(FINDING_ROWS.c.study_id == study_id).values(**fields))
        if is_news:
            mark_probed(connection, study_id)

    @inside(Database.looking)
    def age_seconds(self, connection: Connection, study: str) -> float:
        """The seconds since a study's last answer, or infinity without an answer."""
        study_id = self._database.study_id(connection, study)
        found_at = connection.scalar(select(FINDING_ROWS.c.found_at).where(FINDING_ROWS.c.study_id == study_id))
        return math.inf if found_at is None else (now(connection) - found_at).total_seconds()

    @inside(Database.looking)
    def last(self, connection: Connection, study: str) -> Mapping[str, Any]:
        """A study's last answer, even if outdated, or an empty mapping."""
        study_id = self._database.study_id(connection, study)
        return connection.scalar(select(FINDING_ROWS.c.answer).where(FINDING_ROWS.c.study_id == study_id)) or {}

    @reads
    def current(self, connection: Connection, study_id: int) -> Mapping[str, Any] | None:
        """A study's answer, or None if the answer is missing or outdated."""
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


CHUNK = 1_000  # rows per statement

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial(Planned):
    """A finished trial to import."""

    outcome: TrialOutcome
    curve: Sequence[Observation] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStudy:
    """A study to import. The trials get the numbers 1, 2, …"""

    study: NewStudy
    environment: Environment
    trials: Sequence[FinishedTrial]


def add_study(connection: Connection, finished: FinishedStudy, time: datetime, environment_id: int) -> None:
    study = StudyRecord.created(finished.study, time)
    check_study_name(study.name)
    create_study(connection, study, again=False)
    study_id = connection.execute(select(STUDY_ROWS.c.id).where(STUDY_ROWS.c.name == study.name)).scalar_one()
    bind_study(connection, study_id, finished.environment, environment_id, again=False)
    revision = raise_revision(connection, study_id)
    place = {"study_id": study_id, "environment_id": environment_id, "revision": revision}
    numbered = list(enumerate(finished.trials, 1))
    for chunk in _chunks(numbered):
        trials = (to_columns(_record(trial, number, time)) for number, trial in chunk)
        connection.execute(insert(TRIAL_ROWS), [{**place, **columns} for columns in trials])
    stored = connection.execute(select(TRIAL_ROWS.c.number, TRIAL_ROWS.c.id).where(TRIAL_ROWS.c.study_id == study_id))
    ids = {row.number: row.id for row in stored}
    for evaluations in _chunks((ids[number], one) for number, trial in numbered for one in trial.curve):
        connection.execute(
            insert(OBSERVATION_ROWS), [{"trial_id": one, **to_columns(seen)} for one, seen in evaluations]
        )


def _chunks(rows: Iterable[Value]) -> Iterator[list[Value]]:
    left = iter(rows)
    while chunk := list(itertools.islice(left, CHUNK)):
        yield chunk


def is_stored(connection: Connection, finished: FinishedStudy, time: datetime) -> bool:
    study = StudyRecord.created(finished.study, time, finished.environment)
    row = connection.execute(STUDY.where(STUDY_ROWS.c.name == study.name)).mappings().first()
    return row is not None and study_record(row) == study


def _record(trial: FinishedTrial, number: int, time: datetime) -> TrialRecord:
    queued = TrialRecord.planned(trial, number=number, lease=None, created_at=time)
    return replace(queued, state=trial.outcome.state, ended_at=time, outcome=trial.outcome)
