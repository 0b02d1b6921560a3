"""Branches of longer runs, trained from their checkpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

POSITIVE = ("batch_size", "micro_batch_size", "samples", "learning_rate")


def upgrade() -> None:
    op.create_table(
        "bss_branch",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=False),
        sa.Column("start_samples", sa.BigInteger(), nullable=True),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("batch_size", sa.BigInteger(), nullable=False),
        sa.Column("micro_batch_size", sa.BigInteger(), nullable=False),
        sa.Column("learning_rate", sa.Float(53), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("start_metric", sa.Float(53), nullable=True),
        sa.Column("metric", sa.Float(53), nullable=True),
        *(sa.CheckConstraint(f"{name} > 0", name=op.f(f"ck_bss_branch_{name}_positive")) for name in POSITIVE),
        sa.CheckConstraint("start_samples >= 0", name=op.f("ck_bss_branch_start_samples_not_negative")),
        sa.ForeignKeyConstraint(
            ["study_id"], ["bss_study.id"], name=op.f("fk_bss_branch_study_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["bss_environment.id"], name=op.f("fk_bss_branch_environment_id"), ondelete="RESTRICT"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bss_branch")),
        sa.UniqueConstraint(
            "study_id", "environment_id", "digest", name=op.f("uq_bss_branch_study_id_environment_id_digest")
        ),
    )
    op.create_index(op.f("ix_bss_branch_environment_id"), "bss_branch", ["environment_id"])


def downgrade() -> None:
    op.drop_table("bss_branch")
