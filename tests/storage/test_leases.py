"""Leases of trials, and claims inside a study, on every database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bssearch.errors import DatabaseError, NotFoundError
from bssearch.records import (
    TrialOutcome,
    TrialState,
)
from bssearch.storage.repository import Store
from tests.factories import make_curve
from tests.storage.conftest import OUTCOME, add_study, start


class TestLeases:
    def test_a_trial_is_lost_when_its_lease_is_over_or_its_owner_dead(self, store: Store) -> None:
        add_study(store)
        start(store, lease_owner="alive")
        start(store, lease_owner="dead")
        start(store, lease_owner="late", lease_seconds=-5.0)
        start(store, lease_owner="dead")
        store.finish_trial("toy", 4, OUTCOME, steps_x_step_time_s=None)
        assert store.mark_lost("toy", is_alive={"dead": False}.get) == [2, 3]
        one, dead, late, ended = store.trials("toy")
        assert [one.state, dead.state, late.state, ended.state] == ["running", "lost", "lost", "reached"]
        assert dead.outcome == TrialOutcome(state=TrialState.LOST, reason="its driver dead is gone")
        assert late.outcome is not None
        assert late.outcome.reason.startswith("its lease ended at ")
        assert late.ended_at is not None
        assert store.mark_lost("toy", is_alive=lambda owner: True) == []

    def test_a_lost_trial_keeps_how_far_it_had_come(self, store: Store) -> None:
        add_study(store)
        for _ in range(2):
            start(store)
        store.append_observations("toy", [(2, one) for one in make_curve((0.0, 0.1), (1.5, 0.4))])
        store.mark_lost("toy", is_alive=lambda owner: False)
        bare, seen = (trial.outcome for trial in store.trials("toy"))
        assert bare is not None and seen is not None
        assert (bare.steps, bare.final_metric) == (0, None)
        assert (seen.steps, seen.samples, seen.train_seconds, seen.final_metric) == (10, 320, 1.5, 0.4)

    def test_a_heartbeat_keeps_the_leases_of_its_owner_alone(self, store: Store) -> None:
        add_study(store)
        start(store, lease_owner="a", lease_seconds=-5.0)
        start(store, lease_owner="b", lease_seconds=-5.0)
        start(store, lease_owner="a", lease_seconds=-5.0)
        store.finish_trial("toy", 3, OUTCOME, steps_x_step_time_s=None)
        store.heartbeat("toy", "a", 60.0)
        assert store.trial("toy", 3).lease_expires_at is None
        assert store.mark_lost("toy", is_alive=lambda owner: True) == []
        assert store.mark_lost("toy", is_alive=lambda owner: None) == [2]

    def test_a_lost_trial_cannot_be_finished_by_its_driver(self, store: Store) -> None:
        add_study(store)
        start(store)
        store.mark_lost("toy", is_alive=lambda owner: False)
        with pytest.raises(DatabaseError, match="is not running but lost"):
            store.finish_trial("toy", 1, OUTCOME, steps_x_step_time_s=None)


NOBODY_KNOWS: Callable[[str], bool | None] = lambda owner: None  # noqa: E731


class TestClaims:
    def claim(self, store: Store, owner: str, **changes: Any) -> bool:
        values: dict[str, Any] = {"name": "probe", "lease_seconds": 60.0, "is_alive": NOBODY_KNOWS}
        return store.claim("toy", owner=owner, **{**values, **changes})

    def test_one_owner_holds_a_claim_until_it_is_released(self, store: Store) -> None:
        add_study(store)
        add_study(store, "other")
        assert self.claim(store, "a")
        assert self.claim(store, "a"), "tried again"
        assert not self.claim(store, "b")
        assert self.claim(store, "b", name="confirm host")
        assert store.claim("other", "probe", owner="b", lease_seconds=60.0, is_alive=NOBODY_KNOWS)
        store.release("toy", "probe", owner="b")
        assert not self.claim(store, "b")
        store.release("toy", "probe", owner="a")
        store.release("toy", "probe", owner="a")
        assert self.claim(store, "b")

    def test_a_claim_is_taken_over_from_a_dead_owner_or_after_its_lease(self, store: Store) -> None:
        add_study(store)
        assert self.claim(store, "a")
        assert not self.claim(store, "b", is_alive=lambda owner: True)
        assert self.claim(store, "b", is_alive={"a": False}.get, lease_seconds=-5.0)
        assert not self.claim(store, "c", is_alive={"b": True}.get)
        assert self.claim(store, "c")
        assert not self.claim(store, "b")

    def test_a_heartbeat_extends_the_claims_of_its_owner_alone(self, store: Store) -> None:
        add_study(store)
        assert self.claim(store, "a", lease_seconds=-5.0)
        assert self.claim(store, "b", name="confirm host", lease_seconds=-5.0)
        store.heartbeat("toy", "a", 60.0)
        assert not self.claim(store, "c")
        assert self.claim(store, "c", name="confirm host")

    def test_what_a_study_does_not_have_is_not_found(self, store: Store) -> None:
        with pytest.raises(NotFoundError):
            self.claim(store, "a")
        with pytest.raises(NotFoundError):
            store.release("toy", "probe", owner="a")
