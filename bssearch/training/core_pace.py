"""How fast the CPU core under a process goes: a fixed piece of work tells what no account of the kernel shows.

The other hardware thread of a core may belong to somebody else's virtual machine, which counts neither as busy nor as
stolen time here; a hot processor lowers its clock. Either way the same steps take up to twice as long.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

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


def are_too_many(slow: int, looks: int) -> bool:
    """Return whether too many of a measurement's looks were slow (`SLOW_SHARE`, `SLOW_LOOKS`) for its time to count."""
    return slow >= SLOW_LOOKS and slow >= SLOW_SHARE * looks


def _spin_seconds() -> float:
    total, started = 0, time.perf_counter()
    for number in range(_ROUNDS):
        total += number
    return time.perf_counter() - started
