import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, geometric_mean, median
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bssearch.analysis.build_answer import at_step_time, predict_for_device, runnable_steps
from bssearch.analysis.law.batch_model import (
    BEYOND,
    GRID,
    STANDARD_ERRORS,
    LawFit,
    LawLikelihood,
    LawPoint,
    RunnableStep,
    fit_law,
    predict_optimum,
    rising,
)
from bssearch.analysis.law.quick import critical_batch, expected_optimum
from bssearch.analysis.optimum import Candidate, Slope, slopes
from bssearch.errors import TargetNotReachedError, UsageError
from bssearch.records import Phase, TrialRecord, TrialState, with_batch_schedule
from tests.analysis.test_report import study
from tests.factories import make_probe, make_spec, make_trial, not_none, with_outcome
from tests.records.test_batch_schedule import milestones

RCP = Path(__file__).resolve().parents[1] / "data" / "mlperf-rcp"
SIZES = (16, 32, 64, 128, 256, 512)
B_CRIT = 100.0
E_MIN = 1e5


def rcp_points(workload: str) -> list[LawPoint]:
    """Return MLPerf's runs of a workload, in samples or epochs."""
    return [
        LawPoint(entry["BS"], tuple(entry.get("samples to converge") or entry["Epochs to converge"]))
        for entry in json.loads((RCP / f"rcps_{workload}.json").read_text()).values()
    ]


def law(size: float, b_crit: float = B_CRIT, e_min: float = E_MIN) -> float:
    return e_min * (1 + size / b_crit)


def exact(b_crit: float = B_CRIT, e_min: float = E_MIN, sizes: tuple[int, ...] = SIZES) -> list[LawPoint]:
    return [LawPoint(size, (law(size, b_crit, e_min),)) for size in sizes]


def noisy(seed: int, runs: int = 5, deviation: float = 0.04, sizes: tuple[int, ...] = SIZES) -> list[LawPoint]:
    random = np.random.default_rng(seed)
    return [LawPoint(size, tuple((law(size) * np.exp(random.normal(0, deviation, runs))).tolist())) for size in sizes]


def censored(points: list[LawPoint], limits: dict[int, float]) -> list[LawPoint]:
    """Stop the runs of some batch sizes at a number of samples."""
    stopped = []
    for point in points:
        limit = limits.get(point.batch_size, math.inf)
        reached = tuple(value for value in point.samples if value <= limit)
        stopped.append(replace(point, samples=reached, missed_at=(limit,) * (len(point.samples) - len(reached))))
    return stopped


def fitted(points: list[LawPoint]) -> LawFit:
    return not_none(fit_law(points))


@settings(max_examples=40)
@given(st.floats(-2, 4), st.floats(-3, 12))
def test_a_law_without_noise_is_found_again(log_b_crit: float, log_e_min: float) -> None:
    b_crit, e_min = 10**log_b_crit, 10**log_e_min
    fit = fitted(exact(b_crit, e_min))
    assert fit.b_crit == pytest.approx(b_crit, rel=1e-6)
    assert fit.s_min == pytest.approx(e_min / b_crit, rel=1e-6)
    assert 100 * fit.steps(100) == pytest.approx(law(100, b_crit, e_min))
    assert fit.max_residual < 1e-6
    assert fit.deviation <= 1e-6


def squares(points: list[LawPoint], b_crit: float, e_min: float | None = None) -> float:
    """Return the sum of squares around the law, with E_min at its best where it is not given."""
    bare = [math.log(value) - math.log1p(point.batch_size / b_crit) for point in points for value in point.samples]
    level = float(np.mean(bare)) if e_min is None else math.log(e_min)
    return math.fsum((value - level) ** 2 for value in bare)


def test_the_smallest_sum_of_squares_of_log_samples_is_found() -> None:
    points = noisy(1, runs=3, deviation=0.3)
    fit = fitted(points)
    least = squares(points, fit.b_crit, fit.s_min * fit.b_crit)
    assert fit.deviation == pytest.approx(math.sqrt(least / (18 - 2)))
    for factor in (0.999, 1.001):
        assert squares(points, fit.b_crit * factor, fit.s_min * fit.b_crit) > least
        assert squares(points, fit.b_crit, fit.s_min * fit.b_crit * factor) > least
    assert all(squares(points, b_crit) >= least for b_crit in np.geomspace(0.01, 1e6, 200))


def test_with_missed_runs_the_greatest_likelihood_is_found() -> None:
    points = [LawPoint(size, (off * law(size),)) for size, off in zip(SIZES, (1, 1.1, 0.9, 0.95, 1.05, 1), strict=True)]
    points += [LawPoint(100, (), missed_at=(1.1 * law(100),)), LawPoint(600, (), missed_at=(1.1 * law(600),))]
    fit = fitted(points)

    def likelihood(b_crit: float, e_min: float) -> float:
        spread = NormalDist(0, fit.deviation)
        total = 0.0
        for point in points:
            mean = math.log(law(point.batch_size, b_crit, e_min))
            total += sum(math.log(spread.pdf(math.log(value) - mean)) for value in point.samples)
            total += sum(math.log(spread.cdf(mean - math.log(value))) for value in point.missed_at)
        return total

    most = likelihood(fit.b_crit, fit.s_min * fit.b_crit)
    for factor in (0.99, 1.01):
        assert likelihood(fit.b_crit * factor, fit.s_min * fit.b_crit) < most
        assert likelihood(fit.b_crit, fit.s_min * fit.b_crit * factor) < most


def test_batch_sizes_that_no_run_reached_the_target_at_make_no_interval() -> None:
    fit = fitted([*noisy(4, sizes=(16, 64)), LawPoint(512, (), missed_at=(0.9 * law(512),) * 5)])
    assert (fit.b_crit_low, fit.b_crit_high, fit.verdict) == (None, None, "too_few_points")
    assert 512 * fit.steps(512) > 0.85 * law(512)
    assert fit.steps_interval(64) is None


@pytest.mark.parametrize("half_censored", [False, True])
def test_the_interval_of_b_crit_holds_it_nine_times_in_ten(half_censored: bool) -> None:
    limits = {size: law(size) for size in (256, 512)} if half_censored else {}
    fits = [fitted(censored(noisy(seed), limits)) for seed in range(40)]
    assert sum((fit.b_crit_low or 0) <= B_CRIT <= (fit.b_crit_high or math.inf) for fit in fits) >= 34
    assert all((fit.b_crit_high or 0) < 1.6 * (fit.b_crit_low or 0) for fit in fits)


def test_the_interval_of_steps_holds_them() -> None:
    intervals = [not_none(fitted(noisy(seed)).steps_interval(512)) for seed in range(60)]
    assert sum(low <= law(512) / 512 <= high for low, high in intervals) >= 53


def test_an_end_that_the_runs_do_not_bound_is_none() -> None:
    below = fitted([LawPoint(p.batch_size, p.samples) for p in noisy(5, sizes=(1, 2, 4))])
    assert below.b_crit_high is None and below.b_crit_low is not None
    above = fitted(noisy(6, sizes=(10_000, 20_000, 40_000)))
    assert above.b_crit_low is None and above.b_crit_high is not None
    two = fitted(noisy(7, sizes=(16, 512)))
    assert (two.b_crit_low, two.b_crit_high) == (None, None)


def test_a_residual_beyond_a_tenth_and_beyond_noise_is_poor() -> None:
    def off(excess: float, deviation: float) -> LawFit:
        points = noisy(9, deviation=deviation)
        raised = tuple(value * excess for value in points[3].samples)
        return fitted([*points[:3], replace(points[3], samples=raised), *points[4:]])

    assert off(1.05, 0.001).verdict == "fits"
    assert off(1.25, 0.001).verdict == "poor"
    noisier = off(1.25, 0.25)
    assert noisier.max_residual > 0.1
    assert noisier.verdict == "fits"
    single = exact()
    assert fitted([*single[:3], LawPoint(128, (1.25 * law(128),)), *single[4:]]).verdict == "poor"


@pytest.mark.parametrize(("excess", "verdict"), [(1.13, "poor"), (1.04, "fits")])
def test_residuals_that_are_small_each_and_too_much_together_are_poor(excess: float, verdict: str) -> None:
    scatter = [math.exp(0.2 * place) for place in (-1.3, -0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9, 1.3)]
    points = [
        LawPoint(size, tuple(law(size) * (excess if place % 2 else 1 / excess) * one for one in scatter))
        for place, size in enumerate(SIZES)
    ]
    fit = fitted(points)
    assert max(abs(math.log1p(one)) for one in fit.residuals.values()) < STANDARD_ERRORS * 0.2 * 0.86 / 3
    assert fit.verdict == verdict


def test_too_few_points_have_no_verdict() -> None:
    assert fit_law([]) is None
    assert fit_law([LawPoint(8, (100.0, 101.0)), LawPoint(16, (), missed_at=(100.0,))]) is None
    assert fitted(exact(sizes=(16, 512))).verdict == "too_few_points"
    assert fitted(exact(sizes=(16, 128, 512))).verdict == "fits"


def test_the_interval_of_the_law_goes_into_the_optimum_and_into_what_is_surely_flat() -> None:
    steps = [RunnableStep(size, size, 1e-3 * (1 + size / 200)) for size in range(16, 513, 16)]
    sure, unsure = (not_none(predict_optimum(fitted(noisy(5, deviation=noise)), steps)) for noise in (0.01, 0.2))
    widths, kept = [], []
    for found in (sure, unsure):
        (low, high), flat = not_none(found.interval), found.surely_flat or [found.batch_size, found.batch_size]
        assert low <= found.batch_size <= high
        assert found.flat_range[0] <= flat[0] <= flat[1] <= found.flat_range[1]
        widths.append(high / low)
        kept.append(flat[1] - flat[0])
    assert widths[0] < widths[1] and kept[0] > kept[1]


def test_untuned_points_are_judged_but_not_fitted() -> None:
    worse = LawPoint(1024, (2 * law(1024),), untuned=True)
    fit = fitted([*exact(), worse])
    assert fit.b_crit == pytest.approx(B_CRIT)
    assert fit.residuals[1024] == pytest.approx(1.0)
    assert (fit.verdict, fit.largest_batch) == ("poor", 1024)
    assert fit.including_untuned == fitted([*exact(), replace(worse, untuned=False)])
    assert fitted(exact()).including_untuned is None


def test_with_fewer_than_three_tuned_sizes_all_are_fitted_without_a_verdict() -> None:
    fit = fitted([replace(point, untuned=point.batch_size > 32) for point in exact()])
    assert fit.verdict == "too_few_points"
    assert fit.b_crit == pytest.approx(B_CRIT)
    assert fit.including_untuned is not None and fit.including_untuned.verdict == "fits"


@pytest.mark.parametrize(
    "points",
    [
        [LawPoint(size, (500.0, 500.0)) for size in SIZES],
        [LawPoint(size, (10.0 * size,)) for size in SIZES],
        [LawPoint(size, (float(size**2),)) for size in SIZES],
        [LawPoint(size, (1.0 / size,)) for size in SIZES],
        exact(1e-9),
        exact(1e12),
        exact(1e17, 1e30, (10**15, 10**17, 10**18)),
        exact(1.5, 1e-12, (1, 2, 3)),
        [*exact(), LawPoint(1024, (), missed_at=(1e-9, 1e30))],
        [replace(point, missed_at=(1e3 * point.samples[0],)) for point in exact()],
        [LawPoint(8, (100.0,)), LawPoint(16, (100.0,)), LawPoint(32, (), missed_at=(1e6,))],
        [LawPoint(8, (100.0, 100.0), missed_at=(1e9,) * 20), LawPoint(16, (100.0,)), LawPoint(32, (1.0,))],
    ],
)
def test_whatever_the_samples_the_figures_are_finite(points: list[LawPoint]) -> None:
    fit = fitted(points)
    ends = [end for end in (fit.b_crit_low, fit.b_crit_high) if end is not None]
    interval = fit.steps_interval(fit.largest_batch) or ()
    figures = [fit.s_min, fit.b_crit, fit.s_min * fit.b_crit, fit.deviation, fit.max_residual, *ends, *interval]
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures)
    assert min(fit.s_min, fit.b_crit, fit.s_min * fit.b_crit) > 0
    assert fit.b_crit_low is None or fit.b_crit_low <= fit.b_crit
    assert fit.b_crit_high is None or fit.b_crit <= fit.b_crit_high


@pytest.mark.parametrize(
    ("small", "large", "rises"),
    [
        ([100, 101, 102], [104, 105, 106], True),
        ([100, 110, 120], [105, 115, 125], False),
        ([80, 100, 130], [90, 120, 150], False),  # a ratio of 1.16, within noise
        ([100, 100, 100], [100, 100, 100], False),
        ([100, 100, 100], [100.4, 100.4, 100.4], False),
        ([100, 100, 100], [115, 115, 115], True),
        ([100, 100], [109, 109, 109], False),
        ([100, 100], [111, 111, 111], True),
    ],
)
def test_a_rise_is_shown_by_three_runs_beyond_noise_or_by_fewer_beyond_a_tenth(
    small: list[float], large: list[float], rises: bool
) -> None:
    points = [LawPoint(size, tuple(size * one for one in steps)) for size, steps in ((8, small), (16, large))]
    assert list(rising(points)) == [16] * rises


@pytest.mark.parametrize(
    ("missed_at", "larger", "rises"),
    [
        ((), [LawPoint(16, (), missed_at=(16 * 120.0,))], [16]),
        ((), [LawPoint(16, (), missed_at=(16 * 50.0,))], []),
        ((), [LawPoint(16, (), missed_at=(16 * 50.0,)), LawPoint(32, (32 * 120.0,))], [32]),
        ((900.0,), [LawPoint(16, (16 * 120.0,))], []),
    ],
)
def test_a_missed_run_counts_as_a_rise_where_it_already_took_more_steps(
    missed_at: tuple[float, ...], larger: list[LawPoint], rises: list[int]
) -> None:
    assert list(rising([LawPoint(8, (800.0,), missed_at=missed_at), *larger])) == rises


@settings(max_examples=50)
@given(
    st.dictionaries(st.tuples(st.integers(1, 700), st.integers(1, 8)), st.floats(1e-4, 1e2), min_size=1, max_size=12)
)
def test_the_predicted_optimum_is_that_of_trying_everything(times: dict[tuple[int, int], float]) -> None:
    steps = [RunnableStep(size, micro, seconds) for (size, micro), seconds in times.items()]
    least = {
        size: min(law(size) / size * s.step_seconds for s in steps if s.batch_size == size)
        for size in sorted({step.batch_size for step in steps})
        if size <= 512
    }
    found = predict_optimum(fitted(exact()), steps)
    if not least:
        assert found is None
        return
    assert found is not None
    assert found.time_to_target_s == pytest.approx(least[found.batch_size])
    assert found.time_to_target_s == pytest.approx(min(least.values()))
    best = min(seconds for (size, _), seconds in times.items() if size == found.batch_size)
    assert times[found.batch_size, found.micro_batch_size] == best
    low, high = found.flat_range
    bound = 1.05 * found.time_to_target_s
    assert low <= found.batch_size <= high
    assert all(seconds <= bound for size, seconds in least.items() if low <= size <= high)
    below, above = [size for size in least if size < low], [size for size in least if size > high]
    assert not below or least[below[-1]] > bound
    assert not above or least[above[0]] > bound


@pytest.mark.parametrize(
    ("workload", "b_crit", "verdict"),
    [
        ("resnet", (44_400, 49_600), "fits"),
        ("flux1", (2710, 4270), "fits"),
        ("bert", (10_600, 14_700), "poor"),
        ("retinanet", (0, math.inf), "poor"),
    ],
)
def test_published_runs_give_the_published_b_crit(workload: str, b_crit: tuple[float, float], verdict: str) -> None:
    """95 % bootstrap intervals of a fit to one run per batch size; MLPerf's reference convergence points."""
    fit = fitted(rcp_points(workload))
    assert b_crit[0] < fit.b_crit < b_crit[1]
    assert fit.verdict == verdict
    assert (4096 in rising(rcp_points(workload))) is (workload == "retinanet")


def test_a_law_of_three_batch_sizes_predicts_the_published_samples_of_the_others() -> None:
    errors = []
    for workload in ("resnet", "flux1", "bert", "retinanet"):
        smallest, *others, largest = sorted(rcp_points(workload), key=lambda point: point.batch_size)
        middle = math.sqrt(smallest.batch_size * largest.batch_size)
        third = others.pop(np.argmin([abs(math.log(point.batch_size / middle)) for point in others]))
        fit = fitted([smallest, third, largest])
        errors += [
            point.batch_size * fit.steps(point.batch_size) / geometric_mean(point.samples) - 1 for point in others
        ]
    assert median(map(abs, errors)) <= 0.07


def test_b_crit_is_sought_ten_thousandfold_beyond_the_sizes_run_and_nowhere_coarsely() -> None:
    same_steps = fitted([LawPoint(size, (100.0 * size,)) for size in SIZES])
    same_samples = fitted([LawPoint(size, (100.0,)) for size in SIZES])
    assert (same_steps.b_crit, same_samples.b_crit) == pytest.approx((SIZES[0] / 1e4, SIZES[-1] * 1e4))
    assert same_steps.b_crit_low is None and same_samples.b_crit_high is None
    grid = LawLikelihood(exact(), 0.05).grid
    assert (grid[0], grid[-1]) == pytest.approx((math.log(SIZES[0] / BEYOND), math.log(SIZES[-1] * BEYOND)))
    assert 0.9 * GRID < np.diff(grid).max() <= GRID


def test_between_two_sizes_timed_whole_a_step_lies_on_the_straight_line_from_one_to_the_other() -> None:
    probes = [make_probe(8, step_seconds=1.0), make_probe(16, step_seconds=3.0), make_probe(512, step_seconds=3.0)]
    found = runnable_steps(probes[::-1], 512)
    at = {one.batch_size: one.step_seconds for one in found}
    assert [one.batch_size for one in found] == list(range(8, 17)) + sorted(set(at) - set(range(17)))
    assert at == pytest.approx({size: 1.0 + (size - 8) / 4 if size < 16 else 3.0 for size in at})
    assert {one.micro_batch_size == one.batch_size for one in found} == {True}
    # 16 to an octave: each is 4.4 % above the one before, up to rounding to whole samples.
    assert len([size for size in at if 256 <= size < 512]) == 16


def test_no_step_is_made_up_beside_an_accumulated_one_or_beyond_the_largest_run() -> None:
    accumulated = make_probe(32, micro_batch_size=16, step_seconds=4.0)
    untimed = make_probe(64, step_seconds=None, out_of_memory=True)
    found = runnable_steps([make_probe(16, step_seconds=2.0), accumulated, untimed, make_probe(128)], 64)
    assert found == [RunnableStep(16, 16, 2.0, 0.0), RunnableStep(32, 16, 4.0, 0.0)]


def candidate(batch_size: int, *steps: int, missed: int = 0, **hit: Any) -> Candidate:
    runs = [
        make_trial(n, batch_size=batch_size, steps=one, seconds=1.0, phase=Phase.CONFIRM, seed=n, **hit)
        for n, one in enumerate(steps)
    ]
    runs += [
        make_trial(50 + n, batch_size=batch_size, state=TrialState.EXHAUSTED, seconds=9.0, phase=Phase.CONFIRM, seed=50)
        for n in range(missed)
    ]
    return Candidate(runs[0].configuration, tuple(runs))


def of(*candidates: Candidate) -> dict[int, Slope]:
    return slopes({one.configuration.batch_size: one for one in candidates})


def test_each_slope_is_from_the_next_smaller_batch_size_that_has_steps() -> None:
    found = of(
        candidate(8, 999, 1000, 1001),
        candidate(16, 499, 500, 501),
        candidate(32, missed=3),
        candidate(64, 249, 250, 251),
        candidate(128, 248, 250, 252),
    )
    assert {size: slope.since for size, slope in found.items()} == {16: 8, 64: 16, 128: 64}
    assert [round(slope.value, 3) for slope in found.values()] == [-1.0, -0.5, 0.0]
    assert [slope.regime for slope in found.values()] == ["perfect", "diminishing", "maximal"]


@pytest.mark.parametrize(
    "steps", [(500, 700, 900), (500,), (690, 700)], ids=["the seeds differ too much", "one run", "two runs"]
)
def test_what_the_runs_do_not_show_is_undecided(steps: Sequence[int]) -> None:
    (slope,) = of(candidate(8, 999, 1000, 1001), candidate(16, *steps)).values()
    assert slope.regime == "undecided"
    assert not slope.is_too_steep


def test_a_missed_run_leaves_a_slope_without_an_interval() -> None:
    (slope,) = of(candidate(8, 999, 1000, 1001), candidate(16, 500, 501, 502, missed=1)).values()
    assert (slope.low, slope.high, slope.regime) == (None, None, "undecided")


def test_steps_that_fall_by_more_than_the_batch_grows_are_too_steep() -> None:
    (slope,) = of(candidate(8, 999, 1000, 1001), candidate(16, 399, 400, 401)).values()
    assert slope.is_too_steep and slope.regime == "perfect"
    (slope,) = of(candidate(8, 999, 1000, 1001), candidate(16, 300, 400, 550)).values()
    assert not slope.is_too_steep, "it may be an accident of the seeds"


def test_the_interval_holds_the_slope_nineteen_times_in_twenty() -> None:
    rng, held = random.Random(0), 0
    for _ in range(400):
        drawn = [[round(10_000 * (2**-place) * math.exp(rng.gauss(0, 0.2))) for _ in range(5)] for place in range(2)]
        (slope,) = of(candidate(8, *drawn[0]), candidate(16, *drawn[1])).values()
        held += not_none(slope.low) <= -1 <= not_none(slope.high)
    assert 0.93 <= held / 400 <= 0.985


def test_runs_that_are_all_alike_tell_no_interval() -> None:
    alike = of(candidate(8, 400, 400, 400), candidate(16, 200, 200, 200), candidate(32, 150, 151, 152))
    assert alike[16].value == pytest.approx(-1.0)
    assert (alike[16].low, alike[16].regime) == (None, "undecided")
    assert alike[32].low is not None, "one side's spread is enough"


@pytest.mark.parametrize(("last_miss_step", "regime"), [(495, "perfect"), (350, "undecided")])
def test_an_interval_holds_the_steps_between_evaluations(last_miss_step: int, regime: str) -> None:
    (slope,) = of(
        candidate(8, 999, 1000, 1001), candidate(16, 499, 500, 501, last_miss_step=last_miss_step, first_hit_step=505)
    ).values()
    width = math.log(505 / last_miss_step) / math.log(2)
    assert slope.regime == regime
    assert not_none(slope.high) - not_none(slope.low) > width if regime == "undecided" else width < 0.03


CRITICAL_SIZES = [2**power for power in range(2, 11)]


def steps(alpha: float = 0.01, beta: float = 0.0001) -> list[RunnableStep]:
    return [RunnableStep(size, size, alpha + beta * size) for size in CRITICAL_SIZES]


def points(b_crit: float, *sizes: int) -> list[LawPoint]:
    return [LawPoint(size, (1000 * (1 + size / b_crit),)) for size in sizes]


def test_the_noise_scale_alone_tells_b_crit_within_its_own_doubt() -> None:
    found = critical_batch(CRITICAL_SIZES, 100.0)
    low, high = found.interval
    assert found.estimate == pytest.approx(100, rel=0.02)
    assert low == pytest.approx(100 / 2 ** (1.5 * 1.645), rel=0.03)
    assert high == pytest.approx(553, rel=0.03)


def test_what_runs_show_outweighs_the_law() -> None:
    """The law alone would say that 128 takes two thirds of the steps of 64."""
    runs = [LawPoint(size, (samples,) * 20) for size, samples in ((32, 1e3), (64, 1e3), (128, 2e3), (256, 2e3))]
    steps_of = critical_batch(CRITICAL_SIZES, None, runs).log_steps([64, 128]).mean(axis=0)
    assert steps_of[1] - steps_of[0] == pytest.approx(0.0, abs=0.2), "twice the samples: as many steps"


def test_a_larger_batch_that_missed_where_a_smaller_one_reached_bounds_b_crit_from_above() -> None:
    reached = points(50.0, 16)
    without = critical_batch(CRITICAL_SIZES, None, reached).interval[1]
    missed = [*reached, LawPoint(1024, (), missed_at=(10_000.0,))]
    assert critical_batch(CRITICAL_SIZES, None, missed).interval[1] < without / 2


def test_the_optimum_is_where_steps_times_seconds_are_least() -> None:
    b_crit, alpha, beta = 64.0, 0.01, 0.0001
    posterior = critical_batch(
        CRITICAL_SIZES, None, [LawPoint(size, (1e3 * (1 + size / b_crit),) * 40) for size in CRITICAL_SIZES]
    )
    found = expected_optimum(posterior, steps(alpha, beta), CRITICAL_SIZES)
    assert found.step.batch_size == 64 and math.sqrt(b_crit * alpha / beta) == pytest.approx(80)
    assert found.interval == (64, 64), "the nearest on the ladder, of all that can be run"
    assert found.flat_range[0] <= 64 <= found.flat_range[1]
    assert found.relative_times[4] == pytest.approx(
        (1 + b_crit / 4) * (alpha + beta * 4) / ((1 + b_crit / 64) * (alpha + beta * 64)), rel=0.1
    )


def test_only_the_ladder_is_recommended() -> None:
    found = expected_optimum(critical_batch(CRITICAL_SIZES, 64.0), steps(), [4, 1024])
    assert found.step.batch_size == 1024 and found.interval[1] < 1024


def test_a_ladder_of_one_batch_size_is_that_one() -> None:
    found = expected_optimum(
        critical_batch([64], 64.0, points(64.0, 64)), [step for step in steps() if step.batch_size == 64], [64]
    )
    assert (found.step.batch_size, found.interval, found.flat_range) == (64, (64, 64), (64, 64))


PREDICTED_SIZES = (16, 32, 64)
SPEC = make_spec()


def runs() -> list[TrialRecord]:
    """Steps that fall with the batch size; on the study's own device batch 64 is the fastest."""
    steps = {16: 400, 32: 250, 64: 180}
    return [
        make_trial(
            100 * size + seed,
            batch_size=size,
            steps=steps[size] + seed,
            seconds=0.01 * (steps[size] + seed),
            phase=Phase.CONFIRM,
            seed=seed,
        )
        for size in PREDICTED_SIZES
        for seed in range(3)
    ]


def test_the_same_steps_at_other_step_times_have_another_optimum() -> None:
    found = predict_for_device(
        study(), SPEC, runs(), {size: make_probe(size, step_seconds=0.001 * size) for size in PREDICTED_SIZES}, "tiny"
    )
    assert found.optimal.batch_size == 16
    time = not_none(found.optimal.time_to_target_s)
    assert time.median == pytest.approx(401 * 0.016) and time.basis == "steps_x_step_time"
    assert found.device.model_dump() == {
        "name": "tiny",
        "type": "unknown",
        "memory_bytes": None,
        "precision": None,
        "torch_version": None,
        "compile_mode": None,
        "threads": None,
    }
    assert found.next == [], "no command runs on another device"
    assert found.warnings[0].code == "predicted"
    assert not {"contended", "measurement"} & {notice.code for notice in found.warnings}


def test_what_the_study_s_own_device_took_says_nothing_of_another() -> None:
    timed = [
        make_trial(
            run.number,
            batch_size=run.configuration.batch_size,
            steps=run.outcome.steps_to_target or 0,
            seconds=9.0,
            phase=Phase.CONFIRM,
            seed=run.seed,
            undelayed_train_seconds=9.0,
            reference_seconds=1e-4,
        )
        for run in runs()
        if run.outcome is not None
    ]
    timed = [with_outcome(run, steps=400) for run in timed]
    slow = {size: make_probe(size, step_seconds=0.001 * size) for size in PREDICTED_SIZES}
    found, plain = (predict_for_device(study(), SPEC, given, slow, "tiny") for given in (timed, runs()))
    assert found.optimal.time_to_target_s == plain.optimal.time_to_target_s


def test_a_beaten_batch_size_with_one_run_does_not_take_back_the_confirmation_on_another_device() -> None:
    beaten = make_trial(800, batch_size=8, steps=300, seconds=9.0, phase=Phase.CONFIRM)
    times = {size: make_probe(size, step_seconds=0.001 * size) for size in (8, *PREDICTED_SIZES)}
    found = predict_for_device(study(), SPEC, [*runs(), beaten], times, "tiny")
    assert found.optimal.batch_size == 16 and "unconfirmed" not in {notice.code for notice in found.warnings}


def test_a_batch_size_without_a_step_time_is_left_out_and_named() -> None:
    found = predict_for_device(study(), SPEC, runs(), {32: make_probe(32, step_seconds=0.1)}, "tiny")
    assert [row.batch_size for row in found.batches if row.trials] == [32]
    assert "16, 64" in {notice.code: notice.message for notice in found.warnings}["no_step_time"]


def test_trials_whose_batch_grows_are_left_out_and_counted() -> None:
    growing = with_batch_schedule(runs()[0].configuration, milestones((0, 16), (160, 64)))
    grown = [
        make_trial(9000 + seed, configuration=growing, steps=1, seconds=0.001, phase=Phase.AUDIT, seed=seed)
        for seed in range(3)
    ]
    times = {size: make_probe(size, step_seconds=0.001 * size) for size in PREDICTED_SIZES}
    found = predict_for_device(study(), SPEC, [*runs(), *grown], times, "tiny")
    assert found.batch_schedule is None, "their steps are of more than one size"
    (notice,) = (one for one in found.warnings if one.code == "growing_batches_left_out")
    assert notice.message == "the answer leaves out 3 trials with growing batches"
    alone = predict_for_device(study(), SPEC, runs(), times, "tiny")
    assert found.batches == alone.batches
    assert notice not in alone.warnings


def test_step_times_of_other_batch_sizes_alone_are_refused() -> None:
    with pytest.raises(UsageError, match="no batch size of study 'toy' has a step time; trials ran at 16, 32"):
        predict_for_device(study(), SPEC, runs(), {7: make_probe(7)}, "tiny")


def test_step_times_of_batch_sizes_that_missed_alone_are_refused_and_those_wanted_are_listed() -> None:
    missed = make_trial(1, batch_size=8, state=TrialState.EXHAUSTED, seconds=3.0)
    with pytest.raises(TargetNotReachedError) as caught:
        predict_for_device(study(), SPEC, [*runs(), missed], {8: make_probe(8), 7: make_probe(7)}, "tiny")
    assert str(caught.value) == "the batch sizes with step times did not reach the target in study 'toy': 8"
    assert caught.value.hint == "give step times of batch sizes that reached the target: 16, 32, 64"


def test_a_study_in_which_nothing_reached_is_refused_without_a_predicted_second() -> None:
    with pytest.raises(TargetNotReachedError, match="no trial of study 'toy' has a known number of steps") as caught:
        predict_for_device(
            study(), SPEC, [make_trial(1, state=TrialState.EXHAUSTED, seconds=3.0)], {32: make_probe(32)}, "tiny"
        )
    assert caught.value.hint == "see how the trials ended with `bssearch trial list toy`"


def test_a_bound_moves_with_the_step_time_and_a_trial_that_runs_stays() -> None:
    capped = make_trial(1, state=TrialState.CAPPED, seconds=3.0, last_miss_step=300)
    moved = not_none(at_step_time(capped, 0.5).outcome)
    assert (moved.last_miss_seconds, moved.contended) == (150.0, False)
    running = replace(capped, state=TrialState.RUNNING, outcome=None)
    assert at_step_time(running, 0.5) is running
