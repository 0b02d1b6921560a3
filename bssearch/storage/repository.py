"""The store: studies, trials, observations and probes as records. Each method is one transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Self

from sqlalchemy import URL, Connection, and_, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from bssearch.errors import DatabaseError, UsageError
from bssearch.records import (
    Configuration,
    Environment,
    Observation,
    ParameterValue,
    Phase,
    ProbeRecord,
    StudyRecord,
    Target,
    TrialOutcome,
    TrialRecord,
    TrialState,
    to_json,
)
from bssearch.settings import database_url
from bssearch.storage import migrate
from bssearch.storage.engine import create_engine_for, masked, reading, writing
from bssearch.storage.models import EnvironmentRow, ObservationRow, ProbeKind, ProbeRow, StudyRow, TrialRow
from bssearch.storage.rows import from_columns, to_columns
from bssearch.storage.statements import (
    OBSERVATIONS,
    PROBES,
    STUDIES,
    STUDY,
    TRIALS,
    StudySummary,
    database_now,
    end_trial,
    is_running,
    no_study,
    no_trial,
    study_record,
    study_summary,
    trial_id_of,
    trial_record,
)


def open_store(url: str | URL | None = None, *, write: bool = True) -> Store:
    """Open the database of the URL, of ``BSSEARCH_DB_URL``, or the file in this folder.

    For writing a SQLite file is made or upgraded; for reading it must exist and is not touched. Raises `UsageError`
    for a text that is no URL, `DatabaseError` where it cannot be opened, `SchemaError` where its schema is not ours.
    """
    return Store(url if isinstance(url, URL) else database_url(url), write=write)


class Store:
    """An open database. Every method may raise `DatabaseError`; those that take a study's name `NotFoundError`."""

    def __init__(self, url: str | URL, *, write: bool = True) -> None:
        self._engine = create_engine_for(url, write=write)
        self._write = write
        self._study_ids: dict[str, int] = {}
        self._environment_ids: dict[Environment, int] = {}
        try:
            if write:
                migrate.prepare(self._engine)
            else:
                migrate.check(self._engine)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @property
    def masked_url(self) -> str:
        """The URL, fit to be printed."""
        return masked(self._engine.url)

    def create_study(
        self, name: str, spec: Mapping[str, object], spec_hash: str, objective: str, target: Target, created_by: str
    ) -> StudyRecord:
        """Store a new study; raise `UsageError` where the name is taken."""
        with self._writing() as connection:
            study = StudyRecord(
                name=name,
                spec=spec,
                spec_hash=spec_hash,
                objective=objective,
                target=target,
                created_by=created_by,
                created_at=connection.execute(select(database_now())).scalar_one(),
                environment=None,
            )
            if connection.scalar(select(StudyRow.id).where(StudyRow.name == name)) is not None:
                raise UsageError(f"there is a study {name!r} already", hint="continue it, or choose another name")
            connection.execute(insert(StudyRow).values(**to_columns(study)))
        return study

    def study(self, name: str) -> StudyRecord:
        """Return a study; raise `NotFoundError` naming those with a name like it."""
        found = self.find_study(name)
        if found is None:
            with self._reading() as connection:
                raise no_study(connection, name)
        return found

    def find_study(self, name: str) -> StudyRecord | None:
        """Return a study, or None."""
        with self._reading() as connection:
            row = connection.execute(STUDY.where(StudyRow.name == name)).mappings().first()
        return None if row is None else study_record(row)

    def studies(self) -> list[StudySummary]:
        """Return all studies, the oldest first, with the counts of their trials."""
        with self._reading() as connection:
            return [study_summary(row) for row in connection.execute(STUDIES).mappings()]

    def update_spec(self, name: str, spec: Mapping[str, object]) -> None:
        """Replace the spec of a study, of which the question is the same."""
        with self._writing() as connection:
            study_id = self._study_id(connection, name)
            connection.execute(update(StudyRow).where(StudyRow.id == study_id).values(spec=dict(spec)))

    def bind_environment(self, name: str, environment: Environment) -> None:
        """Bind a study to the kind of device of its first run; raise `UsageError` on any other kind."""
        with self._writing() as connection:
            study_id = self._lock_study(connection, name)
            row = connection.execute(STUDY.where(StudyRow.id == study_id)).mappings().one()
            bound = study_record(row).environment
            if bound is None:
                environment_id = self._environment_id(connection, environment)
                connection.execute(
                    update(StudyRow).where(StudyRow.id == study_id).values(environment_id=environment_id)
                )
            elif bound.fingerprint != environment.fingerprint:
                raise UsageError(
                    f"the study {name!r} was measured on {bound.fingerprint}, this is {environment.fingerprint}: "
                    "seconds of two kinds of device are never pooled",
                    hint="give the spec another name to ask the question on this device",
                )

    def start_trial(
        self,
        study: str,
        *,
        configuration: Configuration,
        sampled: Mapping[str, ParameterValue] | None,
        phase: Phase,
        evidence: bool,
        seed: int,
        train_seconds_limit: float,
        eval_every_steps: int,
        threads: int,
        retry_of: int | None,
        environment: Environment,
        lease_owner: str,
        lease_seconds: float,
    ) -> int:
        """Store a running trial and return its number: the study's next, counted from 1, given to one caller only."""
        with self._writing() as connection:
            study_id = self._lock_study(connection, study)
            last = connection.scalar(select(func.max(TrialRow.number)).where(TrialRow.study_id == study_id))
            now = connection.execute(select(database_now())).scalar_one()
            trial = TrialRecord(
                number=(last or 0) + 1,
                state=TrialState.RUNNING,
                phase=phase,
                evidence=evidence,
                configuration=configuration,
                sampled=sampled,
                seed=seed,
                train_seconds_limit=train_seconds_limit,
                eval_every_steps=eval_every_steps,
                threads=threads,
                retry_of=retry_of,
                lease_owner=lease_owner,
                lease_expires_at=now + timedelta(seconds=lease_seconds),
                created_at=now,
                ended_at=None,
                steps_x_step_time_s=None,
                outcome=TrialOutcome(state=TrialState.RUNNING, reason=""),
            )
            connection.execute(
                insert(TrialRow).values(
                    study_id=study_id,
                    environment_id=self._environment_id(connection, environment),
                    **to_columns(trial),
                )
            )
        return trial.number

    def append_observations(self, study: str, rows: Sequence[tuple[int, Observation]]) -> None:
        """Store observations with the numbers of their trials, all or none; raise `DatabaseError` for a step twice."""
        if not rows:
            return
        try:
            with self._writing() as connection:
                study_id = self._study_id(connection, study)
                ids = {number: trial_id_of(connection, study, study_id, number) for number in dict(rows)}
                connection.execute(
                    insert(ObservationRow), [{"trial_id": ids[number], **to_columns(one)} for number, one in rows]
                )
        except DatabaseError as error:
            twice = self._stored_twice(study, rows) if isinstance(error.__cause__, IntegrityError) else None
            if twice is None:
                raise
            number, step = twice
            raise DatabaseError(f"trial {number} of {study!r} already has an observation at step {step}") from error

    def finish_trial(
        self, study: str, number: int, outcome: TrialOutcome, *, steps_x_step_time_s: float | None
    ) -> None:
        """Store how a running trial ended; raise `DatabaseError` where it is not running any more."""
        if not outcome.state.is_finished:
            raise ValueError(f"{outcome.state} is not how a trial ends")
        with self._writing() as connection:
            study_id = self._study_id(connection, study)
            trial_id = trial_id_of(connection, study, study_id, number)
            changed = end_trial(
                connection, trial_id, {**to_columns(outcome), "steps_x_step_time_s": steps_x_step_time_s}
            )
            if not changed:
                state = connection.execute(select(TrialRow.state).where(TrialRow.id == trial_id)).scalar_one()
                raise DatabaseError(
                    f"trial {number} of {study!r} cannot end as {outcome.state}: it is not running but {state}"
                )

    def heartbeat(self, study: str, owner: str, lease_seconds: float) -> None:
        """Extend the leases of the owner's running trials to ``lease_seconds`` from now, by the database's clock."""
        with self._writing() as connection:
            study_id = self._study_id(connection, study)
            expires_at = connection.execute(select(database_now())).scalar_one() + timedelta(seconds=lease_seconds)
            connection.execute(
                update(TrialRow)
                .where(*is_running(study_id), TrialRow.lease_owner == owner)
                .values(lease_expires_at=expires_at)
            )

    def mark_lost(self, study: str, *, is_alive: Callable[[str], bool | None]) -> list[int]:
        """End the running trials of dead owners as lost; return their numbers.

        ``is_alive`` says True or False of an owner, or None where it cannot know: then the lease decides.
        """
        with self._reading() as connection:
            study_id = self._study_id(connection, study)
            owners = connection.scalars(select(TrialRow.lease_owner).where(*is_running(study_id)).distinct()).all()
        if not owners:
            return []
        known = {owner: is_alive(owner) for owner in owners if owner is not None}
        dead = {owner for owner, alive in known.items() if alive is False}
        alive = {owner for owner, alive in known.items() if alive}
        with self._writing() as connection:
            now = connection.execute(select(database_now())).scalar_one()
            rows = connection.execute(
                select(TrialRow.id, TrialRow.number, TrialRow.lease_owner, TrialRow.lease_expires_at)
                .where(
                    *is_running(study_id),
                    or_(
                        TrialRow.lease_owner.in_(dead),
                        and_(TrialRow.lease_expires_at <= now, TrialRow.lease_owner.not_in(alive)),
                    ),
                )
                .order_by(TrialRow.number)
                .with_for_update()
            ).all()
            for trial_id, _, owner, expired_at in rows:
                gone = f"its driver {owner} is gone"
                late = f"its lease ended at {expired_at:%Y-%m-%d %H:%M:%S} UTC, not renewed by {owner}"
                outcome = TrialOutcome(state=TrialState.LOST, reason=gone if owner in dead else late)
                end_trial(connection, trial_id, to_columns(outcome))
            return [row.number for row in rows]

    def trials(
        self, study: str, *, phase: Phase | None = None, states: Collection[TrialState] | None = None
    ) -> list[TrialRecord]:
        """Return a study's trials by number; only those of a phase or of some states where asked."""
        with self._reading() as connection:
            query = TRIALS.where(TrialRow.study_id == self._study_id(connection, study))
            if phase is not None:
                query = query.where(TrialRow.phase == phase)
            if states is not None:
                query = query.where(TrialRow.state.in_(states))
            return [trial_record(row) for row in connection.execute(query).mappings()]

    def trial(self, study: str, number: int) -> TrialRecord:
        """Return one trial; raise `NotFoundError` naming the numbers there are."""
        with self._reading() as connection:
            study_id = self._study_id(connection, study)
            query = TRIALS.where(TrialRow.study_id == study_id, TrialRow.number == number)
            row = connection.execute(query).mappings().first()
            if row is None:
                raise no_trial(connection, study, study_id, number)
        return trial_record(row)

    def observations(self, study: str, number: int) -> list[Observation]:
        """Return the observations of one trial by step; raise `NotFoundError` for a trial that is not."""
        with self._reading() as connection:
            trial_id_of(connection, study, self._study_id(connection, study), number)
        return self.curves(study, [number])[number]

    def curves(self, study: str, numbers: Collection[int]) -> dict[int, list[Observation]]:
        """Return the observations of some trials, by trial and step; a trial without any has an empty list."""
        found: dict[int, list[Observation]] = {number: [] for number in numbers}
        with self._reading() as connection:
            query = OBSERVATIONS.where(
                TrialRow.study_id == self._study_id(connection, study), TrialRow.number.in_(found)
            )
            for row in connection.execute(query).mappings():
                found[row["number"]].append(from_columns(Observation, row))
        return found

    def observation_count(self, study: str) -> int:
        """Return how many observations a study has."""
        with self._reading() as connection:
            query = select(func.count()).select_from(ObservationRow).join(TrialRow)
            study_id = self._study_id(connection, study)
            return connection.execute(query.where(TrialRow.study_id == study_id)).scalar_one()

    def save_probe(self, study: str, environment: Environment, probe: ProbeRecord) -> None:
        """Store the step time of a batch size, in the place of an earlier one in the same environment."""
        with self._writing() as connection:
            place = {
                "study_id": self._lock_study(connection, study),
                "environment_id": self._environment_id(connection, environment),
                "kind": ProbeKind.STEP_TIME,
                "batch_size": probe.batch_size,
            }
            connection.execute(delete(ProbeRow).filter_by(**place))
            now = connection.execute(select(database_now())).scalar_one()
            connection.execute(insert(ProbeRow).values({**to_columns(probe), **place, "measured_at": now}))

    def probes(self, study: str) -> dict[int, ProbeRecord]:
        """Return the step times of a study by batch size; of several environments the latest measurement."""
        with self._reading() as connection:
            query = PROBES.where(ProbeRow.study_id == self._study_id(connection, study))
            return {row["batch_size"]: from_columns(ProbeRecord, row) for row in connection.execute(query).mappings()}

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with reading(self._engine) as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        if not self._write:
            raise DatabaseError(f"{self.masked_url} was opened for reading")
        with writing(self._engine) as connection:
            yield connection

    def _study_id(self, connection: Connection, name: str) -> int:
        if name not in self._study_ids:
            found = connection.scalar(select(StudyRow.id).where(StudyRow.name == name))
            if found is None:
                raise no_study(connection, name)
            self._study_ids[name] = found
        return self._study_ids[name]

    def _lock_study(self, connection: Connection, name: str) -> int:
        """Return the study's id, and keep other writers of the study out until the transaction ends."""
        study_id = self._study_id(connection, name)
        connection.execute(select(StudyRow.id).where(StudyRow.id == study_id).with_for_update())
        return study_id

    def _environment_id(self, connection: Connection, environment: Environment) -> int:
        if environment in self._environment_ids:
            return self._environment_ids[environment]
        digest = hashlib.sha256(to_json(environment).encode()).hexdigest()
        query = select(EnvironmentRow.id).where(EnvironmentRow.digest == digest)
        found = connection.scalar(query)
        if found is not None:
            # Only what another transaction committed is remembered: this one may yet be rolled back.
            self._environment_ids[environment] = found
            return found
        try:
            with connection.begin_nested():
                connection.execute(insert(EnvironmentRow).values(digest=digest, **to_columns(environment)))
        except IntegrityError:
            pass  # another driver, of another study, was faster
        return connection.execute(query).scalar_one()

    def _stored_twice(self, study: str, rows: Sequence[tuple[int, Observation]]) -> tuple[int, int] | None:
        stored = self.curves(study, dict(rows))
        known = {(number, one.step) for number, curve in stored.items() for one in curve}
        for number, one in rows:
            if (number, one.step) in known:
                return number, one.step
            known.add((number, one.step))
        return None
