"""Every benchmark runs from any folder with the code of its checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bssearch.exchange.exporters.exports import write_table
from tests.benchmarks import memory_plan
from tests.documents import BENCHMARKS, SCRIPTS
from tests.packages import installed
from tests.simulation.lines import Seconds, grid

PRUNING, SEARCHING = (BENCHMARKS / "simulate" / name for name in ("pruning.py", "searching.py"))

HELP_OF_ALL = """
import os, runpy, sys
path = list(sys.path)
for script in sys.argv[1:]:
    sys.path[:] = [os.path.dirname(script), *path]
    sys.argv = [script, "--help"]
    sys.modules.pop("from_clone", None)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        is_alone = "from bssearch" not in open(script).read()
        assert not end.code and (is_alone or "from_clone" in sys.modules), (script, end.code)
    else:
        raise AssertionError(f"{script} ran")
"""
"""Imports all packages once; each script must put its checkout first in the path."""


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """Environment with installed packages that must not be imported."""
    for name in ("bssearch", "tests"):
        package = tmp_path / "installed" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"raise ImportError('{name} is not that of the checkout')\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}


def python(folder: Path, environment: dict[str, str], *words: str | Path) -> str:
    """Run Python in a folder; return its output."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_benchmark_shows_its_help_in_another_folder(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    told = python(tmp_path, elsewhere, "-c", HELP_OF_ALL, *SCRIPTS)
    assert [script.name for script in SCRIPTS if f"usage: {script.name}" not in told.lower()] == []


PATIENT = """
from bssearch.search.pruners.pace import Balanced

class Patient(Balanced):
    pass
"""
CELLS: Seconds = {(size, rate): [4 + size // 8, 9] for size in (8, 16, 32) for rate in (0.01, 0.1)}


@pytest.mark.slow
def test_a_pruner_of_another_package_is_simulated_in_other_processes_from_another_folder(
    tmp_path: Path, elsewhere: dict[str, str]
) -> None:
    write_table(grid(CELLS), tmp_path / "cells.csv.gz")
    site = tmp_path / "site"
    elsewhere["PYTHONPATH"] += f"{os.pathsep}{site}"
    words = ("cells.csv.gz", "--pruner", "patient", "--pruner", "balanced", "--format", "json")
    with installed(site, "beside", {"patient": PATIENT}, "[bssearch.pruners]\npatient = beside.patient:Patient\n"):
        drawn = json.loads(python(tmp_path, elsewhere, PRUNING, *words, "--draws", "4", "--trials", "4"))
        found = json.loads(python(tmp_path, elsewhere, SEARCHING, *words, "--budget", "30", "--repeats", "2"))
    assert drawn["policies"]["patient"] == drawn["policies"]["balanced"]
    assert found["samplers"]["auto+patient"] == found["samplers"]["auto+balanced"]


@pytest.mark.parametrize(
    ("predicted", "peak", "is_missed"),
    [(1.14, 1.0, False), (0.84, 1.0, True), (0.6, 0.5, False), (0.65, 0.5, True), (2.2, 2.0, False), (1.69, 2.0, True)],
)
def test_a_peak_may_differ_by_15_percent_or_below_a_gib_by_150_mib(
    predicted: float, peak: float, is_missed: bool
) -> None:
    case = memory_plan.CASES["ResNet-18"]
    assert memory_plan.misses(case, "trace", round(predicted * 2**30), round(peak * 2**30)) is is_missed
