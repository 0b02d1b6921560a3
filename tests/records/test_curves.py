import pytest

from bssearch.records import Goal, Target
from bssearch.records.curves import crossing, sparkline
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


def test_sparkline_shows_the_ends_of_a_long_curve() -> None:
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([]) == ""
    long = sparkline([index / 999 for index in range(1000)])
    assert (len(long), long[0], long[-1]) == (40, "▁", "█")
    assert sparkline([0.0] * 10 + [1.0], width=3) == "▁▁█", "the last value is shown, however few there are to show"
