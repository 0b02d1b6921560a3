"""What a search tries next, by the sampler that its spec names, on records as the store has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bssearch.history import History
from bssearch.pruners.controller import Watch
from bssearch.records import Observation, TrialRecord, TrialState
from bssearch.samplers.base import RETUNED_IN_VAIN, Allocated, Choice, Chooser, Modelled, chooser_for, default_choice
from bssearch.spec import StudySpec
from tests.factories import make_curve, make_probe, make_spec, make_trial
from tests.pruners.watched import make_watch

TARGET = 0.9
PRUNED, REACHED, RUNNING = TrialState.PRUNED, TrialState.REACHED, TrialState.RUNNING
LISTS = {
    "batch_size": [8, 16, 64],
    "learning_rate": [0.03, 0.1, 0.3],
    "weight_decay": 0.0,
    "dropout": [0.0, 0.1],
}


def spec(sampler: str = "auto", **changes: Any) -> StudySpec:
    budget = {"trials": 1000, "trial_train_seconds": 100.0, "least_improvement": 0.0}
    return make_spec(**{"sampler": {"name": sampler}, "pruner": {"name": "balanced"}, "budget": budget, **changes})


def seconds_of(batch_size: int, learning_rate: float) -> float:
    """Return a time to the target that is least at a batch size near 64 and a learning rate of 0.2."""
    steps = 100 * (1 + 128 / batch_size) * math.exp(0.3 * math.log(learning_rate / 0.2) ** 2)
    return 0.001 * (1 + batch_size / 32) * steps


class Study:
    """A study that runs what its chooser asks for, one trial at a time."""

    def __init__(self, of: StudySpec) -> None:
        self.spec = of
        self.trials: list[TrialRecord] = []
        self.curves: dict[int, Sequence[Observation]] = {}
        self.probes = {size: make_probe(size, step_seconds=0.001 * (1 + size / 32)) for size in of.batch_sizes}
        self.watch, self.chooser = self.restarted()

    def restarted(self) -> tuple[Watch, Chooser]:
        """Return the watch and the chooser of a driver that starts now."""
        watch = make_watch(self.spec, self.curves)
        return watch, chooser_for(self.spec, watch)

    def choose(self, by: tuple[Watch, Chooser] | None = None) -> Choice | None:
        watch, chooser = by or (self.watch, self.chooser)
        history = History(self.spec, list(self.trials), self.probes)
        watch.update(history)
        return chooser.choose(history)

    def run(self, choice: Choice, state: TrialState = REACHED, seconds: float | None = None) -> TrialRecord:
        """Add a trial; its curve is an even way to the target, as far as the half unless it reached it."""
        number, configuration = len(self.trials), choice.configuration
        whole = seconds_of(configuration.batch_size, configuration.learning_rate) if seconds is None else seconds
        end = whole if state is REACHED else whole / 2
        points = [(end * tenth / 10, TARGET * end / whole * tenth / 10) for tenth in range(11)]
        self.curves[number] = make_curve(*points)
        trial = make_trial(
            number,
            state=state,
            seconds=end,
            configuration=configuration,
            sampled=choice.sampled,
            uncapped=choice.uncapped,
        )
        self.trials.append(trial)
        return trial

    def ending(self) -> str | None:
        return self.chooser.ending

    def step(self, state: TrialState = REACHED) -> Choice:
        choice = self.choose()
        assert choice is not None
        self.run(choice, state)
        return choice


def test_the_default_comes_first_and_is_evidence() -> None:
    for name in ("auto", "tpe", "random"):
        study = Study(spec(name))
        first, second = study.step(), study.step()
        assert first.configuration == study.spec.default_configuration
        assert first.uncapped
        assert first.sampled == study.spec.space.encode(first.configuration)
        assert not second.uncapped
        assert second.configuration != first.configuration


def test_the_optimum_is_found_and_its_batch_size_tried_most() -> None:
    study = Study(spec())
    for _ in range(25):
        study.step()
    best = min(study.trials, key=lambda trial: trial.outcome.time_to_target_s)  # type: ignore[union-attr, arg-type, return-value]
    least = min(seconds_of(size, 0.2) for size in study.spec.space.rungs)
    assert best.outcome is not None
    assert best.outcome.time_to_target_s == pytest.approx(least, rel=0.05)
    sizes = [trial.configuration.batch_size for trial in study.trials]
    assert sizes.count(64) + sizes.count(32) + sizes.count(128) > len(sizes) / 2


def test_a_driver_that_starts_again_goes_on_as_the_old_one_would_have() -> None:
    study = Study(spec())
    for state in (REACHED, PRUNED, REACHED, TrialState.DIVERGED, REACHED, TrialState.CAPPED, REACHED):
        study.step(state)
    ours = study.choose()
    assert ours is not None
    assert study.choose(study.restarted()) == ours
    assert study.choose(study.restarted()) == ours


@pytest.mark.parametrize("state", [TrialState.LOST, TrialState.CANCELLED, TrialState.FAILED, TrialState.OOM])
def test_missing_trials_and_those_out_of_memory_say_nothing(state: TrialState) -> None:
    """Where a good one would be followed up: what it was, and how long it ran, makes no difference."""
    chosen = []
    for batch_size, rate, seconds in ((128, 0.4, 0.1), (16, 0.02, 50.0)):
        study = Study(spec())
        study.step()
        study.step()
        sampled = {"reference_learning_rate": rate, "weight_decay": 1e-4, "dropout": 0.3}
        study.run(Choice(study.spec.space.decode(batch_size, sampled), sampled), state, seconds)
        chosen.append(study.choose())
    assert chosen[0] == chosen[1]


def test_a_trial_that_was_running_and_is_lost_is_forgotten() -> None:
    study = Study(spec())
    study.step()
    running = study.step(RUNNING)
    study.choose()
    study.trials[1] = make_trial(1, state=TrialState.LOST, configuration=running.configuration, sampled=running.sampled)
    study.curves[1] = ()
    assert study.choose() == study.choose(study.restarted())


def test_trials_of_other_drivers_count_while_they_run_and_when_they_have_ended() -> None:
    study = Study(spec())
    study.step()
    before = study.choose()
    assert before is not None
    assert before.sampled is not None
    study.run(before, RUNNING)
    study.curves.clear()
    after = study.choose()
    assert after is not None
    assert after.configuration != before.configuration
    ended = Study(spec())
    ended.step()
    other, watch = Study(spec()), ended.restarted()
    other.trials, other.curves = list(ended.trials), ended.curves
    ended.run(before, seconds=0.01)
    told = ended.choose(watch)
    assert told is not None
    assert told.configuration.batch_size in {before.configuration.batch_size / 2**place for place in (-1, 0, 1)}


def test_batch_sizes_that_are_not_feasible_are_never_chosen_nor_counted_on_any_more() -> None:
    study = Study(spec())
    for _ in range(6):
        study.step()
    del study.probes[64]
    for _ in range(6):
        assert study.step().configuration.batch_size != 64
    for broken in (128, 32):
        for _ in range(3):
            sampled = study.trials[1].sampled
            assert sampled is not None
            study.run(Choice(study.spec.space.decode(broken, sampled), sampled), TrialState.FAILED)
    history = History(study.spec, study.trials, study.probes)
    for _ in range(4):
        assert study.step().configuration.batch_size in history.feasible
    study.probes = {}
    assert study.choose() is None


@pytest.mark.parametrize(
    ("space", "default"),
    [
        ({"batch_size": [8, 64], "learning_rate": 0.1}, {"batch_size": 8, "learning_rate": 0.1}),
        ({"batch_size": 64, "learning_rate": [0.03, 0.1, 0.3]}, {"batch_size": 64, "learning_rate": 0.1}),
        (
            {"batch_size": [8, 64], "learning_rate": [0.1, 0.3], "dropout": [0.0, 0.1]},
            {"batch_size": 8, "learning_rate": 0.1, "dropout": 0.0},
        ),
        (
            {
                "batch_size": {"low": 8, "high": 64},
                "learning_rate": {"low": 0.01, "high": 1.0},
                "optimizer": [{"name": "sgd"}, {"name": "adamw", "learning_rate_scale": 0.01, "beta2": [0.99, 0.999]}],
                "schedule": {"name": ["constant", "cosine"], "horizon_samples": {"low": 1000, "high": 10000}},
            },
            {
                "batch_size": 8,
                "learning_rate": 0.1,
                "optimizer": {"name": "sgd"},
                "schedule": "cosine",
                "horizon_samples": 2000,
            },
        ),
        (
            {
                "batch_size": {"low": 8, "high": 64},
                "learning_rate": {"low": 0.01, "high": 1.0},
                "clip_norm": {"low": 0.1, "high": 10.0},
            },
            {"batch_size": 16, "learning_rate": 0.1, "clip_norm": 1.0},
        ),
        (
            {"batch_size": [8, 64], "learning_rate": {"low": 0.01, "high": 1.0}, "weight_decay": [0.0, 1e-4]},
            {"batch_size": 24, "learning_rate": 5.0, "weight_decay": 1e-3, "clip_norm": 1.0},
        ),
        (
            {"batch_size": [8, 64], "learning_rate": {"low": 0.01, "high": 1.0}, "optimizer": {"name": "sgd"}},
            {"batch_size": 8, "learning_rate": 0.001, "optimizer": {"name": "adamw"}},
        ),
    ],
    ids=["rate fixed", "one batch size", "lists", "categories", "clip_norm", "default outside", "other optimizer"],
)
def test_spaces_of_every_shape_can_be_searched(space: dict[str, Any], default: dict[str, Any]) -> None:
    study = Study(spec(space=space, default=default))
    assert study.step().configuration == study.spec.default_configuration
    for state in (RUNNING, PRUNED, TrialState.DIVERGED, REACHED, TrialState.CAPPED, REACHED, REACHED):
        choice = study.step(state)
        assert choice.sampled is not None
        assert study.spec.space.outside(choice.configuration) == []
        assert study.spec.space.decode(choice.configuration.batch_size, choice.sampled) == choice.configuration


def test_from_a_default_outside_the_space_it_goes_to_the_nearest_that_lies_inside() -> None:
    space = {"batch_size": [8, 64], "learning_rate": [0.01, 0.03, 0.1, 0.3], "weight_decay": [0.0, 1e-4, 1e-3]}
    study = Study(spec(space=space, default={"batch_size": 48, "learning_rate": 0.09, "weight_decay": 9e-4}))
    first, second = study.step(), study.step()
    assert first.sampled is None
    assert second.configuration.batch_size == 64
    assert second.sampled == {"reference_learning_rate": 0.1, "weight_decay": 1e-3}


def test_evidence_at_a_default_outside_the_ladder_takes_what_is_best_nearby() -> None:
    space = {"batch_size": [64, 128], "learning_rate": {"low": 0.01, "high": 1.0}}
    budget = {"trials": 6, "trial_train_seconds": 100.0, "least_improvement": 0.0}
    study = Study(spec(space=space, default={"batch_size": 8, "learning_rate": 0.1}, budget=budget))
    small = [choice for _ in range(8) if (choice := study.step()).configuration.batch_size == 8][1:]
    assert small
    for choice in small:
        assert choice.uncapped
        assert choice.sampled is not None
        rate = choice.sampled["reference_learning_rate"]
        assert isinstance(rate, float)
        assert rate > 0.1, "at the larger ones higher rates did better"


def test_it_ends_where_little_more_is_expected_twice_in_a_row_and_says_so() -> None:
    budget = {"trials": 1000, "trial_train_seconds": 100.0, "least_improvement": 0.02}
    study = Study(spec(space=LISTS, default={"batch_size": 16, "learning_rate": 0.1, "dropout": 0.0}, budget=budget))
    while (choice := study.choose()) is not None:
        assert len(study.trials) < 60
        study.run(choice)
    assert "budget.least_improvement = 2.00%" in (study.ending() or "")
    best = min(study.trials, key=lambda trial: trial.outcome.time_to_target_s)  # type: ignore[union-attr, arg-type, return-value]
    assert (best.configuration.batch_size, best.configuration.learning_rate) == (64, 0.3)
    assert any(trial.uncapped for trial in study.trials[1:]), "the answer had its evidence first"


def test_asking_again_before_another_trial_has_ended_is_no_second_time() -> None:
    budget = {"trials": 1000, "trial_train_seconds": 100.0, "least_improvement": 0.9}
    study = Study(spec(budget=budget))
    study.step()
    for _ in range(5):
        assert study.choose() is not None
        assert study.ending() is None
    study.step()
    study.choose()
    assert (study.ending() or "").startswith("a further trial is expected to better the time to the target by")


def test_nothing_ends_before_the_target_was_reached() -> None:
    budget = {"trials": 1000, "trial_train_seconds": 100.0, "least_improvement": 0.99}
    study = Study(spec(budget=budget))
    for _ in range(6):
        study.step(TrialState.EXHAUSTED)
        assert study.ending() is None


@pytest.mark.parametrize(
    ("name", "objective", "kind"),
    [
        ("auto", "time_to_target", Modelled),
        ("auto", "samples_to_target", Allocated),
        ("tpe", "time_to_target", Allocated),
        ("random", "time_to_target", Allocated),
    ],
)
def test_a_spec_has_its_chooser(name: str, objective: str, kind: type[Chooser]) -> None:
    assert type(Study(spec(name, objective=objective)).chooser) is kind


def test_tpe_takes_its_batch_sizes_in_turn_and_needs_one_that_fits() -> None:
    study = Study(spec("tpe"))
    sizes = [study.step().configuration.batch_size for _ in range(5)]
    assert sorted(sizes) == [8, 16, 32, 64, 128]
    study.probes = {}
    assert study.choose() is None
    assert study.ending() is None


def grid(**changes: Any) -> Study:
    default = {"batch_size": 16, "learning_rate": 0.1, "dropout": 0.0}
    return Study(spec("grid", **{"space": LISTS, "default": default, **changes}))


def test_a_grid_is_tried_whole_once_and_then_says_so() -> None:
    study = grid()
    tried = [study.step().configuration for _ in range(18)]
    assert tried[0] == study.spec.default_configuration
    assert len({configuration.key for configuration in tried}) == 18
    assert {one.batch_size for one in tried[:8]} == {8, 16, 64}, "in no order"
    assert study.ending() is None
    assert study.choose() is None
    assert study.ending() == "all 18 combinations of the grid have been tried"
    assert study.choose(study.restarted()) is None


def test_the_seed_fixes_the_order_of_a_grid() -> None:
    def order(seed: int) -> list[str]:
        study = grid(seed=seed)
        return [study.step().configuration.key for _ in range(18)]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_a_combination_that_was_lost_or_ran_out_of_memory_is_tried_again_one_that_failed_is_not() -> None:
    study = grid()
    study.step()
    again = study.step(TrialState.LOST).configuration
    assert study.step().configuration == again
    failed = study.step(TrialState.FAILED).configuration
    rest = [study.step().configuration for _ in range(15)]
    assert failed not in rest
    assert study.choose() is None


def test_combinations_that_do_not_fit_are_left_out_until_they_do() -> None:
    study = grid()
    probe = study.probes.pop(64)
    for _ in range(12):
        assert study.step().configuration.batch_size != 64
    assert study.choose() is None
    assert study.ending() == "all 12 combinations of the grid at batch sizes that fit have been tried"
    study.probes[64] = replace(probe)
    choice = study.choose()
    assert choice is not None
    assert choice.configuration.batch_size == 64
    assert study.ending() is None


def test_what_a_combination_does_not_use_makes_it_no_other() -> None:
    space = {
        "batch_size": [8, 16],
        "learning_rate": 0.1,
        "optimizer": [{"name": "sgd", "momentum": [0.8, 0.9]}, {"name": "adamw"}],
    }
    default = {"batch_size": 8, "learning_rate": 0.1, "optimizer": {"name": "adamw"}}
    study = grid(space=space, default=default)
    while (choice := study.choose()) is not None:
        study.run(choice)
    assert len(study.trials) == 6, "AdamW once, SGD with either momentum, at two batch sizes"
    assert study.ending() == "all 6 combinations of the grid have been tried"


def test_the_search_does_not_end_before_every_batch_size_in_contention_has_been_tuned() -> None:
    budget = {"trials": 1000, "trial_train_seconds": 100.0, "least_improvement": 0.9}
    study = Study(spec(budget=budget))
    study.step()
    study.step()
    tried: list[int] = []
    while (choice := study.choose()) is not None and not choice.uncapped and len(tried) < 60:
        tried.append(choice.configuration.batch_size)
        study.step()
    assert (study.ending() or "").startswith("a further trial is expected to better")
    assert len(tried) < 60
    assert len(set(tried)) >= 2
    assert max(tried.count(size) for size in tried) <= RETUNED_IN_VAIN


def test_a_search_that_has_ended_is_not_begun_anew_by_what_is_confirmed() -> None:
    budget = {"trials": 1000, "trial_train_seconds": 100.0, "least_improvement": 0.9}
    study = Study(spec(budget=budget))
    study.step()
    study.step()
    while study.choose() is not None:
        study.step()
        assert len(study.trials) < 100
    for _ in range(3):
        study.run(default_choice(study.spec), seconds=0.001)  # it would be news
        assert study.choose() is None
