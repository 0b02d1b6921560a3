"""Optuna's samplers, for all parameters except the batch size.

Each proposal uses a new Optuna study of trials within a factor of 2 of the batch size, or farther if trials are few.
Optuna gets:

* trials with an objective value, as complete
* paused, pruned, capped, exhausted and diverged trials, as pruned at the same step; the value is how far the metric
  is behind `History.reference` at equal time, or huge if unknown or diverged
* trials out of memory, as pruned with a violated constraint
* queued and running trials, as running

Optuna gets no failed, lost or cancelled trials, and no trials outside the space.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState as OptunaState

from bssearch.errors import UsageError, require
from bssearch.records import ParameterValue, Progress, TrialRecord, TrialState
from bssearch.search.history import History, octaves
from bssearch.search.samplers import allocation
from bssearch.search.samplers.base import STARTUP_TRIALS, Choice, Sampler, StartupTrials, decoded
from bssearch.spec import Dimension, StudySpec
from bssearch.spec.parts import parameters_of

CENSORED_STEP = 1  # the same step for all censored trials, so that Optuna compares them

WORSE_THAN_ANY = 1e9

# Samplers without state in trials; other samplers store a generation or the place in a sequence
WITHOUT_NOTES = (
    optuna.samplers.TPESampler,
    optuna.samplers.GPSampler,
    optuna.samplers.RandomSampler,
    optuna.samplers.BruteForceSampler,
)


TPE_OPTIONS = {"multivariate": True, "constant_liar": True}


class Asker:
    """Asks an Optuna sampler for coordinates, given trials."""

    def __init__(self, dimensions: Sequence[Dimension], kind: type[BaseSampler], options: Mapping[str, Any]) -> None:
        self.distributions = {one.name: distribution(one) for one in dimensions}
        self._values: dict[str, list[Any]] = {one.name: sorted(one.choices) for one in dimensions if _is_ordinal(one)}
        self._places = {name: {value: place for place, value in enumerate(one)} for name, one in self._values.items()}
        self._make: Callable[..., BaseSampler] = partial(kind, **options)
        self._takes_seed = "seed" in parameters_of(kind)
        self._keeps_notes = not issubclass(kind, WITHOUT_NOTES)
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # CMA-ES warns at every categorical choice

    def ask(self, told: Iterable[FrozenTrial], seed: int) -> dict[str, ParameterValue]:
        params = self.study(told, seed).ask(self.distributions).params
        return {name: self._values[name][one] if name in self._values else one for name, one in params.items()}

    def study(self, told: Iterable[FrozenTrial], seed: int) -> optuna.Study:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = self._make(seed=seed) if self._takes_seed else self._make()
            study = optuna.create_study(direction="minimize", sampler=sampler)
            for one in told:
                if self._keeps_notes:
                    self._ask_for(one, study)
                else:
                    study.add_trial(one)
        return study

    def _ask_for(self, told: FrozenTrial, study: optuna.Study) -> None:
        # The sampler proposes and finishes a known trial, and thereby stores attributes.
        study.enqueue_trial(told.params)
        trial = study.ask(self.distributions)
        assert trial.relative_params is not None, "enqueued parameters need no sampling"
        for key, value in told.constraints.items():
            trial.set_constraint(key, value)
        for step, shortfall in told.intermediate_values.items():
            trial.report(shortfall, step)
        if told.state.is_finished():
            with suppress(RuntimeError):  # an exhausted sampler stops Optuna's loop, which does not run here
                study.tell(trial, told.value if told.state is OptunaState.COMPLETE else None, told.state)

    def told(
        self,
        trial: TrialRecord,
        state: OptunaState,
        *,
        value: float | None = None,
        shortfall: float | None = None,
        violated: str | None = None,
    ) -> FrozenTrial:
        sampled, places = trial.sampled or {}, self._places
        told = UncopiedTrial(
            number=-1,  # the study assigns number and id
            trial_id=-1,
            state=state,
            value=value,
            datetime_start=trial.created_at,
            datetime_complete=(trial.ended_at or trial.created_at) if state.is_finished() else None,
            params={
                name: places[name][sampled[name]] if name in places else sampled[name] for name in self.distributions
            },
            distributions=self.distributions,
            user_attrs={},
            system_attrs={},
            intermediate_values={} if shortfall is None else {CENSORED_STEP: shortfall},
        )
        if violated is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                told.set_constraint(violated, 1.0)
        return told


class UncopiedTrial(FrozenTrial):
    """A trial that an Optuna study adopts without a slow copy."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


class OptunaSampler(Sampler):
    """Takes batch sizes and known coordinates from `allocation`, other coordinates from the Optuna sampler ``kind``."""

    def __init__(self, spec: StudySpec, kind: type[BaseSampler], options: Mapping[str, Any]) -> None:
        self.asker = Asker(spec.space.dimensions(), kind, options)
        self.spec = spec
        startup = parameters_of(kind).get("n_startup_trials")
        self.startup_trials: int = options.get("n_startup_trials", startup.default if startup else STARTUP_TRIALS)

    def try_out(self) -> None:
        """Ask once with synthetic trials, so that bad options or a missing package fail early."""
        drawn = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        distributions = self.asker.distributions
        told = [
            optuna.trial.create_trial(params=drawn.ask(distributions).params, distributions=distributions, value=value)
            for value in range(min(self.startup_trials, 20) + 2)  # Optuna has ten startup trials by default
        ]
        try:
            self.asker.ask(told, seed=0)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"sampler = {self.spec.sampler.name!r} needs the package {error.name}", hint=f"pip install {error.name}"
            ) from error

    def choose(self, history: History, batch_size: int | None = None) -> Choice | None:
        if batch_size is not None:
            return decoded(self.spec, batch_size, self.ask(history, batch_size))
        proposal = allocation.propose(history)
        if proposal is None:
            return None
        sampled = allocation.known_coordinates(history, proposal)
        if sampled is None:
            sampled = self.ask(history, proposal.batch_size)
        return decoded(self.spec, proposal.batch_size, sampled, uncapped=proposal.uncapped)

    def ask(self, history: History, batch_size: int) -> dict[str, ParameterValue]:
        near = neighbours(history, batch_size, self.startup_trials)
        return self.asker.ask(self.told(history, near), self.spec.seed + len(history.trials))

    def told(self, history: History, trials: Iterable[TrialRecord]) -> Iterator[FrozenTrial]:
        best = history.reference
        reference = None if best is None else history.curves.get(best.number)
        for trial in trials:
            told = partial(self.asker.told, trial)
            if trial.sampled is None or trial.state.is_missing:
                continue
            if not trial.state.is_finished:
                yield told(OptunaState.RUNNING)
            elif math.isfinite(value := history.value(trial)):
                yield told(OptunaState.COMPLETE, value=value)
            elif trial.state is TrialState.OOM:
                yield told(OptunaState.PRUNED, violated="oom")
            else:
                yield told(OptunaState.PRUNED, shortfall=_shortfall(history, trial, reference))


class TPE(OptunaSampler):
    """Optuna's multivariate tree-structured Parzen estimator, with a constant liar for running trials."""

    def __init__(self, spec: StudySpec, startup_trials: StartupTrials = STARTUP_TRIALS) -> None:
        super().__init__(spec, optuna.samplers.TPESampler, {**TPE_OPTIONS, "n_startup_trials": startup_trials})


class GP(OptunaSampler):
    """Optuna's Gaussian-process sampler."""

    def __init__(self, spec: StudySpec, startup_trials: StartupTrials = STARTUP_TRIALS) -> None:
        super().__init__(spec, optuna.samplers.GPSampler, {"n_startup_trials": startup_trials})


class Random(OptunaSampler):
    """Draws coordinates independently, uniform or log-uniform."""

    def __init__(self, spec: StudySpec) -> None:
        super().__init__(spec, optuna.samplers.RandomSampler, {})


def optuna_sampler(name: str) -> type[OptunaSampler]:
    """Return a sampler for a class of ``optuna.samplers``. Raises `UsageError` for an unknown class."""
    found = _samplers_in(optuna.samplers)
    require(name in found, f"unknown sampler 'optuna:{name}'; choose from {', '.join(found)}")
    return _named(found[name])


def hub_sampler(package: str) -> type[OptunaSampler]:
    """Return a sampler for an OptunaHub package. Raises `UsageError` unless exactly one sampler loads."""
    named = f"sampler = 'optunahub:{package}'"
    try:
        import optunahub  # type: ignore[import-not-found,unused-ignore]

        found = _samplers_in(optunahub.load_module(package))
    except ModuleNotFoundError as error:
        raise UsageError(f"{named} needs the package {error.name}", hint=f"pip install {error.name}") from error
    except Exception as error:
        raise UsageError(
            f"{named} failed to load: {type(error).__name__}: {error}",
            hint="choose a package from https://hub.optuna.org, such as optunahub:samplers/auto_sampler",
        ) from error
    require(
        len(found) == 1,
        f"{named} must have one sampler, but has {', '.join(found) or 'no sampler'}; choose another package",
    )
    return _named(*found.values())


def _samplers_in(module: Any) -> dict[str, type[BaseSampler]]:
    named = {name: getattr(module, name) for name in getattr(module, "__all__", vars(module))}
    return {
        name: one
        for name, one in named.items()
        if isinstance(one, type) and issubclass(one, BaseSampler) and not inspect.isabstract(one)
    }


def _named(found: type[BaseSampler]) -> type[OptunaSampler]:
    known = parameters_of(found)

    class Named(OptunaSampler):
        def __init__(self, spec: StudySpec, **options: Any) -> None:
            liar = {"constant_liar": True} if "constant_liar" in known else {}
            super().__init__(spec, found, {**liar, **options})
            self.try_out()

    spec, *_ = inspect.signature(Named).parameters.values()
    options = [one.replace(kind=one.KEYWORD_ONLY) for one in known.values() if one.name != "seed"]
    Named.__signature__ = inspect.Signature([spec, *options])  # type: ignore[attr-defined]
    return Named


def neighbours(history: History, batch_size: int, enough: int) -> list[TrialRecord]:
    """The trials within a factor of 2 of a batch size, or farther if needed for ``enough`` trials."""
    distances = sorted(octaves(trial.configuration.batch_size, batch_size) for trial in history.trials)
    reach = max(1.0, distances[min(enough, len(distances) - 1)]) if distances else 1.0
    return [trial for trial in history.trials if octaves(trial.configuration.batch_size, batch_size) <= reach]


def distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.integer:
        return IntDistribution(round(dimension.low), round(dimension.high), log=dimension.log)
    if not dimension.choices:
        return FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    if _is_ordinal(dimension):
        return IntDistribution(0, len(dimension.choices) - 1)
    return CategoricalDistribution(dimension.choices)


def _is_ordinal(dimension: Dimension) -> bool:
    return bool(dimension.choices) and all(
        isinstance(choice, int | float) and not isinstance(choice, bool) for choice in dimension.choices
    )


def _shortfall(history: History, trial: TrialRecord, reference: Progress | None) -> float:
    outcome = None if trial.state is TrialState.DIVERGED else trial.outcome
    if reference is None or outcome is None or outcome.best_metric is None:
        return WORSE_THAN_ANY
    expected = reference.at(outcome.train_seconds)
    return WORSE_THAN_ANY if expected is None else expected - history.spec.record_target.gain(outcome.best_metric)
