"""In Chromium the page draws without a script, fits a phone, and is accessible."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bssearch.figures.html import html_page
from bssearch.figures.page import StudyPicture, page_of
from tests.browser import browser, grave_findings, overflow, page_of as window_of
from tests.figures import test_page as page, test_plots as growing
from tests.figures.charts import with_every_end, with_many_sizes

__all__ = ["browser"]
pytestmark = pytest.mark.slow
PAGES: dict[str, Callable[[], StudyPicture]] = {
    "study": with_every_end,
    "many": with_many_sizes,
    "evil": page.evil_picture,
    "growing": growing.picture,
    "audited": lambda: page.picture(audit=page.AUDIT),
}
VIEWS = [(1280, "light"), (390, "dark")]
MEASURED = """
() => [...document.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().width).map(one => {
  const box = one.getBoundingClientRect();
  const texts = [...one.querySelectorAll('text')].map(text => {
    const { left, top, right, bottom } = text.getBoundingClientRect();
    return [text.textContent, left - box.left, top - box.top, right - box.left, bottom - box.top];
  });
  return {
    kind: one.getAttribute('class'), width: box.width, height: box.height, texts,
    fontSize: box.width / one.viewBox.baseVal.width * parseFloat(one.getAttribute('font-size')),
    ink: getComputedStyle(one).fill,
  };
})
"""
# Empty shares of a text's box above and below its characters, in DejaVu Sans without accents.
ABOVE, BELOW = 0.22, 0.18


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    paths = {name: folder / f"{name}.html" for name in PAGES}
    for name, path in paths.items():
        path.write_text(html_page(page_of(PAGES[name]())), encoding="utf-8")
    return paths


@contextmanager
def opened(browser: Any, path: Path, width: int, scheme: str, **more: Any) -> Iterator[Any]:
    with window_of(browser, width=width, scheme=scheme, **more) as tab:
        tab.goto(path.as_uri())
        yield tab


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", PAGES)
def test_it_fits_its_screen_fetches_nothing_and_no_text_meets_another(
    browser: Any, files: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    requests: list[str] = []
    with window_of(browser, width=width, scheme=scheme) as tab:
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(files[name].as_uri())
        assert (requests, overflow(tab)) == ([files[name].as_uri()], 0)
        figures = tab.evaluate(MEASURED)
        assert len(figures) == tab.evaluate("document.querySelectorAll('.figure').length") > 0
    for figure in figures:
        assert figure["kind"] == ("narrow" if width == 390 else "wide")
        assert figure["fontSize"] >= 12
        assert figure["ink"] == ("rgb(27, 31, 36)" if scheme == "light" else "rgb(231, 234, 238)")
        for text, left, top, right, bottom in figure["texts"]:
            inside = left >= -1 and top >= -1 and right <= figure["width"] + 1 and bottom <= figure["height"] + 1
            assert inside, f"{text!r} is outside: {left, top, right, bottom} of {figure['width'], figure['height']}"
        assert not meeting(figure["texts"])


def meeting(texts: list[list[Any]]) -> list[tuple[str, str]]:
    """Pairs of a figure's texts that overlap, without the empty room above and below their characters."""
    tight = [
        (text, left, top + ABOVE * (bottom - top), right, bottom - BELOW * (bottom - top))
        for text, left, top, right, bottom in texts
    ]
    return [
        (one[0], other[0])
        for index, one in enumerate(tight)
        for other in tight[index + 1 :]
        if one[1] < other[3] and other[1] < one[3] and one[2] < other[4] and other[2] < one[4]
    ]


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", ["study", "growing", "audited"])
def test_axe_finds_no_serious_violation(
    browser: Any, files: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with opened(browser, files[name], width, scheme) as tab:
        assert grave_findings(tab) == []
        assert any(one["id"] == "svg-img-alt" for one in Axe().run(tab).response["passes"]), "it checked the figures"


def test_it_is_the_same_without_javascript_and_wide_and_light_on_paper(browser: Any, files: dict[str, Path]) -> None:
    with opened(browser, files["study"], 1280, "light") as usual:
        expected = usual.screenshot(full_page=True)
    with opened(browser, files["study"], 1280, "light", java_script_enabled=False) as without:
        assert without.screenshot(full_page=True) == expected
    with opened(browser, files["study"], 390, "dark") as paper:
        paper.emulate_media(media="print", color_scheme="dark")
        figures = paper.evaluate(MEASURED)
    assert {(one["kind"], one["ink"]) for one in figures} == {("wide", "rgb(27, 31, 36)")}
