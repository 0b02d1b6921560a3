"""The tables. A column that holds a record's field bears the field's name (`bssearch.storage.columns` maps the two).

Times are UTC, seconds and metrics finite floats, bytes and counts integers; JSON holds only what has the user's shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from bssearch.records import (
    BranchMeasurement,
    Environment,
    Goal,
    MemoryBasis,
    NewStudy,
    NoiseMeasurement,
    Observation,
    ParameterValue,
    Phase,
    SecondsBasis,
    StepTime,
    TrialRecord,
    TrialState,
    Visit,
)
from bssearch.storage.columns import (
    NAMING_CONVENTION,
    FiniteFloat,
    Sentences,
    StorableText,
    UtcDateTime,
    at_most_one,
    below_one,
    column_types,
    enum,
    not_negative,
    positive,
)

TABLE_PREFIX = "bss_"
UNFINISHED = "state IN ('queued', 'running')"


class ProbeKind(StrEnum):
    """What a probe measured."""

    MEMORY = "memory"
    STEP_TIME = "step_time"
    NOISE_SCALE = "noise_scale"


Id = Annotated[int, mapped_column(Integer, primary_key=True)]
StudyId = Annotated[int, mapped_column(Integer, ForeignKey("bss_study.id", ondelete="CASCADE"))]
EnvironmentId = Annotated[
    int, mapped_column(Integer, ForeignKey("bss_environment.id", ondelete="RESTRICT"), index=True)
]


_ENUMS: Mapping[type[StrEnum], str] = {
    Goal: "target_goal",
    TrialState: "state",
    Phase: "phase",
    MemoryBasis: "peak_memory_basis",
    SecondsBasis: "seconds_basis",
    ProbeKind: "kind",
}
"""The enumerations, each with the name of its check."""


class Base(DeclarativeBase):
    """The base of all tables: a table has a column for each field of the records that it ``holds``.

    A class declares only those columns that queries name, and those that differ from the field.
    """

    __table__: ClassVar[Table]
    metadata = MetaData(naming_convention=NAMING_CONVENTION)
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        int: BigInteger,
        float: FiniteFloat,
        str: StorableText,
        datetime: UtcDateTime,
        tuple[str, ...]: Sentences,
        Mapping[str, object]: JSON,
        Mapping[str, ParameterValue]: JSON(none_as_null=True),
        Mapping[str, float]: JSON(none_as_null=True),
        **{kind: enum(kind, name) for kind, name in _ENUMS.items()},
    }

    def __init_subclass__(cls, *, holds: Sequence[type] = (), **options: Any) -> None:
        for record in holds:
            for name, kind in column_types(record).items():
                cls.__annotations__.setdefault(name, Mapped[kind])  # type: ignore[valid-type]
        super().__init_subclass__(**options)


class EnvironmentRow(Base, holds=(Environment,)):
    """Where trials ran; ``digest`` is a hash of the whole record, so that equal ones share a row."""

    __tablename__ = "bss_environment"
    __table_args__ = (UniqueConstraint("digest"),)

    id: Mapped[Id]
    digest: Mapped[str]
    device_name: Mapped[str]
    device_memory_bytes: Mapped[int | None]
    precision: Mapped[str]
    compile_mode: Mapped[str]
    torch_version: Mapped[str]
    libraries: Mapped[tuple[str, ...]] = mapped_column(server_default="")


class StudyRow(Base, holds=(NewStudy,)):
    """A question. ``environment_id`` is the first environment it ran in: what binds it to a kind of device.

    ``revision`` counts the changes of its trials and probes; ``rewritten_at_revision`` is the last one at which rows
    were deleted or rewritten, ``probed_at_revision`` the last one at which a probe was stored. ``login`` made it on
    PostgreSQL, which sets it, and lets nobody else but owners rename, archive or delete the study."""

    __tablename__ = "bss_study"
    __table_args__ = (
        UniqueConstraint("name"),
        CheckConstraint("name <> ''", name="name_not_empty"),
        CheckConstraint("length(objective) >= 1 AND length(objective) <= 64", name="objective_length"),
    )

    id: Mapped[Id]
    name: Mapped[str]
    spec: Mapped[Mapping[str, object]]
    spec_hash: Mapped[str]
    created_by: Mapped[str]
    created_at: Mapped[datetime]
    archived_at: Mapped[datetime | None]
    environment_id: Mapped[EnvironmentId | None]
    revision: Mapped[int] = mapped_column(server_default=text("0"))
    rewritten_at_revision: Mapped[int] = mapped_column(server_default=text("0"))
    probed_at_revision: Mapped[int] = mapped_column(server_default=text("0"))
    login: Mapped[str | None]


class TrialRow(Base, holds=(TrialRecord,)):
    """A trial: the configuration as run, its lease while it runs, then its outcome.

    ``plan_id`` is that of the plan that started or queued the trial last; a plan that is stored is not started again.
    ``revision`` is the study's revision when the trial last changed. ``spec_digest`` names the row of
    `bssearch.storage.repository` with the spec by which it was started.

    Until a trial has ended its outcome columns hold the zeros of a `TrialOutcome`; one that was paused and runs again
    keeps the ``contended`` of its first part.
    """

    __tablename__ = "bss_trial"
    __table_args__ = (
        UniqueConstraint("study_id", "number"),
        UniqueConstraint("plan_id"),
        ForeignKeyConstraint(
            ["study_id", "retry_of"],
            ["bss_trial.study_id", "bss_trial.number"],
            name="fk_bss_trial_retry_of",
            ondelete="CASCADE",
        ),
        Index(None, "study_id", "state"),
        Index(None, "study_id", "retry_of"),
        Index(None, "study_id", "revision"),
        CheckConstraint(f"(ended_at IS NULL) = ({UNFINISHED})", name="ended_at_when_finished"),
        CheckConstraint("time_to_target_s IS NULL OR state = 'reached'", name="time_to_target_s_when_reached"),
        CheckConstraint(
            "state <> 'running' OR (lease_owner IS NOT NULL AND lease_expires_at IS NOT NULL)",
            name="lease_when_running",
        ),
        CheckConstraint("state = 'queued' OR environment_id IS NOT NULL", name="environment_when_started"),
        *positive("number", "batch_size", "micro_batch_size", "accumulation_steps", "world_size"),
        *positive("learning_rate", "train_seconds_limit", "eval_every_steps", "threads"),
        *not_negative("warmup_epochs", "weight_decay", "steps", "samples", "train_seconds"),
        *not_negative("evaluation_seconds", "warmup_seconds", "other_seconds", "wall_seconds"),
        *not_negative("tokens", "time_to_target_s", "steps_to_target", "steps_x_step_time_s"),
        *not_negative(
            "skipped_steps", "energy_joules", "mean_power_watts", "noise_passes", "noise_seconds", "data_seconds"
        ),
        *below_one("dropout", "label_smoothing"),
        *at_most_one("host_bound_share"),
    )

    id: Mapped[Id]
    study_id: Mapped[StudyId]
    environment_id: Mapped[EnvironmentId | None]
    number: Mapped[int]
    revision: Mapped[int] = mapped_column(server_default=text("0"))
    state: Mapped[TrialState]
    phase: Mapped[Phase]
    micro_batch_size: Mapped[int]
    parameters: Mapped[Mapping[str, ParameterValue]]
    lease_owner: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    created_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    plan_id: Mapped[str | None]
    spec_digest: Mapped[str | None]
    warnings: Mapped[tuple[str, ...]] = mapped_column(server_default="")


class ObservationRow(Base, holds=(Observation,)):
    """One evaluation of a trial; append-only."""

    __tablename__ = "bss_observation"
    __table_args__ = (*not_negative("step", "samples", "train_seconds"),)

    trial_id: Mapped[int] = mapped_column(Integer, ForeignKey("bss_trial.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    samples: Mapped[int]
    train_seconds: Mapped[float]
    metric: Mapped[float]


class ProbeRow(Base, holds=(StepTime, NoiseMeasurement)):
    """A measurement of one batch size, run in micro-batches of one size, in one environment.

    A memory probe is about the micro-batch alone: its ``batch_size`` is that. Only a noise scale has ``step`` and
    ``metric``: where in the training it was measured.
    """

    __tablename__ = "bss_probe"
    __table_args__ = (
        UniqueConstraint(
            "study_id",
            "environment_id",
            "kind",
            "batch_size",
            "micro_batch_size",
            name="uq_bss_probe_measurement",  # the convention's name would be too long for PostgreSQL
        ),
        *positive("batch_size", "micro_batch_size", "step_seconds", "eval_every_steps"),
        *not_negative("evaluation_seconds", "steps_timed", "update_seconds", "step", "noise_passes", "noise_seconds"),
        *at_most_one("host_bound_share"),
    )

    id: Mapped[Id]
    study_id: Mapped[StudyId]
    environment_id: Mapped[EnvironmentId]
    kind: Mapped[ProbeKind]
    measured_at: Mapped[datetime]
    batch_size: Mapped[int]
    micro_batch_size: Mapped[int]
    step_seconds: Mapped[float | None]
    out_of_memory: Mapped[bool]
    eval_every_steps: Mapped[int | None]
    contended: Mapped[bool] = mapped_column(server_default=false())
    step: Mapped[int | None]
    metric: Mapped[float | None]


class VisitRow(Base, holds=(Visit,)):
    """The step time of a batch size as one visit found it; append-only. Visits are counted within an environment."""

    __tablename__ = "bss_visit"
    __table_args__ = (
        UniqueConstraint(
            "study_id",
            "environment_id",
            "visit",
            "batch_size",
            "micro_batch_size",
            name="uq_bss_visit_measurement",  # the convention's name would be too long for PostgreSQL
        ),
        *positive("visit", "batch_size", "micro_batch_size", "step_seconds"),
        *at_most_one("host_bound_share"),
    )

    id: Mapped[Id]
    study_id: Mapped[StudyId]
    environment_id: Mapped[EnvironmentId]
    visit: Mapped[int]
    measured_at: Mapped[datetime]
    contended: Mapped[bool] = mapped_column(server_default=false())


class FindingRow(Base):
    """The answer of a study, made when a trial ended; ``stamp`` is the study's stamp then."""

    __tablename__ = "bss_finding"

    study_id: Mapped[int] = mapped_column(Integer, ForeignKey("bss_study.id", ondelete="CASCADE"), primary_key=True)
    stamp: Mapped[str]
    found_at: Mapped[datetime]
    answer: Mapped[Mapping[str, object]]


class LogRow(Base):
    """The last lines that a trial's worker wrote."""

    __tablename__ = "bss_log"

    trial_id: Mapped[int] = mapped_column(Integer, ForeignKey("bss_trial.id", ondelete="CASCADE"), primary_key=True)
    text: Mapped[str]


class ClaimRow(Base):
    """A named lease inside a study: what only one driver at a time may do."""

    __tablename__ = "bss_claim"

    study_id: Mapped[int] = mapped_column(Integer, ForeignKey("bss_study.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    expires_at: Mapped[datetime]


class BranchRow(Base, holds=(BranchMeasurement,)):
    """A branch in an environment; append-only. Its ``digest`` is that of all that decides how it ends."""

    __tablename__ = "bss_branch"
    __table_args__ = (
        UniqueConstraint("study_id", "environment_id", "digest"),
        *positive("batch_size", "micro_batch_size", "samples", "learning_rate"),
        *not_negative("start_samples"),
    )

    id: Mapped[Id]
    study_id: Mapped[StudyId]
    environment_id: Mapped[EnvironmentId]
    measured_at: Mapped[datetime]
    digest: Mapped[str]


class SpecRow(Base):
    """A spec of a study, whole; append-only. ``digest`` is that of its content (`bssearch.records.spec_digest`)."""

    __tablename__ = "bss_spec"

    study_id: Mapped[int] = mapped_column(Integer, ForeignKey("bss_study.id", ondelete="CASCADE"), primary_key=True)
    digest: Mapped[str] = mapped_column(primary_key=True)
    spec: Mapped[Mapping[str, object]] = mapped_column(JSON)
