"""Policies on draws of recorded trials: costs and misses as counted by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from bssearch.errors import UsageError
from bssearch.exchange.recorded_curves import RecordedTable, RecordedTrial
from tests.benchmarks.simulate.draws import (
    PRUNERS,
    Draw,
    Summary,
    proportion_interval,
    simulate,
    summarize,
)
from tests.factories import not_none
from tests.simulation.lines import TARGET, table


def test_all_policies_see_the_same_draws_and_the_same_seed_gives_the_same() -> None:
    lines = table(*range(3, 23))
    found = simulate(lines, ["none", "cap"], draws=8, trials=5, seed=3)
    assert [one.best for one in found["none"]] == [one.best for one in found["cap"]]
    assert len({one.best for one in found["none"]}) > 1
    assert found == simulate(lines, ["none", "cap"], draws=8, trials=5, seed=3)
    assert found != simulate(lines, ["none", "cap"], draws=8, trials=5, seed=4)
    assert {one.cost for one in found["none"]} == {1.0}
    assert {one.ratio for one in found["cap"]} == {1.0}
    assert summarize(found["cap"]).relative_cost.mean < 0.9


@pytest.mark.parametrize(("name", "workers"), [*zip([*PRUNERS, "race"], itertools.cycle((1, 3)))])
def test_every_policy_ends_and_costs_no_more_than_no_pruning(name: str, workers: int) -> None:
    found = simulate(table(*range(3, 43)), [name], draws=10, trials=12, seed=0, workers=workers)
    assert all(0 < one.cost <= 1 + 1e-9 and one.ratio >= 1 for one in found[name])
    assert all(0 < one.within <= one.cost + 1e-9 for one in found[name])


def draws(*ratios: float, cost: float = 0.5, best: Sequence[float] = ()) -> list[Draw]:
    return [
        Draw("lines", (best or range(len(ratios)))[index], cost, ratio, cost, cost)
        for index, ratio in enumerate(ratios)
    ]


def ends(found: Summary) -> tuple[float, float]:
    return not_none(found.miss_rate.low), not_none(found.miss_rate.high)


def test_a_summary_counts_what_is_not_within_5_percent() -> None:
    found = summarize(draws(1.0, 1.04, 1.06, math.inf))
    assert found.miss_rate.mean == 0.5
    assert found.regret == pytest.approx((1.04 * 1.06 * 9) ** 0.25)
    assert (found.relative_cost.low, found.relative_cost.mean, found.relative_cost.high) == (0.5, 0.5, 0.5)
    low, high = ends(found)
    assert low < 0.5 < high


def test_draws_with_one_winner_are_one_observation() -> None:
    ratios = [1.0] * 20 + [2.0] * 20
    low, high = ends(summarize(draws(*ratios)))
    assert high - low < 0.4
    assert ends(summarize(draws(*ratios, best=[1.0] * 20 + [2.0] * 20))) == pytest.approx((0.0, 1.0), abs=0.05)


def test_a_table_with_one_winner_gives_no_interval() -> None:
    found = summarize(draws(1.0, 1.0, 2.0, best=[3.0] * 3))
    assert (found.miss_rate.low, found.relative_cost.high) == (None, None)
    assert found.miss_rate.mean == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"names": ["cap", "nobody"]}, "pruner = 'nobody'"),
        ({"names": ["race:lag=1"]}, "pruner.options.lag = 1"),
        ({"names": ["safe:patience=.inf"]}, "pruner.options.patience = inf"),
        ({"names": ["safe:patience=x"]}, "pruner.options.patience = 'x'"),
        ({"names": ["safe:lag=2"]}, "pruner.options.lag"),
        ({"trials": 9}, "trials = 9 must be <= 4, the trials of table 'lines'"),
        ({"draws": 0}, "draws = 0 must be >= 1"),
        ({"workers": 0}, "workers = 0 must be >= 1"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, object], said: str) -> None:
    arguments = {"names": ["cap"], "draws": 1, "trials": 2, "seed": 0, **options}
    with pytest.raises(UsageError) as raised:
        simulate(table(3, 4, 5, 6), arguments.pop("names"), **arguments)  # type: ignore[arg-type]
    assert said in raised.value.message


def test_a_target_met_at_once_and_draws_without_a_hit_are_refused() -> None:
    at_once = RecordedTable("zero", TARGET, 5.0, (RecordedTrial(4, {}, 0, (0, 1), (0.0, 1.0), (1.0, 1.0)),))
    with pytest.raises(UsageError, match="trial 4 of table 'zero' ends, or meets the target, at 0 train seconds"):
        simulate(at_once, ["none"], draws=1, trials=1, seed=0)
    with pytest.raises(UsageError, match="none of 1 draws of 1 trials of table 'lines' has one that reaches"):
        simulate(table(*[30] * 200, 5), ["none"], draws=1, trials=1, seed=0)


@pytest.mark.parametrize(
    ("hits", "runs", "low", "high"),
    [
        # Clopper & Pearson, as R's binom.test has them.
        (0, 10, 0.0, 0.30850),
        (10, 10, 0.69150, 1.0),
        (5, 20, 0.08657, 0.49105),
        (7, 10, 0.34755, 0.93326),
    ],
)
def test_the_exact_intervals_of_whole_numbers(hits: int, runs: int, low: float, high: float) -> None:
    assert proportion_interval(hits / runs, runs) == pytest.approx((low, high), abs=1e-4)
