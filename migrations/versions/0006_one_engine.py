"""A revision counter per study, the improvement that was expected of a trial, a phase for runs to the whole budget."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

COUNTERS = ("revision", "rewritten_at_revision", "probed_at_revision")
PHASES_BEFORE = "'search', 'confirm', 'audit', 'probe'"
PHASES = "'search', 'confirm', 'audit', 'to_budget', 'probe'"
PHASE_CHECK = "ck_bss_trial_phase"
OBJECTIVE_CHECK = "ck_bss_study_objective_length"
REVISION_INDEX = "ix_bss_trial_study_id_revision"


def upgrade() -> None:
    with op.batch_alter_table("bss_study") as table:
        for name in COUNTERS:
            table.add_column(sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0")))
        table.create_check_constraint(op.f(OBJECTIVE_CHECK), "length(objective) >= 1 AND length(objective) <= 64")
    with op.batch_alter_table("bss_trial") as table:
        table.alter_column("evidence", new_column_name="uncapped")
        table.add_column(sa.Column("revision", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
        table.add_column(sa.Column("expected_improvement", sa.Float(53), nullable=True))
        table.drop_constraint(op.f(PHASE_CHECK), type_="check")
        table.create_check_constraint(op.f(PHASE_CHECK), f"phase IN ({PHASES})")
    op.create_index(op.f(REVISION_INDEX), "bss_trial", ["study_id", "revision"])
    # Revision 0 is that of a study which nothing has happened to.
    op.execute("UPDATE bss_trial SET revision = 1")
    op.execute("UPDATE bss_study SET revision = 1, probed_at_revision = 1")
    op.execute(sa.text("UPDATE bss_trial SET phase = 'to_budget' WHERE phase = 'audit' AND uncapped"))


def downgrade() -> None:
    op.execute(sa.text("UPDATE bss_trial SET phase = 'audit', uncapped = true WHERE phase = 'to_budget'"))
    op.drop_index(op.f(REVISION_INDEX), "bss_trial")
    with op.batch_alter_table("bss_trial") as table:
        table.drop_constraint(op.f(PHASE_CHECK), type_="check")
        table.create_check_constraint(op.f(PHASE_CHECK), f"phase IN ({PHASES_BEFORE})")
        table.drop_column("expected_improvement")
        table.drop_column("revision")
        table.alter_column("uncapped", new_column_name="evidence")
    with op.batch_alter_table("bss_study") as table:
        table.drop_constraint(op.f(OBJECTIVE_CHECK), type_="check")
        for name in COUNTERS:
            table.drop_column(name)
