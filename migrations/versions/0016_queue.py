"""The queue: submissions, what their owners were served, and the workers that serve them.

On PostgreSQL a submission belongs to the login that made it: only it, and who owns the table, may cancel, pause,
resume, rename or delete it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

STATES = "'waiting', 'paused', 'cancelled', 'done', 'failed'"
NOT_NEGATIVE = ("served_seconds", "virtual_time", "started_at")

FUNCTION = """
CREATE OR REPLACE FUNCTION bss_check_submitter() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  owner name := (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = TG_RELID);
  is_owner boolean := pg_has_role(session_user, owner, 'MEMBER');
BEGIN
  IF TG_OP = 'INSERT' THEN
    IF NEW.login IS NULL OR NOT is_owner THEN
      NEW.login := session_user;
    END IF;
    RETURN NEW;
  END IF;
  IF is_owner OR OLD.login IS NOT DISTINCT FROM session_user THEN
    RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
  END IF;
  IF TG_OP = 'UPDATE' AND OLD.state = 'waiting' AND NEW.state IN ('waiting', 'done', 'failed')
      AND NEW.name = OLD.name THEN
    RETURN NEW;
  END IF;
  RAISE EXCEPTION 'the submission % may be cancelled, paused, resumed, renamed or deleted by % alone',
    quote_literal(OLD.name), concat(OLD.login || ', who submitted it, and ', 'members of ', owner)
    USING ERRCODE = 'insufficient_privilege', CONSTRAINT = 'bss_submission_submitter';
END $$
"""
"""A worker of another login says how a study that waits has ended, and nothing else of it."""

TRIGGER = """
CREATE TRIGGER bss_submission_submitter
BEFORE INSERT OR DELETE OR UPDATE OF name, state, login ON bss_submission
FOR EACH ROW EXECUTE FUNCTION bss_check_submitter()
"""

POSTGRESQL = (FUNCTION, "DROP TRIGGER IF EXISTS bss_submission_submitter ON bss_submission", TRIGGER)
"""What a server has beside the tables and their columns; it bears to be made twice, and a printed schema has it too."""


def upgrade() -> None:
    op.create_table(
        "bss_submission",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("template", sa.Text(), nullable=False),
        sa.Column("values", sa.JSON(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("login", sa.Text(), nullable=True),
        sa.Column("priority", sa.Float(53), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("submitted_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("served_seconds", sa.Float(53), nullable=False),
        sa.Column("virtual_time", sa.Float(53), nullable=False),
        sa.Column("started_at", sa.Float(53), nullable=False),
        sa.Column("has_joined", sa.Boolean(), nullable=False),
        sa.CheckConstraint(f"state IN ({STATES})", name=op.f("ck_bss_submission_state")),
        sa.CheckConstraint("name <> ''", name=op.f("ck_bss_submission_name_not_empty")),
        sa.CheckConstraint("priority > 0", name=op.f("ck_bss_submission_priority_positive")),
        *(
            sa.CheckConstraint(f"{name} >= 0", name=op.f(f"ck_bss_submission_{name}_not_negative"))
            for name in NOT_NEGATIVE
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bss_submission")),
        sa.UniqueConstraint("name", name=op.f("uq_bss_submission_name")),
    )
    op.create_index(op.f("ix_bss_submission_state"), "bss_submission", ["state"])
    op.create_index(op.f("ix_bss_submission_owner"), "bss_submission", ["owner"])
    op.create_table(
        "bss_share",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("virtual_time", sa.Float(53), nullable=False),
        sa.Column("started_at", sa.Float(53), nullable=False),
        *(
            sa.CheckConstraint(f"{name} >= 0", name=op.f(f"ck_bss_share_{name}_not_negative"))
            for name in NOT_NEGATIVE[1:]
        ),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_bss_share")),
    )
    op.create_table(
        "bss_worker",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("slots", sa.Text(), nullable=False),
        sa.Column("device_name", sa.Text(), nullable=True),
        sa.Column("templates", sa.JSON(), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("left_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("serving", sa.Text(), nullable=True),
        sa.Column("serving_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("charged_seconds", sa.Float(53), nullable=False),
        sa.CheckConstraint("charged_seconds >= 0", name=op.f("ck_bss_worker_charged_seconds_not_negative")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_bss_worker")),
    )
    if op.get_bind().dialect.name == "postgresql":
        for statement in POSTGRESQL:
            op.execute(statement)


def downgrade() -> None:
    for table in ("bss_worker", "bss_share", "bss_submission"):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION bss_check_submitter()")
