"""Optuna's pruners, with the cap.

Optuna's steps are positions on a grid of train seconds, because batch sizes compare only at equal train seconds.
"""

from collections.abc import Callable
from functools import partial

import optuna
from optuna.trial import TrialState as OptunaState

from bssearch.records import TrialState
from bssearch.search.pruners.base import Action, Cap, Standings

GRID = 81  # grid positions, a power of `FACTOR`

FACTOR = 3  # Hyperband's default reduction factor

FIRST = GRID // FACTOR**3  # grid position of the first rung


class OptunaPruner(Cap):
    """Caps trials, and stops trials that the Optuna pruner from ``pruner`` prunes."""

    pruner: Callable[[], optuna.pruners.BasePruner]

    def __init__(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # a fixed name, because Hyperband assigns brackets by the study's name, random by default
        self._study = optuna.create_study(
            study_name="pruning",
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(seed=0),
            pruner=self.pruner(),
        )
        self._trials: dict[int, optuna.Trial] = {}
        self._read: dict[int, int] = {}
        self._place: dict[int, int] = {}
        self._prunes: dict[int, bool] = {}
        self._told: set[int] = set()

    def judge(self, number: int, standings: Standings) -> Action:
        for one in sorted(standings.curves.keys() - self._trials.keys()):
            self._trials[one], self._read[one], self._place[one] = self._study.ask(), 0, 0
        for one in standings.curves:
            if one != number and one not in self._told:
                self._report(one, standings)
                self._tell(one, standings)
        return Action.STOP if self._report(number, standings) else Action.GO_ON

    def paces_itself(self, standings: Standings) -> bool:
        return True  # Optuna's pruners also compare trials before a success

    def _report(self, number: int, standings: Standings) -> bool:
        # Report new evaluations one by one, because pruners update rungs only when asked; return True to prune.
        if number in self._told:
            return False  # another driver took over this trial, so Optuna knows of the trial's end
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
        # Report a trial's end to Optuna, unless paused; capped and exhausted trials are complete.
        state = standings.states.get(number)
        if state is None or not state.is_finished or state is TrialState.PAUSED:
            return
        if state is TrialState.PRUNED:
            self._study.tell(self._trials[number], state=OptunaState.PRUNED)
        else:
            self._study.tell(self._trials[number], standings.curves[number].gain)
        self._told.add(number)


class Median(OptunaPruner):
    """Optuna's `MedianPruner`, active after five trials and a tenth of the limit."""

    pruner = staticmethod(partial(optuna.pruners.MedianPruner, n_startup_trials=5, n_warmup_steps=GRID // 10))


class Asha(OptunaPruner):
    """Optuna's successive halving, with a first rung at 1/27 of the limit."""

    pruner = staticmethod(partial(optuna.pruners.SuccessiveHalvingPruner, min_resource=FIRST, reduction_factor=FACTOR))


class Hyperband(OptunaPruner):
    """Optuna's Hyperband, with the lowest rung at 1/27 of the limit."""

    pruner = staticmethod(
        partial(optuna.pruners.HyperbandPruner, min_resource=FIRST, max_resource=GRID, reduction_factor=FACTOR)
    )
