from __future__ import annotations

import pytest

from bssearch.search.samplers.time_model.acquisition import SLOWEST_FALL, step_seconds_at


@pytest.mark.parametrize(
    ("known", "size", "seconds"),
    [
        ({8: 1.0, 16: 1.2, 32: 1.6}, 16, 1.2),
        ({8: 1.0, 16: 1.2}, 128, 4.0),
        ({16: 1.2, 128: 6.0}, 72, (1.2 + 6.0) / 2),
        ({32: 1.6}, 64, 1.6),
        ({8: 1.0, 16: 0.9}, 1024, 1.0),
        ({8: 1.0, 16: 2.0}, 1, SLOWEST_FALL),
    ],
    ids=["known", "beyond", "between", "one alone", "no line falls", "not below a share of the next"],
)
def test_an_unknown_step_time_lies_on_the_line_through_its_neighbours(
    known: dict[int, float], size: int, seconds: float
) -> None:
    assert step_seconds_at(known, size) == pytest.approx(seconds)
