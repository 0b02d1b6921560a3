"""The tree of commands: what stands at the first level, how each is described, and what all have in common."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from bssearch import Launch, run_study
from bssearch.cli.app import MOVED, PANELS
from bssearch.storage.migrate import SCHEMA_HEAD
from tests.cli.task import printed, read, refused, write_task
from tests.commands.test_quick import NoisyExecutor
from tests.factories import make_spec
from tests.search.law import LawExecutor
from tests.test_guide import leaf, leaves, root, subcommands

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


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_command_of_earlier_versions_is_refused_with_the_name_of_the_new_one(
    tmp_path: Path, old: str, new: str
) -> None:
    assert f"`bssearch {new}`" in refused(tmp_path, old, "task", code=2)
    command, rest = leaf(new.split())
    options = {one for parameter in command.params for one in parameter.opts}
    assert old not in leaves() and {word for word in rest if word.startswith("-")} <= options


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
