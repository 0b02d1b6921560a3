"""Kinds of another package, found by its entry points: bssearch itself stays as it is."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bssearch.exchange.exporters.exports import RecordedTable, RecordedTrial, write_table
from bssearch.records import Target, TrialState
from tests.benchmarks.simulate import pruning
from tests.cli.task import bssearch, printed, read, refused, write_task
from tests.packages import installed
from tests.search.law import LawExecutor
from tests.simulation.test_scripts import script

CODE = '''
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from bssearch.analysis.objectives import SamplesToTarget
from bssearch.commands.launch import Launch
from bssearch.commands.opening import described
from bssearch.commands.probes import ProbeReport
from bssearch.exchange.exporters.exports import Exported
from bssearch.exchange.importers.runs import import_runs
from bssearch.registry import Option
from bssearch.search.pruners.base import Action, Cap
from bssearch.search.samplers.optuna import Random
from bssearch.spec import StudySpec


class Patient(Cap):
    """Stops a trial after so many evaluations."""

    def __init__(self, evaluations: Annotated[int, Field(ge=1)] = 3) -> None:
        self.evaluations = evaluations

    def judge(self, number, standings):
        is_over = len(standings.curves[number].gains) >= self.evaluations
        return Action.STOP if standings.winners and is_over else Action.GO_ON


class Lucky(Random):
    """Random, with one seed for every choice."""

    def __init__(self, spec: StudySpec, rate: Annotated[float, Field(gt=0)]) -> None:
        super().__init__(spec)
        self.rate = rate

    def ask(self, history, batch_size):
        return {**super().ask(history, batch_size), "reference_learning_rate": self.rate}


class Rows(SamplesToTarget):
    """Rows of a table."""

    name = "rows_to_target"


def numbers(store, name: str, file: str | None = None) -> Exported:
    """Write the numbers of a study's trials."""
    path = Path(file or f"{name}.numbers")
    path.write_text(" ".join(str(trial.number) for trial in store.trials.of(name)))
    return Exported([str(path)])


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

[bssearch.objectives]
rows_to_target = extra.kinds:Rows

[bssearch.exporters]
numbers = extra.kinds:numbers
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with a task while a package is installed beside bssearch."""
    write_task(tmp_path)
    with installed(tmp_path / "site", "extra", {"kinds": CODE}, ENTRY_POINTS):
        yield tmp_path


def test_each_kind_is_added_from_outside_and_used_through_the_command_line(folder: Path, by_law: LawExecutor) -> None:
    said = {"sampler.name": "lucky", "sampler.options.rate": "0.125", "pruner.name": "patient", "confirm.runs": "0"}
    said |= {"pruner.options.evaluations": "1", "budget.trials": "20"}
    changes = [word for name, value in said.items() for word in ("--set", f"{name}={value}")]
    assert bssearch("run", "task.yaml", *changes, cwd=folder).returncode == 0
    trials = read(folder, "trial", "list", "task")
    rates = [trial["learning_rate"] / (trial["batch_size"] / 32) ** 0.5 for trial in trials]
    assert sum(abs(rate - 0.125) < 1e-9 for rate in rates) >= 5, "the sampler's, with its option"
    assert TrialState.PRUNED in {state for state, _ in by_law.stopped.values()}, "by the pruner, with its option"
    assert bssearch("export", "task", "--to", "numbers", cwd=folder).stdout == "task.numbers\n"
    assert (folder / "task.numbers").read_text().split() == [str(trial["number"]) for trial in trials]

    others = ["name=rows", "objective=rows_to_target", "budget.trials=6", "confirm.runs=0"]
    assert bssearch("run", "task.yaml", *(w for one in others for w in ("--set", one)), cwd=folder).returncode == 0
    assert read(folder, "best", "rows")["objective"] == "rows_to_target"

    assert read(folder, "probe", "samples", "task.yaml", "--times", "3") == {"samples": 3000}
    listed = bssearch("import", "--help", cwd=folder).stdout
    assert "Make a study of a list of batch sizes." in listed and "rcp" in listed
    (folder / "sizes.txt").write_text("8\n16\n")
    assert read(folder, "import", "lines", "sizes.txt", "--steps", "7") == [{"study": "sizes", "runs": 2, "reached": 2}]
    assert bssearch("import", "lines", "sizes.txt", "--steps", "0", cwd=folder).returncode == 2


@pytest.mark.usefixtures("by_law")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["pruner.name=hasty"], "pruner.name = 'hasty': must be one of safe, balanced"),
        (["sampler.name=oracle"], "lucky, optuna:NAME, optunahub:NAME"),
        (["objective=rows"], "rows_to_target"),
        (["pruner.name=patient", "pruner.options.evaluations=0"], "pruner.options.evaluations = 0: input should be"),
        (
            ["pruner.name=patient", "pruner.options.lag=2"],
            "pruner.options.lag: unknown key; choose from evaluations",
        ),
        (["sampler.name=lucky"], "sampler.options.rate: field required"),
        (["sampler.name=lucky", "sampler.options.rate=x"], "sampler.options.rate = 'x'"),
        (["sampler.name=optuna:CmaSampler"], "choose from BruteForceSampler, CmaEsSampler"),
        (["sampler.name=optuna:TPESampler", "sampler.options.gama=2"], "did you mean 'gamma'?"),
        (["sampler.name=optuna:BruteForceSampler"], "failed to load: ValueError"),
        (["sampler.name=optunahub:samplers/x"], "optunahub"),
        (["sampler.name=grid"], "sampler = grid needs lists of values instead of ranges: learning_rate"),
    ],
)
def test_a_wrong_name_or_option_is_refused_before_a_study_begins(folder: Path, changes: list[str], said: str) -> None:
    words = [word for one in changes for word in ("--set", one)]
    assert said in refused(folder, "run", "task.yaml", "--dry-run", *words, code=2)


def test_a_pruner_of_another_package_is_simulated_with_its_options(folder: Path) -> None:
    trials = [
        RecordedTrial(
            number, {}, 0, (0, 1, 2, 3), (0.0, 1.0 * number, 2.0 * number, 3.0 * number), (0.1, 0.4, 0.6, 0.9)
        )
        for number in range(1, 7)
    ]
    write_table(RecordedTable("lines", Target(metric="accuracy", value=0.9), 30.0, tuple(trials)), folder / "t.csv.gz")
    words = [word for name in ["patient:evaluations=2", "none"] for word in ("--pruner", name)]
    words += ["--draws", "3", "--trials", "4", "--format", "json"]
    done = script(pruning.simulate, "t.csv.gz", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    policies = json.loads(done.stdout)["policies"]
    assert policies["patient:evaluations=2"]["relative_cost"] < policies["none"]["relative_cost"] == 1.0


def test_an_importer_that_cannot_be_loaded_is_named_and_takes_no_other_with_it(folder: Path) -> None:
    assert "no_such_module" in printed(folder, "import", "--help")
    assert "importer broken cannot be loaded" in refused(folder, "import", "broken", "sizes.txt", code=2)
    assert bssearch("import", "unheard-of", cwd=folder).returncode == 2
