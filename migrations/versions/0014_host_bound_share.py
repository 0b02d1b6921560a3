"""The share of the seconds in which the host did not wait for the device, of trials and of step times."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

TABLES = ("bss_trial", "bss_probe", "bss_visit")
NAME = "host_bound_share"


def upgrade() -> None:
    for table_name in TABLES:
        with op.batch_alter_table(table_name) as table:
            table.add_column(sa.Column(NAME, sa.Float(53), nullable=True))
            table.create_check_constraint(op.f(f"ck_{table_name}_{NAME}_share"), f"{NAME} >= 0 AND {NAME} <= 1")


def downgrade() -> None:
    for table_name in reversed(TABLES):
        with op.batch_alter_table(table_name) as table:
            table.drop_constraint(op.f(f"ck_{table_name}_{NAME}_share"), type_="check")
            table.drop_column(NAME)
