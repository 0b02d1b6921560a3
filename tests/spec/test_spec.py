from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from bssearch import settings
from bssearch.errors import NotFoundError, SpecError
from bssearch.spec import StudySpec, load_spec
from bssearch.spec.reader import changed_fields
from bssearch.spec.space.domains import Range
from tests.factories import SPEC, make_spec

BUDGET = {"trials": 20, "trial_train_seconds": 10.0}


def write(folder: Path, text: str, name: str = "study.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


GOOD = """\
schema_version: 1
name: toy
workload: digits
target: {metric: accuracy, value: 0.9}
space:
  batch_size: {low: 8, high: 64}
  learning_rate: {low: 1e-3, high: 5e-1}
  dropout: {low: 0.0, high: 0.3}
default: {batch_size: 32, learning_rate: 1e-1, dropout: 0.1}
budget: {trials: 20, trial_train_seconds: 5}
"""


def test_a_fixed_value_of_the_space_is_that_of_a_default_that_leaves_it_out() -> None:
    default = {key: value for key, value in SPEC["default"].items() if key != "dropout"}
    spec = make_spec(space={**SPEC["space"], "dropout": 0.25}, default=default)
    assert spec.default_configuration.dropout == 0.25
    with pytest.raises(ValueError, match="dropout is searched, so the default must give it"):
        make_spec(default=default)


def test_an_address_is_for_the_executor_ray() -> None:
    assert make_spec(executor={"name": "ray", "address": "auto"}).executor.address == "auto"
    with pytest.raises(ValueError, match="address is for the executor ray; the executor is local"):
        make_spec(executor={"address": "auto"})


def test_a_gib_is_2_to_the_30th() -> None:
    assert make_spec(executor={"memory_limit_gib": 0.5}).executor.memory_limit_bytes == 2**29


def test_exponents_without_a_point_are_numbers(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, GOOD))
    assert spec.default.learning_rate == 0.1
    assert spec.space.dimensions()[0].low == 0.001


def test_toml_gives_the_same_study(tmp_path: Path) -> None:
    toml = """\
schema_version = 1
name = "toy"
workload = "digits"
target = {metric = "accuracy", value = 0.9}
default = {batch_size = 32, learning_rate = 0.1, dropout = 0.1}
[space]
batch_size = {low = 8, high = 64}
learning_rate = {low = 1e-3, high = 0.5}
dropout = {low = 0.0, high = 0.3}
[budget]
trials = 20
trial_train_seconds = 5
"""
    assert load_spec(write(tmp_path, toml, "study.toml")) == load_spec(write(tmp_path, GOOD))


WHOLE = "default: {batch_size: 32, learning_rate: 1e-1, dropout: 0.1, weight_decay: 0, label_smoothing: 0}"
PLAIN = "default: {batch_size: 32, learning_rate: 1e-1, dropout: 0.1}"


@pytest.mark.parametrize("name", sorted(settings.presets()))
def test_every_preset_completes_a_spec(tmp_path: Path, name: str) -> None:
    whole = WHOLE.replace("learning_rate", "warmup_epochs: 0, learning_rate") if name == "fine_tuning" else WHOLE
    text = GOOD.replace(PLAIN, whole.replace(", weight_decay: 0, label_smoothing: 0", "") if "large" in name else whole)
    assert load_spec(write(tmp_path, text + f"preset: {name}\n")).name == "toy"


def test_a_spec_counts_before_its_preset_field_by_field(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, GOOD.replace(PLAIN, WHOLE) + "preset: accuracy_first\nconfirm: {runs: 9}\n"))
    assert spec.objective == "metric_in_budget"
    assert (spec.confirm.runs, spec.confirm.top) == (9, 3)
    assert spec.space.label_smoothing == (0.0, 0.1)
    assert spec.space.dropout == Range(low=0.0, high=0.3)
    assert "preset" not in spec.model_dump()


def test_an_unknown_preset_is_named_with_what_it_is_near(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="preset = 'speed_frist' is not known; did you mean 'speed_first'"):
        load_spec(write(tmp_path, GOOD + "preset: speed_frist\n"))
    with pytest.raises(SpecError, match="there are accuracy_first, distributed"):
        load_spec(write(tmp_path, GOOD + "preset: [1]\n"))


def test_set_overrides_fields_and_makes_missing_groups(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    spec = load_spec(path, ["space.learning_rate.high=2e-1", "executor.slots=2", "name=other"])
    assert (spec.space.dimensions()[0].high, spec.executor.slots, spec.name) == (0.2, 2, "other")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("dropout: {low", "dropuot: {low", "space.dropuot: unknown key; did you mean 'dropout'? ({path}:8)"),
        ("high: 5e-1", "high: 1e-4", "space.learning_rate: low = 0.001 must be < high = 0.0001 ({path}:7)"),
        ("{low: 8, high: 64}", "[]", "({path}:6)"),
        ("high: 64", "high: 7", "space.batch_size: low = 8 must be <= high = 7 ({path}:6)"),
        ("target: {metric: accuracy, value: 0.9}\n", "", "target: field required ({path})"),
        ("value: 0.9", "value: high", "target.value = 'high': must be a valid number"),
        ("value: 0.9", "value: .nan", "target.value"),
        (", dropout: 0.1}", "}", "dropout is searched, so the default must give it ({path}:9)"),
        ("trials: 20", "trials: 3", "budget.trials = 3 must be >= 4"),
        ("name: toy", "name: to/y", "name = 'to/y'"),
        ("schema_version: 1", "schema_version: 2", "schema_version = 2"),
        ("name: toy", "name: toy\nname: toy", "{path}:3: not valid YAML: the key 'name' appears twice"),
        ("space:", "space: [", "{path}:7: not valid YAML"),
        ("space:", "- space:", "not valid YAML"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert said.replace("{path}", str(path)) in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("{name: lion}", "space.optimizer: name = 'lion' must be one of sgd, adam, adamw, adamax, nadam, "),
        ("{momentum: 0.9}", "space.optimizer: must have a name"),
        ("adamw", "space.optimizer = 'adamw': must be a mapping or a list"),
        ("{name: adamw, momentum: 0.9}", "adamw has no option 'momentum'; it has beta1, beta2, epsilon"),
    ],
)
def test_an_optimizer_that_there_is_not_is_named_with_those_that_there_are(
    tmp_path: Path, optimizer: str, said: str
) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(SpecError, match=re.escape(said)):
        load_spec(path, [f"space.optimizer={optimizer}"])


def test_wrong_overrides_are_named_as_given(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    for override, said in [
        ("budget.trials=none", "budget.trials = 'none'"),
        ("budget", "it takes the form field.name=value"),
        ("name.x=1", "name is no group of fields"),
        ("spaec.dropout=0", "spaec: unknown key; did you mean 'space'?"),
    ]:
        with pytest.raises(SpecError, match="--set") as caught:
            load_spec(path, [override])
        assert said in str(caught.value)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        load_spec("digit")
    assert caught.value.hint == "did you mean the shipped study 'digits'?"
    with pytest.raises(SpecError, match=r"a spec is \.yaml"):
        load_spec(write(tmp_path, GOOD, "study.json"))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot be read"):
        load_spec(binary)
    with pytest.raises(SpecError, match="a spec is a mapping"):
        load_spec(write(tmp_path, "- 1\n"))


@pytest.mark.slow
def test_shipped_studies_load_and_fit_the_printed_schema() -> None:
    shipped = settings.shipped_studies()
    assert "digits" in shipped
    for name, path in shipped.items():
        assert load_spec(name).name == name
        jsonschema.validate(yaml.safe_load(path.read_text().replace("1e-", "1.0e-")), StudySpec.model_json_schema())


def test_question_hash_follows_the_question_only() -> None:
    base = make_spec()
    same = make_spec(budget={"trials": 99, "trial_train_seconds": 1.0}, seed=5, pruner={"name": "none"}, name="other")
    assert same.question_hash == base.question_hash
    for change in (
        {"target": {"metric": "accuracy", "value": 0.91}},
        {"workload_settings": {"width": 3}},
        {"default": {**SPEC["default"], "learning_rate": 0.2}},
        {"space": {**SPEC["space"], "dropout": 0.1}},
    ):
        assert make_spec(**change).question_hash != base.question_hash


def test_changes_name_the_fields_that_differ() -> None:
    old = {"target": {"value": 0.9, "metric": "a"}, "workload": "x"}
    new = {"target": {"value": 0.8, "metric": "a"}, "workload": "x", "extra": 1}
    assert changed_fields(old, new) == {"target.value": (0.9, 0.8), "extra": (None, 1)}


def test_what_a_spec_leaves_out_has_its_default() -> None:
    asked = ("schema_version", "name", "workload", "target", "space", "default")
    spec = StudySpec.model_validate({**{name: SPEC[name] for name in asked}, "budget": BUDGET})
    assert spec.model_dump(mode="json", exclude={"space", "default", *asked}) == {
        "workload_settings": {},
        "arguments": [],
        "command": [],
        "report": {},
        "objective": "time_to_target",
        "price_per_device_hour": None,
        "training": {
            "precision": "auto",
            "compile": "none",
            "channels_last": False,
            "fused": None,
            "activation_checkpointing": False,
            "deterministic": False,
            "ghost_batch_size": None,
            "data": "auto",
            "loader_workers": 2,
            "measure_noise": True,
        },
        "sampler": {"name": "auto", "options": {}},
        "pruner": {"name": "balanced", "options": {}, "slack": None, "checkpoint_gib": 10.0},
        "confirm": {"top": 2, "runs": 3, "max_runs": 30, "train_seconds": None},
        "budget": {**BUDGET, "wall_seconds": None, "least_improvement": 0.02, "least_trials": 0, "schedule_trials": 12},
        "seed": 0,
        "executor": {
            "name": "local",
            "slots": 1,
            "threads": 1,
            "device": "auto",
            "hang_seconds": 300.0,
            "memory_limit_gib": None,
            "address": None,
        },
        "log": [],
    }


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        ({"pruner": {"slack": 1.0}}, {"pruner": {"slack": 0.99}}),
        ({"pruner": {"checkpoint_gib": 0.0}}, {"pruner": {"checkpoint_gib": -1.0}}),
        ({"pruner": {"checkpoint_gib": 1e6}}, {"pruner": {"checkpoint_gib": 1.1e6}}),
        ({"confirm": {"runs": 0}}, {"confirm": {"runs": -1}}),
        ({"confirm": {"top": 1}}, {"confirm": {"top": 0}}),
        ({"confirm": {"runs": 3, "max_runs": 3}}, {"confirm": {"runs": 3, "max_runs": 2}}),
        ({"confirm": {"max_runs": 10_000}}, {"confirm": {"max_runs": 10_001}}),
        ({"confirm": {"runs": 1, "max_runs": 1}}, {"confirm": {"runs": 0, "max_runs": 1}}),
        ({"budget": {**BUDGET, "trials": 5}}, {"budget": {**BUDGET, "trials": 4}}),
        ({"budget": {**BUDGET, "trials": 1_000_000}}, {"budget": {**BUDGET, "trials": 1_000_001}}),
        ({"budget": {**BUDGET, "least_improvement": 0.0}}, {"budget": {**BUDGET, "least_improvement": -0.1}}),
        ({"budget": {**BUDGET, "least_improvement": 0.99}}, {"budget": {**BUDGET, "least_improvement": 1.0}}),
        ({"training": {"ghost_batch_size": 2}}, {"training": {"ghost_batch_size": 1}}),
        ({"training": {"loader_workers": 0}}, {"training": {"loader_workers": -1}}),
        ({"training": {"loader_workers": 256}}, {"training": {"loader_workers": 257}}),
        ({"executor": {"slots": 1}}, {"executor": {"slots": 0}}),
        ({"executor": {"threads": 1}}, {"executor": {"threads": 0}}),
        ({"seed": 0}, {"seed": -1}),
        ({"seed": 2**31 - 1}, {"seed": 2**31}),
        ({"name": "x" * 100}, {"name": "x" * 101}),
    ],
)
def test_every_bound_of_a_spec_lies_where_it_is_said(allowed: dict[str, Any], refused: dict[str, Any]) -> None:
    make_spec(**allowed)
    with pytest.raises(ValueError):
        make_spec(**refused)


def test_a_dict_is_read_as_a_file_is_and_left_as_it_was() -> None:
    given = {name: value for name, value in SPEC.items() if name not in {"schema_version", "workload"}}
    before = json.dumps(given)
    spec = load_spec(given, ["budget.trials=30"])
    assert (spec.schema_version, spec.budget.trials, json.dumps(given)) == (1, 30, before)
    assert load_spec({**given, "workload": "digits"}) == make_spec() == StudySpec(**{**given, "workload": "digits"})
    whole = {**given, "space": {**SPEC["space"], "weight_decay": (0.0, 1e-4, 1e-3)}}
    assert load_spec(whole).space == make_spec().space
    wrong: list[tuple[dict[str, object], str]] = [
        ({"seed": math.nan}, "seed = nan must be a finite number (given in Python)"),
        ({"budget": {"trials": 0, "trial_train_seconds": 1}}, "budget.trials = 0: must be >= 1"),
        ({"spaec": 1}, "spaec: unknown key; did you mean 'space'? (given in Python)"),
        ({"preset": "fast"}, "given in Python: preset = 'fast' is not known"),
    ]
    for change, said in wrong:
        with pytest.raises(SpecError, match=re.escape(said)):
            load_spec({**given, **change})
    circle: dict[str, object] = {}
    circle["space"] = circle
    with pytest.raises(SpecError, match="levels lie in each other"):
        load_spec(circle)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"command": ["./train.sh", "{batch_size}", "{learning_rate}"]},
            "batch_schedule: a command is given one batch",
        ),
        ({"workload": "objective"}, "batch_schedule: a function is given one batch size"),
    ],
)
def test_what_is_given_one_batch_size_cannot_let_it_grow(changes: dict[str, Any], expected: str) -> None:
    grows = {**SPEC["space"], "dropout": 0.0, "weight_decay": 0.0, "batch_schedule": {"name": "geometric"}}
    raw = {name: value for name, value in SPEC.items() if name != "workload"}
    raw |= {"space": grows, "default": {"batch_size": 32, "learning_rate": 0.1}, **changes}
    with pytest.raises(ValidationError, match=expected):
        StudySpec.model_validate(raw)


def test_a_script_keeps_its_gradients_to_itself() -> None:
    grows = {**SPEC["space"], "batch_schedule": {"name": ["geometric", "noise_scale"]}}
    with pytest.raises(ValidationError, match="a program of your own keeps its gradients to itself"):
        make_spec(workload="train.py", space=grows)
    grows["batch_schedule"] = {"name": "geometric"}
    assert make_spec(workload="train.py", space=grows).is_program
