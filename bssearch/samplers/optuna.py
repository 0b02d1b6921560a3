"""Optuna's samplers: the batch size is allocated to each trial, the other parameters are theirs.

A sampler is asked through ``study.ask()``, over a study that is made of the history for this one choice.

The batch size is allocated, not sampled, so the sampler is shown the trials near it: those within one octave, or as
many octaves as give it enough to go by. What it is told of a trial:

* with a figure of the objective, as one that reached the target has it: complete
* pruned, capped, exhausted, diverged: pruned at one constant step, with the shortfall at equal time as value, so that
  a cap is never taken for a time, and accuracy never for seconds
* out of memory: pruned, violating a constraint
* running: running, so that it is not proposed twice
* failed, lost, cancelled, or outside the space: nothing
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any, Self

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from bssearch.curves import Progress
from bssearch.history import History, octaves
from bssearch.records import ParameterValue, TrialRecord, TrialState
from bssearch.samplers import allocation
from bssearch.samplers.base import Choice, decoded, default_choice
from bssearch.space import Dimension
from bssearch.spec import StudySpec

CENSORED_STEP = 1
"""The one step at which every stopped trial reports its shortfall, so that Optuna compares them all."""

WORSE_THAN_ANY = 1e9
"""The shortfall of what never comes near: more than any metric's gap. A choice."""


class OptunaSampler(ABC):
    """Batch sizes by `bssearch.samplers.allocation`, coordinates by one of Optuna's samplers: a subclass says which."""

    models_time = False

    def __init__(self, spec: StudySpec) -> None:
        self.dimensions = spec.space.dimensions()
        self.distributions = {dimension.name: distribution(dimension) for dimension in self.dimensions}
        self.spec = spec
        self.startup_trials = spec.sampler.startup_trials
        optuna.logging.set_verbosity(optuna.logging.WARNING)

    @classmethod
    def of(cls, spec: StudySpec) -> Self:
        """Return the sampler of a spec."""
        return cls(spec)

    @abstractmethod
    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """Return Optuna's sampler with a seed."""

    def choose(self, history: History, batch_size: int | None = None) -> Choice | None:
        """Return what to try next, at a batch size where one is given; None where no batch size is feasible."""
        if batch_size is not None:
            return decoded(self.spec, batch_size, self.ask(history, batch_size))
        proposal = allocation.propose(history)
        if proposal is None:
            return None
        if proposal.source == "default":
            return default_choice(self.spec)
        sampled = allocation.known_coordinates(history, proposal)
        if sampled is None:
            sampled = self.ask(history, proposal.batch_size)
        return decoded(self.spec, proposal.batch_size, sampled, uncapped=proposal.uncapped)

    def contenders(self, history: History) -> Sequence[int]:
        """Return none: Optuna's samplers have no model of the batch size."""
        return ()

    def ending(self, history: History) -> str | None:
        """Return None: there is always something to try."""
        return None

    def ask(self, history: History, batch_size: int) -> dict[str, ParameterValue]:
        """Return coordinates to try at a batch size."""
        study = self.study(history, neighbours(history, batch_size, self.startup_trials))
        params = study.ask(self.distributions).params
        return {dimension.name: from_optuna(dimension, params[dimension.name]) for dimension in self.dimensions}

    def study(self, history: History, trials: Sequence[TrialRecord]) -> optuna.Study:
        """Return an in-memory Optuna study that holds the given trials."""
        study = optuna.create_study(direction="minimize", sampler=self.sampler(self.spec.seed + len(history.trials)))
        best = history.reference
        reference = None if best is None else history.curves.get(best.number)
        for trial in trials:
            frozen = self._told(history, trial, reference)
            if frozen is not None:
                study.add_trial(frozen)
        return study

    def _told(self, history: History, trial: TrialRecord, reference: Progress | None) -> FrozenTrial | None:
        if trial.sampled is None or trial.state.is_missing:
            return None
        params = {dimension.name: to_optuna(dimension, trial.sampled[dimension.name]) for dimension in self.dimensions}
        told = partial(Told.of, trial, params, self.distributions)
        if not trial.state.is_finished:
            return told(OptunaState.RUNNING)
        value = history.value(trial)
        if math.isfinite(value):
            return told(OptunaState.COMPLETE, value=value)
        if trial.state is TrialState.OOM:
            return told(OptunaState.PRUNED, violated="oom")
        shortfall = WORSE_THAN_ANY if trial.state is TrialState.DIVERGED else _shortfall(history, trial, reference)
        return told(OptunaState.PRUNED, intermediate_values={CENSORED_STEP: shortfall})


class Told(FrozenTrial):
    """What Optuna is told of a trial. Nobody changes it: a study that takes it in copies nothing of what it refers to.

    Copies of distributions and parameters would be most of what a choice costs.
    """

    @classmethod
    def of(
        cls,
        trial: TrialRecord,
        params: dict[str, Any],
        distributions: dict[str, BaseDistribution],
        state: OptunaState,
        *,
        value: float | None = None,
        intermediate_values: dict[int, float] | None = None,
        violated: str | None = None,
    ) -> Self:
        """Return a trial in Optuna's form, with the name of a constraint where it violated one."""
        told = cls(
            number=-1,  # This and its id are the study's to give.
            trial_id=-1,
            state=state,
            value=value,
            datetime_start=trial.created_at,
            datetime_complete=(trial.ended_at or trial.created_at) if state.is_finished() else None,
            params=params,
            distributions=distributions,
            user_attrs={},
            system_attrs={},
            intermediate_values=intermediate_values or {},
        )
        if violated is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                told.set_constraint(violated, 1.0)
        return told

    def __deepcopy__(self, memo: object) -> Self:
        return copy(self)


class TPE(OptunaSampler):
    """Optuna's tree-structured Parzen estimator, multivariate, with a constant liar for what runs."""

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """Return Optuna's sampler with a seed."""
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=self.startup_trials, multivariate=True, constant_liar=True
        )


class GP(OptunaSampler):
    """Optuna's Gaussian process."""

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """Return Optuna's sampler with a seed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=self.startup_trials)


class Random(OptunaSampler):
    """Independent uniform draws, log-uniform where a range is."""

    def study(self, history: History, trials: Sequence[TrialRecord]) -> optuna.Study:
        """Return a study that holds no trial: none has a say in what is drawn."""
        return super().study(history, ())

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """Return Optuna's sampler with a seed."""
        return optuna.samplers.RandomSampler(seed=seed)


def neighbours(history: History, batch_size: int, enough: int) -> list[TrialRecord]:
    """Return the trials within one octave of a batch size, or within as many as give more than ``enough``."""
    distances = sorted(octaves(trial.configuration.batch_size, batch_size) for trial in history.trials)
    reach = max(1.0, distances[min(enough, len(distances) - 1)]) if distances else 1.0
    return [trial for trial in history.trials if octaves(trial.configuration.batch_size, batch_size) <= reach]


def distribution(dimension: Dimension) -> BaseDistribution:
    """Return Optuna's form of a dimension; choices of numbers become their places in ascending order."""
    if dimension.integer:
        return IntDistribution(round(dimension.low), round(dimension.high), log=dimension.log)
    if not dimension.choices:
        return FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    if _is_ordinal(dimension):
        return IntDistribution(0, len(dimension.choices) - 1)
    return CategoricalDistribution(dimension.choices)


def to_optuna(dimension: Dimension, value: ParameterValue) -> Any:
    """Return a coordinate as Optuna holds it."""
    return _ordered(dimension).index(value) if _is_ordinal(dimension) else value


def from_optuna(dimension: Dimension, value: Any) -> ParameterValue:
    """Return a coordinate from what Optuna holds."""
    result: ParameterValue = _ordered(dimension)[value] if _is_ordinal(dimension) else value
    return result


def _is_ordinal(dimension: Dimension) -> bool:
    return bool(dimension.choices) and all(
        isinstance(choice, int | float) and not isinstance(choice, bool) for choice in dimension.choices
    )


def _ordered(dimension: Dimension) -> list[Any]:
    return sorted(dimension.choices)


def _shortfall(history: History, trial: TrialRecord, reference: Progress | None) -> float:
    """Return how far the trial's best metric was behind the reference curve at the moment it stopped."""
    if reference is None or trial.outcome is None or trial.outcome.best_metric is None:
        return WORSE_THAN_ANY
    expected = reference.at(trial.outcome.train_seconds)
    gain = history.spec.record_target.gain(trial.outcome.best_metric)
    return WORSE_THAN_ANY if expected is None else expected - gain
