import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from bssearch.records import GradientNoise
from bssearch.records.noise_scale import (
    FEWEST_PASSES,
    FEWEST_TRIALS,
    Norms,
    Pass,
    estimate,
    gradient_noise,
    moments,
    pooled,
)

SMALL, BATCHES, DIMENSIONS = 8, 8, 64
PASS_SAMPLES = SMALL * BATCHES
ENDLESS = 10**12


def norms_of_passes(gradients: NDArray[np.float64]) -> list[Norms]:
    """Return the norms of small batches' gradients (passes, small batches, dimensions)."""
    small = (gradients**2).sum(-1).mean(-1)
    return [Norms(*pair) for pair in zip(small.tolist(), (gradients.mean(1) ** 2).sum(-1).tolist(), strict=True)]


def gaussian_passes(ratio: float, passes: int, random: np.random.Generator) -> list[Pass]:
    """Measure a gradient of length 1 whose noise scale is ``ratio`` times the samples of a pass."""
    trace = ratio * PASS_SAMPLES
    mean = random.standard_normal(DIMENSIONS)
    noise = random.standard_normal((passes, BATCHES, DIMENSIONS)) * math.sqrt(trace / DIMENSIONS / SMALL)
    return [
        Pass(small_batch=SMALL, small_batches=BATCHES, samples=ENDLESS, plain=norms)
        for norms in norms_of_passes(mean / np.linalg.norm(mean) + noise)
    ]


@pytest.mark.parametrize(
    ("ratio", "passes"), [(8.0, FEWEST_PASSES), (1.0, 2 * FEWEST_PASSES), (0.25, 8 * FEWEST_PASSES)]
)
def test_the_interval_holds_the_exact_value_in_nine_of_ten_runs(ratio: float, passes: int) -> None:
    random = np.random.default_rng(round(100 * ratio) + passes)
    found = [gradient_noise(gaussian_passes(ratio, passes, random)) for _ in range(100)]
    exact = ratio * PASS_SAMPLES
    assert sum(one.low is not None and one.low <= exact <= (one.high or math.inf) for one in found) >= 90
    if ratio <= 1:
        assert all(one.high is not None for one in found), "such a gradient can be told from zero"
    if passes == 8 * FEWEST_PASSES:
        assert sum(one.high is not None for one in found) >= 90
        assert np.median([one.low or 0.0 for one in found]) > exact / 2


def test_samples_drawn_without_replacement_give_the_moments_of_the_whole_training_part() -> None:
    random = np.random.default_rng(1)
    samples = 80
    gradients = random.standard_normal((samples, 5)) + 0.2
    rows = np.array([random.permutation(samples)[:PASS_SAMPLES] for _ in range(20_000)])
    pairs = np.array(
        [
            moments(Pass(small_batch=SMALL, small_batches=BATCHES, samples=samples, plain=norms), norms)
            for norms in norms_of_passes(gradients[rows].reshape(len(rows), BATCHES, SMALL, 5).mean(2))
        ]
    )
    assert pairs.mean(axis=0) == pytest.approx(
        (np.trace(np.cov(gradients.T)), (gradients.mean(0) ** 2).sum()), rel=0.02
    )


def test_a_mean_gradient_that_may_be_zero_leaves_low_or_more() -> None:
    found = estimate([(10.0 + 0.1 * square, square) for square in np.array([3.0, -2.0, 4.0, -3.0] * 4)])
    assert found.scale is None and found.high is None
    assert found.low is not None and 1 < found.low < 20


def test_where_neither_moment_can_be_told_from_zero_nothing_is_known() -> None:
    assert estimate([(0.0, 0.0)] * 16) == GradientNoise()
    assert estimate([((-1.0) ** index, (-1.0) ** (index // 2)) for index in range(16)]) == GradientNoise()


def test_gradients_without_noise_have_a_noise_scale_of_zero() -> None:
    assert estimate([(0.0, 2.0)] * 16) == GradientNoise(scale=0.0, low=0.0, high=0.0)


def test_neighbours_that_are_alike_make_the_interval_wider() -> None:
    alone = np.random.default_rng(3).standard_normal(64)
    in_runs = np.sort(alone.reshape(8, 8), axis=None)
    widths = [estimate([(10 + one, 5.0) for one in values]).relative_half_width for values in (alone, in_runs)]
    assert widths[1] > 1.5 * widths[0]


@pytest.mark.parametrize("unit", [1e-90, 1e90])
def test_the_scale_does_not_depend_on_the_unit_of_the_loss(unit: float) -> None:
    pairs = [(10.0 + index % 3, 2.0 + index % 2) for index in range(16)]
    plain, other = estimate(pairs), estimate([(unit * trace, unit * square) for trace, square in pairs])
    assert (other.scale, other.low, other.high) == pytest.approx((plain.scale, plain.low, plain.high))


@pytest.mark.parametrize("pairs", [[(10.0, 5.0), (11.0, 5.4), (9.3, 4.7)], [(10.0, 5.0), (11.0, 4.7), (9.3, 5.4)]])
def test_the_interval_ends_where_the_mean_of_the_difference_is_t_standard_errors_from_zero(
    pairs: list[tuple[float, float]],
) -> None:
    """Three passes make blocks of one: then it is Fieller's interval, narrower where the two moments rise together."""
    found = estimate(pairs)
    assert found.scale is not None and found.low is not None and found.high is not None
    for end in (found.low, found.high):
        differences = [trace - end * square for trace, square in pairs]
        error = statistics.stdev(differences) / math.sqrt(3)
        assert abs(statistics.fmean(differences)) == pytest.approx(4.302652729911275 * error)  # t(0.975, 2), any table
    assert found.low < found.scale < found.high


def test_an_interval_without_an_end_is_infinitely_wide_and_one_of_zero_has_no_width() -> None:
    assert GradientNoise(scale=8.0, low=6.0, high=14.0).relative_half_width == 0.5
    for unknown in (
        GradientNoise(),
        GradientNoise(low=3.0),
        GradientNoise(scale=8.0, low=6.0),
        GradientNoise(scale=8.0, high=9.0),
    ):
        assert unknown.relative_half_width == math.inf
    assert GradientNoise(scale=0.0, low=0.0, high=0.0).relative_half_width == 0.0


def test_norms_that_are_no_numbers_cannot_be_used() -> None:
    assert Norms(1.0, 2.0).are_finite
    assert not any(Norms(*pair).are_finite for pair in ((math.nan, 1.0), (1.0, math.inf)))


def test_too_few_passes_give_moments_and_no_interval() -> None:
    passes = gaussian_passes(1.0, FEWEST_PASSES, np.random.default_rng(0))
    few = gradient_noise(passes[:-1], seconds=0.5)
    trace, square = np.mean([moments(one, one.plain) for one in passes[:-1]], axis=0)
    assert (few.trace, few.square) == pytest.approx((trace, square))
    assert few == GradientNoise(passes=FEWEST_PASSES - 1, trace=few.trace, square=few.square, seconds=0.5)
    assert gradient_noise([]) == GradientNoise()
    whole = gradient_noise(passes)
    assert whole.passes == FEWEST_PASSES and whole.low is not None


SHORT_BATCH, SHORT_BATCHES = 32, 2


def short_trials(ratio: float, trials: int, random: np.random.Generator) -> list[GradientNoise]:
    """Measure gradients of trials that have one to four short passes each, along a direction of their own."""
    trace = ratio * SHORT_BATCH * SHORT_BATCHES
    found = []
    for _ in range(trials):
        mean = random.standard_normal(DIMENSIONS)
        shape = (random.integers(1, 5), SHORT_BATCHES, DIMENSIONS)
        gradients = mean / np.linalg.norm(mean) + random.standard_normal(shape) * math.sqrt(
            trace / DIMENSIONS / SHORT_BATCH
        )
        made = [
            Pass(small_batch=SHORT_BATCH, small_batches=SHORT_BATCHES, samples=ENDLESS, plain=norms)
            for norms in norms_of_passes(gradients)
        ]
        found.append(gradient_noise(made))
    return found


@pytest.mark.parametrize(("ratio", "trials"), [(8.0, FEWEST_TRIALS), (1.0, 8), (0.25, 32)])
def test_the_pooled_interval_holds_the_exact_value_in_nine_of_ten_studies(ratio: float, trials: int) -> None:
    random = np.random.default_rng(round(100 * ratio) + trials)
    found = [pooled(short_trials(ratio, trials, random)) for _ in range(200)]
    exact = ratio * SHORT_BATCH * SHORT_BATCHES
    known = [(one.low, one.high) for one in found if one.low is not None]
    assert sum(low <= exact <= (high or math.inf) for low, high in known) >= 0.9 * len(known)
    assert len(known) >= 190
    if trials == 32 and ratio <= 1:
        assert all(high is not None for _, high in known)
        assert np.median([one.scale or 0.0 for one in found]) == pytest.approx(exact, rel=0.1)


def test_pooling_averages_the_moments_over_all_passes_and_divides_the_averages() -> None:
    trials = [
        GradientNoise(passes=passes, trace=trace, square=square, seconds=0.25)
        for passes, trace, square in ((1, 10.0, 1.0), (3, 14.0, 1.2), (2, 11.0, 0.9))
    ]
    found = pooled(trials)
    assert (found.passes, found.seconds) == (6, 0.75)
    assert (found.trace, found.square) == pytest.approx(((10 + 42 + 22) / 6, (1 + 3.6 + 1.8) / 6))
    assert found.scale == pytest.approx(74 / 6.4)
    assert found.low is not None and found.high is not None and found.low < 74 / 6.4 < found.high
    assert pooled([*trials, GradientNoise()]) == found, "a trial without a pass says nothing"


def test_pooling_takes_three_trials_for_an_interval_and_keeps_the_moments_of_fewer() -> None:
    trials = short_trials(0.25, FEWEST_TRIALS, np.random.default_rng(4))
    few = pooled(trials[:-1])
    assert few.low is None and few.trace is not None and few.passes == sum(one.passes or 0 for one in trials[:-1])
    assert pooled(trials).low is not None
    assert pooled([]) == pooled([GradientNoise(), GradientNoise(low=3.0, passes=16)]) == GradientNoise()


def test_preconditioned_moments_are_pooled_apart_over_the_trials_that_have_them() -> None:
    random = np.random.default_rng(6)
    plain, adam = short_trials(0.25, 8, random), short_trials(1.0, 8, random)
    both = [
        replace(one, passes=1, adam_trace=other.trace, adam_square=other.square)
        for one, other in zip(plain, adam, strict=True)
    ]
    found, alone = pooled(both), pooled([replace(one, passes=1) for one in adam])
    assert (found.adam_scale, found.adam_low, found.adam_high) == (alone.scale, alone.low, alone.high)
    assert (found.adam_trace, found.adam_square) == (alone.trace, alone.square)
    assert pooled([replace(both[0], adam_trace=None, adam_square=None), *both[1:3]]).adam_low is None


def test_preconditioned_norms_are_estimated_apart() -> None:
    random = np.random.default_rng(5)
    plain, adam = gaussian_passes(0.25, 32, random), gaussian_passes(1.0, 32, random)
    both = [
        Pass(small_batch=SMALL, small_batches=BATCHES, samples=ENDLESS, plain=one.plain, adam=other.plain)
        for one, other in zip(plain, adam, strict=True)
    ]
    found, alone, preconditioned = gradient_noise(both), gradient_noise(plain), gradient_noise(adam)
    assert (found.scale, found.low, found.high) == (alone.scale, alone.low, alone.high)
    assert (found.adam_scale, found.adam_low, found.adam_high) == (
        preconditioned.scale,
        preconditioned.low,
        preconditioned.high,
    )
    assert alone.adam_scale is None
    few = [replace(one, adam=None) for one in both[FEWEST_PASSES:]]
    assert gradient_noise([*both[:FEWEST_PASSES], *few]).adam_low is not None
    assert gradient_noise([*both[: FEWEST_PASSES - 1], *few]).adam_low is None
