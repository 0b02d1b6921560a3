"""How much the time to the target differs between the seeds of one configuration, as far as a study has shown it."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable

PRIOR = 0.15
PRIOR_FREEDOM = 4
"""Before repeats show it: the standard deviation of log seconds, worth so many degrees of freedom."""


def seed_noise(times: Iterable[tuple[Hashable, float]], stopped: Collection[Hashable] = ()) -> float:
    """Return the standard deviation of log seconds between seeds, from (configuration, seconds to the target).

    Pooled over the configurations that were run more than once, and drawn towards `PRIOR` where those are few. Those of
    which a run was ``stopped`` for being slow are left out: of them only the lucky runs have a time.
    """
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for configuration, seconds in times:
        if configuration not in stopped and seconds > 0:
            groups[configuration].append(math.log(seconds))
    squares, freedom = PRIOR_FREEDOM * PRIOR**2, PRIOR_FREEDOM
    for logs in groups.values():
        squares += statistics.pvariance(logs) * len(logs)
        freedom += len(logs) - 1
    return math.sqrt(squares / freedom)
