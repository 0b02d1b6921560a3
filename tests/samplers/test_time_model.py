"""The sampler `auto` over a whole study, on records as the store has them."""

from __future__ import annotations

from typing import Any

import pytest

from bssearch.analysis.law.quick import QuickPrior
from bssearch.history import History
from bssearch.records import Configuration, GradientNoise, TrialRecord, TrialState
from bssearch.samplers.base import Choice
from bssearch.samplers.time_model.sampler import TimeModelSampler, _noise_scale
from tests.factories import make_trial
from tests.samplers.made_up import MadeUpStudy, seconds_near_64, step_seconds_near_64, study_spec

PRUNED, REACHED, RUNNING = TrialState.PRUNED, TrialState.REACHED, TrialState.RUNNING


def study_of(**changes: Any) -> MadeUpStudy:
    return MadeUpStudy(study_spec("auto", **changes), seconds_near_64, step_time=step_seconds_near_64)


def test_the_optimum_is_found_and_its_batch_size_tried_most() -> None:
    study = study_of()
    for _ in range(25):
        study.step()
    best = [Configuration(batch_size=size, micro_batch_size=size, learning_rate=0.2) for size in study.spec.batch_sizes]
    least = min(map(seconds_near_64, best))
    assert study.history.incumbent_value == pytest.approx(least, rel=0.05)
    sizes = [trial.configuration.batch_size for trial in study.trials]
    assert sizes.count(64) + sizes.count(32) + sizes.count(128) > len(sizes) / 2


def test_before_any_trial_it_chooses_the_point_of_the_space_nearest_to_the_default() -> None:
    study = study_of()
    choice = study.sampler.choose(study.history)
    assert choice is not None
    assert choice.configuration == study.spec.default_configuration
    assert choice.expected_improvement is None, "nothing to better yet"


@pytest.mark.parametrize("state", [TrialState.LOST, TrialState.CANCELLED, TrialState.FAILED, TrialState.OOM])
def test_missing_trials_and_those_out_of_memory_say_nothing(state: TrialState) -> None:
    """Where a good one would be followed up: what it was, and how long it ran, makes no difference."""
    chosen = []
    for batch_size, rate, seconds in ((128, 0.4, 0.1), (16, 0.02, 50.0)):
        study = study_of()
        study.step()
        study.step()
        sampled = {"reference_learning_rate": rate, "weight_decay": 1e-4, "dropout": 0.3}
        study.run(Choice(study.spec.space.decode(batch_size, sampled), sampled), state, seconds)
        chosen.append(study.choose())
    assert chosen[0] == chosen[1]


def test_trials_of_other_drivers_count_while_they_run_and_when_they_have_ended() -> None:
    study = study_of()
    study.step()
    before = study.choose()
    assert before is not None
    trial = study.run(before, RUNNING)
    after = study.choose()
    assert after is not None
    assert after.configuration != before.configuration
    study.end(trial.number, seconds=0.01)
    told = study.choose()
    assert told is not None
    assert told.configuration.batch_size in {before.configuration.batch_size / 2**place for place in (-1, 0, 1)}


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
    study = study_of(space=space, default=default)
    assert study.step().configuration == study.spec.default_configuration
    for state in (RUNNING, PRUNED, TrialState.DIVERGED, REACHED, TrialState.CAPPED, REACHED, REACHED):
        choice = study.step(state)
        assert choice.sampled is not None
        assert study.spec.space.outside(choice.configuration) == []
        assert study.spec.space.decode(choice.configuration.batch_size, choice.sampled) == choice.configuration


def test_from_a_default_outside_the_space_it_goes_to_the_nearest_that_lies_inside() -> None:
    space = {"batch_size": [8, 64], "learning_rate": [0.01, 0.03, 0.1, 0.3], "weight_decay": [0.0, 1e-4, 1e-3]}
    study = study_of(space=space, default={"batch_size": 48, "learning_rate": 0.09, "weight_decay": 9e-4})
    first, second = study.step(), study.step()
    assert first.sampled is None
    assert second.configuration.batch_size == 64
    assert second.sampled == {"reference_learning_rate": 0.1, "weight_decay": 1e-3}


def test_what_it_expects_falls_as_more_is_known_and_all_batch_sizes_contend_before_a_hit() -> None:
    study = study_of()
    study.step(TrialState.EXHAUSTED)
    assert study.sampler.contenders(study.history) == [8, 16, 32, 64, 128]
    study.step()
    first, expected = study.choose(), []
    for _ in range(20):
        expected.append(study.step().expected_improvement)
    assert first is not None and first.expected_improvement is not None
    assert expected[-1] is not None
    assert 0 <= expected[-1] < 0.1 * first.expected_improvement
    contenders = study.sampler.contenders(study.history)
    assert 64 in contenders
    assert 8 not in contenders


def with_noise(number: int, scale: float | None, adam: float | None = None, **changes: Any) -> TrialRecord:
    return make_trial(number, noise=GradientNoise(scale=scale, adam_scale=adam), **changes)


@pytest.mark.parametrize(
    ("trials", "scale"),
    [
        ([with_noise(1, 10.0), with_noise(2, 90.0), with_noise(3, 20.0)], 20.0),
        ([with_noise(1, 10.0, 50.0)], 50.0),
        ([with_noise(1, None, 50.0), with_noise(2, 30.0)], 40.0),
        ([with_noise(1, None), with_noise(2, 30.0)], 30.0),
        ([with_noise(1, 0.0), with_noise(2, 30.0)], 30.0),
        ([with_noise(1, None)], None),
        ([with_noise(1, 30.0, state=TrialState.CAPPED)], None),
        ([], None),
    ],
)
def test_the_noise_scale_is_the_median_of_what_trials_that_reached_have_measured(
    trials: list[TrialRecord], scale: float | None
) -> None:
    assert _noise_scale(History(study_spec("auto"), trials)) == scale


def test_the_noise_scale_that_trials_measure_changes_what_is_tried_next() -> None:
    """A gradient noise scale says how far steps fall with the batch size, before trials at several do."""
    chosen = set()
    for scale in (1.0, 1e5):
        study = study_of()
        first = study.choose()
        assert first is not None
        trial = study.run(first, RUNNING)
        study.end(trial.number, noise=GradientNoise(scale=scale, low=scale / 1.1, high=scale * 1.1, passes=100))
        after = study.choose()
        assert after is not None
        chosen.add((after.configuration.batch_size, after.configuration.learning_rate, after.expected_improvement))
    assert len(chosen) == 2


def test_a_quick_answer_tells_the_noise_scale_until_trials_have_measured_it() -> None:
    quick = QuickPrior(64, (32, 128), (30.0, 60.0, 120.0), noise_scale=500.0)
    before, after = History(study_spec("auto")), History(study_spec("auto"), [with_noise(1, 30.0)])
    before.quick = after.quick = quick
    assert (_noise_scale(before), _noise_scale(after)) == (500.0, 30.0)


@pytest.mark.parametrize(("size", "noise"), [(8, 4.0), (512, 4000.0)])
def test_a_quick_answer_that_is_far_off_is_overcome_by_the_trials(size: int, noise: float) -> None:
    """The optimum is at batch 64; the same trials find it that find it without a quick answer."""
    study = study_of()
    study.history.quick = QuickPrior(size, (size, size), (noise / 2, noise, 2 * noise), noise_scale=noise)
    for _ in range(25):
        study.step()
    best = [Configuration(batch_size=size, micro_batch_size=size, learning_rate=0.2) for size in study.spec.batch_sizes]
    assert study.history.incumbent_value == pytest.approx(min(map(seconds_near_64, best)), rel=0.05)
    assert {trial.configuration.batch_size for trial in study.trials} >= {32, 64, 128}


def test_without_a_batch_size_that_fits_nothing_is_chosen() -> None:
    nothing = History(study_spec("auto"), (), {})
    sampler = TimeModelSampler(study_spec("auto"))
    assert sampler.choose(nothing) is None
    assert sampler.incumbent(nothing) is None
    assert list(sampler.contenders(nothing)) == []


def test_the_incumbent_is_a_configuration_that_has_reached_the_target() -> None:
    study = study_of()
    sampler = study.sampler
    assert isinstance(sampler, TimeModelSampler)
    study.step(TrialState.EXHAUSTED)
    assert sampler.incumbent(study.history) is None
    for state in (REACHED, PRUNED, REACHED):
        study.step(state)
    found = sampler.incumbent(study.history)
    reached = [one.configuration for one in study.trials if one.state is REACHED]
    assert found is not None and found.configuration in reached


def test_at_a_batch_size_that_is_asked_for_it_chooses_there() -> None:
    study = study_of()
    study.step()
    for size in (8, 128):
        choice = study.choose(size)
        assert choice is not None and choice.configuration.batch_size == size
    outside = study.choose(96)
    assert outside is not None and outside.configuration.batch_size == 96
