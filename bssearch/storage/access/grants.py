"""The rights of the three roles of a team's database, and the SQL that gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bssearch.errors import UsageError
from bssearch.storage.models import Base, StudyRow, TrialRow

DEFAULT_PREFIX = "bssearch"
NOTE = "roles of bssearch: "
"""What the comment on the version's table says before the prefix: so a database tells which roles it was given."""

LONGEST_PREFIX = 50
"""Characters of a prefix at most: a name of PostgreSQL has 63, and ours add seven."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The three roles of a team's database, which nobody logs in as: people's logins are their members.

    The reader may look at everything, the writer runs studies, the owner has the tables and upgrades them.
    """

    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if not re.fullmatch(rf"(?!pg_)[a-z][a-z0-9_]{{0,{LONGEST_PREFIX - 1}}}", self.prefix):
            raise UsageError(
                f"{self.prefix!r} is no prefix for names of roles",
                hint=f"it is of a-z, 0-9 and _, begins with a letter but not with pg_, and has {LONGEST_PREFIX} "
                "characters at most",
            )

    @property
    def reader(self) -> str:
        """The role that may look at everything."""
        return f"{self.prefix}_reader"

    @property
    def writer(self) -> str:
        """The role that runs studies."""
        return f"{self.prefix}_writer"

    @property
    def owner(self) -> str:
        """The role that the tables belong to."""
        return f"{self.prefix}_owner"

    @property
    def names(self) -> tuple[str, str, str]:
        """The three roles."""
        return self.reader, self.writer, self.owner


def _update(row: type[Base], *, but: frozenset[str]) -> str:
    """Return the right to update all columns of a table but some."""
    return f"UPDATE ({', '.join(column.name for column in row.__table__.columns if column.name not in but)})"


_QUESTION = {"spec_hash", "objective", "target_metric", "target_value", "target_goal"}
_MAKER = {"created_by", "created_at", "login"}

WRITER_RIGHTS: Mapping[str, tuple[str, ...]] = {
    "bss_environment": ("INSERT",),
    # A trigger says whose study may be renamed, archived or deleted.
    "bss_study": ("INSERT", _update(StudyRow, but=frozenset({"id"} | _QUESTION | _MAKER)), "DELETE"),
    # Trials go with their study alone.
    "bss_trial": ("INSERT", _update(TrialRow, but=frozenset({"id", "study_id", "number"}))),
    "bss_observation": ("INSERT",),
    "bss_probe": ("INSERT", "DELETE"),  # a measurement takes the place of an earlier one
    "bss_visit": ("INSERT",),
    "bss_branch": ("INSERT",),
    "bss_spec": ("INSERT",),
    "bss_finding": ("INSERT", "UPDATE"),
    "bss_log": ("INSERT", "UPDATE"),
    "bss_claim": ("INSERT", "UPDATE", "DELETE"),
    # A trigger says who may cancel, pause, resume, rename or delete a submission. What it asks for never changes.
    "bss_submission": ("INSERT", "UPDATE (name, state, reason, served_seconds)", "DELETE"),
    "bss_worker": ("INSERT", "UPDATE", "DELETE"),
}
"""What running studies takes beside SELECT, by table. Who adds a table says it here."""

FUNCTIONS = ("bss_check_maker()", "bss_check_submitter()")
"""What our triggers call on PostgreSQL."""

SEQUENCES = tuple(
    f"bss_{table}_id_seq" for table in ("environment", "study", "trial", "probe", "visit", "branch", "submission")
)
"""What numbers the rows of tables on PostgreSQL."""


def role_statements(roles: Roles, schema: str) -> list[str]:
    """Return what makes the roles where they are not, and lets them into a schema."""
    return [
        *(
            # Roles are the whole server's: in another of its databases somebody may make them at the same moment.
            f"DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{name}') "
            f"THEN CREATE ROLE {name} NOLOGIN; END IF; "
            "EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$"
            for name in roles.names
        ),
        # Who is no superuser gives tables to a role of which they are a member only.
        f"DO $$ BEGIN IF NOT pg_has_role(current_user, '{roles.owner}', 'USAGE') "
        f"THEN GRANT {roles.owner} TO CURRENT_USER; END IF; END $$",
        # Until PostgreSQL 15 everybody may put functions beside our tables, for others to call unawares.
        f"REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC",
        f"GRANT USAGE ON SCHEMA {schema} TO {', '.join(roles.names)}",
        f"GRANT CREATE ON SCHEMA {schema} TO {roles.owner}",
    ]


def right_statements(roles: Roles, schema: str, version_table: str) -> list[str]:
    """Return what gives our tables to the owner and each role its rights on them, no less and no more."""
    tables = ", ".join([*WRITER_RIGHTS, version_table])
    return [
        *_owned(roles.owner, schema, [*WRITER_RIGHTS, version_table]),
        f"COMMENT ON TABLE {version_table} IS '{NOTE}{roles.prefix}'",
        f"REVOKE ALL ON {tables} FROM PUBLIC, {roles.reader}, {roles.writer}",
        f"GRANT SELECT ON {tables} TO {roles.reader}, {roles.writer}",
        *(f"GRANT {', '.join(rights)} ON {table} TO {roles.writer}" for table, rights in WRITER_RIGHTS.items()),
        f"GRANT USAGE ON SEQUENCE {', '.join(SEQUENCES)} TO {roles.writer}",
        # What a later version adds can be read at once; its upgrade gives the other rights on it.
        f"ALTER DEFAULT PRIVILEGES FOR ROLE {roles.owner} IN SCHEMA {schema} "
        f"GRANT SELECT ON TABLES TO {roles.reader}, {roles.writer}",
        f"ALTER DEFAULT PRIVILEGES FOR ROLE {roles.owner} IN SCHEMA {schema} "
        f"GRANT USAGE ON SEQUENCES TO {roles.writer}",
    ]


def _owned(owner: str, schema: str, tables: Sequence[str]) -> list[str]:
    """Return what gives our tables, with their sequences, and our functions to the owner, where they are not its.

    By their names alone: what others call alike would get the owner's rights.
    """
    things = [("TABLE", "pg_class", "relowner", f"{schema}.{name}", "regclass") for name in tables]
    things += [("FUNCTION", "pg_proc", "proowner", f"{schema}.{name}", "regprocedure") for name in FUNCTIONS]
    return [
        f"DO $$ BEGIN IF EXISTS (SELECT FROM {catalogue} WHERE oid = to_{kind}('{name}') "
        f"AND {owned_by} <> '{owner}'::regrole) THEN ALTER {what} {name} OWNER TO {owner}; END IF; END $$"
        for what, catalogue, owned_by, name, kind in things
    ]
