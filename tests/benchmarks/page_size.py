"""How large the page of a study is and what it takes to draw, at 40 trials and at 4,000.

Drawing is from the study's picture to the page as text, within one process; beside it stands what it takes to read the
study and to answer. Bars: 0.4 MB at 40 trials, 1.5 MB and 0.3 s at 4,000. Run: python tests/benchmarks/page_size.py
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bssearch.commands.report import picture_of
from bssearch.pages.html import html_page
from bssearch.pages.page import page_of
from bssearch.storage.repository import open_store
from tests.benchmarks.query_scale import fill

OBSERVATIONS = 20
RUNS = 9
SIZE_BARS = {40: 0.4e6, 4000: 1.5e6}
SECONDS_BAR = 0.3


def seconds_of(work: Callable[[], object]) -> float:
    """Return the median of several runs' seconds, the first left out."""
    times = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> int:
    """Measure and print; return 1 above a bar."""
    is_met = True
    with tempfile.TemporaryDirectory() as folder:
        for trials, size_bar in SIZE_BARS.items():
            url = f"sqlite:///{Path(folder) / str(trials)}.db"
            fill(url, trials, OBSERVATIONS)
            with open_store(url) as store:
                answering = seconds_of(lambda store=store: picture_of(store, "toy"))  # type: ignore[misc]
                picture = picture_of(store, "toy")
            drawing = seconds_of(lambda picture=picture: html_page(page_of(picture)))  # type: ignore[misc]
            size = len(html_page(page_of(picture)).encode())
            is_met = is_met and size <= size_bar and drawing <= SECONDS_BAR
            print(
                f"{trials:,} trials: {size / 1e6:.3f} MB (bar {size_bar / 1e6:g}), drawn in {drawing:.3f} s "
                f"(bar {SECONDS_BAR:g}), {drawing / answering:.2f} × the {answering:.3f} s of reading and answering"
            )
    return 0 if is_met else 1


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.exit(main())
