"""The calculator in Chromium: results follow what is typed, the last answer wins, and all of it can be reached."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.browser import SCHEMES, WIDTHS, browser, grave_findings, overflow
from tests.web.serving import Server

__all__ = ["browser"]
pytestmark = pytest.mark.slow

BATCH = '[data-part="accumulation"] [data-key="batch"]'


@pytest.fixture
def server() -> Server:
    return Server()


@contextmanager
def tab(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """Yield a tab at an address; what its console says, and requests that leave, fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda one: said.append(one.url) if "127.0.0.1" not in one.url else None)
    page.goto(address)
    try:
        yield page
    finally:
        context.close()
    assert [one for one in said if "503" not in one] == []


def test_results_follow_what_is_typed_and_the_focus_and_the_caret_stay(browser: Any, server: Server) -> None:
    with server.running() as address, tab(browser, address) as page:
        page.click("#accumulation-notes summary")
        page.focus("#field-batch")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.keyboard.type("2")
        page.wait_for_selector(f'{BATCH}[data-value="12024"]')
        assert page.evaluate("[document.activeElement.id, document.activeElement.selectionStart]") == ["field-batch", 2]
        assert "batch=12024" in page.url and "part=" not in page.url
        assert page.get_attribute("#accumulation-notes", "open") is not None, "what was folded out stays so"
        assert "Safe micro-batch: 35" in page.text_content("#announcement")
        page.reload()
        assert page.input_value("#field-batch") == "12024"


def test_many_keys_are_one_question(browser: Any, server: Server) -> None:
    with server.running() as address, tab(browser, address) as page:
        page.focus("#field-batch")
        page.keyboard.press("End")
        page.keyboard.type("0000")
        page.wait_for_selector(f'{BATCH}[data-value="10240000"]')
        assert len([query for query in server.asked if "part=results" in query]) == 1


def test_a_late_answer_does_not_replace_a_newer_one(browser: Any, server: Server) -> None:
    server.delays["batch=2048&"] = 1.5
    with server.running() as address, tab(browser, address) as page:
        page.fill("#field-batch", "2048")
        with page.expect_request(lambda request: "batch=2048&" in request.url):
            pass
        page.fill("#field-batch", "4096")
        page.wait_for_selector(f'{BATCH}[data-value="4096"]')
        page.wait_for_timeout(2000)
        assert page.get_attribute(BATCH, "data-value") == "4096"
        assert "batch=4096" in page.url


def test_errors_stand_beside_their_fields_and_go_when_they_are_mended(browser: Any, server: Server) -> None:
    with server.running() as address, tab(browser, address) as page:
        page.fill("#field-heads", "7")
        page.wait_for_selector('#field-heads[aria-invalid="true"]')
        assert "must divide" in page.text_content("#error-heads")
        page.click('#errors a[href="#field-heads"]')
        assert page.evaluate("document.activeElement.id") == "field-heads"
        page.keyboard.press("Control+A")
        page.keyboard.type("8")
        page.wait_for_selector("#field-heads:not([aria-invalid])")
        assert page.text_content("#error-heads") == ""
        assert page.query_selector("#errors") is None


def test_a_server_that_fails_is_told_and_the_next_answer_takes_it_back(browser: Any, server: Server) -> None:
    with server.running() as address, tab(browser, address) as page:
        server.is_broken = True
        page.fill("#field-batch", "2048")
        page.wait_for_selector("#failure:not(:empty)")
        assert "503" in page.text_content("#failure") and page.get_attribute(BATCH, "data-value") == "1024"
        server.is_broken = False
        page.fill("#field-batch", "4096")
        page.wait_for_selector(f'{BATCH}[data-value="4096"]')
        assert page.text_content("#failure") == ""


def test_it_works_without_a_script(browser: Any, server: Server) -> None:
    with server.running() as address, tab(browser, address, java_script_enabled=False) as page:
        page.fill("#field-batch", "100")
        page.click("#fields-batch-and-devices summary")
        page.fill("#field-micro", "48")
        page.click("text=Calculate")
        assert page.input_value("#field-batch") == "100" and page.input_value("#field-micro") == "48"
        assert "cannot be split exactly" in page.text_content("#error-batch")
        assert page.get_attribute("#field-batch", "aria-invalid") == "true"
        page.click("text=GPT-2")
        assert page.input_value("#field-sequence") == "1024" and page.input_value("#field-batch") == "100"
        assert not page.is_visible("button.copy")


def test_the_keyboard_alone_fills_in_the_form_and_copies_a_command(browser: Any, server: Server) -> None:
    with server.running() as address:
        permissions = ["clipboard-read", "clipboard-write"]
        with tab(browser, address, permissions=permissions) as page:
            reached = _tabbed_to(page, "field-parameters")
            page.keyboard.press("Control+A")
            page.keyboard.type("50M")
            page.wait_for_selector('[data-part="memory"] [data-key="fixed_bytes"][data-value="800000000"]')
            reached += _tabbed_to(page, "field-checkpointing")
            page.keyboard.press("Space")
            page.wait_for_selector('#memory code:has-text("--checkpointing")')
            page.focus("#memory button.copy")
            page.keyboard.press("Enter")
            page.wait_for_selector('#announcement:text-is("Copied")', state="attached")
            command = page.text_content("#memory code")
            assert page.evaluate("navigator.clipboard.readText()") == command
            assert "--parameters 50M" in command and "--checkpointing" in command
            assert "field-memory_gib" in reached


def _tabbed_to(page: Any, wanted: str) -> list[str]:
    """Press Tab until an element is focused; return the ids that were passed."""
    passed: list[str] = []
    while wanted not in passed:
        assert len(passed) < 60, passed
        page.keyboard.press("Tab")
        passed.append(page.evaluate("document.activeElement.id"))
    return passed


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_keeps_anyone_from_reading_it(browser: Any, server: Server, width: int, scheme: str) -> None:
    options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    with server.running() as address:
        context = browser.new_context(**options)
        page = context.new_page()
        for query in ("", "?parameters=70B&memory_gib=24&layers=x&batch=100&micro=48&foo=1"):
            page.goto(f"{address}{query}")
            page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert (grave_findings(page), overflow(page)) == ([], 0)
            if width == 390:
                assert page.evaluate(TOO_LOW) == []
        context.close()


TOO_LOW = """[...document.querySelectorAll('input[type=text], select, button, summary, .presets a')]
    .filter(one => one.offsetHeight && one.offsetHeight < 44).map(one => one.outerHTML)"""
