"""Headless Chromium for tests, and what axe-core finds on its pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
GRAVE = ("serious", "critical")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield headless Chromium; without it skip the test, or fail where a machine must have it."""
    path = shutil.which("chromium")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium")
        pytest.skip("no chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for the tests of a module."""
    with chromium() as opened:
        yield opened


@contextmanager
def page_of(browser: Browser, *, width: int = 1280, scheme: Any = "light", **options: Any) -> Iterator[Page]:
    """Yield a page; until its end nothing may have been refused by a policy, or failed in a script."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
    page, faults = context.new_page(), []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    try:
        yield page
        assert faults == []
    finally:
        context.close()


def grave_findings(page: Page) -> list[str]:
    """Return what axe-core finds serious or critical on a page, each with the elements."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {', '.join(str(node['target']) for node in one['nodes'][:5])}"
        for one in found
        if one["impact"] in GRAVE
    ]


def overflow(page: Page) -> int:
    """Return by how many pixels a page is wider than its window."""
    wider: int = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return wider
