"""Optuna's samplers and pruners without bssearch, for comparison.

`OptunaSearch` is a plain Optuna study: a sampler over all parameters and, with `PrunedByStudy`, the study's own pruner
without a cap.
"""

import math
from collections.abc import Callable, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from bssearch.search.pruners.base import Action, Pruner, Standings
from bssearch.search.pruners.optuna import GRID, Asha, Hyperband, Median
from bssearch.search.samplers.time_model.candidates import Run
from tests.benchmarks.simulate.table_space import TableSpace, is_ordinal

# Optuna's pruners by name, on the common grid of `bssearch.search.pruners.optuna`
PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "median": Median.pruner,
    "asha": Asha.pruner,
    "hyperband": Hyperband.pruner,
}

# Optuna's samplers with its defaults, by name, each made with a seed
SAMPLERS: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed),
    "gp": lambda seed: optuna.samplers.GPSampler(seed=seed),
}

# Most asks for a combination in the table, before the nearest combination is taken. More asks with the same history
# give the same answer
TRIES = {"random": 100, "tpe": 20, "gp": 1}


class OptunaSearch:
    """An Optuna study of the train seconds to the target; a trial that misses the target counts twice the limit and
    more.

    Numbers are places in the grid, other values categories. The incumbent is the cell of the fastest trial.
    """

    def __init__(
        self, space: TableSpace, sampler: str, *, pruner: str | None = None, default: int | None = None, seed: int
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            study_name=f"simulated-{seed}",  # Hyperband puts trials into brackets by it.
            direction="minimize",
            sampler=SAMPLERS[sampler](seed),
            pruner=PRUNERS[pruner]() if pruner else optuna.pruners.NopPruner(),
        )
        self._space = space
        self._tries = TRIES[sampler]
        self._distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(values) - 1)
            if is_ordinal(values)
            else CategoricalDistribution(range(len(values)))
            for name, values in zip(space.names, space.grid, strict=True)
        }
        self._trials: list[optuna.Trial] = []
        self._reported: dict[int, int] = {}
        self._pruned: set[int] = set()
        if default is not None:
            self._enqueue(default)

    def ask(self, runs: Sequence[Run]) -> int:
        """Return the cell to run next."""
        for _ in range(self._tries):
            place = self._ask()
            if place in self._space.points:
                return self._space.points[place]
            self.study.tell(self._trials.pop(), state=TrialState.FAIL)
        self._enqueue(self._space.nearest(place))
        return self._space.points[self._ask()]

    def ended(self, number: int, run: Run) -> None:
        """Tell the study a trial's result, unless the study pruned the trial."""
        trial = self._trials[number]
        if number in self._pruned:
            return
        if run.hit is not None:
            self.study.tell(trial, run.hit)
            return
        gain = run.progress.gain
        shortfall = max(0.0, self._space.target_gain - gain) if math.isfinite(gain) else 0.0
        self.study.tell(trial, 2 * self._space.limit + shortfall)

    def incumbent(self, runs: Sequence[Run]) -> int | None:
        hits = [(run.hit, run.point) for run in runs if run.hit is not None]
        return min(hits, key=lambda hit: hit[0])[1] if hits else None

    def prunes(self, number: int, train_seconds: float, gain: float) -> bool:
        """Report an evaluation at a new place of the grid; return whether the study prunes the trial."""
        place = max(1, int(GRID * train_seconds / self._space.limit))
        if place <= self._reported.get(number, 0):
            return False
        self._reported[number] = place
        trial = self._trials[number]
        trial.report(-gain, place)
        if not trial.should_prune():
            return False
        self._pruned.add(number)
        self.study.tell(trial, state=TrialState.PRUNED)
        return True

    def _enqueue(self, point: int) -> None:
        self.study.enqueue_trial(dict(zip(self._space.names, self._space.places[point], strict=True)))

    def _ask(self) -> tuple[int, ...]:
        trial = self.study.ask(self._distributions)
        self._trials.append(trial)
        return tuple(int(trial.params[name]) for name in self._space.names)


class PrunedByStudy(Pruner):
    """No cap; trials that the study's own pruner prunes are stopped."""

    def __init__(self, search: OptunaSearch) -> None:
        self._search = search

    def judge(self, number: int, standings: Standings) -> Action:
        curve = standings.curves[number]
        return Action.STOP if self._search.prunes(number - 1, curve.now, curve.gain) else Action.GO_ON

    def paces_itself(self, standings: Standings) -> bool:
        """True: Optuna's pruners compare trials from the first."""
        return True
