"""What a search has seen so far, as questions with answers; see `bssearch.history.seen`."""

from bssearch.history.repeats import SEED_NOISE, SEED_NOISE_FREEDOM, Repeats, measured_seconds
from bssearch.history.seen import ATTEMPTS, FAILURES, INTERRUPTED, TRIED_AGAIN, History, is_interrupted, octaves

__all__ = [
    "ATTEMPTS",
    "FAILURES",
    "INTERRUPTED",
    "SEED_NOISE",
    "SEED_NOISE_FREEDOM",
    "TRIED_AGAIN",
    "History",
    "Repeats",
    "is_interrupted",
    "measured_seconds",
    "octaves",
]
