import contextlib
import inspect
import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState as OptunaState, create_trial

from bssearch.search.samplers.time_model.candidates import Run
from bssearch.search.samplers.time_model.optuna_sampler import (
    MOST_VALUES,
    TimeToTargetSampler,
    _as_suggested,
    _batch_sizes,
    _least_rate,
    _shown,
    _Space,
)

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
    """Seconds to the target by a law with the optimum near batch 170."""
    best = 0.1 * math.sqrt(batch_size / 32)
    steps = 200 * (1 + 150 / batch_size) * (1 + 0.5 * math.log(learning_rate / best) ** 2)
    return steps * (0.002 + 1e-5 * batch_size)


BEST = min(seconds_of(2**power, 0.1 * math.sqrt(2**power / 32)) for power in range(3, 11))


def train(trial: optuna.Trial) -> float:
    """Train by the law: report the metric by milliseconds; prune at the limit."""
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


@pytest.fixture
def study() -> optuna.Study:
    return made()


def test_the_first_trial_is_the_default_however_it_is_asked_for(study: optuna.Study) -> None:
    assert made().ask(SPACE).params == DEFAULT
    study.optimize(objective, n_trials=1)
    assert study.trials[0].params == DEFAULT


def test_the_same_seed_makes_the_same_choices() -> None:
    first, second, other = made(seed=1), made(seed=1), made(seed=2)
    for study in (first, second, other):
        study.optimize(objective, n_trials=8)
    assert params(first) == params(second) != params(other)


def test_it_comes_close_to_the_best_soon(study: optuna.Study) -> None:
    study.optimize(objective, n_trials=15)
    assert study.best_value <= 1.1 * BEST
    assert study.best_params["batch_size"] in {128, 256}


def test_trials_that_run_are_not_asked_for_again(study: optuna.Study) -> None:
    asked = [study.ask(SPACE) for _ in range(6)]
    assert len({tuple(trial.params.items()) for trial in asked}) == 6
    for trial in asked:
        with contextlib.suppress(optuna.TrialPruned):  # a pruned trial keeps running
            study.tell(trial, train(trial))
    assert study.ask(SPACE).params not in [trial.params for trial in asked]


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
def test_suggestions_lie_in_their_distribution(space: Mapping[str, Any]) -> None:
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


PLACED = {"batch_size": 32, "learning_rate": 0.1}


def told(
    state: OptunaState = OptunaState.COMPLETE,
    value: float | None = None,
    reports: Mapping[int, float] | None = None,
    **attributes: Any,
) -> FrozenTrial:
    """An Optuna trial; ``reports`` by milliseconds."""
    return create_trial(
        state=state,
        value=value,
        params=PLACED,
        distributions=SPACE,
        intermediate_values=dict(reports or {}),
        user_attrs=attributes,
    )


def run_of(trial: FrozenTrial, **changes: Any) -> Run:
    return TimeToTargetSampler(TARGET, default=DEFAULT, seed=0, **changes)._run(trial, 0)


def test_reports_are_a_curve_in_the_seconds_of_their_steps() -> None:
    reports = {500: 0.5, 0: 0.1, 2000: 0.7}
    run = run_of(told(OptunaState.PRUNED, reports=reports))
    assert (run.progress.train_seconds, run.progress.gains) == ([0.0, 0.5, 2.0], [0.1, 0.5, 0.7])
    in_steps = run_of(told(OptunaState.PRUNED, reports=reports), seconds_per_report_step=0.1)
    assert in_steps.progress.train_seconds == [0.0, 50.0, 200.0]


@pytest.mark.parametrize(
    ("trial", "hit", "running", "diverged"),
    [
        (told(value=4.0, reports={1000: 0.5}), 4.0, False, False),
        (told(value=4.0), 4.0, False, False),
        (told(value=math.inf, reports={1000: 0.5}), None, False, False),
        (told(value=0.0, reports={1000: 0.5}), None, False, False),
        (told(value=math.inf), None, False, True),
        (told(OptunaState.PRUNED, reports={1000: 0.5}), None, False, False),
        (told(OptunaState.PRUNED), None, False, True),
        (told(OptunaState.FAIL, reports={1000: 0.5}), None, False, True),
        (told(OptunaState.RUNNING, reports={1000: 0.5}), None, True, False),
        (told(OptunaState.RUNNING), None, True, False),
    ],
)
def test_only_trials_that_failed_or_show_no_progress_never_reach(
    trial: FrozenTrial, hit: float | None, running: bool, diverged: bool
) -> None:
    run = run_of(trial)
    assert (run.hit, run.running, run.diverged) == (hit, running, diverged)


def test_the_curve_of_a_hit_ends_at_the_target() -> None:
    for reports, now in (({1000: 0.5}, 4.0), ({1000: 0.5, 5000: 0.6}, 5.0), ({}, 4.0)):
        curve = run_of(told(value=4.0, reports=reports)).progress
        assert (curve.now, curve.gain) == (now, TARGET)
    reported = run_of(told(value=4.0, reports={3000: 0.99})).progress
    assert (reported.now, reported.gain) == (3.0, 0.99)


@pytest.mark.parametrize(
    ("trial", "seconds"),
    [
        (told(value=5.0, reports={2000: 0.5}, steps=100), 0.05),
        (told(value=1.0, reports={2000: 0.5}, steps=100), 0.02),
        (told(value=5.0, steps=100), 0.05),
        (told(OptunaState.PRUNED, reports={1000: 0.4, 2000: 0.5}, steps=100), 0.02),
        (told(OptunaState.RUNNING, reports={2000: 0.5}, steps=50.0), 0.04),
        (told(OptunaState.PRUNED, steps=100), None),
        (told(value=5.0), None),
        (told(value=5.0, steps=0), None),
        (told(value=5.0, steps="100"), None),
    ],
)
def test_a_trial_with_its_steps_shows_the_seconds_of_one(trial: FrozenTrial, seconds: float | None) -> None:
    assert _shown([trial], 1e-3) == ({} if seconds is None else {32: pytest.approx(seconds)})


def test_the_step_time_of_a_batch_size_is_the_median_of_its_trials() -> None:
    assert _shown([told(value=seconds, steps=100) for seconds in (9.0, 1.0, 2.0)], 1e-3) == {32: pytest.approx(0.02)}
    assert _shown([told(OptunaState.PRUNED, reports={2000: 0.5}, steps=100)], 1.0) == {32: pytest.approx(20.0)}


def test_until_two_batch_sizes_are_known_half_of_a_step_is_fixed_at_the_middle_of_them() -> None:
    sizes = [16, 64, 256]
    guessed = TimeToTargetSampler(TARGET, default=DEFAULT, seed=0)._step_times(sizes, [told(value=5.0, steps=100)])
    assert [guessed[size] for size in sizes] == pytest.approx([1.25, 2.0, 5.0])
    given = TimeToTargetSampler(TARGET, default=DEFAULT, seed=0, step_seconds={16: 0.5, 256: 0.75})
    known = given._step_times(sizes, [])
    assert [known[size] for size in (16, 256)] == [0.5, 0.75]


def test_the_searched_parameters_are_those_of_the_newest_ended_trial(study: optuna.Study) -> None:
    first = study.ask(SPACE)
    running = study.ask({**SPACE, "dropout": FloatDistribution(0.0, 0.5)})
    asked = study.ask()
    sampler, frozen = study.sampler, study.trials[asked.number]
    assert set(sampler.infer_relative_search_space(study, frozen)) == {*SPACE, "dropout"}
    study.tell(first, 3.0)
    assert set(sampler.infer_relative_search_space(study, frozen)) == set(SPACE)
    study.tell(running, 4.0)
    assert set(sampler.infer_relative_search_space(study, frozen)) == {*SPACE, "dropout"}


@pytest.mark.parametrize(
    ("distribution", "value", "suggested"),
    [
        (CategoricalDistribution(["sgd", None]), None, None),
        (FloatDistribution(0.0, 0.6, step=0.2), 0.29, pytest.approx(0.2)),
        (FloatDistribution(0.0, 0.6, step=0.2), 0.31, pytest.approx(0.4)),
        (FloatDistribution(0.1, 0.5), 0.05, 0.1),
        (FloatDistribution(0.1, 0.5), 0.9, 0.5),
        (FloatDistribution(1e-3, 1.0, log=True), 0.0123, 0.0123),
        (IntDistribution(4, 400, step=4), 9.0, 8),
        (IntDistribution(4, 400, step=4), 11.0, 12),
        (IntDistribution(16, 4096, log=True), 99.6, 100),
    ],
)
def test_a_coordinate_is_suggested_as_the_nearest_value_of_its_distribution(
    distribution: Any, value: Any, suggested: Any
) -> None:
    assert _as_suggested(distribution, value) == suggested


@pytest.mark.parametrize(
    "wrong", [CategoricalDistribution([0.1, 0.0]), CategoricalDistribution([0.1, "auto"]), FloatDistribution(0.0, 1)]
)
def test_the_learning_rate_is_a_number_above_zero_in_every_form(wrong: Any) -> None:
    assert _least_rate(CategoricalDistribution([0.3, 0.1])) == 0.1
    assert _least_rate(FloatDistribution(0.01, 1.0)) == 0.01
    with pytest.raises(ValueError, match="learning_rate"):
        _least_rate(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        IntDistribution(0, 8),
        CategoricalDistribution([0, 8]),
        CategoricalDistribution([8, "16"]),
        FloatDistribution(8, 64),
    ],
)
def test_batch_sizes_are_whole_numbers_from_1(wrong: Any) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        _batch_sizes(wrong)


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(ValueError, match="default has no learning_rate"):
        TimeToTargetSampler(TARGET, default={"batch_size": 32})
    upwards = optuna.create_study(direction="maximize", sampler=TimeToTargetSampler(TARGET, default=DEFAULT))
    with pytest.raises(ValueError, match='direction="minimize"'):
        upwards.ask(SPACE)
    with pytest.raises(ValueError, match=r"default has batch_size = 32, which is not in"):
        made().ask({**SPACE, "batch_size": IntDistribution(64, 128)})
    for wrong in ({"batch_size": FloatDistribution(8, 64)}, {"learning_rate": FloatDistribution(0.0, 1.0)}):
        study = made()
        study.tell(study.ask({**SPACE, **wrong}), 1.0)
        with pytest.raises(ValueError, match=r"must have only (integers|positive numbers)"):
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


def test_the_example_of_its_docstring_runs() -> None:
    text = inspect.getdoc(TimeToTargetSampler) or ""
    example = text[text.index("    import math") : text.index("Use no Optuna pruner")]
    found: dict[str, Any] = {}
    exec(textwrap.dedent(example), found)
    assert found["study"].best_params["batch_size"] == 128


def test_several_threads_share_a_study(study: optuna.Study) -> None:
    study.optimize(objective, n_trials=14, n_jobs=2)
    assert len(study.trials) == 14
    assert all(trial.state in {OptunaState.COMPLETE, OptunaState.PRUNED} for trial in study.trials)
    assert study.best_value <= 1.5 * BEST
