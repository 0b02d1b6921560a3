"""How large the page of a study is and what it takes to draw, at 40 trials and at 4,000.

Drawing is from the study's picture to the page as text, within one process; beside it stands what it takes to read the
study and to answer. Bars: 0.4 MB at 40 trials, 1.5 MB and 0.3 s at 4,000. Run: python tests/benchmarks/page_size.py
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from bssearch.commands.report import picture_of
from bssearch.pages.html import html_page
from bssearch.pages.page import page_of
from bssearch.storage.repository import open_store
from tests.benchmarks.harness import script, seconds_of
from tests.benchmarks.query_scale import fill

OBSERVATIONS = 20
RUNS = 9
SIZE_BARS = {40: 0.4e6, 4000: 1.5e6}
SECONDS_BAR = 0.3


def median_seconds(work: Callable[[], object]) -> float:
    """Return the median of several runs' seconds, the first left out."""
    return statistics.median([seconds_of(work) for _ in range(RUNS + 1)][1:])


def main() -> bool:
    """Measure and print; return 1 above a bar."""
    is_met = True
    with tempfile.TemporaryDirectory() as folder:
        for trials, size_bar in SIZE_BARS.items():
            url = f"sqlite:///{Path(folder) / str(trials)}.db"
            fill(url, trials, OBSERVATIONS)
            with open_store(url) as store:
                answering = median_seconds(lambda store=store: picture_of(store, "toy"))  # type: ignore[misc]
                picture = picture_of(store, "toy")
            drawing = median_seconds(lambda picture=picture: html_page(page_of(picture)))  # type: ignore[misc]
            size = len(html_page(page_of(picture)).encode())
            is_met = is_met and size <= size_bar and drawing <= SECONDS_BAR
            print(
                f"{trials:,} trials: {size / 1e6:.3f} MB (bar {size_bar / 1e6:g}), drawn in {drawing:.3f} s "
                f"(bar {SECONDS_BAR:g}), {drawing / answering:.2f} × the {answering:.3f} s of reading and answering"
            )
    return is_met


if __name__ == "__main__":
    script(main, __doc__)
