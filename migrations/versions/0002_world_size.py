"""Adds the number of devices to measurements, and a phase for trials on several devices."""

from __future__ import annotations

from typing import Literal

import sqlalchemy as sa
from alembic import op

revision = "0002_world_size"
down_revision = "0001_initial"
branch_labels = None
depends_on = None

PHASES = "'search', 'confirm', 'audit', 'to_budget', 'growth', 'probe'"
MEASUREMENTS = {"bss_probe": "kind", "bss_visit": "visit"}


def _recreate() -> Literal["always", "never"]:
    return "always" if op.get_context().dialect.name == "sqlite" else "never"


def _measured(table: str, *further: str) -> list[str]:
    return ["study_id", "environment_id", MEASUREMENTS[table], "batch_size", "micro_batch_size", *further]


def _allow(phases: str) -> None:
    name = op.f("ck_bss_trial_phase")
    with op.batch_alter_table("bss_trial", recreate=_recreate()) as table:
        table.drop_constraint(name, type_="check")
        table.create_check_constraint(name, f"phase IN ({phases})")


def upgrade() -> None:
    for name in MEASUREMENTS:
        with op.batch_alter_table(name, recreate=_recreate()) as table:
            table.add_column(sa.Column("world_size", sa.BigInteger(), server_default=sa.text("1"), nullable=False))
            table.drop_constraint(f"uq_{name}_measurement", type_="unique")
            table.create_unique_constraint(f"uq_{name}_measurement", _measured(name, "world_size"))
            table.create_check_constraint(op.f(f"ck_{name}_world_size_positive"), "world_size > 0")
    _allow("'search', 'confirm', 'audit', 'to_budget', 'growth', 'devices', 'probe'")


def downgrade() -> None:
    op.execute("DELETE FROM bss_trial WHERE phase = 'devices'")
    _allow(PHASES)
    for name in MEASUREMENTS:
        op.execute(f"DELETE FROM {name} WHERE world_size > 1")
        with op.batch_alter_table(name, recreate=_recreate()) as table:
            table.drop_constraint(op.f(f"ck_{name}_world_size_positive"), type_="check")
            table.drop_constraint(f"uq_{name}_measurement", type_="unique")
            table.create_unique_constraint(f"uq_{name}_measurement", _measured(name))
            table.drop_column("world_size")
