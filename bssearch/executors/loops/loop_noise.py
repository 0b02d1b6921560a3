"""The gradient noise scale of a user's loop, without further passes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from bssearch.records import Configuration, GradientNoise, Target
from bssearch.training.advisor import BatchAdvisor, ranks_together
from bssearch.training.course import Approach


class NoiseNearTarget:
    """Gradient noise scale of a loop's steps near the target, from their micro-batches; see `BatchAdvisor`."""

    def __init__(self, modules: Sequence[nn.Module], now: Configuration, target: Target) -> None:
        self._advisor = BatchAdvisor(nn.ModuleList(modules), now.batch_size, micro_batches=now.accumulation_steps)
        self._approach = Approach(target)
        self._is_near = False

    def evaluated(self, metric: float) -> None:
        """Measure the next steps if the metric is near the target."""
        self._is_near = self._approach.is_near(metric) and ranks_together() == 1
        if not self._is_near:
            self._advisor.close()

    def stepped(self) -> None:
        """Record a step."""
        if self._is_near:
            self._advisor.step()

    def result(self) -> GradientNoise:
        """The noise scale and its moments."""
        self._advisor.close()
        return self._advisor.noise
