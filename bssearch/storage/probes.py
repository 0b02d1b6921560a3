"""Probes: step times, memory, noise scales and branches."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from pydantic import ValidationError
from sqlalchemy import ColumnElement, Connection, delete, func, select

from bssearch.records import (
    BranchMeasurement,
    Environment,
    MemoryUse,
    ModelParameters,
    NoiseMeasurement,
    ProbeRecord,
    TrialRecord,
    Visit,
    model_parameters,
    step_seconds_of,
    with_intervals,
    with_step_time,
    with_visits,
)
from bssearch.spec import MemoryBoundary, StudySpec, in_force
from bssearch.storage.database import Database, StorePart, inside, reads, writes
from bssearch.storage.models import (
    BRANCH_ROWS,
    ENVIRONMENT_ROWS,
    PROBE_ROWS,
    STUDY_ROWS,
    TRIAL_ROWS,
    VISIT_ROWS,
    ProbeKind,
    column_types,
    from_columns,
    now,
    to_columns,
)
from bssearch.storage.statements import (
    ENVIRONMENTS,
    MEMORY,
    MICRO_BATCHES_FITTED,
    MICRO_BATCHES_PROBED,
    MICRO_BATCHES_TOO_LARGE,
    NOISE,
    PROBES,
    VISITS,
    Counters,
    counters,
    insert_if_absent,
    mark_probed,
    of_its_kind,
)


def _timed_model(spec: object) -> ModelParameters:
    try:
        return StudySpec.model_validate(spec).timed_model
    except ValidationError:
        return ()


class ProbeStore(StorePart):
    """A study's measurements outside trials."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._known_step_times: dict[int, tuple[tuple[object, ...], list[ProbeRecord]]] = {}

    def add_step_time(self, study: str, environment: Environment, probe: ProbeRecord, visit: int | None = None) -> int:
        """Store a step time of a visit (`Visit`), and return the visit's number.

        If ``visit`` is None, start a new visit. Stored step times stay unchanged. The first step time of a batch size
        and micro-batch size fixes ``eval_every_steps``.
        """
        number = visit

        def save(connection: Connection, study_id: int) -> int:
            nonlocal number
            if number is None:  # A retry after a lost connection keeps the number of the first try.
                newest = connection.scalar(
                    select(func.max(VISIT_ROWS.c.visit)).where(VISIT_ROWS.c.study_id == study_id)
                )
                number = (newest or 0) + 1
            columns = to_columns(probe)
            place = self._place(connection, study_id, environment, ProbeKind.STEP_TIME, columns)
            time = now(connection)
            is_new = insert_if_absent(connection, PROBE_ROWS, {**columns, **place, "measured_at": time})
            if probe.step_seconds is not None:
                seen = {name: columns[name] for name in column_types(Visit, without="visit")}
                own = {"study_id": study_id, "environment_id": place["environment_id"], "visit": number}
                is_new |= insert_if_absent(connection, VISIT_ROWS, {**seen, **own, "measured_at": time})
            if is_new:
                mark_probed(connection, study_id)
            return number

        return self._database.on_study(study, save)

    def _visits(self, connection: Connection, study_id: int) -> list[Visit]:
        rows = connection.execute(VISITS.where(VISIT_ROWS.c.study_id == study_id)).mappings().all()
        numbers: dict[tuple[int, int], int] = {}
        for row in rows:
            numbers.setdefault((row["environment_id"], row["visit"]), len(numbers) + 1)
        return [from_columns(Visit, {**row, "visit": numbers[row["environment_id"], row["visit"]]}) for row in rows]

    visits = reads(_visits)

    @reads
    def by_batch_size(
        self, connection: Connection, study_id: int, environment: Environment | None = None
    ) -> dict[int, ProbeRecord]:
        """The step time of each batch size, fitted over all visits.

        Each step time belongs to the largest timed micro-batch within `memory_boundary`. Only probes on the smallest
        number of devices count.
        """
        rows = connection.execute(PROBES.where(PROBE_ROWS.c.study_id == study_id)).mappings()
        timed = [from_columns(ProbeRecord, row, absent="error") for row in rows]
        searched = min((one.world_size for one in timed), default=1)
        timed = [one for one in timed if one.world_size == searched]
        found = in_force(timed, self._boundary(connection, study_id, environment)).values()
        timed = with_intervals(with_visits(found, self._visits(connection, study_id)))
        return {one.batch_size: one for one in timed}

    @inside(Database.reading)
    def step_times(self, connection: Connection, study: str) -> list[ProbeRecord]:
        return with_intervals(self._step_times(connection, counters(connection, study)))

    def _step_times(self, connection: Connection, now: Counters) -> list[ProbeRecord]:
        # Cache step times until the next measurement, because every read of trials needs step times.
        study_id = now.study_id
        # The cache's key changes with every measurement, and differs for a later study with the same id.
        as_of = now.created_at, now.probed_at_revision, now.rewritten_at_revision
        if study_id not in self._known_step_times or self._known_step_times[study_id][0] != as_of:
            rows = connection.execute(PROBES.where(PROBE_ROWS.c.study_id == study_id)).mappings()
            timed = [from_columns(ProbeRecord, row, absent="error") for row in rows]
            self._known_step_times[study_id] = as_of, with_visits(timed, self._visits(connection, study_id))
        return self._known_step_times[study_id][1]

    def timed(
        self, connection: Connection, study_id: int, trials: Sequence[TrialRecord], now: Counters | None = None
    ) -> list[TrialRecord]:
        """The trials, with ``steps_x_step_time_s`` computed from all visits' step times.

        Trials without a measured step time keep the stored value.
        """
        if all(trial.outcome is None or trial.outcome.steps_to_target is None for trial in trials):
            return list(trials)
        model: ModelParameters = ()
        if any(model_parameters(trial.configuration) for trial in trials):
            model = _timed_model(connection.scalar(select(STUDY_ROWS.c.spec).where(STUDY_ROWS.c.id == study_id)))
        step_seconds = step_seconds_of(self._step_times(connection, now or counters(connection, study_id)), model)
        return [with_step_time(trial, step_seconds) for trial in trials]

    def _boundary(
        self, connection: Connection, study_id: int, environment: Environment | None = None
    ) -> MemoryBoundary:
        # Bounds of the micro-batch sizes that fit (default device: the largest device that ran a trial). A later probe
        # in a separate process that fits the same or a larger size overrides a single out-of-memory trial. Failures
        # count from devices with at least as much memory, fits from devices with at most as much memory.
        here = environment or self._bound_environment(connection, study_id)
        memory, kind = (None, ()) if here is None else (here.device_memory_bytes, of_its_kind(here))
        if environment is None:
            most = select(func.max(ENVIRONMENT_ROWS.c.device_memory_bytes)).join(TRIAL_ROWS)
            memory = connection.scalar(most.where(TRIAL_ROWS.c.study_id == study_id)) or memory
        probed = connection.execute(MICRO_BATCHES_PROBED.where(PROBE_ROWS.c.study_id == study_id, *kind)).all()
        fitting = [size for size, ran_out, there in probed if not ran_out and _is_enough(memory, there)]
        too_large = [size for size, ran_out, there in probed if ran_out and _is_enough(there, memory)]
        too_large += [size for size, there in _ran_out(connection, study_id, kind) if _is_enough(there, memory)]
        return MemoryBoundary.of(fitting, too_large)

    memory_boundary = reads(_boundary)

    def _bound_environment(self, connection: Connection, study_id: int) -> Environment | None:
        query = ENVIRONMENTS.join(STUDY_ROWS, STUDY_ROWS.c.environment_id == ENVIRONMENT_ROWS.c.id)
        row = connection.execute(query.where(STUDY_ROWS.c.id == study_id)).mappings().first()
        return None if row is None else from_columns(Environment, row)

    def save_memory(self, study: str, environment: Environment, memory: MemoryUse) -> None:
        columns = {
            "batch_size": memory.micro_batch_size,
            "micro_batch_size": memory.micro_batch_size,
            "steps_timed": 0,
            "out_of_memory": not memory.fits,
            "peak_memory_bytes": memory.peak_memory_bytes,
            "reason": memory.reason,
        }
        self._replace(study, environment, ProbeKind.MEMORY, columns)

    @reads
    def memory(self, connection: Connection, study_id: int, environment: Environment) -> list[MemoryUse]:
        query = MEMORY.where(
            PROBE_ROWS.c.study_id == study_id,
            ENVIRONMENT_ROWS.c.device_memory_bytes == environment.device_memory_bytes,
            *of_its_kind(environment),
        )
        return [
            MemoryUse(
                micro_batch_size=row.micro_batch_size,
                fits=not row.out_of_memory,
                peak_memory_bytes=row.peak_memory_bytes,
                reason=row.reason,
            )
            for row in connection.execute(query)
        ]

    def save_noise(self, study: str, environment: Environment, noise: NoiseMeasurement) -> None:
        columns = {"steps_timed": 0, "out_of_memory": False, **to_columns(noise)}
        self._replace(study, environment, ProbeKind.NOISE_SCALE, columns)

    @reads
    def noise(self, connection: Connection, study_id: int) -> list[NoiseMeasurement]:
        """The noise scales, newest first."""
        query = NOISE.where(PROBE_ROWS.c.study_id == study_id)
        return [from_columns(NoiseMeasurement, row) for row in connection.execute(query).mappings()]

    @writes
    def add_branch(
        self, connection: Connection, study_id: int, environment: Environment, branch: BranchMeasurement
    ) -> None:
        place = {"study_id": study_id, "environment_id": self._database.environment_id(connection, environment)}
        insert_if_absent(connection, BRANCH_ROWS, {**to_columns(branch), **place, "measured_at": now(connection)})

    @reads
    def branches(
        self, connection: Connection, study_id: int, digests: Collection[str] | None = None
    ) -> list[BranchMeasurement]:
        """Return the branches with these ``digests`` (default: all), oldest first."""
        columns = [BRANCH_ROWS.c[name] for name in column_types(BranchMeasurement)]
        query = select(*columns).where(BRANCH_ROWS.c.study_id == study_id).order_by(BRANCH_ROWS.c.id)
        if digests is not None:
            query = query.where(BRANCH_ROWS.c.digest.in_(digests))
        return [from_columns(BranchMeasurement, row) for row in connection.execute(query).mappings()]

    @writes
    def _replace(
        self,
        connection: Connection,
        study_id: int,
        environment: Environment,
        kind: ProbeKind,
        columns: Mapping[str, object],
    ) -> None:
        place = self._place(connection, study_id, environment, kind, columns)
        mark_probed(connection, study_id)
        connection.execute(delete(PROBE_ROWS).filter_by(**place))
        insert_if_absent(connection, PROBE_ROWS, {**columns, **place, "measured_at": now(connection)})

    def _place(
        self,
        connection: Connection,
        study_id: int,
        environment: Environment,
        kind: ProbeKind,
        columns: Mapping[str, object],
    ) -> dict[str, object]:
        return {
            "study_id": study_id,
            "environment_id": self._database.environment_id(connection, environment),
            "kind": kind,
            "batch_size": columns["batch_size"],
            "micro_batch_size": columns["micro_batch_size"],
            "world_size": columns.get("world_size", 1),
        }


def _ran_out(
    connection: Connection, study_id: int, kind: Sequence[ColumnElement[bool]]
) -> list[tuple[int, int | None]]:
    # Leave out chance failures, because other processes or earlier trials may have held the memory.
    trials = connection.execute(MICRO_BATCHES_TOO_LARGE.where(TRIAL_ROWS.c.study_id == study_id, *kind)).all()
    if all(count > 1 for _, _, count, _ in trials):
        return [(size, memory) for size, memory, _, _ in trials]
    fitted = connection.execute(MICRO_BATCHES_FITTED.where(PROBE_ROWS.c.study_id == study_id, *kind)).all()

    def was_chance(size: int, memory: int | None, ended: datetime | None) -> bool:
        return ended is not None and any(
            other >= size and at >= ended and _is_enough(memory, there) for other, there, at in fitted
        )

    return [(size, memory) for size, memory, count, at in trials if count > 1 or not was_chance(size, memory, at)]


def _is_enough(memory: int | None, needed: int | None) -> bool:
    return memory is None or needed is None or memory >= needed
