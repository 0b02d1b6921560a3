"""Revision 0015 on a database with rows: down to the one before and up again, on every kind of database."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bssearch.records import Lease, Phase
from bssearch.storage import migrate
from bssearch.storage.repository import open_store
from tests.factories import make_environment, make_plan
from tests.storage.conftest import OUTCOME, add_study
from tests.storage.test_migrate import go_down_and_up

pytestmark = pytest.mark.usefixtures("migrations")

BEFORE = migrate.REVISIONS[migrate.REVISIONS.index("0015") - 1]


def test_trials_whose_batch_grows_count_for_nothing_in_the_revision_before_and_stay(empty_url: str) -> None:
    migrate.upgrade(empty_url)
    with open_store(empty_url) as store:
        add_study(store)
        lease = Lease(owner="driver", seconds=60.0)
        for phase in (Phase.SEARCH, Phase.GROWTH):
            plan = replace(make_plan(), phase=phase, after=None)
            started = store.start("toy", plan, environment=make_environment(), lease=lease)
            assert started is not None
            store.finish_trial("toy", started.number, OUTCOME, steps_x_step_time_s=None)
    go_down_and_up(empty_url, BEFORE)
    with open_store(empty_url) as store:
        assert [(one.phase, one.outcome) for one in store.trials("toy")] == [
            (Phase.SEARCH, OUTCOME),
            (Phase.PROBE, OUTCOME),
        ]
