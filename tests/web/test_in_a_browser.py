"""The pages in Chromium: content, clicks, live updates and accessibility."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bssearch.records import TrialOutcome, TrialState
from bssearch.storage.repository import open_store
from tests.browser import SCHEMES, WIDTHS, browser, grave_findings, overflow, page_of
from tests.cli.task import bssearch as run
from tests.factories import make_curve
from tests.schema import execute
from tests.web.conftest import make_study
from tests.web.serving import Server, served
from tests.web.test_pages import running_study

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]
pytestmark = pytest.mark.slow

ALL_PAGES = (
    "/studies",
    "/studies?device=none",
    "/studies/task",
    "/studies/task/trials",
    "/studies/task/trials/1",
    "/compare",
    "/compare?study=task&study=other",
    "/best",
    "/best?objective=time_to_target",
    "/calculator",
)


@pytest.fixture(scope="module")
def address(searched: str) -> Iterator[str]:
    with served(searched) as address:
        yield address


@pytest.mark.parametrize(("width", "scheme"), [*zip(WIDTHS, SCHEMES, strict=True)])
def test_no_page_has_a_grave_fault_or_is_too_wide(browser: Browser, address: str, width: int, scheme: str) -> None:
    found: dict[str, object] = {}
    with page_of(browser, width=width, scheme=scheme) as page:
        for path in ALL_PAGES:
            page.goto(f"{address}{path}")
            found[path] = grave_findings(page), overflow(page)
    assert found == {path: ([], 0) for path in ALL_PAGES}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_longest_name_makes_no_page_too_wide(browser: Browser, tmp_path: Path, width: int) -> None:
    name, url = "W" * 100, f"sqlite:///{tmp_path / 'long.db'}"
    for study in (name, "short"):
        make_study(url, tmp_path, study)
    about = (f"/studies/{name}", f"/studies/{name}/trials", f"/studies/{name}/trials/1", f"/studies/{name}x")
    across = ("/studies", f"/compare?study={name}&study=short", "/best?objective=time_to_target")
    found = {}
    with served(url) as server, page_of(browser, width=width, allowed="404") as page:
        for path in (*about, *across):
            page.goto(f"{server}{path}")
            found[path] = overflow(page)
    assert found == dict.fromkeys((*about, *across), 0)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_trial_of_the_list_takes_one_line(browser: Browser, address: str, width: int) -> None:
    with tab(browser, f"{address}/studies/task/trials?state=reached", width=width) as page:
        heights = page.locator("tbody tr").evaluate_all("rows => rows.map(row => row.offsetHeight)")
        assert max(heights) < 1.5 * page.locator("thead tr").evaluate("row => row.offsetHeight")


def test_the_pages_lead_to_each_other_by_the_keyboard_alone(browser: Browser, address: str) -> None:
    with tab(browser, f"{address}/") as page:
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "bssearch"
        page.get_by_role("link", name="task", exact=True).focus()
        page.keyboard.press("Enter")
        page.get_by_role("link", name="Trials", exact=True).focus()
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Trials of task").wait_for()


def test_the_pages_work_without_scripts(browser: Browser, address: str) -> None:
    with tab(browser, f"{address}/studies/task/trials", java_script_enabled=False) as page:
        page.get_by_label("State").select_option("reached")
        page.get_by_role("button", name="Show").click()
        assert "state=reached" in page.url
        assert page.locator("tbody tr").count() > 0


EVIL = "\"'><img src=x onerror=window.PWNED=1></title></svg><script>window.PWNED=1</script>"


def test_a_stored_text_is_no_markup_and_no_script(browser: Browser, tmp_path: Path) -> None:
    file, report = tmp_path / "evil.db", tmp_path / "report.html"
    make_study(url := f"sqlite:///{file}", tmp_path, "task")
    execute(file, "UPDATE bss_trial SET reason = ?, warnings = json_array(?)", [EVIL, EVIL])
    execute(file, "UPDATE bss_trial SET parameters = json_set(parameters, ?, ?)", ['$."<img src=x>"', EVIL])
    execute(file, "UPDATE bss_environment SET device_name = ?, host = ?, git_revision = ?", [EVIL, EVIL, EVIL])
    assert run("report", "task", "--html", report, "--db", url, cwd=tmp_path).returncode == 0
    shown = 0
    with served(url) as server, page_of(browser, allowed="404") as page:
        for address in (report.as_uri(), *(f"{server}{path}" for path in ALL_PAGES)):
            page.goto(address)
            shown += "&lt;img src=x" in page.content()
            assert (page.locator('img[src="x"]').count(), page.evaluate("window.PWNED")) == (0, None), address
    assert shown > 3


def reached(url: str, number: int) -> None:
    """Finish a trial at the target."""
    done = TrialOutcome(
        state=TrialState.REACHED,
        reason="accuracy = 0.9",
        steps=5,
        train_seconds=0.5,
        time_to_target_s=0.5,
        steps_to_target=5,
        final_metric=0.9,
        best_metric=0.9,
    )
    with open_store(url) as store:
        store.trials.finish("toy", number, done, steps_x_step_time_s=None)


class TestLive:
    def test_a_running_study_is_updated(self, browser: Browser, empty: str) -> None:
        number = running_study(empty)
        with served(empty) as server, tab(browser, f"{server}/studies/toy") as page:
            page.get_by_role("heading", name="No answer yet").wait_for()
            page.get_by_role("link", name=str(number), exact=True).focus()
            with open_store(empty) as store:
                [newest] = make_curve(*((0.1 * n, 0.2 * n) for n in range(1, 5)))[3:]
                store.trials.append_observations("toy", [(number, newest)])
            page.get_by_role("cell", name="0.8", exact=True).wait_for(timeout=10_000)
            assert page.evaluate("document.activeElement.textContent") == str(number)  # the reader's place
            reached(empty, number)
            page.get_by_role("heading", level=1, name="Train with batch").wait_for(timeout=10_000)
            assert "reaches accuracy" in (page.locator("#announced").text_content() or "")

    def test_the_first_answer_leaves_the_focus_where_it_was(self, browser: Browser, empty: str) -> None:
        number = running_study(empty)
        with served(empty) as server, tab(browser, f"{server}/studies/toy") as page:
            page.get_by_role("link", name="Trials", exact=True).focus()
            reached(empty, number)
            page.get_by_role("heading", level=1, name="Train with batch").wait_for(timeout=30_000)
            assert page.evaluate("document.activeElement.textContent") == "Trials"

    def test_an_unchanged_page_is_not_replaced(self, browser: Browser, empty: str) -> None:
        running_study(empty)
        answers: list[int] = []
        with served(empty) as server, tab(browser, f"{server}/studies/toy") as page:
            asked = f"{server}/studies/toy"  # the icon may come late
            page.on("response", lambda one: answers.append(one.status) if one.url == asked else None)
            page.evaluate("document.querySelector('#progress').dataset.mark = 'same'")
            while len(answers) < 2:
                page.wait_for_timeout(100)
            assert page.locator("#progress").get_attribute("data-mark") == "same"
        assert set(answers) == {304}

    def test_opened_details_stay_open(self, browser: Browser, empty: str) -> None:
        running_study(empty)
        with served(empty) as server, tab(browser, f"{server}/studies") as page:
            page.locator("#narrow summary").click()
            page.get_by_label("Device").fill("H1")
            running_study(empty, "second")
            page.get_by_role("link", name="second").wait_for(timeout=15_000)
            assert page.get_by_label("Device").input_value() == "H1"
            assert page.locator("#narrow").get_attribute("open") is not None

    def test_the_page_stays_and_says_so_if_its_server_is_gone(self, browser: Browser, empty: str) -> None:
        running_study(empty)
        with page_of(browser, allowed="Failed to load resource") as page:
            with served(empty) as server:
                page.goto(f"{server}/studies/toy")
            page.get_by_role("alert").filter(has_text="does not answer").wait_for(timeout=10_000)
            assert page.get_by_role("heading", name="No answer yet").is_visible()

    def test_the_page_says_if_its_database_is_gone_and_recovers(self, browser: Browser, tmp_path: Path) -> None:
        path, away = tmp_path / "team.db", tmp_path / "away.db"
        running_study(f"sqlite:///{path}")
        with served(f"sqlite:///{path}") as server, page_of(browser, allowed="503") as page:
            page.goto(f"{server}/studies/toy")
            path.rename(away)
            page.get_by_role("alert").filter(has_text="no database at").wait_for(timeout=10_000)
            away.rename(path)
            page.get_by_role("alert").wait_for(state="hidden", timeout=10_000)


# The calculator -------------------------------------------------------------------------------------------------------


BATCH = '[data-part="accumulation"] [data-key="batch"]'


@pytest.fixture
def server() -> Server:
    return Server()


@contextmanager
def tab(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    with page_of(browser, **options) as page:
        page.goto(address)
        yield page


def test_results_follow_the_entries_and_the_focus_and_the_caret_stay(browser: Any, server: Server) -> None:
    with server.running() as address, tab(browser, address) as page:
        page.click("#accumulation-notes summary")
        page.focus("#field-batch")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.keyboard.type("2")
        page.wait_for_selector(f'{BATCH}[data-value="12024"]')
        assert page.evaluate("[document.activeElement.id, document.activeElement.selectionStart]") == ["field-batch", 2]
        assert "batch=12024" in page.url and "part=" not in page.url
        assert page.get_attribute("#accumulation-notes", "open") is not None, "opened details stay open"
        assert "Safe micro-batch: 35" in page.text_content("#announcement")
        page.reload()
        assert page.input_value("#field-batch") == "12024"


def test_many_keys_are_one_request(browser: Any, server: Server) -> None:
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


def test_errors_are_shown_beside_their_fields_until_they_are_corrected(browser: Any, server: Server) -> None:
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


def test_a_failure_of_the_server_is_shown_until_the_next_answer(browser: Any, server: Server) -> None:
    with server.running() as address, tab(browser, address, allowed="503") as page:
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
        page.get_by_role("button", name="Calculate").click()
        assert page.input_value("#field-batch") == "100" and page.input_value("#field-micro") == "48"
        assert "must be a multiple of" in page.text_content("#error-batch")
        assert page.get_attribute("#field-batch", "aria-invalid") == "true"
        page.click("text=GPT-2")
        assert page.input_value("#field-sequence") == "1024" and page.input_value("#field-batch") == "100"
        assert not page.is_visible("button.copy")


def test_the_keyboard_alone_fills_in_the_form_and_copies_a_command(browser: Any, server: Server) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    with server.running() as address, tab(browser, address, permissions=permissions) as page:
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
    """Press Tab until an element is focused; return the focused ids."""
    passed: list[str] = []
    while wanted not in passed:
        assert len(passed) < 60, passed
        page.keyboard.press("Tab")
        passed.append(page.evaluate("document.activeElement.id"))
    return passed


@pytest.mark.parametrize(("width", "scheme"), [*zip(WIDTHS, SCHEMES, strict=True)])
def test_the_calculator_is_accessible(browser: Any, server: Server, width: int, scheme: str) -> None:
    with server.running() as address, page_of(browser, width=width, scheme=scheme) as page:
        for query in ("", "?parameters=70B&memory_gib=24&layers=x&batch=100&micro=48&foo=1"):
            page.goto(f"{address}{query}")
            page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert (grave_findings(page), overflow(page)) == ([], 0)
            if width == 390:
                assert page.evaluate(TOO_LOW) == []


TOO_LOW = """[...document.querySelectorAll('input[type=text], select, button, summary, .presets a')]
    .filter(one => one.offsetHeight && one.offsetHeight < 44).map(one => one.outerHTML)"""
