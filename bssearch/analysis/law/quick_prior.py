"""What a search may begin with of a quick answer: a prior over the critical batch size, which trials overcome."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class QuickPrior:
    """A quick answer as a search uses it, in samples.

    ``batch_size`` is the one that it recommends, ``interval`` holds the optimum with 90 %; ``b_crit`` is the critical
    batch size with its 90 % interval, ``noise_scale`` the gradient noise scale near the target, None where it was not
    measured.
    """

    batch_size: int
    interval: tuple[int, int]
    b_crit: tuple[float, float, float]
    noise_scale: float | None

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self | None:
        """Return the prior of a stored quick answer; None for what is no such answer."""
        try:
            low, high = (int(end) for end in document["interval"])
            b_crit = tuple(float(document["b_crit"][name]) for name in ("low", "estimate", "high"))
            scale = document["noise_scale"]
            size, noise = int(document["optimal"]["batch_size"]), None if scale is None else float(scale)
        except (KeyError, TypeError, ValueError):  # what something else has written there does not matter
            return None
        known = [*b_crit, *([] if noise is None else [noise])]
        if not (0 < low <= high and size > 0 and all(0 < one < math.inf for one in known)):
            return None
        return cls(size, (low, high), (b_crit[0], b_crit[1], b_crit[2]), noise)

    def holds(self, batch_size: int) -> bool:
        """Return whether a batch size lies within the interval of the optimum."""
        return self.interval[0] <= batch_size <= self.interval[1]
