"""How much code one trial passes through: functions to its first step, and files that a small run executes.

    python tests/benchmarks/trial_path.py [TREE] [--format json]

It runs ``bssearch run digits`` of a checkout (by default this one) with four search trials and every call profiled,
in the driver and in its worker. *Functions to the first step* are the functions of the package on the call stacks of
five moments: the sampler chooses, the trial's row is inserted, the request is sent, the worker reads the request, the
optimizer steps. *Files executed* are the files of the package of which a function or the module's body ran.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("budget.trials=4", "confirm.top=2", "confirm.runs=2", "space.batch_size={low: 32, high: 64}")
NOT_REACHED = 5

# Runs at the start of every Python process of the run: writes what was called when the process ends.
PROFILED = '''
import atexit, json, os, sys, threading

FOLDER, PACKAGE = os.environ["TRIAL_PATH_FOLDER"], os.environ["TRIAL_PATH_PACKAGE"]
called, paths = set(), {}
# The workers are asked to measure step times, too: these are moments of a trial only inside these functions.
INSIDE = {"request is sent": ".submit", "optimizer steps": "train_segment"}


def moment(code):
    """Return which moment of a trial the call of a function is."""
    name, file = code.co_name, code.co_filename
    if name == "choose" and "/samplers/" in file:
        return "sampler chooses"
    if name == "decode_command" and "/executors/" in file:
        return "worker reads"
    if name == "send" and file.endswith("/executors/process.py"):
        return "request is sent"
    if name == "step" and "/torch/optim/" in file:
        return "optimizer steps"
    return None


def stack(frame):
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            yield frame.f_code.co_filename, frame.f_code.co_qualname
        frame = frame.f_back


def profile(frame, event, argument):
    if event != "call":
        return
    code = frame.f_code
    if code.co_filename.startswith(PACKAGE):
        called.add((code.co_filename, code.co_qualname))
    now = moment(code)
    if now is None and code.co_name == "do_execute" and "/sqlalchemy/" in code.co_filename:
        if "INSERT INTO bss_trial " in str(frame.f_locals.get("statement", "")):
            now = "row is inserted"
    if now is not None and now not in paths:
        found = list(stack(frame))
        if any(name.endswith(INSIDE.get(now, "")) for _, name in found):
            paths[now] = found


def write():
    sys.setprofile(None)
    threading.setprofile(None)
    with open(os.path.join(FOLDER, f"{os.getpid()}.json"), "w") as file:
        json.dump({"called": sorted(called), "paths": paths}, file)


atexit.register(write)
threading.setprofile(profile)
sys.setprofile(profile)
_exit = os._exit
os._exit = lambda status: (write(), _exit(status))
'''


def reports(tree: Path) -> Iterator[dict[str, Any]]:
    """Run a small study of a tree and yield what each of its processes has called."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        site.mkdir()
        (site / "sitecustomize.py").write_text(PROFILED)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(site), str(tree)]),
            "TRIAL_PATH_FOLDER": folder,
            "TRIAL_PATH_PACKAGE": str(tree / "bssearch") + os.sep,
        }
        command = [sys.executable, "-m", "bssearch", "run", "digits", "--db", f"sqlite:///{folder}/path.db"]
        command += [word for setting in SMALL for word in ("--set", setting)]
        ended = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.DEVNULL).returncode
        if ended not in (0, NOT_REACHED):
            sys.exit(f"bssearch run ended with {ended}")
        for report in Path(folder).glob("*.json"):
            yield json.loads(report.read_text())


def main() -> None:
    """Print the counts and the functions of each moment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args()
    called: set[tuple[str, str]] = set()
    paths: dict[str, list[tuple[str, str]]] = {}
    for report in reports(options.tree.resolve()):
        called |= {(file, name) for file, name in report["called"]}
        paths |= {now: [(file, name) for file, name in found[::-1]] for now, found in report["paths"].items()}
    way = {one for found in paths.values() for one in found if one[1] != "<module>"}
    counts = {
        "functions_to_first_step": len(way),
        "files_to_first_step": len({file for file, _ in way}),
        "functions_executed": len(called),
        "files_executed": len({file for file, _ in called}),
    }
    if options.format == "json":
        print(json.dumps(counts))
        return
    for now, found in paths.items():
        print(f"{now}:")
        for file, name in found:
            print(f"    {Path(file).relative_to(options.tree.resolve())}:{name}")
    for what, count in counts.items():
        print(f"{what.replace('_', ' '):26}{count:6,}")


if __name__ == "__main__":
    main()
