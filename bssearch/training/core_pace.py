"""How fast the CPU core under a process goes: a fixed piece of work tells what no account of the kernel shows.

The other hardware thread of a core may belong to somebody else's virtual machine, which counts neither as busy nor as
stolen time here; a hot processor lowers its clock. Either way the same steps take up to twice as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

SLOW = 1.4
"""A look that takes so many times as long as the fastest is slow: more than boost clocks change by, less than what
two hardware threads cost each other."""

SLOW_SHARE = 0.1
"""So many of a measurement's looks may be slow."""

SPINS = 3
_ROUNDS = 3000


class CorePace:
    """Looks at the pace of the core, and remembers the fastest; a process keeps one for as long as it lives.

    A look takes about a third of a millisecond. Until the core has once gone at its full pace, slow looks are not
    known for what they are.
    """

    def __init__(self, spin: Callable[[], float] | None = None) -> None:
        self._spin = spin or _spin_seconds
        self._fastest = inf

    def look(self) -> float:
        """Return how long the piece of work takes now, in seconds (the first of a few tries finds cold caches)."""
        seconds = min(self._spin() for _ in range(SPINS))
        self._fastest = min(self._fastest, seconds)
        return seconds

    def is_slow(self, seconds: float) -> bool:
        """Return whether a look was slow, by all that is known now."""
        return seconds > SLOW * self._fastest


def _spin_seconds() -> float:
    total, started = 0, time.perf_counter()
    for number in range(_ROUNDS):
        total += number
    return time.perf_counter() - started
