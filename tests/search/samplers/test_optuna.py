"""Trials in the form of Optuna's samplers, and their proposals."""

import sys
import types
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from bssearch.errors import UsageError
from bssearch.records import ParameterValue, TrialRecord, TrialState
from bssearch.search.history import History
from bssearch.search.samplers.base import make_sampler
from bssearch.search.samplers.optuna import (
    CENSORED_STEP,
    TPE,
    WORSE_THAN_ANY,
    Asker,
    OptunaSampler,
    Random,
    distribution,
    neighbours,
)
from bssearch.spec import Dimension, SamplerSpec
from tests.factories import make_probe, make_trial, not_none
from tests.search.samplers.made_up import MadeUpStudy, study_spec

SPEC = study_spec("tpe", seed=3)
SIZES = (8, 16, 32, 64, 128)


def coordinates(rate: float, decay: float = 1e-4, dropout: float = 0.1) -> dict[str, ParameterValue]:
    return {"reference_learning_rate": rate, "weight_decay": decay, "dropout": dropout}


def history(*trials: TrialRecord) -> History:
    return History(SPEC, trials, {size: make_probe(size) for size in SIZES})


def told(*trials: TrialRecord) -> list[optuna.trial.FrozenTrial]:
    """Trials in Optuna's form; trials that reached the target had 0.5 at half their time."""
    past = history()
    for trial in trials:
        if trial.state is TrialState.REACHED and trial.outcome is not None:
            past.observe(trial.number, [(0.0, 0.1), (trial.outcome.train_seconds / 2, 0.5)])
        past.take(trial)
    return told_of(past)


def told_of(past: History) -> list[optuna.trial.FrozenTrial]:
    sampler = TPE(SPEC)
    return list(sampler.asker.study(sampler.told(past, past.trials), seed=0).trials)


def test_optuna_sees_the_seconds_of_a_hit() -> None:
    (trial,) = told(make_trial(1, seconds=2.5, sampled=coordinates(0.1)))
    assert (trial.state, trial.value) == (optuna.trial.TrialState.COMPLETE, 2.5)


@pytest.mark.parametrize("state", [TrialState.CAPPED, TrialState.PRUNED, TrialState.PAUSED, TrialState.EXHAUSTED])
def test_optuna_sees_the_shortfall_of_a_stopped_trial_and_not_its_seconds(state: TrialState) -> None:
    (_, trial) = told(
        make_trial(1, seconds=2.0, sampled=coordinates(0.1)),
        make_trial(2, state=state, seconds=1.0, best_metric=0.3, sampled=coordinates(0.2)),
    )
    assert trial.state is optuna.trial.TrialState.PRUNED
    assert trial.intermediate_values == {CENSORED_STEP: pytest.approx(0.2)}


def test_before_a_hit_trials_are_compared_with_the_first_trial() -> None:
    past = history()
    past.observe(1, [(0.0, 0.1), (1.0, 0.4)])
    past.take(make_trial(1, state=TrialState.CAPPED, seconds=1.0, best_metric=0.4, sampled=coordinates(0.1)))
    past.take(make_trial(2, state=TrialState.CAPPED, seconds=1.0, best_metric=0.5, sampled=coordinates(0.2)))
    first, second = told_of(past)
    assert first.intermediate_values == {CENSORED_STEP: pytest.approx(0.0)}
    assert second.intermediate_values == {CENSORED_STEP: pytest.approx(-0.1)}


def test_a_diverged_trial_ranks_behind_every_other() -> None:
    (trial,) = told(make_trial(1, state=TrialState.DIVERGED, best_metric=0.1, sampled=coordinates(0.9)))
    assert trial.intermediate_values == {CENSORED_STEP: WORSE_THAN_ANY}


def test_optuna_sees_running_trials_but_not_missing_ones_or_those_outside_the_space() -> None:
    trials = told(
        make_trial(1, state=TrialState.RUNNING, sampled=coordinates(0.1)),
        *(make_trial(n, state=state, sampled=coordinates(0.1)) for n, state in enumerate(MISSING, 2)),
        make_trial(9, seconds=1.0, sampled=None),
    )
    assert [trial.state for trial in trials] == [optuna.trial.TrialState.RUNNING]


MISSING = tuple(state for state in TrialState if state.is_missing)


def test_the_sampler_is_shown_the_trials_near_the_batch_size() -> None:
    trials = [make_trial(n + 1, batch_size=SIZES[n % 5]) for n in range(20)]
    assert {trial.configuration.batch_size for trial in neighbours(history(*trials), 128, enough=4)} == {64, 128}
    assert len(neighbours(history(make_trial(1, batch_size=8), make_trial(2, batch_size=128)), 128, enough=4)) == 2


def test_optuna_sees_numbers_by_rank_and_names_unchanged() -> None:
    numbers, names = Dimension("decay", choices=(1e-3, 0.0, 1e-4)), Dimension("kind", choices=("b", "a"))
    asker = Asker([numbers, names], optuna.samplers.RandomSampler, {})
    trials = [make_trial(1, sampled={"decay": decay, "kind": "a"}) for decay in (0.0, 1e-4, 1e-3)]
    seen = [asker.told(trial, optuna.trial.TrialState.RUNNING).params for trial in trials]
    assert seen == [{"decay": place, "kind": "a"} for place in range(3)]
    asked = [asker.ask((), seed) for seed in range(20)]
    assert {one["decay"] for one in asked} == {0.0, 1e-4, 1e-3} and {one["kind"] for one in asked} == {"a", "b"}


@pytest.mark.parametrize(
    ("dimension", "expected"),
    [
        (Dimension("kind", choices=("b", "a")), CategoricalDistribution(("b", "a"))),
        (Dimension("decay", choices=(1e-3, 0.0, 1e-4)), IntDistribution(0, 2)),
        (Dimension("nesterov", choices=(True, False)), CategoricalDistribution((True, False))),
        (Dimension("rate", low=0.01, high=1.0, log=True), FloatDistribution(0.01, 1.0, log=True)),
    ],
)
def test_a_dimension_has_the_distribution_of_its_kind(dimension: Dimension, expected: Any) -> None:
    assert distribution(dimension) == expected


def test_a_stopped_trial_without_a_metric_or_before_the_first_evaluation_ranks_behind() -> None:
    winner = make_trial(1, seconds=2.0, sampled=coordinates(0.1))
    silent = make_trial(2, state=TrialState.CAPPED, seconds=1.0, best_metric=None, sampled=coordinates(0.2))
    assert told(winner, silent)[1].intermediate_values == {CENSORED_STEP: WORSE_THAN_ANY}
    past = history()
    past.observe(1, [(1.0, 0.5)])
    past.take(winner)
    past.take(make_trial(2, state=TrialState.CAPPED, seconds=0.5, best_metric=0.4, sampled=coordinates(0.2)))
    assert told_of(past)[1].intermediate_values == {CENSORED_STEP: WORSE_THAN_ANY}


def test_each_choice_has_its_own_seed() -> None:
    drawn = {
        Random(SPEC).ask(history(*(make_trial(n, state=TrialState.FAILED) for n in range(1, count + 1))), 32)[
            "reference_learning_rate"
        ]
        for count in range(4)
    }
    assert len(drawn) == 4
    assert Random(study_spec("tpe", seed=4)).ask(history(), 32) != Random(SPEC).ask(history(), 32)


# Samplers that a spec names by their own names.


def after(name: str, options: dict[str, Any], trials: int) -> MadeUpStudy:
    study = MadeUpStudy(study_spec(name, options))
    for _ in range(trials):
        study.step()
    return study


def test_any_sampler_of_optuna_has_a_name_and_its_own_options() -> None:
    sampler = make_sampler(study_spec("optuna:TPESampler", {"n_startup_trials": 3, "n_ei_candidates": 2}))
    assert isinstance(sampler, OptunaSampler)
    made = sampler.asker.study((), seed=5).sampler
    assert isinstance(made, optuna.samplers.TPESampler)
    assert (made._n_startup_trials, made._n_ei_candidates, made._constant_liar) == (3, 2, True)
    assert sampler.startup_trials == 3


def test_a_sampler_with_generations_builds_them_from_the_given_trials() -> None:
    study = after("optuna:NSGAIISampler", {"population_size": 4}, 24)
    sampler = study.sampler
    assert isinstance(sampler, OptunaSampler)
    near = neighbours(study.history, 32, sampler.startup_trials)
    told = sampler.asker.study(sampler.told(study.history, near), seed=0)
    generations = [trial.system_attrs["NSGAIISampler:generation"] for trial in told.trials]
    assert len(generations) >= 12 and generations == sorted(generations)
    assert [trial.value for trial in told.trials] == [study.history.value(trial) for trial in near]


def test_a_sampler_with_state_sees_the_same_trials() -> None:
    trials = (
        make_trial(1, seconds=2.0, sampled=coordinates(0.1)),
        make_trial(2, state=TrialState.OOM, sampled=coordinates(0.2)),
        make_trial(3, state=TrialState.PRUNED, seconds=1.0, best_metric=0.3, sampled=coordinates(0.2)),
        make_trial(4, state=TrialState.RUNNING, sampled=coordinates(0.3)),
    )
    past = history()
    past.observe(1, [(0.0, 0.1), (1.0, 0.5)])
    for trial in trials:
        past.take(trial)

    def seen(name: str) -> list[tuple[Any, ...]]:
        sampler = make_sampler(study_spec(name, {}))
        assert isinstance(sampler, OptunaSampler)
        study = sampler.asker.study(sampler.told(past, trials), seed=0)
        return [(one.state, one.params, one.constraints, one.intermediate_values) for one in study.trials]

    assert seen("optuna:QMCSampler") == seen("tpe")


def test_a_sampler_without_its_package_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(UsageError, match="'optuna:CmaEsSampler' needs the package cmaes") as raised:
        make_sampler(study_spec("optuna:CmaEsSampler", {}))
    assert raised.value.hint == "pip install cmaes"


@pytest.mark.parametrize("size", [None, 32])
def test_cma_es_follows_its_trials(size: int | None) -> None:
    pytest.importorskip("cmaes")
    study = after("optuna:CmaEsSampler", {"popsize": 4}, 40)
    one, other = (not_none(at.sampler.choose(at.history, size)) for at in (study, study.restarted()))
    assert one.configuration.batch_size == other.configuration.batch_size
    # The last digits of the eigenvectors depend on the memory layout.
    assert one.sampled == pytest.approx(not_none(other.sampled), rel=1e-6)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
    """Packages of a simulated OptunaHub by path."""
    packages: dict[str, types.ModuleType] = {}
    library = types.ModuleType("optunahub")
    library.load_module = packages.__getitem__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "optunahub", library)
    return packages


class Least(optuna.samplers.RandomSampler):
    """A sampler that takes no seed."""

    def __init__(self, share: float = 0.0) -> None:
        super().__init__(seed=1)
        self.share = share

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        low, high = param_distribution.low, param_distribution.high
        return low + round(self.share * (high - low)) if isinstance(low, int) else low + self.share * (high - low)


def test_a_package_of_optunahub_is_a_sampler_with_its_options(hub: dict[str, types.ModuleType]) -> None:
    hub["samplers/least"] = types.ModuleType("least")
    vars(hub["samplers/least"]).update(Least=Least, __all__=["Least"])
    low, middle = (MadeUpStudy(study_spec("optunahub:samplers/least", given)) for given in ({}, {"share": 0.5}))
    assert [not_none(not_none(one.choose(32)).sampled)["dropout"] for one in (low, middle)] == [0.0, 0.25]
    with pytest.raises(UsageError, match=r"sampler\.options\.seed: unknown key"):
        make_sampler(study_spec("optunahub:samplers/least", {"seed": 3}))


class Stops(optuna.samplers.QMCSampler):
    """A sampler that stops the study after each trial, as an exhausted sampler does."""

    def after_trial(self, study: optuna.Study, *ended: Any) -> None:
        study.stop()


def test_a_sampler_that_would_stop_optuna_s_loop_goes_on_choosing(hub: dict[str, types.ModuleType]) -> None:
    hub["samplers/stops"] = types.ModuleType("stops")
    vars(hub["samplers/stops"])["Stops"] = Stops
    assert after("optunahub:samplers/stops", {}, 8).choose(32) is not None


@pytest.mark.parametrize(
    ("package", "said"), [("samplers/none", "failed to load: KeyError"), ("pruners/some", "must have one sampler")]
)
def test_a_package_of_optunahub_that_is_missing_or_has_no_sampler_is_named(
    hub: dict[str, types.ModuleType], package: str, said: str
) -> None:
    hub["pruners/some"] = types.ModuleType("some")
    with pytest.raises(UsageError, match=f"'optunahub:{package}' {said}"):
        make_sampler(study_spec(f"optunahub:{package}", {}))


def test_optunahub_itself_is_asked_for_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optunahub", None)
    with pytest.raises(UsageError) as raised:
        make_sampler(study_spec("optunahub:samplers/least", {}))
    assert raised.value.hint == "pip install optunahub"


def test_startup_trials_beside_the_name_are_an_option() -> None:
    beside = SamplerSpec.model_validate({"name": "gp", "startup_trials": 4})
    assert beside == SamplerSpec(name="gp", options={"startup_trials": 4})
    assert SamplerSpec.model_validate({"name": "grid", "startup_trials": 6}) == SamplerSpec(name="grid")
    tpe = make_sampler(study_spec("auto", {"startup_trials": 9}, objective="samples_to_target"))
    assert isinstance(tpe, TPE) and tpe.startup_trials == 9
    with pytest.raises(UsageError, match="startup_trials = 0"):
        make_sampler(study_spec("tpe", {"startup_trials": 0}))
