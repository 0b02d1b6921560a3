"""Where a trial comes from: who started it, by which spec, on which device, with which libraries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

OF_TRIALS = ("started_by", "spec_digest", "device", "device_uuid")


def upgrade() -> None:
    op.create_table(
        "bss_spec",
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["study_id"], ["bss_study.id"], name="fk_bss_spec_study_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("study_id", "digest", name="pk_bss_spec"),
    )
    for name in OF_TRIALS:
        op.add_column("bss_trial", sa.Column(name, sa.Text(), nullable=True))
    op.add_column("bss_environment", sa.Column("git_dirty", sa.Boolean(), nullable=True))
    op.add_column("bss_environment", sa.Column("libraries", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    with op.batch_alter_table("bss_environment") as table:
        table.drop_column("libraries")
        table.drop_column("git_dirty")
    with op.batch_alter_table("bss_trial") as table:
        for name in reversed(OF_TRIALS):
            table.drop_column(name)
    op.drop_table("bss_spec")
