"""A loop that runs alone, without a search: it trains as its script says, and prints what it evaluates."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import torch

from bssearch.errors import UsageError
from bssearch.integrations.assignment import Evaluate, Metrics, Untimed
from bssearch.integrations.growing.stages import LoopStages
from bssearch.records import Configuration, ParameterValue


class Alone(Untimed):
    """The assignment of a script that nobody searches with; see `bssearch.integrations.assignment.Assignment`.

    It is evaluated after every ``evaluate_every`` steps (None: after each pass of `batches`), before the first one not,
    and ends after ``steps`` of them (None: where the script's loop does).
    """

    cycles = False

    def __init__(
        self,
        configuration: Configuration,
        seed: int,
        parameters: Mapping[str, ParameterValue],
        evaluate_every: int | None = None,
        steps: int | None = None,
    ) -> None:
        for name, value in (("evaluate_every", evaluate_every), ("steps", steps)):
            if value is not None and value < 1:
                raise UsageError(f"current_trial({name}={value}): must be >= 1, or None")
        self.configuration = configuration
        self.stages = LoopStages(configuration)
        self.seed = seed
        self.parameters = parameters
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.is_over = False
        self._every = evaluate_every
        self.evaluates_passes = evaluate_every is None
        self._most_steps = math.inf if steps is None else steps

    def is_due(self, step: int) -> bool:
        """Return whether the loop is to be evaluated."""
        return self._every is not None and step > 0 and step % self._every == 0

    def stepped(self, step: int, samples: int | None) -> None:
        """End after the last step, where it is not evaluated."""
        self.is_over = step >= self._most_steps and not self.is_due(step)

    def warned(self, sentence: str) -> None:
        """Print it."""
        print(sentence, file=sys.stderr)

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        """Print an evaluation; end after that of the last step."""
        self.is_over = step >= self._most_steps
        if not isinstance(metrics, Mapping):
            raise UsageError(f"evaluate() returned a {type(metrics).__name__}; it must return a mapping of metrics")
        print_evaluation(step, {**metrics, **({} if loss is None else {"loss": loss})})

    def test(self, evaluate: Evaluate) -> None:
        """Print the metrics of the test part."""
        told = ", ".join(f"{name} {value}" for name, value in evaluate().items())
        print(f"test: {told}", file=sys.stderr)

    def looped(self, step: int, because: str = "") -> None:
        """The loop may end when it likes."""


def print_evaluation(step: int, metrics: Metrics) -> None:
    """Print what an evaluation has found, to stderr."""
    told = ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )
    print(f"step {step}: {told}", file=sys.stderr)
