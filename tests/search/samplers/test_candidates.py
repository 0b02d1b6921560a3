"""Candidate points, the choice among them, the prior over laws, and the posterior in cases with known answers."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from bssearch.records import ParameterValue, Progress
from bssearch.search.samplers.time_model.acquisition import (
    BEHIND,
    DEEPEST,
    DEPARTURES,
    LAWS,
    LEAST_COST,
    LEFT,
    RIGHT,
    SEED_NOISES,
    KnowledgeGradient,
    LawPrior,
    TimesPosterior,
    _after,
    _improvements,
    _spread,
    condition,
    covariances,
    prior,
)
from bssearch.search.samplers.time_model.candidates import SPREAD, Extrapolation, Points, Run, SpaceCandidates
from bssearch.spec import SearchSpace
from tests.benchmarks.simulate.cells import MOST, GridCandidates

RNG = np.random.default_rng(0)
RATE = {"reference_batch": 32, "low": 0.01, "high": 1.0, "rule": "sqrt"}


def space(**parts: Any) -> SearchSpace:
    return SearchSpace.model_validate({"batch_size": [8, 16, 64], "learning_rate": RATE, **parts})


def candidates(**parts: Any) -> SpaceCandidates:
    made = space(**parts)
    return SpaceCandidates(made, made.rungs)


def test_a_grid_is_looked_at_whole_and_its_columns_lie_between_0_and_1() -> None:
    cells = list(itertools.product((8, 64), (0.1, 0.3), (0.0, 0.1, 0.5), ("sgd", "adamw")))
    grid = GridCandidates(("batch_size", "learning_rate", "dropout", "optimizer"), cells)
    everything = grid.among([3], [3], RNG)
    assert everything.tolist() == list(range(len(cells)))
    points = grid.take(everything)
    assert points.batch_sizes.tolist() == [cell[0] for cell in cells]
    assert np.exp(points.log_rates) == pytest.approx([cell[1] for cell in cells])
    assert grid.log_rate_width == pytest.approx(math.log(3))
    assert points.others.shape == (len(cells), 3), "a column for the dropout, one for each optimizer"
    assert points.others[0].tolist() == [0.0, 0.0, 1.0]
    assert points.others[3].tolist() == [0.5, 1.0, 0.0]


def test_candidates_of_a_large_grid_are_the_tried_points_their_neighbours_and_a_sample() -> None:
    cells = list(itertools.product(range(1, 11), (0.1, 0.2, 0.3, 0.4), range(20)))
    grid = GridCandidates(("batch_size", "learning_rate", "depth"), cells)
    assert len(cells) > MOST
    best = cells.index((5, 0.2, 7))
    among = set(grid.among([0, 1, best], [best], RNG).tolist())
    beside = [(4, 0.2, 7), (6, 0.2, 7), (5, 0.1, 7), (5, 0.3, 7), (5, 0.2, 6), (5, 0.2, 8)]
    assert {0, 1, best, *(cells.index(cell) for cell in beside)} <= among
    assert SPREAD <= len(among) <= SPREAD + 3 + len(beside)


def test_a_point_keeps_its_index_and_what_was_made_beside_it_does_not() -> None:
    found = candidates(dropout={"low": 0.0, "high": 0.5})
    here: dict[str, ParameterValue] = {"reference_learning_rate": 0.1, "dropout": 0.2}
    there: dict[str, ParameterValue] = {"reference_learning_rate": 0.2, "dropout": 0.2}
    first = found.add(16, here)
    assert len(found.among([first], [first], RNG)) > SPREAD
    assert found.add(16, dict(here)) == first
    second = found.add(64, there)
    assert second == 1, "what was made is forgotten"
    assert (found[first], found[second]) == ((16, here), (64, there))
    points = found.take(np.array([second, first]))
    assert points.batch_sizes.tolist() == [64, 16]
    assert np.exp(points.log_rates) == pytest.approx([0.2 * math.sqrt(2), 0.1 / math.sqrt(2)]), "as really run"
    assert points.others.tolist() == [[0.4], [0.4]]


def test_the_neighbours_of_the_best_are_looked_at_along_every_coordinate() -> None:
    found = candidates(dropout=[0.0, 0.1, 0.5], clip_norm={"low": 0.1, "high": 10.0})
    best: dict[str, ParameterValue] = {"reference_learning_rate": 0.1, "dropout": 0.1, "clip_norm": 1.0}
    first = found.add(16, best)
    looked_at = [found[int(index)] for index in found.among([first], [first], RNG)]
    assert (8, best) in looked_at
    assert (64, best) in looked_at
    assert (16, {**best, "dropout": 0.0}) in looked_at
    assert (16, {**best, "dropout": 0.5}) in looked_at
    for name in ("reference_learning_rate", "clip_norm"):
        rest = {key: value for key, value in best.items() if key != name}
        moved = [values[name] for size, values in looked_at if size == 16 and rest.items() <= values.items()]
        assert min(moved) < best[name] < max(moved)  # type: ignore[operator, type-var]


@pytest.mark.parametrize(("size", "next_to_it"), [(8, {16}), (32, {16, 64}), (128, {64})])
@pytest.mark.parametrize(("dropout", "beside"), [(0.0, {0.1}), (0.1, {0.0, 0.2}), (0.4, {0.2, 0.5}), (0.5, {0.4})])
def test_the_neighbours_of_a_number_among_choices_are_the_next_in_order(
    dropout: float, beside: set[float], size: int, next_to_it: Any
) -> None:
    found = candidates(dropout=[0.5, 0.0, 0.2, 0.1, 0.4], batch_size=[8, 16, 32, 64, 128])
    best: dict[str, ParameterValue] = {"reference_learning_rate": 0.1, "dropout": dropout}
    first = found.add(size, best)
    looked_at = [found[int(index)] for index in found.among([first], [first], RNG)]
    alike = [(here, values) for here, values in looked_at if values["reference_learning_rate"] == 0.1]
    assert {values["dropout"] for here, values in alike if here == size} == {dropout, *beside}
    assert {here for here, values in alike if values == best} == {size, *next_to_it}


def test_spread_candidates_contain_every_batch_size_and_every_choice() -> None:
    found = candidates(optimizer=[{"name": "sgd"}, {"name": "adamw"}], dropout=[0.0, 0.5])
    looked_at = [found[int(index)] for index in found.among([], [], RNG)]
    assert {(size, values["optimizer"], values["dropout"]) for size, values in looked_at} == set(
        itertools.product((8, 16, 64), ("sgd", "adamw"), (0.0, 0.5))
    )


@pytest.mark.parametrize(
    ("low", "high", "log"), [(0.1, 0.5, False), (0.0, 0.9, False), (0.1, 0.5, True)], ids=["range", "from 0", "log"]
)
def test_a_range_is_spread_evenly_from_end_to_end(low: float, high: float, log: bool) -> None:
    found = candidates(dropout={"low": low, "high": high, "log": log})
    values = [float(found[int(index)][1]["dropout"] or 0.0) for index in found.among([], [], RNG)]
    quarters = np.geomspace(low, high, 5) if log else np.linspace(low, high, 5)
    assert np.quantile(values, [0, 0.25, 0.5, 0.75, 1]) == pytest.approx(quarters, abs=0.05)


@pytest.mark.parametrize(
    ("parts", "columns"),
    [
        ({"learning_rate": 0.1}, 0),
        ({"learning_rate": [0.1, 0.3]}, 0),
        ({"batch_size": 16}, 0),
        ({"batch_size": 16, "learning_rate": 0.1}, 0),
        ({"batch_size": 16, "learning_rate": 0.1, "dropout": {"low": 0.0, "high": 0.5}}, 1),
        ({"learning_rate": 0.1, "dropout": [0.0, 0.5], "weight_decay": [0.0, 1e-4]}, 2),
        ({"optimizer": [{"name": "sgd", "momentum": [0.8, 0.9]}, {"name": "adamw"}]}, 3),
        ({"schedule": {"name": ["cosine", "linear"], "horizon_samples": {"low": 1e3, "high": 1e4}}}, 3),
    ],
)
def test_spaces_of_every_shape_have_points_that_can_be_run(parts: dict[str, Any], columns: int) -> None:
    found = candidates(**parts)
    made = space(**parts)
    nothing: dict[str, ParameterValue] = {
        one.name: one.choices[0] if one.choices else one.low for one in made.dimensions()
    }
    first = found.add(made.rungs[0], nothing)
    among = found.among([first], [first], RNG)
    points = found.take(among)
    assert set(points.batch_sizes.tolist()) == set(made.rungs)
    assert points.others.shape == (len(among), columns)
    assert ((points.others >= 0) & (points.others <= 1)).all()
    assert np.exp(points.log_rates) == pytest.approx([made.decode(*found[int(index)]).learning_rate for index in among])
    assert len({found[int(index)][0:1] + tuple(found[int(index)][1].values()) for index in among}) == len(among)


def test_learning_rates_are_compared_without_the_scale_of_their_optimizer() -> None:
    found = candidates(optimizer=[{"name": "sgd"}, {"name": "adamw", "learning_rate_scale": 0.01}])
    alike = [
        found.add(64, {"reference_learning_rate": 0.1, "optimizer": name, "sgd.momentum": 0.9})
        for name in ("sgd", "adamw")
    ]
    points = found.take(np.array(alike))
    assert np.exp(points.log_rates) == pytest.approx([0.1 * math.sqrt(2)] * 2)
    assert points.others.tolist() == [[0.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize(("rates", "ratio"), [(RATE, 100), ([0.3, 0.1, 0.2], 3), (0.1, 1)])
def test_the_width_of_the_rates_is_that_of_the_space(rates: Any, ratio: int) -> None:
    assert candidates(learning_rate=rates).log_rate_width == pytest.approx(math.log(ratio))


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
    """A trial that rises evenly to the target at ``seconds``, run to the share ``until``."""
    progress = Progress()
    for share in np.linspace(0.0, until, 11).tolist():
        progress.add(seconds * share, TARGET * share)
    return Run(point, progress, hit=seconds if until == 1.0 else None, **{"running": False, **changes})


def flat(point: int, seconds: float = 3.0) -> Run:
    """A trial that stays at chance."""
    progress = Progress()
    for tenth in range(11):
        progress.add(seconds * tenth / 10, 0.001 * (tenth % 3))
    return Run(point, progress, running=False)


def searched(asks: int, *, seed: int = 0, noise: float = 0.0, limit: float = math.inf) -> tuple[list[int], list[Run]]:
    """Points and trials of a search; no trial runs past ``limit``."""
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
    """Its noise looks like progress. It is no evidence about other times, but is not repeated."""
    before = gradient()
    before.ask([flat(DEFAULT)])
    assert before.expected_improvement == math.inf
    runs = [flat(DEFAULT), trained(BEST, 5.0)]
    sampler = gradient()
    sampler.ask(runs)
    assert sampler.incumbent(runs) == BEST
    assert DEFAULT not in [gradient(seed).ask([flat(DEFAULT)]) for seed in range(4)]


def test_a_lucky_seed_is_run_again_before_it_is_trusted() -> None:
    """One run of a cell beats its neighbours, which have three runs each."""
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
    asker.ask([trained(point, truth(point)) for point in range(len(CELLS)) for _ in range(3)])
    assert asker.expected_improvement < 0.01 < 0.1 < first
    assert asker.expected_improvement >= 0


def test_running_trials_are_not_counted_on_but_leave_others_more_evidence() -> None:
    runs = [trained(DEFAULT, truth(DEFAULT)), trained(CELLS.index((32, 0.1)), 12.0)]
    alone = gradient()
    first = alone.ask(runs)
    beside = gradient()
    second = beside.ask([*runs, Run(first, Progress())])
    assert beside.expected_improvement == alone.expected_improvement
    assert second != first


def test_it_still_proposes_after_every_candidate_failed() -> None:
    vain = [trained(point, 100.0 + point, until=0.5) for point in range(len(CELLS))]
    assert gradient().ask(vain) in range(len(CELLS))
    assert CELLS[gradient().ask(vain, batch_size=128)][0] == 128
    at_one = [run for run in vain if CELLS[run.point][0] == 128]
    assert CELLS[gradient().ask(at_one, batch_size=128)][0] == 128
    assert CELLS[gradient().ask(at_one)][0] != 128
    assert [gradient().ask([run for run in vain if run.point != left]) for left in (0, 5, 15)] == [0, 5, 15]


def test_before_a_hit_far_learning_rates_are_tried() -> None:
    low = CELLS.index((32, 0.001))
    grid = GridCandidates(("batch_size", "learning_rate"), CELLS)
    for seed in range(4):
        model = KnowledgeGradient(
            grid, default=low, target_gain=TARGET, step_seconds={size: step_seconds(size) for size in SIZES}, seed=seed
        )
        second = model.ask([trained(low, truth(low), until=0.1)])
        assert CELLS[second][1] >= 0.1


def test_at_a_given_batch_size_misses_are_not_repeated_and_the_likeliest_rate_comes_first() -> None:
    runs = [trained(point, truth(point)) for point in range(len(CELLS)) if CELLS[point][0] in {64, 128}]
    missed = CELLS.index((512, 0.1))
    runs.append(trained(missed, truth(missed), until=0.3))
    asked = gradient().ask(runs, batch_size=512)
    assert CELLS[asked] == (512, 1.0)
    runs.append(trained(asked, truth(asked), until=0.3))
    assert CELLS[gradient().ask(runs, batch_size=512)] == (512, 0.01)


def believed(means: Sequence[float], covariance: Sequence[Sequence[float]], seed_noise: float = 0.1) -> TimesPosterior:
    return TimesPosterior(np.arange(len(means)), np.array(means), np.array(covariance, float), seed_noise)


@pytest.mark.parametrize("ahead", [-0.5, 0.0, 0.5])
def test_the_expected_improvement_of_one_unknown_point_has_its_closed_form(ahead: float) -> None:
    """Jones et al. 1998, eq. 15, for the mean after a run, if the other tried point is certain."""
    posterior = believed([0.0, -ahead], [[1e-9, 0.0], [0.0, 0.25]], seed_noise=0.3)
    tells = 0.25 / math.sqrt(0.25 + 0.09)
    unit = NormalDist()
    expected = ahead * unit.cdf(ahead / tells) + tells * unit.pdf(ahead / tells)
    found = _improvements(posterior, np.array([0]), np.zeros(2))
    assert found[1] == pytest.approx(max(expected, 0.0), rel=0.02)
    assert found[0] == pytest.approx(0.0, abs=1e-4), "a certain time has no expected improvement"


def test_a_running_trial_counts_as_ended_as_expected() -> None:
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
    for place, ratio in enumerate(np.exp(posterior.mean - star - behind / error)):
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


# Laws and the posterior -----------------------------------------------------------------------------------------------


POINTS = Points(
    np.array([size for size, _ in CELLS], float), np.log([rate for _, rate in CELLS]), np.zeros((len(CELLS), 0))
)
ALL = np.arange(len(CELLS))


def place(size: int, rate: float) -> int:
    return CELLS.index((size, rate))


def drawn(seed: int = 0, default: tuple[int, float] = (32, 0.01)) -> LawPrior:
    size, rate = default
    return LawPrior(
        batch_sizes=SIZES,
        size=size,
        log_rate=math.log(rate),
        log_rate_deviation=math.log(1000) / 4,
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
        error=0.35,
    )


def posterior(found: Extrapolation | None = None) -> TimesPosterior:
    """Posterior if steps take equally long at every batch size."""
    laws = drawn().log_steps(POINTS)
    return prior(ALL, POINTS, laws) if found is None else condition(ALL, POINTS, laws, found)


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
    others = Points(POINTS.batch_sizes, POINTS.log_rates, np.random.default_rng(0).random((len(CELLS), 3)))
    adds, departs = covariances(others)
    assert min(np.linalg.eigvalsh(adds).min(), np.linalg.eigvalsh(adds + departs).min()) > 0
    assert np.diag(departs) == pytest.approx(np.ones(len(CELLS)))


def test_a_bound_that_is_met_stays_and_an_unmet_bound_moves_up() -> None:
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
def test_the_belief_is_the_mixture_of_gaussian_processes_over_all_runs(
    trials: list[tuple[int, float]], variance: float
) -> None:
    found = replace(told(*trials), variance=np.full(len(trials), variance))
    ours, (mean, covariance, noise) = posterior(found), dense(found)
    assert ours.mean == pytest.approx(mean, abs=0.02)
    assert np.sqrt(np.diag(ours.covariance)) == pytest.approx(np.sqrt(np.diag(covariance)), rel=0.03)
    assert ours.seed_noise == pytest.approx(noise, rel=0.01)


def test_before_any_trial_the_belief_has_the_spread_of_the_laws_and_their_residual() -> None:
    laws, (adds, departs) = drawn().log_steps(POINTS), covariances(POINTS)
    believed = posterior()
    assert believed.mean == pytest.approx(laws.mean(axis=1))
    assert believed.covariance - np.cov(laws) - adds == pytest.approx(departs / 16), "a deviation of a quarter"


def test_the_critical_batch_size_is_spread_evenly_from_two_octaves_below_the_space_to_two_above() -> None:
    share = np.linspace(0.0, 1.0, 101)
    assert _spread(share, 1.0, 11.0, None) == pytest.approx(1.0 + 10.0 * share)
    laws = LawPrior(batch_sizes=(8, 512), size=32, log_rate=0.0, log_rate_deviation=0.25, seed=0, noise_scale=None)
    octaves = np.log2(laws._critical)
    assert octaves.min() == pytest.approx(1.0, abs=0.1) and octaves.max() == pytest.approx(11.0, abs=0.1)
    assert np.median(octaves) == pytest.approx(6.0, abs=0.1)


def test_a_noise_scale_draws_four_fifths_of_the_laws_within_an_octave_and_a_half() -> None:
    spread = _spread((np.arange(1000) + 0.5) / 1000, 1.0, 11.0, 64.0)
    without, near = spread[:200], spread[200:]
    assert (without.min(), without.max()) == (pytest.approx(1.0, abs=0.1), pytest.approx(11.0, abs=0.1))
    assert np.median(near) == pytest.approx(6.0, abs=0.01)
    assert near.std() == pytest.approx(1.5, abs=0.05)


def test_laws_draw_the_best_rate_near_the_default_and_steps_rise_by_powers_away_from_it() -> None:
    laws = drawn()
    assert laws._best_log_rate.mean() == pytest.approx(math.log(0.01), abs=0.02)
    assert laws._best_log_rate.std() == pytest.approx(math.log(1000) / 4, rel=0.02)
    for powers, (low, high) in ((laws._left, LEFT), (laws._right, RIGHT)):
        assert (powers.min(), powers.max()) == (pytest.approx(low, rel=0.02), pytest.approx(high, rel=0.02))
    assert np.median(laws._right) == pytest.approx(math.sqrt(RIGHT[0] * RIGHT[1]), rel=0.02)


def test_laws_lie_around_the_default_or_if_it_has_not_reached_the_target_the_best_trial() -> None:
    promising, fastest = CELLS[1], CELLS[-1]
    slow, fast = trained(place(8, 0.1), 9.0), trained(CELLS.index(fastest), 3.0)
    for runs, (size, rate) in (
        ([], CELLS[DEFAULT]),
        ([trained(DEFAULT, 9.0, until=0.5)], promising),
        ([slow, fast], fastest),
        ([trained(DEFAULT, 12.0), fast], CELLS[DEFAULT]),
    ):
        laws = gradient()._laws(runs, [CELLS.index(promising)] if runs else [])
        assert laws._size == size and laws._best_log_rate.mean() == pytest.approx(math.log(rate), abs=0.05)


def test_the_constants_of_a_law_are_drawn_independently() -> None:
    laws = drawn()
    constants = np.array([np.log(laws._critical), laws._best_log_rate, laws._slope, laws._left, np.log(laws._right)])
    assert np.abs(np.corrcoef(constants) - np.eye(len(constants))).max() < 0.15
