"""What a user is told when a PostgreSQL server is not what the URL says: real servers, and never the password."""

from __future__ import annotations

import socket
import threading
import traceback
from collections.abc import Callable, Iterator

import pytest

from bssearch.errors import DatabaseError
from bssearch.storage import migrate
from bssearch.storage.connection.engine import SERVER_OPTIONS
from bssearch.storage.repository import open_store
from tests.factories import not_none
from tests.postgres import SECURED, Postgres
from tests.storage.conftest import add_study, begun, start

PASSWORD = "s3cr%40t"  # in a URL; the password itself is s3cr@t
SECRETS = ("s3cr%40t", "s3cr@t")


def _refused(call: Callable[[], object]) -> DatabaseError:
    """Return the error that a call raises, after looking for the password in all that is ever shown of it."""
    with pytest.raises(DatabaseError) as caught:
        call()
    error = caught.value
    shown = "".join([str(error), repr(error), str(error.hint), *traceback.format_exception(error)])
    # The test's own lines are shown in a traceback, but they name a constant.
    assert not [secret for secret in SECRETS if secret in shown]
    assert error.exit_code == 4
    assert "\n" not in str(error)
    return error


@pytest.fixture(scope="module")
def role(postgres: Postgres) -> str:
    postgres.execute("CREATE ROLE alice LOGIN PASSWORD 's3cr@t'")
    return "alice"


def _with_password(url: str, role: str) -> str:
    return url.replace("postgres@", f"{role}:{PASSWORD}@")


@pytest.mark.parametrize("write", [True, False])
def test_an_unknown_database_is_named(postgres: Postgres, role: str, write: bool) -> None:
    error = _refused(lambda: open_store(_with_password(postgres.url("nowhere"), role), write=write))
    assert 'database "nowhere" does not exist' in str(error)
    assert "createdb" in str(error.hint)


def test_an_unknown_user_is_named(postgres: Postgres) -> None:
    error = _refused(lambda: open_store(_with_password(postgres.create_database(), "bob")))
    assert 'role "bob" does not exist' in str(error)


def test_a_wrong_password_is_refused_and_a_right_one_is_not(postgres: Postgres, role: str) -> None:
    postgres.create_database(SECURED)
    for wrong in (postgres.url(SECURED, user=role, password="s3cr%40t2"), postgres.url(SECURED, user=role)):
        error = _refused(lambda url=wrong: open_store(url))  # type: ignore[misc]
        assert "password" in str(error)
        assert "check user and password" in str(error.hint)
    right = postgres.url(SECURED, user=role, password=PASSWORD)
    error = _refused(lambda: open_store(right))
    assert "lacks the right" in str(error)  # it was let in


def test_a_role_without_rights_on_the_tables_is_told_which(postgres: Postgres, role: str) -> None:
    url = _with_password(postgres.create_database(), role)
    error = _refused(lambda: open_store(url))
    assert "the role 'alice' lacks the right SELECT on table bss_alembic_version" in str(error)
    assert not_none(error.hint).endswith('GRANT SELECT ON ALL TABLES IN SCHEMA public TO "alice"'), (
        "to look at it no more"
    )


def test_a_role_that_may_only_read_reads(postgres: Postgres, role: str) -> None:
    url = postgres.create_database()
    database = url.partition("@/")[2].partition("?")[0]
    with open_store(url) as store:
        begun(store)
    postgres.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO alice", database=database)
    with open_store(_with_password(url, role), write=False) as store:
        assert len(store.trials.of("toy")) == 1
    error = _refused(lambda: open_store(_with_password(url, role)))
    assert "the role 'alice' lacks the right INSERT on table bss_environment" in str(error), "before it runs anything"
    for grant in not_none(error.hint).partition(": ")[2].split("; "):
        postgres.execute(grant, database=database)
    with open_store(_with_password(url, role)) as store:
        add_study(store, "other")
        start(store)
        assert len(store.studies.summaries()) == 2, "the hint is enough to write"


def test_a_role_that_may_not_make_tables_is_told_so(postgres: Postgres, role: str) -> None:
    url = postgres.create_database(schema=False)
    error = _refused(lambda: migrate.upgrade(_with_password(url, role)))
    assert "the role 'alice' lacks the right CREATE on schema public" in str(error)
    assert 'GRANT USAGE, CREATE ON SCHEMA public TO "alice"' in str(error.hint)


def test_a_role_that_may_not_see_the_schema_is_told_so(postgres: Postgres, role: str) -> None:
    url = postgres.create_database()
    postgres.execute("REVOKE ALL ON SCHEMA public FROM PUBLIC", database=url.partition("@/")[2].partition("?")[0])
    for call in (open_store, migrate.upgrade):
        error = _refused(lambda call=call: call(_with_password(url, role)))  # type: ignore[misc]
        assert "the role 'alice' lacks the right" in str(error)
        assert "on schema public" in str(error)


def test_a_host_where_nothing_listens_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    error = _refused(lambda: open_store(f"postgresql://alice:{PASSWORD}@127.0.0.1:{port}/runs"))
    assert f"alice:***@127.0.0.1:{port}/runs cannot be reached" in str(error)
    assert "refused" in str(error)


def test_a_host_without_a_name_is_unreachable() -> None:
    error = _refused(lambda: open_store(f"postgresql://alice:{PASSWORD}@nowhere.invalid/runs"))
    assert "nowhere.invalid/runs cannot be reached" in str(error)


@pytest.mark.slow
def test_a_host_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVER_OPTIONS, "connect_timeout", 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"postgresql://alice:{PASSWORD}@127.0.0.1:{server.getsockname()[1]}/runs"
        error = _refused(lambda: open_store(url))
    assert "cannot be reached" in str(error)


@pytest.fixture(params=[b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR unknown command\r\n", b"J\x00\x00\x00\x0a8.0.36"])
def stranger(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a server that speaks something else."""

    def answer(server: socket.socket) -> None:
        try:
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(request.param)
        except OSError:
            return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize("query", ["", "?sslmode=disable"])
def test_a_server_that_is_not_postgresql_is_named_so(stranger: int, query: str) -> None:
    error = _refused(lambda: open_store(f"postgresql://alice:{PASSWORD}@127.0.0.1:{stranger}/runs{query}"))
    assert "is not a PostgreSQL server" in str(error)
    assert "host and port" in str(error.hint)


@pytest.mark.parametrize("query", ["sslmode=bogus", "nosuch=1", f"password={PASSWORD}&sslmode=bogus"])
def test_an_option_that_libpq_does_not_know_is_named(query: str) -> None:
    error = _refused(lambda: open_store(f"postgresql://alice:{PASSWORD}@127.0.0.1/runs?{query}"))
    assert "bogus" in str(error) or "nosuch" in str(error)
