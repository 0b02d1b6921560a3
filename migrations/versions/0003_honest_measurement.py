"""Honest measurement: probes of memory and gradient noise, a trial's warnings, noise scale and energy."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

NUMBER = sa.Float(53)
Columns = tuple[tuple[str, sa.types.TypeEngine[Any]], ...]
NOISE: Columns = (
    ("noise_scale", NUMBER),
    ("noise_low", NUMBER),
    ("noise_high", NUMBER),
    ("noise_adam_scale", NUMBER),
    ("noise_adam_low", NUMBER),
    ("noise_adam_high", NUMBER),
    ("noise_passes", sa.BigInteger()),
)
TRIAL: Columns = (
    ("skipped_steps", sa.BigInteger()),
    ("data_placement", sa.Text()),
    *NOISE,
    ("energy_joules", NUMBER),
    ("mean_power_watts", NUMBER),
    ("mean_clock_mhz", NUMBER),
    ("throttle_reasons", sa.Text()),
)
TRIAL_NOT_NEGATIVE = ("skipped_steps", "energy_joules", "mean_power_watts", "noise_passes")
PROBE: Columns = (
    ("step_seconds_low", NUMBER),
    ("step_seconds_high", NUMBER),
    ("update_seconds", NUMBER),
    ("settled", sa.Boolean()),
    ("reason", sa.Text()),
    ("step", sa.BigInteger()),
    ("metric", NUMBER),
    *NOISE,
)
PROBE_NOT_NEGATIVE = ("update_seconds", "step", "noise_passes")
ONE_A_BATCH = "uq_bss_probe_study_id_environment_id_kind_batch_size"
ONE_A_MICRO_BATCH = "uq_bss_probe_measurement"
PLACE = ["study_id", "environment_id", "kind", "batch_size"]
NAMES = {"precision": ("float32", "fp32"), "compile_mode": ("off", "none")}
"""What the environments called it before, and what specs call it."""


def upgrade() -> None:
    with op.batch_alter_table("bss_environment") as table:
        table.add_column(sa.Column("cudnn_version", sa.Text(), nullable=True))
        table.add_column(sa.Column("git_revision", sa.Text(), nullable=True))
    for column, (before, after) in NAMES.items():
        rename(column, before, after)
    with op.batch_alter_table("bss_trial") as table:
        for name, kind in TRIAL:
            table.add_column(sa.Column(name, kind, nullable=True))
        table.add_column(sa.Column("warnings", sa.Text(), nullable=False, server_default=""))
        for name in TRIAL_NOT_NEGATIVE:
            table.create_check_constraint(op.f(f"ck_bss_trial_{name}_not_negative"), f"{name} >= 0")
    with op.batch_alter_table("bss_probe") as table:
        for name, kind in PROBE:
            table.add_column(sa.Column(name, kind, nullable=True))
        table.add_column(sa.Column("contended", sa.Boolean(), nullable=False, server_default=sa.false()))
        for name in PROBE_NOT_NEGATIVE:
            table.create_check_constraint(op.f(f"ck_bss_probe_{name}_not_negative"), f"{name} >= 0")
        table.drop_constraint(ONE_A_BATCH, type_="unique")
        table.create_unique_constraint(ONE_A_MICRO_BATCH, [*PLACE, "micro_batch_size"])


def downgrade() -> None:
    op.execute(
        "DELETE FROM bss_probe WHERE kind <> 'step_time' OR id NOT IN "
        "(SELECT MIN(id) FROM bss_probe GROUP BY study_id, environment_id, kind, batch_size)"
    )
    with op.batch_alter_table("bss_probe") as table:
        table.drop_constraint(ONE_A_MICRO_BATCH, type_="unique")
        table.create_unique_constraint(ONE_A_BATCH, PLACE)
        for name in PROBE_NOT_NEGATIVE:
            table.drop_constraint(op.f(f"ck_bss_probe_{name}_not_negative"), type_="check")
        table.drop_column("contended")
        for name, _ in PROBE:
            table.drop_column(name)
    with op.batch_alter_table("bss_trial") as table:
        for name in TRIAL_NOT_NEGATIVE:
            table.drop_constraint(op.f(f"ck_bss_trial_{name}_not_negative"), type_="check")
        table.drop_column("warnings")
        for name, _ in TRIAL:
            table.drop_column(name)
    for column, (before, after) in NAMES.items():
        rename(column, after, before)
    with op.batch_alter_table("bss_environment") as table:
        table.drop_column("git_revision")
        table.drop_column("cudnn_version")


def rename(column: str, old: str, new: str) -> None:
    environments = sa.table("bss_environment", sa.column(column))
    op.execute(environments.update().where(environments.c[column] == old).values({column: new}))
