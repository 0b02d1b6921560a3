"""Who is served next, on a virtual clock: shares as stated, whoever comes, goes, and however many workers there are."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bssearch.queue.fairness import Account, Ledger, Waiting


class Cluster:
    """Workers on a virtual clock that serve studies, given as name: (owner, priority), in turns of ``expected``."""

    def __init__(self, workers: int, studies: Mapping[str, tuple[str, float]], expected: float = 10.0) -> None:
        self.studies = dict(studies)
        self.expected = expected
        self.accounts = {name: Waiting(name, *one) for name, one in studies.items()}
        self.owners: dict[str, Account] = {}
        self.served: Counter[str] = Counter()
        self.free = [(0.0, number) for number in range(workers)]
        self.running: dict[int, tuple[str, float]] = {}

    def ledger(self, waiting: Collection[str]) -> Ledger:
        floors: dict[str, float] = {}
        for one in self.accounts.values():
            floors[one.owner] = max(floors.get(one.owner, 0.0), one.account.virtual_time)
        ledger = Ledger([self.accounts[name] for name in self.accounts if name in waiting], self.owners, floors)
        self.owners = ledger.owners
        return ledger

    def leave(self, name: str) -> None:
        self.accounts[name].has_joined = False

    def serve(
        self,
        until: float,
        waiting: Collection[str] | None = None,
        eligible: Mapping[int, Collection[str]] | None = None,
        takes: float | None = None,
    ) -> Counter[str]:
        """Serve until a moment; return the seconds that each study had. Each turn ``takes`` what it takes."""
        waiting = self.accounts if waiting is None else waiting
        before = Counter(self.served)
        while self.free[0][0] < until:
            now, worker = heapq.heappop(self.free)
            if worker in self.running:
                name, used = self.running.pop(worker)
                self.accounts[name].account.settle((used - self.expected) / self.accounts[name].priority)
                self.owners[self.accounts[name].owner].settle(used - self.expected)
            ledger = self.ledger(waiting)
            name_or_none = ledger.next((eligible or {}).get(worker, waiting))
            used = self.expected if takes is None else takes
            if name_or_none is not None:
                ledger.charge(name_or_none, self.expected)
                self.running[worker] = name_or_none, used
                self.served[name_or_none] += used  # type: ignore[assignment]
            heapq.heappush(self.free, (now + used, worker))
        return Counter({name: self.served[name] - before[name] for name in self.accounts})


def shares(served: Counter[str]) -> dict[str, float]:
    total = sum(served.values())
    return {name: seconds / total for name, seconds in served.items()}


SIX = {"a1": ("ann", 1), "a2": ("ann", 3), "b1": ("bob", 1), "b2": ("bob", 1), "b3": ("bob", 2), "c1": ("cy", 5)}


def test_owners_share_alike_and_their_studies_by_priority() -> None:
    cluster = Cluster(4, SIX)
    found = shares(cluster.serve(20_000))
    assert cluster.ledger(SIX).shares() == pytest.approx(
        {"a1": 1 / 12, "a2": 3 / 12, "b1": 1 / 12, "b2": 1 / 12, "b3": 2 / 12, "c1": 1 / 3}
    )
    assert found == pytest.approx(cluster.ledger(SIX).shares(), rel=0.02)


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(1, 8),
    studies=st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0.25, 8)), min_size=1, max_size=8),
    takes=st.floats(2, 30),
)
def test_shares_are_as_stated_whatever_the_workers_and_priorities(
    workers: int, studies: list[tuple[str, float]], takes: float
) -> None:
    cluster = Cluster(workers, {f"s{number}": one for number, one in enumerate(studies)})
    found = cluster.serve(takes * 4000 / workers, takes=takes)
    stated, total = cluster.ledger(cluster.accounts).shares(), sum(found.values())
    # No one is further from its due than the turns that all workers have in hand.
    slack = (workers + len(studies) + 1) * max(takes, cluster.expected)
    for name, share in stated.items():
        assert found[name] == pytest.approx(share * total, abs=slack)


@settings(max_examples=40, deadline=None)
@given(workers=st.integers(1, 4), alone=st.floats(0, 5000), priority=st.floats(0.5, 4))
def test_who_joins_is_neither_owed_nor_owing(workers: int, alone: float, priority: float) -> None:
    cluster = Cluster(workers, {"old": ("ann", 1), "new": ("bob", priority)})
    cluster.serve(alone, {"old"})
    found = cluster.serve(alone + 2000)
    assert found["new"] == pytest.approx(found["old"], abs=(workers + 2) * cluster.expected)


def test_a_study_that_joins_its_owner_s_others_is_neither_owed_nor_owing() -> None:
    cluster = Cluster(2, {"old": ("ann", 1), "new": ("ann", 3), "other": ("bob", 1)})
    cluster.serve(3000, {"old", "other"})
    found = cluster.serve(6000)
    assert shares(found) == pytest.approx({"old": 1 / 8, "new": 3 / 8, "other": 1 / 2}, rel=0.05)


def test_who_comes_back_from_a_pause_is_not_owed_for_it() -> None:
    cluster = Cluster(2, {"a": ("ann", 1), "b": ("bob", 1)})
    cluster.serve(1000)
    cluster.leave("b")
    cluster.serve(5000, {"a"})
    found = cluster.serve(7000)
    assert found["a"] == pytest.approx(found["b"], rel=0.05)


def test_a_pause_and_a_return_at_once_gain_nothing() -> None:
    honest, sly = Cluster(1, {"a": ("ann", 1), "b": ("bob", 1)}), Cluster(1, {"a": ("ann", 1), "b": ("bob", 1)})
    for moment in range(10, 4000, 10):
        honest.serve(moment)
        sly.serve(moment)
        sly.leave("b")
    assert sly.served["b"] <= honest.served["b"] + sly.expected


def test_who_used_the_nodes_while_nobody_else_wanted_them_owes_nothing_for_it() -> None:
    cluster = Cluster(2, {"a": ("ann", 1), "b": ("bob", 1)})
    cluster.serve(5000, {"a"})
    cluster.leave("a")
    cluster.serve(5100, {"b"})
    found = cluster.serve(8000)
    assert found["a"] == pytest.approx(found["b"], rel=0.06)


def test_a_study_whose_owner_was_served_alone_does_not_starve_on_its_return() -> None:
    cluster = Cluster(1, {"a": ("ann", 1), "b": ("ann", 1)})
    cluster.serve(5000, {"a"})
    cluster.leave("a")
    cluster.serve(5100, {"b"})
    found = cluster.serve(7000)
    assert found["a"] == pytest.approx(found["b"], rel=0.1)


def test_a_newcomer_does_not_profit_from_one_that_few_workers_may_serve() -> None:
    studies = {"wide": ("ann", 1), "narrow": ("bob", 1), "new": ("cy", 1)}
    cluster = Cluster(4, studies)
    eligible = {0: {"narrow"}, **{number: {"wide", "new"} for number in (1, 2, 3)}}
    cluster.serve(4000, {"wide", "narrow"}, eligible)
    found = cluster.serve(6000, eligible=eligible)
    assert found["new"] == pytest.approx(found["wide"], rel=0.06)


def test_of_two_that_are_equal_the_first_is_served_first_and_nobody_where_none_is_eligible() -> None:
    ledger = Ledger([Waiting("one", "ann"), Waiting("two", "bob")])
    assert ledger.next({"one", "two"}) == "one"
    assert ledger.next(()) is None
    assert ledger.order() == ["one", "two"]


def test_what_was_charged_and_not_used_is_given_back() -> None:
    account = Account()
    account.charge(10)
    account.settle(-7)
    assert account.virtual_time == 3
    account.settle(-7)
    assert account.virtual_time == 0


def test_two_that_come_together_after_one_that_was_alone_are_served_alike() -> None:
    cluster = Cluster(1, {"a": ("ann", 1), "b": ("bob", 1), "c": ("cy", 1)})
    cluster.serve(5000, {"a"})
    cluster.leave("a")
    found = cluster.serve(7000, {"b", "c"})
    assert found["b"] == pytest.approx(found["c"], rel=0.05)
