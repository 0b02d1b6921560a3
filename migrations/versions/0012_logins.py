"""The login that made a study: on PostgreSQL only it, and who owns the table, may rename, archive or delete it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

FUNCTION = """
CREATE OR REPLACE FUNCTION bss_check_maker() RETURNS trigger LANGUAGE plpgsql
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
  IF NOT is_owner AND OLD.login IS DISTINCT FROM session_user THEN
    RAISE EXCEPTION 'the study % may be renamed, archived or deleted by % alone',
      quote_literal(OLD.name), concat(OLD.login || ', who made it, and ', 'members of ', owner)
      USING ERRCODE = 'insufficient_privilege', CONSTRAINT = 'bss_study_maker';
  END IF;
  IF TG_OP = 'DELETE' THEN
    RETURN OLD;
  END IF;
  RETURN NEW;
END $$
"""
"""It looks up nothing in schemas that others may write to, and knows who logged in whatever role they have set."""

TRIGGER = """
CREATE TRIGGER bss_study_maker
BEFORE INSERT OR DELETE OR UPDATE OF name, created_by, created_at, archived_at, login ON bss_study
FOR EACH ROW EXECUTE FUNCTION bss_check_maker()
"""

POSTGRESQL = (FUNCTION, "DROP TRIGGER IF EXISTS bss_study_maker ON bss_study", TRIGGER)
"""What a server has beside the tables and their columns; it bears to be made twice, and a printed schema has it too."""


def upgrade() -> None:
    op.add_column("bss_study", sa.Column("login", sa.Text(), nullable=True))
    if op.get_bind().dialect.name == "postgresql":
        for statement in POSTGRESQL:
            op.execute(statement)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP TRIGGER bss_study_maker ON bss_study")
        op.execute("DROP FUNCTION bss_check_maker()")
    with op.batch_alter_table("bss_study") as table:
        table.drop_column("login")
