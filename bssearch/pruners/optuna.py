"""Optuna's pruners, each beside a cap at the incumbent.

Their steps are places on a common grid of train seconds, for only equal train seconds compare between batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import optuna
from optuna.trial import TrialState

from bssearch.pruners.base import Action, Cap

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
        self._told: set[int] = set()
        """The trials that have ended for Optuna, which hears no more of them."""

    @property
    def paces_itself(self) -> bool:
        """Return that it does: Optuna's pruners compare trials from the first."""
        return True

    def started(self, number: int) -> None:
        """Take note that a trial has begun."""
        super().started(number)
        self._trials[number] = self._study.ask()
        self._place[number] = 0

    def watch(self, number: int, train_seconds: float, gain: float) -> None:
        """Report an evaluation to Optuna, and leave the trial alone."""
        super().watch(number, train_seconds, gain)
        self._report(number, train_seconds)

    def observe(self, number: int, train_seconds: float, gain: float) -> Action:
        """Stop what Optuna prunes, where the evaluation is at a new place of the grid."""
        super().watch(number, train_seconds, gain)
        if not self._report(number, train_seconds):
            return Action.GO_ON
        self.stopped(number)
        return Action.STOP

    def _report(self, number: int, train_seconds: float) -> bool:
        """Report the best gain at a new place of the grid; return whether Optuna would prune."""
        place, trial = int(GRID * train_seconds / self.limit), self._trials[number]
        if place <= self._place[number] or number in self._told:
            return False
        self._place[number] = place
        trial.report(self.curves[number].gain, place)
        return trial.should_prune()

    def reached(self, number: int, train_seconds: float, gain: float) -> None:
        """Take note of a hit: to Optuna a complete trial; not where it came after the trial had been told to stop."""
        super().reached(number, train_seconds, gain)
        self._tell(number, TrialState.COMPLETE)

    def ended(self, number: int) -> None:
        """Take note of an end without the target, by itself or at the cap: to Optuna a complete trial, too."""
        self._tell(number, TrialState.COMPLETE)

    def stopped(self, number: int) -> None:
        """Take note that a trial was pruned, here or elsewhere."""
        self._tell(number, TrialState.PRUNED)

    def _tell(self, number: int, state: TrialState) -> None:
        """End a trial for Optuna, once."""
        if number not in self._told:
            gain = self.curves[number].gain if state is TrialState.COMPLETE else None
            self._study.tell(self._trials[number], gain, state=state)
            self._told.add(number)
