"""The tables. A column that holds a record's field bears the field's name (`bssearch.storage.rows` maps the two).

Times are UTC, seconds and metrics finite floats, bytes and counts integers; JSON holds only what has the user's shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    Enum,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from bssearch.records import Goal, MemoryBasis, ParameterValue, Phase, TrialState

NAMING_CONVENTION = {
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
}
TABLE_PREFIX = "bss_"
UNFINISHED = "state IN ('queued', 'running')"


class ProbeKind(StrEnum):
    """What a probe measured."""

    MEMORY = "memory"
    STEP_TIME = "step_time"
    NOISE_SCALE = "noise_scale"


class UtcDateTime(TypeDecorator[datetime]):
    """A moment: takes aware datetimes, stores UTC, returns aware ones, from SQLite too."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return the moment in UTC; raise `ValueError` where it does not say its offset."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} must have a time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return the stored moment as an aware datetime."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class FiniteFloat(TypeDecorator[float]):
    """A double that is a number: SQLite would quietly make NULL of a NaN."""

    impl = Float(53)
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:
        """Return the value as it is; raise `ValueError` for NaN and the infinities."""
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number")
        return value


class StorableText(TypeDecorator[str]):
    """A text without what a database cannot hold: NUL (PostgreSQL) and lone surrogates become replacement marks."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Return the text fit to be stored: what a worker wrote may hold anything."""
        if value is None:
            return None
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")


class Sentences(TypeDecorator[tuple[str, ...]]):
    """Some sentences, one a line."""

    impl = StorableText
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> str | None:
        """Return the sentences as lines; a line break inside one becomes a space."""
        return None if value is None else "\n".join(" ".join(sentence.split()) for sentence in value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> tuple[str, ...] | None:
        """Return the lines."""
        return None if value is None else tuple(value.splitlines())


def _enum(kind: type[StrEnum], name: str) -> Enum:
    """Return a text column type with a CHECK of its values, the same on every database."""
    return Enum(
        kind,
        name=name,
        native_enum=False,
        create_constraint=True,
        length=16,
        values_callable=lambda members: [member.value for member in members],
    )


def _positive(*columns: str) -> list[CheckConstraint]:
    return [CheckConstraint(f"{column} > 0", name=f"{column}_positive") for column in columns]


def _not_negative(*columns: str) -> list[CheckConstraint]:
    return [CheckConstraint(f"{column} >= 0", name=f"{column}_not_negative") for column in columns]


def _share(*columns: str) -> list[CheckConstraint]:
    return [CheckConstraint(f"{column} >= 0 AND {column} < 1", name=f"{column}_share") for column in columns]


Id = Annotated[int, mapped_column(Integer, primary_key=True)]
StudyId = Annotated[int, mapped_column(Integer, ForeignKey("bss_study.id", ondelete="CASCADE"))]
EnvironmentId = Annotated[
    int, mapped_column(Integer, ForeignKey("bss_environment.id", ondelete="RESTRICT"), index=True)
]


class Base(DeclarativeBase):
    """The base of all tables."""

    __table__: ClassVar[Table]
    metadata = MetaData(naming_convention=NAMING_CONVENTION)
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        int: BigInteger,
        float: FiniteFloat,
        str: StorableText,
        datetime: UtcDateTime,
    }


class EnvironmentRow(Base):
    """Where trials ran; ``digest`` is a hash of the whole record, so that equal ones share a row."""

    __tablename__ = "bss_environment"
    __table_args__ = (UniqueConstraint("digest"),)

    id: Mapped[Id]
    digest: Mapped[str]
    device_name: Mapped[str]
    device_type: Mapped[str]
    device_memory_bytes: Mapped[int | None]
    precision: Mapped[str]
    compile_mode: Mapped[str]
    torch_version: Mapped[str]
    cuda_version: Mapped[str | None]
    driver_version: Mapped[str | None]
    python_version: Mapped[str]
    host: Mapped[str]
    workload_revision: Mapped[str | None]
    cudnn_version: Mapped[str | None]
    git_revision: Mapped[str | None]


class StudyRow(Base):
    """A question. ``environment_id`` is the first environment it ran in: what binds it to a kind of device.

    ``revision`` counts the changes of its trials and probes; ``rewritten_at_revision`` is the last one at which rows
    were deleted or rewritten, ``probed_at_revision`` the last one at which a probe was stored.
    """

    __tablename__ = "bss_study"
    __table_args__ = (
        UniqueConstraint("name"),
        CheckConstraint("name <> ''", name="name_not_empty"),
        CheckConstraint("length(objective) >= 1 AND length(objective) <= 64", name="objective_length"),
    )

    id: Mapped[Id]
    name: Mapped[str]
    spec: Mapped[Mapping[str, object]] = mapped_column(JSON)
    spec_hash: Mapped[str]
    objective: Mapped[str]
    target_metric: Mapped[str]
    target_value: Mapped[float]
    target_goal: Mapped[Goal] = mapped_column(_enum(Goal, "target_goal"))
    created_by: Mapped[str]
    created_at: Mapped[datetime]
    archived_at: Mapped[datetime | None]
    environment_id: Mapped[EnvironmentId | None]
    revision: Mapped[int] = mapped_column(server_default=text("0"))
    rewritten_at_revision: Mapped[int] = mapped_column(server_default=text("0"))
    probed_at_revision: Mapped[int] = mapped_column(server_default=text("0"))


class TrialRow(Base):
    """A trial: the configuration as run, its lease while it runs, then its outcome.

    ``revision`` is the study's revision when the trial, or its observations, last changed.

    Until a trial has ended its outcome columns hold the zeros of a `TrialOutcome`; one that was paused and runs again
    keeps the ``contended`` of its first part.
    """

    __tablename__ = "bss_trial"
    __table_args__ = (
        UniqueConstraint("study_id", "number"),
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
        *_positive("number", "batch_size", "micro_batch_size", "accumulation_steps", "world_size"),
        *_positive("learning_rate", "train_seconds_limit", "eval_every_steps", "threads"),
        *_not_negative("warmup_epochs", "weight_decay", "steps", "samples", "train_seconds"),
        *_not_negative("evaluation_seconds", "warmup_seconds", "other_seconds", "wall_seconds"),
        *_not_negative("tokens", "time_to_target_s", "steps_to_target", "steps_x_step_time_s"),
        *_not_negative("skipped_steps", "energy_joules", "mean_power_watts", "noise_passes", "noise_seconds"),
        *_share("dropout", "label_smoothing"),
    )

    id: Mapped[Id]
    study_id: Mapped[StudyId]
    environment_id: Mapped[EnvironmentId | None]
    number: Mapped[int]
    revision: Mapped[int] = mapped_column(server_default=text("0"))
    state: Mapped[TrialState] = mapped_column(_enum(TrialState, "state"))
    phase: Mapped[Phase] = mapped_column(_enum(Phase, "phase"))
    uncapped: Mapped[bool]

    batch_size: Mapped[int]
    learning_rate: Mapped[float]
    micro_batch_size: Mapped[int]
    accumulation_steps: Mapped[int]
    world_size: Mapped[int]
    warmup_epochs: Mapped[float]
    weight_decay: Mapped[float]
    dropout: Mapped[float]
    label_smoothing: Mapped[float]
    optimizer: Mapped[str]
    parameters: Mapped[Mapping[str, ParameterValue]] = mapped_column(JSON)

    sampled: Mapped[Mapping[str, ParameterValue] | None] = mapped_column(JSON(none_as_null=True))
    seed: Mapped[int]
    train_seconds_limit: Mapped[float]
    eval_every_steps: Mapped[int]
    threads: Mapped[int]
    retry_of: Mapped[int | None]
    lease_owner: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    created_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    steps_x_step_time_s: Mapped[float | None]
    expected_improvement: Mapped[float | None]

    reason: Mapped[str]
    steps: Mapped[int]
    samples: Mapped[int]
    tokens: Mapped[int | None]
    train_seconds: Mapped[float]
    undelayed_train_seconds: Mapped[float | None]
    reference_seconds: Mapped[float | None]
    evaluation_seconds: Mapped[float]
    warmup_seconds: Mapped[float]
    other_seconds: Mapped[float]
    wall_seconds: Mapped[float]
    time_to_target_s: Mapped[float | None]
    steps_to_target: Mapped[int | None]
    last_miss_step: Mapped[int | None]
    last_miss_seconds: Mapped[float | None]
    first_hit_step: Mapped[int | None]
    first_hit_seconds: Mapped[float | None]
    final_metric: Mapped[float | None]
    best_metric: Mapped[float | None]
    test_metric: Mapped[float | None]
    peak_memory_bytes: Mapped[int | None]
    peak_memory_basis: Mapped[MemoryBasis | None] = mapped_column(_enum(MemoryBasis, "peak_memory_basis"))
    dropped_samples_per_epoch: Mapped[int | None]
    contended: Mapped[bool]
    skipped_steps: Mapped[int | None]
    data_placement: Mapped[str | None]
    warnings: Mapped[tuple[str, ...]] = mapped_column(Sentences, server_default="")
    traceback: Mapped[str | None]

    noise_scale: Mapped[float | None]
    noise_low: Mapped[float | None]
    noise_high: Mapped[float | None]
    noise_adam_scale: Mapped[float | None]
    noise_adam_low: Mapped[float | None]
    noise_adam_high: Mapped[float | None]
    noise_passes: Mapped[int | None]
    noise_trace: Mapped[float | None]
    noise_square: Mapped[float | None]
    noise_adam_trace: Mapped[float | None]
    noise_adam_square: Mapped[float | None]
    noise_seconds: Mapped[float | None]

    energy_joules: Mapped[float | None]
    mean_power_watts: Mapped[float | None]
    mean_clock_mhz: Mapped[float | None]
    throttle_reasons: Mapped[str | None]


class ObservationRow(Base):
    """One evaluation of a trial; append-only."""

    __tablename__ = "bss_observation"
    __table_args__ = (*_not_negative("step", "samples", "train_seconds"),)

    trial_id: Mapped[int] = mapped_column(Integer, ForeignKey("bss_trial.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    samples: Mapped[int]
    train_seconds: Mapped[float]
    metric: Mapped[float]
    loss: Mapped[float | None]
    learning_rate: Mapped[float]


class ProbeRow(Base):
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
        *_positive("batch_size", "micro_batch_size", "step_seconds", "eval_every_steps"),
        *_not_negative("evaluation_seconds", "steps_timed", "update_seconds", "step", "noise_passes", "noise_seconds"),
    )

    id: Mapped[Id]
    study_id: Mapped[StudyId]
    environment_id: Mapped[EnvironmentId]
    kind: Mapped[ProbeKind] = mapped_column(_enum(ProbeKind, "kind"))
    measured_at: Mapped[datetime]
    batch_size: Mapped[int]
    micro_batch_size: Mapped[int]
    step_seconds: Mapped[float | None]
    evaluation_seconds: Mapped[float | None]
    steps_timed: Mapped[int]
    peak_memory_bytes: Mapped[int | None]
    out_of_memory: Mapped[bool]
    eval_every_steps: Mapped[int | None]
    step_seconds_low: Mapped[float | None]
    step_seconds_high: Mapped[float | None]
    undelayed_step_seconds: Mapped[float | None]
    reference_seconds: Mapped[float | None]
    update_seconds: Mapped[float | None]
    settled: Mapped[bool | None]
    contended: Mapped[bool] = mapped_column(server_default=false())
    reason: Mapped[str | None]
    step: Mapped[int | None]
    metric: Mapped[float | None]
    noise_scale: Mapped[float | None]
    noise_low: Mapped[float | None]
    noise_high: Mapped[float | None]
    noise_adam_scale: Mapped[float | None]
    noise_adam_low: Mapped[float | None]
    noise_adam_high: Mapped[float | None]
    noise_passes: Mapped[int | None]
    noise_trace: Mapped[float | None]
    noise_square: Mapped[float | None]
    noise_adam_trace: Mapped[float | None]
    noise_adam_square: Mapped[float | None]
    noise_seconds: Mapped[float | None]


class VisitRow(Base):
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
        *_positive("visit", "batch_size", "micro_batch_size", "step_seconds"),
    )

    id: Mapped[Id]
    study_id: Mapped[StudyId]
    environment_id: Mapped[EnvironmentId]
    visit: Mapped[int]
    measured_at: Mapped[datetime]
    batch_size: Mapped[int]
    micro_batch_size: Mapped[int]
    step_seconds: Mapped[float]
    step_seconds_low: Mapped[float | None]
    step_seconds_high: Mapped[float | None]
    undelayed_step_seconds: Mapped[float | None]
    reference_seconds: Mapped[float | None]
    steps_timed: Mapped[int]
    settled: Mapped[bool | None]
    contended: Mapped[bool] = mapped_column(server_default=false())
    reason: Mapped[str | None]


class FindingRow(Base):
    """The answer of a study, made when a trial ended; ``stamp`` is the study's stamp then."""

    __tablename__ = "bss_finding"

    study_id: Mapped[int] = mapped_column(Integer, ForeignKey("bss_study.id", ondelete="CASCADE"), primary_key=True)
    stamp: Mapped[str]
    found_at: Mapped[datetime]
    answer: Mapped[Mapping[str, object]] = mapped_column(JSON)


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
