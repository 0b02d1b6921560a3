"""Who is served next: owners share alike, the studies of one owner by their priorities.

Stride scheduling on two levels. What an owner or a study was served, over its weight, is its virtual time, and the one
with the least comes next (Waldspurger and Weihl 1995, "Stride Scheduling", MIT/LCS/TM-528). Who joins, or comes back,
starts at the clock: the virtual time at which somebody was last served, or at its own where that is later
(Goyal, Vin and Cheng 1996, "Start-time Fair Queuing", eq. 4). So nobody is owed for the time they were away, and nobody
gets rid of what they have had by going away for a moment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Account:
    """What one was served, in seconds over its weight, and how much that was when it came or was served last."""

    virtual_time: float = 0.0
    started_at: float = 0.0

    def join(self, clock: float) -> None:
        """Come, or come back, at what the clock shows."""
        self.virtual_time = max(self.virtual_time, clock)
        self.started_at = max(self.started_at, clock)

    def charge(self, seconds: float) -> None:
        """Serve one from now on, for so many seconds over its weight."""
        self.started_at = self.virtual_time
        self.virtual_time += seconds

    def settle(self, seconds: float) -> None:
        """Put right what was charged; no account falls below zero."""
        self.virtual_time = max(0.0, self.virtual_time + seconds)


@dataclass(slots=True)
class Waiting:
    """A study that wants to be served, with a positive ``priority`` among those of its owner.

    One that ``has_joined`` was there at an earlier choice and has not been away since.
    """

    name: str
    owner: str
    priority: float = 1.0
    account: Account = field(default_factory=Account)
    has_joined: bool = False


class Ledger:
    """The accounts of owners and studies at one moment; ``waiting`` are in the order in which they were submitted.

    ``owners`` are all that ever had a study; ``floors`` have for each the largest virtual time among its studies, those
    that are over too. What is joined, charged and settled changes the accounts that were given.
    """

    def __init__(
        self,
        waiting: Iterable[Waiting],
        owners: Mapping[str, Account] | None = None,
        floors: Mapping[str, float] | None = None,
    ) -> None:
        self.waiting = {one.name: one for one in waiting}
        self.owners = dict(owners or {})
        self._floors = dict(floors or {})
        self._join()

    def next(self, eligible: Collection[str]) -> str | None:
        """Return which of the ``eligible`` is served next: of the least served owner the least served study.

        Of two that are equal the one that was submitted first; None where there is none.
        """
        studies = [one for one in self.waiting.values() if one.name in eligible]
        if not studies:
            return None
        owner = min(studies, key=lambda one: self.owners[one.owner].virtual_time).owner
        return min((one for one in studies if one.owner == owner), key=lambda one: one.account.virtual_time).name

    def charge(self, name: str, seconds: float) -> None:
        """Serve a study for so many slot seconds."""
        study = self.waiting[name]
        self.owners[study.owner].charge(seconds)
        study.account.charge(seconds / study.priority)

    def shares(self) -> dict[str, float]:
        """Return the share of each study: owners alike, within one in proportion to the priorities."""
        sums: dict[str, float] = {}
        for one in self.waiting.values():
            sums[one.owner] = sums.get(one.owner, 0.0) + one.priority
        return {one.name: one.priority / sums[one.owner] / len(sums) for one in self.waiting.values()}

    def order(self) -> list[str]:
        """Return the studies in the order in which they would be served if each turn were short."""
        return [
            one.name
            for one in sorted(
                self.waiting.values(),
                key=lambda one: (self.owners[one.owner].virtual_time, one.account.virtual_time),
            )
        ]

    def _join(self) -> None:
        """Let those in that have come, or come back, since the last choice."""
        there = [one for one in self.waiting.values() if one.has_joined and one.owner in self.owners]
        joined = {one.name for one in there}
        for one in self.waiting.values():
            if one.name in joined:
                continue
            account = self.owners.setdefault(one.owner, Account())
            companions = [other for other in there if other.owner == one.owner]
            if companions:
                clock = max(other.account.started_at for other in companions)
            else:
                account.join(self._clock_of_owners(there))
                clock = self._floors.get(one.owner, 0.0)
            one.account.join(clock)
            one.has_joined = True
            there.append(one)

    def _clock_of_owners(self, there: Collection[Waiting]) -> float:
        """Return the virtual time of owners; where none of them waits, that of the one that was served most."""
        owners = {one.owner for one in there}
        if not owners:
            return max((one.virtual_time for one in self.owners.values()), default=0.0)
        return max(self.owners[owner].started_at for owner in owners)
