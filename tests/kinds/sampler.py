"""An example of one sampler, as a package of your own may have it."""

import random

from bssearch.search.history import History
from bssearch.search.samplers.base import Choice, Sampler, decoded
from bssearch.spec import StudySpec


class Uniform(Sampler):
    """Uniform over batch sizes and choices, and over the ends and the middle of a range."""

    def __init__(self, spec: StudySpec) -> None:
        self._spec = spec

    def choose(self, history: History, batch_size: int | None = None) -> Choice | None:
        """Return the next configuration; None if no batch size fits into memory."""
        rng = random.Random(f"{self._spec.seed} {history.length}")
        if not history.feasible:
            return None
        sampled = {
            one.name: rng.choice(one.choices or [(one.low + one.high) / 2, one.low, one.high])
            for one in self._spec.space.dimensions()
        }
        return decoded(self._spec, batch_size or rng.choice(history.feasible), sampled)

    def ending(self, history: History) -> str | None:
        return None if history.feasible else "no batch size fits into memory"
