"""How far each batch size's best lies above its valley, against valleys that are known."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from bssearch.analysis.certainty import TUNING_GAP, heights
from bssearch.analysis.optimum import Verdict, decide
from bssearch.records import Phase, TrialRecord, TrialState
from tests.factories import make_trial, not_none

CURVATURE = 0.1
SIZES = (16, 32, 64, 128)


def seconds(size: int, rate: float, power: float = 0.5, noise: float = 0.0) -> float:
    off = math.log2(rate) - math.log2(0.1) - power * (math.log2(size) - 5)
    return math.exp(CURVATURE * off**2 + noise) * (1 + 100 / size)


def search(rates: Mapping[int, Sequence[float]], noise: float = 0.02) -> list[TrialRecord]:
    rng = random.Random(0)
    places = [(size, rate) for size, some in rates.items() for rate in some]
    return [
        make_trial(n, batch_size=size, learning_rate=rate, seconds=seconds(size, rate, noise=rng.gauss(0, noise)))
        for n, (size, rate) in enumerate(places)
    ]


def verdict_over(trials: list[TrialRecord]) -> Verdict:
    slowest_first = sorted(trials, key=lambda one: -(one.outcome.time_to_target_s or math.inf) if one.outcome else 0)
    best = {trial.configuration.batch_size: trial for trial in slowest_first}
    runs = [
        replace(trial, number=1000 * size + seed, phase=Phase.CONFIRM, seed=seed)
        for size, trial in best.items()
        for seed in range(3)
    ]
    return not_none(decide([*trials, *runs], 3))


def mean_heights(trials: list[TrialRecord], verdict: Verdict | None = None) -> dict[int, float]:
    over = verdict or verdict_over(trials)
    means, covariances = heights(over, trials, [one.configuration for one in over.by_batch.values()])
    assert means.any() == covariances.any()
    return dict(zip(over.by_batch, means.tolist(), strict=True)) if means.any() else {}


def test_a_batch_size_that_was_only_tried_far_from_the_bottom_lies_above_it() -> None:
    bottom = {size: 0.1 * (size / 32) ** 0.5 for size in SIZES}
    around = (0.25, 0.5, 1.0, 2.0, 4.0)
    rates = {size: tuple(bottom[size] * factor for factor in around) for size in SIZES}
    rates[64] = (bottom[64] / 8, bottom[64] / 4)
    found = mean_heights(search(rates))
    assert found[64] == pytest.approx(CURVATURE * 4, abs=0.12)
    assert max(found[size] for size in SIZES if size != 64) < 0.03


def test_with_little_to_see_the_best_is_taken_to_be_tuned_about_as_well_as_searches_do() -> None:
    rates = {size: (0.1 * (size / 32) ** 0.5, 0.12) for size in SIZES}
    found = mean_heights(search(rates, noise=0.2))
    assert all(0 < height < TUNING_GAP for height in found.values())


def test_too_few_trials_show_no_valley() -> None:
    assert mean_heights(search({16: (0.05, 0.1), 32: (0.1, 0.2), 64: (0.1,)})) == {}
    same = search({size: (0.1,) for size in SIZES})
    assert mean_heights([*same, *(replace(one, number=one.number + 50, seed=9) for one in same)]) == {}


def test_trials_of_another_optimizer_say_nothing() -> None:
    rates = {size: (0.05, 0.1, 0.2) for size in SIZES}
    trials = search(rates)
    other = [
        replace(one, number=500 + one.number, configuration=replace(one.configuration, optimizer="adamw"))
        for one in search({32: (1e-4, 1e-3, 1e-2)})
    ]
    verdict = verdict_over(trials)
    assert mean_heights([*trials, *other], verdict) == mean_heights(trials, verdict)


def test_a_trial_that_missed_the_target_for_long_shows_that_the_valley_is_steep() -> None:
    bottom = {size: 0.1 * (size / 32) ** 0.5 for size in SIZES}
    rates: dict[int, Sequence[float]] = {size: (bottom[size], 1.1 * bottom[size], 1.2 * bottom[size]) for size in SIZES}
    rates[64] = (2 * bottom[64], 2.1 * bottom[64])
    trials = search(rates, noise=0.05)
    watched = [
        make_trial(
            300 + size,
            batch_size=size,
            learning_rate=4 * bottom[size],
            state=TrialState.CAPPED,
            seconds=5 * seconds(size, bottom[size]),
        )
        for size in SIZES
    ]
    verdict = verdict_over(trials)
    assert mean_heights([*trials, *watched], verdict)[64] > 1.5 * mean_heights(trials, verdict)[64]
