"""Revision 0010 on a database with rows: down to 0009 and up again, on every kind of database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import text

from bssearch.storage import migrate
from bssearch.storage.connection.engine import create_engine_for, writing
from bssearch.storage.integrity import first_fault
from bssearch.storage.repository import open_store
from tests.storage.conftest import OUTCOME, add_study, start
from tests.storage.test_migrate import go_down_and_up

pytestmark = pytest.mark.usefixtures("migrations")

FURTHER = replace(OUTCOME, further_test_metrics={"forgetting": 0.25, "old accuracy": -0.5})


def test_further_metrics_are_kept_and_the_revision_before_knows_none(empty_url: str) -> None:
    migrate.upgrade(empty_url)
    with open_store(empty_url) as store:
        add_study(store)
        for outcome in (OUTCOME, FURTHER):
            number = start(store)
            store.finish_trial("toy", number, outcome, steps_x_step_time_s=None)
            store.finish_trial("toy", number, outcome, steps_x_step_time_s=None)  # a second try finds it stored
        assert [trial.outcome for trial in store.trials("toy")] == [OUTCOME, FURTHER]
    go_down_and_up(empty_url, "0009")
    with open_store(empty_url) as store:
        assert [trial.outcome for trial in store.trials("toy")] == [OUTCOME, OUTCOME]


def test_further_metrics_that_are_no_numbers_are_a_fault(empty_url: str) -> None:
    migrate.upgrade(empty_url)
    with open_store(empty_url) as store:
        add_study(store)
        store.finish_trial("toy", start(store), FURTHER, steps_x_step_time_s=None)
    engine = create_engine_for(empty_url)
    try:
        with writing(engine) as connection:
            connection.execute(text("""UPDATE bss_trial SET further_test_metrics = '{"forgetting": [1]}'"""))
            assert "further_test_metrics" in (first_fault(connection, 1) or "")
    finally:
        engine.dispose()
