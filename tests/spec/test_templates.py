"""What a worker's file of templates may hold, and what a submission may give a template."""

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from bssearch.errors import BSSearchError, NotFoundError, SpecError, UsageError
from bssearch.spec.templates import OFFERS_NONE, NewSubmission, Templates, load_templates, value_type
from tests.cli.task import write_task

VALUES = {
    "budget.trials": {"type": "integer", "low": 1, "high": 40},
    "target.value": {"type": "number", "low": 0.5, "high": 0.99},
    "space.batch_size": {"type": "integers", "low": 4, "high": 128},
    "space.warmup_epochs": {"type": "numbers", "low": 0, "high": 2},
    "training.deterministic": {"type": "boolean"},
    "seed": {"choices": [0, 1]},
    "pruner.name": {"choices": ["race", "none"]},
}


def written(folder: Path, values: object = VALUES, **others: object) -> Path:
    write_task(folder)
    path = folder / "templates.yaml"
    path.write_text(yaml.safe_dump({"templates": {"task": {"spec": "task.yaml", "values": values, **others}}}))
    return path


@pytest.fixture
def templates(tmp_path: Path) -> Templates:
    return load_templates(written(tmp_path))


def test_values_of_the_stated_types_make_a_study_of_the_template(templates: Templates) -> None:
    given: dict[str, Any] = {
        "budget.trials": 7,
        "target.value": 0.9,
        "space.batch_size": [8, 32],
        "space.warmup_epochs": [0, 0.5],
        "training.deterministic": True,
        "seed": 1,
        "pruner.name": "none",
    }
    spec = templates["task"].study("mine", given, ("executor.slots=2",))
    assert (spec.name, spec.workload, spec.budget.trials, spec.target.value) == ("mine", "task.py:Task", 7, 0.9)
    assert (list(spec.batch_sizes)[:2], spec.seed, spec.pruner.name, spec.executor.slots) == ([8, 32], 1, "none", 2)
    assert spec.training.deterministic is True


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("budget.trials", 41, "budget.trials = 41 must be a whole number from 1 to 40"),
        ("budget.trials", 4.5, "a whole number"),
        ("budget.trials", True, "a whole number"),
        ("budget.trials", "4", "a whole number"),
        ("target.value", "0.9", "must be a number from 0.5 to 0.99"),
        ("target.value", float("nan"), "must be a number"),
        ("target.value", float("inf"), "must be a number"),
        ("space.batch_size", [], "a list of 1 to 64 whole numbers from 4 to 128"),
        ("space.batch_size", [8, 256], "a list of"),
        ("space.batch_size", [8, "16"], "a list of"),
        ("space.batch_size", 8, "a list of"),
        ("space.batch_size", [8] * 65, "a list of"),
        ("training.deterministic", 1, "must be true or false"),
        ("seed", 2, "must be one of 0, 1"),
        ("seed", True, "must be one of 0, 1"),
        ("pruner.name", "my_package:Pruner", "must be one of race, none"),
        ("workload", "evil.py:Evil", "the template 'task' does not take it; it takes budget.trials"),
        ("command", ["rm"], "does not take it"),
        ("executor.device", "cuda", "does not take it"),
        ("name", "other", "does not take it"),
        ("budget.trials=3\nworkload", 1, "does not take it"),
    ],
)
def test_any_other_value_is_refused_and_named(templates: Templates, key: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        templates["task"].study("mine", {key: value})


@pytest.mark.parametrize("text", ["no", "a: [b", "1.5", "x=y"])
def test_a_choice_of_text_stays_the_text_that_it_is(tmp_path: Path, text: str) -> None:
    """Not what YAML would make of it."""
    path = written(tmp_path, {"workload_settings.fault": {"choices": ["no", "a: [b", "1.5", "x=y"]}})
    spec = load_templates(path)["task"].study("mine", {"workload_settings.fault": text})
    assert spec.workload_settings["fault"] == text


def test_a_template_that_is_not_there_is_refused_naming_those_that_are(templates: Templates) -> None:
    with pytest.raises(UsageError, match="no template 'other'; it has task"):
        _ = templates["other"]


@pytest.mark.parametrize("field", sorted(OFFERS_NONE))
@pytest.mark.parametrize("inner", ["", ".x"])
def test_no_template_offers_code_places_or_the_machine(tmp_path: Path, field: str, inner: str) -> None:
    path = written(tmp_path, {f"{field}{inner}": {"choices": ["a"]}})
    with pytest.raises(SpecError, match=f"no template may admit {field}"):
        load_templates(path)


@pytest.mark.parametrize(
    ("type_", "said"),
    [
        ({"type": "text"}, "type = 'text' must be integer, number"),
        ({"type": "integer"}, "low: Field required"),
        ({"type": "integer", "low": 3, "high": 1}, "low = 3 must be at most high = 1"),
        ({"type": "integer", "low": 1, "high": 3, "most": 4}, "most is not known here"),
        ({"type": "number", "low": float("-inf"), "high": 1}, "low: "),
        ({"choices": []}, "choices: "),
        ({"choices": [["a"]]}, "choices"),
        ({}, "must be integer"),
        ("integer", "a value's type is a mapping"),
    ],
)
def test_a_type_that_is_none_is_refused(tmp_path: Path, type_: object, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_templates(written(tmp_path, {"budget.trials": type_}))
    assert "templates.task.values.budget.trials: " in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it must hold `templates` and nothing else"),
        ("templates: {}", "it must hold 1 to 200 templates"),
        ("templates: [a]", "it must hold `templates`"),
        ("templates: {task: {spec: task.yaml}}\nother: 1", "and nothing else"),
        ("templates: {task: task.yaml}", "a template has a `spec`"),
        ("templates: {task: {spec: task.yaml, run: rm}}", "and nothing else"),
        (
            "templates: {task: {spec: task.yaml, values: {nothing.such: {type: boolean}}}}",
            "a spec has no field nothing",
        ),
        ("templates: {task: {spec: task.yaml, values: {'budget..trials': {type: boolean}}}}", "is no key of a spec"),
        (
            "templates: {task: {spec: task.yaml, values: {budget.trails: {type: integer, low: 1, high: 9}}}}",
            "templates.yaml: templates.task: values.budget.trails: unknown key; did you mean 'trials'?",
        ),
        (
            "templates: {task: {spec: task.yaml, values: {target.value.x: {choices: [a]}}}}",
            "values.target.value is no group of fields",
        ),
        ("templates: {./task.yaml: {spec: task.yaml}}", "'./task.yaml' is no name of a template"),
        ("templates: {task: {spec: missing.yaml}}", "templates.yaml: templates.task: no spec"),
        ("templates: {task.yaml: {spec: task.yaml}}", "'task.yaml' is no name of a template"),
        ("templates: {task: {spec: .}}", "templates.yaml: templates.task: "),
        ("templates: {task: {spec: templates.yaml}}", "templates.yaml: templates.task: "),
        ("templates: {task: {spec: task.yaml", "not valid YAML"),
        ("templates: !!python/object/apply:os.system [ls]", "not valid YAML"),
    ],
)
def test_a_file_that_is_wrong_is_refused_at_the_start(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path)
    path.write_text(text)
    with pytest.raises(BSSearchError, match=re.escape(said)):
        load_templates(path)


def test_a_file_that_is_not_there_says_what_one_holds(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        load_templates(tmp_path / "none.yaml")
    assert caught.value.hint is not None and caught.value.hint.startswith("templates: {digits: ")


def test_a_shipped_study_is_a_template_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "templates.yaml"
    path.write_text("templates: {digits: {spec: digits}}")
    assert load_templates(path)["digits"].study("mine", {}).workload == "digits"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"priority": 0.0}, "priority = 0 must be from 1e-06 to 1e[+]06"),
        ({"priority": 5e-324}, "must be from 1e-06"),  # by which turns would be divided
        ({"priority": float("nan")}, "priority = nan must be from"),
        ({"priority": 1e9}, "to 1e[+]06"),
        ({"owner": " "}, "owner = ' ' must be a name"),
        ({"owner": "a\nb"}, "must be a name"),
        ({"template": "./spec.toml"}, "'./spec.toml' is no name of a template"),
        ({"template": "."}, "'.' is no name of a template"),
        ({"tags": ("has space",)}, "'has space' is no tag"),
        ({"template": "digits.yaml"}, "'digits.yaml' is no name of a template"),  # a file's
        (
            {"not_before": datetime.max.replace(tzinfo=timezone(timedelta(hours=-10)))},
            "it must lie from 0001-01-02",
        ),
        ({"tags": ("a\nb",)}, "is no tag"),
    ],
)
def test_a_submission_that_is_wrong_is_refused(changes: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        NewSubmission(**{"name": "a", "template": "t", "values": {}, "owner": "ann", **changes}).check()


def test_what_only_another_name_has_may_be_offered_beside_the_name(tmp_path: Path) -> None:
    write_task(
        tmp_path, space={"batch_size": [8, 16], "learning_rate": 0.1, "optimizer": {"name": "adamw", "beta1": 0.9}}
    )
    name, momentum = {"choices": ["sgd", "adamw"]}, {"type": "number", "low": 0.5, "high": 0.9}
    path = tmp_path / "templates.yaml"
    for values in (
        {"space.optimizer.name": name},
        {"space.optimizer.name": name, "space.optimizer.momentum": momentum},
    ):
        path.write_text(yaml.safe_dump({"templates": {"task": {"spec": "task.yaml", "values": values}}}))
        assert load_templates(path).offered()["task"].keys() == values.keys()
    path.write_text(
        yaml.safe_dump({"templates": {"task": {"spec": "task.yaml", "values": {"space.optimizer.momentum": momentum}}}})
    )
    with pytest.raises(SpecError, match=r"values\.space\.optimizer\.momentum: adamw has no option 'momentum'"):
        load_templates(path)


@pytest.mark.parametrize("key", VALUES)
def test_a_type_s_example_is_of_the_type(templates: Templates, key: str) -> None:
    type_ = templates["task"].values[key]
    assert type_.takes(type_.example)


def test_a_whole_number_s_example_lies_within_bounds_that_are_none() -> None:
    type_ = value_type({"type": "integer", "low": 0.5, "high": 3.5})
    assert (type_.example, type_.takes(type_.example)) == (1, True)


def test_a_whole_number_is_the_choice_that_equals_it_and_true_is_no_number() -> None:
    type_ = value_type({"choices": [0.0, 1]})
    assert (type_.takes(0), type_.takes(1.0), type_.takes(True), type_.takes("1")) == (True, True, False, False)
