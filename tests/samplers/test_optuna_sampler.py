from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState as OptunaState

from bssearch.samplers.time_model.optuna_sampler import MOST_VALUES, TimeToTargetSampler, _batch_sizes, _Space

TARGET = 0.97
DEFAULT = {"batch_size": 32, "learning_rate": 0.1}
SPACE = {"batch_size": IntDistribution(8, 1024, log=True), "learning_rate": FloatDistribution(1e-3, 1.0, log=True)}
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
LIMIT = 20.0


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)


def seconds_of(batch_size: int, learning_rate: float) -> float:
    """Return the time to the target by a law whose optimum lies at a batch size of some 170."""
    best = 0.1 * math.sqrt(batch_size / 32)
    steps = 200 * (1 + 150 / batch_size) * (1 + 0.5 * math.log(learning_rate / best) ** 2)
    return steps * (0.002 + 1e-5 * batch_size)


BEST = min(seconds_of(2**power, 0.1 * math.sqrt(2**power / 32)) for power in range(3, 11))


def train(trial: optuna.Trial) -> float:
    """Train by the law: report the metric at milliseconds, return the seconds or give up at the limit."""
    size, rate = trial.params["batch_size"], trial.params["learning_rate"]
    seconds = seconds_of(size, rate)
    for share in SHARES:
        if share * seconds > LIMIT:
            raise optuna.TrialPruned
        trial.report(TARGET * share, step=round(1000 * share * seconds))
    return seconds


def objective(trial: optuna.Trial) -> float:
    trial.suggest_int("batch_size", 8, 1024, log=True)
    trial.suggest_float("learning_rate", 1e-3, 1.0, log=True)
    return train(trial)


def made(seed: int = 0, **changes: Any) -> optuna.Study:
    values: dict[str, Any] = {"default": DEFAULT, "seed": seed, **changes}
    return optuna.create_study(sampler=TimeToTargetSampler(TARGET, **values), pruner=optuna.pruners.NopPruner())


def params(study: optuna.Study) -> list[dict[str, Any]]:
    return [trial.params for trial in study.trials]


def spent(trial: optuna.trial.FrozenTrial) -> float:
    return max(trial.intermediate_values, default=0) / 1000


def seconds_until_within(study: optuna.Study, factor: float) -> float:
    """Return the train seconds of all trials until one is within a factor of the best time there is."""
    total = 0.0
    for trial in study.trials:
        total += spent(trial)
        if trial.state is OptunaState.COMPLETE and (trial.value or math.inf) <= factor * BEST:
            return total
    return math.inf


def test_the_first_trial_is_the_default_however_it_is_asked_for() -> None:
    assert made().ask(SPACE).params == DEFAULT
    study = made()
    study.optimize(objective, n_trials=1)
    assert study.trials[0].params == DEFAULT


def test_the_same_seed_makes_the_same_choices() -> None:
    first, second, other = made(seed=1), made(seed=1), made(seed=2)
    for study in (first, second, other):
        study.optimize(objective, n_trials=8)
    assert params(first) == params(second) != params(other)


def test_it_comes_close_to_the_best_soon() -> None:
    study = made()
    study.optimize(objective, n_trials=15)
    assert study.best_value <= 1.1 * BEST
    assert study.best_params["batch_size"] in {128, 256}


def test_trials_that_run_are_not_asked_for_again() -> None:
    study = made()
    asked = [study.ask(SPACE) for _ in range(6)]
    assert len({tuple(trial.params.items()) for trial in asked}) == 6
    for trial in asked:
        study.tell(trial, train(trial))
    assert study.ask(SPACE).params not in [trial.params for trial in asked]


def test_several_threads_share_a_study() -> None:
    study = made()
    study.optimize(objective, n_trials=14, n_jobs=2)
    assert len(study.trials) == 14
    assert all(trial.state in {OptunaState.COMPLETE, OptunaState.PRUNED} for trial in study.trials)
    assert study.best_value <= 1.5 * BEST


@pytest.mark.parametrize("state", [OptunaState.FAIL, OptunaState.PRUNED])
def test_a_trial_that_got_nowhere_is_not_run_again(state: OptunaState) -> None:
    study = made()
    for _ in range(5):
        trial = study.ask(SPACE)
        study.tell(trial, state=state)
    assert len({tuple(one.items()) for one in params(study)}) == 5


def test_trials_that_were_pruned_tell_how_far_they_were() -> None:
    study = made()
    for share in (0.9, 0.1):
        trial = study.ask(SPACE)
        for at in SHARES:
            trial.report(share * TARGET * at, step=round(10_000 * at))
        study.tell(trial, state=OptunaState.PRUNED)
    study.optimize(objective, n_trials=12)
    assert study.best_value <= 1.25 * BEST


def test_less_is_better_of_a_loss() -> None:
    def loss(trial: optuna.Trial) -> float:
        size = trial.suggest_int("batch_size", 8, 1024, log=True)
        seconds = seconds_of(size, trial.suggest_float("learning_rate", 1e-3, 1.0, log=True))
        for share in SHARES:
            trial.report(3.0 - 2.0 * share, step=round(1000 * share * seconds))
        return seconds

    sampler = TimeToTargetSampler(1.0, goal="minimize", default=DEFAULT, seed=0)
    study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.NopPruner())
    study.optimize(loss, n_trials=12)
    assert study.best_value <= 1.25 * BEST


OTHERS = {
    "dropout": FloatDistribution(0.0, 0.5, step=0.1),
    "layers": IntDistribution(1, 4),
    "width": IntDistribution(16, 4096, log=True),
    "heads": IntDistribution(4, 400, step=4),
    "nesterov": CategoricalDistribution([True, False]),
    "optimizer": CategoricalDistribution(["sgd", "adamw", None]),
    "momentum": FloatDistribution(0.9, 0.9),
}


@pytest.mark.parametrize(
    "space",
    [
        SPACE,
        {"batch_size": CategoricalDistribution([24, 96, 48]), "learning_rate": CategoricalDistribution([0.1, 0.2])},
        {"batch_size": IntDistribution(32, 4000, step=32), "learning_rate": FloatDistribution(0.1, 0.1)},
        {"batch_size": IntDistribution(10, 12), "learning_rate": FloatDistribution(0.01, 0.5)},
    ],
)
def test_what_is_suggested_lies_in_its_distribution(space: Mapping[str, Any]) -> None:
    first = {
        name: one.choices[0] if isinstance(one, CategoricalDistribution) else one.low for name, one in space.items()
    }
    study = made(default=first)
    distributions = {**space, **OTHERS}
    for number in range(6):
        trial = study.ask(distributions)
        assert set(trial.params) == set(distributions)
        for name, one in distributions.items():
            assert one._contains(one.to_internal_repr(trial.params[name])), (name, trial.params[name])
        study.tell(trial, 5.0 - number / 10)
    assert len({trial.params["batch_size"] for trial in study.trials}) > 1


def test_a_step_time_that_trials_show_or_that_is_given_is_taken() -> None:
    study = made(step_seconds={8: 0.00208, 1024: 0.01224})
    study.optimize(objective, n_trials=10)
    assert study.best_value <= 1.25 * BEST

    def with_steps(trial: optuna.Trial) -> float:
        seconds = objective(trial)
        trial.set_user_attr("steps", round(seconds / (0.002 + 1e-5 * trial.params["batch_size"])))
        return seconds

    shown = made()
    shown.optimize(with_steps, n_trials=10)
    assert shown.best_value <= 1.25 * BEST


def test_a_trial_that_lacks_a_parameter_counts_as_in_its_middle() -> None:
    space = _Space(
        {
            "batch_size": IntDistribution(8, 64, log=True),
            "learning_rate": FloatDistribution(0.01, 1.0, log=True),
            "dropout": FloatDistribution(0.0, 0.5),
            "layers": IntDistribution(1, 5),
            "activation": CategoricalDistribution(["relu", "gelu", "silu"]),
        }
    )
    size, lacking = space.point({"batch_size": 16})
    assert (size, lacking) == (
        16,
        {"reference_learning_rate": pytest.approx(0.1), "dropout": 0.25, "layers": 3, "activation": "gelu"},
    )
    given = {"batch_size": 32, "learning_rate": 0.5, "dropout": 0.1, "layers": 2, "activation": "silu"}
    assert space.params(*space.point(given)) == given


@pytest.mark.parametrize(
    ("distribution", "sizes"),
    [
        (IntDistribution(8, 64, log=True), [8, 16, 32, 64]),
        (IntDistribution(8, 100, log=True), [8, 16, 32, 64, 100]),
        (IntDistribution(10, 12), [10, 11, 12]),
        (IntDistribution(1, MOST_VALUES), list(range(1, MOST_VALUES + 1))),
        (IntDistribution(32, 4000, step=32), [32, 64, 128, 256, 512, 1024, 2048, 4000]),
        (CategoricalDistribution([96, 24, 48]), [24, 48, 96]),
    ],
)
def test_batch_sizes_are_all_of_few_and_doublings_of_many(distribution: Any, sizes: list[int]) -> None:
    assert _batch_sizes(distribution) == sizes


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(ValueError, match="default has no learning_rate"):
        TimeToTargetSampler(TARGET, default={"batch_size": 32})
    upwards = optuna.create_study(direction="maximize", sampler=TimeToTargetSampler(TARGET, default=DEFAULT))
    with pytest.raises(ValueError, match="direction must be minimize"):
        upwards.ask(SPACE)
    with pytest.raises(ValueError, match=r"default has batch_size = 32, which is not in"):
        made().ask({**SPACE, "batch_size": IntDistribution(64, 128)})
    for wrong in ({"batch_size": FloatDistribution(8, 64)}, {"learning_rate": FloatDistribution(0.0, 1.0)}):
        study = made()
        study.tell(study.ask({**SPACE, **wrong}), 1.0)
        with pytest.raises(ValueError, match=r"must be (integers|a positive number)"):
            study.ask({**SPACE, **wrong})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target": math.nan}, "target = nan"),
        ({"target": math.inf}, "target = inf"),
        ({"target": "0.9"}, "target = '0.9'"),
        ({"seconds_per_report_step": 0}, "seconds_per_report_step = 0"),
        ({"seconds_per_report_step": -1.0}, "seconds_per_report_step = -1.0"),
        ({"step_seconds": {32: 0.0}}, "step_seconds[32] = 0.0"),
        ({"step_seconds": {32: math.nan}}, "step_seconds[32] = nan"),
        ({"step_seconds": {32: -0.1}}, "step_seconds[32] = -0.1"),
        ({"step_seconds": {0: 0.1}}, "step_seconds: batch size = 0"),
        ({"step_seconds": {"32": 0.1}}, "step_seconds: batch size = '32'"),
        ({"default": {"batch_size": 0, "learning_rate": 0.1}}, "batch_size = 0"),
        ({"default": {"batch_size": 32.5, "learning_rate": 0.1}}, "batch_size = 32.5"),
        ({"default": {"batch_size": 32, "learning_rate": 0.0}}, "learning_rate = 0.0"),
        ({"default": {"batch_size": 32, "learning_rate": math.nan}}, "learning_rate = nan"),
        ({"default": {**DEFAULT, "dropout": math.nan}}, "dropout = nan"),
        ({"default": {"batchsize": 32, "learning_rate": 0.1}}, "batchsize"),
        ({"goal": "max"}, "goal = 'max'"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 1.5}, "seed = 1.5"),
    ],
)
def test_a_figure_out_of_its_bounds_is_named(changes: dict[str, Any], named: str) -> None:
    values = {"target": TARGET, "default": DEFAULT, **changes}
    with pytest.raises(ValueError, match=r"must be|default has no") as caught:
        TimeToTargetSampler(values.pop("target"), **values)
    assert named in str(caught.value)


def test_a_parameter_of_the_default_that_the_objective_does_not_suggest_is_named_after_the_first_trial() -> None:
    def with_momentum(trial: optuna.Trial) -> float:
        trial.suggest_float("momentum", 0.0, 0.9)
        return objective(trial)

    study = made(default={**DEFAULT, "momentm": 0.5})
    with pytest.raises(ValueError, match=r"'momentm'.* did you mean 'momentum'"):
        study.optimize(with_momentum, n_trials=2)
    assert len(study.get_trials(states=[OptunaState.COMPLETE])) == 1
    made(default={**DEFAULT, "momentum": 0.5}).optimize(with_momentum, n_trials=2)


def test_a_first_trial_that_is_not_the_default_says_nothing_of_its_parameters() -> None:
    def conditional(trial: optuna.Trial) -> float:
        if trial.suggest_categorical("optimizer", ["sgd", "adam"]) == "sgd":
            trial.suggest_float("momentum", 0.0, 0.9)
        return objective(trial)

    study = made(default={**DEFAULT, "optimizer": "sgd", "momentum": 0.9})
    study.enqueue_trial({"optimizer": "adam"})
    study.optimize(conditional, n_trials=3)
    assert len(study.trials) == 3


def test_the_example_of_its_docstring_runs() -> None:
    text = TimeToTargetSampler.__doc__ or ""
    example = text[text.index("        import math") : text.index("    The study minimises")]
    found: dict[str, Any] = {}
    exec(textwrap.dedent(example), found)
    assert found["study"].best_params["batch_size"] == 128


@pytest.mark.slow
def test_it_is_sooner_within_a_quarter_of_the_best_than_tpe() -> None:
    ours, tpe = [], []
    for seed in range(7):
        study = made(seed)
        study.optimize(objective, n_trials=25)
        ours.append(seconds_until_within(study, 1.25))
        other = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), pruner=optuna.pruners.NopPruner())
        other.enqueue_trial(DEFAULT)
        other.optimize(objective, n_trials=60)
        tpe.append(seconds_until_within(other, 1.25))
    assert statistics.median(ours) < 0.8 * statistics.median(tpe), (ours, tpe)
