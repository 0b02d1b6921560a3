"""How ``bssearch best`` and a study's page scale: at 4,000 trials (292,000 observations) and at 40.

The time of ``best`` is of whole processes, interleaved; bar: a ratio of medians of at most 1.5. Drawing a page is the
time from the study's picture to the page as text, in one process, compared with the time to read and answer the study.
The report is a process of ``bssearch report --html``, with its peak memory. Bars: 0.4 MB at 40 trials, 1.5 MB at 4,000;
0.3 s to draw, 5 s and 1 GB for the report. Run: python tests/benchmarks/query_scale.py
"""

if not __package__:
    __import__("from_clone")

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

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


def main() -> bool:
    """Measure and print; return False above a bar."""
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
