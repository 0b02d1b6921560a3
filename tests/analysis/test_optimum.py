from __future__ import annotations

import math

import pytest

from bssearch.analysis.confirmation_runs import fewest_runs
from bssearch.analysis.optimum import Verdict, decide, runs_to_settle
from bssearch.records import Phase, TrialRecord
from tests.factories import make_trial, not_none


def confirmed(times: dict[int, list[float]], steps: dict[int, int] | None = None) -> list[TrialRecord]:
    return [
        make_trial(
            1000 * size + seed,
            batch_size=size,
            seconds=value,
            steps=(steps or {}).get(size, 100),
            phase=Phase.CONFIRM,
            seed=seed,
        )
        for size, values in times.items()
        for seed, value in enumerate(values)
    ]


def verdict(times: dict[int, list[float]]) -> Verdict:
    return not_none(decide(confirmed(times), 3))


def test_the_smallest_batch_size_shown_to_be_within_5_percent_is_recommended() -> None:
    found = verdict({16: [1.5, 1.51, 1.52], 32: [1.02, 1.021, 1.022], 64: [1.0, 1.001, 1.002]})
    assert found.optimal.configuration.batch_size == 32
    assert found.least.configuration.batch_size == 64
    assert found.rule == "smallest_shown_within_5_percent"
    assert found.tied == [32, 64]


def test_what_may_be_within_5_percent_is_not_shown_to_be() -> None:
    found = verdict({32: [0.8, 1.0, 1.3], 64: [0.9, 0.99, 1.1]})
    assert (found.optimal.configuration.batch_size, found.rule) == (64, "least")
    assert found.tied == [64]


@pytest.mark.parametrize(
    ("recommended", "best", "rule"), [(64, 64, "least"), (32, 64, "smallest_shown_within_5_percent"), (16, 16, "law")]
)
def test_another_batch_size_is_recommended_with_its_reason(recommended: int, best: int, rule: str) -> None:
    found = verdict({16: [1.0, 1.5, 2.0], 32: [0.9, 1.2, 1.6], 64: [0.8, 1.1, 1.6]}).recommending(recommended, best)
    assert (found.optimal.configuration.batch_size, found.rule) == (recommended, rule)
    assert found.least.configuration.batch_size == 64


def test_of_two_configurations_with_one_median_the_one_with_the_smaller_mean_counts() -> None:
    trials = [
        make_trial(10 * place + seed, learning_rate=rate, seconds=one, phase=Phase.CONFIRM, seed=seed)
        for place, (rate, seconds) in enumerate([(0.1, (1.0, 2.0, 4.0)), (0.2, (1.0, 2.0, 3.0))])
        for seed, one in enumerate(seconds)
    ]
    found = decide(trials, 3)
    assert found is not None and found.optimal.configuration.learning_rate == 0.2


def test_the_flat_range_of_another_recommendation_does_not_reach_to_what_is_not_flat() -> None:
    found = verdict({16: [1.0, 1.5, 2.0], 32: [0.9, 1.2, 1.6], 64: [0.8, 1.1, 1.6]}).recommending(16, 16)
    assert found.flat_range == (16, 16)


def test_the_flat_range_ends_at_the_first_batch_size_that_is_not_flat_on_either_side() -> None:
    medians = {8: 1.01, 16: 2.0, 32: 1.02, 64: 1.0, 128: 1.03, 256: 2.0, 512: 1.01}
    found = verdict({size: [one, one * 1.1, one * 0.9] for size, one in medians.items()})
    assert found.flat_range == (32, 128)
    assert verdict({8: [1.0, 1.1, 0.9], 16: [2.0, 2.1, 1.9]}).flat_range == (8, 8)
    assert verdict({8: [1.01, 1.1, 0.9], 16: [1.0, 1.1, 0.9]}).flat_range == (8, 16)


def test_three_runs_of_each_decide_though_more_were_asked_for() -> None:
    trials = confirmed({32: [1.0, 1.0, 1.0, 1.0], 64: [2.0, 2.0, 2.0]})
    assert fewest_runs(trials, 7) == 3
    found = decide(trials, 7)
    assert found is not None and found.confirmed
    begun = decide([*trials, *confirmed({128: [0.5]})], 7)
    assert begun is None, "one configuration has had a single run: nothing is decided, and there is no search"


def test_seed_deviation_is_pooled_over_batch_sizes() -> None:
    found = verdict({16: [1.0, math.e**0.1, math.e**0.2], 32: [2.0, 2.0, 2.0]})
    assert found.seed_deviation == pytest.approx(math.sqrt((0.1**2 * 2 + 0) / 4))


@pytest.mark.parametrize(("variation", "ratio", "runs"), [(0.042, 1.05, 13), (0.042, 1.10, 5)])
def test_runs_to_settle_are_those_of_a_t_test_with_80_percent_power(variation: float, ratio: float, runs: int) -> None:
    """At the MLPerf reference runs' median noise, 4.2 %; exact, where 16 (c/δ)² gives 12 and 4."""
    assert runs_to_settle(math.sqrt(math.log1p(variation**2)), ratio) == runs


def test_the_least_of_several_that_are_as_good_looks_faster_than_it_is() -> None:
    near = [0.9, 1.0, 1.12, 1.0]
    alone = verdict({32: near, 64: [2 * one for one in near]}).optimal.estimate
    flat = verdict({size: [one * (1 + size / 1e5) for one in near] for size in (32, 64, 128, 256)})
    assert flat.least.selection > 0.01
    assert not_none(flat.least.estimate.high) == pytest.approx(
        not_none(alone.high) * math.exp(flat.least.selection), rel=0.01
    )
    assert flat.least.estimate.low == pytest.approx(alone.low, rel=0.01)
    assert flat.by_batch[256].selection == 0.0
