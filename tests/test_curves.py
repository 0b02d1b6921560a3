from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bssearch.curves import crossing, envelope, sparkline
from bssearch.records import Goal, Target
from tests.factories import make_curve

ACCURACY = Target(metric="accuracy", value=0.9)
LOSS = Target(metric="loss", value=0.5, goal=Goal.MINIMIZE)


def test_crossing_is_interpolated_by_the_same_fraction() -> None:
    miss, hit = make_curve((1.0, 0.8), (3.0, 0.96))
    found = crossing(miss, hit, ACCURACY)
    assert (found.last_miss_step, found.first_hit_step) == (0, 10)
    assert found.train_seconds == pytest.approx(1.0 + 2.0 * 0.625)
    assert found.steps == 7  # 6.25, rounded up
    falling = crossing(None, make_curve((0.0, 0.4))[0], LOSS)
    assert falling.train_seconds == 0.0
    above, below = make_curve((0.0, 1.0), (1.0, 0.0))
    falling = crossing(above, below, LOSS)
    assert falling.train_seconds == pytest.approx(0.5)


def test_target_met_at_once_takes_no_steps() -> None:
    (hit,) = make_curve((0.0, 0.95))
    assert crossing(None, hit, ACCURACY).steps == 0


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 1)), min_size=1, max_size=20), st.floats(0, 200))
def test_envelope_never_falls_and_is_never_below_the_curve(points: list[tuple[float, float]], when: float) -> None:
    clock, curve = 0.0, []
    for wait, metric in points:
        clock += wait
        curve.append((clock, metric))
    best = envelope(make_curve(*curve), ACCURACY)
    assert list(best.gains) == sorted(best.gains)
    value = best.at(when)
    seen = [metric for seconds, metric in curve if seconds <= when]
    assert (value is None) == (not seen)
    if value is not None:
        assert max(seen) - 1e-12 <= value <= max(metric for _, metric in curve) + 1e-12


def test_envelope_of_a_loss_gains_as_the_loss_falls() -> None:
    best = envelope(make_curve((0.0, 2.0), (1.0, 1.0), (2.0, 1.5)), LOSS)
    assert best.gains == (-2.0, -1.0, -1.0)
    assert best.at(0.5) == -1.5
    assert best.at(9.0) == -1.0


def test_sparkline_shows_the_ends_of_a_long_curve() -> None:
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([]) == ""
    long = sparkline([index / 999 for index in range(1000)])
    assert (len(long), long[0], long[-1]) == (40, "▁", "█")
