"""Whose leases count as ended: by this machine's own clock, however the database's jumps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bssearch.search.leases import GONE_AFTER, HEARTBEAT_SECONDS, LEASE_SECONDS, Leases, living, this_driver
from bssearch.storage.repository import Store, open_store
from tests.search.study import url_in
from tests.storage.conftest import add_study, start

ELSEWHERE = "another-host/4711/0a1b2c3d/99/11223344"
HOURS = -7200.0
"""A lease that ended two hours ago by the database's clock, as all do where that clock jumps ahead."""


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(url_in(tmp_path)) as opened:
        add_study(opened)
        yield opened


def watched(store: Store, clock: Clock, seconds: float, watch: Leases | None = None) -> Leases:
    """Look at every heartbeat for so many seconds."""
    watch = watch or Leases(store, "toy", clock=clock)
    watch.look()
    for _ in range(round(seconds / HEARTBEAT_SECONDS)):
        clock.now += HEARTBEAT_SECONDS
        watch.look()
    return watch


def test_a_driver_elsewhere_is_gone_once_its_lease_was_watched_for_as_long_as_it_lasts(store: Store) -> None:
    start(store, lease_owner=ELSEWHERE, lease_seconds=HOURS)
    clock = Clock()
    watch = watched(store, clock, LEASE_SECONDS - HEARTBEAT_SECONDS)
    assert store.leases.mark_lost("toy", is_alive=watch.is_alive) == [], (
        "the clock may have jumped, and it may renew it"
    )
    watched(store, clock, HEARTBEAT_SECONDS, watch)
    assert watch.is_alive(ELSEWHERE) is None
    assert store.leases.mark_lost("toy", is_alive=watch.is_alive) == [1]


def test_a_lease_that_has_not_ended_by_the_databases_clock_is_kept_for_two(store: Store) -> None:
    start(store, lease_owner=ELSEWHERE, lease_seconds=-HOURS)
    clock = Clock()
    watch = watched(store, clock, GONE_AFTER - HEARTBEAT_SECONDS)
    assert store.leases.mark_lost("toy", is_alive=watch.is_alive) == []
    watched(store, clock, HEARTBEAT_SECONDS, watch)
    assert store.leases.mark_lost("toy", is_alive=watch.is_alive) == [1]


def test_a_driver_that_renews_is_alive_whatever_the_databases_clock_says(store: Store) -> None:
    start(store, lease_owner=ELSEWHERE, lease_seconds=HOURS)
    clock = Clock()
    watch = Leases(store, "toy", clock=clock)
    for beat in range(20):
        store.leases.heartbeat("toy", ELSEWHERE, HOURS + beat)
        watched(store, clock, HEARTBEAT_SECONDS, watch)
        assert store.leases.mark_lost("toy", is_alive=watch.is_alive) == []


def test_a_living_process_without_its_driver_loses_its_trials_and_claims(store: Store) -> None:
    owner, clock = this_driver(), Clock()
    start(store, lease_owner=owner)
    assert store.leases.claim("toy", "probe", owner=owner, lease_seconds=60.0, is_alive=lambda _: None)
    with living(owner):
        watch = watched(store, clock, GONE_AFTER - HEARTBEAT_SECONDS)
        assert watch.is_alive(owner) is True
        watched(store, clock, HEARTBEAT_SECONDS, watch)
        assert watch.is_alive(owner) is False, "its heart has stopped"
    fresh = Leases(store, "toy", clock=clock)
    assert store.leases.mark_lost("toy", is_alive=fresh.is_alive) == [1]
    assert store.leases.claim("toy", "probe", owner="another", lease_seconds=60.0, is_alive=fresh.is_alive)


def test_a_trial_that_has_ended_is_no_lease_to_watch(store: Store) -> None:
    start(store, lease_owner=ELSEWHERE, lease_seconds=HOURS)
    clock = Clock()
    watch = watched(store, clock, LEASE_SECONDS)
    assert store.leases.mark_lost("toy", is_alive=lambda _: False) == [1]
    watch.look()
    start(store, lease_owner=ELSEWHERE, lease_seconds=HOURS)
    watch.look()
    assert watch.is_alive(ELSEWHERE) is True, "a new lease"
