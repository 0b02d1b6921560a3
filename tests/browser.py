"""Headless Chromium for tests, and axe-core's findings on its pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
GRAVE = ("serious", "critical")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Headless Chromium; if it is missing, skip the test, or fail in CI."""
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
    """Browser for a module's tests."""
    with chromium() as opened:
        yield opened


@contextmanager
def page_of(
    browser: Browser, *, width: int = 1280, scheme: Any = "light", allowed: str | None = None, **options: Any
) -> Iterator[Page]:
    """Page in a new window; fail on refused requests, failed scripts and dialogs, unless ``allowed`` is in the text."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
    page, faults = context.new_page(), []

    def fail(dialog: Dialog) -> None:
        faults.append(dialog.message)
        dialog.dismiss()

    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", fail)
    try:
        yield page
        assert [one for one in faults if allowed is None or allowed not in one] == []
    finally:
        context.close()


def grave_findings(page: Page) -> list[str]:
    """Serious and critical findings of axe-core on a page, with their elements."""
    from axe_playwright_python.sync_playwright import Axe

    return [
        f"{one['id']}: {', '.join(str(node['target']) for node in one['nodes'][:5])}"
        for one in Axe().run(page).response["violations"]
        if one["impact"] in GRAVE
    ]


def overflow(page: Page) -> int:
    """Pixels by which a page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))
