"""The store: studies, trials, observations and probes as records. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from sqlalchemy import URL, Connection, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from bssearch.errors import DatabaseError
from bssearch.records import (
    Configuration,
    Environment,
    Observation,
    ParameterValue,
    Phase,
    StudyRecord,
    Target,
    TrialOutcome,
    TrialRecord,
    TrialState,
)
from bssearch.settings import database_url
from bssearch.storage import imports, keeping, leases, starting
from bssearch.storage.database import Notify, patiently
from bssearch.storage.findings import Findings
from bssearch.storage.leases import IsAlive
from bssearch.storage.measurements import Measurements
from bssearch.storage.models import LogRow, ObservationRow, StudyRow, TrialRow
from bssearch.storage.rows import from_columns, to_columns
from bssearch.storage.statements import (
    OBSERVATIONS,
    STUDIES,
    STUDY,
    TRIALS,
    StudySummary,
    end_trial,
    insert_if_absent,
    no_study,
    no_trial,
    study_record,
    study_summary,
    trial_id_of,
    trial_record,
)


def open_store(url: str | URL | None = None, *, write: bool = True, notify: Notify | None = None) -> Store:
    """Open the database of the URL, of ``BSSEARCH_DB_URL``, or the file in this folder.

    For writing a SQLite file is made or upgraded; for reading it must exist and is not touched. ``notify`` gets
    one-line messages for people: schema upgraded, connection lost, connection back. Raises `UsageError` for a text that
    is no URL, `DatabaseError` where it cannot be opened, `SchemaError` where its schema is not ours.
    """
    return Store(url if isinstance(url, URL) else database_url(url), write=write, notify=notify)


class Store(Findings, Measurements):
    """An open database. Every method may raise `DatabaseError`; those that take a study's name `NotFoundError`.

    Threads may share one. One that is open for writing waits for a server that is away (`Patience`).
    """

    def create_study(
        self, name: str, spec: Mapping[str, object], spec_hash: str, objective: str, target: Target, created_by: str
    ) -> StudyRecord:
        """Store a new study; raise `UsageError` where the name is taken. Of two that create it at once one does."""
        study: StudyRecord | None = None

        def create() -> StudyRecord:
            nonlocal study
            with self._writing() as connection:
                again = study is not None
                study = study or StudyRecord(
                    name=name,
                    spec=spec,
                    spec_hash=spec_hash,
                    objective=objective,
                    target=target,
                    created_by=created_by,
                    created_at=leases.now(connection),
                    environment=None,
                )
                keeping.create(connection, study, again=again)
            return study

        return self._patience.run(create)

    def import_studies(self, studies: Sequence[imports.FinishedStudy]) -> None:
        """Store new studies with their finished trials, all or none; raise `UsageError` where a name is taken."""
        batch = imports.Import(studies)

        def add() -> None:
            with self._writing() as connection:
                batch.add(connection, self._environment_id)

        self._patience.run(add)

    def rename_study(self, old: str, new: str) -> None:
        """Rename a study; raise `UsageError` for a name that is taken or ill-formed, or where a trial of it runs."""
        self._on_study(old, partial(keeping.rename, old=old, new=new))

    def archive_study(self, name: str, archived: bool = True) -> None:
        """Archive a study, or bring it back; raise `UsageError` where it is to be archived while a driver runs it."""
        self._on_study(name, partial(keeping.archive, name=name, archived=archived))

    def delete_study(self, name: str) -> None:
        """Delete a study with all its trials; raise `UsageError` where one of them runs."""
        self._on_study(name, partial(keeping.delete_all, name=name))

    @patiently
    def study(self, name: str) -> StudyRecord:
        """Return a study; raise `NotFoundError` naming those with a name like it."""
        found = self.find_study(name)
        if found is None:
            with self._reading() as connection:
                raise no_study(connection, name)
        return found

    @patiently
    def find_study(self, name: str) -> StudyRecord | None:
        """Return a study, or None."""
        with self._reading() as connection:
            row = connection.execute(STUDY.where(StudyRow.name == name)).mappings().first()
        return None if row is None else study_record(row)

    @patiently
    def studies(self) -> list[StudySummary]:
        """Return all studies, the oldest first, with the counts of their trials."""
        with self._reading() as connection:
            return [study_summary(row) for row in connection.execute(STUDIES).mappings()]

    def update_spec(self, name: str, spec: Mapping[str, object]) -> None:
        """Replace the spec of a study, of which the question is the same."""
        self._on_study(name, partial(keeping.update_spec, spec=spec))

    def bind_environment(self, name: str, environment: Environment, *, again: bool = False) -> None:
        """Bind a study to the kind of device of its first run; raise `UsageError` on any other kind.

        ``again``: from now on it is this environment, of the same kind, that counts as its first.
        """

        def bind(connection: Connection, study_id: int) -> None:
            keeping.bind(connection, study_id, environment, self._environment_id(connection, environment), again=again)

        self._on_study(name, bind)

    def start_trial(
        self,
        study: str,
        *,
        configuration: Configuration,
        sampled: Mapping[str, ParameterValue] | None,
        phase: Phase,
        uncapped: bool,
        seed: int,
        train_seconds_limit: float,
        eval_every_steps: int,
        threads: int,
        retry_of: int | None,
        environment: Environment,
        lease_owner: str,
        lease_seconds: float,
        after: int | None = None,
    ) -> int | None:
        """Store a running trial and return its number: the study's next, counted from 1, given to one caller only.

        With ``after``, the newest trial that the caller has seen (0: none), only where there is no newer one; else
        None, and the caller looks again. So drivers decide one after the other, each knowing what the others started.
        """
        fields = {
            "configuration": configuration,
            "sampled": sampled,
            "phase": phase,
            "uncapped": uncapped,
            "seed": seed,
            "train_seconds_limit": train_seconds_limit,
            "eval_every_steps": eval_every_steps,
            "threads": threads,
            "retry_of": retry_of,
            "lease_owner": lease_owner,
        }
        trial = starting.NewTrial(fields, lease_seconds)

        def start(connection: Connection, study_id: int) -> int | None:
            starting.refuse_archived(connection, study_id, study)
            environment_id = self._environment_id(connection, environment)
            if after is None:
                return trial.add(connection, study_id, environment_id)
            return trial.add_after(connection, study_id, environment_id, after)

        return self._on_study(study, start)

    def enqueue_trial(
        self,
        study: str,
        *,
        configuration: Configuration,
        sampled: Mapping[str, ParameterValue] | None,
        seed: int,
        train_seconds_limit: float,
        eval_every_steps: int,
        threads: int,
    ) -> int:
        """Store a trial that some driver shall start, and return its number."""
        fields = {
            "configuration": configuration,
            "sampled": sampled,
            "phase": Phase.SEARCH,
            "uncapped": True,
            "seed": seed,
            "train_seconds_limit": train_seconds_limit,
            "eval_every_steps": eval_every_steps,
            "threads": threads,
            "retry_of": None,
            "lease_owner": None,
        }
        trial = starting.NewTrial(fields, lease_seconds=None)

        def queue(connection: Connection, study_id: int) -> int:
            starting.refuse_archived(connection, study_id, study)
            return trial.add(connection, study_id, environment_id=None)

        return self._on_study(study, queue)

    def start_queued(
        self,
        study: str,
        number: int,
        *,
        configuration: Configuration,
        train_seconds_limit: float,
        eval_every_steps: int,
        threads: int,
        environment: Environment,
        lease_owner: str,
        lease_seconds: float,
    ) -> bool:
        """Start a queued trial; return False where it is not queued any more, True where it runs for this owner.

        Of its ``configuration`` the micro-batches may differ from those it was queued with.
        """

        def start(connection: Connection, study_id: int) -> bool:
            return starting.start_queued(
                connection,
                study_id,
                number,
                self._environment_id(connection, environment),
                lease_owner=lease_owner,
                lease_seconds=lease_seconds,
                micro_batch_size=configuration.micro_batch_size,
                accumulation_steps=configuration.accumulation_steps,
                train_seconds_limit=train_seconds_limit,
                eval_every_steps=eval_every_steps,
                threads=threads,
            )

        return self._on_study(study, start)

    def resume_trial(
        self, study: str, number: int, *, train_seconds_limit: float, lease_owner: str, lease_seconds: float
    ) -> bool:
        """Let a paused trial go on under a new limit; return False where it is not paused any more.

        True where it runs for this owner. It keeps its number and its observations, to which further ones are appended.
        """
        go_on = partial(
            starting.resume,
            number=number,
            train_seconds_limit=train_seconds_limit,
            lease_owner=lease_owner,
            lease_seconds=lease_seconds,
        )
        return self._on_study(study, go_on)

    def settle_paused(
        self, study: str, numbers: Collection[int] | None = None, state: TrialState = TrialState.PRUNED
    ) -> list[int]:
        """End paused trials that will not go on, all or those given; return which were paused."""
        return self._on_study(study, partial(starting.settle_paused, numbers=numbers, state=state))

    @patiently
    def append_observations(self, study: str, rows: Sequence[tuple[int, Observation]]) -> None:
        """Store observations with the numbers of their trials, all or none.

        Raises `DatabaseError` for a step twice, unless all are stored already as they are: an earlier try made it.
        """
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
            if not isinstance(error.__cause__, IntegrityError):
                raise
            curves = self.curves(study, dict(rows))
            stored = {(number, one.step): one for number, curve in curves.items() for one in curve}
            if all(stored.get((number, one.step)) == one for number, one in rows):
                return  # an earlier try was committed although its connection broke
            keys = [(number, one.step) for number, one in rows]
            twice = [key for key in keys if key in stored or keys.count(key) > 1]
            if not twice:
                raise
            number, step = twice[0]
            raise DatabaseError(f"trial {number} of {study!r} already has an observation at step {step}") from error

    @patiently
    def finish_trial(
        self, study: str, number: int, outcome: TrialOutcome, *, steps_x_step_time_s: float | None
    ) -> None:
        """Store how a running trial ended; raise `DatabaseError` where it has ended in another way already.

        One that was resumed after a pause was contended where any of its parts was.
        """
        if not outcome.state.is_finished:
            raise ValueError(f"{outcome.state} is not how a trial ends")
        with self._writing() as connection:
            study_id = self._study_id(connection, study)
            trial_id = trial_id_of(connection, study, study_id, number)
            columns = {**to_columns(outcome), "steps_x_step_time_s": steps_x_step_time_s}
            if not outcome.contended:
                del columns["contended"]  # the row says it of the part before a pause
            if end_trial(connection, trial_id, columns):
                return
            stored = trial_record(connection.execute(TRIALS.where(TrialRow.id == trial_id)).mappings().one())
            if stored.outcome not in {outcome, replace(outcome, contended=True)}:  # else an earlier try made it
                raise DatabaseError(
                    f"trial {number} of {study!r} cannot end as {outcome.state}: it is not running but {stored.state}"
                )

    def heartbeat(self, study: str, owner: str, lease_seconds: float) -> None:
        """Extend the leases of the owner's running trials and its claims to ``lease_seconds`` from now."""
        self._on_study(study, partial(leases.heartbeat, owner=owner, lease_seconds=lease_seconds))

    def mark_lost(self, study: str, *, is_alive: IsAlive) -> list[int]:
        """End the running trials of dead owners as lost; return their numbers.

        ``is_alive`` says True or False of an owner, or None where it cannot know: then the lease decides.
        """
        return self._on_study(study, partial(leases.mark_lost, is_alive=is_alive))

    def claim(self, study: str, name: str, *, owner: str, lease_seconds: float, is_alive: IsAlive) -> bool:
        """Claim what one driver of a study does at a time; return whether the owner has it now.

        A claim is free, held by its owner until the lease ends (`heartbeat` extends it), or left by one that is dead.
        """
        return self._on_study(
            study, partial(leases.claim, name=name, owner=owner, lease_seconds=lease_seconds, is_alive=is_alive)
        )

    def release(self, study: str, name: str, *, owner: str) -> None:
        """Give a claim back; one that another holds is left alone."""
        self._on_study(study, partial(leases.release, name=name, owner=owner))

    @patiently
    def save_log(self, study: str, number: int, text: str) -> None:
        """Store the last lines of a trial's worker, in the place of earlier ones."""
        with self._writing() as connection:
            trial_id = trial_id_of(connection, study, self._study_id(connection, study), number)
            if not insert_if_absent(connection, LogRow, {"trial_id": trial_id, "text": text}):
                connection.execute(update(LogRow).where(LogRow.trial_id == trial_id).values(text=text))

    @patiently
    def log(self, study: str, number: int) -> str | None:
        """Return the last lines of a trial's worker, None where none were stored."""
        with self._reading() as connection:
            trial_id = trial_id_of(connection, study, self._study_id(connection, study), number)
            return connection.scalar(select(LogRow.text).where(LogRow.trial_id == trial_id))

    @patiently
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

    @patiently
    def trial(self, study: str, number: int) -> TrialRecord:
        """Return one trial; raise `NotFoundError` naming the numbers there are."""
        with self._reading() as connection:
            study_id = self._study_id(connection, study)
            query = TRIALS.where(TrialRow.study_id == study_id, TrialRow.number == number)
            row = connection.execute(query).mappings().first()
            if row is None:
                raise no_trial(connection, study, study_id, number)
        return trial_record(row)

    @patiently
    def observations(self, study: str, number: int) -> list[Observation]:
        """Return the observations of one trial by step; raise `NotFoundError` for a trial that is not."""
        with self._reading() as connection:
            trial_id_of(connection, study, self._study_id(connection, study), number)
        return self.curves(study, [number])[number]

    @patiently
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

    @patiently
    def observation_count(self, study: str) -> int:
        """Return how many observations a study has."""
        with self._reading() as connection:
            query = select(func.count()).select_from(ObservationRow).join(TrialRow)
            study_id = self._study_id(connection, study)
            return connection.execute(query.where(TrialRow.study_id == study_id)).scalar_one()
