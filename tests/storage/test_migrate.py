import importlib
import logging
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text

from bssearch import DatabaseError, SchemaError, open_store
from bssearch.settings import packaged_folder
from bssearch.storage import migrate
from bssearch.storage.connection.engine import opened_engine, writing
from bssearch.storage.models import METADATA
from tests.postgres import Postgres
from tests.schema import execute
from tests.storage.conftest import add_revision, begun, store_in

pytestmark = pytest.mark.usefixtures("migrations")

HEAD = migrate.SCHEMA_HEAD
LATER = "0002_note"
"""Revision of a simulated later version."""

NEXT = f"""
import sqlalchemy as sa
from alembic import op

revision = "{LATER}"
down_revision = "{HEAD}"


def upgrade() -> None:
    recreate = "always" if op.get_bind().dialect.name == "sqlite" else "never"
    with op.batch_alter_table("bss_study", recreate=recreate) as table:
        table.add_column(sa.Column("note", sa.Text(), nullable=True))
    FAIL


def downgrade() -> None:
    op.drop_column("bss_study", "note")
"""


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    with opened_engine(empty_url) as opened:
        yield opened


def _config(connection: object) -> Config:
    config = Config()
    config.set_main_option("script_location", str(packaged_folder("migrations")))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _next_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, then: str = "pass") -> None:
    add_revision(monkeypatch, tmp_path / "later 100%", LATER, NEXT.replace("FAIL", then))


def _described(engine: Engine) -> dict[str, Any]:
    """A database's description of our tables, sorted."""
    inspector = inspect(engine)
    tables = sorted(name for name in inspector.get_table_names() if name != migrate.VERSION_TABLE)
    return {
        table: {
            "columns": sorted(
                (column["name"], str(column["type"]), column["nullable"]) for column in inspector.get_columns(table)
            ),
            "primary key": inspector.get_pk_constraint(table),
            **{
                kind: sorted(getattr(inspector, f"get_{kind}")(table), key=lambda one: str(one["name"]))
                for kind in ("foreign_keys", "unique_constraints", "check_constraints", "indexes")
            },
        }
        for table in tables
    }


class TestRevisions:
    def test_the_constants_are_what_alembic_finds(self) -> None:
        scripts = ScriptDirectory.from_config(_config(None))
        assert scripts.get_heads() == [migrate.SCHEMA_HEAD]
        assert tuple(reversed([script.revision for script in scripts.walk_revisions()])) == migrate.REVISIONS

    def test_the_migrations_match_the_models(self, empty_url: str, engine: Engine) -> None:
        migrate.upgrade(empty_url)
        described = _described(engine)
        with writing(engine) as connection:
            METADATA.drop_all(connection)
        assert _described(engine) == {}
        with writing(engine) as connection:
            METADATA.create_all(connection)
        assert described == _described(engine)
        assert len(described) == 13
        if engine.dialect.name == "sqlite":
            assert all(one["name"] for table in described.values() for one in table["check_constraints"])

    @pytest.mark.slow
    def test_down_and_up_again(self, empty_url: str, engine: Engine) -> None:
        migrate.upgrade(empty_url)
        before = _described(engine)
        with writing(engine) as connection:
            command.downgrade(_config(connection), "base")
        assert _described(engine) == {}
        assert migrate.current(engine) is None
        migrate.upgrade(empty_url)
        assert _described(engine) == before

    @pytest.mark.slow
    def test_a_database_at_rest_needs_neither_alembic_nor_a_look_for_faults(
        self, sqlite_url: str, postgres: Postgres
    ) -> None:
        urls = sqlite_url, postgres.cleared_database()
        for url in urls:
            open_store(url).close()
        code = (
            "import sys; from bssearch.storage.repository import open_store;"
            "[open_store(url, write=write).close() for url in sys.argv[1:] for write in (True, False)];"
            "sys.exit(bool({'alembic', 'bssearch.storage.integrity'} & sys.modules.keys()))"
        )
        assert subprocess.run([sys.executable, "-c", code, *urls], check=False).returncode == 0

    def test_migrations_without_our_connection_say_what_to_do(self) -> None:
        with pytest.raises(RuntimeError, match="bssearch db upgrade"):
            command.upgrade(_config(None), "head")


class TestUpgrade:
    def test_from_nothing(self, empty_url: str, path: Path) -> None:
        done = migrate.upgrade(empty_url)
        assert done == migrate.Upgrade(before=None, after=migrate.SCHEMA_HEAD)
        assert str(done) == migrate.SCHEMA_HEAD
        assert migrate.current(empty_url) == migrate.SCHEMA_HEAD
        migrate.check(empty_url)
        assert migrate.upgrade(empty_url) == migrate.Upgrade(before=migrate.SCHEMA_HEAD, after=migrate.SCHEMA_HEAD)
        made = [path.name] if empty_url.startswith("sqlite") else []
        assert [file.name for file in path.parent.iterdir()] == made

    @pytest.mark.parametrize("tables", [0, 1])
    def test_it_says_nothing(
        self,
        sqlite_url: str,
        path: Path,
        tables: int,
        capfd: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        importlib.import_module("alembic.command")
        level = logging.getLogger().level
        if tables:  # as during the upgrade by another process
            execute(path, f"CREATE TABLE {migrate.VERSION_TABLE} (version_num VARCHAR(32) NOT NULL)")
        told: list[str] = []
        open_store(sqlite_url, notify=told.append).close()
        assert told == []
        assert capfd.readouterr() == ("", "")
        assert logging.getLogger().level == level

    @pytest.mark.slow
    def test_a_sqlite_file_is_copied_then_upgraded_when_opened_for_writing(
        self, sqlite_url: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with open_store(sqlite_url) as store:
            begun(store)
            # The log of an open store holds what the file does not yet: the copy must have both.
            with monkeypatch.context() as patch:
                _next_version(patch, tmp_path)
                with pytest.raises(SchemaError, match=f"at revision {HEAD}; this version needs {LATER}"):
                    open_store(sqlite_url, write=False)
                assert not list(tmp_path.glob("*.bak"))
                told: list[str] = []
                with open_store(sqlite_url, notify=told.append) as later:
                    assert later.studies.get("toy").name == "toy"
                    assert [trial.number for trial in later.trials.of("toy")] == [1]
                assert migrate.current(sqlite_url) == LATER
        copy = path.with_name(f"{path.name}.before-{LATER}.bak")
        assert told == [f"upgraded the schema of {path} from {HEAD} to {LATER} (backup: {copy})"]
        assert copy.exists()
        assert not list(tmp_path.glob("*.part"))
        assert migrate.current(f"sqlite:///{copy}") == HEAD
        with open_store(f"sqlite:///{copy}", write=False) as old:
            assert [trial.number for trial in old.trials.of("toy")] == [1]

    def test_an_upgrade_names_its_copy(
        self, sqlite_url: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        migrate.upgrade(sqlite_url)
        path.chmod(0o640)
        _next_version(monkeypatch, tmp_path)
        done = migrate.upgrade(sqlite_url)
        assert (done.before, done.after) == (HEAD, LATER)
        assert done.copy == path.with_name(f"{path.name}.before-{LATER}.bak")
        assert done.copy.stat().st_mode & 0o777 == 0o640
        assert str(done.copy) in str(done)

    @pytest.mark.slow
    @pytest.mark.parametrize("then", ["raise RuntimeError('half way')", "op.execute('DELETE FROM bss_study')"])
    def test_a_failed_upgrade_changes_no_data(
        self, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
    ) -> None:
        store_in(sqlite_url, begun)
        with monkeypatch.context() as patch:
            _next_version(patch, tmp_path, then)
            with pytest.raises((RuntimeError, DatabaseError), match=r"half way|database is unchanged"):
                migrate.upgrade(sqlite_url)
        assert migrate.current(sqlite_url) == HEAD
        with open_store(sqlite_url, write=False) as store:
            assert len(store.trials.of("toy")) == 1

    @pytest.mark.slow
    def test_the_next_upgrade_completes_one_that_was_killed(
        self, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store_in(sqlite_url, begun)
        with monkeypatch.context() as patch:
            _next_version(patch, tmp_path, "import os; os.kill(os.getpid(), 9)")
            if (child := os.fork()) == 0:
                migrate.upgrade(sqlite_url)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert migrate.current(sqlite_url) == HEAD
        with monkeypatch.context() as patch:
            _next_version(patch, tmp_path / "again")
            assert migrate.upgrade(sqlite_url).after == LATER
        monkeypatch.undo()
        with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as connection:
            assert connection.execute("SELECT count(*) FROM bss_trial").fetchone() == (1,)

    @pytest.mark.parametrize(
        ("revision", "said", "ways_out"),
        [
            ("0099", r"unknown revision 0099", []),
            ("0016", "revision 0016", ["bssearch export STUDY --to study", "bssearch import study"]),
        ],
        ids=["newer", "of before the first release"],
    )
    def test_a_schema_that_this_version_does_not_know_is_refused_for_reading_and_writing(
        self, empty_url: str, engine: Engine, revision: str, said: str, ways_out: list[str]
    ) -> None:
        migrate.upgrade(empty_url)
        with writing(engine) as connection:
            connection.execute(text(f"UPDATE {migrate.VERSION_TABLE} SET version_num = '{revision}'"))
        for write in (True, False):
            with pytest.raises(SchemaError, match=said) as caught:
                open_store(empty_url, write=write)
            assert caught.value.exit_code == 4
            assert [way for way in ways_out if way not in str(caught.value.hint)] == []
        with pytest.raises(SchemaError, match=said):
            migrate.upgrade(empty_url)

    def test_a_server_is_never_upgraded_unasked(
        self, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        empty, ours = postgres.create_database(schema=False), postgres.create_database()
        store_in(ours, begun)
        with monkeypatch.context() as patch:
            _next_version(patch, tmp_path)
            for url, message in ((empty, "has no bssearch tables"), (ours, f"at revision {HEAD}; .* needs {LATER}")):
                for write in (True, False):
                    with pytest.raises(SchemaError, match=message) as caught:
                        open_store(url, write=write)
                    assert caught.value.exit_code == 4
            assert migrate.upgrade(ours) == migrate.Upgrade(before=HEAD, after=LATER)
            with open_store(ours) as store:
                assert [trial.number for trial in store.trials.of("toy")] == [1]

    def test_one_that_fails_on_a_server_changes_nothing(
        self, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url = postgres.create_database()
        with monkeypatch.context() as patch:
            _next_version(patch, tmp_path, "raise RuntimeError('half way')")
            with pytest.raises(RuntimeError, match="half way"):
                migrate.upgrade(url)
        assert migrate.current(url) == HEAD
        open_store(url).close()


class TestForeignTables:
    def test_another_program_in_the_same_file_is_left_alone(self, sqlite_url: str, path: Path) -> None:
        execute(path, "CREATE TABLE alembic_version AS SELECT 'v3.2.0.a' AS version_num")
        execute(path, "CREATE TABLE studies AS SELECT 1 AS study_id, 'theirs' AS study_name")
        assert migrate.current(sqlite_url) is None
        with pytest.raises(SchemaError, match="no bssearch tables"):
            open_store(sqlite_url, write=False)
        told: list[str] = []
        open_store(sqlite_url, notify=told.append).close()
        assert "has tables of another program, such as 'alembic_version'" in told[0]
        assert not list(path.parent.glob("*.bak"))
        assert execute(path, "SELECT * FROM alembic_version") == [("v3.2.0.a",)]
        assert execute(path, "SELECT * FROM studies") == [(1, "theirs")]
