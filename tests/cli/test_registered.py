"""Importers, probes, pruners and samplers of another package, found by its entry points."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.task import bssearch, printed, read, refused, write_task
from tests.packages import installed

CODE = '''
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from bssearch.commands.launch import Launch
from bssearch.commands.opening import described
from bssearch.commands.probe.report import ProbeReport
from bssearch.importers.runs import import_runs
from bssearch.options import Option
from bssearch.pruners.cap import Cap
from bssearch.samplers.optuna import Random
from bssearch.spec import StudySpec


class Patient(Cap):
    """A pruner of this package."""


class Lucky(Random):
    """A sampler of this package."""


def lines(
    file: Annotated[Path, Option("A file with a batch size a line.", metavar="FILE.txt")],
    *,
    name: str | None = None,
    steps: Annotated[int, Option("Steps of each run.", min=1)] = 10,
) -> object:
    """Make a study of a list of batch sizes."""
    table = Path("made.csv")
    rows = [f"{size},true,{steps},1.5,0.9" for size in file.read_text().split()]
    table.write_text("\\n".join(["batch_size,reached,steps,train_seconds,final_metric", *rows]))
    return import_runs(table, name=name or file.stem)


def samples(
    spec: StudySpec, launch: Launch, *, times: Annotated[int, Option("A factor.", min=1)] = 1
) -> ProbeReport:
    """Count the training samples."""
    with described(spec, launch) as (_, found):
        row = {"samples": times * found.train_samples}
    return ProbeReport(document=row, rows=[row], sentences=[f"There are {row['samples']} samples."])
'''

ENTRY_POINTS = """
[bssearch.importers]
lines = extra.kinds:lines
broken = no_such_module:anything

[bssearch.probes]
samples = extra.kinds:samples

[bssearch.pruners]
patient = extra.kinds:Patient

[bssearch.samplers]
lucky = extra.kinds:Lucky
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with a task while a package is installed beside bssearch."""
    write_task(tmp_path)
    with installed(tmp_path / "site", "extra", {"kinds": CODE}, ENTRY_POINTS):
        yield tmp_path


def test_an_importer_of_another_package_is_a_subcommand_with_its_options(folder: Path) -> None:
    listed = bssearch("import", "--help", cwd=folder).stdout
    assert "Make a study of a list of batch sizes." in listed and "rcp" in listed
    (folder / "sizes.txt").write_text("8\n16\n")
    assert read(folder, "import", "lines", "sizes.txt", "--steps", "7") == [{"study": "sizes", "runs": 2, "reached": 2}]
    assert bssearch("import", "lines", "sizes.txt", "--steps", "0", cwd=folder).returncode == 2


def test_an_importer_that_cannot_be_loaded_is_named_and_takes_no_other_with_it(folder: Path) -> None:
    assert "no_such_module" in printed(folder, "import", "--help")
    assert "importer broken cannot be loaded" in refused(folder, "import", "broken", "sizes.txt", code=2)
    assert bssearch("import", "unheard-of", cwd=folder).returncode == 2


@pytest.mark.usefixtures("by_law")
def test_a_probe_of_another_package_is_a_subcommand_with_its_options(folder: Path) -> None:
    assert read(folder, "probe", "samples", "task.yaml", "--times", "3") == {"samples": 3000}


def test_a_spec_may_name_a_pruner_and_a_sampler_of_another_package(folder: Path) -> None:
    plan = ["run", "task.yaml", "--dry-run", "--set"]
    assert bssearch(*plan, "pruner.name=patient", "--set", "sampler.name=lucky", cwd=folder).returncode == 0
    told = refused(folder, *plan, "pruner.name=hasty", code=2)
    assert "pruner.name = 'hasty': must be one of safe, balanced" in told and "patient" in told
