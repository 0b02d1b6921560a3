"""The queue of drivers that want to start trials, on every database."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import update

from bssearch.storage.models import ClaimRow
from bssearch.storage.repository import Store
from bssearch.storage.turns import Standing
from tests.storage.conftest import add_study, enqueue, start_after, start_queued


def test_only_the_first_in_the_queue_starts_a_trial_and_they_follow_in_the_order_of_their_coming(store: Store) -> None:
    add_study(store)
    assert [store.queue_up("toy", owner, 60.0).ahead for owner in ("a", "b", "c")] == [0, 1, 2]
    assert [start_after(store, 0, owner) for owner in ("newcomer", "c", "b", "a")] == [None, None, None, 1]
    assert store.queue_up("toy", "a", 60.0).ahead == 0, "it keeps its turn until it gives it up"
    assert store.leave_queue("toy", "a") == 2
    assert store.queue_up("toy", "a", 60.0).ahead == 2, "who comes back is the last"
    assert [start_after(store, 1, owner) for owner in ("a", "c", "b")] == [None, None, 2]
    assert [store.leave_queue("toy", owner) for owner in ("b", "c", "a", "newcomer")] == [2, 1, 0, 0]
    assert start_after(store, 2, "newcomer") == 3


def test_the_last_start_of_a_turn_leaves_the_queue(store: Store) -> None:
    add_study(store)
    for owner in ("a", "b"):
        store.queue_up("toy", owner, 60.0)
    assert start_after(store, 0, "b", is_last=True) is None, "it is not b's turn, and b keeps its place"
    assert start_after(store, 0, "a") == 1
    assert store.queue_up("toy", "b", 60.0) == Standing(ahead=1, behind=0)
    assert start_after(store, 1, "a", is_last=True) == 2
    assert store.queue_up("toy", "b", 60.0) == Standing(ahead=0, behind=0)


def test_a_queued_trial_is_started_in_turn_too(store: Store) -> None:
    add_study(store)
    number = enqueue(store)
    store.queue_up("toy", "a", 60.0)
    assert [start_queued(store, number, owner) for owner in ("b", "a")] == [False, True]


def test_a_place_that_was_not_renewed_is_passed_over_and_counts_again_when_its_owner_comes_back(store: Store) -> None:
    add_study(store)
    store.queue_up("toy", "stalled", -5.0)
    store.queue_up("toy", "dead", -5.0)
    store.heartbeat("toy", "dead", 60.0)
    assert store.queue_up("toy", "b", 60.0).ahead == 0
    assert start_after(store, 0, "b") == 1
    assert store.queue_up("toy", "stalled", 60.0).ahead == 0
    assert store.queue_up("toy", "b", 60.0).ahead == 1
    assert [start_after(store, 1, owner) for owner in ("b", "stalled")] == [None, 2]


def test_a_place_from_before_the_clock_was_set_back_keeps_nobody_waiting(store: Store) -> None:
    add_study(store)
    store.queue_up("toy", "dead", 60.0)
    with store._writing() as connection:
        connection.execute(update(ClaimRow).values(expires_at=store.time() + timedelta(hours=1)))
    assert start_after(store, 0, "b") == 1
    assert store.queue_up("toy", "b", 60.0).ahead == 0


def test_a_start_whose_connection_broke_after_its_commit_is_found_although_others_stand_in_the_queue(
    store: Store,
) -> None:
    add_study(store)
    assert start_after(store, 0, "a") == 1
    store.queue_up("toy", "b", 60.0)
    assert start_after(store, 0, "a") == 1, "the same start once more"
    assert start_after(store, 1, "a") is None
