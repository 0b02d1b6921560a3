"""The first tables: environments, studies, trials, observations and probes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
NUMBER = sa.Float(53)


def positive(table: str, *columns: str) -> list[sa.CheckConstraint]:
    return [sa.CheckConstraint(f"{column} > 0", name=op.f(f"ck_{table}_{column}_positive")) for column in columns]


def not_negative(table: str, *columns: str) -> list[sa.CheckConstraint]:
    return [sa.CheckConstraint(f"{column} >= 0", name=op.f(f"ck_{table}_{column}_not_negative")) for column in columns]


def upgrade() -> None:
    op.create_table(
        "bss_environment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("device_name", sa.Text(), nullable=False),
        sa.Column("device_type", sa.Text(), nullable=False),
        sa.Column("device_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("precision", sa.Text(), nullable=False),
        sa.Column("compile_mode", sa.Text(), nullable=False),
        sa.Column("torch_version", sa.Text(), nullable=False),
        sa.Column("cuda_version", sa.Text(), nullable=True),
        sa.Column("driver_version", sa.Text(), nullable=True),
        sa.Column("python_version", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("workload_revision", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_bss_environment"),
        sa.UniqueConstraint("digest", name="uq_bss_environment_digest"),
    )
    op.create_table(
        "bss_study",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("spec_hash", sa.Text(), nullable=False),
        sa.Column("objective", sa.Text(), nullable=False),
        sa.Column("target_metric", sa.Text(), nullable=False),
        sa.Column("target_value", NUMBER, nullable=False),
        sa.Column("target_goal", sa.String(16), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_bss_study"),
        sa.UniqueConstraint("name", name="uq_bss_study_name"),
        sa.ForeignKeyConstraint(
            ["environment_id"],
            ["bss_environment.id"],
            name="fk_bss_study_environment_id",
            ondelete="RESTRICT",
        ),
        sa.CheckConstraint("name <> ''", name=op.f("ck_bss_study_name_not_empty")),
        sa.CheckConstraint("target_goal IN ('maximize', 'minimize')", name=op.f("ck_bss_study_target_goal")),
    )
    op.create_index("ix_bss_study_environment_id", "bss_study", ["environment_id"])
    op.create_table(
        "bss_trial",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=True),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("evidence", sa.Boolean(), nullable=False),
        sa.Column("batch_size", sa.BigInteger(), nullable=False),
        sa.Column("learning_rate", NUMBER, nullable=False),
        sa.Column("micro_batch_size", sa.BigInteger(), nullable=False),
        sa.Column("accumulation_steps", sa.BigInteger(), nullable=False),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("warmup_epochs", NUMBER, nullable=False),
        sa.Column("weight_decay", NUMBER, nullable=False),
        sa.Column("dropout", NUMBER, nullable=False),
        sa.Column("label_smoothing", NUMBER, nullable=False),
        sa.Column("optimizer", sa.Text(), nullable=False),
        sa.Column("parameters", sa.JSON(), nullable=False),
        sa.Column("sampled", sa.JSON(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("train_seconds_limit", NUMBER, nullable=False),
        sa.Column("eval_every_steps", sa.BigInteger(), nullable=False),
        sa.Column("threads", sa.BigInteger(), nullable=False),
        sa.Column("retry_of", sa.BigInteger(), nullable=True),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", MOMENT, nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("ended_at", MOMENT, nullable=True),
        sa.Column("steps_x_step_time_s", NUMBER, nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("train_seconds", NUMBER, nullable=False),
        sa.Column("evaluation_seconds", NUMBER, nullable=False),
        sa.Column("warmup_seconds", NUMBER, nullable=False),
        sa.Column("other_seconds", NUMBER, nullable=False),
        sa.Column("wall_seconds", NUMBER, nullable=False),
        sa.Column("time_to_target_s", NUMBER, nullable=True),
        sa.Column("steps_to_target", sa.BigInteger(), nullable=True),
        sa.Column("last_miss_step", sa.BigInteger(), nullable=True),
        sa.Column("last_miss_seconds", NUMBER, nullable=True),
        sa.Column("first_hit_step", sa.BigInteger(), nullable=True),
        sa.Column("first_hit_seconds", NUMBER, nullable=True),
        sa.Column("final_metric", NUMBER, nullable=True),
        sa.Column("best_metric", NUMBER, nullable=True),
        sa.Column("test_metric", NUMBER, nullable=True),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("dropped_samples_per_epoch", sa.BigInteger(), nullable=True),
        sa.Column("contended", sa.Boolean(), nullable=False),
        sa.Column("traceback", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_bss_trial"),
        sa.UniqueConstraint("study_id", "number", name="uq_bss_trial_study_id_number"),
        sa.ForeignKeyConstraint(["study_id"], ["bss_study.id"], name="fk_bss_trial_study_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["environment_id"],
            ["bss_environment.id"],
            name="fk_bss_trial_environment_id",
            ondelete="RESTRICT",
        ),
        sa.ForeignKeyConstraint(
            ["study_id", "retry_of"],
            ["bss_trial.study_id", "bss_trial.number"],
            name="fk_bss_trial_retry_of",
            ondelete="CASCADE",
        ),
        sa.CheckConstraint(
            "state IN ('queued', 'running', 'paused', 'reached', 'pruned', 'capped', 'exhausted', 'oom', "
            "'diverged', 'failed', 'lost', 'cancelled')",
            name=op.f("ck_bss_trial_state"),
        ),
        sa.CheckConstraint("phase IN ('search', 'confirm', 'audit', 'probe')", name=op.f("ck_bss_trial_phase")),
        sa.CheckConstraint(
            "(ended_at IS NULL) = (state IN ('queued', 'running', 'paused'))",
            name=op.f("ck_bss_trial_ended_at_when_finished"),
        ),
        sa.CheckConstraint(
            "time_to_target_s IS NULL OR state = 'reached'",
            name=op.f("ck_bss_trial_time_to_target_s_when_reached"),
        ),
        sa.CheckConstraint(
            "state <> 'running' OR (lease_owner IS NOT NULL AND lease_expires_at IS NOT NULL)",
            name=op.f("ck_bss_trial_lease_when_running"),
        ),
        sa.CheckConstraint(
            "state = 'queued' OR environment_id IS NOT NULL",
            name=op.f("ck_bss_trial_environment_when_started"),
        ),
        sa.CheckConstraint("dropout >= 0 AND dropout < 1", name=op.f("ck_bss_trial_dropout_share")),
        sa.CheckConstraint(
            "label_smoothing >= 0 AND label_smoothing < 1", name=op.f("ck_bss_trial_label_smoothing_share")
        ),
        *positive("bss_trial", "number", "batch_size", "micro_batch_size", "accumulation_steps", "world_size"),
        *positive("bss_trial", "learning_rate", "train_seconds_limit", "eval_every_steps", "threads"),
        *not_negative("bss_trial", "warmup_epochs", "weight_decay", "steps", "samples", "train_seconds"),
        *not_negative("bss_trial", "evaluation_seconds", "warmup_seconds", "other_seconds", "wall_seconds"),
        *not_negative("bss_trial", "time_to_target_s", "steps_to_target", "steps_x_step_time_s"),
    )
    op.create_index("ix_bss_trial_study_id_state", "bss_trial", ["study_id", "state"])
    op.create_index("ix_bss_trial_study_id_retry_of", "bss_trial", ["study_id", "retry_of"])
    op.create_index("ix_bss_trial_environment_id", "bss_trial", ["environment_id"])
    op.create_table(
        "bss_observation",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("train_seconds", NUMBER, nullable=False),
        sa.Column("metric", NUMBER, nullable=False),
        sa.Column("loss", NUMBER, nullable=True),
        sa.Column("learning_rate", NUMBER, nullable=False),
        sa.PrimaryKeyConstraint("trial_id", "step", name="pk_bss_observation"),
        sa.ForeignKeyConstraint(["trial_id"], ["bss_trial.id"], name="fk_bss_observation_trial_id", ondelete="CASCADE"),
        *not_negative("bss_observation", "step", "samples", "train_seconds"),
    )
    op.create_table(
        "bss_probe",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("measured_at", MOMENT, nullable=False),
        sa.Column("batch_size", sa.BigInteger(), nullable=False),
        sa.Column("micro_batch_size", sa.BigInteger(), nullable=False),
        sa.Column("step_seconds", NUMBER, nullable=True),
        sa.Column("evaluation_seconds", NUMBER, nullable=True),
        sa.Column("steps_timed", sa.BigInteger(), nullable=False),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("out_of_memory", sa.Boolean(), nullable=False),
        sa.Column("eval_every_steps", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_bss_probe"),
        sa.UniqueConstraint(
            "study_id",
            "environment_id",
            "kind",
            "batch_size",
            name="uq_bss_probe_study_id_environment_id_kind_batch_size",
        ),
        sa.ForeignKeyConstraint(["study_id"], ["bss_study.id"], name="fk_bss_probe_study_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["environment_id"],
            ["bss_environment.id"],
            name="fk_bss_probe_environment_id",
            ondelete="RESTRICT",
        ),
        sa.CheckConstraint("kind IN ('memory', 'step_time', 'noise_scale')", name=op.f("ck_bss_probe_kind")),
        *positive("bss_probe", "batch_size", "micro_batch_size", "step_seconds", "eval_every_steps"),
        *not_negative("bss_probe", "evaluation_seconds", "steps_timed"),
    )
    op.create_index("ix_bss_probe_environment_id", "bss_probe", ["environment_id"])


def downgrade() -> None:
    for table in ("bss_probe", "bss_observation", "bss_trial", "bss_study", "bss_environment"):
        op.drop_table(table)
