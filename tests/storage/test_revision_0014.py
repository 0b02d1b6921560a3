"""Revision 0014 on a database with rows: down to the one before and up again, on every kind of database."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bssearch.errors import DatabaseError
from bssearch.storage import migrate
from bssearch.storage.repository import Store, open_store
from tests.factories import make_environment, make_probe
from tests.storage.conftest import OUTCOME, add_study, start
from tests.storage.test_migrate import go_down_and_up

pytestmark = pytest.mark.usefixtures("migrations")

BEFORE = migrate.REVISIONS[migrate.REVISIONS.index("0014") - 1]


def test_trials_and_step_times_of_the_revision_before_stay_and_say_nothing_of_the_host(empty_url: str) -> None:
    migrate.upgrade(empty_url)
    with open_store(empty_url) as store:
        add_study(store)
        store.save_probe("toy", make_environment(), make_probe(32, host_bound_share=0.25))
        store.finish_trial("toy", start(store), replace(OUTCOME, host_bound_share=0.5), steps_x_step_time_s=None)
        assert shares(store) == (0.5, [0.25], 0.25)
    go_down_and_up(empty_url, BEFORE)
    with open_store(empty_url) as store:
        assert shares(store) == (None, [None], None)
        assert store.trial("toy", 1).outcome == OUTCOME
        assert [one.step_seconds for one in store.visits("toy")] == [make_probe(32).step_seconds]


def shares(store: Store) -> tuple[float | None, list[float | None], float | None]:
    """Return the host-bound shares of the first trial, of the visits, and of the step time of batch 32."""
    outcome = store.trial("toy", 1).outcome
    assert outcome is not None
    visits = [one.host_bound_share for one in store.visits("toy")]
    return outcome.host_bound_share, visits, store.probes("toy")[32].host_bound_share


@pytest.mark.parametrize("share", [-0.01, 1.01])
def test_no_share_lies_outside_0_and_1(store: Store, share: float) -> None:
    add_study(store)
    start(store)
    with pytest.raises(DatabaseError, match="host_bound_share"):
        store.finish_trial("toy", 1, replace(OUTCOME, host_bound_share=share), steps_x_step_time_s=None)
    with pytest.raises(DatabaseError, match="host_bound_share"):
        store.save_probe("toy", make_environment(), make_probe(32, host_bound_share=share))
    store.save_probe("toy", make_environment(), make_probe(32, host_bound_share=0.0))
    store.finish_trial("toy", 1, replace(OUTCOME, host_bound_share=1.0), steps_x_step_time_s=None)
