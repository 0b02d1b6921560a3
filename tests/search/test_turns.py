"""Drivers that are in each other's way take turns."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bssearch.commands.run import run_study
from bssearch.executors.base import Event
from bssearch.search import turns
from bssearch.search.turns import Turns
from bssearch.storage.repository import Store, open_store
from bssearch.storage.turns import Standing
from tests.factories import make_environment, make_spec
from tests.search.law import LawExecutor
from tests.storage.conftest import start_after

SPEC = make_spec(budget={"trials": 30, "trial_train_seconds": 100.0}, confirm={"runs": 0})


class Rests(LawExecutor):
    """Waits as an executor does that has nothing to run."""

    def events(self, timeout: float) -> list[Event]:
        if not self.running:
            threading.Event().wait(timeout)
        return super().events(timeout)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The drivers' own clock, which the test sets."""
    now = [0.0]
    monkeypatch.setattr("bssearch.search.turns.time.monotonic", lambda: now[0])
    return now


def make_study(url: str) -> None:
    with open_store(url) as store:
        store.create_study(SPEC.new_study("test"))
        store.bind_environment(SPEC.name, make_environment())


def two_in_each_others_way(store: Store) -> tuple[Turns, Turns]:
    """Return the turns of drivers a and b: both were refused, a has the turn and b stands behind it."""
    first, second = Turns(store, SPEC.name, "a"), Turns(store, SPEC.name, "b")
    for one in (first, second):
        one.refused()
    assert [first.is_here(), second.is_here()] == [True, False]
    return first, second


def test_drivers_that_were_refused_have_their_turns_in_the_order_in_which_they_came(
    url: str, clock: list[float]
) -> None:
    make_study(url)
    with open_store(url) as store:
        drivers = {name: Turns(store, SPEC.name, name) for name in "abcdef"}
        assert all(one.is_here() for one in drivers.values()), "who was never refused need not ask"
        for one in drivers.values():
            one.refused()
            one.is_here()
        served: list[str] = []
        while len(served) < 3 * len(drivers):
            clock[0] += 0.01
            for name, one in drivers.items():
                if one.is_here():
                    assert start_after(store, len(served), name, SPEC.name) == len(served) + 1
                    served.append(name)
                    one.end()
                    one.refused()
                    one.is_here()
    assert "".join(served) == "abcdef" * 3


@pytest.mark.parametrize(("others", "reads_ahead"), [(turns.MANY_TURNS, False), (turns.MANY_TURNS + 1, True)])
def test_after_many_turns_of_others_it_reads_before_its_own_too(
    url: str, clock: list[float], others: int, reads_ahead: bool
) -> None:
    make_study(url)
    with open_store(url) as store:
        for number in range(others):
            store.queue_up(SPEC.name, str(number), 60.0)
        one = Turns(store, SPEC.name, "mine")
        one.refused()
        reads: list[bool] = []
        for number in range(others):
            clock[0] += 10.0
            assert not one.is_here()
            reads.append(one.is_to_read)
            store.leave_queue(SPEC.name, str(number))
        clock[0] += 10.0
        assert one.is_here() and one.is_to_read
    assert reads == [False] * (others - 1) + [reads_ahead]


def test_after_the_last_start_of_a_turn_it_asks_for_one_again_only_where_others_stood_behind_it(url: str) -> None:
    make_study(url)
    with open_store(url) as store:
        first, second = two_in_each_others_way(store)
        first.refused()
        assert first.is_here(), "it looks again, and sees b behind it"
        assert start_after(store, 0, "a", SPEC.name, is_last=True) == 1
        first.ended()
        second.refused()
        assert second.is_here()
        assert start_after(store, 1, "b", SPEC.name, is_last=True) == 2
        second.ended()
        assert [first.is_here(), second.is_here()] == [True, True]
        assert store.queue_up(SPEC.name, "c", 60.0) == Standing(ahead=1, behind=0), "a queued up again, b need not"


def test_who_finds_nobody_behind_it_asks_for_no_turn_the_next_time(url: str) -> None:
    make_study(url)
    with open_store(url) as store:
        first, second = two_in_each_others_way(store)
        first.end()
        assert not first.is_here(), "b stood behind it"
        first.end()
        second.end()
        assert second.is_here()
        assert store.queue_up(SPEC.name, "c", 60.0).ahead == 0, "nobody stands there"


@pytest.mark.slow
def test_drivers_in_each_others_way_try_no_configuration_twice_and_are_all_served(url: str) -> None:
    executors = [Rests() for _ in range(6)]
    with ThreadPoolExecutor(len(executors)) as pool:
        runs = [pool.submit(run_study, SPEC, db=url, make_executor=lambda *_, one=one: one) for one in executors]
        answers = [run.result() for run in runs]
    with open_store(url, write=False) as store:
        trials = store.trials(SPEC.name)
    assert [trial.number for trial in trials] == list(range(1, SPEC.budget.trials + 1))
    assert set(Counter(trial.configuration.key for trial in trials).values()) == {1}
    assert sum(len(executor.requests) for executor in executors) == len(trials)
    assert all(answer == answers[0] for answer in answers)


DIES_IN_ITS_TURN = """
import os, sys
from bssearch.search.turns import Turns
from bssearch.storage.repository import open_store
from bssearch.storage.turns import Standing
store = open_store(sys.argv[1])
turns = Turns(store, "toy", "killed")
turns.refused()
assert turns.is_here()
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_driver_that_is_killed_in_its_turn_keeps_the_others_no_longer_than_its_place_lasts(url: str) -> None:
    make_study(url)
    killed = subprocess.run([sys.executable, "-c", DIES_IN_ITS_TURN, url], cwd=Path.cwd(), check=False)
    assert killed.returncode == -9
    with open_store(url, write=False) as store:
        assert store.leases(SPEC.name).keys() == {"killed"}
    executor = Rests()
    run_study(SPEC, db=url, make_executor=lambda *_: executor)
    assert len(executor.requests) == SPEC.budget.trials


def test_a_driver_gives_its_place_up_where_it_is_interrupted_or_fails(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(LawExecutor):
        def submit(self, request: object) -> None:
            with open_store(url) as store:
                assert store.queue_up(SPEC.name, "other", 60.0).ahead == 1, "it has the turn"
            raise RuntimeError("on purpose")

    def refused_at_first(self: Turns) -> bool:
        self.refused()
        return is_here(self)

    is_here = Turns.is_here
    monkeypatch.setattr(turns.Turns, "is_here", refused_at_first)
    with pytest.raises(RuntimeError, match="on purpose"):
        run_study(SPEC, db=url, make_executor=lambda *_: Fails(slots=2))
    with open_store(url) as store:
        assert store.queue_up(SPEC.name, "other", 60.0).ahead == 0
