"""How ``bssearch best`` and a study's page scale: at 4,000 trials (292,000 observations) and at 40.

The time of ``best`` is of whole processes, interleaved; bar: a ratio of medians of at most 1.5. Drawing a page is the
time from the study's picture to the page as text, in one process, compared with the time to read and answer the study.
The report is a process of ``bssearch report --html``, with its peak memory. Bars: 0.4 MB at 40 trials, 1.5 MB at 4,000;
0.3 s to draw, 5 s and 1 GB for the report. Run: python tests/benchmarks/query_scale.py

With ``--browser``, Chromium asks a separate process of ``bssearch serve`` on loopback for the pages at 4,000 trials.
The browser measures the first paint from the start of the navigation to the first contents: of a new page (a trial has
just ended) and of a stored page. Memory is the process's resident set after several concurrent readers have asked for
all pages many times. Bars: first paint at most 1 s; memory at most 300 MB.
"""

if not __package__:
    __import__("from_clone")

import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from bssearch.commands.report import picture_of
from bssearch.figures.html import html_page
from bssearch.figures.page import page_of
from bssearch.records import Configuration, Lease, Observation, Phase, TrialOutcome, TrialState
from bssearch.search.finding import save_finding
from bssearch.storage.repository import Store, open_store
from tests.benchmarks.harness import script, seconds_of, timed_in_turns, verdict
from tests.factories import make_environment, make_plan, make_probe, make_spec, not_none, store_study

BAR = 1.5
RUNS = 15
OBSERVATIONS = 73
DRAWINGS, REPORTS = 9, 5
SIZE_BARS = {40: 0.4e6, 4000: 1.5e6}  # bytes of a page, by trials
DRAWING_BAR, REPORT_BAR, MEMORY_BAR = 0.3, 5.0, 1e9
LADDER = (8, 16, 32, 64, 128)


def fill(url: str, trials: int, observations: int) -> int:
    """Store a study of search trials, and confirmation runs for every tenth; return the number of observations."""
    spec, environment, rng = make_spec(), make_environment(), random.Random(0)
    with open_store(url) as store:
        store_study(store, spec, environment)
        for size in LADDER:
            store.probes.add_step_time(spec.name, environment, make_probe(size), 1)
        for index in range(trials):
            confirms = index % 10 == 9
            size = 32 if confirms else rng.choice(LADDER)
            rate = 0.1 if confirms else rng.uniform(0.01, 1.0)
            add_trial(store, spec.name, size, rate, Phase.CONFIRM if confirms else Phase.SEARCH, observations, rng)
        save_finding(store, spec.name)  # as a driver does when a trial ends
        return store.trials.observation_count(spec.name)


def add_trial(
    store: Store, study: str, size: int, rate: float, phase: Phase, observations: int, rng: random.Random
) -> None:
    """Store one trial from its start to its end."""
    seconds = rng.lognormvariate(0.0, 0.2) * (1 + abs(size - 32) / 32)
    plan = make_plan(
        configuration=Configuration(batch_size=size, micro_batch_size=size, learning_rate=rate),
        sampled={"reference_learning_rate": rate, "weight_decay": 0.0, "dropout": 0.1},
        phase=phase,
        seed=rng.randrange(2**31),
    )
    lease = Lease(owner="benchmark/1/1.00/x", seconds=60.0)
    number = not_none(store.trials.start(study, plan, environment=make_environment(), lease=lease)).number
    curve = [
        Observation(
            step=5 * n,
            samples=5 * n * size,
            train_seconds=seconds * n / observations,
            metric=0.9 * n / observations,
            loss=1.0,
            learning_rate=rate,
        )
        for n in range(observations)
    ]
    store.trials.append_observations(study, [(number, observation) for observation in curve])
    outcome = TrialOutcome(
        state=TrialState.REACHED,
        reason="accuracy = 0.9",
        steps=5 * observations,
        train_seconds=seconds,
        wall_seconds=seconds,
        time_to_target_s=seconds,
        steps_to_target=5 * observations,
        final_metric=0.9,
        best_metric=0.9,
    )
    store.trials.finish(study, number, outcome, steps_x_step_time_s=seconds)


def best(url: str) -> None:
    """Run ``bssearch best`` as a whole process."""
    command = [sys.executable, "-m", "bssearch", "best", "toy", "--db", url, "--format", "json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def median_seconds(work: Callable[[], object]) -> float:
    """Return the median seconds of several runs, without the first."""
    return statistics.median([seconds_of(work) for _ in range(DRAWINGS + 1)][1:])


def report(url: str, page: Path) -> tuple[float, int]:
    """Write the page; return the seconds and the peak resident bytes of the process."""
    command = [sys.executable, "-m", "bssearch", "report", "toy", "--db", url, "--html", str(page)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def page_is_small(url: str, page: Path, size_bar: float) -> bool:
    """Print the figures of a study's page; return whether its bars are met."""
    with open_store(url) as store:
        answering = median_seconds(lambda: picture_of(store, "toy"))
        picture = picture_of(store, "toy")
    drawing = median_seconds(lambda: html_page(page_of(picture)))
    print(f"  drawn in {drawing:.3f} s (bar {DRAWING_BAR:g}), {drawing / answering:.2f} × reading and answering")
    times, peaks = zip(*(report(url, page) for _ in range(REPORTS)), strict=True)
    seconds, peak, size = statistics.median(times), max(peaks), page.stat().st_size
    print(f"  report {seconds:.2f} s (median of {REPORTS}, slowest {max(times):.2f}; bar {REPORT_BAR:g})")
    print(f"  {peak / 1e6:.0f} MB of memory (bar {MEMORY_BAR / 1e6:.0f})")
    print(f"  {size / 1e6:.3f} MB of HTML (bar {size_bar / 1e6:g})", flush=True)
    return size <= size_bar and peak <= MEMORY_BAR and drawing <= DRAWING_BAR and seconds <= REPORT_BAR


# The served pages -----------------------------------------------------------------------------------------------------

PAINT_BAR_S, MEMORY_BAR_MB = 1.0, 300.0
VISITS = 15
ROUNDS, READERS = 40, 8
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


def paint_seconds(browser: Any, address: str) -> float:
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


def measured(browser: Any, url: str) -> tuple[list[float], list[float], float]:
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


def is_served_well() -> bool:
    """Print the figures of the served pages; return whether the bars are met."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        url = f"sqlite:///{Path(folder) / 'study.db'}"
        fill(url, max(SIZE_BARS), 72)
        new, kept, memory = measured(browser, url)
        browser.close()
    paint = statistics.median(new)
    print(
        f"first paint of a new page {paint:.2f} s (at most {max(new):.2f}), of a kept one {statistics.median(kept):.2f}"
    )
    print(f"memory {memory:.0f} MB")
    print(f"bars: first paint {PAINT_BAR_S:g} s, memory {MEMORY_BAR_MB:g} MB")
    return verdict(paint <= PAINT_BAR_S and memory <= MEMORY_BAR_MB)


def main(browser: Annotated[bool, typer.Option("--browser", help="measure the served pages")] = False) -> bool:
    """Measure and print; return False above a bar."""
    if browser:
        return is_served_well()
    with tempfile.TemporaryDirectory() as folder:
        urls = {trials: f"sqlite:///{Path(folder) / f'{trials}.db'}" for trials in SIZE_BARS}
        for trials, url in urls.items():
            print(f"{trials:,} trials, {fill(url, trials, OBSERVATIONS):,} observations")
        times = timed_in_turns({str(trials): partial(best, url) for trials, url in urls.items()}, RUNS)
        small, large = map(statistics.median, times.values())
        print(f"best: {small * 1e3:.0f} and {large * 1e3:.0f} ms (medians of {RUNS})")
        print(f"ratio {large / small:.2f}; bar {BAR:g}")
        pages = [page_is_small(url, Path(folder) / f"{trials}.html", SIZE_BARS[trials]) for trials, url in urls.items()]
    return verdict(large / small <= BAR and all(pages))


if __name__ == "__main__":
    script(main, __doc__)
