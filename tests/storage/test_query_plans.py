"""That what a driver does for one trial looks rows up by an index, whatever the number of stored trials (SQLite)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event

from bssearch.storage.repository import Store, open_store
from tests.factories import make_curve
from tests.storage.conftest import OUTCOME, add_study, enqueue, resume, start, start_after, start_queued
from tests.storage.test_changes import PAUSED

CALLS: dict[str, Callable[[Store], object]] = {
    "start": lambda store: start_after(store, 3, "me"),
    "start too late": lambda store: start_after(store, 1, "me"),
    "start queued": lambda store: start_queued(store, 2, "me"),
    "resume": lambda store: resume(store, 3),
    "enqueue": enqueue,
    "append": lambda store: store.append_observations("toy", [(1, one) for one in make_curve((0.0, 0.1))]),
    "finish": lambda store: store.finish_trial("toy", 1, OUTCOME, steps_x_step_time_s=None),
    "settle": lambda store: store.settle_paused("toy", [3]),
    "heartbeat": lambda store: store.heartbeat("toy", "driver", 60.0),
    "claim": lambda store: store.claim("toy", "probe", owner="me", lease_seconds=60.0, is_alive=lambda owner: None),
    "mark lost": lambda store: store.mark_lost("toy", is_alive=lambda owner: False),
    "curve": lambda store: store.curves("toy", [1]),
    "evaluations": lambda store: store.evaluations("toy", [1]),
    "changes": lambda store: store.changes("toy", 1),
}
TABLES = ("bss_trial", "bss_observation")


@pytest.mark.parametrize("what", CALLS)
def test_no_table_is_walked_through(sqlite_url: str, what: str) -> None:
    with open_store(sqlite_url) as store:
        add_study(store)
        start(store)
        enqueue(store)
        start(store)
        store.finish_trial("toy", 3, PAUSED, steps_x_step_time_s=None)
        ran: list[tuple[str, Any]] = []
        event.listen(store._engine, "before_cursor_execute", lambda *given: ran.append((given[2], given[3])))
        CALLS[what](store)
        asked = [one for one in ran if one[0].startswith(("SELECT", "UPDATE", "DELETE"))]
        with store._reading() as connection:
            plans = [
                (statement, row[3])
                for statement, parameters in asked
                for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            ]
    assert plans
    for statement, step in plans:
        walks = any(step.startswith(f"SCAN {table}") for table in TABLES)
        whole_study = step.endswith("(study_id=?)") and "bss_trial" in step and "max(" not in statement
        assert not walks and not whole_study, (step, statement)
