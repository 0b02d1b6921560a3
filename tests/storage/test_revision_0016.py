"""Revision 0016 on a database with rows: down to the one before and up again, on every kind of database."""

from __future__ import annotations

import pytest

from bssearch.storage import migrate
from bssearch.storage.repository import open_store
from tests.storage.conftest import add_study, start
from tests.storage.test_migrate import go_down_and_up
from tests.storage.test_queue import new, record

pytestmark = pytest.mark.usefixtures("migrations")

BEFORE = migrate.REVISIONS[migrate.REVISIONS.index("0016") - 1]


def test_studies_stay_and_the_queue_is_empty_after_it_was_taken_away(empty_url: str) -> None:
    migrate.upgrade(empty_url)
    with open_store(empty_url) as store:
        add_study(store)
        number = start(store)
        before = store.study("toy"), store.trial("toy", number)
        store.submit(new("queued"))
        store.keep_worker(record())
        assert store.begin_shift("worker", {"queued"}, 1.0) is not None
    go_down_and_up(empty_url, BEFORE)
    with open_store(empty_url) as store:
        assert (store.study("toy"), store.trial("toy", number)) == before
        assert (store.submissions(), store.workers()) == ([], [])
        assert store.submit(new("queued")).name == "queued"
