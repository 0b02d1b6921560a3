"""Size of a study's page and the time to write it, at 40 trials and at 4,000 (292,000 observations).

Drawing is the time from the study's picture to the page as text, in one process, compared with the time to read and
answer the study. The report is a process of ``bssearch report --html``, with its peak memory. Bars: 0.4 MB at 40
trials; at 4,000 trials 1.5 MB; 0.3 s to draw, 5 s and 1 GB for the report. Run: python tests/benchmarks/page_size.py
"""

if not __package__:
    __import__("from_clone")

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bssearch.commands.report import picture_of
from bssearch.figures.html import html_page
from bssearch.figures.page import page_of
from bssearch.storage.repository import open_store
from tests.benchmarks.harness import script, seconds_of
from tests.benchmarks.query_scale import fill

OBSERVATIONS = 73
DRAWINGS, REPORTS = 9, 5
SIZE_BARS = {40: 0.4e6, 4000: 1.5e6}
DRAWING_BAR, REPORT_BAR, MEMORY_BAR = 0.3, 5.0, 1e9


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


def measured(trials: int, folder: Path) -> bool:
    """Print the figures of a study of some trials; return whether its bars are met."""
    url, page = f"sqlite:///{folder / str(trials)}.db", folder / f"{trials}.html"
    print(f"{trials:,} trials, {fill(url, trials, OBSERVATIONS):,} observations")
    with open_store(url) as store:
        answering = median_seconds(lambda: picture_of(store, "toy"))
        picture = picture_of(store, "toy")
    drawing = median_seconds(lambda: html_page(page_of(picture)))
    print(f"  drawn in {drawing:.3f} s (bar {DRAWING_BAR:g}), {drawing / answering:.2f} × reading and answering")
    times, peaks = zip(*(report(url, page) for _ in range(REPORTS)), strict=True)
    seconds, peak, size = statistics.median(times), max(peaks), page.stat().st_size
    print(f"  report {seconds:.2f} s (median of {REPORTS}, slowest {max(times):.2f}; bar {REPORT_BAR:g})")
    print(f"  {peak / 1e6:.0f} MB of memory (bar {MEMORY_BAR / 1e6:.0f})")
    print(f"  {size / 1e6:.3f} MB of HTML (bar {SIZE_BARS[trials] / 1e6:g})", flush=True)
    is_small = size <= SIZE_BARS[trials] and peak <= MEMORY_BAR
    return is_small and drawing <= DRAWING_BAR and seconds <= REPORT_BAR


def main() -> bool:
    """Measure both sizes; return False above a bar."""
    with tempfile.TemporaryDirectory() as folder:
        return all([measured(trials, Path(folder)) for trials in SIZE_BARS])


if __name__ == "__main__":
    script(main, __doc__)
