"""How much the time to the target differs between the seeds of one configuration."""

from __future__ import annotations

import math
from collections import defaultdict

from bssearch.records import Configuration, TrialRecord, TrialState

SEED_NOISE = 0.15
SEED_NOISE_FREEDOM = 4
"""The standard deviation of log seconds between seeds before repeats show it, and its weight in degrees of freedom.

Between what was measured of MLPerf's reference runs (0.04) and of small networks (0.15 to 0.4); the weight is a choice.
"""

Identity = tuple[object, ...]
"""What tells a configuration from others, however its batches are split into micro-batches."""


class Repeats:
    """How much the time to the target differs between the seeds of one configuration, as far as a study has shown it.

    ``noise`` is the standard deviation of log seconds between seeds, pooled over the configurations that were run more
    than once and drawn towards `SEED_NOISE` where those are few. A configuration of which a run was stopped for being
    slow is left out: only its lucky runs have a time.
    """

    def __init__(self) -> None:
        self._logs: dict[Identity, dict[int, float]] = defaultdict(dict)
        self._stopped: dict[Identity, set[int]] = defaultdict(set)
        self._several: set[Identity] = set()

    def take(self, trial: TrialRecord, key: Identity) -> None:
        """Take in a trial of any phase, in the place of what it was before."""
        seconds = measured_seconds(trial) if trial.state is TrialState.REACHED else math.inf
        self._stopped[key].discard(trial.number)
        self._logs[key].pop(trial.number, None)
        if trial.state.is_censored:
            self._stopped[key].add(trial.number)
        elif 0 < seconds < math.inf:
            self._logs[key][trial.number] = math.log(seconds)
        if len(self._logs[key]) > 1:
            self._several.add(key)

    @property
    def noise(self) -> float:
        """Return the standard deviation of log seconds between seeds."""
        squares, freedom = SEED_NOISE_FREEDOM * SEED_NOISE**2, SEED_NOISE_FREEDOM
        for key in self._several:
            logs = [] if self._stopped[key] else list(self._logs[key].values())
            if len(logs) > 1:
                mean = math.fsum(logs) / len(logs)
                squares += math.fsum((one - mean) ** 2 for one in logs)
                freedom += len(logs) - 1
        return math.sqrt(squares / freedom)


def identity_of(configuration: Configuration) -> Identity:
    """Return a value that two configurations share where they train alike, however batches are split."""
    one = configuration
    rates = (one.learning_rate, one.warmup_epochs, one.weight_decay, one.dropout, one.label_smoothing)
    return (one.batch_size, one.world_size, *rates, one.optimizer, *sorted(one.parameters.items()))


def measured_seconds(trial: TrialRecord | None) -> float:
    """Return a trial's time-to-target on the clock that its curve and all running trials have, contended or not."""
    value = trial.outcome.time_to_target_s if trial is not None and trial.outcome is not None else None
    return math.inf if value is None else value
