"""What a study costs on a local Ray, beside the same study in worker processes: the wall time of the whole command.

The digits study as it is shipped, with two slots; but its 60 trials are random and none is pruned, so that both
executors search the same configurations with the same seeds. With --search-only no run is confirmed either: in a
confirmation one slot trains at a time, and Ray has the other core. The runs alternate, and begin with one executor and
the other in turn. The start is what passes until the study has been made, with Ray's own start in it; it costs the same
however long the study is.

Bar: the median of the ratios is at most 1.15.
Run: python tests/benchmarks/ray_overhead.py [--pairs 4] [--trials 60] [--search-only]
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
from dataclasses import dataclass

from tests.benchmarks.harness import script

BAR = 1.15
SLOTS = 2


@dataclass(frozen=True)
class Run:
    """The wall seconds of a command, and of its start."""

    seconds: float
    start: float


def run(executor: str, trials: int, seed: int, *, search_only: bool) -> Run:
    """Run the digits study from nothing on an executor."""
    changes = {
        "executor.name": executor,
        "executor.slots": SLOTS,
        "sampler.name": "random",
        "pruner.name": "none",
        "budget.trials": trials,
        "seed": seed,
        **({"confirm.runs": 0} if search_only else {}),
    }
    options = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-m", "bssearch", "run", "digits", *options, "--db", f"sqlite:///{folder}/study.db"],
            cwd=folder,
            env=os.environ | {"BSSEARCH_STATE_DIR": folder},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            lines, start = [], 0.0
            for line in process.stderr:
                lines.append(line)
                if line.startswith("new study"):
                    start = time.perf_counter() - began
        if process.returncode:
            raise SystemExit("".join(lines))
        return Run(time.perf_counter() - began, start)


def main(pairs: int = 4, trials: int = 60, search_only: bool = False) -> bool:
    """Measure pairs and print each; return False above the bar."""
    ratios, after_start = [], []
    for pair in range(pairs):
        order = ("local", "ray") if pair % 2 == 0 else ("ray", "local")
        found = {executor: run(executor, trials, pair, search_only=search_only) for executor in order}
        local, ray = found["local"], found["ray"]
        ratios.append(ray.seconds / local.seconds)
        after_start.append((ray.seconds - ray.start) / (local.seconds - local.start))
        seconds = ", ".join(f"{name} {one.seconds:.1f} s (start {one.start:.1f})" for name, one in found.items())
        print(f"pair {pair + 1}: {seconds}: {ratios[-1]:.3f}, without the start {after_start[-1]:.3f}", flush=True)
    ratio = statistics.median(ratios)
    print(f"median of the ratios {ratio:.3f} (bar {BAR}), without the start {statistics.median(after_start):.3f}")
    return ratio <= BAR


if __name__ == "__main__":
    script(main, __doc__)
