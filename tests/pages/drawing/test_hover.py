"""The texts under the pointer are those that plotly made of the same templates."""

from __future__ import annotations

import pytest

from bssearch.pages.drawing.hover import filled, formatted


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [  # each as d3-format 3 has it
        (0.125, ".3f", "0.125"),
        (12.34, ".1f", "12.3"),
        (0.12, ".4~g", "0.12"),
        (1.0, ".4~g", "1"),
        (100.0, ".4~g", "100"),
        (12346.0, ".4~g", "1.235e+4"),
        (1e-7, ".3~g", "1e-7"),
        (12345.6, ",.4~r", "12,350"),
        (0.012345, ",.4~r", "0.01235"),
        (1200.0, ",.4~r", "1,200"),
        (0.0, ",.4~r", "0"),
        (12346.0, ".4~s", "12.35k"),
        (1500000.0, ".4~s", "1.5M"),
        (0.0021, ".4~s", "2.1m"),
        (999.96, ".4~s", "1k"),
        (1000, ".4~s", "1k"),
    ],
)
def test_a_number_is_written_as_d3_writes_it(value: float, form: str, shown: str) -> None:
    assert formatted(value, form) == shown


def test_a_template_is_filled_from_the_point_and_undone_of_its_escapes() -> None:
    values = {"x": 32, "y": 0.5, "customdata": "a &lt;b&gt;<br>c"}
    text = filled("batch %{x}: %{y:.4~g} %{customdata}<extra></extra>", values)
    assert text == "batch 32: 0.5 a <b>\nc"


@pytest.mark.parametrize(
    ("template", "what"),
    [("%{z}<extra></extra>", "no z"), ("%{x:%Y}<extra></extra>", "'%Y'"), ("%{x}", "does not end")],
)
def test_a_template_that_is_not_known_is_refused(template: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        filled(template, {"x": 1.0})
