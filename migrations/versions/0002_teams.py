"""Teams: claims inside a study, archived studies, workers' logs, tokens seen."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
TOKENS_NOT_NEGATIVE = "ck_bss_trial_tokens_not_negative"


def upgrade() -> None:
    with op.batch_alter_table("bss_study") as table:
        table.add_column(sa.Column("archived_at", MOMENT, nullable=True))
    with op.batch_alter_table("bss_trial") as table:
        table.add_column(sa.Column("tokens", sa.BigInteger(), nullable=True))
        table.create_check_constraint(op.f(TOKENS_NOT_NEGATIVE), "tokens >= 0")
    op.create_table(
        "bss_log",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("trial_id", name="pk_bss_log"),
        sa.ForeignKeyConstraint(["trial_id"], ["bss_trial.id"], name="fk_bss_log_trial_id", ondelete="CASCADE"),
    )
    op.create_table(
        "bss_claim",
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("study_id", "name", name="pk_bss_claim"),
        sa.ForeignKeyConstraint(["study_id"], ["bss_study.id"], name="fk_bss_claim_study_id", ondelete="CASCADE"),
    )


def downgrade() -> None:
    op.drop_table("bss_claim")
    op.drop_table("bss_log")
    with op.batch_alter_table("bss_trial") as table:
        table.drop_constraint(op.f(TOKENS_NOT_NEGATIVE), type_="check")
        table.drop_column("tokens")
    with op.batch_alter_table("bss_study") as table:
        table.drop_column("archived_at")
