"""Each figure is drawn where its axes say, in colours of the style sheet; what is not known is refused."""

from __future__ import annotations

import copy
import json
import re
from importlib import resources
from typing import Any
from xml.etree import ElementTree

import pytest

from bssearch.pages.axes import Figure
from bssearch.pages.drawing.colours import paint
from bssearch.pages.drawing.scales import linear_ticks
from bssearch.pages.drawing.svg import svg
from bssearch.pages.drawing.text import width_of
from tests.pages.drawing.figures import points, shipped

SHIPPED = dict(shipped())


def drawn(figure: Figure) -> dict[str, ElementTree.Element]:
    """Return the drawings of a figure by size."""
    both = ElementTree.fromstring(f"<div>{svg(figure, 'one', 'A title')}</div>")
    return {one.attrib["class"]: one for one in both}


def frame(element: ElementTree.Element) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of the plot, as its clip path has them."""
    rect = element.find("clipPath/rect")
    assert rect is not None
    left, top, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
    return left, top, left + width, top + height


def starts(element: ElementTree.Element) -> list[tuple[float, float]]:
    """Return where the markers of a small trace lie."""
    paths = element.findall("g[@fill='var(--accent)']/path")
    return [tuple(map(float, re.findall(r"[\d.]+", path.attrib["d"])[:2])) for path in paths]  # type: ignore[misc]


HOVER = {"hovertemplate": "%{x}<extra></extra>"}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_figure_is_known_and_drawn_as_valid_xml(name: str) -> None:
    both = drawn(SHIPPED[name])
    assert set(both) == {"wide", "narrow"}
    ids = [one.attrib["id"] for element in both.values() for one in element.iter() if "id" in one.attrib]
    assert len(ids) == len(set(ids))
    for element in both.values():
        about = element.find("desc")
        assert about is not None and element.attrib["aria-describedby"] == about.attrib["id"]
        assert about.text is not None and "Across: " in about.text and "Upward: " in about.text
        assert element.attrib["role"] == "img" and element.attrib["aria-label"].startswith("A title: ")


@pytest.mark.parametrize("name", SHIPPED)
def test_nothing_of_a_shipped_figure_lies_outside_its_drawing(name: str) -> None:
    for element in drawn(SHIPPED[name]).values():
        _, _, width, height = map(float, element.attrib["viewBox"].split())
        for path in element.iter("path"):
            moves = re.findall(r"M(-?[\d.]+) (-?[\d.]+)", path.attrib["d"])
            if path not in [*element.iterfind("g[@clip-path]/path")]:
                assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in moves)


@pytest.mark.parametrize(("shift", "expected"), [("linear", 0.25), ("log", 0.5)])
def test_a_point_lies_at_its_value_on_both_axes(shift: str, expected: float) -> None:
    figure = points([2.5 if shift == "linear" else 10.0], [7.5], **HOVER)
    if shift == "log":
        figure["layout"]["xaxis"] |= {"type": "log", "range": [0, 2], "tickvals": [1, 100], "ticktext": ["1", "100"]}
    element = drawn(figure)["wide"]
    left, top, right, bottom = frame(element)
    ((x, y),) = starts(element)
    assert x == pytest.approx(left + expected * (right - left), abs=0.1)
    assert y == pytest.approx(bottom - 0.75 * (bottom - top), abs=0.1)


def test_a_point_outside_the_axes_is_not_drawn() -> None:
    element = drawn(points([5.0, 11.0], [5.0, 5.0], **HOVER))["wide"]
    assert len(starts(element)) == 1


def test_error_bars_reach_from_the_lower_to_the_upper_end_and_none_is_drawn_of_no_length() -> None:
    error = {"type": "data", "symmetric": False, "array": [2.0, 0], "arrayminus": [1.0, 0], "color": "var(--second)"}
    figure = points([2.0, 4.0], [5.0, 5.0], error_y={**error, "thickness": 1, "width": 4})
    element = drawn(figure)["wide"]
    _, top, _, bottom = frame(element)
    (bar,) = [path.attrib["d"] for path in element.findall("path") if path.attrib.get("stroke") == "var(--second)"]
    found = re.fullmatch(r"M[\d.]+ ([\d.]+)h8M[\d.]+ [\d.]+V([\d.]+)M[\d.]+ [\d.]+h8", bar)
    assert found is not None
    unit = (bottom - top) / 10
    assert [bottom - float(one) for one in found.groups()] == pytest.approx([4 * unit, 7 * unit], abs=0.1)


@pytest.mark.parametrize(("shape", "letters"), [("linear", "ML"), ("hv", "MHV"), ("vh", "MVH")])
def test_a_line_goes_in_the_steps_that_it_is_said_to(shape: str, letters: str) -> None:
    line = {"color": "var(--accent)", "width": 2, "dash": "dot", "shape": shape}
    element = drawn(points([1.0, 2.0], [3.0, 4.0], mode="lines", line=line))["wide"]
    path = element.find("g[@clip-path]/path")
    assert path is not None and re.sub(r"[^A-Z]", "", path.attrib["d"]) == letters
    assert path.attrib["stroke-dasharray"] == "3"


def test_a_point_says_what_it_is_on_a_screen_unless_there_are_too_many() -> None:
    for count, told in ((200, 200), (201, 0)):
        both = drawn(points([5.0] * count, [index / 25 for index in range(count)], **HOVER))
        assert len([*both["wide"].iter("title")]) == told
        assert not [*both["narrow"].iter("title")]


def test_thousands_of_points_take_few_bytes_each() -> None:
    values = [index / 500 for index in range(4000)]
    coloured = {
        "size": 8,
        "color": values,
        "colorscale": [[0.0, "var(--seq-0)"], [1.0, "var(--seq-100)"]],
        "cmin": 0.0,
        "cmax": 8.0,
        "line": {"color": "var(--page)", "width": 0.5},
    }
    coloured["colorbar"] = {"title": {"text": "seconds"}, "tickvals": [0.0, 8.0], "ticktext": ["0", "8"]}
    text = svg(points(values, [7 * value % 10 for value in values], marker=coloured), "one", "A title")
    assert len(text) / 4000 < 70  # drawn twice, with an edge


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("data", 0, "type"), "bar", r"data\[0\].type = 'bar'"),
        (("data", 0, "opacity"), 0.5, r"data\[0\].opacity"),
        (("data", 0, "marker", "symbol"), "hexagon", "symbol = 'hexagon'"),
        (("data", 0, "marker", "symbol"), ["circle", "hexagon"], "'hexagon'"),
        (("data", 0, "mode"), "markers+lines+text", "mode"),
        (("layout", "barmode"), "stack", "layout.barmode"),
        (("layout", "xaxis", "type"), "date", "xaxis.type = 'date'"),
        (("layout", "shapes"), [{"type": "rect"}], r"shapes\[0\].type"),
        (("data", 0, "marker", "color"), "#ff0000", "'#ff0000'"),
        (("data", 0, "marker", "color"), "var(--seq-101)", "seq-101"),
        (("data", 0, "name"), "", "no name"),
        (("data", 0, "y"), [float("nan")], "no place"),
    ],
)
def test_what_is_not_drawn_is_refused_with_its_name(place: tuple[Any, ...], value: Any, said: str) -> None:
    figure = copy.deepcopy(points([5.0], [5.0]))
    inside: Any = figure
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    with pytest.raises(ValueError, match=said):
        svg(figure, "one", "A title")


def test_characters_that_xml_does_not_have_are_replaced() -> None:
    element = drawn(points([5.0], [5.0], name="a\x00\x1b&amp;b"))["wide"]
    assert "a\ufffd\ufffd&b" in [text.text for text in element.iter("text")]


@pytest.mark.parametrize(
    ("low", "high", "most", "shown"),
    [
        (0.0, 10.0, 5, ["0", "2", "4", "6", "8", "10"]),
        (-0.11, 0.12, 5, ["−0.10", "−0.05", "0.00", "0.05", "0.10"]),
        (0.0, 42_000.0, 5, ["0", "10,000", "20,000", "30,000", "40,000"]),
        (0.973, 1.006, 7, ["0.975", "0.980", "0.985", "0.990", "0.995", "1.000", "1.005"]),
    ],
)
def test_an_axis_without_ticks_of_its_own_gets_round_numbers(
    low: float, high: float, most: int, shown: list[str]
) -> None:
    assert [text for _, text in linear_ticks(low, high, most)] == shown


def test_ticks_that_would_meet_are_left_out_evenly() -> None:
    figure = points([5.0], [5.0])
    ticks = [index / 4 for index in range(41)]
    figure["layout"]["xaxis"] |= {"tickvals": ticks, "ticktext": [f"{tick:.2f}" for tick in ticks]}
    both = drawn(figure)
    shown = {
        size: [float(text.text or "") for text in element.iter("text") if re.fullmatch(r"\d+\.\d\d", text.text or "")]
        for size, element in both.items()
    }
    assert 4 <= len(shown["narrow"]) < len(shown["wide"]) < 41
    assert {round(b - a, 2) for a, b in zip(shown["wide"], shown["wide"][1:], strict=False)} == {
        shown["wide"][1] - shown["wide"][0]
    }


def test_the_text_of_a_point_stands_clear_of_every_marker_or_is_left_out() -> None:
    labels = {"mode": "markers+text", "textposition": "top right", "textfont": {"color": "var(--ink)"}}
    figure = points([5.0, 5.01, 2.0], [5.0, 5.0, 2.0], text=["left", "hidden" * 8, "under"], **labels)
    star = {"color": "var(--second)", "size": 20, "symbol": "star"}
    figure["data"].append({**figure["data"][0], "x": [2.0], "y": [2.0], "mode": "markers", "marker": star})
    element = drawn(figure)["narrow"]
    _, top, _, bottom = frame(element)
    placed = {text.text: text.attrib for text in element.iter("text") if "paint-order" in text.attrib}
    assert {"left", "under"} <= set(placed) and "hidden" * 8 not in placed
    assert float(placed["left"]["y"]) < (top + bottom) / 2 - 3, "above both"
    assert float(placed["under"]["y"]) < bottom - 0.2 * (bottom - top) - 10, "above the star around it"


def test_a_long_text_is_cut_to_the_figure() -> None:
    element = drawn(points([5.0], [5.0], name="w" * 200))["narrow"]
    (name,) = [text.text for text in element.iter("text") if (text.text or "").startswith("www")]
    assert name is not None and name.endswith("…") and width_of(name, 12) < 340


def test_the_sequence_lies_between_the_style_sheets_stops() -> None:
    assert paint("var(--seq-0)") == "var(--sequence-0)"
    assert paint("var(--seq-100)") == "var(--sequence-3)"
    assert paint("var(--seq-50)") == "color-mix(in srgb,var(--sequence-2) 50%,var(--sequence-1))"


def contrast(one: str, other: str) -> float:
    """Return the ratio of two colours' luminances (WCAG 2.2, relative luminance)."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_marks_stand_out_from_the_page(scheme: str) -> None:
    style = resources.files("bssearch.pages").joinpath("page.css").read_text(encoding="utf-8")
    light, _, dark = style.partition("@media")
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", light if scheme == "light" else dark))
    assert len(colours) == 12
    for name in ("ink", "muted", "accent", "second", "third"):
        assert contrast(colours[name], colours["page"]) >= 4.5, name
    for stop in range(4):
        assert contrast(colours[f"sequence-{stop}"], colours["page"]) >= 3, stop


def test_the_shipped_figures_take_every_part_of_what_is_known() -> None:
    used = json.dumps(list(SHIPPED.values()))
    for part in (
        "error_y",
        "toself",
        "colorbar",
        "annotations",
        "shapes",
        "star",
        "arrow-up",
        "x-thin-open",
    ):
        assert part in used, part
    for part in ('"hv"', '"vh"', '"dash"', '"dot"', "circle-open", "square-open", "triangle-up-open", "diamond-open"):
        assert part in used, part
