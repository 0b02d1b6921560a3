"""The tables. A column that holds a record's field bears the field's name (`bssearch.storage.rows` maps the two).

Times are UTC, seconds and metrics finite floats, bytes and counts integers; JSON holds only what has the user's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, ClassVar

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

from bssearch.records import Goal, MemoryBasis, ParameterValue, Phase, SecondsBasis, TrialState
from bssearch.storage.columns import (
    NAMING_CONVENTION,
    FiniteFloat,
    Sentences,
    StorableText,
    UtcDateTime,
    at_most_one,
    below_one,
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


class NoiseColumns:
    """The columns of a gradient noise scale."""

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
    git_dirty: Mapped[bool | None]
    libraries: Mapped[tuple[str, ...]] = mapped_column(Sentences, server_default="")


class StudyRow(Base):
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
    spec: Mapped[Mapping[str, object]] = mapped_column(JSON)
    spec_hash: Mapped[str]
    objective: Mapped[str]
    target_metric: Mapped[str]
    target_value: Mapped[float]
    target_goal: Mapped[Goal] = mapped_column(enum(Goal, "target_goal"))
    created_by: Mapped[str]
    created_at: Mapped[datetime]
    archived_at: Mapped[datetime | None]
    environment_id: Mapped[EnvironmentId | None]
    revision: Mapped[int] = mapped_column(server_default=text("0"))
    rewritten_at_revision: Mapped[int] = mapped_column(server_default=text("0"))
    probed_at_revision: Mapped[int] = mapped_column(server_default=text("0"))
    login: Mapped[str | None]


class TrialRow(NoiseColumns, Base):
    """A trial: the configuration as run, its lease while it runs, then its outcome.

    ``revision`` is the study's revision when the trial last changed. ``spec_digest`` names the row of
    `bssearch.storage.specs` with the spec by which it was started.

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
    state: Mapped[TrialState] = mapped_column(enum(TrialState, "state"))
    phase: Mapped[Phase] = mapped_column(enum(Phase, "phase"))
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
    started_by: Mapped[str | None]
    spec_digest: Mapped[str | None]

    reason: Mapped[str]
    steps: Mapped[int]
    samples: Mapped[int]
    tokens: Mapped[int | None]
    train_seconds: Mapped[float]
    undelayed_train_seconds: Mapped[float | None]
    reference_seconds: Mapped[float | None]
    host_bound_share: Mapped[float | None]
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
    further_test_metrics: Mapped[Mapping[str, float] | None] = mapped_column(JSON(none_as_null=True))
    peak_memory_bytes: Mapped[int | None]
    peak_memory_basis: Mapped[MemoryBasis | None] = mapped_column(enum(MemoryBasis, "peak_memory_basis"))
    dropped_samples_per_epoch: Mapped[int | None]
    contended: Mapped[bool]
    skipped_steps: Mapped[int | None]
    data_placement: Mapped[str | None]
    data_seconds: Mapped[float | None]
    seconds_basis: Mapped[SecondsBasis | None] = mapped_column(enum(SecondsBasis, "seconds_basis"))
    warnings: Mapped[tuple[str, ...]] = mapped_column(Sentences, server_default="")
    traceback: Mapped[str | None]

    energy_joules: Mapped[float | None]
    mean_power_watts: Mapped[float | None]
    mean_clock_mhz: Mapped[float | None]
    throttle_reasons: Mapped[str | None]
    device: Mapped[str | None]
    device_uuid: Mapped[str | None]


class ObservationRow(Base):
    """One evaluation of a trial; append-only."""

    __tablename__ = "bss_observation"
    __table_args__ = (*not_negative("step", "samples", "train_seconds"),)

    trial_id: Mapped[int] = mapped_column(Integer, ForeignKey("bss_trial.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    samples: Mapped[int]
    train_seconds: Mapped[float]
    metric: Mapped[float]
    loss: Mapped[float | None]
    learning_rate: Mapped[float]


class ProbeRow(NoiseColumns, Base):
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
    kind: Mapped[ProbeKind] = mapped_column(enum(ProbeKind, "kind"))
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
    host_bound_share: Mapped[float | None]
    update_seconds: Mapped[float | None]
    settled: Mapped[bool | None]
    contended: Mapped[bool] = mapped_column(server_default=false())
    reason: Mapped[str | None]
    step: Mapped[int | None]
    metric: Mapped[float | None]


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
        *positive("visit", "batch_size", "micro_batch_size", "step_seconds"),
        *at_most_one("host_bound_share"),
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
    host_bound_share: Mapped[float | None]
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
