"""Charts follow their axes and the style sheet's colours, on pages and as pictures."""

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from bssearch.analysis.answer import Answer, Ratio
from bssearch.errors import UsageError
from bssearch.figures.plots import objective_picture
from bssearch.figures.svg import (
    Axis,
    Chart,
    Point,
    ReferenceLine,
    Series,
    Shape,
    sequence_colour,
    stylesheet,
    svg,
    width_of,
)
from bssearch.records.text import number
from tests.factories import not_none
from tests.figures.charts import points, shipped
from tests.figures.test_plots import answer_of, law_trials

SHIPPED = dict(shipped())
NAMESPACE = "{http://www.w3.org/2000/svg}"
Place = tuple[float, float]


def drawn(chart: Chart) -> dict[str, ElementTree.Element]:
    """Drawings of a chart by size."""
    return {one.attrib["class"]: one for one in ElementTree.fromstring(f"<div>{svg(chart, 'one', 'A title')}</div>")}


def frame(element: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the plot, from its clip path."""
    rect = not_none(element.find("clipPath/rect"))
    left, top, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
    return left, top, left + width, top + height


def tooltips(element: ElementTree.Element) -> dict[str, Place]:
    """Places of points by tooltip."""
    return {
        title.text or "": (float(one.attrib["cx"]), float(one.attrib["cy"]))
        for one, title in [(one, one.find("title")) for one in element.iter("circle")]
        if title is not None
    }


def texts(element: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in element.iter() if one.tag.removeprefix(NAMESPACE) == "text"]


def moves(element: ElementTree.Element) -> Iterator[Place]:
    """Start points of the paths outside the clipped plot."""
    clipped = [*element.iterfind("g[@clip-path]/*")]
    for path in element.iter("path"):
        if path not in clipped:
            yield from ((float(x), float(y)) for x, y in re.findall(r"M(-?[\d.]+) (-?[\d.]+)", path.attrib["d"]))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_chart_is_valid_inside_its_drawing_and_described(name: str) -> None:
    both = drawn(SHIPPED[name])
    assert set(both) == {"wide", "narrow"}
    ids = [one.attrib["id"] for element in both.values() for one in element.iter() if "id" in one.attrib]
    assert len(ids) == len(set(ids))
    for element in both.values():
        assert (element.attrib["role"], element.attrib["aria-label"][:9]) == ("img", "A title: ")
        about = element.findtext("desc") or ""
        assert SHIPPED[name].x.title in about and SHIPPED[name].y.title in about
        assert all(series.name in about for series in SHIPPED[name].series)
        _, _, width, height = map(float, element.attrib["viewBox"].split())
        assert all(0 <= x <= width and 0 <= y <= height for x, y in moves(element))


@pytest.mark.parametrize(("is_log", "expected"), [(False, 0.25), (True, 0.5)])
def test_a_point_is_drawn_at_its_value_on_both_axes(is_log: bool, expected: float) -> None:
    chart = points(Point(10.0 if is_log else 2.5, 7.5, "here"))
    if is_log:
        chart = replace(chart, x=Axis("amount", 1.0, 100.0, [(1.0, "1"), (100.0, "100")], is_log=True))
    element = drawn(chart)["wide"]
    left, top, right, bottom = frame(element)
    place = (left + expected * (right - left), bottom - 0.75 * (bottom - top))
    assert tooltips(element)["here"] == pytest.approx(place, abs=0.1)


def test_a_point_outside_the_axes_is_not_drawn() -> None:
    both = drawn(points(Point(5.0, 5.0, "in"), Point(11.0, 5.0, "out")))
    assert set(tooltips(both["wide"])) == {"in"}
    (path,) = [one.attrib["d"] for one in both["wide"].findall("path") if one.attrib["fill"] == "var(--accent)"][1:]
    assert path.count("M") == 1


def test_an_interval_reaches_from_its_lower_to_its_upper_end_as_far_as_the_axis_goes() -> None:
    chart = points(Point(2.0, 5.0, low=4.0, high=7.0), Point(3.0, 5.0, low=-9.0, high=99.0), Point(4.0, 5.0))
    element = drawn(chart)["wide"]
    _, top, _, bottom = frame(element)
    (bars,) = [one.attrib["d"] for one in element.findall("path") if one.attrib.get("stroke-width") == "1.5"]
    found = re.findall(r"M[\d.]+ ([\d.]+)h10m-5 0V([\d.]+)m-5 0h10", bars)
    ends = [((bottom - float(low)) / (bottom - top), (bottom - float(high)) / (bottom - top)) for low, high in found]
    assert ends == [pytest.approx((0.4, 0.7), abs=0.001), pytest.approx((0.0, 1.0), abs=0.001)]


@pytest.mark.parametrize(("shape", "letters"), [("straight", "ML"), ("hv", "MHV"), ("vh", "MVH")])
def test_a_line_has_the_steps_of_its_shape(shape: Shape, letters: str) -> None:
    chart = points(Point(1.0, 3.0), Point(2.0, 4.0), symbol=None, width=2, dash="dot", shape=shape)
    lines = [one for one in drawn(chart)["wide"].findall("g[@clip-path]/path") if "stroke-width" in one.attrib]
    assert [re.sub(r"[^A-Z]", "", one.attrib["d"]) for one in lines] == [letters]
    assert lines[0].attrib["stroke-dasharray"] == "3"


@pytest.mark.parametrize(("count", "shown"), [(200, 200), (201, 0)])
def test_a_point_has_a_tooltip_on_a_screen_unless_there_are_too_many(count: int, shown: int) -> None:
    both = drawn(points(*(Point(5.0, index / 25, str(index)) for index in range(count))))
    assert (len(tooltips(both["wide"])), len(tooltips(both["narrow"]))) == (shown, 0)


def test_thousands_of_points_take_few_bytes_each() -> None:
    many = (Point(index / 500, 7 * index / 500 % 10, colour=sequence_colour(index / 4000)) for index in range(4000))
    assert len(svg(points(*many), "one", "A title")) / 4000 < 110  # drawn twice


def test_names_of_users_are_only_text() -> None:
    element = drawn(points(Point(5.0, 5.0, '<a href="x">'), name="a\x00\x1b&<b>"))["wide"]
    assert "a\ufffd\ufffd&<b>" in texts(element)
    assert set(tooltips(element)) == {'<a href="x">'}
    assert not [*element.iter("a"), *element.iter("b")]


def test_ticks_that_would_meet_are_left_out_evenly() -> None:
    ticks = [(index / 4, f"{index / 4:.2f}") for index in range(41)]
    chart = points(Point(5.0, 5.0))
    shown = {
        size: [float(text) for text in texts(element) if re.fullmatch(r"\d+\.\d\d", text)]
        for size, element in drawn(replace(chart, x=replace(chart.x, ticks=ticks))).items()
    }
    assert 4 <= len(shown["narrow"]) < len(shown["wide"]) < 41
    assert len({round(following - one, 2) for one, following in pairwise(shown["wide"])}) == 1


def test_the_text_of_a_point_avoids_every_symbol_or_is_left_out() -> None:
    chart = points(Point(5.0, 5.0, label="left"), Point(5.01, 5.0, label="hidden" * 8), Point(2.0, 2.0, label="under"))
    star = Series(points=[Point(2.0, 2.0)], symbol="star", size=15)
    element = drawn(replace(chart, series=[*chart.series, star]))["narrow"]
    _, top, _, bottom = frame(element)
    placed = {text.text: text.attrib for text in element.iter("text") if "paint-order" in text.attrib}
    assert set(placed) == {"left", "under"}
    assert float(placed["left"]["y"]) < (top + bottom) / 2 - 3, "above both"
    assert float(placed["under"]["y"]) < bottom - 0.2 * (bottom - top) - 7, "above the star around it"


def test_the_text_of_an_upright_line_meets_no_symbol_while_there_is_room() -> None:
    heights = [9.9, 9.4, 8.9, 8.4, 7.9, 7.4, 6.9]
    chart = points(*(Point(5.0, one) for one in heights), symbol="circle")
    line = ReferenceLine(at=9.5, name="largest tried: 512, 2.44× the optimum", is_upright=True)
    element = drawn(replace(chart, rules=[line]))["narrow"]
    _, top, _, bottom = frame(element)
    [text] = [one for one in element.iter("text") if one.text == line.name]
    lowest = bottom - 0.69 * (bottom - top) + 5
    assert float(text.attrib["y"]) - 0.95 * 12 >= lowest


def test_a_long_text_is_cut_to_the_chart() -> None:
    element = drawn(points(Point(5.0, 5.0), name="w" * 200))["narrow"]
    (name,) = [text for text in texts(element) if text.startswith("www")]
    assert name.endswith("…") and width_of(name, 12) < 340


def contrast(one: str, other: str) -> float:
    """Ratio of two colours' luminances (WCAG 2.2, relative luminance)."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_marks_contrast_with_the_page(scheme: str) -> None:
    light, _, dark = stylesheet("colours.css").partition("@media")
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", light if scheme == "light" else dark))
    for name in ("ink", "muted", "accent", "second", "third"):
        assert contrast(colours[name], colours["page"]) >= 4.5, name
    for stop in range(4):
        assert contrast(colours[f"sequence-{stop}"], colours["page"]) >= 3, stop


@pytest.fixture(scope="module")
def answer() -> Answer:
    return answer_of(law_trials())


def picture(answer: Answer, default_batch_size: int | None = 32) -> ElementTree.Element:
    day = date(2026, 11, 22)
    return ElementTree.fromstring(objective_picture(answer, default_batch_size=default_batch_size, measured_on=day))


def test_a_picture_names_the_optimum_the_default_the_largest_and_the_place(answer: Answer) -> None:
    ratios = {"over_default": Ratio(value=3.25, at_least=False), "over_largest": Ratio(value=2.5, at_least=True)}
    named = answer.model_copy(update={"speedup": answer.speedup.model_copy(update=ratios)})
    found, best = texts(picture(named)), answer.optimal
    assert f"{best.batch_size}: {number(not_none(best.objective_value).median)} s" in found
    assert "your default" in found and "3.25× the optimum" in found
    assert f"largest tried: {answer.largest_that_fits.batch_size}, > 2.5× the optimum" in found
    assert any(answer.device.name in one and "2026-11-22" in one for one in found)
    assert "your default" not in texts(picture(named, None))


def test_a_picture_has_its_colours_and_fetches_nothing(answer: Answer) -> None:
    text = objective_picture(answer)
    light, _, dark = text.partition("@media screen and (prefers-color-scheme: dark)")
    used = set(re.findall(r"var\((--\w+)\)", text))
    assert used and all(f"{name}:" in light and f"{name}:" in dark for name in used)
    assert ":root" not in text, "other pictures on its page keep their own colours"
    assert "href" not in text and text.count("http") == 1
    assert set(re.findall(r"url\((.)", text)) == {"#"}


def test_a_study_without_a_value_has_no_picture(answer: Answer) -> None:
    rows = [row.model_copy(update={"objective_value": None}) for row in answer.batches]
    with pytest.raises(UsageError, match="no figure"):
        objective_picture(answer.model_copy(update={"batches": rows}))
