"""Paused trials have ended, like pruned ones, until they go on."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

ENDED_AT_WHEN_FINISHED = "ck_bss_trial_ended_at_when_finished"


def upgrade() -> None:
    let_end_without("'queued', 'running'")


def downgrade() -> None:
    op.execute("UPDATE bss_trial SET state = 'pruned' WHERE state = 'paused'")
    let_end_without("'queued', 'running', 'paused'")


def let_end_without(states: str) -> None:
    with op.batch_alter_table("bss_trial") as table:
        table.drop_constraint(op.f(ENDED_AT_WHEN_FINISHED), type_="check")
        table.create_check_constraint(op.f(ENDED_AT_WHEN_FINISHED), f"(ended_at IS NULL) = (state IN ({states}))")
