"""The mark of a trial that other trials' times do not cap says so."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("bss_trial") as table:
        table.alter_column("evidence", new_column_name="uncapped")


def downgrade() -> None:
    with op.batch_alter_table("bss_trial") as table:
        table.alter_column("uncapped", new_column_name="evidence")
