"""Checks the claims of bssearch on one GPU, in three calls of ten minutes.

Run as ``python tests/gpu_evidence.py --out FOLDER --call A``, then with ``--call B`` and ``--call C``. Install
bssearch, its dependencies and pytest first. Pass ``--data-dir`` if Fashion-MNIST is not in its usual places; the script
downloads no data. Each call may run on a new machine. If the folder has the export of call A, calls B and C use its
study. Call A measures step times and runs a study; B trains the batch sizes of other tools; C measures repeatability.

Each section runs in a new process with a limit of seconds; the limits add up to less than the call's minutes. A section
that fails or is late is recorded with its findings and last lines, and the next section starts. ``evidence.json`` is
rewritten after every section and keeps the other calls. Exits 1 if a section failed.

``--device cpu --quick`` runs small versions of all sections on a CPU, to try the script.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # instead of this file's folder, whose packages have the names of other packages

if TYPE_CHECKING:
    from tests.evidence.task import Section

CALLS = ("A", "B", "C")
SPARE_SECONDS = 2.0
"""Seconds before its limit at which a late section prints its traceback."""


def sections_of(call: str) -> tuple[Section, ...]:
    """Sections of a call in order."""
    sections: tuple[Section, ...] = importlib.import_module(f"tests.evidence.call_{call.lower()}").SECTIONS
    return sections


def has_data() -> bool:
    """True if Fashion-MNIST is available without a network."""
    from bssearch.settings import DATA_DIR_VARIABLE, cache_folder
    from bssearch.workloads.fashion_mnist import DEBIAN_FOLDER, FILES

    if os.environ.get(DATA_DIR_VARIABLE):
        return True
    folders = (DEBIAN_FOLDER, cache_folder() / "fashion-mnist")
    return any((folder / f"{FILES[0]}{end}").exists() for folder in folders for end in ("", ".gz"))


def main(given: list[str] | None = None) -> int:
    """Run the sections of a call one after the other, or a single section in this process."""
    from tests.evidence.runner import CALL_SECONDS, START_SECONDS, run_call
    from tests.evidence.task import Task

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the findings")
    parser.add_argument("--call", choices=CALLS, required=True)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with --quick")
    parser.add_argument("--quick", action="store_true", help="small versions, of the digits")
    parser.add_argument("--data-dir", help="the folder with Fashion-MNIST's four files")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="some sections of the call")
    parser.add_argument("--seconds", type=float, default=CALL_SECONDS - START_SECONDS, help="for the whole call")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    sections = sections_of(arguments.call)
    names = [section.name for section in sections]
    if unknown := set(arguments.only or []) - set(names):
        parser.error(f"--only {', '.join(sorted(unknown))}: call {arguments.call} has {', '.join(names)}")
    if arguments.device == "cpu" and not arguments.quick:
        parser.error("--device cpu takes --quick, because the full size would take a CPU days")
    if arguments.device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", arguments.device):
        parser.error(f"--device {arguments.device}: it is cuda, cuda:N, or cpu with --quick")
    if not 0 < arguments.seconds < math.inf:
        parser.error(f"--seconds {arguments.seconds:g}: it must be more than 0")
    if arguments.data_dir:
        from bssearch.settings import DATA_DIR_VARIABLE

        os.environ[DATA_DIR_VARIABLE] = arguments.data_dir
    if not arguments.quick and not has_data():
        parser.error("Fashion-MNIST is not on this machine; pass its folder by --data-dir")
    arguments.out.mkdir(parents=True, exist_ok=True)
    task = Task(arguments.device, arguments.quick, arguments.out, arguments.seconds)
    if arguments.section:
        faulthandler.dump_traceback_later(max(1.0, arguments.seconds - SPARE_SECONDS))
        task.save(sections[names.index(arguments.section)].run(task))
        faulthandler.cancel_dump_traceback_later()
        return 0
    return int(not run_call(arguments.call, sections, task, arguments.only or names))


if __name__ == "__main__":
    sys.exit(main())
