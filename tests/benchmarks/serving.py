"""The pages of `bssearch serve` at 4,000 trials: the first paint of a study, and the memory of the server.

Chromium asks a separate server process on loopback. The browser measures the first paint from the start of the
navigation to the first contents: of a new page (a trial has just ended) and of a stored page. Memory is the process's
resident set after several concurrent readers have asked for all pages many times.

Bars: first paint of a study of 4,000 trials at most 1 s; memory at most 300 MB. Run: python tests/benchmarks/serving.py
"""

if not __package__:
    __import__("from_clone")

import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
from playwright.sync_api import Browser, sync_playwright

from bssearch.records import Phase
from bssearch.storage.repository import open_store
from tests.benchmarks.harness import script, verdict
from tests.benchmarks.query_scale import add_trial, fill

PAINT_BAR_S, MEMORY_BAR_MB = 1.0, 300.0
VISITS = 15
ROUNDS, READERS = 40, 8
TRIALS = 4000
PATHS = ("/studies", "/studies/toy", "/studies/toy/trials", "/studies/toy/trials/7", "/compare", "/calculator")
PAINT = "performance.getEntriesByName('first-contentful-paint').map((one) => one.startTime / 1000)[0]"


@contextmanager
def serving(url: str) -> Iterator[tuple[psutil.Process, str]]:
    """Yield the process of a server and its address."""
    command = [sys.executable, "-m", "bssearch", "serve", "--db", url, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = next(line.strip() for line in process.stderr if line.startswith("http://"))
        try:
            yield psutil.Process(process.pid), address.rstrip("/")
        finally:
            process.terminate()


def paint_seconds(browser: Browser, address: str) -> float:
    """Return the seconds to the first paint of the study's page, in a new browser."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{address}/studies/toy")
    seconds: float | None = None
    while seconds is None:  # Playwright's own waiting is JavaScript that the page's policy refuses
        seconds = page.evaluate(PAINT)
    context.close()
    return seconds


def visit(address: str) -> None:
    """Ask for every page, as several concurrent readers."""

    def ask(path: str) -> None:
        with urllib.request.urlopen(f"{address}{path}") as answer:
            answer.read()

    with ThreadPoolExecutor(READERS) as readers:
        list(readers.map(ask, PATHS * ROUNDS))


def measured(browser: Browser, url: str) -> tuple[list[float], list[float], float]:
    """Return the first paints of new and of stored pages, and the server's memory in MB (10⁶ bytes) at the end."""
    rng = random.Random(1)
    with serving(url) as (process, address):
        paint_seconds(browser, address)  # what is imported at first is no matter of the page
        new, kept = [], []
        for _ in range(VISITS):
            with open_store(url) as store:  # the study's page is another; its answer is not made, as while many run
                add_trial(store, "toy", 32, rng.uniform(0.01, 1.0), Phase.SEARCH, 72, rng)
            new.append(paint_seconds(browser, address))
            kept.append(paint_seconds(browser, address))
        visit(address)
        return new, kept, process.memory_info().rss / 1e6


def main() -> bool:
    """Print the figures; return whether the bars are met."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        url = f"sqlite:///{Path(folder) / 'study.db'}"
        fill(url, TRIALS, 72)
        new, kept, memory = measured(browser, url)
        browser.close()
    paint = statistics.median(new)
    print(
        f"first paint of a new page {paint:.2f} s (at most {max(new):.2f}), of a kept one {statistics.median(kept):.2f}"
    )
    print(f"memory {memory:.0f} MB")
    print(f"bars: first paint {PAINT_BAR_S:g} s, memory {MEMORY_BAR_MB:g} MB")
    return verdict(paint <= PAINT_BAR_S and memory <= MEMORY_BAR_MB)


if __name__ == "__main__":
    script(main, __doc__)
