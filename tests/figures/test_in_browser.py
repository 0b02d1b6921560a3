"""In Chromium the page draws without a script, fits a phone, and is read by those who do not see it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bssearch.figures.page import render
from tests.browser import browser, grave_findings
from tests.figures import test_growing as growing, test_page as page
from tests.figures.charts import with_every_end, with_many_sizes

__all__ = ["browser"]
pytestmark = pytest.mark.slow
PAGES: dict[str, Callable[[], str]] = {
    "study": lambda: render(with_every_end()),
    "many": lambda: render(with_many_sizes()),
    "evil": lambda: render(page.evil_picture()),
    "growing": lambda: render(growing.picture()),
    "audited": lambda: render(page.picture(audit=page.AUDIT)),
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
ABOVE, BELOW = 0.22, 0.18
"""Shares of a text's box above and below its characters: DejaVu Sans has that much room, and no accents are used."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    paths = {name: folder / f"{name}.html" for name in PAGES}
    for name, path in paths.items():
        path.write_text(PAGES[name](), encoding="utf-8")
    return paths


@dataclass
class Seen:
    """A page in a tab, with what it fetched and said."""

    tab: Any
    requests: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def opened(browser: Any, path: Path, width: int, scheme: str, **more: Any) -> Seen:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **more)
    seen = Seen(context.new_page())
    seen.tab.on("request", lambda request: seen.requests.append(request.url))
    seen.tab.on("console", lambda message: seen.said.append(message.text))
    seen.tab.on("pageerror", lambda error: seen.said.append(str(error)))

    def dismiss(dialog: Any) -> None:
        seen.said.append(dialog.message)
        dialog.dismiss()

    seen.tab.on("dialog", dismiss)
    seen.tab.goto(path.as_uri())
    return seen


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", PAGES)
def test_it_fits_its_screen_fetches_nothing_and_no_text_meets_another(
    browser: Any, files: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    seen = opened(browser, files[name], width, scheme)
    assert seen.requests == [files[name].as_uri()]
    root = "document.documentElement"
    assert seen.tab.evaluate(f"{root}.scrollWidth - {root}.clientWidth") == 0
    figures = seen.tab.evaluate(MEASURED)
    assert len(figures) == seen.tab.evaluate("document.querySelectorAll('.figure').length") > 0
    for figure in figures:
        assert figure["kind"] == ("narrow" if width == 390 else "wide")
        assert figure["fontSize"] >= 12
        assert figure["ink"] == ("rgb(27, 31, 36)" if scheme == "light" else "rgb(231, 234, 238)")
        for text, left, top, right, bottom in figure["texts"]:
            inside = left >= -1 and top >= -1 and right <= figure["width"] + 1 and bottom <= figure["height"] + 1
            assert inside, f"{text!r} stands out: {left, top, right, bottom} of {figure['width'], figure['height']}"
        assert not meeting(figure["texts"])
    assert seen.said == []
    seen.tab.context.close()


def meeting(texts: list[list[Any]]) -> list[tuple[str, str]]:
    """Return the texts of a figure that lie over each other, without the room above and below their characters."""
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

    seen = opened(browser, files[name], width, scheme)
    assert grave_findings(seen.tab) == []
    assert any(one["id"] == "svg-img-alt" for one in Axe().run(seen.tab).response["passes"]), "it looked at the figures"
    seen.tab.context.close()


def test_it_is_the_same_without_javascript_and_wide_and_light_on_paper(browser: Any, files: dict[str, Path]) -> None:
    without = opened(browser, files["study"], 1280, "light", java_script_enabled=False)
    usual = opened(browser, files["study"], 1280, "light")
    assert without.tab.screenshot(full_page=True) == usual.tab.screenshot(full_page=True)
    paper = opened(browser, files["study"], 390, "dark")
    paper.tab.emulate_media(media="print", color_scheme="dark")
    figures = paper.tab.evaluate(MEASURED)
    assert {one["kind"] for one in figures} == {"wide"}
    assert {one["ink"] for one in figures} == {"rgb(27, 31, 36)"}
    for one in (without, usual, paper):
        one.tab.context.close()
