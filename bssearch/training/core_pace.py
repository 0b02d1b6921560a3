"""How fast the CPU core under a process goes: a fixed piece of work tells what no account of the kernel shows.

The other hardware thread of a core may belong to somebody else's virtual machine, which counts neither as busy nor as
stolen time here; a hot processor lowers its clock. Either way the same steps take up to twice as long.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

SLOW = 1.4
"""A look is slow where it takes this many times as long as the fastest: below the 1.7 times that a core was measured to
take while its other hardware thread was at work."""

SLOW_SHARE = 0.25
SLOW_LOOKS = 2
"""A measurement is contended where at least this share of its looks, and this many, are slow: with a quarter of them at
1.4 times, its steps take a tenth longer."""

REMEMBERED = 1000
"""Looks among which the fastest is sought: a choice."""

SPINS = 3
_ROUNDS = 3000
"""Spins in a look, of which the fastest counts, and rounds in a spin: a choice."""

SIDE = 128
PRODUCTS = 2
"""Rows and columns of the matrices of the reference kernel, and products that are timed after one that warms the
caches (what ran before must not matter): a tenth of a millisecond or so. Choices."""

LOOK_SECONDS = 0.02
"""The kernel is timed at most once in so many seconds, so that it stays below some percent of the time: a choice."""


class CorePace:
    """Looks at the pace of the core, and compares with the fastest of late; a process keeps one for all its trials.

    A look takes about a quarter of a millisecond, on a core that is awake: one that idled before takes longer. Until
    the core has once gone at its full pace, slow looks are not known for what they are; of a pace that it has not kept
    up for `REMEMBERED` looks nothing is known any more.
    """

    def __init__(self, spin: Callable[[], float] | None = None) -> None:
        self._spin = spin or _spin_seconds
        self._looks: deque[float] = deque(maxlen=REMEMBERED)

    def look(self) -> float:
        """Return how long the piece of work takes now, in seconds (the first of a few tries finds cold caches)."""
        seconds = min(self._spin() for _ in range(SPINS))
        self._looks.append(seconds)
        return seconds

    @property
    def slow_above(self) -> float:
        """The seconds above which a look was slow, by all that is known now."""
        return SLOW * min(self._looks)

    def is_slow(self, seconds: float) -> bool:
        """Return whether a look was slow, by all that is known now."""
        return seconds > self.slow_above


class ReferenceKernel:
    """Times products of two small matrices, in seconds of CPU: fixed work beside which steps are timed.

    A core that others share does all work more slowly for a while. What a step took over what the kernel took at the
    same moment changes less. ``seconds`` is the median of the looks so far, None before the first. Looks that come
    sooner than ``period`` seconds after the last are left out.
    """

    def __init__(self, period: float = LOOK_SECONDS) -> None:
        self._period = period
        self._matrix = torch.ones(SIDE, SIDE)
        self._looks: list[float] = []
        self._next = 0.0

    @classmethod
    def where_it_tells(cls, device: torch.device, threads: int) -> ReferenceKernel | None:
        """Return a kernel where steps are computed by one thread of a CPU, None where others do the work."""
        return cls() if device.type == "cpu" and threads == 1 else None

    @property
    def seconds(self) -> float | None:
        """Return the median of the looks, None without any."""
        return statistics.median(self._looks) if self._looks else None

    def look(self) -> None:
        """Time the kernel once."""
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + self._period
        self._multiply(1)
        started = time.thread_time()
        self._multiply(PRODUCTS)
        self._looks.append(time.thread_time() - started)

    def state(self) -> dict[str, Any]:
        """Return the looks, to be saved."""
        return {"looks": list(self._looks)}

    def restore(self, state: dict[str, Any]) -> None:
        """Add the looks of an earlier part of the work."""
        self._looks = [*state["looks"], *self._looks]

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._matrix, self._matrix)


def are_too_many(slow: int, looks: int) -> bool:
    """Return whether too many of a measurement's looks were slow (`SLOW_SHARE`, `SLOW_LOOKS`) for its time to count."""
    return slow >= SLOW_LOOKS and slow >= SLOW_SHARE * looks


def _spin_seconds() -> float:
    total, started = 0, time.perf_counter()
    for number in range(_ROUNDS):
        total += number
    return time.perf_counter() - started
