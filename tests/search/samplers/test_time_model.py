"""The sampler `auto` over a whole study, on records as the store has them."""

from __future__ import annotations

from typing import Any

import pytest

from bssearch.analysis.law.quick import QuickPrior
from bssearch.records import Configuration, GradientNoise, TrialRecord, TrialState
from bssearch.search.history import History
from bssearch.search.samplers.base import Choice
from bssearch.search.samplers.time_model.sampler import _noise_scale
from tests.factories import make_trial, not_none
from tests.search.samplers.made_up import MadeUpStudy, seconds_near_64, step_seconds_near_64, study_spec

PRUNED, REACHED, RUNNING = TrialState.PRUNED, TrialState.REACHED, TrialState.RUNNING


def study_of(**changes: Any) -> MadeUpStudy:
    return MadeUpStudy(study_spec("auto", **changes), seconds_near_64, step_time=step_seconds_near_64)


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
        assert study.spec.space.outside(choice.configuration) == []
        assert (
            study.spec.space.decode(choice.configuration.batch_size, not_none(choice.sampled)) == choice.configuration
        )


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
    assert 0 <= not_none(expected[-1]) < 0.1 * first.expected_improvement
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
