"""The contract of every registered sampler: choices follow from the history and the study's seed."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from bssearch import registry
from bssearch.records import TrialState
from bssearch.search.samplers.base import Choice, Grid, make_sampler
from bssearch.search.samplers.optuna import TPE, Random
from bssearch.search.samplers.time_model.sampler import TimeModelSampler
from tests.factories import not_none
from tests.search.samplers.made_up import MadeUpStudy, study_spec

NAMES = (*registry.names("samplers"), "optuna:NSGAIISampler")
SIZES = (8, 16, 32, 64, 128)
LISTS: Mapping[str, Any] = {
    "batch_size": list(SIZES),
    "learning_rate": [0.02, 0.05, 0.1, 0.2],
    "weight_decay": 0.0,
    "dropout": [0.0, 0.1],
}
STATES = (
    TrialState.REACHED,
    TrialState.RUNNING,
    TrialState.PRUNED,
    TrialState.QUEUED,
    TrialState.OOM,
    TrialState.REACHED,
    TrialState.PAUSED,
    TrialState.DIVERGED,
    TrialState.LOST,
    TrialState.CAPPED,
    TrialState.FAILED,
    TrialState.EXHAUSTED,
)


def study_of(name: str, **changes: Any) -> MadeUpStudy:
    """A study with a sampler; the grid gets a space of lists."""
    lists = {"space": LISTS} if name == "grid" else {}
    default = {"batch_size": 32, "learning_rate": 0.1, "weight_decay": 0.0, "dropout": 0.1}
    return MadeUpStudy(study_spec(name, **{"default": default, **lists, **changes}))


@pytest.fixture
def study(name: str) -> MadeUpStudy:
    return study_of(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_choice_depends_only_on_the_history(name: str, study: MadeUpStudy) -> None:
    """Compares, trial by trial, the old sampler, a new one, and a new one with a new history."""
    for number, state in enumerate(STATES, 1):
        choice = not_none(study.choose())
        assert study.choose() == choice, "a second call gives the same choice"
        assert study.restarted().choose() == choice
        fresh = make_sampler(study.spec)
        study.run(choice, state)
        if number > 1:
            size = SIZES[number % 5]
            beside = study.sampler.choose(study.history, batch_size=size)
            assert fresh.choose(study.history, batch_size=size) == beside
            assert study.restarted().choose(size) == beside
    assert study.sampler.contenders(study.history) == study.restarted().sampler.contenders(study.history)
    assert study.sampler.ending(study.history) is None


@pytest.mark.parametrize("name", NAMES)
def test_the_sampler_sees_new_results_of_trials_that_it_already_knew(name: str, study: MadeUpStudy) -> None:
    for state in STATES[:8]:
        study.step(state)
    for number, state in {2: TrialState.LOST, 4: TrialState.REACHED, 7: TrialState.REACHED}.items():
        study.choose()
        study.keep(replace(study.trials[number - 1], state=TrialState.RUNNING, ended_at=None, outcome=None))
        assert study.choose() == study.restarted().choose()
        study.end(number, state)
        assert study.choose() == study.restarted().choose()


@pytest.mark.parametrize("name", NAMES)
def test_knowledge_of_another_history_does_not_count(name: str) -> None:
    """As after trials were deleted: the engine keeps its sampler for a new history."""
    study, other = study_of(name), study_of(name)
    for _ in range(4):
        study.step(TrialState.PRUNED)
    study.choose()
    for _ in range(5):
        other.step()
    assert study.sampler.choose(other.history) == other.choose()


@pytest.mark.parametrize("name", NAMES)
def test_with_a_batch_size_it_chooses_there(name: str, study: MadeUpStudy) -> None:
    assert [_at(study, size) for size in SIZES] == [*SIZES], "before any trial"
    for state in STATES[:6]:
        study.step(state)
    assert [_at(study, size) for size in SIZES] == [*SIZES]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "grid"])
def test_it_also_chooses_at_a_default_batch_size_outside_the_space(name: str) -> None:
    study = study_of(name, default={"batch_size": 24, "learning_rate": 0.1, "weight_decay": 0.0, "dropout": 0.1})
    study.step()
    study.step()
    choice = not_none(study.choose(24))
    assert choice.configuration.batch_size == 24
    assert study.spec.space.decode(24, not_none(choice.sampled)) == choice.configuration


def _at(study: MadeUpStudy, batch_size: int) -> int:
    return not_none(study.choose(batch_size)).configuration.batch_size


@pytest.mark.parametrize("name", NAMES)
def test_batch_sizes_that_cannot_run_are_never_chosen(name: str, study: MadeUpStudy) -> None:
    for _ in range(3):
        study.step()
    study.history.probes = {size: probe for size, probe in study.history.probes.items() if size != 64}
    for rate in (0.02, 0.05, 0.2):
        sampled = {**(study.trials[0].sampled or {}), "reference_learning_rate": rate}
        study.run(Choice(study.spec.space.decode(128, sampled), sampled), TrialState.FAILED)
    assert study.history.feasible == (8, 16, 32)
    assert {study.step().configuration.batch_size for _ in range(6)} <= {8, 16, 32}
    study.history.probes = {}
    assert study.sampler.choose(study.history) is None


@pytest.mark.parametrize("name", NAMES)
def test_running_configurations_are_not_chosen_again(name: str, study: MadeUpStudy) -> None:
    study.step()
    study.step()
    at_once = [study.step(TrialState.RUNNING).configuration for _ in range(5)]
    assert len({one.key for one in at_once}) == 5


@pytest.mark.parametrize("name", NAMES)
def test_choices_are_inside_the_space_with_its_coordinates(name: str, study: MadeUpStudy) -> None:
    for state in itertools.islice(itertools.cycle(STATES), 20):
        choice = study.step(state)
        assert study.spec.space.outside(choice.configuration) == []
        assert (
            study.spec.space.decode(choice.configuration.batch_size, not_none(choice.sampled)) == choice.configuration
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_another_seed_chooses_otherwise(name: str) -> None:
    def chosen(seed: int) -> list[str]:
        study = study_of(name, seed=seed)
        return [study.step().configuration.key for _ in range(8)]

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)


@pytest.mark.parametrize(
    ("name", "objective", "kind"),
    [
        ("auto", "time_to_target", TimeModelSampler),
        ("auto", "samples_to_target", TPE),
        ("auto", "metric_in_budget", TPE),
        ("tpe", "time_to_target", TPE),
        ("random", "samples_to_target", Random),
    ],
)
def test_auto_is_tpe_without_a_model_of_the_objective(name: str, objective: str, kind: type) -> None:
    assert type(make_sampler(study_spec(name, objective=objective))) is kind


def test_a_grid_is_of_a_space_of_lists() -> None:
    assert type(study_of("grid").sampler) is Grid
