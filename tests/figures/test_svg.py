"""Charts follow their axes and the style sheet's colours, on pages and as pictures."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, date, datetime
from itertools import pairwise
from pathlib import Path
from pprint import pformat
from typing import Any
from xml.etree import ElementTree

import pytest

from bssearch.analysis.answer import Answer, Figure, Ratio
from bssearch.analysis.generalisation import FinalMetrics, Generalisation
from bssearch.analysis.law.quick import Promise
from bssearch.analysis.measured import MemoryAnswer, NoiseAnswer, StepTimeAnswer
from bssearch.analysis.rules.rule_book import Rule
from bssearch.analysis.shape import CriticalBatch, Fit, Interval, Law, Notice, Predicted
from bssearch.figures.page import StudyPicture, page_of
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
from bssearch.records import TrialState
from bssearch.records.text import number
from tests.factories import make_spec, make_trial, not_none
from tests.figures import test_page as page, test_plots as growing
from tests.figures.charts import points, shipped, with_every_end
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
    assert [stop for stop in range(4) if contrast(colours[f"sequence-{stop}"], colours["page"]) < 3] == []


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


# Snapshots ------------------------------------------------------------------------------------------------------------


FOLDER = Path(__file__).parents[1] / "data" / "pages"
NESTED = ("optimal", "speedup", "measured", "largest_that_fits", "device", "recommendation")
FIT = Fit(
    s_min=50.0,
    b_crit=CriticalBatch(estimate=321.0, low=222.0, high=444.0),
    max_residual=0.0123,
    verdict="fits",
    residuals={8: 0.01, 128: -0.0123},
    alpha_s=0.01,
    beta_s=0.0002,
    b_star=64.0,
    predicted=Predicted(batch_size=96, micro_batch_size=96, time_to_target_s=1.5, flat_range=[64, 128]),
    including_untuned=Law(
        s_min=60.0,
        b_crit=CriticalBatch(estimate=555.0, low=None, high=None),
        max_residual=0.1,
        verdict="poor",
        residuals={},
    ),
    noise_scale_ratio=0.789,
)
NOISE = NoiseAnswer(
    batch_size=32, scale=777.0, low=666.0, high=888.0, adam_scale=None, adam_low=None, adam_high=None, passes=9
)
STEP = StepTimeAnswer(alpha_s=0.0123, beta_s=0.000456, max_residual=0.01, throughput_knee=176)
MEMORY = MemoryAnswer(largest_that_fits=1536, smallest_that_does_not=1792, fixed_bytes=None, bytes_per_sample=None)
FIGURE = Figure(median=1.234, low=1.111, high=1.333, runs=3)
TIMES = Ratio(value=2.34, at_least=False, low=2.11, high=2.55)
AT_LEAST = Ratio(value=1.23, at_least=True)
FINAL = FinalMetrics(
    batch_size=128,
    parameters={},
    runs=3,
    ended_early=1,
    contended=0,
    final_metric=0.91,
    test_metric=0.9,
    gap=Interval(value=0.04, low=0.01, high=0.07),
    trial_numbers=[4, 5, 6],
)
REGRET = {"value": 1.234, "low": 1.15, "high": 1.33, "at_least": False}
SLOPE = {"estimate": 0.52, "low": 0.31, "high": 0.73, "excludes": []}
NO_FIGURE = dict.fromkeys(
    ("objective_value", "objective_lower_bound", "steps_to_target", "samples_to_target", "step_time_s", "best", "slope")
)


def changed(rows: Callable[[int], dict[str, Any]] = lambda place: {}, **update: Any) -> StudyPicture:
    """Study with changed fields of the answer, of its parts and batch sizes."""
    found = page.picture()
    answer = found.answer
    parts = {name: getattr(answer, name).model_copy(update=update.pop(name, {})) for name in NESTED}
    batches = [row.model_copy(update=rows(place)) for place, row in enumerate(answer.batches)]
    return replace(found, answer=answer.model_copy(update={"batches": batches, **parts, **update}))


def known() -> StudyPicture:
    """Study in which every figure is known, with its interval."""
    return changed(
        lambda place: {
            "untuned": place == 0,
            "untuned_because": ["first reason", "second reason"],
            "host_bound_share": 0.256,
            "regime": "perfect",
            "slope": Interval(value=-0.987, low=-1.234, high=-0.765),
        },
        fit=FIT,
        flat_range=[64, 2048],
        measured={"noise_scale": NOISE, "step_time": STEP, "memory": MEMORY},
        optimal={
            "batch_size": 4096,
            "accumulation_steps": 2,
            "micro_batch_size": 2048,
            "objective_value": FIGURE,
            "test_metric": 0.8765,
            "peak_memory_bytes": 3 * 2**30,
            "further_metrics": {"forgetting": Figure(median=0.031, low=0.028, high=0.036, runs=3)},
            "parameters": {"learning_rate": 0.123456, "optimizer": "sgd", "nesterov": True, "dropout": None},
        },
        speedup={"over_default": TIMES, "over_largest": TIMES},
        largest_that_fits={"reason": "256 ran out", "batch_size": 1024},
        generalisation=Generalisation(
            train_seconds=10.0,
            best_batch_size=16,
            notable_gap=0.02,
            batches=[FINAL.model_copy(update={"batch_size": 16, "gap": None, "final_metric": 0.95}), FINAL],
            more_regularised=FINAL,
            closed=False,
        ),
        quick=Promise(
            batch_size=16,
            interval=[8, 2048],
            gain=1.36,
            found_batch_size=64,
            found_flat_range=[32, 64],
            holds=True,
            time_ratio=1.25,
        ),
        warnings=[Notice(code="one", message="from one trial"), Notice(code="two", message="5 trials failed")],
    )


def bounded() -> StudyPicture:
    """Study whose figures have one end of an interval, and whose optimum is off the front."""
    return changed(
        lambda place: {
            **NO_FIGURE,
            "objective_lower_bound": None if place == 0 else 7.25,
            "slope": Interval(value=-0.9, low=None, high=-0.7),
        },
        fit=FIT.model_copy(update={"b_crit": CriticalBatch(estimate=321.0, low=222.0, high=None), "verdict": "poor"}),
        measured={
            "noise_scale": NOISE.model_copy(update={"scale": None, "high": None}),
            "step_time": None,
            "memory": MEMORY,
        },
        optimal={"objective_value": FIGURE.model_copy(update={"low": None, "runs": 1})},
        speedup={"over_default": AT_LEAST, "over_largest": AT_LEAST},
        front=[point.model_copy(update={"on_front": False}) for point in page.picture().answer.front],
        recommendation={"rule": "law"},
    )


def unknown() -> StudyPicture:
    """Study that lacks every figure that may be unknown."""
    found = changed(
        lambda place: {
            **NO_FIGURE,
            **({} if place else {"objective_value": FIGURE}),
            "ended": {},
            "untuned": False,
            "regime": None,
            "peak_memory_bytes": None,
        },
        fit=None,
        front=[],
        measured={"noise_scale": None, "step_time": None, "memory": None},
        optimal={"objective_value": FIGURE.model_copy(update={"high": None}), "peak_memory_bytes": None},
        speedup={"over_default": None, "over_largest": None},
        device={"precision": None},
    )
    return replace(found, curves={})


def rule(rule: str = Rule.LINEAR_RATE, verdict: str = "broke", **update: Any) -> dict[str, Any]:
    given = {"configuration": {"learning_rate": 0.4, "dropout": 0.1}, "regret": REGRET, "reason": "three runs"}
    return {"rule": str(rule), "batch_size": 128, "verdict": verdict, **given, **update}


def audited() -> StudyPicture:
    """Study whose rules have every kind of verdict, parameter and regret."""
    rules = [
        rule(verdict="not_run", configuration=None, reason=None, batch_size=None, regret=None),
        rule(Rule.DROPOUT, "held", regret={"value": 1.234, "at_least": True}),
        rule(Rule.WARMUP, "undecided", regret={**REGRET, "low": None}),
        rule("one_of_a_package", regret={**REGRET, "high": None}),
        rule(),
    ]
    found = page.picture(audit={"rules": rules, "learning_rate_slope": SLOPE})
    ends = [datetime(2026, 3, day, tzinfo=UTC) for day in (4, 9, 7)]
    trials = [replace(trial, ended_at=ends[place % 3]) for place, trial in enumerate(found.trials)]
    return replace(found, trials=[*trials, replace(make_trial(len(trials), state=TrialState.RUNNING), ended_at=None)])


def growing_missed() -> StudyPicture:
    """Study with a second schedule that missed the target, and a best schedule without a stored curve."""
    found = growing.picture()
    capped = growing.grown(growing.BY_NOISE, 90, runs=0, state=TrialState.CAPPED)
    return replace(found, trials=[*found.trials, *capped], grown=(not_none(found.grown)[0], []))


def missed(objective: str, price: float | None = None) -> StudyPicture:
    """Study in which one batch size reached the target, and another has only a bound."""
    spec = make_spec(objective=objective, price_per_device_hour=price)
    trials = [
        make_trial(0, batch_size=32),
        make_trial(1, batch_size=8, state=TrialState.EXHAUSTED, seconds=7.2, last_miss_step=300),
    ]
    return replace(page.picture(spec), answer=answer_of(trials, spec), trials=trials)


PICTURES: dict[str, Callable[[], StudyPicture]] = {
    "every_end": with_every_end,
    "growing": growing.picture,
    "growing_by_noise": lambda: growing.picture(growing.BY_NOISE),
    "growing_missed": growing_missed,
    "known": known,
    "bounded": bounded,
    "unknown": unknown,
    "too_few": lambda: changed(fit=FIT.model_copy(update={"verdict": "too_few_points"})),
    "upper_bound": lambda: changed(
        fit=FIT.model_copy(update={"b_crit": CriticalBatch(estimate=321.0, low=None, high=444.0)})
    ),
    "audited": audited,
    "excluding": lambda: page.picture(audit=page.AUDIT),
    "imported": lambda: page.picture(make_spec(workload="imported"), audit={"rules": []}),
    "missed_samples": lambda: missed("samples_to_target"),
    "missed_hours": lambda: missed("cost_to_target"),
    "missed_price": lambda: missed("cost_to_target", 500.0),
}

# Pages whose charts are compared by name only.
NAMES_ONLY = (
    "growing_by_noise",
    "unknown",
    "too_few",
    "upper_bound",
    "audited",
    "excluding",
    "imported",
    "missed_hours",
)


def rounded(value: Any) -> Any:
    """Value with numbers of three digits, without empty fields."""
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {str(name): rounded(one) for name, one in value.items() if one not in (None, "")}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", PICTURES)
def test_the_page_equals_its_snapshot(name: str) -> None:
    shown = rounded(asdict(page_of(PICTURES[name]())))
    for section in shown["sections"] if name in NAMES_ONLY else []:
        section["charts"] = [*filter(section["charts"].get, section["charts"])]
    text = pformat(shown, width=120, compact=True, sort_dicts=False) + "\n"
    path = FOLDER / f"{name}.txt"
    if "BSSEARCH_WRITE_SNAPSHOTS" in os.environ:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
