"""The laws' prior, and the posterior in cases with known answers."""

import math
from dataclasses import replace

import numpy as np
import pytest

from bssearch.search.samplers.time_model.acquisition import (
    DEEPEST,
    DEPARTURES,
    LAWS,
    LEFT,
    RIGHT,
    SEED_NOISES,
    LawPrior,
    Posterior,
    _spread,
    condition,
    covariances,
    prior,
)
from bssearch.search.samplers.time_model.candidates import Extrapolation, Points

SIZES = (8, 32, 128, 512)
RATES = (0.001, 0.01, 0.1, 1.0)
GRID = [(size, rate) for size in SIZES for rate in RATES]
POINTS = Points(
    np.array([size for size, _ in GRID], float), np.log([rate for _, rate in GRID]), np.zeros((len(GRID), 0))
)
ALL = np.arange(len(GRID))
ERROR = 0.35


def place(size: int, rate: float) -> int:
    return GRID.index((size, rate))


def drawn(seed: int = 0, default: tuple[int, float] = (32, 0.01)) -> LawPrior:
    size, rate = default
    return LawPrior(
        batch_sizes=SIZES,
        default_size=size,
        default_log_rate=math.log(rate),
        log_rate_width=math.log(1000),
        seed=seed,
    )


def told(*trials: tuple[int, float], bounds: tuple[tuple[int, float], ...] = ()) -> Extrapolation:
    """Exact predictions and bounds from (point, seconds) pairs."""
    both = [*trials, *bounds]
    return Extrapolation(
        points=np.array([point for point, _ in both]),
        log_seconds=np.log([seconds for _, seconds in both]),
        variance=np.array([0.0] * len(trials) + [0.09] * len(bounds)),
        is_bound=np.array([False] * len(trials) + [True] * len(bounds)),
        error=ERROR,
    )


def posterior(found: Extrapolation | None = None) -> Posterior:
    """Posterior if steps take equally long at every batch size."""
    laws = drawn().log_steps(POINTS)
    return prior(ALL, POINTS, laws) if found is None else condition(ALL, POINTS, laws, found)


def deviation(of: Posterior, at: int) -> float:
    return math.sqrt(of.covariance[at, at])


def test_a_law_asks_for_fewer_steps_at_larger_batches_and_caps_what_a_bad_rate_costs() -> None:
    rates = np.log(np.geomspace(1e-9, 1e9, 2001))
    best = np.stack(
        [
            drawn().log_steps(Points(np.full(len(rates), float(size)), rates, np.zeros((len(rates), 0)))).min(axis=0)
            for size in SIZES
        ]
    )
    assert best.shape == (len(SIZES), LAWS)
    assert (np.diff(best, axis=0) < 0).all()
    assert (np.diff(best, axis=0) > -math.log(4) - 0.01).all(), "at most perfect scaling"
    worst = drawn().log_steps(Points(np.array([8.0, 8.0]), np.log([1e-9, 1e9]), np.zeros((2, 0))))
    assert worst - best[0] == pytest.approx(np.full(worst.shape, DEEPEST), abs=0.01)


def test_covariances_can_be_inverted() -> None:
    others = Points(POINTS.batch_sizes, POINTS.log_rates, np.random.default_rng(0).random((len(GRID), 3)))
    adds, departs = covariances(others)
    for matrix in (adds, adds + departs):
        assert np.linalg.eigvalsh(matrix).min() > 0
    assert np.diag(departs) == pytest.approx(np.ones(len(GRID)))


def test_a_bound_that_is_met_moves_nothing_and_one_that_is_not_moves_up() -> None:
    hits = ((place(32, 0.01), 10.0), (place(32, 0.1), 40.0), (place(128, 0.01), 8.0), (place(32, 0.1), 40.0))
    slow, good = place(32, 1.0), place(128, 0.1)
    before = posterior(told(*hits))
    met = posterior(told(*hits, bounds=((slow, 30.0),)))
    assert before.mean[slow] > math.log(60)
    assert met.mean[slow] > before.mean[slow] - 0.1
    assert posterior(told(*hits, bounds=((good, 300.0),))).mean[good] > before.mean[good] + 0.5


def dense(found: Extrapolation) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean, covariance and seed noise without approximations: one datum per run, all laws and parts.

    The mixture of Gaussian processes (Rasmussen & Williams 2006, eq. 2.25 and 2.26), moments matched.
    """
    laws, (adds, departs) = drawn().log_steps(POINTS), covariances(POINTS)
    at = found.points
    logs, means, withins, noises = [], [], [], []
    for noise, share in SEED_NOISES:
        for departure in DEPARTURES:
            covariance = adds + departure**2 * departs
            inverse = np.linalg.inv(covariance[np.ix_(at, at)] + np.diag(noise**2 + found.variance))
            off = found.log_seconds[:, None] - laws[at]
            fit = -0.5 * np.einsum("pl,pq,ql->l", off, inverse, off)
            logs.append(math.log(share) + fit + 0.5 * np.linalg.slogdet(inverse)[1])
            gain = covariance[:, at] @ inverse
            means.append(laws + gain @ off)
            withins.append(covariance - gain @ covariance[at])
            noises.append(noise**2)
    weights = np.exp(np.array(logs) - np.max(logs))
    weights /= weights.sum()
    mean = sum(part @ one for part, one in zip(means, weights, strict=True))
    within = sum(part * one.sum() for part, one in zip(withins, weights, strict=True))
    between = sum(
        ((part - mean[:, None]) * one) @ (part - mean[:, None]).T for part, one in zip(means, weights, strict=True)
    )
    return mean, within + between, math.sqrt(float(np.array(noises) @ weights.sum(axis=1)))


@pytest.mark.parametrize(
    "trials",
    [
        [(place(32, 0.01), 100.0)],
        [(place(32, 0.01), 100.0), (place(32, 0.01), 150.0), (place(32, 0.01), 90.0)],
        [(place(8, 0.01), 300.0), (place(128, 0.1), 60.0), (place(512, 0.1), 80.0), (place(128, 0.1), 61.0)],
    ],
)
@pytest.mark.parametrize("variance", [0.0, 0.04])
def test_what_is_believed_is_the_mixture_of_gaussian_processes_over_every_run(
    trials: list[tuple[int, float]], variance: float
) -> None:
    found = replace(told(*trials), variance=np.full(len(trials), variance))
    ours, (mean, covariance, noise) = posterior(found), dense(found)
    assert ours.mean == pytest.approx(mean, abs=0.02)
    assert np.sqrt(np.diag(ours.covariance)) == pytest.approx(np.sqrt(np.diag(covariance)), rel=0.03)
    assert ours.seed_noise == pytest.approx(noise, rel=0.01)


def test_before_any_trial_the_spread_of_the_laws_is_believed_with_what_they_leave_unexplained() -> None:
    laws, (adds, departs) = drawn().log_steps(POINTS), covariances(POINTS)
    believed = posterior()
    assert believed.mean == pytest.approx(laws.mean(axis=1))
    assert believed.covariance - np.cov(laws) - adds == pytest.approx(departs / 16), "a deviation of a quarter"


def test_the_critical_batch_size_is_spread_evenly_from_two_octaves_below_the_space_to_two_above() -> None:
    share = np.linspace(0.0, 1.0, 101)
    assert _spread(share, 1.0, 11.0, None) == pytest.approx(1.0 + 10.0 * share)
    laws = LawPrior(
        batch_sizes=(8, 512), default_size=32, default_log_rate=0.0, log_rate_width=1.0, seed=0, noise_scale=None
    )
    octaves = np.log2(laws._critical)
    assert octaves.min() == pytest.approx(1.0, abs=0.1) and octaves.max() == pytest.approx(11.0, abs=0.1)
    assert np.median(octaves) == pytest.approx(6.0, abs=0.1)


def test_a_noise_scale_draws_four_fifths_of_the_laws_within_an_octave_and_a_half_and_leaves_the_rest() -> None:
    spread = _spread((np.arange(1000) + 0.5) / 1000, 1.0, 11.0, 64.0)
    without, near = spread[:200], spread[200:]
    assert (without.min(), without.max()) == (pytest.approx(1.0, abs=0.1), pytest.approx(11.0, abs=0.1))
    assert np.median(near) == pytest.approx(6.0, abs=0.01)
    assert near.std() == pytest.approx(1.5, abs=0.05)


def test_the_best_rate_lies_about_the_default_within_a_quarter_of_the_space_and_steps_rise_by_powers_beside_it() -> (
    None
):
    laws = drawn()
    assert laws._best_log_rate.mean() == pytest.approx(math.log(0.01), abs=0.02)
    assert laws._best_log_rate.std() == pytest.approx(math.log(1000) / 4, rel=0.02)
    for powers, (low, high) in ((laws._left, LEFT), (laws._right, RIGHT)):
        assert (powers.min(), powers.max()) == (pytest.approx(low, rel=0.02), pytest.approx(high, rel=0.02))
    assert np.median(laws._right) == pytest.approx(math.sqrt(RIGHT[0] * RIGHT[1]), rel=0.02)


def test_the_constants_of_a_law_are_drawn_independently() -> None:
    laws = drawn()
    constants = np.array([np.log(laws._critical), laws._best_log_rate, laws._slope, laws._left, np.log(laws._right)])
    assert np.abs(np.corrcoef(constants) - np.eye(len(constants))).max() < 0.15
