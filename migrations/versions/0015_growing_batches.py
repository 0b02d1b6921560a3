"""A phase for trials whose batch grows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

PHASES_BEFORE = "'search', 'confirm', 'audit', 'to_budget', 'probe'"
PHASES = "'search', 'confirm', 'audit', 'to_budget', 'growth', 'probe'"
PHASE_CHECK = "ck_bss_trial_phase"


def upgrade() -> None:
    _allow(PHASES)


def downgrade() -> None:
    # Probes are of nobody's answer either.
    op.execute(sa.text("UPDATE bss_trial SET phase = 'probe' WHERE phase = 'growth'"))
    _allow(PHASES_BEFORE)


def _allow(phases: str) -> None:
    with op.batch_alter_table("bss_trial") as table:
        table.drop_constraint(op.f(PHASE_CHECK), type_="check")
        table.create_check_constraint(op.f(PHASE_CHECK), f"phase IN ({phases})")
