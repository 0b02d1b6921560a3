"""Optuna's pruners and samplers, to compare with.

The pruners' steps are places on a common grid of train seconds, for only equal train seconds compare between batch
sizes. `OptunaPolicy` is a pruner beside a cap at the incumbent; `OptunaSearch` a study as people have it: a sampler
over all parameters alike, and, with `PrunedByStudy`, the study's own pruner and no cap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from bssearch.search.paces import Run
from bssearch.search.policy import Action, Cap, Policy
from bssearch.search.table_space import TableSpace, is_ordinal

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


SAMPLERS: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed),
    "gp": lambda seed: optuna.samplers.GPSampler(seed=seed),
}
"""Optuna's samplers with its defaults, by name, each made with a seed."""

TRIES = {"random": 100, "tpe": 20, "gp": 1}
"""How often each is asked anew for a combination that the table does not have, before the nearest that it has is taken.

One that is asked again with the same history to learn from says the same.
"""


class OptunaSearch:
    """An Optuna study of the train seconds to the target; what never reached it counts as twice the limit and more.

    Numbers enter by their place in the grid, other values as categories. Its incumbent is the cell of the fastest
    trial.
    """

    charged = 0.0

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
        """Tell the study what a trial came to, unless it was the study that pruned it."""
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
        """Return the cell of the fastest trial that reached the target; None while there is none."""
        hits = [(run.hit, run.point) for run in runs if run.hit is not None]
        return min(hits, key=lambda hit: hit[0])[1] if hits else None

    def prunes(self, number: int, train_seconds: float, gain: float) -> bool:
        """Report an evaluation, where it is at a new place of the grid; return whether the study prunes the trial."""
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


class PrunedByStudy(Policy):
    """No cap; what the study's own pruner prunes, stops."""

    def __init__(self, limit: float, search: OptunaSearch) -> None:
        super().__init__(limit)
        self._search = search

    def observe(self, number: int, train_seconds: float, gain: float) -> Action:
        """Stop what the study prunes."""
        super().observe(number, train_seconds, gain)
        return Action.STOP if self._search.prunes(number, train_seconds, gain) else Action.GO_ON
