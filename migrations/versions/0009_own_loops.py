"""Waits for data in the training of loops that are not bssearch's, and whose seconds a trial's are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

BASIS = sa.Enum("reported", "wall", name="seconds_basis", native_enum=False, create_constraint=True, length=16)


def upgrade() -> None:
    with op.batch_alter_table("bss_trial") as table:
        table.add_column(sa.Column("data_seconds", sa.Float(53), nullable=True))
        table.add_column(sa.Column("seconds_basis", BASIS, nullable=True))
        table.create_check_constraint(op.f("ck_bss_trial_data_seconds_not_negative"), "data_seconds >= 0")


def downgrade() -> None:
    with op.batch_alter_table("bss_trial") as table:
        table.drop_constraint(op.f("ck_bss_trial_data_seconds_not_negative"), type_="check")
        table.drop_constraint(op.f("ck_bss_trial_seconds_basis"), type_="check")
        table.drop_column("seconds_basis")
        table.drop_column("data_seconds")
