"""The sampler on grids whose truth is known: steps ∝ 1 + 128 / B, the best learning rate 0.1, a step's time affine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
import pytest

from bssearch.records.curves import Progress
from bssearch.search.samplers.time_model.acquisition import (
    BEHIND,
    LEAST_COST,
    KnowledgeGradient,
    Posterior,
    _after,
    _improvements,
)
from bssearch.search.samplers.time_model.candidates import Run
from tests.benchmarks.simulate.cells import GridCandidates

SIZES = (8, 32, 128, 512)
RATES = (0.001, 0.01, 0.1, 1.0)
CELLS = list(itertools.product(SIZES, RATES))
DEFAULT = CELLS.index((32, 0.01))
BEST = CELLS.index((128, 0.1))
TARGET = 1.0


def step_seconds(batch_size: int) -> float:
    return 1 + batch_size / 128


def truth(point: int) -> float:
    size, rate = CELLS[point]
    return step_seconds(size) * (1 + 128 / size) * math.exp(0.25 * math.log(rate / 0.1) ** 2)


def gradient(seed: int = 0, step_time: Callable[[int], float] = step_seconds) -> KnowledgeGradient:
    grid = GridCandidates(("batch_size", "learning_rate"), CELLS)
    return KnowledgeGradient(
        grid, default=DEFAULT, target_gain=TARGET, step_seconds={size: step_time(size) for size in SIZES}, seed=seed
    )


def trained(point: int, seconds: float, until: float = 1.0, **changes: bool) -> Run:
    """Return a trial on an even way to the target, where it would be after ``seconds``, as far as it was run."""
    progress = Progress()
    for share in np.linspace(0.0, until, 11).tolist():
        progress.add(seconds * share, TARGET * share)
    return Run(point, progress, hit=seconds if until == 1.0 else None, **{"running": False, **changes})


def flat(point: int, seconds: float = 3.0) -> Run:
    """Return a trial that never left chance."""
    progress = Progress()
    for tenth in range(11):
        progress.add(seconds * tenth / 10, 0.001 * (tenth % 3))
    return Run(point, progress, running=False)


def searched(asks: int, *, seed: int = 0, noise: float = 0.0, limit: float = math.inf) -> tuple[list[int], list[Run]]:
    """Return the points asked for and the trials, one after the other; none runs past ``limit``."""
    runs: list[Run] = []
    points = []
    rng = np.random.default_rng(seed)
    for _ in range(asks):
        points.append(gradient(seed + len(runs)).ask(runs))
        seconds = truth(points[-1]) * math.exp(noise * rng.standard_normal())
        runs.append(trained(points[-1], seconds, until=min(1.0, limit / seconds)))
    return points, runs


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_best_of_a_grid_is_found_in_half_as_many_trials_as_it_has_cells(seed: int, noise: float) -> None:
    points, runs = searched(len(CELLS) // 2, seed=seed, noise=noise)
    assert BEST in points
    assert gradient().incumbent(runs) == BEST


def test_the_step_times_decide_in_which_direction_it_looks_first() -> None:
    runs = [trained(DEFAULT, 20.0)]
    sizes = {
        name: np.mean([CELLS[gradient(seed, step_time).ask(runs)][0] for seed in range(6)])
        for name, step_time in (("a step for free", lambda size: 1.0), ("by the sample", lambda size: 1.0 * size))
    }
    assert sizes["a step for free"] > 32
    assert sizes["by the sample"] <= 32


def test_a_flat_first_trial_is_no_guide() -> None:
    """By its noise it would be on its way; nothing is believed of how long the others take, but it is not repeated."""
    before = gradient()
    before.ask([flat(DEFAULT)])
    assert before.expected_improvement == math.inf
    runs = [flat(DEFAULT), trained(BEST, 5.0)]
    sampler = gradient()
    sampler.ask(runs)
    assert sampler.incumbent(runs) == BEST
    for seed in range(4):
        assert gradient(seed).ask([flat(DEFAULT)]) != DEFAULT


def test_a_lucky_seed_is_run_again_before_it_is_trusted() -> None:
    """One run of a cell at a third of what all its neighbours take, three times each."""
    lucky = CELLS.index((512, 0.1))
    runs = [trained(point, truth(point)) for point in range(len(CELLS)) for _ in range(3) if point != lucky]
    runs.append(trained(lucky, truth(BEST) / 1.3))
    assert gradient().ask(runs) in {lucky, BEST}
    asked: list[int] = []
    while gradient().incumbent(runs) == lucky and len(asked) < 6:
        asked.append(gradient(len(asked)).ask(runs))
        runs.append(trained(asked[-1], truth(asked[-1])))
    assert lucky in asked
    assert gradient().incumbent(runs) == BEST


def test_what_is_expected_falls_below_a_hundredth_once_the_optimum_is_known() -> None:
    asker = gradient()
    asker.ask([trained(DEFAULT, truth(DEFAULT))])
    first = asker.expected_improvement
    runs = [trained(point, truth(point)) for point in range(len(CELLS)) for _ in range(3)]
    asker.ask(runs)
    assert asker.expected_improvement < 0.01 < 0.1 < first
    assert asker.expected_improvement >= 0


def test_trials_that_run_are_not_counted_on_but_leave_others_more_to_tell() -> None:
    runs = [trained(DEFAULT, truth(DEFAULT)), trained(CELLS.index((32, 0.1)), 12.0)]
    alone = gradient()
    first = alone.ask(runs)
    beside = gradient()
    second = beside.ask([*runs, Run(first, Progress())])
    assert beside.expected_improvement == alone.expected_improvement
    assert second != first


def test_where_all_was_tried_in_vain_it_still_answers() -> None:
    vain = [trained(point, 100.0 + point, until=0.5) for point in range(len(CELLS))]
    assert gradient().ask(vain) in range(len(CELLS))
    assert CELLS[gradient().ask(vain, batch_size=128)][0] == 128
    at_one = [run for run in vain if CELLS[run.point][0] == 128]
    assert CELLS[gradient().ask(at_one, batch_size=128)][0] == 128
    assert CELLS[gradient().ask(at_one)][0] != 128
    for left in (0, 5, 15):
        assert gradient().ask([run for run in vain if run.point != left]) == left


def believed(means: Sequence[float], covariance: Sequence[Sequence[float]], seed_noise: float = 0.1) -> Posterior:
    return Posterior(np.arange(len(means)), np.array(means), np.array(covariance, float), seed_noise)


def test_the_expected_improvement_of_one_unknown_point_has_its_closed_form() -> None:
    """Jones et al. 1998, eq. 15, on what a run tells of the mean, where one other point is tried and sure."""
    for ahead in (-0.5, 0.0, 0.5):
        posterior = believed([0.0, -ahead], [[1e-9, 0.0], [0.0, 0.25]], seed_noise=0.3)
        tells = 0.25 / math.sqrt(0.25 + 0.09)
        unit = NormalDist()
        expected = ahead * unit.cdf(ahead / tells) + tells * unit.pdf(ahead / tells)
        found = _improvements(posterior, np.array([0]), np.zeros(2))
        assert found[1] == pytest.approx(max(expected, 0.0), rel=0.02)
        assert found[0] == pytest.approx(0.0, abs=1e-4), "what is sure can surprise nobody"


def test_what_runs_is_taken_as_ended_as_expected() -> None:
    posterior = believed([0.0, 0.0], [[0.25, 0.2], [0.2, 0.25]], seed_noise=0.3)
    after = _after(posterior, [0])
    assert after.covariance[0, 0] == pytest.approx(0.25 - 0.25**2 / 0.34)
    assert after.covariance[1, 1] == pytest.approx(0.25 - 0.2**2 / 0.34)
    assert after.mean.tolist() == [0.0, 0.0]
    assert _after(posterior, []) is posterior


def test_an_improvement_counts_per_square_root_of_the_price_of_its_trial() -> None:
    runs = [trained(DEFAULT, truth(DEFAULT))]
    model = gradient()
    posterior, error = model._posterior(runs)
    hits = posterior.places([DEFAULT])
    score = model._gains_per_price(posterior, error, hits, [])
    star = posterior.mean[hits].min()
    behind = np.maximum(0.0, posterior.mean - star - BEHIND)
    gains = _improvements(posterior, hits, behind)
    assert model.expected_improvement == pytest.approx(float(gains.max()))
    price = np.exp(posterior.mean - star - behind / error)
    for place, ratio in enumerate(price):
        worth = gains[place] / math.sqrt(max(ratio, LEAST_COST))
        assert score[place] == pytest.approx(worth), "improvement per square root of the price"


def test_a_batch_size_contends_while_it_may_be_within_5_percent_of_the_incumbent() -> None:
    runs = [trained(point, truth(point)) for point in range(len(CELLS)) for _ in range(3)]
    model = gradient()
    incumbent = model.incumbent(runs)
    assert incumbent is not None and CELLS[incumbent] == CELLS[BEST]
    posterior, _ = model._posterior(runs)
    limit = posterior.mean[posterior.place(incumbent)] + math.log(1.05)
    may_win = {
        CELLS[point][0]
        for point in posterior.points.tolist()
        if posterior.mean[posterior.place(point)] - math.sqrt(posterior.covariance[(posterior.place(point),) * 2])
        < limit
    }
    assert model.contenders(runs) == sorted(may_win)
    assert 128 in may_win and 8 not in may_win
