"""Moments of the gradient noise, the seconds they took, and what a peak memory is the peak of."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

NOISE = ("noise_trace", "noise_square", "noise_adam_trace", "noise_adam_square", "noise_seconds")
BASIS = sa.Enum(
    "device",
    "resident",
    "resident_sampled",
    name="peak_memory_basis",
    native_enum=False,
    create_constraint=True,
    length=16,
)


def upgrade() -> None:
    for table_name in ("bss_trial", "bss_probe"):
        with op.batch_alter_table(table_name) as table:
            for name in NOISE:
                table.add_column(sa.Column(name, sa.Float(53), nullable=True))
            table.create_check_constraint(op.f(f"ck_{table_name}_noise_seconds_not_negative"), "noise_seconds >= 0")
    with op.batch_alter_table("bss_trial") as table:
        table.add_column(sa.Column("peak_memory_basis", BASIS, nullable=True))
    # Until now only a GPU's peak was measured.
    op.execute("UPDATE bss_trial SET peak_memory_basis = 'device' WHERE peak_memory_bytes IS NOT NULL")


def downgrade() -> None:
    op.execute("UPDATE bss_trial SET peak_memory_bytes = NULL WHERE peak_memory_basis <> 'device'")
    with op.batch_alter_table("bss_trial") as table:
        table.drop_constraint(op.f("ck_bss_trial_peak_memory_basis"), type_="check")
        table.drop_column("peak_memory_basis")
    for table_name in ("bss_trial", "bss_probe"):
        with op.batch_alter_table(table_name) as table:
            table.drop_constraint(op.f(f"ck_{table_name}_noise_seconds_not_negative"), type_="check")
            for name in NOISE:
                table.drop_column(name)
