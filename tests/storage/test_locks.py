"""Locks on a real server: readers block no writer, and messages name the blocking session."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from bssearch.commands.launch import Launch
from bssearch.commands.run import run_study
from bssearch.errors import DatabaseError
from bssearch.spec.templates import NewSubmission, SubmissionState
from bssearch.storage import migrate
from bssearch.storage.connection import engine
from bssearch.storage.migrate import Roles
from bssearch.storage.models import Base
from bssearch.storage.repository import open_store
from tests.factories import make_spec
from tests.postgres import Postgres, running_postgres
from tests.search.law import LawExecutor
from tests.storage.conftest import add_revision
from tests.storage.transfer.copies import copies, make_study

pytestmark = pytest.mark.slow

SESSIONS = 50
ROLES = Roles("team")
LOGINS = {"rita": ROLES.reader, "wanda": ROLES.writer, "olga": ROLES.owner}

FORMER_KEYS = ("bss_submission", "bss_study joined", migrate.VERSION_TABLE)
"""Advisory locks of earlier versions."""

SPEC = make_spec(budget={"trials": 6, "trial_train_seconds": 10.0}, confirm={"runs": 0})


@dataclass(frozen=True)
class Team:
    """A database with a login per role."""

    server: Postgres
    database: str

    def url(self, login: str) -> str:
        """With a lock timeout of 20 s, because code without a limit would hang the test."""
        return f"{self.server.url(self.database, user=login)}&options=-c%20lock_timeout%3D20s"

    def connect(self, login: str, program: str = "psql") -> psycopg.Connection:
        dsn = f"host={self.server.folder} user={login} dbname={self.database} application_name={program}"
        return psycopg.connect(dsn)


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with running_postgres("max_connections = 120\n") as own:
        migrate.upgrade(own.create_database(), ROLES)
        for login, role in LOGINS.items():
            own.execute(f"CREATE ROLE {login} LOGIN", f"GRANT {role} TO {login}")
        yield own


@pytest.fixture
def team(server: Postgres) -> Team:
    url = server.create_database()
    migrate.upgrade(url, ROLES)
    return Team(server, url.partition("@/")[2].partition("?")[0])


@pytest.fixture
def reader(team: Team) -> Iterator[None]:
    """A reader with 50 open transactions that hold every lock a reader may take."""
    with ExitStack() as stack:
        connections = [stack.enter_context(team.connect("rita")) for _ in range(SESSIONS)]
        for connection in connections:
            connection.execute("BEGIN ISOLATION LEVEL SERIALIZABLE")
            for table in (*Base.metadata.tables, migrate.VERSION_TABLE):
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
    monkeypatch.setattr(engine, "LONGEST_WAIT_S", 3.0)


def submission(name: str) -> NewSubmission:
    return NewSubmission(name=name, template="digits", values={"budget.trials": 4}, owner="ann")


@pytest.mark.usefixtures("reader")
def test_a_reader_with_open_transactions_blocks_no_writer(team: Team, tmp_path: Path) -> None:
    with open_store(team.url("wanda")) as store, open_store(f"sqlite:///{tmp_path}/other.db") as other:
        store.queue.submit(submission("mine"))
        assert store.queue.set_state("mine", SubmissionState.CANCELLED, "").state is SubmissionState.CANCELLED
        make_study(other)
        assert store.transfer.join(copies(other))[0].is_new
    run_study(SPEC, Launch(db=team.url("wanda"), make_executor=lambda *_: LawExecutor()))
    with open_store(team.url("rita"), write=False) as store:
        assert len(store.trials.of(SPEC.name)) == SPEC.budget.trials
    for login in ("wanda", "olga"):
        assert migrate.upgrade(team.url(login)).before == migrate.SCHEMA_HEAD


@pytest.mark.usefixtures("reader")
def test_an_upgrade_that_readers_block_names_them_and_changes_nothing(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = migrate.SCHEMA_HEAD
    later_version(monkeypatch, tmp_path)
    monkeypatch.setattr(engine, "LONGEST_WAIT_S", 1.0)
    with pytest.raises(DatabaseError, match=r"waited 1 s for a lock.*pid \d+ of rita \(psql\)") as caught:
        migrate.upgrade(team.url("olga"))
    assert "pg_terminate_backend(" in str(caught.value.hint)
    assert migrate.current(team.url("rita")) == head


def test_an_upgrade_succeeds_once_readers_are_gone(team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = later_version(monkeypatch, tmp_path)
    assert migrate.upgrade(team.url("olga")).after == later
    assert migrate.current(team.url("rita")) == later


def submit(team: Team) -> None:
    with open_store(team.url("olga")) as store:
        store.queue.submit(submission("mine"))


def upgrade(team: Team) -> None:
    migrate.upgrade(team.url("olga"))


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize(
    ("statement", "work"),
    [
        ("LOCK TABLE bss_submission IN SHARE UPDATE EXCLUSIVE MODE", submit),
        ("LOCK TABLE bss_alembic_version IN EXCLUSIVE MODE", upgrade),
    ],
    ids=["submit", "upgrade"],
)
def test_a_writer_that_holds_a_lock_is_named(team: Team, statement: str, work: Callable[[Team], None]) -> None:
    with team.connect("postgres", "maintenance") as holder:
        pid = holder.info.backend_pid
        holder.execute(statement.encode())
        with pytest.raises(DatabaseError, match=rf"pid {pid} of postgres \(maintenance\)"):
            work(team)
        holder.rollback()
    work(team)


@pytest.mark.usefixtures("short_waits")
def test_a_first_upgrade_that_another_session_prevents_names_it(server: Postgres) -> None:
    team = Team(server, server.create_database(schema=False).partition("@/")[2].partition("?")[0])
    with team.connect("postgres", "elsewhere") as holder:
        holder.execute(f"CREATE TABLE {migrate.VERSION_TABLE} (version_num VARCHAR(32) PRIMARY KEY)".encode())
        with pytest.raises(DatabaseError, match=r"of postgres \(elsewhere\)"):
            migrate.upgrade(team.url("postgres"))
        holder.rollback()
    assert migrate.upgrade(team.url("postgres")).before is None


def test_a_table_that_another_session_commits_meanwhile_is_used(
    server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.create_database(schema=False)
    has_table = migrate._has_version_table
    answers = iter([False])
    monkeypatch.setattr(migrate, "_has_version_table", lambda connection: next(answers, has_table(connection)))
    columns = f"version_num VARCHAR(32) NOT NULL, CONSTRAINT {migrate.VERSION_TABLE}_pkc PRIMARY KEY (version_num)"
    team = Team(server, url.partition("@/")[2].partition("?")[0])
    with team.connect("postgres") as other:
        other.execute(f"CREATE TABLE {migrate.VERSION_TABLE} ({columns})".encode())
    assert migrate.upgrade(team.url("postgres")).before is None
    migrate.check(team.url("postgres"))
