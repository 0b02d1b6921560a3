"""What every interval shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bssearch.intervals import proportion_interval


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


@given(st.floats(0, 1), st.floats(0.1, 1e4))
def test_an_interval_holds_its_share_and_is_no_point(share: float, observations: float) -> None:
    low, high = proportion_interval(share, observations)
    assert 0 <= low <= share + 1e-9 and share - 1e-9 <= high <= 1
    assert low < high


def test_more_observations_narrow_it() -> None:
    widths = [high - low for low, high in (proportion_interval(0.2, count) for count in (5.5, 20, 200))]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize(("share", "observations"), [(-0.1, 5), (1.1, 5), (float("nan"), 5), (0.5, 0), (0.5, -1)])
def test_what_is_no_share_or_no_number_of_observations_is_refused(share: float, observations: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        proportion_interval(share, observations)
