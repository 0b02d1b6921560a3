from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from bssearch.analysis.optimum import Candidate, Slope, slopes
from bssearch.records import Phase, TrialState
from tests.factories import make_trial, not_none


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
    coarse = candidate(16, 499, 500, 501, last_miss_step=last_miss_step, first_hit_step=505)
    (slope,) = of(candidate(8, 999, 1000, 1001), coarse).values()
    width = math.log(505 / last_miss_step) / math.log(2)
    assert slope.regime == regime
    assert not_none(slope.high) - not_none(slope.low) > width if regime == "undecided" else width < 0.03
