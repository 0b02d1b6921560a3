"""What ``bssearch report --html`` takes on a study of 4,000 trials and 290,000 observations, as a whole process.

Bars: 5 s of wall time (median), 1 GB of peak memory, an HTML file of at most 1.5 MB. Run:
python tests/benchmarks/report_scale.py
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.harness import script
from tests.benchmarks.query_scale import fill

TRIALS, OBSERVATIONS = 4000, 73
RUNS = 5
SECONDS_BAR, MEMORY_BAR, SIZE_BAR = 5.0, 1e9, 1.5e6


def report(url: str, page: Path) -> tuple[float, int]:
    """Write the page; return the seconds and the peak resident bytes of the process."""
    command = [sys.executable, "-m", "bssearch.cli.app", "report", "toy", "--db", url, "--html", str(page)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def main() -> bool:
    """Measure and print; return 1 above a bar."""
    with tempfile.TemporaryDirectory() as folder:
        url, page = f"sqlite:///{folder}/study.db", Path(folder) / "report.html"
        print(f"{TRIALS:,} trials, {fill(url, TRIALS, OBSERVATIONS):,} observations")
        runs = [report(url, page) for _ in range(RUNS)]
        size = page.stat().st_size
    seconds, peak = statistics.median(one for one, _ in runs), max(one for _, one in runs)
    slowest = max(one for one, _ in runs)
    print(f"{seconds:.2f} s (median of {RUNS}, slowest {slowest:.2f}); bar {SECONDS_BAR:g}")
    print(f"{peak / 1e6:.0f} MB peak; bar {MEMORY_BAR / 1e6:.0f}")
    print(f"{size / 1e6:.2f} MB of HTML; bar {SIZE_BAR / 1e6:g}")
    return seconds <= SECONDS_BAR and peak <= MEMORY_BAR and size <= SIZE_BAR


if __name__ == "__main__":
    script(main, __doc__)
