"""What a parameter may be, and which values a template lets others choose."""

import re
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from bssearch.errors import BSSearchError, NotFoundError, SpecError, UsageError
from bssearch.spec import SearchSpace
from bssearch.spec.space.domains import (
    LIMITS,
    BatchLadder,
    Dimension,
    Domain,
    Range,
    RelativeLearningRate,
    Schedule,
    StrictModel,
    bounds,
    describe,
    domain_kind,
    holds,
)
from bssearch.spec.space.optimizers import Sgd
from bssearch.spec.templates import OFFERS_NONE, NewSubmission, Templates, load_templates, value_type
from tests.cli.task import write_task

NEAR_ZERO, NEAR_ONE = 1e-12, 1 - 1e-12
CLOSED_BELOW = ("dropout", "label_smoothing", "momentum", "beta1", "beta2")


def space_with(field: str, value: Any) -> SearchSpace:
    """Return a space with a value of a parameter, wherever in the spec the parameter stands."""
    fields: dict[str, Any] = {"batch_size": 8, "learning_rate": 0.1}
    if field == "momentum":
        fields["optimizer"] = {"name": "sgd", "momentum": value, "nesterov": False}
    elif field in {"beta1", "beta2", "epsilon"}:
        fields["optimizer"] = {"name": "adamw", field: value}
    elif field in {"horizon_samples", "decay_share"}:
        fields["schedule"] = {"name": "warmup_stable_decay", "horizon_samples": 1000, field: value}
    else:
        fields[field] = value
    return SearchSpace.model_validate(fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, 0.0) for field in ("warmup_epochs", "weight_decay", *CLOSED_BELOW)),
        *((field, NEAR_ONE) for field in (*CLOSED_BELOW, "ema_decay")),
        *((field, NEAR_ZERO) for field in ("clip_norm", "ema_decay", "epsilon")),
        *((field, 1e9) for field in ("warmup_epochs", "weight_decay", "clip_norm", "epsilon", "horizon_samples")),
        ("horizon_samples", 1.0),
    ],
)
def test_a_parameter_may_be_all_that_its_limits_allow(field: str, value: float) -> None:
    space_with(field, value)
    space_with(field, [value, value])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, -NEAR_ZERO) for field in ("warmup_epochs", "weight_decay", *CLOSED_BELOW)),
        *((field, 1.0) for field in (*CLOSED_BELOW, "ema_decay")),
        *((field, 0.0) for field in ("clip_norm", "ema_decay", "epsilon")),
        ("horizon_samples", 0.999),
    ],
)
def test_a_parameter_beyond_its_limits_is_refused_fixed_listed_or_in_a_range(field: str, value: float) -> None:
    inside = 0.5 if value <= 0 or value == 1.0 else 2.0
    low, high = sorted((inside, value))
    for domain in (value, [inside, value], {"low": low, "high": high}):
        with pytest.raises(ValidationError):
            space_with(field, domain)
    space_with(field, inside)


def test_each_limited_parameter_is_a_field_of_the_space() -> None:
    assert all(space_with(field, 1.0 if field == "horizon_samples" else 0.5) for field in LIMITS)


@pytest.mark.parametrize(
    ("made", "fields", "expected"),
    [
        *((Range, {"low": 0.1, "log": log}, {"is_log": log is not False}) for log in (None, False, True)),
        *((Range, {"low": low, "log": log}, {"is_log": False}) for low in (0.0, -1.0) for log in (None, False)),
        *((Range, {"low": low, "log": True}, None) for low in (0.0, -1.0)),
        *((made, {"low": 0.5, "high": 0.5}, None) for made in (Range, RelativeLearningRate)),
        (BatchLadder, {"low": 8, "high": 8}, {"rungs": (8,)}),
        (BatchLadder, {"low": 1, "high": 2}, {"rungs": (1, 2)}),
        (BatchLadder, {"low": 9, "high": 16}, {"rungs": (16,)}),
        (BatchLadder, {"low": 8, "high": 15}, {"rungs": (8,)}),
        *((BatchLadder, {"low": low, "high": high}, None) for low, high in ((16, 8), (9, 15), (0, 8))),
    ],
)
def test_a_range_has_two_ends_and_a_log_scale_is_above_zero_and_a_ladder_holds_both_its_ends(
    made: type[StrictModel], fields: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    with nullcontext() if expected else pytest.raises(ValidationError):
        found = made.model_validate({"high": 1.0, **fields})
        assert {name: getattr(found, name) for name in expected or ()} == expected


def test_the_form_of_a_value_says_what_kind_of_domain_it_is() -> None:
    assert [domain_kind(one) for one in (0.5, True, [0.5], (0.5,), {"low": 0}, Range(low=0, high=1))] == [
        "fixed",
        "fixed",
        "choices",
        "choices",
        "range",
        "range",
    ]
    domain: TypeAdapter[Domain] = TypeAdapter(Domain)
    assert domain.validate_python([0.1, 0.2]) == (0.1, 0.2)
    with pytest.raises(ValidationError):
        domain.validate_python([])


@pytest.mark.parametrize(
    ("domain", "ends"), [(Range(low=-1.0, high=2.0), (-1.0, 2.0)), ((3, 1, 2), (1, 3)), (0.5, (0.5, 0.5))]
)
def test_the_bounds_of_a_domain_are_its_least_and_its_greatest_value(domain: Any, ends: tuple[float, float]) -> None:
    assert bounds(domain) == ends


@pytest.mark.parametrize(
    ("domain", "value", "inside"),
    [
        (Range(low=0.1, high=0.3), 0.2, True),
        (Range(low=0.1, high=0.3), 0.1, True),
        (Range(low=0.1, high=0.3), 0.3, True),
        (Range(low=0.1, high=0.3), 0.1 * (1 - 1e-12), True),
        (Range(low=0.1, high=0.3), 0.3 * (1 + 1e-12), True),
        (Range(low=0.1, high=0.3), 0.0999, False),
        (Range(low=0.1, high=0.3), 0.3001, False),
        ((0.1, 0.3), 0.3, True),
        ((0.1, 0.3), 0.1 + 0.2, True),
        ((0.1, 0.3), 0.2, False),
        (0.3, 0.1 + 0.2, True),
        (0.3, 0.31, False),
        (("sgd", "adamw"), "adamw", True),
        (("sgd", "adamw"), "lion", False),
        (("sgd", "adamw"), 0.5, False),
        ((True, False), True, True),
        (None, 0.5, False),
        (0.5, None, False),
    ],
)
def test_a_value_lies_in_a_domain_up_to_rounding_at_its_ends(domain: Any, value: Any, inside: bool) -> None:
    assert holds(domain, value) is inside


def test_a_domain_in_words_has_every_number_times_the_factor() -> None:
    for domain, numbers in ((Range(low=0.1, high=0.3), ("1", "3")), ((0.1, 0.3), ("1", "3")), (0.2, ("2",))):
        assert all(one in describe(domain, 10.0) for one in numbers)
        assert all(f"{float(one) / 10:g}" in describe(domain) for one in numbers)
    assert "True" in describe(True, 10.0) and "10" not in describe(True, 10.0)


RATES = Dimension("learning_rate", low=0.1, high=0.4, log=True)
IN_RATES = [(0.2, 0.2), (0.01, 0.1), (1.0, 0.4), (0.1, 0.1), (0.4, 0.4), (None, 0.1), (0.0, 0.1)]


@pytest.mark.parametrize(
    ("choices", "value", "nearest"),
    [
        *(((), value, nearest) for value, nearest in IN_RATES),
        ((0.1, 0.2, 0.4), 0.2, 0.2),
        ((1, 10, 100), 40, 100),  # by ratio: 40 is 4 times 10, and 100 is 2.5 times 40
        ((1, 10, 100), 30, 10),
        ((0.5, 10), 4, 10),
        ((0, 10, 100), 40, 10),  # a zero has no ratio: by difference
        ((1, 10, 100), 0, 1),
        ((-5, 1, 8), 5, 8),
        (("sgd", "adamw"), 0.5, "sgd"),
        ((8, "auto"), 9, 8),
        (("auto", 8), 9, "auto"),
        ((8, 16), "auto", 8),
        ((True, False), 0.7, True),
        ((16, 8), None, 16),
    ],
)
def test_the_nearest_is_the_value_or_an_end_of_a_range_and_a_choice_by_ratio_if_all_are_above_zero(
    choices: Any, value: Any, nearest: Any
) -> None:
    assert replace(RATES, choices=choices).nearest(value) == nearest


def test_a_coordinate_that_is_not_used_has_some_value_of_its_dimension() -> None:
    assert Dimension("one", low=0.25, high=0.5).any_value == 0.25
    assert Dimension("one", choices=("b", "a")).any_value == "b"


@pytest.mark.parametrize(
    ("names", "horizon", "is_right"),
    [
        ("constant", None, True),
        ("cosine", 1000, True),
        ("linear", [1000, 2000], True),
        (["constant", "linear"], 1000, True),
        (["constant", "constant"], None, True),
        ("cosine", None, False),
        (["constant", "linear"], None, False),
        ("constant", 1000, False),
        (["constant"], 1000, False),
    ],
)
def test_a_schedule_has_a_horizon_where_one_of_its_kinds_decays(names: Any, horizon: Any, is_right: bool) -> None:
    with nullcontext() if is_right else pytest.raises(ValidationError):
        schedule = Schedule.model_validate({"name": names, "horizon_samples": horizon})
        assert schedule.names == ((names,) if isinstance(names, str) else tuple(names))


def test_nesterov_needs_a_momentum_above_zero_in_all_of_its_domain() -> None:
    for momentum in (0.0, (0.0, 0.9), Range(low=0.0, high=0.9)):
        with pytest.raises(ValidationError):
            Sgd(momentum=momentum)
        assert not Sgd(momentum=momentum, nesterov=False).nesterov
    assert Sgd(momentum=0.1).nesterov


# Templates ------------------------------------------------------------------------------------------------------------


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
        ("training.deterministic", 1, "must be one of true, false"),
        ("seed", 2, "must be one of 0, 1"),
        ("seed", True, "must be one of 0, 1"),
        ("pruner.name", "my_package:Pruner", "must be one of race, none"),
        ("workload", "evil.py:Evil", "is not a value of the template 'task', which takes budget.trials"),
        ("command", ["rm"], "is not a value of the template"),
        ("executor.device", "cuda", "is not a value of the template"),
        ("name", "other", "is not a value of the template"),
        ("budget.trials=3\nworkload", 1, "is not a value of the template"),
    ],
)
def test_any_other_value_is_refused_and_named(templates: Templates, key: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        templates["task"].study("mine", {key: value})


@pytest.mark.parametrize("values", [[1], "budget.trials", None])
def test_what_is_no_mapping_of_values_is_refused(templates: Templates, values: Any) -> None:
    with pytest.raises(UsageError, match="must be a mapping of keys to values"):
        templates["task"].study("mine", values)


@pytest.mark.parametrize("text", ["no", "a: [b", "1.5", "x=y"])
def test_a_choice_of_text_stays_the_text_that_it_is(tmp_path: Path, text: str) -> None:
    """Not what YAML would make of it."""
    path = written(tmp_path, {"workload_settings.fault": {"choices": ["no", "a: [b", "1.5", "x=y"]}})
    template = load_templates(path)["task"]
    assert template.study("mine", {"workload_settings.fault": text}).workload_settings["fault"] == text


def test_a_template_that_is_not_there_is_refused_naming_those_that_are(templates: Templates) -> None:
    with pytest.raises(UsageError, match="no template 'other'; choose from task"):
        _ = templates["other"]


@pytest.mark.parametrize("field", sorted(OFFERS_NONE))
@pytest.mark.parametrize("inner", ["", ".x"])
def test_no_template_offers_code_places_or_the_machine(tmp_path: Path, field: str, inner: str) -> None:
    with pytest.raises(SpecError, match=f"no template may offer {field}"):
        load_templates(written(tmp_path, {f"{field}{inner}": {"choices": ["a"]}}))


@pytest.mark.parametrize(
    ("type_", "said"),
    [
        ({"type": "text"}, "type = 'text' must be integer, number"),
        ({"type": "integer"}, "low: Field required"),
        ({"type": "integer", "low": 3, "high": 1}, "low = 3 must be at most high = 1"),
        ({"type": "integer", "low": 1, "high": 3, "most": 4}, "unknown key most"),
        ({"type": "number", "low": float("-inf"), "high": 1}, "low: "),
        ({"choices": []}, "choices: "),
        ({"choices": [["a"]]}, "choices"),
        ({}, "must be integer"),
        ("integer", "a value's type must be a mapping"),
    ],
)
def test_a_type_that_is_none_is_refused(tmp_path: Path, type_: object, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_templates(written(tmp_path, {"budget.trials": type_}))
    assert "templates.task.values.budget.trials: " in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must hold only `templates`"),
        ("templates: {}", "must hold 1 to 200 templates"),
        ("templates: [a]", "must hold only `templates`"),
        ("templates: {task: {spec: task.yaml}}\nother: 1", "must hold only"),
        ("templates: {task: task.yaml}", "a template must have `spec`"),
        ("templates: {task: {spec: task.yaml, run: rm}}", "but no other key"),
        (
            "templates: {task: {spec: task.yaml, values: {nothing.such: {type: boolean}}}}",
            "a spec has no field nothing",
        ),
        ("templates: {task: {spec: task.yaml, values: {'budget..trials': {type: boolean}}}}", "is not a key of a spec"),
        (
            "templates: {task: {spec: task.yaml, values: {budget.trails: {type: integer, low: 1, high: 9}}}}",
            "templates.yaml: templates.task: values.budget.trails: unknown key; did you mean 'trials'?",
        ),
        (
            "templates: {task: {spec: task.yaml, values: {target.value.x: {choices: [a]}}}}",
            "values.target.value is not a group of fields",
        ),
        ("templates: {./task.yaml: {spec: task.yaml}}", "'./task.yaml' is not a name of a template"),
        ("templates: {task: {spec: missing.yaml}}", "templates.yaml: templates.task: no spec"),
        ("templates: {task.yaml: {spec: task.yaml}}", "'task.yaml' is not a name of a template"),
        ("templates: {task: {spec: .}}", "templates.yaml: templates.task: "),
        ("templates: {task: {spec: templates.yaml}}", "templates.yaml: templates.task: "),
        ("templates: {task: {spec: task.yaml", "unreadable YAML"),
        ("templates: !!python/object/apply:os.system [ls]", "unreadable YAML"),
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
    assert caught.value.hint is not None and caught.value.hint.startswith("write templates: {digits: ")


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
        ({"template": "./spec.toml"}, "'./spec.toml' is not a name of a template"),
        ({"template": "."}, "'.' is not a name of a template"),
        ({"tags": ("has space",)}, "'has space' is not a tag"),
        ({"template": "digits.yaml"}, "'digits.yaml' is not a name of a template"),  # a file's
        (
            {"not_before": datetime.max.replace(tzinfo=timezone(timedelta(hours=-10)))},
            "must be from 0001-01-02",
        ),
        ({"tags": ("a\nb",)}, "is not a tag"),
    ],
)
def test_a_submission_that_is_wrong_is_refused(changes: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        NewSubmission(**{"name": "a", "template": "t", "values": {}, "owner": "ann", **changes}).check()


def test_an_option_of_another_name_may_be_offered_only_beside_the_name(tmp_path: Path) -> None:
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


def test_a_boolean_takes_true_and_false_alone_and_no_other_field() -> None:
    type_ = value_type({"type": "boolean"})
    assert [type_.takes(one) for one in (True, False, 1, 0, "true")] == [True, True, False, False, False]
    with pytest.raises(ValueError, match="unknown key low"):
        value_type({"type": "boolean", "low": 0})
