"""Who starts and holds trials: leases, claims, and the user and spec of each start, on every database."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from bssearch.errors import DatabaseError, NotFoundError
from bssearch.records import (
    Lease,
    TrialOutcome,
    TrialState,
    spec_digest,
)
from bssearch.storage.database import environment_digest
from bssearch.storage.repository import Store
from tests.factories import make_curve, make_environment, make_plan, not_none
from tests.storage.conftest import OUTCOME, add_study, enqueue, resume, start

PAUSED = TrialOutcome(state=TrialState.PAUSED, reason="others first", steps=10)


@pytest.mark.usefixtures("toy")
class TestLeases:
    def test_a_trial_is_lost_when_its_lease_is_over_or_its_owner_dead(self, store: Store) -> None:
        start(store, lease_owner="alive")
        start(store, lease_owner="dead")
        start(store, lease_owner="late", lease_seconds=-5.0)
        start(store, lease_owner="dead")
        store.trials.finish("toy", 4, OUTCOME, steps_x_step_time_s=None)
        assert store.leases.mark_lost("toy", is_alive={"dead": False}.get) == [2, 3]
        one, dead, late, ended = store.trials.of("toy")
        assert [one.state, dead.state, late.state, ended.state] == ["running", "lost", "lost", "reached"]
        assert dead.outcome == TrialOutcome(state=TrialState.LOST, reason="its driver dead is gone")
        assert not_none(late.outcome).reason.startswith("its lease ended at ")
        assert late.ended_at is not None
        assert store.leases.mark_lost("toy", is_alive=lambda owner: True) == []

    def test_a_lost_trial_keeps_how_far_it_had_come(self, store: Store) -> None:
        for _ in range(2):
            start(store)
        store.trials.append_observations("toy", [(2, one) for one in make_curve((0.0, 0.1), (1.5, 0.4))])
        store.leases.mark_lost("toy", is_alive=lambda owner: False)
        bare, seen = (trial.outcome for trial in store.trials.of("toy"))
        assert bare is not None and seen is not None
        assert (bare.steps, bare.final_metric) == (0, None)
        assert (seen.steps, seen.samples, seen.train_seconds, seen.final_metric) == (10, 320, 1.5, 0.4)

    def test_a_heartbeat_keeps_the_leases_of_its_owner_alone(self, store: Store) -> None:
        start(store, lease_owner="a", lease_seconds=-5.0)
        start(store, lease_owner="b", lease_seconds=-5.0)
        start(store, lease_owner="a", lease_seconds=-5.0)
        store.trials.finish("toy", 3, OUTCOME, steps_x_step_time_s=None)
        store.leases.heartbeat("toy", "a", 60.0)
        assert store.trials.get("toy", 3).lease_expires_at is None
        assert store.leases.mark_lost("toy", is_alive=lambda owner: True) == []
        assert store.leases.mark_lost("toy", is_alive=lambda owner: None) == [2]

    def test_a_lost_trial_cannot_be_finished_by_its_driver(self, store: Store) -> None:
        start(store)
        store.leases.mark_lost("toy", is_alive=lambda owner: False)
        with pytest.raises(DatabaseError, match="is not running but lost"):
            store.trials.finish("toy", 1, OUTCOME, steps_x_step_time_s=None)

    def test_nothing_of_a_lost_trial_is_written_by_the_driver_that_lost_its_lease(self, store: Store) -> None:
        first, second, third = make_curve((0.0, 0.1), (1.5, 0.4), (2.0, 0.9))
        start(store, lease_owner="stopped")
        store.trials.append_observations("toy", [(1, first)], owner="stopped")
        store.trials.save_log("toy", 1, "before", owner="stopped")
        assert store.leases.mark_lost("toy", is_alive=lambda owner: False) == [1]
        start(store, lease_owner="stopped", retry_of=1)
        lost = store.trials.get("toy", 1)
        kept = store.trials.append_observations("toy", [(1, second), (2, second), (1, third)], owner="stopped")
        assert kept == {1}
        store.trials.save_log("toy", 1, "after", owner="stopped")
        store.leases.heartbeat("toy", "stopped", 60.0)
        for outcome in (OUTCOME, PAUSED):
            with pytest.raises(DatabaseError, match="is not running but lost"):
                store.trials.finish("toy", 1, outcome, steps_x_step_time_s=None, owner="stopped")
        assert store.trials.get("toy", 1) == lost
        assert store.trials.curves("toy", [1, 2]) == {1: [first], 2: [second]}
        assert store.trials.log("toy", 1) == "before"
        assert store.trials.append_observations("toy", [(1, third)], owner="stopped") == {1}
        assert store.trials.append_observations("toy", [], owner="stopped") == frozenset()

    def test_nothing_is_written_of_a_trial_that_another_driver_has_resumed(self, store: Store) -> None:
        first, second = make_curve((0.0, 0.1), (1.5, 0.4))
        start(store, lease_owner="first")
        store.trials.append_observations("toy", [(1, first)], owner="first")
        store.trials.finish("toy", 1, PAUSED, steps_x_step_time_s=None, owner="first")
        assert resume(store, 1, "second")
        resumed = store.trials.get("toy", 1)
        assert store.trials.append_observations("toy", [(1, second)], owner="first") == {1}
        store.trials.save_log("toy", 1, "by the first", owner="first")
        with pytest.raises(DatabaseError, match="second holds its lease"):
            store.trials.finish("toy", 1, OUTCOME, steps_x_step_time_s=None, owner="first")
        assert store.trials.get("toy", 1) == resumed
        assert store.trials.observations("toy", 1) == [first]
        assert store.trials.log("toy", 1) is None
        assert store.trials.append_observations("toy", [(1, second)], owner="second") == frozenset()
        assert store.trials.finish("toy", 1, OUTCOME, steps_x_step_time_s=None, owner="second").state == "reached"

    def test_observations_of_an_unknown_trial_are_refused_by_name(self, store: Store) -> None:
        start(store)
        with pytest.raises(NotFoundError, match="no trial 2"):
            store.trials.append_observations("toy", [(2, one) for one in make_curve((0.0, 0.1))], owner="driver")
        with pytest.raises(NotFoundError, match="no trial 2"):
            store.trials.save_log("toy", 2, "text", owner="driver")


NOBODY_KNOWS: Callable[[str], bool | None] = lambda owner: None  # noqa: E731


class TestClaims:
    def claim(self, store: Store, owner: str, **changes: Any) -> bool:
        values: dict[str, Any] = {"name": "probe", "lease_seconds": 60.0, "is_alive": NOBODY_KNOWS}
        return store.leases.claim("toy", owner=owner, **{**values, **changes})

    @pytest.mark.usefixtures("toy")
    def test_one_owner_holds_a_claim_until_it_is_released(self, store: Store) -> None:
        add_study(store, "other")
        assert self.claim(store, "a")
        assert self.claim(store, "a"), "tried again"
        assert not self.claim(store, "b")
        assert self.claim(store, "b", name="confirm host")
        assert store.leases.claim("other", "probe", owner="b", lease_seconds=60.0, is_alive=NOBODY_KNOWS)
        store.leases.release("toy", "probe", owner="b")
        assert not self.claim(store, "b")
        store.leases.release("toy", "probe", owner="a")
        store.leases.release("toy", "probe", owner="a")
        assert self.claim(store, "b")

    @pytest.mark.usefixtures("toy")
    def test_a_claim_is_taken_over_from_a_dead_owner_or_after_its_lease(self, store: Store) -> None:
        assert self.claim(store, "a")
        assert not self.claim(store, "b", is_alive=lambda owner: True)
        assert self.claim(store, "b", is_alive={"a": False}.get, lease_seconds=-5.0)
        assert not self.claim(store, "c", is_alive={"b": True}.get)
        assert self.claim(store, "c")
        assert not self.claim(store, "b")

    @pytest.mark.usefixtures("toy")
    def test_a_heartbeat_extends_the_claims_of_its_owner_alone(self, store: Store) -> None:
        assert self.claim(store, "a", lease_seconds=-5.0)
        assert self.claim(store, "b", name="confirm host", lease_seconds=-5.0)
        store.leases.heartbeat("toy", "a", 60.0)
        assert not self.claim(store, "c")
        assert self.claim(store, "c", name="confirm host")

    def test_what_a_study_does_not_have_is_not_found(self, store: Store) -> None:
        with pytest.raises(NotFoundError):
            self.claim(store, "a")
        with pytest.raises(NotFoundError):
            store.leases.release("toy", "probe", owner="a")


# Whose trial ----------------------------------------------------------------------------------------------------------


FIRST = {"workload": "digits", "executor": {"slots": 1}}
SECOND = {"workload": "digits", "executor": {"slots": 4}}
HERE = make_environment()


def lease_of(store: Store, user: str, spec: Mapping[str, object]) -> Lease:
    return Lease(owner=f"driver of {user}", seconds=60.0, user=user, spec=store.studies.keep_spec("toy", spec))


@pytest.mark.usefixtures("toy")
def test_a_trial_keeps_who_started_it_and_the_spec_of_that_moment(store: Store) -> None:
    anna, ben = lease_of(store, "anna", FIRST), lease_of(store, "ben", SECOND)
    for lease in (anna, ben, anna):
        assert store.trials.start("toy", make_plan(), environment=HERE, lease=lease) is not None
    store.studies.update_spec("toy", SECOND)
    assert [trial.started_by for trial in store.trials.of("toy")] == ["anna", "ben", "anna"]
    assert [store.trials.spec("toy", number) for number in (1, 2, 3)] == [FIRST, SECOND, FIRST]
    assert store.studies.keep_spec("toy", FIRST) == store.trials.get("toy", 1).spec_digest == spec_digest(FIRST)


@pytest.mark.usefixtures("toy")
def test_a_queued_trial_is_started_by_whose_driver_takes_it_and_keeps_that_through_a_pause(store: Store) -> None:
    number = enqueue(store)
    assert (store.trials.get("toy", number).started_by, store.trials.spec("toy", number)) == (None, None)
    limits = {"train_seconds_limit": 5.0, "eval_every_steps": 3, "threads": 2}
    anna, ben = lease_of(store, "anna", FIRST), lease_of(store, "ben", SECOND)
    started = store.trials.start("toy", make_plan(queued=number, **limits), environment=HERE, lease=anna)
    assert started is not None and (started.started_by, started.spec_digest) == ("anna", anna.spec)
    paused = TrialOutcome(state=TrialState.PAUSED, reason="waits", device="cuda:1", device_uuid="GPU-1")
    store.trials.finish("toy", number, paused, steps_x_step_time_s=None)
    again = store.trials.start("toy", make_plan(resumed=number, train_seconds_limit=9.0), environment=HERE, lease=ben)
    assert again is not None and (again.started_by, again.spec_digest) == ("anna", anna.spec)


@pytest.mark.usefixtures("toy")
def test_the_device_of_a_trial_is_kept_with_its_end(store: Store) -> None:
    ended = replace(OUTCOME, device="cuda:1", device_uuid="GPU-8f6f")
    number = start(store)
    store.trials.finish("toy", number, ended, steps_x_step_time_s=None)
    assert store.trials.get("toy", number).outcome == ended


@pytest.mark.usefixtures("toy")
def test_the_specs_of_a_study_go_with_it(store: Store) -> None:
    store.studies.keep_spec("toy", FIRST)
    store.studies.delete("toy")
    add_study(store)
    lease = Lease(owner="driver", seconds=60.0, spec=spec_digest(FIRST))
    assert store.trials.start("toy", make_plan(), environment=HERE, lease=lease) is not None
    assert store.trials.spec("toy", 1) is None


@pytest.mark.parametrize("changes", [{"libraries": ("timm 1.0",)}, {"git_dirty": False}, {"git_dirty": True}])
def test_an_environment_without_versions_keeps_its_digest_and_others_have_their_own(changes: dict[str, object]) -> None:
    known_before = "c81c1fa81c471568eaf6773c514e914615613356c0e75d6a5465598d46fc1eae"
    assert environment_digest(HERE) == known_before, "as a version computed it that knew no libraries"
    assert environment_digest(make_environment(**changes)) != known_before
