"""A batch that grows with the gradient noise scale, measured on the trial's own time (McCandlish et al. 2018)."""

from __future__ import annotations

import statistics
from typing import Any

from bssearch.noise import moments
from bssearch.records import Configuration
from bssearch.training.computation import Computation
from bssearch.training.gradient_noise import SMALL_BATCHES, GradientPasses
from bssearch.training.trainer import Trainer
from bssearch.workloads.base import Part, Workload

PASSES = 2
"""Passes after each evaluation: a choice."""

REMEMBERED = 8
"""The newest passes whose moments are averaged: a choice. The noise scale grows while the model trains."""


class NoiseGrowth:
    """Lets a trial's batch grow, after its evaluations, to the largest of its sizes within a share of the noise scale.

    The share is the schedule's. Under Adam the noise scale is that of the gradients as Adam divides them. The passes
    are as many for each trial of a seed, so that the same request takes the same steps.
    """

    def __init__(
        self,
        workload: Workload,
        computation: Computation,
        trainer: Trainer,
        configuration: Configuration,
        train: Part,
        seed: int,
    ) -> None:
        self._make = GradientPasses(workload, computation, trainer, configuration, train, seed)
        self._growth = trainer.growth
        assert self._growth.schedule is not None, "the trial has a schedule"
        self._share = self._growth.schedule.noise_share or 0.0
        self._moments: list[tuple[float, float]] = []

    def after_evaluation(self) -> None:
        """Measure, and begin the stage that the noise scale allows. Waits for the device."""
        if self._growth.next_size is None:
            return
        for _ in range(PASSES):
            measured = self._make.measure(SMALL_BATCHES)
            if measured is not None:
                self._moments.append(moments(measured, measured.adam or measured.plain))
        del self._moments[:-REMEMBERED]
        scale = self.noise_scale
        while scale is not None and (size := self._growth.next_size) is not None and size <= self._share * scale:
            self._growth.grow()

    @property
    def noise_scale(self) -> float | None:
        """Return the noise scale (samples) of the newest passes; None where they do not tell it from an endless one."""
        if not self._moments:
            return None
        trace, square = (statistics.fmean(column) for column in zip(*self._moments, strict=True))
        return max(0.0, trace / square) if square > 0 else None

    def state(self) -> dict[str, Any]:
        """Return what the next passes and their answer hang on, to be saved."""
        return {"generator": self._make.state(), "moments": [list(pair) for pair in self._moments]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on after saved passes."""
        self._make.restore(state["generator"])
        self._moments = [(trace, square) for trace, square in state["moments"]]
