"""The tree of commands: what stands at the first level, how each is described, what all have in common,
and kinds of other packages."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bssearch import Launch, run_study
from bssearch.cli.app import PANELS
from bssearch.exchange.exporters.exports import RecordedTable, RecordedTrial, write_table
from bssearch.records import Target, TrialState
from bssearch.storage.migrate import SCHEMA_HEAD
from tests.benchmarks.simulate import pruning
from tests.cli.task import bssearch, printed, read, refused, write_task
from tests.commands.test_quick import NoisyExecutor
from tests.factories import make_spec
from tests.packages import installed
from tests.search.law import LawExecutor
from tests.simulation.test_searches import script
from tests.test_guide import root, subcommands

MOST_WORDS = 12
ENDLESS = {"serve", "queue worker"}
"""Commands that run until they are stopped, and print no result."""


def every_command(command: Any = None, path: str = "") -> dict[str, Any]:
    """Return all commands and groups by name."""
    command = command or root()
    found = {path: command} if path else {}
    for name, sub in (subcommands(command) or {}).items():
        found |= every_command(sub, f"{path} {name}".strip())
    return found


COMMANDS = every_command()


def test_there_are_sixteen_commands_at_the_first_level_under_six_headings() -> None:
    first = [name for name in COMMANDS if " " not in name]
    assert len(first) == 16
    assert list(PANELS) == ["Start", "Studies", "Trials", "Measure", "Share", "Help"]
    assert first == [name for commands in PANELS.values() for name in commands]
    assert {name: command.rich_help_panel for name, command in COMMANDS.items() if " " not in name} == {
        name: panel for panel, commands in PANELS.items() for name in commands
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_described_in_at_most_twelve_words(name: str) -> None:
    words = (COMMANDS[name].help or "").split()
    assert 0 < len(words) <= MOST_WORDS, " ".join(words)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_reads_a_database_prints_in_every_format(name: str) -> None:
    options = {one for parameter in COMMANDS[name].params for one in parameter.opts}
    assert ("--db" in options) <= ("--format" in options) or name in ENDLESS


@pytest.mark.parametrize("group", [name for name, one in COMMANDS.items() if subcommands(one) is not None])
def test_an_unknown_command_of_a_group_is_refused_with_those_there_are(tmp_path: Path, group: str) -> None:
    told = refused(tmp_path, *group.split(), "5", code=2)
    assert "'5'" in told and all(name in told for name in subcommands(COMMANDS[group]) or {})


def test_alone_it_prints_three_commands_to_begin_with_and_where_the_others_are(tmp_path: Path) -> None:
    lines = [line.split() for line in printed(tmp_path).splitlines()]
    assert [line[1] for line in lines if line[:1] == ["bssearch"] and line[1] in COMMANDS] == ["run", "init", "best"]
    assert "bssearch --help" in printed(tmp_path) and "bssearch guide" in printed(tmp_path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("measured")
    for name in ("task", "other"):
        (place / name).mkdir()
        add_study(place / name, "task")
    add_study(place / "other", "other")
    return place


def add_study(folder: Path, name: str) -> None:
    """Store a study with 12 trials, and beside the database what commands take."""
    spec = make_spec(name=name, budget={"trials": 12, "trial_train_seconds": 2.0}, confirm={"top": 1, "runs": 3})
    run_study(spec, Launch(db=f"sqlite:///{folder / 'bssearch.db'}", make_executor=lambda *_: LawExecutor()))
    rows = "".join(f"{row['batch_size']},0.001\n" for row in read(folder, "best", name)["batches"])
    (folder / "h100.csv").write_text(f"batch_size,step_seconds\n{rows}")


OF_A_STUDY = [
    *("best", "best --step-times h100.csv", "report", "report --html page.html", "export --to csv"),
    *("study show", "study audit --no-run", "trial list", "trial show 1", "trial add", "trial add learning_rate=0.2"),
    *("study confirm --runs 4", "trial rerun 1"),
]


@pytest.mark.usefixtures("by_law")
@pytest.mark.parametrize("line", OF_A_STUDY)
def test_the_study_may_be_left_out_if_there_is_only_one(measured: Path, tmp_path: Path, line: str) -> None:
    alone, several = (Path(shutil.copytree(measured / name, tmp_path / name)) for name in ("task", "other"))
    assert read(alone, *line.split())
    told = refused(several, *line.split(), code=2)
    assert "task" in told and "other" in told


@pytest.fixture
def folder(measured: Path, tmp_path: Path) -> Path:
    """A folder of its own with the study task."""
    return Path(shutil.copytree(measured / "task", tmp_path / "task"))


def test_a_trial_that_is_added_is_printed_with_its_configuration(folder: Path) -> None:
    size = read(folder, "trial", "show", "1")["batch_size"]
    added = read(folder, "trial", "add", "task", f"batch_size={size}", "learning_rate=0.2")
    assert (added["study"], added["number"], added["batch_size"]) == ("task", len(read(folder, "trial", "list")), size)
    assert added["learning_rate"] == 0.2
    assert read(folder, "trial", "list", "--state", "queued")[0]["number"] == added["number"]


@pytest.mark.parametrize(
    ("line", "result"),
    [
        ("db init", {"schema": SCHEMA_HEAD, "before": SCHEMA_HEAD, "roles": []}),
        ("db upgrade", {"schema": SCHEMA_HEAD, "before": SCHEMA_HEAD, "copy": None}),
        ("db check", {"schema": SCHEMA_HEAD}),
        ("study archive task", {"study": "task", "archived": True}),
        ("study rename task better", {"study": "better", "renamed_from": "task"}),
        ("report --html page.html", [{"file": "page.html"}]),
        ("export --to curves", [{"written": "task.csv.gz"}, {"written": "task.json"}]),
    ],
)
def test_what_was_done_is_printed_for_programs(folder: Path, line: str, result: object) -> None:
    assert read(folder, *line.split()) == result


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("run task.yaml --quick --dry-run", ("--quick", "--dry-run")),
        ("run task.yaml --quick --from-quick", ("--quick", "--from-quick")),
        ("run task.yaml --seconds 3", ("--seconds", "--quick")),
        ("check task.yaml --runs 3", ("--runs", "--suggest-target")),
        ("check task.yaml --margin 0", ("--margin", "--suggest-target")),
        ("best --step-times h100.csv --target 0.5", ("--step-times", "--target")),
        ("best --step-times h100.csv --workload digits", ("--step-times", "--workload")),
        ("best --schedule", ("--schedule", "--export")),
        ("best --export yaml --format json", ("--export", "--format")),
        ("study confirm --to-budget --max-runs 9", ("--to-budget", "--max-runs")),
        ("trial show 1 --log --repro", ("--log", "--repro")),
    ],
)
def test_options_that_do_not_go_together_are_named(folder: Path, line: str, options: tuple[str, str]) -> None:
    told = refused(folder, *line.split(), code=2)
    assert all(option in told for option in options)


CONTRACT = {
    *("schema_version", "verified", "optimal", "interval", "flat_range", "b_crit", "alpha_s", "beta_s", "warnings")
}


def test_a_quick_answer_has_the_fields_of_its_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bssearch.executors.slots.LocalExecutor", lambda *_: NoisyExecutor())
    write_task(tmp_path)
    found = read(tmp_path, "run", "task.yaml", "--quick", "--seconds", "5")
    assert found.keys() >= CONTRACT
    assert (found["schema_version"], found["verified"]) == (1, False)
    assert found["optimal"].keys() >= {"batch_size", "micro_batch_size", "accumulation_steps", "learning_rate"}
    assert read(tmp_path, "trial", "list")[0]["phase"] == "search"


# Kinds of other packages ----------------------------------------------------------------------------------------------


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
def extended(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with a task while a package is installed beside bssearch."""
    write_task(tmp_path)
    with installed(tmp_path / "site", "extra", {"kinds": CODE}, ENTRY_POINTS):
        yield tmp_path


def test_each_kind_is_added_from_outside_and_used_through_the_command_line(extended: Path, by_law: LawExecutor) -> None:
    said = {"sampler.name": "lucky", "sampler.options.rate": "0.125", "pruner.name": "patient", "confirm.runs": "0"}
    said |= {"pruner.options.evaluations": "1", "budget.trials": "20"}
    changes = [word for name, value in said.items() for word in ("--set", f"{name}={value}")]
    assert bssearch("run", "task.yaml", *changes, cwd=extended).returncode == 0
    trials = read(extended, "trial", "list", "task")
    rates = [trial["learning_rate"] / (trial["batch_size"] / 32) ** 0.5 for trial in trials]
    assert sum(abs(rate - 0.125) < 1e-9 for rate in rates) >= 5, "the sampler's, with its option"
    assert TrialState.PRUNED in {state for state, _ in by_law.stopped.values()}, "by the pruner, with its option"
    assert bssearch("export", "task", "--to", "numbers", cwd=extended).stdout == "task.numbers\n"
    assert (extended / "task.numbers").read_text().split() == [str(trial["number"]) for trial in trials]

    others = ["name=rows", "objective=rows_to_target", "budget.trials=6", "confirm.runs=0"]
    assert bssearch("run", "task.yaml", *(w for one in others for w in ("--set", one)), cwd=extended).returncode == 0
    assert read(extended, "best", "rows")["objective"] == "rows_to_target"

    assert read(extended, "probe", "samples", "task.yaml", "--times", "3") == {"samples": 3000}
    listed = bssearch("import", "--help", cwd=extended).stdout
    assert "Make a study of a list of batch sizes." in listed and "rcp" in listed
    (extended / "sizes.txt").write_text("8\n16\n")
    assert read(extended, "import", "lines", "sizes.txt", "--steps", "7") == [
        {"study": "sizes", "runs": 2, "reached": 2}
    ]
    assert bssearch("import", "lines", "sizes.txt", "--steps", "0", cwd=extended).returncode == 2


@pytest.mark.usefixtures("by_law")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["pruner.name=hasty"], "pruner.name = 'hasty': must be one of safe, balanced"),
        (["sampler.name=oracle"], "lucky, optuna:NAME, optunahub:NAME"),
        (["objective=rows"], "rows_to_target"),
        (["pruner.name=patient", "pruner.options.evaluations=0"], "pruner.options.evaluations = 0: must be"),
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
        (["sampler.name=grid"], "sampler = grid cannot use the ranges of learning_rate; list values instead"),
    ],
)
def test_a_wrong_name_or_option_is_refused_before_a_study_begins(extended: Path, changes: list[str], said: str) -> None:
    words = [word for one in changes for word in ("--set", one)]
    assert said in refused(extended, "run", "task.yaml", "--dry-run", *words, code=2)


def test_a_pruner_of_another_package_is_simulated_with_its_options(extended: Path) -> None:
    trials = [
        RecordedTrial(
            number, {}, 0, (0, 1, 2, 3), (0.0, 1.0 * number, 2.0 * number, 3.0 * number), (0.1, 0.4, 0.6, 0.9)
        )
        for number in range(1, 7)
    ]
    write_table(
        RecordedTable("lines", Target(metric="accuracy", value=0.9), 30.0, tuple(trials)), extended / "t.csv.gz"
    )
    words = [word for name in ["patient:evaluations=2", "none"] for word in ("--pruner", name)]
    words += ["--draws", "3", "--trials", "4", "--format", "json"]
    done = script(pruning.simulate, "t.csv.gz", *words, cwd=extended)
    assert done.returncode == 0, done.stderr
    policies = json.loads(done.stdout)["policies"]
    assert policies["patient:evaluations=2"]["relative_cost"] < policies["none"]["relative_cost"] == 1.0


def test_an_importer_that_cannot_be_loaded_is_named_and_takes_no_other_with_it(extended: Path) -> None:
    assert "no_such_module" in printed(extended, "import", "--help")
    assert "importer broken cannot be loaded" in refused(extended, "import", "broken", "sizes.txt", code=2)
    assert bssearch("import", "unheard-of", cwd=extended).returncode == 2
