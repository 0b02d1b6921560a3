"""Who started a trial and by which spec, on every kind of database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from bssearch.records import Lease, TrialOutcome, TrialState, spec_digest
from bssearch.storage.database import environment_digest
from bssearch.storage.repository import Store
from tests.factories import make_environment, make_plan
from tests.storage.conftest import OUTCOME, add_study, enqueue, start

FIRST = {"workload": "digits", "executor": {"slots": 1}}
SECOND = {"workload": "digits", "executor": {"slots": 4}}
HERE = make_environment()


def lease_of(store: Store, user: str, spec: Mapping[str, object]) -> Lease:
    return Lease(owner=f"driver of {user}", seconds=60.0, user=user, spec=store.keep_spec("toy", spec))


def test_a_trial_keeps_who_started_it_and_the_spec_of_that_moment(store: Store) -> None:
    add_study(store)
    anna, ben = lease_of(store, "anna", FIRST), lease_of(store, "ben", SECOND)
    for lease in (anna, ben, anna):
        assert store.start("toy", make_plan(), environment=HERE, lease=lease) is not None
    store.update_spec("toy", SECOND)
    assert [trial.started_by for trial in store.trials("toy")] == ["anna", "ben", "anna"]
    assert [store.spec_at("toy", number) for number in (1, 2, 3)] == [FIRST, SECOND, FIRST]
    assert store.keep_spec("toy", FIRST) == store.trial("toy", 1).spec_digest == spec_digest(FIRST)


def test_a_queued_trial_is_started_by_whose_driver_takes_it_and_keeps_that_through_a_pause(store: Store) -> None:
    add_study(store)
    number = enqueue(store)
    assert (store.trial("toy", number).started_by, store.spec_at("toy", number)) == (None, None)
    limits = {"train_seconds_limit": 5.0, "eval_every_steps": 3, "threads": 2}
    anna, ben = lease_of(store, "anna", FIRST), lease_of(store, "ben", SECOND)
    started = store.start("toy", make_plan(queued=number, **limits), environment=HERE, lease=anna)
    assert started is not None and (started.started_by, started.spec_digest) == ("anna", anna.spec)
    paused = TrialOutcome(state=TrialState.PAUSED, reason="waits", device="cuda:1", device_uuid="GPU-1")
    store.finish_trial("toy", number, paused, steps_x_step_time_s=None)
    again = store.start("toy", make_plan(resumed=number, train_seconds_limit=9.0), environment=HERE, lease=ben)
    assert again is not None and (again.started_by, again.spec_digest) == ("anna", anna.spec)


def test_the_device_of_a_trial_is_kept_with_its_end(store: Store) -> None:
    add_study(store)
    ended = replace(OUTCOME, device="cuda:1", device_uuid="GPU-8f6f")
    number = start(store)
    store.finish_trial("toy", number, ended, steps_x_step_time_s=None)
    assert store.trial("toy", number).outcome == ended


def test_the_specs_of_a_study_go_with_it(store: Store) -> None:
    add_study(store)
    store.keep_spec("toy", FIRST)
    store.delete_study("toy")
    add_study(store)
    lease = Lease(owner="driver", seconds=60.0, spec=spec_digest(FIRST))
    assert store.start("toy", make_plan(), environment=HERE, lease=lease) is not None
    assert store.spec_at("toy", 1) is None


@pytest.mark.parametrize("changes", [{"libraries": ("timm 1.0",)}, {"git_dirty": False}, {"git_dirty": True}])
def test_an_environment_without_versions_keeps_its_digest_and_others_have_their_own(changes: dict[str, object]) -> None:
    known_before = "c81c1fa81c471568eaf6773c514e914615613356c0e75d6a5465598d46fc1eae"
    assert environment_digest(HERE) == known_before, "as a version computed it that knew no libraries"
    assert environment_digest(make_environment(**changes)) != known_before
