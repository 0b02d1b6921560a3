"""Step times are measured in visits, all of which are kept; seconds without waits, and of a reference kernel."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

CPU_SECONDS = {"bss_trial": "undelayed_train_seconds", "bss_probe": "undelayed_step_seconds"}
KEPT = (
    "study_id, environment_id, measured_at, batch_size, micro_batch_size, step_seconds, step_seconds_low, "
    "step_seconds_high, steps_timed, settled, contended, reason"
)


def upgrade() -> None:
    op.create_table(
        "bss_visit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("visit", sa.BigInteger(), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("batch_size", sa.BigInteger(), nullable=False),
        sa.Column("micro_batch_size", sa.BigInteger(), nullable=False),
        sa.Column("step_seconds", sa.Float(53), nullable=False),
        sa.Column("step_seconds_low", sa.Float(53), nullable=True),
        sa.Column("step_seconds_high", sa.Float(53), nullable=True),
        sa.Column("undelayed_step_seconds", sa.Float(53), nullable=True),
        sa.Column("reference_seconds", sa.Float(53), nullable=True),
        sa.Column("steps_timed", sa.BigInteger(), nullable=False),
        sa.Column("settled", sa.Boolean(), nullable=True),
        sa.Column("contended", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.CheckConstraint("visit > 0", name=op.f("ck_bss_visit_visit_positive")),
        sa.CheckConstraint("batch_size > 0", name=op.f("ck_bss_visit_batch_size_positive")),
        sa.CheckConstraint("micro_batch_size > 0", name=op.f("ck_bss_visit_micro_batch_size_positive")),
        sa.CheckConstraint("step_seconds > 0", name=op.f("ck_bss_visit_step_seconds_positive")),
        sa.ForeignKeyConstraint(["study_id"], ["bss_study.id"], name=op.f("fk_bss_visit_study_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["environment_id"],
            ["bss_environment.id"],
            name=op.f("fk_bss_visit_environment_id"),
            ondelete="RESTRICT",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bss_visit")),
        sa.UniqueConstraint(
            "study_id", "environment_id", "visit", "batch_size", "micro_batch_size", name="uq_bss_visit_measurement"
        ),
    )
    op.create_index(op.f("ix_bss_visit_environment_id"), "bss_visit", ["environment_id"])
    op.execute(
        f"INSERT INTO bss_visit (visit, {KEPT}) SELECT 1, {KEPT} FROM bss_probe "
        "WHERE kind = 'step_time' AND step_seconds IS NOT NULL ORDER BY id"
    )
    for table_name, cpu_seconds in CPU_SECONDS.items():
        with op.batch_alter_table(table_name) as table:
            table.add_column(sa.Column(cpu_seconds, sa.Float(53), nullable=True))
            table.add_column(sa.Column("reference_seconds", sa.Float(53), nullable=True))


def downgrade() -> None:
    for table_name, cpu_seconds in CPU_SECONDS.items():
        with op.batch_alter_table(table_name) as table:
            table.drop_column("reference_seconds")
            table.drop_column(cpu_seconds)
    op.drop_table("bss_visit")
