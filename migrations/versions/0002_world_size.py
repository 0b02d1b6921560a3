"""Step times of several devices, and trials that train on them."""

from __future__ import annotations

from typing import Literal

import sqlalchemy as sa
from alembic import op

revision = "0002_world_size"
down_revision = "0001_initial"
branch_labels = None
depends_on = None

PHASES = "'search', 'confirm', 'audit', 'to_budget', 'growth', 'devices', 'probe'"
MEASUREMENTS = {"bss_probe": "kind", "bss_visit": "visit"}


def upgrade() -> None:
    recreate: Literal["always", "never"] = "always" if op.get_context().dialect.name == "sqlite" else "never"
    for name, kind in MEASUREMENTS.items():
        with op.batch_alter_table(name, recreate=recreate) as table:
            table.add_column(sa.Column("world_size", sa.BigInteger(), server_default=sa.text("1"), nullable=False))
            table.drop_constraint(f"uq_{name}_measurement", type_="unique")
            table.create_unique_constraint(
                f"uq_{name}_measurement",
                ["study_id", "environment_id", kind, "batch_size", "micro_batch_size", "world_size"],
            )
            table.create_check_constraint(op.f(f"ck_{name}_world_size_positive"), "world_size > 0")
    phase = op.f("ck_bss_trial_phase")
    with op.batch_alter_table("bss_trial", recreate=recreate) as table:
        table.drop_constraint(phase, type_="check")
        table.create_check_constraint(phase, f"phase IN ({PHASES})")
