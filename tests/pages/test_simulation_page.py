from __future__ import annotations

import pytest

from bssearch.pages.simulation_page import _bars, _with_ends


@pytest.mark.parametrize(
    ("figure", "shown"), [((0.125, 0.1, 0.15), "12.5 % [10.0, 15.0]"), ((0.125, None, None), "12.5 %")]
)
def test_a_figure_has_its_interval_where_there_is_one(
    figure: tuple[float, float | None, float | None], shown: str
) -> None:
    assert _with_ends(figure, 100, "{:.1f}", " %") == shown


def test_bars_reach_from_a_figure_to_the_ends_of_its_interval() -> None:
    bars = _bars([(0.5, 0.4, 0.7), (0.5, None, None)], 100.0, "red")
    assert bars["array"] == pytest.approx([20.0, 0.0])
    assert bars["arrayminus"] == pytest.approx([10.0, 0.0])
