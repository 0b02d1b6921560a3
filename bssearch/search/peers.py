"""Optuna's pruners as policies, to compare with: on a common grid of train seconds, beside a cap at the incumbent.

Their steps are places on the grid, for only equal train seconds compare between batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import optuna
from optuna.trial import TrialState

from bssearch.search.policy import Action, Cap

GRID = 81
"""Steps to the limit of a trial: a power of Optuna's reduction factor."""

FACTOR = 3
FIRST = GRID // FACTOR**3

PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=GRID // 10),
    "asha": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=FIRST, reduction_factor=FACTOR),
    "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=FIRST, max_resource=GRID, reduction_factor=FACTOR),
}
"""Optuna's pruners by the names that policies have here, with its defaults but for the grid."""


class OptunaPolicy(Cap):
    """Cap, and stop what one of Optuna's pruners prunes."""

    def __init__(self, limit: float, pruner: str) -> None:
        super().__init__(limit)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.RandomSampler(seed=0)
        # Hyperband puts trials into brackets by the study's name, which Optuna would make up.
        self._study = optuna.create_study(
            study_name="simulated", direction="maximize", sampler=sampler, pruner=PRUNERS[pruner]()
        )
        self._trials: dict[int, optuna.Trial] = {}
        self._place: dict[int, int] = {}

    def started(self, number: int) -> None:
        """Take note that a trial has begun."""
        super().started(number)
        self._trials[number] = self._study.ask()
        self._place[number] = 0

    def observe(self, number: int, train_seconds: float, gain: float) -> Action:
        """Stop what Optuna prunes, where the evaluation is at a new place of the grid."""
        super().observe(number, train_seconds, gain)
        place, trial = int(GRID * train_seconds / self.limit), self._trials[number]
        if place <= self._place[number]:
            return Action.GO_ON
        self._place[number] = place
        trial.report(self.curves[number].gain, place)
        if not trial.should_prune():
            return Action.GO_ON
        self._study.tell(trial, state=TrialState.PRUNED)
        return Action.STOP

    def reached(self, number: int, train_seconds: float, gain: float) -> None:
        """Take note of a hit: to Optuna a complete trial."""
        super().reached(number, train_seconds, gain)
        self._study.tell(self._trials[number], self.curves[number].gain)

    def ended(self, number: int) -> None:
        """Take note of an end without the target, by itself or at the cap: to Optuna a complete trial, too."""
        if self._study.trials[self._trials[number].number].state is TrialState.RUNNING:
            self._study.tell(self._trials[number], self.curves[number].gain)
