"""Optuna's pruners, each beside a cap at the incumbent.

Their steps are places on a common grid of train seconds, for only equal train seconds compare between batch sizes. The
Optuna study that a pruner is asked over is made of the standings: each trial as far as it has been evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import optuna
from optuna.trial import TrialState as OptunaState

from bssearch.records import TrialState
from bssearch.search.pruners.base import Action, Cap, Standings

GRID = 81
"""Steps to the limit of a trial: a power of Optuna's reduction factor."""

FACTOR = 3
"""Optuna's reduction factor for Hyperband; for successive halving, where its default is 4, the same."""

FIRST = GRID // FACTOR**3
"""Steps to the first rung: a twenty-seventh of the limit."""


class OptunaPruner(Cap):
    """Cap, and stop what one of Optuna's pruners prunes: a subclass says how ``pruner`` is made."""

    pruner: Callable[[], optuna.pruners.BasePruner]

    def __init__(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Hyperband puts trials into brackets by the study's name, which Optuna would make up.
        self._study = optuna.create_study(
            study_name="pruning",
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(seed=0),
            pruner=self.pruner(),
        )
        self._trials: dict[int, optuna.Trial] = {}
        self._read: dict[int, int] = {}
        """How many evaluations of each trial's curve have been reported."""
        self._place: dict[int, int] = {}
        self._prunes: dict[int, bool] = {}
        """What Optuna said of the newest evaluation of each trial that was reported."""
        self._told: set[int] = set()
        """The trials that have ended for Optuna, which hears no more of them."""

    def judge(self, number: int, standings: Standings) -> Action:
        """Stop what Optuna prunes, where the evaluation is at a new place of the grid."""
        for one in sorted(standings.curves.keys() - self._trials.keys()):
            self._trials[one], self._read[one], self._place[one] = self._study.ask(), 0, 0
        for one in standings.curves:
            if one != number and one not in self._told:
                self._report(one, standings)
                self._tell(one, standings)
        return Action.STOP if self._report(number, standings) else Action.GO_ON

    def paces_itself(self, standings: Standings) -> bool:
        """Return that it does: Optuna's pruners compare trials from the first."""
        return True

    def _report(self, number: int, standings: Standings) -> bool:
        """Report what is new of a curve; return whether Optuna would prune at the newest evaluation.

        Optuna's rungs are kept by its pruners when they are asked, so that each is asked as the trial went on.
        """
        if number in self._told:
            return False  # Lost to another driver while it runs here: Optuna has heard its end.
        curve, trial, prunes = standings.curves[number], self._trials[number], self._prunes.get(number, False)
        for index in range(self._read[number], len(curve.gains)):
            place = int(GRID * curve.train_seconds[index] / standings.limit)
            prunes = place > self._place[number]
            if prunes:
                self._place[number] = place
                trial.report(curve.gains[index], place)
                prunes = trial.should_prune()
        self._read[number], self._prunes[number] = len(curve.gains), prunes
        return prunes

    def _tell(self, number: int, standings: Standings) -> None:
        """End a trial for Optuna where it has ended: at the cap or its limit it is complete to Optuna, too.

        One that is paused was interrupted, for these pruners let nothing wait: it goes on.
        """
        state = standings.states.get(number)
        if state is None or not state.is_finished or state is TrialState.PAUSED:
            return
        if state is TrialState.PRUNED:
            self._study.tell(self._trials[number], state=OptunaState.PRUNED)
        else:
            self._study.tell(self._trials[number], standings.curves[number].gain)
        self._told.add(number)


class Median(OptunaPruner):
    """What Optuna's `median` prunes, after five trials and a tenth of the limit."""

    pruner = partial(optuna.pruners.MedianPruner, n_startup_trials=5, n_warmup_steps=GRID // 10)


class Asha(OptunaPruner):
    """What Optuna's successive halving prunes, from a twenty-seventh of the limit."""

    pruner = partial(optuna.pruners.SuccessiveHalvingPruner, min_resource=FIRST, reduction_factor=FACTOR)


class Hyperband(OptunaPruner):
    """What Optuna's Hyperband prunes, from a twenty-seventh of the limit."""

    pruner = partial(optuna.pruners.HyperbandPruner, min_resource=FIRST, max_resource=GRID, reduction_factor=FACTOR)
