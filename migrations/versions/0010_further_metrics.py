"""Metrics that a workload reports beside the target's, on the test part."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("bss_trial", sa.Column("further_test_metrics", sa.JSON(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("bss_trial") as table:
        table.drop_column("further_test_metrics")
