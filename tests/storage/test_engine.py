"""Database URLs, SQLite files, and file systems that several machines share."""

import sqlite3
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
from sqlalchemy import URL, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.schema import CreateTable

from bssearch import DatabaseError, SchemaError, UsageError, open_store
from bssearch.settings import DEFAULT_DATABASE_URL, NETWORK_FILE_VARIABLE, database_url
from bssearch.storage.connection.engine import (
    ConnectionLostError,
    as_database_error,
    file_system_of,
    is_shared_by_machines,
    looking,
    masked,
    opened_engine,
    parse_url,
    reading,
    without_secrets,
    writing,
)
from bssearch.storage.models import METADATA, UtcDateTime
from tests.postgres import Postgres
from tests.storage.conftest import add_study, begun, start, store_in

# URLs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((one, "is not a database URL") for one in ("", "sqlite", "://", "host=h password=secret user=u")),
        *((one, "is not a database URL") for one in ("postgresql//u:secret@h/d", "u:secret@h")),
        ("user=u password = 'so & secret' host=h", "is not a database URL"),
        ("postgresql://u:secret@h:port/d", "is not a database URL"),
        ("out/runs.db", "sqlite:///FILE"),
        ("postgresql://u:secret@h:99999/d", "the port 99999 must be from 1 to 65535"),
        ("postgresql://u:secret@h:0/d", "the port 0 must be from 1 to 65535"),
        *((one, "unsupported scheme") for one in ("mysql://u:secret@h/d", "nosuch://h/d", "sqlite+aiosqlite:///a.db")),
        *((one, "sqlite:///") for one in ("sqlite://", "sqlite:///:memory:", "sqlite:///a.db?mode=ro")),
        *((one, "sqlite:///") for one in ("sqlite:///file:a.db", "sqlite://runs.db")),
        *((one, "%40") for one in ("postgresql://u:se@secret@h/d", "postgresql://u:se@/secret@h/d")),
        *((one, "%40") for one in ("postgresql://u:se@x/d?secret@h/d", "postgresql://u:se@x:secret@h/d")),
        *((one, "%40") for one in ("postgresql://u/x:secret@h/d", "postgresql://u:x@h/d\npostgresql://u:secret@h/d")),
        *((f"{one}u:secret@h/d", "") for one in ("postgresql:/", "postgresql:", "postgres//", "postgresql:///")),
        *((f"postgresql://u:secret{one}", "") for one in ("", "/d", "?x=1")),
        *((f"{one}://u:secret@h/d", "") for one in ("'postgresql", "psql postgresql", "postgers")),
    ],
)
def test_a_foreign_url_is_refused_and_its_password_is_hidden(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_url(text)
    shown = f"{caught.value} {caught.value.hint} " + "".join(traceback.format_exception(caught.value))
    assert said in shown
    assert "secret" not in shown.replace(f'"{text}"', "")


@pytest.mark.parametrize("name", ["password", "pasword", "PASSWORD", "passwd", "pass_word", "sslpassword"])
def test_an_option_that_was_meant_to_be_the_password_is_masked(name: str) -> None:
    url = parse_url(f"postgresql://h/d?user=u&{name}=secret&application_name=a")
    assert masked(url).count("***") == 1
    assert "secret" not in masked(url) + masked(f"host=h {name} = secret") + without_secrets("secret", url)
    assert "application_name=a" in masked(url)


def test_an_escaped_at_sign_and_space_around_a_url_are_taken() -> None:
    url = parse_url("\npostgresql://u:p%40ss@h/d?sslpassword=a%40b \n")
    assert (url.password, url.host, url.database, url.query["sslpassword"]) == ("p@ss", "h", "d", "a@b")
    assert masked(url) == "postgresql://u:***@h/d?sslpassword=***"
    assert parse_url("sqlite:///a@b@c.db").database == "a@b@c.db"


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_a_missing_driver_is_answered_with_the_extra(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UsageError, match="psycopg") as caught:
        parse_url(f"{scheme}://u:secret@h/d")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:se:c@ret@h/d", "postgresql://u:***@h/d"),
        ("sqlite:///a.db", "sqlite:///a.db"),
        ("postgresql://h/d?user=u&password=secret&x=1", "postgresql://h/d?user=u&password=***&x=1"),
        (parse_url("sqlite:///a.db"), "sqlite:///a.db"),
        (make_url("postgresql://u:se@cret@h/d"), "postgresql://u:***@h/d"),
        (parse_url("postgresql://u:x@h/d?password=secret"), "postgresql://u:***@h/d?password=***"),
    ],
)
def test_masking_hides_the_password_alone(url: str | URL, shown: str) -> None:
    assert masked(url) == shown


# Connections ----------------------------------------------------------------------------------------------------------


def test_a_reader_sees_one_state_and_keeps_no_writer_waiting(empty_url: str) -> None:
    with opened_engine(empty_url) as engine:
        with writing(engine) as connection:
            connection.execute(text("CREATE TABLE t (a INTEGER)"))
        with reading(engine) as reader:
            assert reader.execute(text("SELECT count(*) FROM t")).scalar_one() == 0
            with writing(engine) as writer:
                writer.execute(text("INSERT INTO t VALUES (1)"))
            assert reader.execute(text("SELECT count(*) FROM t")).scalar_one() == 0


def test_only_one_of_several_server_connections_is_kept(postgres: Postgres) -> None:
    with opened_engine(postgres.create_database(schema=False)) as engine:
        count = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        with reading(engine), reading(engine) as connection:
            assert connection.execute(count).scalar_one() == 2
        with looking(engine) as connection:
            for _ in range(100):  # the server takes a moment to let the other go
                if (found := connection.execute(count).scalar_one()) == 1:
                    break
                time.sleep(0.05)
    assert found == 1


def test_a_connection_that_the_server_closed_is_lost_whatever_the_reason(postgres: Postgres) -> None:
    with opened_engine(postgres.create_database(schema=False)) as engine, engine.connect() as connection:
        connection.execute(text("SET idle_session_timeout = 50"))
        connection.commit()
        with pytest.raises(OperationalError, match="idle-session timeout") as caught:
            for _ in range(50):
                time.sleep(0.1)
                connection.execute(text("SELECT 1"))
                connection.commit()
    assert isinstance(as_database_error(caught.value, engine.url), ConnectionLostError)


@pytest.mark.parametrize(("unasked", "pings"), [(3600.0, 0), (0.0, 2)])
def test_only_an_idle_connection_is_checked_before_use(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, unasked: float, pings: int
) -> None:
    asked: list[object] = []
    with opened_engine(postgres.create_database(schema=False)) as engine:
        monkeypatch.setattr("bssearch.storage.connection.engine.UNASKED_S", unasked)

        def ping(connection: object) -> bool:
            asked.append(connection)
            return True

        monkeypatch.setattr(engine.dialect, "do_ping", ping)
        for _ in range(3):
            with looking(engine) as connection:
                connection.execute(text("SELECT 1"))
    assert len(asked) == pings, "a new one is not asked"


def test_messages_of_a_driver_hide_the_passwords_of_urls() -> None:
    url = parse_url("postgresql://u:p%40ss@h/d?sslpassword=other")
    assert without_secrets("p@ss or other is wrong for u", url) == "*** or *** is wrong for u"
    assert without_secrets("all is well", parse_url("sqlite:///a.db")) == "all is well"


# SQLite ---------------------------------------------------------------------------------------------------------------


def test_a_database_has_a_write_ahead_log_foreign_keys_and_patience(path: Path) -> None:
    for write in (True, False):
        with opened_engine(f"sqlite:///{path}", write=write) as engine, reading(engine) as connection:
            values = [
                connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("journal_mode", "foreign_keys", "busy_timeout")
            ]
        assert values == ["wal", 1, 30_000]


def test_a_writer_waits_for_another_at_its_start(path: Path) -> None:
    with opened_engine(f"sqlite:///{path}") as engine:
        with writing(engine) as connection:
            connection.execute(text("CREATE TABLE counter (value INTEGER)"))
            connection.execute(text("INSERT INTO counter VALUES (0)"))

        def count() -> None:
            for _ in range(20):
                with writing(engine) as connection:
                    value = connection.execute(text("SELECT value FROM counter")).scalar_one()
                    time.sleep(0.001)
                    connection.execute(text("UPDATE counter SET value = :value"), {"value": value + 1})

        with ThreadPoolExecutor() as pool:
            counted = [pool.submit(count) for _ in range(4)]
        assert [one.result() for one in counted] == [None] * 4
        with reading(engine) as connection:
            assert connection.execute(text("SELECT value FROM counter")).scalar_one() == 80


def test_an_exception_rolls_back_definitions_too(path: Path) -> None:
    with opened_engine(f"sqlite:///{path}") as engine:
        with pytest.raises(RuntimeError), writing(engine) as connection:
            connection.execute(text("CREATE TABLE t (a INTEGER)"))
            raise RuntimeError
        with reading(engine) as connection:
            assert connection.execute(text("SELECT count(*) FROM sqlite_master")).scalar_one() == 0


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize(("place", "said"), [("/nowhere/runs.db", "no folder .*nowhere"), ("", "is a folder")])
def test_a_missing_folder_or_a_folder_is_named(tmp_path: Path, place: str, said: str, write: bool) -> None:
    with pytest.raises(DatabaseError, match=said):
        open_store(f"sqlite:///{tmp_path}{place}", write=write)


def test_a_file_to_be_read_must_exist_and_is_not_made(path: Path) -> None:
    with pytest.raises(DatabaseError, match="no database at") as caught:
        open_store(f"sqlite:///{path}", write=False)
    assert caught.value.exit_code == 4
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("content", [b"name: toy\n" * 300, b"x", b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_file_that_is_not_a_database_is_left_alone(path: Path, content: bytes, write: bool) -> None:
    path.write_bytes(content)
    with pytest.raises(DatabaseError, match="is not a SQLite database"):
        open_store(f"sqlite:///{path}", write=write)
    assert path.read_bytes() == content


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux lists the files that are open")
@pytest.mark.parametrize("write", [True, False])
def test_a_file_that_is_not_a_database_does_not_stay_open_with_its_error(path: Path, write: bool) -> None:
    def is_open() -> bool:
        held = [descriptor for descriptor in Path("/proc/self/fd").iterdir() if descriptor.is_symlink()]
        return any(descriptor.samefile(path) for descriptor in held if descriptor.exists())

    path.write_bytes(b"name: toy\n" * 300)
    with pytest.raises(DatabaseError) as caught:
        open_store(f"sqlite:///{path}", write=write)
    assert caught.tb is not None and not is_open()
    with path.open("rb"):
        assert is_open(), "an open file is visible"


def test_an_empty_file_has_no_tables_to_read(path: Path) -> None:
    path.touch()
    with pytest.raises(SchemaError, match="no bssearch tables"):
        open_store(f"sqlite:///{path}", write=False)


def test_a_read_only_file_can_be_read_and_not_written(path: Path) -> None:
    store_in(f"sqlite:///{path}")
    path.chmod(0o444)
    with pytest.raises(DatabaseError, match="is read-only"):
        open_store(f"sqlite:///{path}")
    with open_store(f"sqlite:///{path}", write=False) as store:
        assert store.studies.get("toy").name == "toy"


def test_a_file_locked_for_long_is_a_database_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bssearch.storage.connection.engine.BUSY_TIMEOUT_S", 0.05)
    with open_store(f"sqlite:///{path}") as store, closing(sqlite3.connect(path, isolation_level=None)) as other:
        add_study(store)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseError, match="locked, probably by another process"):
            start(store)
        assert store.trials.of("toy") == []
        other.execute("ROLLBACK")
        start(store)


OPEN_WITHOUT_RIGHTS = """
import os, sys
from bssearch.errors import BSSearchError
from bssearch.storage.connection.engine import parse_url
from bssearch.storage.repository import open_store
parse_url(sys.argv[1]).get_dialect()  # imports every module before the rights are gone
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    with open_store(sys.argv[1], write=sys.argv[2] == "write") as store:
        print(store.studies.get("toy").name)
except BSSearchError as error:
    print(type(error).__name__, error)
"""


class TestReadOnlyFolder:
    @pytest.fixture
    def folder(self) -> Iterator[Path]:
        # Not tmp_path: another user must be able to walk into it.
        with TemporaryDirectory() as name:
            folder = Path(name)
            folder.chmod(0o755)
            yield folder
            folder.chmod(0o755)

    def _run_without_rights(self, path: Path, mode: str) -> str:
        """Open the store as a user without write access to the folder (as nobody, if root)."""
        path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IROTH | stat.S_IXOTH)
        command = [sys.executable, "-W", "error", "-c", OPEN_WITHOUT_RIGHTS, f"sqlite:///{path}", mode]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    @pytest.fixture
    def path(self, folder: Path) -> Path:
        path = folder / "runs.db"
        store_in(f"sqlite:///{path}")
        path.chmod(0o666)
        return path

    @pytest.mark.slow
    def test_it_can_be_read_and_not_written(self, path: Path) -> None:
        assert self._run_without_rights(path, "read") == "toy"
        assert [file.name for file in path.parent.iterdir()] == ["runs.db"]
        answer = self._run_without_rights(path, "write")
        assert answer.startswith("DatabaseError the folder ")
        assert answer.endswith("is read-only")

    @pytest.mark.slow
    def test_a_log_that_cannot_be_read_is_not_passed_over(self, path: Path) -> None:
        copy = path.with_name("copy.db")
        with open_store(f"sqlite:///{path}") as store:
            start(store)
            copy.write_bytes(path.read_bytes())
            log = Path(f"{path}-wal").read_bytes()
        Path(f"{copy}-wal").write_bytes(log)
        assert self._run_without_rights(copy, "read").startswith("DatabaseError")


# Types, and files that change or fill a disk --------------------------------------------------------------------------


def test_a_moment_is_stored_as_utc_and_must_say_its_offset() -> None:
    dialect = sqlite.dialect()
    moment = datetime(2026, 7, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    stored = UtcDateTime().process_bind_param(moment, dialect)
    assert str(stored) == "2026-07-01 10:00:00+00:00"  # its text: equal moments may have other offsets
    assert UtcDateTime().process_result_value(datetime(2026, 7, 1, 10), dialect) == moment
    assert UtcDateTime().process_result_value(moment, dialect) == moment
    assert UtcDateTime().process_bind_param(None, dialect) is None
    with pytest.raises(ValueError, match="time zone"):
        UtcDateTime().process_bind_param(datetime(2026, 7, 1), dialect)


def test_the_tables_can_be_made_on_postgresql() -> None:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call,unused-ignore]
    made = "".join(str(CreateTable(table).compile(dialect=dialect)) for table in METADATA.sorted_tables)
    assert "created_at TIMESTAMP WITH TIME ZONE NOT NULL" in made
    assert "TIMESTAMP WITHOUT" not in made
    assert "train_seconds FLOAT(53) NOT NULL" in made


@pytest.mark.parametrize("becomes", ["deleted", "replaced"])
def test_a_deleted_or_replaced_file_takes_no_more_writes(path: Path, becomes: str) -> None:
    with open_store(f"sqlite:///{path}") as store:
        add_study(store)
        aside = path.with_name("aside.db")
        path.rename(aside)
        if becomes == "replaced":
            path.write_bytes(aside.read_bytes())
        for _ in range(2):
            with pytest.raises(DatabaseError, match=r"was deleted or replaced while open"):
                start(store)
        path.unlink(missing_ok=True)
        aside.rename(path)
        start(store)
    if becomes == "deleted":
        assert not aside.exists()


def test_a_full_disk_is_named_with_a_remedy_and_stored_rows_stay(path: Path) -> None:
    with open_store(f"sqlite:///{path}") as store:
        begun(store)
        with store.writing() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 1")  # SQLite takes the file's size
        with pytest.raises(DatabaseError, match="database or disk is full") as caught:
            store.trials.save_log("toy", 1, "x" * 40_000)
        assert "free space" in str(caught.value.hint)
        with store.writing() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 100000")
        store.trials.save_log("toy", 1, "y")
        assert (store.trials.log("toy", 1), len(store.trials.of("toy"))) == ("y", 1)


# Which URL ------------------------------------------------------------------------------------------------------------


def test_the_url_comes_from_the_option_then_the_variable_then_the_file_then_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "url"
    file.write_text("  sqlite:///from-file.db \nanother line\n")
    assert database_url() == DEFAULT_DATABASE_URL
    monkeypatch.setenv("BSSEARCH_DB_URL_FILE", str(file))
    assert database_url() == "sqlite:///from-file.db"
    monkeypatch.setenv("BSSEARCH_DB_URL", "sqlite:///from-variable.db")
    assert database_url() == "sqlite:///from-variable.db"
    assert database_url("sqlite:///given.db") == "sqlite:///given.db"


@pytest.mark.parametrize("content", [None, b"", b"\npostgresql://u:secret@h/d\n", b"postgresql://u:secret@h/\xff\n"])
def test_a_file_without_a_url_is_named_without_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    file = tmp_path / "url"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("BSSEARCH_DB_URL_FILE", str(file))
    with pytest.raises(UsageError, match="BSSEARCH_DB_URL_FILE") as caught:
        database_url()
    assert str(file) in str(caught.value) and caught.value.hint
    assert "secret" not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}"


# Network file systems -------------------------------------------------------------------------------------------------


MADE_UP = [
    ("/proc", "proc"),
    ("/", "ext4"),
    ("/home", "autofs"),
    ("/home", "nfs4"),
    ("/home/ada/local", "xfs"),
    ("/data of all", "cifs"),
    ("/mnt/c", "9p"),
    ("/remote", "fuse.sshfs"),
    ("/tmp", "tmpfs"),
    ("/scratch", "lustre"),
]


def say_mounted(monkeypatch: pytest.MonkeyPatch, mounted: list[tuple[str, str]]) -> None:
    """Simulate the machine's mounted file systems."""
    parts = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounted]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: parts)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/runs.db", "ext4"),
        ("/home/ada/runs.db", "nfs4"),
        ("/home/ada/local/runs.db", "xfs"),
        ("/home/ada/locally/runs.db", "nfs4"),
        ("/homes/runs.db", "ext4"),
        ("/data of all/runs.db", "cifs"),
        ("/mnt/c/runs.db", "9p"),
        ("/remote/a/b/runs.db", "fuse.sshfs"),
        ("/tmp/runs.db", "tmpfs"),
        ("/scratch/runs.db", "lustre"),
    ],
)
def test_the_longest_and_of_equal_ones_the_last_mount_is_that_of_a_path(
    path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_mounted(monkeypatch, MADE_UP)
    assert file_system_of(Path(path)) == kind


def test_the_file_system_of_the_root_is_known() -> None:
    assert file_system_of(Path("/runs.db"))


def test_which_file_systems_several_machines_write_to() -> None:
    shared = ["nfs", "nfs4", "NFS", "cifs", "smb3", "afs", "lustre", "gpfs", "beegfs", "ceph"]
    shared += ["fuse.sshfs", "fuse.glusterfs", "fuse.ceph-fuse", "fuse.s3fs", "fuse.nfs-ganesha"]
    own = ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "virtiofs", "fuseblk", "fuse", "fuse.ntfs-3g"]
    own += ["fuse.mergerfs", "fuse.gvfsd-fuse", "9p", "ramfs", "squashfs", "apfs", "nfsd", "none", ""]
    assert [one for one in shared if not is_shared_by_machines(one)] == []
    assert [one for one in own if is_shared_by_machines(one)] == []


@pytest.fixture
def remote(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a file with a study on a simulated NFS."""
    store_in(f"sqlite:///{path}")
    say_mounted(monkeypatch, [("/", "ext4"), (str(path.parent.resolve()), "nfs4")])
    monkeypatch.delenv(NETWORK_FILE_VARIABLE, raising=False)
    return f"sqlite:///{path}"


def test_a_file_there_is_read_and_not_written(remote: str) -> None:
    with open_store(remote, write=False) as store:
        assert store.studies.get("toy").name == "toy"
    with pytest.raises(DatabaseError, match=r"network file system \(nfs4\).*memory that all writers share") as caught:
        open_store(remote)
    assert f"{NETWORK_FILE_VARIABLE}=1" in str(caught.value.hint)


def test_a_link_to_a_file_there_is_one_too(remote: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = tmp_path_factory.mktemp("local") / "link.db"
    link.symlink_to(remote.removeprefix("sqlite:///"))
    with pytest.raises(DatabaseError, match="network file system"):
        open_store(f"sqlite:///{link}")


def test_an_explicit_option_allows_writing_there(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NETWORK_FILE_VARIABLE, "1")
    with open_store(remote) as store:
        add_study(store, "another")


def test_a_machine_without_a_mount_list_refuses_no_file(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "disk_partitions", mock.Mock(side_effect=FileNotFoundError("/proc/self/mounts")))
    open_store(remote).close()
