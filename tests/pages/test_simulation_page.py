from __future__ import annotations

import pytest

from bssearch.pages.simulation_page import _with_ends


@pytest.mark.parametrize(
    ("figure", "shown"), [((0.125, 0.1, 0.15), "12.5 % [10.0, 15.0]"), ((0.125, None, None), "12.5 %")]
)
def test_a_figure_has_its_interval_where_there_is_one(
    figure: tuple[float, float | None, float | None], shown: str
) -> None:
    assert _with_ends(figure, 100, "{:.1f}", " %") == shown
