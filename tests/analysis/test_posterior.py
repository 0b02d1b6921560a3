"""The posterior is calibrated: over studies drawn from its own prior, an interval holds the truth as often as it says.

Cook, Gelman and Rubin 2006; Talts et al. 2018, arXiv 1804.06788.
"""

import math

import numpy as np
import pytest

from bssearch.analysis.posterior import (
    DEPARTURE_SCALE,
    DEPARTURES,
    FREEDOM,
    OCTAVES_BEYOND,
    SHARED,
    SLOPE_WEIGHTS,
    SLOPES,
    Numbers,
    Runs,
    infer,
)

LOG_SIZES = np.log([16.0, 32, 64, 128, 256])
BASE = np.log(1 + LOG_SIZES)
STEP_ERROR = 0.03
SEEDS = 6


def draw(rng: np.random.Generator, missed_share: float) -> tuple[Numbers, float, Runs]:
    """True levels and log B_crit, and runs; the longest ``missed_share`` of them are censored."""
    beyond = OCTAVES_BEYOND * math.log(2)
    log_b_crit = rng.uniform(LOG_SIZES[0] - beyond, LOG_SIZES[-1] + beyond)
    prior = np.gradient(DEPARTURES) * np.exp(-((DEPARTURES / DEPARTURE_SCALE) ** 2) / 2)
    departure = rng.choice(DEPARTURES, p=prior / prior.sum())
    levels = BASE + np.logaddexp(0, log_b_crit - LOG_SIZES) + math.hypot(departure, STEP_ERROR) * rng.normal(size=5)
    weights = SHARED * (1 - SHARED)
    shared, slope = rng.choice(SHARED, p=weights / weights.sum()), rng.choice(SLOPES, p=SLOPE_WEIGHTS)
    scale = 0.2
    scales = scale * np.exp(slope * (LOG_SIZES - LOG_SIZES.mean()))
    effects = math.sqrt(shared) * scale * rng.normal(size=SEEDS)
    own = math.sqrt(1 - shared) * scales[:, None] * rng.standard_t(FREEDOM, size=(5, SEEDS))
    logs = levels[:, None] + effects + own
    limit = np.quantile(logs, 1 - missed_share)
    rows = [
        (place, seed, min(logs[place, seed], limit), 0.0, bool(logs[place, seed] > limit))
        for place in range(5)
        for seed in range(SEEDS)
    ]
    return levels, float(log_b_crit), Runs.of_rows(rows)


@pytest.mark.slow
@pytest.mark.parametrize("missed_share", [0.0, 0.2])
def test_intervals_hold_what_they_promise_over_draws_from_the_prior(missed_share: float) -> None:
    rng, ranks, of_b_crit = np.random.default_rng(5), [], []
    for _ in range(300):
        levels, log_b_crit, runs = draw(rng, missed_share)
        found = infer(runs, LOG_SIZES, BASE, np.full(5, STEP_ERROR))
        drawn = found.levels - found.levels.mean(axis=1, keepdims=True)
        ranks += (drawn < levels - levels.mean()).mean(axis=0).tolist()
        of_b_crit.append(float((found.log_b_crit < log_b_crit).mean()))
    for shares, error in ((np.array(ranks), 0.03), (np.array(of_b_crit), 0.06)):
        inside = {level: np.mean(np.abs(shares - 0.5) < level / 2) for level in (0.5, 0.9)}
        assert inside == pytest.approx({0.5: 0.5, 0.9: 0.9}, abs=error)
        assert shares.mean() == pytest.approx(0.5, abs=error)
