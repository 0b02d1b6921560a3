"""The picture of a study shows what its answer says, as a whole SVG document that needs nothing else."""

from __future__ import annotations

import math
import re
from datetime import date
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from bssearch.analysis.answer import Answer, Figure, Ratio
from bssearch.analysis.numbers import number
from bssearch.errors import UsageError
from bssearch.pages.picture import HEIGHT, WIDTH, svg
from tests.pages.test_plots import answer_of, law_trials

DAY = date(2026, 11, 22)
NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def answer() -> Answer:
    return answer_of(law_trials())


def drawn(answer: Answer, default_batch_size: int | None = 32) -> ElementTree.Element:
    return ElementTree.fromstring(svg(answer, default_batch_size=default_batch_size, measured_on=DAY))


def texts(picture: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in picture.iter(f"{NAMESPACE}text")]


def centres(picture: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in picture.iter(f"{NAMESPACE}circle")]


def test_every_batch_size_has_its_median_at_its_place(answer: Answer) -> None:
    points = centres(drawn(answer))
    figures = [row.objective_value.median for row in answer.batches if row.objective_value is not None]
    assert len(points) == len(figures) == len(answer.batches)
    steps = [right[0] - left[0] for left, right in pairwise(points)]
    assert steps == pytest.approx([steps[0]] * len(steps), abs=0.2)
    scale = (points[0][1] - points[-1][1]) / math.log(figures[-1] / figures[0])
    for (_, y), figure in zip(points, figures, strict=True):
        assert y == pytest.approx(points[0][1] - scale * math.log(figure / figures[0]), abs=0.2)


def test_intervals_have_both_their_ends(answer: Answer) -> None:
    text = svg(answer, default_batch_size=None, measured_on=DAY)
    assert len(re.findall(r'<path class="(?:best|point) mark" d="M[\d.]+ [\d.]+h12m-6 0V', text)) == len(answer.batches)


def test_optimum_range_default_largest_and_place_are_named(answer: Answer) -> None:
    named = answer.model_copy(
        update={
            "speedup": answer.speedup.model_copy(
                update={
                    "over_default": Ratio(value=3.25, at_least=False),
                    "over_largest": Ratio(value=2.5, at_least=True),
                }
            )
        }
    )
    found = texts(drawn(named))
    best, (low, high) = answer.optimal, answer.flat_range
    assert best.objective_value is not None
    assert f"optimal: {best.batch_size}, {number(best.objective_value.median)} s" in found
    assert f"within 5 %: {low if low == high else f'{low} to {high}'}" in found
    assert "your default: 32, 3.2× the optimum" in found
    largest = answer.largest_that_fits.batch_size
    assert f"the largest tried: {largest}, more than 2.5× the optimum" in found
    assert any(answer.device.name in one and "2026-11-22" in one for one in found)
    assert not any("default" in one for one in texts(drawn(named, None)))


def test_a_missed_target_is_a_lower_bound_and_a_single_run_is_marked(answer: Answer) -> None:
    first, second, *rest = answer.batches
    assert second.objective_value is not None
    single = Figure(median=second.objective_value.median, low=None, high=None, runs=1)
    changed = answer.model_copy(
        update={
            "batches": [
                first.model_copy(update={"objective_value": None, "objective_lower_bound": 1.25}),
                second.model_copy(update={"objective_value": single}),
                *rest,
            ]
        }
    )
    picture = drawn(changed)
    assert "> 1.25" in texts(picture) and "1 run" in texts(picture)
    assert len(centres(picture)) == len(answer.batches) - 1


def test_everything_lies_inside_the_picture(answer: Answer) -> None:
    for x, y in centres(drawn(answer)):
        assert 0 < x < WIDTH and 0 < y < HEIGHT
    for one in drawn(answer).iter(f"{NAMESPACE}text"):
        assert 0 < float(one.attrib["x"]) < WIDTH and 0 < float(one.attrib["y"]) < HEIGHT


def test_names_from_outside_are_only_text(answer: Answer) -> None:
    odd = answer.model_copy(update={"device": answer.device.model_copy(update={"name": '<script>"&'})})
    picture = drawn(odd)
    assert any('<script>"&' in one for one in texts(picture))
    assert not list(picture.iter(f"{NAMESPACE}script"))


def test_it_is_light_or_dark_as_the_screen_and_fetches_nothing(answer: Answer) -> None:
    text = svg(answer, default_batch_size=None, measured_on=DAY)
    assert "prefers-color-scheme: dark" in text
    light, dark = text.split("@media")
    used = set(re.findall(r"var\((--\w+)\)", text))
    assert all(f"{name}:" in light and f"{name}:" in dark.split("} }")[0] for name in used)
    assert "url(" not in text and "href" not in text and text.count("http") == 1


def test_a_study_without_a_figure_is_refused(answer: Answer) -> None:
    empty = answer.model_copy(
        update={"batches": [row.model_copy(update={"objective_value": None}) for row in answer.batches]}
    )
    with pytest.raises(UsageError, match="no figure"):
        svg(empty, default_batch_size=None, measured_on=DAY)
