"""How quickly ``bssearch --help`` starts, over ``python -c "import typer"``: ratio of medians, interleaved.

Bar: at most 4, and neither torch, optuna nor pandas imported. Run: python tests/benchmarks/startup.py
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import statistics
import subprocess
import sys

from tests.benchmarks.harness import script, seconds_of

BAR = 4.0
RUNS = 20
COMMANDS = {
    "import typer": [sys.executable, "-c", "import typer"],
    "bssearch --help": [sys.executable, "-m", "bssearch.cli.app", "--help"],
}


def seconds(command: list[str]) -> float:
    return seconds_of(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))


def main() -> bool:
    for command in COMMANDS.values():
        seconds(command)
    times = {name: [] for name in COMMANDS}  # type: dict[str, list[float]]
    for _ in range(RUNS):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    base, ours = (statistics.median(times[name]) for name in COMMANDS)
    ratios = sorted(one / other for one, other in zip(*reversed(list(times.values())), strict=True))
    print(f"import typer {base * 1e3:.0f} ms, bssearch --help {ours * 1e3:.0f} ms (medians of {RUNS})")
    print(f"ratio {ours / base:.2f} (pairs: {ratios[1]:.2f} to {ratios[-2]:.2f}); bar {BAR:g}")
    code = "import sys; sys.argv = ['bssearch', '--help']; from bssearch.cli.app import app; app(standalone_mode=False)"
    check = code + "\nprint('heavy:', [m for m in ('torch', 'optuna', 'pandas') if m in sys.modules])"
    heavy = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True)
    last = heavy.stdout.strip().splitlines()[-1]
    print(last)
    return ours / base <= BAR and last == "heavy: []"


if __name__ == "__main__":
    script(main, __doc__)
