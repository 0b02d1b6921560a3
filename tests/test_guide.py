"""Commands, options, fields, names and files in the README and the guide exist in the code."""

import ast
import importlib.util
import re
import shutil
import tomllib
import typing
from datetime import date
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from pydantic import BaseModel

import bssearch
from bssearch import registry
from bssearch.analysis.answer import Answer
from bssearch.analysis.headline import headline
from bssearch.cli.answer import print_answer
from bssearch.cli.app import app
from bssearch.figures.plots import objective_picture
from bssearch.search.engine import RETUNED, RETUNED_IN_VAIN
from bssearch.settings import presets, shipped_studies
from bssearch.spec import StudySpec, TrainingSpec, load_spec
from bssearch.spec.templates import load_templates
from bssearch.storage.database import RETRY_FOR_S
from tests.cli.task import bssearch as run, printed, read
from tests.documents import (
    DOCUMENTS,
    GUIDE,
    OWN_TRAINING,
    README,
    ROOT,
    SCRIPTS,
    block_commands,
    blocks,
    code,
    span_commands,
    spans,
)

UNMEASURED = "TO MEASURE"
"""Placeholder for a figure that is not measured yet."""

PLACEHOLDERS = {"NUMBER": "1", "X": "1"}
ROOMS = DOCUMENTS["changing-the-code"]
every_document = pytest.mark.parametrize("name", DOCUMENTS)


@cache
def root() -> Any:
    """Command line."""
    return typer.main.get_command(app)


@cache
def subcommands(command: Any) -> dict[str, Any] | None:
    """Commands of a group by name, also from the registry; None if the command is no group."""
    if not hasattr(command, "list_commands"):
        return None
    context = typer.Context(command)
    return {name: command.get_command(context, name) for name in command.list_commands(context)}


def leaf(words: list[str]) -> tuple[Any, list[str]]:
    """The command at the start of the words, and the other words."""
    command: Any = root()
    while (commands := subcommands(command)) is not None:
        assert words and words[0] in commands, f"there is no command {words}"
        command, words = commands[words[0]], words[1:]
    return command, words


def leaves(command: Any = None, path: str = "") -> set[str]:
    """Names of all commands."""
    command = command or root()
    commands = subcommands(command)
    if commands is None:
        return {path}
    return {name for key, sub in commands.items() for name in leaves(sub, f"{path} {key}".strip())}


def parse(words: list[str]) -> None:
    """Parse a command line without running the command."""
    command, rest = leaf([PLACEHOLDERS.get(word, word) for word in words])
    command.make_context("bssearch", rest)


@every_document
def test_commands_in_code_blocks_parse(name: str) -> None:
    for words in block_commands(DOCUMENTS[name]):
        parse(words)


@every_document
def test_commands_within_sentences_name_commands_and_options_that_exist(name: str) -> None:
    for words in span_commands(DOCUMENTS[name]):
        if words[0].startswith("-"):
            continue
        command, rest = (None, []) if words[0] in ("probe", "import", "plan") and len(words) == 1 else leaf(words)
        options = {option for one in getattr(command, "params", []) for option in [*one.opts, *one.secondary_opts]}
        unknown = {word for word in rest if word.startswith("-")} - {*options, "--help"}
        assert not unknown, f"{words}: {unknown}"


@every_document
def test_options_within_sentences_belong_to_some_command(name: str) -> None:
    known = {option for one in leaves() for param in leaf(one.split())[0].params for option in param.opts}
    known |= {option for path in SCRIPTS for option in scripted_options(path)} | {"--help", "--check", "--out"}
    named = {word for span in spans(DOCUMENTS[name]) for word in re.findall(r"(?<![\w-])--[a-z-]+", span)}
    assert named <= known


def scripted_options(script: Path) -> list[str]:
    """Options of a benchmark: its function's parameters and named options."""
    text = script.read_text()
    functions = [one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef)]
    (main,) = (one for one in functions if one.name in {"main", "simulate"})
    named = [f"--{one.arg.replace('_', '-')}" for one in main.args.args]
    return ["--format", *named, *re.findall(r'"(--[a-z-]+)"', text)]


def test_the_table_of_commands_equals_the_command_line() -> None:
    rows = re.findall(r"^\| (`bssearch .*?) \| ", DOCUMENTS["commands"], flags=re.MULTILINE)
    named = [span.split()[1:] for row in rows for span in re.findall(r"`([^`]+)`", row)]
    listed = [" ".join(words[: len(words) - len(leaf(words)[1])]) for words in named]
    assert set(listed) == leaves()
    assert len(listed) == len({*listed}) + listed.count("schema") - 1, "only schema is there twice"


@every_document
def test_options_of_a_row_of_the_table_of_commands_are_options_of_its_command(name: str) -> None:
    for first, second in re.findall(r"^\| (`bssearch .*?) \| (.*) \|$", DOCUMENTS[name], flags=re.MULTILINE):
        commands = [leaf(span.split())[0] for span in re.findall(r"`bssearch ([^`]+)`", first)]
        known = {option for command in commands for param in command.params for option in param.opts}
        assert set(re.findall(r"--[a-z-]+", second)) <= known, first


BASE = yaml.safe_load(next(block for block in blocks(DOCUMENTS["README"], "yaml") if "budget:" in block))
BASE["default"] |= {"weight_decay": 0.0, "label_smoothing": 0.0, "warmup_epochs": 0.0, "dropout": 0.0}


@every_document
def test_yaml_blocks_are_parts_of_a_spec(name: str, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(DOCUMENTS[name], "yaml")):
        path = tmp_path / f"{number}.yaml"
        said = yaml.safe_load(block)
        if "templates" in said:  # a worker's file, which names a spec
            path.write_text(block)
            shutil.copy(shipped_studies()["digits"], tmp_path)
            offered = load_templates(path)["digits"].values
            assert all(field_of(key) for key in offered if key.split(".")[0] not in ("space", "workload_settings"))
            continue
        base = {key: value for key, value in BASE.items() if key != "workload" or "command" not in said}
        path.write_text(yaml.safe_dump({**base, **said}))
        load_spec(path)


def field_of(path: str) -> Any:
    """Field of a spec at a dotted path, or None."""
    model: Any = StudySpec
    field = None
    for part in path.split("."):
        if not (isinstance(model, type) and issubclass(model, BaseModel)) or part not in model.model_fields:
            return None
        field = model.model_fields[part]
        model = field.annotation
    return field


@every_document
def test_dotted_fields_are_fields_of_a_spec(name: str) -> None:
    heads = "|".join(StudySpec.model_fields)
    for path in re.findall(rf"(?<![\w/.])(?:{heads})\.[a-z_]+\b(?!\()", " ".join(spans(DOCUMENTS[name]))):
        if path.endswith((".py", ".yaml")) or path.split(".")[0] in ("space", "default", "name", "workload"):
            continue
        assert field_of(path) is not None, path


def test_defaults_in_the_guide_equal_a_specs() -> None:
    text = " ".join(" ".join(DOCUMENTS.values()).split())
    quoted = dict(re.findall(r"`([a-z_.]+)` \(default ([\d.]+)\)", text))
    assert len(quoted) >= 8
    assert {path: float(field_of(path).default) for path in quoted} == {
        path: float(value) for path, value in quoted.items()
    }


def test_the_settings_of_training_are_shown_whole_with_their_defaults() -> None:
    (shown,) = (yaml.safe_load(block) for block in blocks(DOCUMENTS["measuring"], "yaml") if "training:" in block)
    assert shown == {"training": TrainingSpec().model_dump(mode="json")}


def rows_named(text: str) -> set[str]:
    """Names at the start of the rows of a page's tables."""
    return set(re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`.*?) \| ", text, flags=re.MULTILINE))))


def test_the_guide_names_no_kind_that_is_not_registered_and_every_preset_and_study() -> None:
    """A new plug-in is a file and a line in the registry; its row in the guide may come later."""
    built_in = {kind: set(names) for kind, names in registry.BUILT_IN.items()}
    assert rows_named(DOCUMENTS["searching"]) <= built_in["pruners"]
    assert rows_named(DOCUMENTS["measuring"]) <= built_in["objectives"]
    assert set(re.findall(r"--to (\w+)", code(DOCUMENTS["team"]))) <= built_in["exporters"]
    assert set(presets()) <= set(spans(DOCUMENTS["measuring"]))
    assert set(re.findall(r"^\| `(\w+)` \| a ", DOCUMENTS["README"], flags=re.MULTILINE)) == set(shipped_studies())


def test_a_lost_connection_is_tried_for_the_minutes_that_the_guide_says() -> None:
    assert f"retry a lost connection for {RETRY_FOR_S / 60:.0f} minutes" in DOCUMENTS["team"]


def test_the_search_ends_after_the_trials_that_the_guide_says() -> None:
    words = {3: "three", 5: "five"}
    told = f"gets {words[RETUNED]} trials, or {words[RETUNED_IN_VAIN]} if no trial at this size reached the target"
    assert told in " ".join(DOCUMENTS["searching"].split())


SECURITY = {
    "**Workload code is trusted.** The": [
        "executors/test_local.py::test_a_worker_has_the_drivers_environment_without_secrets"
    ],
    "A trial's environment": ["executors/test_local.py::test_a_worker_has_the_drivers_environment_without_secrets"],
    "On Linux your": ["executors/test_local.py::test_a_driver_with_secrets_is_closed_to_other_processes_of_its_user"],
    "Malicious code can": [
        "executors/test_local.py::test_a_driver_with_secrets_is_closed_to_other_processes_of_its_user"
    ],
    "All users of a machine": ["storage/test_repository.py::test_the_url_comes_from_the_environment"],
    "bssearch trusts **writers": [
        "cli/test_wrong_input.py::test_a_forged_text_runs_nothing_in_a_shell",
        "storage/test_roles.py::test_a_role_has_no_right_beyond_its_own",
    ],
    "`run` takes": ["commands/test_given_workload.py::test_no_workload_takes_the_place_of_a_command"],
    "`study confirm`, `study audit`": [
        "commands/test_given_workload.py::test_what_was_run_here_is_known_and_nothing_else",
    ],
    "The workload's package": [
        "commands/test_given_workload.py::test_a_file_outside_of_the_folder_is_not_taken_from_a_database_whoever_ran_it",
        "cli/test_confirm.py::test_code_that_this_user_has_not_run_is_not_run_on_the_databases_word",
    ],
    "Otherwise name the": [
        "cli/test_rerun.py::test_code_that_has_changed_is_run_only_where_the_user_names_it_and_that_is_told"
    ],
    "bssearch does not check modules": [
        "commands/test_given_workload.py::test_code_is_known_by_its_content_and_lies_in_the_folder_itself"
    ],
    "Samplers, pruners": ["test_public_api.py::test_a_package_adds_to_a_kind_by_an_entry_point"],
    "Before a stored configuration": ["spec/test_spec.py::test_a_value_that_the_spec_does_not_have_is_named"],
    "A trial that violates": ["search/test_driver.py::test_a_queued_trial_is_refused_and_the_others_run"],
    "Other trials run": ["search/test_driver.py::test_a_queued_trial_is_refused_and_the_others_run"],
    "**Submitters** run": [
        "spec/test_domains.py::test_any_other_value_is_refused_and_named",
        "spec/test_domains.py::test_no_template_offers_code_places_or_the_machine",
    ],
    "Each worker also": ["spec/test_domains.py::test_a_submission_that_is_wrong_is_refused"],
    "**Readers of the database**": ["cli/test_read_only.py::test_as_a_reader"],
    "Readers see": ["storage/test_roles.py::test_a_reader_reads_every_table"],
    "If a session blocks": [
        "storage/test_roles.py::test_a_reader_with_open_transactions_blocks_no_writer",
        "storage/test_roles.py::test_an_upgrade_that_readers_block_names_them_and_changes_nothing",
        "storage/test_roles.py::test_a_writer_that_holds_a_lock_is_named",
    ],
    "**Paused trials**": [
        "search/pruners/test_checkpoints.py::test_the_folder_is_this_users_alone",
        "search/pruners/test_checkpoints.py::test_a_new_file_follows_no_link_and_is_private",
    ],
    "bssearch does not use another": [
        "search/pruners/test_checkpoints.py::test_a_folder_of_somebody_elses_is_not_used"
    ],
    "Anyone who can": ["training/test_pausing.py::test_one_that_would_run_code"],
    "bssearch validates stored rows": ["storage/test_repository.py::test_the_first_faulty_row_is_named"],
    "bssearch cuts texts": [
        "storage/test_repository.py::test_a_long_text_is_cut_when_it_is_read_and_when_it_is_stored",
        "storage/test_repository.py::test_an_object_of_another_kind_or_beyond_the_bounds_is_named_when_it_is_read",
    ],
    "Pages and exports": [
        "web/test_in_a_browser.py::test_a_stored_text_is_no_markup_and_no_script",
        "cli/test_export.py::test_awkward_values_come_back_as_they_were",
        "cli/test_shown.py::test_no_cell_of_a_csv_is_a_formula",
        "cli/test_shown.py::test_a_note_is_one_line_without_what_a_terminal_obeys",
    ],
    "Commands connect only": ["cli/test_whole_study.py::test_a_study_and_its_answer_connect_to_nothing"],
    "Your workload may": ["cli/test_whole_study.py::test_a_study_and_its_answer_connect_to_nothing"],
}
"""Tests behind each sentence of the section Trust, by the sentence's first words."""


def test_each_sentence_on_security_is_backed_by_tests() -> None:
    (section,) = re.findall(r"^## Trust\n(.*?)^## ", DOCUMENTS["security"], flags=re.MULTILINE | re.DOTALL)
    sentences = re.split(r"(?<=\.)\s+(?:- )?(?=[A-Z*`]|bssearch)", " ".join(section.split()).removeprefix("- "))
    assert [[start for start in SECURITY if one.startswith(start)] for one in sentences] == [[one] for one in SECURITY]
    for backing in (one for tests in SECURITY.values() for one in tests):
        path, _, name = backing.partition("::")
        nodes = ast.walk(ast.parse((ROOT / "tests" / path).read_text()))
        assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}, backing


@every_document
def test_python_names_exist(name: str) -> None:
    for found in re.findall(r"(?<![\w:/.])bssearch\.([A-Za-z_]+)", code(DOCUMENTS[name])):
        if found in typing.get_args(registry.Kind):  # a group of entry points
            continue
        assert found in bssearch.__all__ or importlib.util.find_spec(f"bssearch.{found}"), f"bssearch.{found}"


@every_document
def test_python_blocks_compile(name: str) -> None:
    for block in blocks(DOCUMENTS[name], "python"):
        compile(block, name, "exec")


@every_document
def test_files_that_are_named_exist(name: str) -> None:
    paths = re.findall(r"(?<![\w/.])(?:bssearch|tests|studies|migrations)/[\w./-]+", code(DOCUMENTS[name]))
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", DOCUMENTS[name])
    folder = ROOT if name == "README" else GUIDE
    missing = [path for path in paths if not (ROOT / path).exists()]
    missing += [link for link in links if not (folder / link).exists()]
    assert not missing


def test_every_benchmark_is_in_the_figures_with_options_that_it_has() -> None:
    named = re.findall(r"(tests/benchmarks/[\w/]+\.py)([^`\n]*)", DOCUMENTS["figures"])
    assert {ROOT / script for script, _ in named} == set(SCRIPTS)
    for script, rest in named:
        assert set(re.findall(r"--[a-z-]+", rest)) <= set(scripted_options(ROOT / script)), script


def test_every_figure_of_a_benchmark_has_a_date_and_the_page_its_machine() -> None:
    rows = re.findall(r"^\| `python tests/benchmarks/.*$", DOCUMENTS["figures"], flags=re.MULTILINE)
    assert rows and all(re.search(r"\| 20\d\d-\d\d-\d\d \|$", row) for row in rows)
    for part in DOCUMENTS["figures"].split("\n## ")[1:]:
        assert re.search(r"20\d\d-\d\d-\d\d", part) or "no figure" in part, part[:40]
    assert "two cores" in DOCUMENTS["figures"]


def test_no_figure_is_yet_to_be_measured() -> None:
    assert not any(UNMEASURED in text for text in DOCUMENTS.values())


@pytest.mark.parametrize("name", ["measuring", "searching", "own-training", "team", "changing-the-code", "extending"])
def test_only_one_page_quotes_benchmarks(name: str) -> None:
    assert "tests/benchmarks" not in DOCUMENTS[name]


def test_the_map_names_every_room_and_no_other() -> None:
    files = [path.relative_to(ROOT / "bssearch") for path in (ROOT / "bssearch").rglob("*.*") if path.suffix != ".pyc"]
    parts = {ROOT / "bssearch" / path.parts[0] for path in files} - {ROOT / "bssearch" / "__init__.py"}
    packages = {path.name for path in parts if (path / "__init__.py").exists()}
    modules = {path.stem for path in parts if path.suffix == ".py"} - {"__main__"}
    assert set(re.findall(r"\w+", blocks(ROOMS, "text")[0])) - modules == packages
    assert all(ast.get_docstring(ast.parse((ROOT / "bssearch" / one / "__init__.py").read_text())) for one in packages)
    (loose,) = re.findall(r"^The other modules are .*?\n\n", ROOMS, flags=re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)` \(", loose)) == modules
    assert {path.name for path in parts if path.suffix != ".py"} - packages <= set(spans(ROOMS))


def test_the_map_has_the_checked_direction_of_imports() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    assert blocks(ROOMS, "text")[0].splitlines() == contract["layers"]


def test_files_that_the_map_names_exist() -> None:
    named = [span for span in spans(ROOMS) if re.fullmatch(r"[a-z_]+/[\w/]+\.py", span)]
    assert len(named) >= 4
    assert [span for span in named if not (ROOT / "bssearch" / span).exists() and not (ROOT / span).exists()] == []


def test_without_a_topic_the_topics_are_listed_with_a_sentence(tmp_path: Path) -> None:
    done = run("guide", cwd=tmp_path)
    assert done.returncode == 0
    for name in set(DOCUMENTS) - {"README"}:
        assert re.search(rf"^- `bssearch guide {name}`: \w.*\.$", done.stdout, flags=re.MULTILINE)


@pytest.mark.parametrize("options", [(), ("--format", "text"), ("-f", "page")])
def test_a_topic_is_plain_markdown_without_a_terminal(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run("guide", "measuring", *options, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, DOCUMENTS["measuring"])


def test_a_topic_is_laid_out_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    laid_out = run("guide", "team", cwd=tmp_path).stdout
    assert "\x1b[" in laid_out and "## " not in laid_out
    assert run("guide", "team", "--format", "text", cwd=tmp_path).stdout == DOCUMENTS["team"]


def test_a_missing_topic_is_named_with_similar_topics(tmp_path: Path) -> None:
    done = run("guide", "measure", cwd=tmp_path)
    assert done.returncode == 3
    assert "measure" in done.stderr and "bssearch guide measuring" in done.stderr
    everything = run("guide", "zzz", cwd=tmp_path)
    assert everything.returncode == 3
    assert all(name in everything.stderr for name in set(DOCUMENTS) - {"README"})


# README ---------------------------------------------------------------------------------------------------------------


ANSWER = Answer.model_validate_json((ROOT / "tests" / "data" / "digits.best.json").read_text(encoding="utf-8"))
# The README's picture and answer come from one study. Remake both on an idle machine, in an empty folder of the clone:
#   bssearch run digits
#   bssearch best digits --format json > ../tests/data/digits.best.json
#   bssearch report digits --svg ../bssearch/guide/pictures/digits.svg
#   bssearch best digits    # for the README
PICTURE = (GUIDE / "pictures" / "digits.svg").read_text(encoding="utf-8")


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_readme_is_read_in_one_go() -> None:
    assert len(README.splitlines()) <= 130 and len(README.split()) <= 1100


@pytest.mark.slow
def test_the_workload_and_spec_of_the_guide_run_as_they_stand(tmp_path: Path) -> None:
    for name in ("my_task.py", "my_study.yaml"):
        shutil.copy(OWN_TRAINING / name, tmp_path)
    changes = ["budget.trials=4", "confirm.runs=0", "executor.name=inline", "space.batch_size.low=64"]
    printed(tmp_path, "run", "my_study.yaml", *[word for one in changes for word in ("--set", one)])
    assert read(tmp_path, "best", "my-task")["optimal"]["batch_size"] in (64, 128, 256, 512)


def test_the_script_and_spec_of_the_readme_are_right(tmp_path: Path) -> None:
    (tmp_path / "my_study.yaml").write_text(next(block for block in blocks(README, "yaml") if "train.py" in block))
    spec = load_spec(tmp_path / "my_study.yaml")
    assert spec.is_program
    (script,) = (block for block in blocks(README, "python") if "current_trial" in block)
    evaluated: list[object] = []

    def accuracy(model: object) -> float:
        evaluated.append(model)
        return 0.5

    model = torch.nn.Linear(1, 1)
    assert script.count("    ...  #") == 1
    step = "    model(batch[:, None].float()).sum().backward(); optimizer.step()  #"
    exec(script.replace("    ...  #", step), {"data": [0] * 256, "model": model, "accuracy": accuracy})
    assert evaluated == [model] * 10, "alone it is evaluated after each of ten passes over the data"


def test_the_set_up_is_two_commands() -> None:
    commands = [line for block in blocks(README, "sh") for line in block.splitlines() if line.startswith("pip install")]
    assert commands == ["pip install . && bssearch run digits", "pip install '.[dev]' && pytest"]
    assert re.search(r"^pip install( --[-\w]+)* '\.\[dev\]'$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


LEFT_OUT = "…"
"""A line of the README in place of printed lines that are not shown."""


def without_left_out(shown: list[str], printed: list[str]) -> list[str]:
    """Printed lines, with `LEFT_OUT` for lines that the README leaves out."""
    if LEFT_OUT not in shown:
        return printed
    place = shown.index(LEFT_OUT)
    after = shown[place + 1]
    return [*printed[:place], LEFT_OUT, *printed[printed.index(after, place) if after in printed[place:] else place :]]


def differences(shown: list[str], wanted: list[str]) -> list[str]:
    """Lines of the README to change, as "line NUMBER: old → new"."""
    first = README.splitlines().index(shown[0]) + 1
    pairs = enumerate(zip_longest(shown, wanted, fillvalue="(no line)"), first)
    return [f"line {number}: {old} → {new}" for number, (old, new) in pairs if old != new]


def test_the_sentence_under_the_picture_equals_the_stored_study() -> None:
    (sentence,) = re.findall(r"^\*\*(Batch .*?)\*\*$", README, flags=re.MULTILINE | re.DOTALL)
    assert flat(sentence) == headline(ANSWER), f"README.md must say: {headline(ANSWER)}"


def test_the_printed_answer_equals_the_stored_study(capsys: pytest.CaptureFixture[str]) -> None:
    print_answer(ANSWER)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = blocks(README, "text")[0].splitlines()
    changes = differences(shown, without_left_out(shown, printed))
    assert not changes, "README.md must change:\n" + "\n".join(changes)


def test_the_picture_equals_the_stored_study() -> None:
    (day,) = re.findall(r"study digits, .*?, (\d{4}-\d\d-\d\d)<", PICTURE)
    default = load_spec(shipped_studies()["digits"]).default.batch_size
    assert objective_picture(ANSWER, default_batch_size=default, measured_on=date.fromisoformat(day)) == PICTURE
    assert "](bssearch/guide/pictures/digits.svg)" in README


def test_the_study_of_the_answer_is_named_with_its_command_machine_and_date() -> None:
    (day,) = re.findall(r"study digits, .*?, (\d{4}-\d\d-\d\d)<", PICTURE)
    (sentence,) = re.findall(r"`bssearch run digits` took .*?\.(?= |$)", flat(README.split("## Try it")[0]))
    assert ANSWER.device.name in sentence
    assert day in sentence
