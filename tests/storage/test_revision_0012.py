"""Revision 0012 on a database with rows: from 0011 up, and down and up again, on every kind of database."""

from __future__ import annotations

import pytest
from alembic import command
from sqlalchemy import text

from bssearch.storage import migrate
from bssearch.storage.connection.engine import create_engine_for, writing
from bssearch.storage.repository import open_store
from tests.storage.conftest import add_study, start
from tests.storage.test_migrate import _config

pytestmark = pytest.mark.usefixtures("migrations")


def test_of_a_study_from_before_nobody_knows_the_login_and_its_trials_stay(empty_url: str) -> None:
    migrate.upgrade(empty_url)
    with open_store(empty_url) as store:
        add_study(store)
        number = start(store)
        before = store.study("toy"), store.trial("toy", number)
    engine = create_engine_for(empty_url, foreign_keys=False)
    try:
        with writing(engine) as connection:
            command.downgrade(_config(connection), "0011")
            if connection.dialect.name == "postgresql":
                assert connection.scalar(text("SELECT count(*) FROM pg_proc WHERE proname = 'bss_check_maker'")) == 0
        assert migrate.upgrade(empty_url).before == "0011"
        with open_store(empty_url) as store:
            assert (store.study("toy"), store.trial("toy", number)) == before
            add_study(store, "new")
        with writing(engine) as connection:
            logins = connection.execute(text("SELECT name, login FROM bss_study ORDER BY id")).all()
        maker = "postgres" if engine.dialect.name == "postgresql" else None
        assert [tuple(row) for row in logins] == [("toy", None), ("new", maker)]
    finally:
        engine.dispose()
