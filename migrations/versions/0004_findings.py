"""Findings: the answer of a study as it stood when a trial ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "bss_finding",
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("stamp", sa.Text(), nullable=False),
        sa.Column("found_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("answer", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("study_id", name="pk_bss_finding"),
        sa.ForeignKeyConstraint(["study_id"], ["bss_study.id"], name="fk_bss_finding_study_id", ondelete="CASCADE"),
    )


def downgrade() -> None:
    op.drop_table("bss_finding")
