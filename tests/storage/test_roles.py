"""A team's roles and locks on a real server: rights of each role, and waits for other sessions."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege

from bssearch import DatabaseError, Launch, Store, UsageError, open_store, run_study
from bssearch.records import MemoryUse
from bssearch.spec.templates import NewSubmission, SubmissionState
from bssearch.storage import migrate
from bssearch.storage.connection import engine as connection_engine
from bssearch.storage.migrate import SEQUENCES, WRITER_RIGHTS, Roles, script
from bssearch.storage.models import METADATA
from tests.cli.task import bssearch, printed, refused
from tests.factories import make_environment, make_probe, make_spec
from tests.postgres import Postgres, running_postgres
from tests.search.law import LawExecutor
from tests.storage.conftest import OUTCOME, add_revision, add_study, start, store_in
from tests.storage.transfer.copies import copies, finish, make_study, rows

ROLES = Roles("team")
LOGINS = {"rita": ROLES.reader, "wanda": ROLES.writer, "will": ROLES.writer, "olga": ROLES.owner}

STATE = """
SELECT relname::text, relkind::text, relowner::regrole::text, ARRAY(SELECT unnest(relacl)::text ORDER BY 1),
  ARRAY(SELECT attname || unnest(attacl)::text FROM pg_attribute WHERE attrelid = pg_class.oid ORDER BY 1)
FROM pg_class WHERE relname LIKE 'bss%'
UNION ALL SELECT 'default', defaclobjtype::text, defaclrole::regrole::text,
  ARRAY(SELECT unnest(defaclacl)::text ORDER BY 1), '{}' FROM pg_default_acl
UNION ALL SELECT 'schema', '', '', ARRAY(SELECT unnest(nspacl)::text ORDER BY 1), '{}'
FROM pg_namespace WHERE nspname = 'public'
UNION ALL SELECT pg_get_functiondef(oid), 'f', proowner::regrole::text, '{}', '{}'
FROM pg_proc WHERE proname LIKE 'bss%'
UNION ALL SELECT pg_get_triggerdef(oid), 't', '', '{}', '{}' FROM pg_trigger WHERE tgname LIKE 'bss%'
UNION ALL SELECT pg_get_constraintdef(oid), conname::text, conrelid::regclass::text, '{}', '{}'
FROM pg_constraint WHERE conrelid::regclass::text LIKE 'bss%' AND contype <> 'n'
UNION ALL SELECT obj_description('bss_alembic_version'::regclass), 'c', '', '{}', '{}'
UNION ALL SELECT table_name || '.' || column_name, data_type, is_nullable, '{}', '{}'
FROM information_schema.columns WHERE table_name LIKE 'bss%'
"""
"""A database's tables, columns, checks, functions, triggers, owners and rights."""


@dataclass(frozen=True)
class Team:
    """A database on a server, with its logins."""

    server: Postgres
    database: str

    def url(self, login: str = "postgres") -> str:
        return self.server.url(self.database, user=login)

    def waiting_url(self, login: str) -> str:
        """With a lock timeout of 20 s, because code without a limit would hang the test."""
        return f"{self.url(login)}&options=-c%20lock_timeout%3D20s"

    def connect(self, login: str, program: str = "psql") -> psycopg.Connection:
        dsn = f"host={self.server.folder} user={login} dbname={self.database} application_name={program}"
        return psycopg.connect(dsn)

    def ask(self, login: str, statement: str) -> list[Any]:
        """Run a statement as a login; return its rows."""
        with self.connect(login) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def state(self) -> set[str]:
        return {repr(row) for row in self.ask("postgres", STATE)}


@pytest.fixture(scope="module")
def server(postgres: Postgres) -> Postgres:
    """A server with the team's roles and their members."""
    migrate.upgrade(postgres.create_database(), ROLES)
    for login, role in LOGINS.items():
        postgres.execute(f"CREATE ROLE {login} LOGIN", f"GRANT {role} TO {login}")
    return postgres


def new_team(server: Postgres, roles: Roles | None = ROLES, *, schema: bool = True) -> Team:
    url = server.create_database(schema=schema)
    if roles is not None:
        migrate.upgrade(url, roles)
    return Team(server, url.partition("@/")[2].partition("?")[0])


@pytest.fixture(scope="module")
def team(server: Postgres) -> Team:
    """A database with Wanda's study, and a study without a login."""
    made = new_team(server)
    with open_store(made.url("wanda")) as store:
        for name in ("hers", "old"):
            add_study(store, name)
            start(store, name)
    made.ask("postgres", "UPDATE bss_study SET login = NULL WHERE name = 'old'")
    return made


def test_every_table_and_sequence_has_its_rights() -> None:
    assert set(WRITER_RIGHTS) == set(METADATA.tables), "who adds a table says what a writer does with it"
    assert set(SEQUENCES) == {f"{name}_id_seq" for name, one in METADATA.tables.items() if "id" in one.columns}


def test_a_second_time_changes_nothing(server: Postgres) -> None:
    team = new_team(server)
    before = team.state()
    assert len(before) > 100
    for login in ("postgres", "olga"):
        assert migrate.upgrade(team.url(login), ROLES).before == migrate.SCHEMA_HEAD
        assert team.state() == before, login


def test_a_second_time_takes_back_what_was_given_beside(server: Postgres) -> None:
    team = new_team(server)
    before = team.state()
    team.ask("postgres", "GRANT SELECT ON bss_trial TO PUBLIC; GRANT DELETE ON bss_trial TO team_reader, team_writer")
    assert team.state() != before
    migrate.upgrade(team.url("olga"))
    assert team.state() == before


@pytest.mark.parametrize("there", ["nothing", "tables", "all"])
def test_the_printed_script_makes_the_same(server: Postgres, tmp_path: Path, there: str) -> None:
    printed = new_team(server, ROLES if there == "all" else None, schema=there != "nothing")
    file = tmp_path / "init.sql"
    file.write_text(script(ROLES))
    options = [
        "--quiet",
        "--set",
        "ON_ERROR_STOP=1",
        "--host",
        str(server.folder),
        "--username",
        "postgres",
        "--file",
        str(file),
    ]
    psql = subprocess.run([server.psql, *options, printed.database], capture_output=True, text=True, check=False)
    assert psql.returncode == 0, psql.stderr
    assert printed.state() == new_team(server, schema=False).state()
    migrate.check(printed.url("rita"))


def test_a_script_for_another_revision_changes_nothing(server: Postgres) -> None:
    team = new_team(server, None)
    team.ask("postgres", "UPDATE bss_alembic_version SET version_num = '0007'")
    before = team.state()
    with pytest.raises(psycopg.errors.RaiseException, match="revision 0007"):
        team.ask("postgres", script(ROLES))
    assert team.state() == before


NEXT = """
import sqlalchemy as sa
from alembic import op

revision = "{later}"
down_revision = "{head}"


def upgrade() -> None:
    op.create_table("bss_later", sa.Column("id", sa.Integer(), primary_key=True))
"""


def test_tables_of_a_later_version_belong_to_the_owner_and_are_readable(
    server: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = new_team(server)
    head, later = migrate.SCHEMA_HEAD, "0002_later"
    add_revision(monkeypatch, tmp_path / "migrations", later, NEXT.format(head=head, later=later))
    for login in ("rita", "wanda"):
        before = team.state()
        with pytest.raises(DatabaseError, match=f"'{login}' needs the role team_owner to upgrade") as caught:
            migrate.upgrade(team.url(login))
        assert f'GRANT team_owner TO "{login}"' in str(caught.value.hint)
        assert team.state() == before
    assert migrate.upgrade(team.url("olga")).before == head
    assert team.ask("rita", "SELECT * FROM bss_later") == []
    assert team.ask("wanda", "SELECT nextval('bss_later_id_seq')") == [(1,)]
    owner = "SELECT DISTINCT relowner::regrole::text FROM pg_class WHERE relname LIKE 'bss%' AND relkind = 'r'"
    assert team.ask("postgres", owner) == [("team_owner",)]


class TestWhoMakesThem:
    @pytest.fixture
    def team(self, server: Postgres) -> Iterator[Team]:
        """A database of Ada, who may create roles but is no superuser; Bob is a member without that right."""
        server.execute("CREATE ROLE ada LOGIN CREATEROLE", "CREATE ROLE bob LOGIN", "GRANT ada TO bob")
        made = new_team(server, None, schema=False)
        server.execute(f"ALTER DATABASE {made.database} OWNER TO ada")
        yield made
        server.execute(f"DROP DATABASE {made.database}", "DROP ROLE IF EXISTS own_reader, own_writer, own_owner")
        server.execute("DROP ROLE bob, ada")

    def test_who_may_make_roles_and_owns_the_database(self, team: Team) -> None:
        for _ in range(2):
            migrate.upgrade(team.url("ada"), Roles("own"))
        team.ask("ada", "GRANT own_reader TO bob")
        assert team.ask("bob", "SELECT count(*) FROM bss_trial") == [(0,)]

    def test_who_may_not_make_roles_is_told_to_print(self, team: Team) -> None:
        with pytest.raises(DatabaseError, match="'bob' lacks CREATEROLE and may not make other roles"):
            migrate.upgrade(team.url("bob"), Roles("own"))
        assert migrate.current(team.url()) is None

    def test_roles_of_another_prefix_are_refused(self, team: Team) -> None:
        migrate.upgrade(team.url("ada"), Roles("own"))
        with pytest.raises(UsageError, match="already has the roles own_reader, own_writer, own_owner"):
            migrate.upgrade(team.url(), ROLES)


REFUSED = {
    "rita": (
        "INSERT INTO bss_claim VALUES (1, 'a', 'b', now())",
        "UPDATE bss_trial SET steps = 1",
        "UPDATE bss_study SET revision = 1",
        "DELETE FROM bss_claim",
        "SELECT name FROM bss_study FOR UPDATE",
        "SELECT nextval('bss_trial_id_seq')",
    ),
    "wanda": (
        "UPDATE bss_study SET login = 'will'",
        "UPDATE bss_study SET created_by = 'will'",
        "UPDATE bss_study SET target_value = 0",
        "UPDATE bss_trial SET study_id = 1",
        "UPDATE bss_observation SET metric = 1",
        "UPDATE bss_alembic_version SET version_num = '0001'",
        "DELETE FROM bss_trial",
        "DELETE FROM bss_observation",
        "SELECT setval('bss_trial_id_seq', 1)",
    ),
}
NOBODYS = (
    "TRUNCATE bss_study CASCADE",
    "DROP TABLE bss_trial",
    "ALTER TABLE bss_study DISABLE TRIGGER bss_study_maker",
    "DROP TRIGGER bss_study_maker ON bss_study",
    "CREATE OR REPLACE FUNCTION bss_check_maker() RETURNS trigger LANGUAGE sql AS 'SELECT 1'",
    "CREATE TABLE public.mine (a INTEGER)",
    "ALTER TABLE bss_study OWNER TO SESSION_USER",
)


@pytest.mark.parametrize(
    ("login", "statement"), [(login, one) for login, own in REFUSED.items() for one in (*own, *NOBODYS)]
)
def test_a_role_has_no_right_beyond_its_own(team: Team, login: str, statement: str) -> None:
    with pytest.raises(InsufficientPrivilege):
        team.ask(login, statement)


def test_a_reader_reads_every_table(team: Team) -> None:
    for table in (*METADATA.tables, migrate.VERSION_TABLE):
        team.ask("rita", f"SELECT * FROM {table}")


KEEPING: dict[str, Callable[[Store, str], None]] = {
    "rename": lambda store, name: store.studies.rename(name, "another"),
    "archive": lambda store, name: store.studies.archive(name),
    "delete": lambda store, name: store.studies.delete(name),
}


class TestWhoseStudy:
    @pytest.fixture
    def made(self, server: Postgres) -> Team:
        """A database with a study of Wanda that is not running."""
        team = new_team(server)
        with open_store(team.url("wanda")) as store:
            add_study(store)
            store.trials.finish("toy", start(store), OUTCOME, steps_x_step_time_s=None)
        assert team.ask("rita", "SELECT name, login FROM bss_study") == [("toy", "wanda")]
        return team

    @pytest.mark.parametrize("doing", KEEPING)
    def test_another_writer_may_run_a_study_but_not_manage_it(self, made: Team, doing: str) -> None:
        with open_store(made.url("will")) as store:
            store.studies.update_spec("toy", {"workload": "digits", "note": 1})
            store.studies.bind("toy", make_environment())
            store.trials.finish("toy", start(store), OUTCOME, steps_x_step_time_s=None)
            with pytest.raises(DatabaseError, match="by wanda, who made it, and members of team_owner alone") as caught:
                KEEPING[doing](store, "toy")
            assert caught.value.exit_code == 4
            assert "CONTEXT" not in str(caught.value)
            assert [(one.name, one.archived_at, one.trials) for one in store.studies.summaries()] == [("toy", None, 2)]

    @pytest.mark.parametrize("login", ["wanda", "olga", "postgres"])
    @pytest.mark.parametrize("doing", KEEPING)
    def test_its_maker_and_owners_keep_it(self, made: Team, doing: str, login: str) -> None:
        with open_store(made.url(login)) as store:
            KEEPING[doing](store, "toy")
        left = made.ask("rita", "SELECT name, archived_at IS NULL, login FROM bss_study")
        kept = {"rename": [("another", True, "wanda")], "archive": [("toy", False, "wanda")], "delete": []}
        assert left == kept[doing]
        assert made.ask("rita", "SELECT count(*) FROM bss_trial") == [(0 if doing == "delete" else 1,)]

    def test_one_from_before_logins_is_kept_by_owners_alone(self, made: Team) -> None:
        made.ask("olga", "UPDATE bss_study SET login = NULL")
        with (
            open_store(made.url("wanda")) as store,
            pytest.raises(DatabaseError, match="by members of team_owner alone"),
        ):
            store.studies.archive("toy")
        with open_store(made.url("olga")) as store:
            store.studies.archive("toy")

    def test_no_role_creates_a_study_in_the_name_of_another(self, made: Team) -> None:
        copied = "name, spec, spec_hash, objective, target_metric, target_value, target_goal, created_by, created_at"
        made.ask(
            "will",
            f"INSERT INTO bss_study ({copied}, login) "
            f"SELECT 'forged', {copied.partition(', ')[2]}, 'wanda' FROM bss_study",
        )
        assert made.ask("rita", "SELECT login FROM bss_study WHERE name = 'forged'") == [("will",)]

    def test_a_function_with_a_name_like_ours_does_not_get_the_owners_rights(self, made: Team) -> None:
        made.server.execute("GRANT CREATE ON SCHEMA public TO PUBLIC", database=made.database)  # as before 15
        made.ask(
            "will",
            "CREATE FUNCTION public.bss_any(text) RETURNS void LANGUAGE plpgsql SECURITY DEFINER "
            "AS 'BEGIN EXECUTE $1; END'",
        )
        migrate.upgrade(made.url("postgres"), ROLES)
        with pytest.raises(InsufficientPrivilege):
            made.ask("will", "SELECT public.bss_any('DELETE FROM bss_trial')")
        with pytest.raises(InsufficientPrivilege):
            made.ask("will", "CREATE FUNCTION public.more() RETURNS int LANGUAGE sql AS 'SELECT 1'")

    def test_tables_that_shadow_the_catalogue_make_no_role_an_owner(self, made: Team) -> None:
        with pytest.raises(InsufficientPrivilege, match="who made it"):
            made.ask(
                "will",
                "CREATE TEMP TABLE pg_class AS SELECT oid, 'will'::regrole::oid AS relowner FROM pg_catalog.pg_class; "
                "DELETE FROM bss_study",
            )


def test_without_roles_who_made_a_study_keeps_it_too(server: Postgres) -> None:
    team = new_team(server, None)
    server.execute(
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO will, wanda",
        "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO will, wanda",
        database=team.database,
    )
    store_in(team.url("wanda"))
    with open_store(team.url("will")) as store, pytest.raises(DatabaseError, match="by wanda, who made it"):
        store.studies.delete("toy")
    with open_store(team.url("wanda")) as store:
        store.studies.delete("toy")


def test_a_user_without_a_role_sees_which_to_ask_for(server: Postgres, team: Team) -> None:
    server.execute("CREATE ROLE nina LOGIN")
    for login, write, role in (("nina", False, "reader"), ("nina", True, "writer"), ("rita", True, "writer")):
        with pytest.raises(DatabaseError, match=f"'{login}' needs the role team_{role} ") as caught:
            open_store(team.url(login), write=write)
        assert f'GRANT team_{role} TO "{login}"' in str(caught.value.hint)
    server.execute("GRANT team_reader TO nina")
    open_store(team.url("nina"), write=False).close()


@pytest.mark.slow
def test_writers_run_a_study_one_after_the_other(server: Postgres) -> None:
    team = new_team(server)
    for trials, login in ((5, "wanda"), (8, "will")):
        spec = make_spec(budget={"trials": trials, "trial_train_seconds": 10.0}, confirm={"top": 1, "runs": 2})
        run_study(spec, Launch(db=team.url(login), make_executor=lambda *_: LawExecutor()))
    assert team.ask("rita", "SELECT count(*) FROM bss_trial WHERE phase = 'search'") == [(8,)]
    assert team.ask("rita", "SELECT name, login FROM bss_study") == [(make_spec().name, "wanda")]


def test_a_writer_stores_all_that_is_measured(team: Team) -> None:
    with open_store(team.url("will")) as store:
        for fits in (True, False):
            store.probes.save_memory(
                "hers", make_environment(), MemoryUse(micro_batch_size=8, fits=fits, peak_memory_bytes=None)
            )
        store.probes.add_step_time("hers", make_environment(), make_probe(8))
        for text in ("first", "second"):
            store.trials.save_log("hers", 1, text)
            store.findings.save("hers", "stamp", {"text": text})
        for _ in range(2):
            assert store.leases.claim("hers", "confirm", owner="me", lease_seconds=9, is_alive=lambda owner: True)
        store.leases.release("hers", "confirm", owner="me")
        assert (store.trials.log("hers", 1), store.findings.last("hers")) == ("second", {"text": "second"})


def test_a_writer_imports_new_rows_of_a_study(server: Postgres, tmp_path: Path) -> None:
    team = new_team(server)
    with open_store(f"sqlite:///{tmp_path}/source.db") as source, open_store(team.url("will")) as store:
        make_study(source)
        store.transfer.join(copies(source))
        store.findings.save("toy", store.findings.stamp("toy"), {"made_by": 1, "answer": {}})
        finish(source, start(source))
        source.probes.add_step_time("toy", make_environment(), make_probe(8))
        source.findings.save("toy", source.findings.stamp("toy"), {"quick": {"runs": [1]}})
        assert store.transfer.join(copies(source))[0].is_changed
        assert rows(store) == rows(source)


def test_init_on_the_command_line(server: Postgres, tmp_path: Path) -> None:
    team = new_team(server, None, schema=False)
    asked = ("db", "init", "--roles", "--prefix", "team", "--db", team.url())
    assert printed(tmp_path, *asked, "--print") == script(ROLES)
    assert migrate.current(team.url()) is None, "printing changes no database"
    assert "team_reader, team_writer, team_owner" in printed(tmp_path, *asked)
    assert printed(tmp_path, "db", "init", "--db", team.url("wanda")) == f"schema at {migrate.SCHEMA_HEAD}, unchanged\n"


@pytest.mark.parametrize(
    "options",
    [
        ("--roles",),
        ("--roles", "--print", "--db", "sqlite:///some.db"),
        ("--prefix", "team"),
        ("--roles", "--prefix", "pg_a; DROP"),
    ],
)
def test_init_refuses_roles_of_a_file_and_invalid_names(tmp_path: Path, options: tuple[str, ...]) -> None:
    refused(tmp_path, "db", "init", *options, code=2)
    assert list(tmp_path.iterdir()) == []


def test_without_a_database_the_statements_are_printed(tmp_path: Path) -> None:
    assert printed(tmp_path, "db", "init", "--roles", "--print") == script(Roles())
    assert list(tmp_path.iterdir()) == []


def test_init_makes_a_file(tmp_path: Path) -> None:
    assert bssearch("db", "init", cwd=tmp_path).stdout == f"schema at {migrate.SCHEMA_HEAD}\n"
    assert bssearch("db", "init", cwd=tmp_path).stdout == f"schema at {migrate.SCHEMA_HEAD}, unchanged\n"


# Locks ----------------------------------------------------------------------------------------------------------------


SESSIONS = 50
FORMER_KEYS = ("bss_submission", "bss_study joined", migrate.VERSION_TABLE)
"""Advisory locks of earlier versions."""

SPEC = make_spec(budget={"trials": 6, "trial_train_seconds": 10.0}, confirm={"runs": 0})


@pytest.fixture(scope="module")
def large_server() -> Iterator[Postgres]:
    with running_postgres("max_connections = 120\n") as own:
        migrate.upgrade(own.create_database(), ROLES)
        for login, role in LOGINS.items():
            own.execute(f"CREATE ROLE {login} LOGIN", f"GRANT {role} TO {login}")
        yield own


@pytest.fixture
def group(large_server: Postgres) -> Team:
    return new_team(large_server)


@pytest.fixture
def reader(group: Team) -> Iterator[None]:
    """A reader with 50 open transactions that hold every lock a reader may take."""
    with ExitStack() as stack:
        connections = [stack.enter_context(group.connect("rita")) for _ in range(SESSIONS)]
        for connection in connections:
            connection.execute("BEGIN ISOLATION LEVEL SERIALIZABLE")
            for table in (*METADATA.tables, migrate.VERSION_TABLE):
                connection.execute(f"LOCK TABLE {table} IN ACCESS SHARE MODE".encode())
                connection.execute(f"SELECT * FROM {table}".encode())
        for key in FORMER_KEYS:
            connections[0].execute("SELECT pg_advisory_lock(hashtext(%s))", [key])
        yield


def later_version(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """Simulate a later version with a revision that alters two tables; return the revision."""
    later = "0002_later"
    source = (
        f"from alembic import op\nrevision = {later!r}\ndown_revision = {migrate.SCHEMA_HEAD!r}\n"
        "def upgrade() -> None:\n"
        "    for table in ('bss_study', 'bss_submission'):\n"
        "        op.execute(f'ALTER TABLE {table} ADD COLUMN note TEXT')\n"
    )
    add_revision(monkeypatch, folder / "migrations", later, source)
    return later


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_engine, "LONGEST_WAIT_S", 3.0)


def submission(name: str) -> NewSubmission:
    return NewSubmission(name=name, template="digits", values={"budget.trials": 4}, owner="ann")


@pytest.mark.slow
@pytest.mark.usefixtures("reader")
def test_a_reader_with_open_transactions_blocks_no_writer(group: Team, tmp_path: Path) -> None:
    with open_store(group.waiting_url("wanda")) as store, open_store(f"sqlite:///{tmp_path}/other.db") as other:
        store.queue.submit(submission("mine"))
        assert store.queue.set_state("mine", SubmissionState.CANCELLED, "").state is SubmissionState.CANCELLED
        make_study(other)
        assert store.transfer.join(copies(other))[0].is_new
    run_study(SPEC, Launch(db=group.waiting_url("wanda"), make_executor=lambda *_: LawExecutor()))
    with open_store(group.waiting_url("rita"), write=False) as store:
        assert len(store.trials.of(SPEC.name)) == SPEC.budget.trials
    for login in ("wanda", "olga"):
        assert migrate.upgrade(group.waiting_url(login)).before == migrate.SCHEMA_HEAD


@pytest.mark.slow
@pytest.mark.usefixtures("reader")
def test_an_upgrade_that_readers_block_names_them_and_changes_nothing(
    group: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = migrate.SCHEMA_HEAD
    later_version(monkeypatch, tmp_path)
    monkeypatch.setattr(connection_engine, "LONGEST_WAIT_S", 1.0)
    with pytest.raises(DatabaseError, match=r"waited 1 s for a lock.*pid \d+ of rita \(psql\)") as caught:
        migrate.upgrade(group.waiting_url("olga"))
    assert "pg_terminate_backend(" in str(caught.value.hint)
    assert migrate.current(group.waiting_url("rita")) == head


@pytest.mark.slow
def test_an_upgrade_succeeds_once_readers_are_gone(
    group: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = later_version(monkeypatch, tmp_path)
    assert migrate.upgrade(group.waiting_url("olga")).after == later
    assert migrate.current(group.waiting_url("rita")) == later


def submit(group: Team) -> None:
    with open_store(group.waiting_url("olga")) as store:
        store.queue.submit(submission("mine"))


def upgrade(group: Team) -> None:
    migrate.upgrade(group.waiting_url("olga"))


@pytest.mark.slow
@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize(
    ("statement", "work"),
    [
        ("LOCK TABLE bss_submission IN SHARE UPDATE EXCLUSIVE MODE", submit),
        ("LOCK TABLE bss_alembic_version IN EXCLUSIVE MODE", upgrade),
    ],
    ids=["submit", "upgrade"],
)
def test_a_writer_that_holds_a_lock_is_named(group: Team, statement: str, work: Callable[[Team], None]) -> None:
    with group.connect("postgres", "maintenance") as holder:
        pid = holder.info.backend_pid
        holder.execute(statement.encode())
        with pytest.raises(DatabaseError, match=rf"pid {pid} of postgres \(maintenance\)"):
            work(group)
        holder.rollback()
    work(group)


@pytest.mark.slow
@pytest.mark.usefixtures("short_waits")
def test_a_first_upgrade_that_another_session_prevents_names_it(large_server: Postgres) -> None:
    group = new_team(large_server, None, schema=False)
    with group.connect("postgres", "elsewhere") as holder:
        holder.execute(f"CREATE TABLE {migrate.VERSION_TABLE} (version_num VARCHAR(32) PRIMARY KEY)".encode())
        with pytest.raises(DatabaseError, match=r"of postgres \(elsewhere\)"):
            migrate.upgrade(group.waiting_url("postgres"))
        holder.rollback()
    assert migrate.upgrade(group.waiting_url("postgres")).before is None


@pytest.mark.slow
def test_a_table_committed_by_another_session_is_used(large_server: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    has_table = migrate._has_version_table
    answers = iter([False])
    monkeypatch.setattr(migrate, "_has_version_table", lambda connection: next(answers, has_table(connection)))
    columns = f"version_num VARCHAR(32) NOT NULL, CONSTRAINT {migrate.VERSION_TABLE}_pkc PRIMARY KEY (version_num)"
    group = new_team(large_server, None, schema=False)
    with group.connect("postgres") as other:
        other.execute(f"CREATE TABLE {migrate.VERSION_TABLE} ({columns})".encode())
    assert migrate.upgrade(group.waiting_url("postgres")).before is None
    migrate.check(group.waiting_url("postgres"))
