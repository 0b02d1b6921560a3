"""The tables. Columns have the names of records' fields (see `bssearch.storage.columns`).

Times are UTC. JSON is only for user-defined keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from sqlalchemy import (
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
    StoredObject,
    UtcDateTime,
    at_most_one,
    below_one,
    column_types,
    enum,
    not_negative,
    positive,
)

UNFINISHED = "state IN ('queued', 'running')"


class ProbeKind(StrEnum):
    """Kinds of probes."""

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


class Base(DeclarativeBase):
    """Base of all tables, with a column for each field of the records that a table ``holds``."""

    __table__: ClassVar[Table]
    metadata = MetaData(naming_convention=NAMING_CONVENTION)
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        int: BigInteger,
        float: FiniteFloat,
        str: StorableText,
        datetime: UtcDateTime,
        tuple[str, ...]: Sentences,
        Mapping[str, object]: StoredObject(),
        Mapping[str, ParameterValue]: StoredObject(of_scalars=True),
        Mapping[str, float]: StoredObject(of_scalars=True),
        **{kind: enum(kind, name) for kind, name in _ENUMS.items()},
    }

    def __init_subclass__(cls, *, holds: Sequence[type] = (), **options: Any) -> None:
        for record in holds:
            for name, kind in column_types(record).items():
                cls.__annotations__.setdefault(name, Mapped[kind])  # type: ignore[valid-type]
        super().__init_subclass__(**options)


class EnvironmentRow(Base, holds=(Environment,)):
    """Environments; ``digest`` hashes the whole record."""

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
    """Studies.

    ``revision`` counts changes; ``rewritten_at_revision`` is the last revision that deleted or rewrote rows,
    ``probed_at_revision`` the last that stored a probe. On PostgreSQL only the login ``login`` and owners may rename,
    archive or delete the study.
    """

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
    """Trials: configuration, lease while running, outcome (zeros before the end).

    ``plan_id`` is the last plan that started or queued the trial; ``revision`` is the study's at the last change.
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
        CheckConstraint("retry_of < number", name="retry_of_earlier"),
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
    """Evaluations; append-only."""

    __tablename__ = "bss_observation"
    __table_args__ = (*not_negative("step", "samples", "train_seconds"),)

    trial_id: Mapped[int] = mapped_column(Integer, ForeignKey("bss_trial.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    samples: Mapped[int]
    train_seconds: Mapped[float]
    metric: Mapped[float]


class ProbeRow(Base, holds=(StepTime, NoiseMeasurement)):
    """Probes by batch size and its split into micro-batches.

    Memory probes have ``batch_size`` = ``micro_batch_size``; only noise scales have ``step`` and ``metric``.
    """

    __tablename__ = "bss_probe"
    __table_args__ = (
        UniqueConstraint(
            "study_id",
            "environment_id",
            "kind",
            "batch_size",
            "micro_batch_size",
            "world_size",
            name="uq_bss_probe_measurement",  # the convention's name would be too long for PostgreSQL
        ),
        *positive("batch_size", "micro_batch_size", "world_size", "step_seconds", "eval_every_steps"),
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
    world_size: Mapped[int] = mapped_column(server_default=text("1"))
    step_seconds: Mapped[float | None]
    out_of_memory: Mapped[bool]
    eval_every_steps: Mapped[int | None]
    contended: Mapped[bool] = mapped_column(server_default=false())
    step: Mapped[int | None]
    metric: Mapped[float | None]


class VisitRow(Base, holds=(Visit,)):
    """Step times by visit; append-only. Environment and number identify a visit."""

    __tablename__ = "bss_visit"
    __table_args__ = (
        UniqueConstraint(
            "study_id",
            "environment_id",
            "visit",
            "batch_size",
            "micro_batch_size",
            "world_size",
            name="uq_bss_visit_measurement",  # the convention's name would be too long for PostgreSQL
        ),
        *positive("visit", "batch_size", "micro_batch_size", "world_size", "step_seconds"),
        *at_most_one("host_bound_share"),
    )

    id: Mapped[Id]
    study_id: Mapped[StudyId]
    environment_id: Mapped[EnvironmentId]
    visit: Mapped[int]
    world_size: Mapped[int] = mapped_column(server_default=text("1"))
    measured_at: Mapped[datetime]
    contended: Mapped[bool] = mapped_column(server_default=false())


class FindingRow(Base):
    """Answers, each with the study's ``stamp`` before its computation."""

    __tablename__ = "bss_finding"

    study_id: Mapped[int] = mapped_column(Integer, ForeignKey("bss_study.id", ondelete="CASCADE"), primary_key=True)
    stamp: Mapped[str]
    found_at: Mapped[datetime]
    answer: Mapped[Mapping[str, object]]


class LogRow(Base):
    """The end of a trial's output."""

    __tablename__ = "bss_log"

    trial_id: Mapped[int] = mapped_column(Integer, ForeignKey("bss_trial.id", ondelete="CASCADE"), primary_key=True)
    text: Mapped[str]


class ClaimRow(Base):
    """Leases of tasks that one driver at a time may do."""

    __tablename__ = "bss_claim"

    study_id: Mapped[int] = mapped_column(Integer, ForeignKey("bss_study.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    expires_at: Mapped[datetime]


class BranchRow(Base, holds=(BranchMeasurement,)):
    """Measured branches, by a digest of all their inputs; append-only."""

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
    """Specs; append-only. ``digest`` is `bssearch.records.spec_digest`."""

    __tablename__ = "bss_spec"

    study_id: Mapped[int] = mapped_column(Integer, ForeignKey("bss_study.id", ondelete="CASCADE"), primary_key=True)
    digest: Mapped[str] = mapped_column(primary_key=True)
    spec: Mapped[Mapping[str, object]] = mapped_column(StoredObject())
