"""How quickly ``bssearch --help`` starts, over ``python -c "import typer"``: ratio of medians, interleaved.

Bar: at most 4, and neither torch, optuna nor pandas imported. Run: python tests/benchmarks/startup.py
"""

if not __package__:
    __import__("from_clone")

import statistics
import subprocess
import sys
from functools import partial

from tests.benchmarks.harness import script, timed_in_turns

BAR = 4.0
RUNS = 20
COMMANDS = {
    "import typer": [sys.executable, "-c", "import typer"],
    "bssearch --help": [sys.executable, "-m", "bssearch", "--help"],
}


def main() -> bool:
    work = {
        name: partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
        for name, command in COMMANDS.items()
    }
    times = timed_in_turns(work, RUNS)
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
