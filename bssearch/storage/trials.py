"""Trials: their starts, ends, leases, observations and logs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, and_, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from bssearch.errors import DatabaseError, UsageError
from bssearch.records import (
    BATCH_SCHEDULE,
    Configuration,
    Environment,
    Lease,
    Observation,
    Phase,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialState,
    sizes_in_words,
)
from bssearch.storage.database import Database, StorePart, inside, patiently, reads, writes
from bssearch.storage.models import (
    CLAIM_ROWS,
    ENVIRONMENT_ROWS,
    LOG_ROWS,
    OBSERVATION_ROWS,
    SPEC_ROWS,
    STUDY_ROWS,
    TRIAL_ROWS,
    column_types,
    database_now,
    database_started,
    from_columns,
    now,
    to_columns,
)
from bssearch.storage.probes import ProbeStore
from bssearch.storage.statements import (
    ENVIRONMENTS,
    EVALUATIONS,
    NEWER,
    OBSERVATIONS,
    TRIALS,
    TRIALS_OF,
    Changes,
    counters,
    end_trial,
    holds_claim,
    insert_if_absent,
    is_running,
    mark_changed,
    mark_observed,
    raise_revision,
    stored_trial,
    trial_id_of,
    trial_ids_of,
    trial_record,
)

# The stored start is this much earlier than the database's clock. SQLite counts milliseconds: a trial that ends in the
# millisecond of its start would look imported (`TrialRecord.is_imported`: start = end).
JUST_BEFORE = timedelta(microseconds=1)

_STATE = select(
    func.max(TRIAL_ROWS.c.number),
    database_now(),
    select(STUDY_ROWS.c.archived_at).where(STUDY_ROWS.c.id == bindparam("study_id")).scalar_subquery(),
    select(TRIAL_ROWS.c.number).where(TRIAL_ROWS.c.plan_id == bindparam("plan_id")).scalar_subquery(),
).where(TRIAL_ROWS.c.study_id == bindparam("study_id"))

_ADDED = insert(TRIAL_ROWS)

# Columns that hold 0 or "" until a trial ends, and in imported trials.
UNKNOWN_IF_EMPTY = ("train_seconds", "reason")


def archived(name: str) -> UsageError:
    return UsageError(
        f"the study {name!r} is archived and accepts no new trials", hint=f"run `bssearch study archive {name} --undo`"
    )


def start_trial(
    database: Database,
    study: str,
    plan: TrialPlan,
    plan_id: str,
    *,
    lease: Lease | None = None,
    environment: Environment | None = None,
) -> TrialRecord | None:
    """Start a trial as `TrialStore.start` does. Without ``lease``, queue the trial.

    A repeated ``plan_id`` starts no second trial.
    """
    with database.writing() as connection:
        study_id = database.lock_study(connection, study)
        environment_id = None if environment is None else database.environment_id(connection, environment)
        place = {"study_id": study_id, "plan_id": plan_id}
        last, time, archived_at, number = connection.execute(_STATE, place).one()
        claim = None if lease is None else lease.claim
        if number is None and lease and claim and not holds_claim(connection, study_id, claim, lease.owner):
            return None
        if number is None and plan.known_number is None:
            if archived_at is not None:
                raise archived(study)
            if plan.after is not None and plan.after != (last or 0):
                return None
            number = (last or 0) + 1
            trial = TrialRecord.planned(plan, number=number, lease=lease, created_at=time - JUST_BEFORE)
            trial = replace(trial, outcome=TrialOutcome(state=trial.state, reason=""))
            place |= {"environment_id": environment_id, "revision": raise_revision(connection, study_id)}
            connection.execute(_ADDED, {**place, **to_columns(trial)})
        elif number is None:
            number = plan.known_number
            assert number is not None and lease is not None, "a stored trial starts under a lease"
            state = TrialState.QUEUED if plan.resumed is None else TrialState.PAUSED
            started = connection.execute(
                update(TRIAL_ROWS)
                .where(TRIAL_ROWS.c.study_id == study_id, TRIAL_ROWS.c.number == number, TRIAL_ROWS.c.state == state)
                .values(
                    **(_dequeued(plan, lease, environment_id) if plan.resumed is None else _resumed()),
                    plan_id=plan_id,
                    created_at=time - JUST_BEFORE,
                    train_seconds_limit=plan.train_seconds_limit,
                    expected_improvement=plan.expected_improvement,
                    lease_owner=lease.owner,
                    lease_expires_at=time + timedelta(seconds=lease.seconds),
                )
            )
            if started.rowcount != 1:
                return None
            mark_changed(connection, study_id, [number])
        trial = stored_trial(connection, study_id, number)
        # The trial has an outcome if an earlier call started the trial, and the trial ended since.
        return trial if trial.outcome is None else None


def _dequeued(plan: TrialPlan, lease: Lease, environment_id: int | None) -> dict[str, Any]:
    # Only micro-batches of the configuration may differ from the queued trial.
    return {
        "environment_id": environment_id,
        "micro_batch_size": plan.configuration.micro_batch_size,
        "accumulation_steps": plan.configuration.accumulation_steps,
        "eval_every_steps": plan.eval_every_steps,
        "threads": plan.threads,
        "started_by": lease.user,
        "spec_digest": lease.spec,
        "state": TrialState.RUNNING,
    }


def _resumed() -> dict[str, Any]:
    # `contended` stays, because it applies to the whole trial.
    blank = to_columns(TrialOutcome(state=TrialState.RUNNING, reason=""))
    del blank["contended"]
    return blank | {"ended_at": None, "steps_x_step_time_s": None}


_OBSERVED = insert(OBSERVATION_ROWS)


class TrialStore(StorePart):
    """The trials, with their observations and logs."""

    def __init__(self, database: Database, probes: ProbeStore) -> None:
        super().__init__(database)
        self._probes = probes

    def start(self, study: str, plan: TrialPlan, *, environment: Environment, lease: Lease) -> TrialRecord | None:
        """Start a trial under a lease. Returns None if another driver was faster or the owner lacks ``lease.claim``.

        Raises `UsageError` for a new trial of an archived study. A new trial starts only if no trial is newer than
        ``plan.after``. A queued trial keeps its configuration except for the micro-batches.
        """
        return self.patience.run(
            partial(start_trial, self._database, study, plan, uuid4().hex, lease=lease, environment=environment)
        )

    def enqueue(self, study: str, plan: TrialPlan) -> int:
        """Queue a trial for any driver, and return the trial's number."""
        trial = self.patience.run(partial(start_trial, self._database, study, plan, uuid4().hex))
        assert trial is not None, "plan ids are unique"
        return trial.number

    def finish(
        self,
        study: str,
        number: int,
        outcome: TrialOutcome,
        *,
        steps_x_step_time_s: float | None,
        owner: str | None = None,
    ) -> TrialRecord:
        """Store a trial's end. A trial that was contended before a pause stays contended.

        Raises `DatabaseError` if the trial ended differently or is queued, or if ``owner`` does not hold the lease.
        Raises `ValueError` if ``outcome`` is not final.
        """
        if not outcome.state.is_finished:
            raise ValueError(f"{outcome.state} is not a final state")
        columns = {**to_columns(outcome), "steps_x_step_time_s": steps_x_step_time_s}
        if not outcome.contended:
            del columns["contended"]  # the row keeps this value, from the part before a pause

        def finish(connection: Connection, study_id: int) -> TrialRecord:
            ended = end_trial(connection, trial_id_of(connection, study_id, number), columns, owner)
            if ended:
                mark_changed(connection, study_id, [number])
            [stored] = self._probes.timed(connection, study_id, [stored_trial(connection, study_id, number)])
            # If this call did not end the trial, an earlier try may have ended the trial.
            if not ended and stored.outcome not in (outcome, replace(outcome, contended=True)):
                why = f"the trial is not running but {stored.state}"
                if stored.state is TrialState.RUNNING:
                    why = f"{stored.lease_owner} holds the lease"
                raise DatabaseError(f"trial {number} of {study!r} cannot end as {outcome.state}: {why}")
            return stored

        return self._database.on_study(study, finish)

    @writes
    def settle_paused(
        self,
        connection: Connection,
        study_id: int,
        numbers: Collection[int] | None = None,
        state: TrialState = TrialState.PRUNED,
    ) -> list[int]:
        """End paused trials (by default all) as ``state``. Return the numbers of the ended trials."""
        settled = update(TRIAL_ROWS).where(TRIAL_ROWS.c.study_id == study_id, TRIAL_ROWS.c.state == TrialState.PAUSED)
        if numbers is not None:
            settled = settled.where(TRIAL_ROWS.c.number.in_(numbers))
        ended = sorted(connection.scalars(settled.values(state=state).returning(TRIAL_ROWS.c.number)))
        mark_changed(connection, study_id, ended)
        return ended

    @reads
    def of(
        self,
        connection: Connection,
        study_id: int,
        *,
        phase: Phase | None = None,
        states: Collection[TrialState] | None = None,
    ) -> list[TrialRecord]:
        query = TRIALS.where(TRIAL_ROWS.c.study_id == study_id)
        if phase is not None:
            query = query.where(TRIAL_ROWS.c.phase == phase)
        if states is not None:
            query = query.where(TRIAL_ROWS.c.state.in_(states))
        found = [trial_record(row) for row in connection.execute(query).mappings()]
        return self._probes.timed(connection, study_id, found)

    @reads
    def brief(
        self,
        connection: Connection,
        study_id: int,
        names: Collection[str],
        *,
        phase: Phase | None = None,
        state: TrialState | None = None,
        batch_size: int | None = None,
    ) -> list[dict[str, Any]]:
        """The configuration and the columns ``names`` of each trial, ordered by number. An unknown value is None."""
        settings = column_types(Configuration)
        columns = {*names, *settings}
        wanted = {"phase": phase, "state": state, "batch_size": batch_size}
        query = select(*(TRIAL_ROWS.c[name] for name in columns)).where(TRIAL_ROWS.c.study_id == study_id)
        query = query.filter_by(**{name: value for name, value in wanted.items() if value is not None})
        rows = []
        for row in connection.execute(query.order_by(TRIAL_ROWS.c.number)).mappings():
            grows = BATCH_SCHEDULE in row["parameters"]
            sizes = sizes_in_words(from_columns(Configuration, row)) if grows else row["batch_size"]
            # an import marks an unknown setting, whose column is a placeholder, by a null parameter of the same name
            unknown = row["parameters"].keys() & settings
            empty = {name for name in UNKNOWN_IF_EMPTY if not row[name]}
            rows.append({**row, "batch_size": sizes, **dict.fromkeys(unknown | empty)})
        return rows

    @reads
    def counts(self, connection: Connection, study_id: int) -> list[tuple[Phase, TrialState, int, float]]:
        """Return (phase, state, number of trials, train seconds of these trials), ordered by first trial."""
        one = TRIAL_ROWS.c
        seconds = func.coalesce(func.sum(one.train_seconds), 0.0)
        query = select(one.phase, one.state, func.count(), seconds).where(one.study_id == study_id)
        query = query.group_by(one.phase, one.state).order_by(func.min(one.number))
        return [(phase, state, count, total) for phase, state, count, total in connection.execute(query)]

    @reads
    def fast(self, connection: Connection, study_id: int, phase: Phase | None = None) -> list[TrialRecord]:
        """The fastest uncontended trial, and all contended trials that reached the target."""
        one = TRIAL_ROWS.c
        reached = TRIALS.where(one.study_id == study_id, one.time_to_target_s.is_not(None))
        reached = reached if phase is None else reached.where(one.phase == phase)
        first = reached.where(~one.contended).order_by(None).order_by(one.time_to_target_s, one.number).limit(1)
        queries = first, reached.where(one.contended)
        rows = [row for query in queries for row in connection.execute(query).mappings()]
        return self._probes.timed(connection, study_id, [trial_record(row) for row in rows])

    @reads
    def get(self, connection: Connection, study_id: int, number: int) -> TrialRecord:
        [found] = self._probes.timed(connection, study_id, [stored_trial(connection, study_id, number)])
        return found

    @inside(Database.reading)
    def changes(self, connection: Connection, study: str, since: int) -> Changes:
        """Return the trials that changed after the study's revision ``since``. Revision 0 gives all trials."""
        now = counters(connection, study)
        # A revision above the study's revision comes from a deleted study of the same name.
        is_rewritten = since < now.rewritten_at_revision or since > now.revision
        trials: list[TrialRecord] = []
        if now.revision != since:
            query, values = (TRIALS_OF, {}) if since <= 0 or is_rewritten else (NEWER, {"since": since})
            rows = connection.execute(query, {"study_id": now.study_id, **values}).mappings()
            # Sort here, because with ORDER BY number SQLite would scan all trials of the study.
            trials = sorted(map(trial_record, rows), key=lambda trial: trial.number)
        ran_out = any(trial.state is TrialState.OOM for trial in trials)
        return Changes(
            revision=now.revision,
            is_rewritten=is_rewritten,
            has_new_probes=is_rewritten or since < now.probed_at_revision or ran_out,
            trials=self._probes.timed(connection, now.study_id, trials, now),
        )

    @reads
    def seconds_at_rest(self, connection: Connection, study_id: int) -> float:
        """The seconds since the last start or end of a trial, else since the study's creation."""
        trials = select(func.max(TRIAL_ROWS.c.created_at), func.max(TRIAL_ROWS.c.ended_at))
        last = connection.execute(trials.where(TRIAL_ROWS.c.study_id == study_id)).one()
        made = connection.scalars(select(STUDY_ROWS.c.created_at).where(STUDY_ROWS.c.id == study_id)).one()
        last_change: datetime = max(one for one in (made, *last) if one is not None)
        return (now(connection) - last_change).total_seconds()

    @reads
    def spec(self, connection: Connection, study_id: int, number: int) -> Mapping[str, object] | None:
        """The spec with which a trial started, or None if unknown."""
        return connection.scalar(
            select(SPEC_ROWS.c.spec)
            .join(
                TRIAL_ROWS,
                (TRIAL_ROWS.c.study_id == SPEC_ROWS.c.study_id) & (TRIAL_ROWS.c.spec_digest == SPEC_ROWS.c.digest),
            )
            .where(SPEC_ROWS.c.study_id == study_id, TRIAL_ROWS.c.number == number)
        )

    @reads
    def environments(self, connection: Connection, study_id: int) -> dict[int, Environment]:
        query = ENVIRONMENTS.add_columns(ENVIRONMENT_ROWS.c.id)
        trials = select(TRIAL_ROWS.c.number, TRIAL_ROWS.c.environment_id).where(
            TRIAL_ROWS.c.study_id == study_id, TRIAL_ROWS.c.environment_id.is_not(None)
        )
        places = {number: place for number, place in connection.execute(trials.order_by(TRIAL_ROWS.c.number))}
        rows = connection.execute(query.where(ENVIRONMENT_ROWS.c.id.in_({*places.values()}))).mappings()
        found = {row["id"]: from_columns(Environment, row) for row in rows}
        return {number: found[place] for number, place in places.items()}

    @reads
    def torch_versions(self, connection: Connection, study_id: int) -> list[str]:
        query = (
            select(ENVIRONMENT_ROWS.c.torch_version)
            .join(TRIAL_ROWS, TRIAL_ROWS.c.environment_id == ENVIRONMENT_ROWS.c.id)
            .where(TRIAL_ROWS.c.study_id == study_id)
            .group_by(ENVIRONMENT_ROWS.c.torch_version)
            .order_by(func.min(TRIAL_ROWS.c.number))
        )
        return list(connection.scalars(query))

    @patiently
    def append_observations(
        self, study: str, rows: Sequence[tuple[int, Observation]], *, owner: str | None = None
    ) -> frozenset[int]:
        """Store observations in one transaction.

        With ``owner``, skip trials whose lease the owner has lost, and return the numbers of these trials. Raises
        `DatabaseError` if a trial already has an observation at a step, unless an earlier try stored the rows.
        """
        if not rows:
            return frozenset()
        numbers = list(dict(rows))
        refused = frozenset[int]()
        try:
            with self._database.writing() as connection:
                study_id = self._database.lock_study(connection, study)
                ids = trial_ids_of(connection, study_id, numbers, owner)
                refused = frozenset(numbers) - {*ids}
                rows = [row for row in rows if row[0] in ids]
                if rows:
                    connection.execute(
                        _OBSERVED, [{"trial_id": ids[number], **to_columns(one)} for number, one in rows]
                    )
                    mark_observed(connection, study_id, [*ids])
        except DatabaseError as error:
            if not isinstance(error.__cause__, IntegrityError):
                raise
            stored = {(number, one.step): one for number, curve in self.curves(study, numbers).items() for one in curve}
            if all(stored.get((number, one.step)) == one for number, one in rows):
                return refused  # an earlier try committed, and the connection broke afterwards
            keys = [(number, one.step) for number, one in rows]
            twice = [key for key in keys if key in stored or keys.count(key) > 1]
            if not twice:
                raise
            number, step = twice[0]
            raise DatabaseError(f"trial {number} of {study!r} already has an observation at step {step}") from error
        return refused

    @reads
    def observations(self, connection: Connection, study_id: int, number: int) -> list[Observation]:
        trial_id_of(connection, study_id, number)
        return self._curves(connection, study_id, [number])[number]

    def _curves(self, connection: Connection, study_id: int, numbers: Collection[int]) -> dict[int, list[Observation]]:
        found: dict[int, list[Observation]] = {number: [] for number in numbers}
        query = OBSERVATIONS.where(TRIAL_ROWS.c.study_id == study_id, TRIAL_ROWS.c.number.in_(found))
        for row in connection.execute(query).mappings():
            found[row["number"]].append(from_columns(Observation, row))
        return found

    curves = reads(_curves)

    @inside(Database.looking)
    def evaluations(
        self, connection: Connection, study: str, numbers: Collection[int]
    ) -> dict[int, list[tuple[float, float]]]:
        """Each trial's (train seconds, metric) pairs, ordered by step."""
        found: dict[int, list[tuple[float, float]]] = {number: [] for number in numbers}
        of = {"study_id": self._database.study_id(connection, study), "numbers": list(found)}
        for number, train_seconds, metric in connection.execute(EVALUATIONS, of):
            found[number].append((train_seconds, metric))
        return found

    @reads
    def observation_count(self, connection: Connection, study_id: int) -> int:
        query = select(func.count()).select_from(OBSERVATION_ROWS).join(TRIAL_ROWS)
        return connection.execute(query.where(TRIAL_ROWS.c.study_id == study_id)).scalar_one()

    @writes
    def save_log(
        self, connection: Connection, study_id: int, number: int, text: str, *, owner: str | None = None
    ) -> None:
        """Replace a trial's log. With ``owner``, replace only while the owner holds the trial's lease."""
        for trial_id in trial_ids_of(connection, study_id, [number], owner).values():
            if not insert_if_absent(connection, LOG_ROWS, {"trial_id": trial_id, "text": text}):
                connection.execute(update(LOG_ROWS).where(LOG_ROWS.c.trial_id == trial_id).values(text=text))

    @reads
    def log(self, connection: Connection, study_id: int, number: int) -> str | None:
        trial_id = trial_id_of(connection, study_id, number)
        return connection.scalar(select(LOG_ROWS.c.text).where(LOG_ROWS.c.trial_id == trial_id))


# No lease expires within these seconds after a server's start; drivers reconnect sooner.
RESTART_GRACE_S = 60.0

# Returns whether the driver that owns a lease is alive, or None if unknown.
IsAlive = Callable[[str], bool | None]


def ended_by(connection: Connection) -> datetime:
    """Return the time up to which leases count as expired.

    Within `RESTART_GRACE_S` seconds of a server's start, no lease counts as expired.
    """
    time, started = connection.execute(select(database_now(), database_started())).one()
    if started is not None and time < started + timedelta(seconds=RESTART_GRACE_S):
        return datetime.min.replace(tzinfo=UTC)
    return time


def _last_seen(connection: Connection, trial_id: int) -> dict[str, Any]:
    last = connection.execute(
        select(
            OBSERVATION_ROWS.c.step.label("steps"),
            OBSERVATION_ROWS.c.samples,
            OBSERVATION_ROWS.c.train_seconds,
            OBSERVATION_ROWS.c.metric.label("final_metric"),
        )
        .where(OBSERVATION_ROWS.c.trial_id == trial_id)
        .order_by(OBSERVATION_ROWS.c.step.desc())
        .limit(1)
    )
    return dict(last.mappings().first() or {})


def check_idle(connection: Connection, study_id: int, name: str, doing: str) -> None:
    """Raise `UsageError` if a driver holds an unexpired lease on a trial or claim of the study."""
    ended = ended_by(connection)
    running = connection.execute(
        select(TRIAL_ROWS.c.number, TRIAL_ROWS.c.lease_owner, TRIAL_ROWS.c.lease_expires_at)
        .where(*is_running(study_id), TRIAL_ROWS.c.lease_expires_at > ended)
        .order_by(TRIAL_ROWS.c.number)
    ).first()
    claimed = connection.execute(
        select(CLAIM_ROWS.c.name, CLAIM_ROWS.c.owner, CLAIM_ROWS.c.expires_at).where(
            CLAIM_ROWS.c.study_id == study_id, CLAIM_ROWS.c.expires_at > ended
        )
    ).first()
    if running is not None:
        busy, until = f"{running.lease_owner} runs trial {running.number}", running.lease_expires_at
    elif claimed is not None:
        busy, until = f"{claimed.owner} holds the claim {claimed.name!r}", claimed.expires_at
    else:
        return
    raise UsageError(
        f"the study {name!r} cannot be {doing}: {busy}",
        hint=f"stop this driver; if the driver is dead, wait until {until:%Y-%m-%d %H:%M:%S} UTC, when the lease ends",
    )


class LeaseStore(StorePart):
    """The leases of running trials and of claims."""

    @writes
    def heartbeat(self, connection: Connection, study_id: int, owner: str, lease_seconds: float) -> None:
        expires_at = now(connection) + timedelta(seconds=lease_seconds)
        own_trials = update(TRIAL_ROWS).where(*is_running(study_id), TRIAL_ROWS.c.lease_owner == owner)
        connection.execute(own_trials.values(lease_expires_at=expires_at))
        own_claims = update(CLAIM_ROWS).where(CLAIM_ROWS.c.study_id == study_id, CLAIM_ROWS.c.owner == owner)
        connection.execute(own_claims.values(expires_at=expires_at))

    @reads
    def ends(self, connection: Connection, study_id: int) -> dict[str, datetime]:
        found: dict[str, datetime] = {}
        trials = select(TRIAL_ROWS.c.lease_owner, TRIAL_ROWS.c.lease_expires_at).where(*is_running(study_id))
        claims = select(CLAIM_ROWS.c.owner, CLAIM_ROWS.c.expires_at).where(CLAIM_ROWS.c.study_id == study_id)
        for owner, expires_at in (*connection.execute(trials), *connection.execute(claims)):
            found[owner] = max(expires_at, found.get(owner, expires_at))
        return found

    @writes
    def mark_lost(self, connection: Connection, study_id: int, *, is_alive: IsAlive) -> list[int]:
        """Mark the running trials of dead owners as lost, and return the trials' numbers.

        If ``is_alive`` returns None, a trial is lost when the lease has ended.
        """
        owners = connection.scalars(select(TRIAL_ROWS.c.lease_owner).where(*is_running(study_id)).distinct()).all()
        known = {owner: is_alive(owner) for owner in owners}
        dead = {owner for owner, alive in known.items() if alive is False}
        alive = {owner for owner, alive in known.items() if alive}
        rows = connection.execute(
            select(TRIAL_ROWS.c.id, TRIAL_ROWS.c.number, TRIAL_ROWS.c.lease_owner, TRIAL_ROWS.c.lease_expires_at).where(
                *is_running(study_id),
                or_(
                    TRIAL_ROWS.c.lease_owner.in_(dead),
                    and_(TRIAL_ROWS.c.lease_expires_at <= ended_by(connection), TRIAL_ROWS.c.lease_owner.not_in(alive)),
                ),
            )
        ).all()
        lost = []
        # Sort here, because with ORDER BY number SQLite would scan all trials of the study.
        for trial_id, number, owner, expired_at in sorted(rows, key=lambda row: row.number):
            late = f"the lease ended at {expired_at:%Y-%m-%d %H:%M:%S} UTC, because {owner} did not renew the lease"
            why = f"the driver {owner} is gone" if owner in dead else late
            outcome = TrialOutcome(state=TrialState.LOST, reason=why)
            columns = {**to_columns(outcome), **_last_seen(connection, trial_id)}
            if end_trial(connection, trial_id, columns):  # False if the driver has just ended the trial
                lost.append(number)
        mark_changed(connection, study_id, lost)
        return lost

    @writes
    def claim(
        self, connection: Connection, study_id: int, name: str, *, owner: str, lease_seconds: float, is_alive: IsAlive
    ) -> bool:
        """Claim a task until the lease ends or the owner dies. Return True if the claim succeeded."""
        place = CLAIM_ROWS.c.study_id == study_id, CLAIM_ROWS.c.name == name
        held = connection.execute(select(CLAIM_ROWS.c.owner, CLAIM_ROWS.c.expires_at).where(*place)).first()
        values = {"owner": owner, "expires_at": now(connection) + timedelta(seconds=lease_seconds)}
        if held is None:
            connection.execute(insert(CLAIM_ROWS).values(study_id=study_id, name=name, **values))
            return True
        if held.owner != owner:
            alive = is_alive(held.owner)
            if alive or (alive is None and held.expires_at > ended_by(connection)):
                return False
        connection.execute(update(CLAIM_ROWS).where(*place).values(values))
        return True

    @reads
    def holds(self, connection: Connection, study_id: int, name: str, *, owner: str) -> bool:
        return holds_claim(connection, study_id, name, owner)

    @writes
    def release(self, connection: Connection, study_id: int, name: str, *, owner: str) -> None:
        place = CLAIM_ROWS.c.study_id == study_id, CLAIM_ROWS.c.name == name, CLAIM_ROWS.c.owner == owner
        connection.execute(delete(CLAIM_ROWS).where(*place))
