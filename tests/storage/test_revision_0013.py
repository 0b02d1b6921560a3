"""Revision 0013 on a database with rows: down to the one before and up again, on every kind of database."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from bssearch.records import Lease
from bssearch.storage import migrate
from bssearch.storage.connection.engine import create_engine_for, writing
from bssearch.storage.integrity import first_fault
from bssearch.storage.repository import open_store
from tests.factories import make_environment, make_plan
from tests.storage.conftest import OUTCOME, add_study
from tests.storage.test_migrate import go_down_and_up

pytestmark = pytest.mark.usefixtures("migrations")

ENVIRONMENT = make_environment(git_revision="0123456789ab+", git_dirty=True, libraries=("numpy 2.4", "timm 1.0"))
BEFORE = migrate.REVISIONS[migrate.REVISIONS.index("0013") - 1]


def test_trials_of_the_revision_before_stay_and_say_nothing_of_where_they_come_from(empty_url: str) -> None:
    migrate.upgrade(empty_url)
    with open_store(empty_url) as store:
        study = add_study(store)
        lease = Lease(owner="driver", seconds=60.0, user="someone", spec=store.keep_spec("toy", study.spec))
        assert store.start("toy", make_plan(), environment=ENVIRONMENT, lease=lease) is not None
        trial = store.finish_trial("toy", 1, OUTCOME, steps_x_step_time_s=None)
        assert store.environment_of("toy", 1) == ENVIRONMENT
    go_down_and_up(empty_url, BEFORE)
    with open_store(empty_url) as store:
        [old] = store.trials("toy")
        assert (old.number, old.seed, old.outcome) == (trial.number, trial.seed, OUTCOME)
        assert (old.started_by, old.spec_digest, store.spec_at("toy", 1)) == (None, None, None)
        environment = store.environment_of("toy", 1)
        assert environment is not None
        assert (environment.git_revision, environment.git_dirty, environment.libraries) == ("0123456789ab+", None, ())


def test_a_spec_that_is_no_object_is_a_fault(empty_url: str) -> None:
    migrate.upgrade(empty_url)
    with open_store(empty_url) as store:
        store.keep_spec("toy", add_study(store).spec)
    engine = create_engine_for(empty_url)
    try:
        with writing(engine) as connection:
            connection.execute(text("UPDATE bss_spec SET spec = '[1]'"))
            assert "spec = " in (first_fault(connection, 1) or "")
    finally:
        engine.dispose()
