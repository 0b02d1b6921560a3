"""Revision 0006 on a database with rows: down to 0005 and up again, on every kind of database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from alembic import command
from sqlalchemy import text

from bssearch.errors import DatabaseError
from bssearch.records import Phase
from bssearch.storage import migrate
from bssearch.storage.connection.engine import create_engine_for, writing
from bssearch.storage.repository import Store, open_store
from tests.factories import make_curve, make_environment, make_probe
from tests.storage.conftest import OUTCOME, add_study, start
from tests.storage.test_migrate import _config

pytestmark = pytest.mark.usefixtures("migrations")


def test_runs_to_the_budget_are_audits_in_the_revision_before_and_nothing_else_is_lost(empty_url: str) -> None:
    migrate.upgrade(empty_url)
    with open_store(empty_url) as store:
        add_study(store)
        store.save_probe("toy", make_environment(), make_probe(32))
        start(store, uncapped=True, expected_improvement=0.25)
        start(store, phase=Phase.AUDIT)
        start(store, phase=Phase.TO_BUDGET, uncapped=True)
        store.append_observations("toy", [(3, one) for one in make_curve((0.0, 0.1), (1.0, 0.5))])
        store.finish_trial("toy", 3, OUTCOME, steps_x_step_time_s=None)
        before = store.trials("toy")
    assert before[0].expected_improvement == 0.25
    engine = create_engine_for(empty_url, foreign_keys=False)
    try:
        with writing(engine) as connection:
            command.downgrade(_config(connection), "0005")
            rows = connection.execute(text("SELECT phase, evidence FROM bss_trial ORDER BY number")).all()
    finally:
        engine.dispose()
    assert [(phase, bool(evidence)) for phase, evidence in rows] == [
        ("search", True),
        ("audit", False),
        ("audit", True),
    ]
    assert migrate.upgrade(empty_url).before == "0005"
    with open_store(empty_url) as store:
        assert store.trials("toy") == [replace(trial, expected_improvement=None) for trial in before]
        found = store.changes("toy", 0)
        assert (found.trials, found.has_new_probes) == (store.trials("toy"), True)
        assert store.changes("toy", found.revision).trials == []
        assert [one.step for one in store.observations("toy", 3)] == [0, 10]
        assert list(store.probes("toy")) == [32]
        assert start(store) == 4
        assert [trial.number for trial in store.changes("toy", found.revision).trials] == [4]


@pytest.mark.parametrize(("objective", "is_allowed"), [("o" * 64, True), ("o" * 65, False), ("", False)])
def test_an_objective_is_any_short_name(store: Store, objective: str, is_allowed: bool) -> None:
    if is_allowed:
        assert add_study(store, objective=objective) == store.study("toy")
        return
    with pytest.raises(DatabaseError, match="objective_length"):
        add_study(store, objective=objective)
