"""The time model as an Optuna sampler."""

import math
import numbers
import statistics
from collections.abc import Mapping
from typing import Any, Literal, cast

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState as OptunaState

from bssearch.records import Goal, ParameterValue, Progress, Target
from bssearch.records.text import nearest
from bssearch.search.samplers.time_model.acquisition import KnowledgeGradient
from bssearch.search.samplers.time_model.candidates import Run, SpaceCandidates
from bssearch.spec import REFERENCE_LEARNING_RATE, Dimension, SearchSpace

BATCH_SIZE = "batch_size"
LEARNING_RATE = "learning_rate"
NEEDED = frozenset({BATCH_SIZE, LEARNING_RATE})

MOST_VALUES = 16  # longer integer ranges are continuous, and longer batch-size ranges are doublings

LARGEST_SEED = 2**32 - 1

TELLING = (OptunaState.COMPLETE, OptunaState.PRUNED, OptunaState.FAIL, OptunaState.RUNNING)


class TimeToTargetSampler(optuna.samplers.BaseSampler):
    """Minimises the seconds to a target over batch size, learning rate and other parameters.

    The objective suggests ``batch_size`` (int or categorical ints) and ``learning_rate``. The objective reports the
    metric with *train milliseconds* as the step, and returns the train seconds to the target. If a trial misses the
    target, the objective raises `optuna.TrialPruned`. In this example, every trial reaches the target::

        import math

        import optuna
        from bssearch import TimeToTargetSampler

        def objective(trial):
            batch_size = trial.suggest_int("batch_size", 8, 512, log=True)
            learning_rate = trial.suggest_float("learning_rate", 1e-3, 1.0, log=True)
            steps = 300 * (1 + 64 / batch_size) * (1 + math.log(learning_rate / 0.1) ** 2)  # instead of training
            seconds = steps * (0.002 + 1e-5 * batch_size)
            for share in (0.0, 0.25, 0.5, 0.75, 1.0):
                trial.report(0.97 * share, step=round(1000 * share * seconds))
            return seconds

        sampler = TimeToTargetSampler(0.97, default={"batch_size": 64, "learning_rate": 0.1}, seed=0)
        study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.NopPruner())
        study.optimize(objective, n_trials=20)

    Use no Optuna pruner, because the study minimises, and pruners would stop the best trials of a metric to maximise.
    Failed trials, and trials pruned before a report, count as misses.

    Args:
        default: The first trial, and the first centre of the learning-rate prior. Missing parameters start at random.
        step_seconds: Seconds per training step by batch size. By default, trials with a user attribute ``steps`` give
            step seconds. If fewer than two batch sizes have step seconds, the model assumes step seconds
            ∝ 1 + B / √(B_min · B_max).
        seconds_per_report_step: The unit of the report step, in seconds.
        seed: The same seed and trials give the same suggestions, except for parallel trials (``n_jobs``).

    Raises:
        ValueError: If an argument, the study's direction or a parameter of the objective is invalid.
    """

    def __init__(
        self,
        target: float,
        *,
        default: Mapping[str, ParameterValue],
        goal: Literal["maximize", "minimize"] = "maximize",
        step_seconds: Mapping[int, float] | None = None,
        seconds_per_report_step: float = 1e-3,
        seed: int | None = None,
    ) -> None:
        _check_default(default)
        for size, seconds in (step_seconds or {}).items():
            _check_whole("step_seconds: batch size", size, low=1)
            _check_number(f"step_seconds[{size}]", seconds, above=0.0)
        _check_number("target", target)
        _check_number("seconds_per_report_step", seconds_per_report_step, above=0.0)
        if goal not in set(Goal):
            raise ValueError(f"goal = {goal!r} must be {' or '.join(Goal)}")
        if seed is not None:
            _check_whole("seed", seed, low=0, high=LARGEST_SEED)
        self._target = Target(metric="metric", value=target, goal=Goal(goal))
        self._default = dict(default)
        self._step_seconds = dict(step_seconds or {})
        self._seconds_per_report_step = seconds_per_report_step
        self._seed = _any_seed() if seed is None else seed
        self._independent = optuna.samplers.RandomSampler(seed=self._seed)

    def reseed_rng(self) -> None:
        """Draw a new seed, so that parallel threads differ."""
        self._seed = _any_seed()
        self._independent.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the parameters of the newest finished trial, else of the newest running trial."""
        if len(study.directions) != 1 or study.direction is not optuna.study.StudyDirection.MINIMIZE:
            found = ", ".join(one.name.lower() for one in study.directions)
            raise ValueError(
                f"the study has direction {found}, but TimeToTargetSampler minimises seconds; create the study with "
                'direction="minimize"'
            )
        others = [one for one in self._others(study, trial) if set(one.distributions) >= NEEDED]
        self._check_names(others)
        newest = max(others, key=lambda one: (one.state.is_finished(), one.number), default=None)
        return {} if newest is None else dict(newest.distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the model's suggestion, or no value while parameters are unknown."""
        if not set(search_space) >= NEEDED:
            return {}
        space = _Space(search_space)
        candidates = SpaceCandidates(cast(SearchSpace, space), space.batch_sizes)  # `_Space` has all called methods
        trials = [one for one in self._others(study, trial) if set(one.params) >= NEEDED]
        runs = [self._run(one, candidates.add(*space.point(one.params))) for one in trials]
        model = KnowledgeGradient(
            candidates,
            default=candidates.add(*space.point(self._default)),
            target_gain=self._target.gain(self._target.value),
            step_seconds=self._step_times(space.batch_sizes, trials),
            seed=self._seed + trial.number,
        )
        return space.params(*candidates[model.ask(runs)])

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return the default value in the first trial, else a random value."""
        if trial.number == 0 and param_name in self._default:
            value = self._default[param_name]
            if not param_distribution._contains(param_distribution.to_internal_repr(value)):
                raise ValueError(
                    f"default has {param_name} = {value!r}, which is not in {param_distribution}; change the default "
                    f"or the distribution"
                )
            return value
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def _check_names(self, others: list[FrozenTrial]) -> None:
        first = next((one for one in others if one.number == 0 and one.state is OptunaState.COMPLETE), None)
        if first is None or any(self._default.get(name, value) != value for name, value in first.params.items()):
            return  # the first trial was enqueued, or from another sampler
        for name in self._default:
            if name not in first.params:
                advice = nearest(name, first.params, f"choose from {', '.join(first.params)}")
                raise ValueError(f"default has {name!r}, which the objective does not suggest; {advice}")

    def _others(self, study: optuna.Study, trial: FrozenTrial) -> list[FrozenTrial]:
        return [one for one in study.get_trials(deepcopy=False, states=TELLING) if one.number != trial.number]

    def _run(self, trial: FrozenTrial, point: int) -> Run:
        progress = Progress()
        for step, metric in sorted(trial.intermediate_values.items()):
            progress.add(step * self._seconds_per_report_step, self._target.gain(metric))
        seconds = trial.value if trial.state is OptunaState.COMPLETE else None
        hit = seconds if seconds is not None and 0 < seconds < math.inf else None
        goal = self._target.gain(self._target.value)
        if hit is not None and progress.gain < goal:
            progress.add(max(hit, progress.now), goal)
        is_running = trial.state is OptunaState.RUNNING
        never = trial.state is OptunaState.FAIL or (hit is None and not is_running and progress.gain == -math.inf)
        return Run(point, progress, hit=hit, running=is_running, diverged=never)

    def _step_times(self, batch_sizes: list[int], trials: list[FrozenTrial]) -> Mapping[int, float]:
        known = self._step_seconds or _shown(trials, self._seconds_per_report_step)
        if len(known) < 2:
            middle = math.sqrt(batch_sizes[0] * batch_sizes[-1])
            known = {size: 1 + size / middle for size in batch_sizes}
        return known


def _check_default(default: Mapping[str, ParameterValue]) -> None:
    if missing := sorted(NEEDED - set(default)):
        names = " and ".join(missing)
        raise ValueError(f"default has no {names}; add {names} to default = {dict(default)}")
    _check_whole(f"default: {BATCH_SIZE}", default[BATCH_SIZE], low=1)
    _check_number(f"default: {LEARNING_RATE}", default[LEARNING_RATE], above=0.0)
    for name, value in default.items():
        if isinstance(value, float):
            _check_number(f"default: {name}", value)


def _check_whole(name: str, value: object, *, low: int, high: int | None = None) -> None:
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or cast(int, value) < low or (high is not None and cast(int, value) > high):
        bound = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} = {value!r} must be a whole number {bound}")


def _check_number(name: str, value: object, *, above: float = -math.inf) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and math.isfinite(cast(float, value)) and cast(float, value) > above):
        bound = "" if above == -math.inf else f" > {above:g}"
        raise ValueError(f"{name} = {value!r} must be a finite number{bound}")


def _shown(trials: list[FrozenTrial], seconds_per_report_step: float) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for trial in trials:
        steps = trial.user_attrs.get("steps")
        last = max(trial.intermediate_values, default=0) * seconds_per_report_step
        seconds = max(last, trial.value or 0.0) if trial.state is OptunaState.COMPLETE else last
        if isinstance(steps, int | float) and steps > 0 and seconds > 0:
            found.setdefault(int(trial.params[BATCH_SIZE]), []).append(seconds / steps)
    return {size: statistics.median(times) for size, times in found.items()}


class _Space:
    def __init__(self, distributions: Mapping[str, BaseDistribution]) -> None:
        self._distributions = dict(distributions)
        self.batch_sizes = _batch_sizes(distributions[BATCH_SIZE])
        self._least_rate = _least_rate(distributions[LEARNING_RATE])
        self._dimensions = tuple(
            _dimension(_coordinate(name), one)
            for name, one in distributions.items()
            if name != BATCH_SIZE and not one.single()
        )

    def dimensions(self) -> tuple[Dimension, ...]:
        return self._dimensions

    def plain_learning_rate(self, batch_size: int, sampled: Mapping[str, ParameterValue]) -> float:
        return float(sampled.get(REFERENCE_LEARNING_RATE, self._least_rate) or 0.0)

    def point(self, params: Mapping[str, Any]) -> tuple[int, dict[str, ParameterValue]]:
        named = {_coordinate(name): value for name, value in params.items()}
        coordinates = {one.name: one.nearest(named.get(one.name, _middle(one))) for one in self._dimensions}
        return int(params[BATCH_SIZE]), coordinates

    def params(self, batch_size: int, coordinates: Mapping[str, ParameterValue]) -> dict[str, Any]:
        return {
            name: batch_size if name == BATCH_SIZE else _as_suggested(one, coordinates[_coordinate(name)])
            for name, one in self._distributions.items()
            if name == BATCH_SIZE or _coordinate(name) in coordinates
        }


def _coordinate(name: str) -> str:
    return REFERENCE_LEARNING_RATE if name == LEARNING_RATE else name


def _batch_sizes(distribution: BaseDistribution) -> list[int]:
    if isinstance(distribution, CategoricalDistribution) and all(
        isinstance(choice, int) and choice > 0 for choice in distribution.choices
    ):
        return sorted({int(choice) for choice in distribution.choices if choice is not None})
    if not isinstance(distribution, IntDistribution) or distribution.low < 1:
        raise ValueError(f"batch_size = {distribution} must have only integers >= 1")
    low, high, step = distribution.low, distribution.high, distribution.step
    if not distribution.log and (high - low) // step < MOST_VALUES:
        return list(range(low, high + 1, step))
    doublings = [low * 2**power for power in range((high // low).bit_length())]
    return sorted({low + round((size - low) / step) * step for size in [*doublings, high]})


def _least_rate(distribution: BaseDistribution) -> float:
    low = getattr(distribution, "low", None)
    rates: tuple[Any, ...] = distribution.choices if isinstance(distribution, CategoricalDistribution) else (low,)
    if not all(isinstance(rate, int | float) and rate > 0 for rate in rates):
        raise ValueError(f"learning_rate = {distribution} must have only positive numbers")
    return float(min(rates))


def _dimension(name: str, distribution: BaseDistribution) -> Dimension:
    if isinstance(distribution, CategoricalDistribution):
        return Dimension(name, choices=tuple(distribution.choices))
    assert isinstance(distribution, FloatDistribution | IntDistribution), "Optuna's other distributions are categorical"
    if isinstance(distribution, IntDistribution):
        values = range(distribution.low, distribution.high + 1, distribution.step)
        if len(values) <= MOST_VALUES:
            return Dimension(name, choices=tuple(values))
    return Dimension(name, low=float(distribution.low), high=float(distribution.high), log=distribution.log)


def _middle(dimension: Dimension) -> ParameterValue:
    if dimension.choices:
        return dimension.choices[len(dimension.choices) // 2]
    return math.sqrt(dimension.low * dimension.high) if dimension.log else (dimension.low + dimension.high) / 2


def _as_suggested(distribution: BaseDistribution, value: ParameterValue) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return value
    assert isinstance(distribution, FloatDistribution | IntDistribution), "Optuna's other distributions are categorical"
    number = float(value or 0.0)
    if distribution.step is not None and not distribution.log:
        number = distribution.low + round((number - distribution.low) / distribution.step) * distribution.step
    number = min(max(number, distribution.low), distribution.high)
    return round(number) if isinstance(distribution, IntDistribution) else number


def _any_seed() -> int:
    return int(np.random.default_rng().integers(2**31))
