import json
import math
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from bssearch import DatabaseError, NotFoundError, SpecError, UsageError, settings
from bssearch.commands.trials import any_configuration_of, configuration_of, with_schedule
from bssearch.records import Configuration, Phase
from bssearch.spec import (
    BudgetSpec,
    ConfirmSpec,
    ExecutorSpec,
    PrunerSpec,
    SamplerSpec,
    StudySpec,
    TrainingSpec,
    admitted,
    load_spec,
    problem_with,
)
from bssearch.spec.reader import changed_fields, file_schema, spec_of
from bssearch.spec.space.domains import Range, StrictModel
from tests.factories import SPEC, make_plan, make_spec, make_study_record

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


def refused(given: Any, *overrides: str) -> str:
    """Have a spec refused; return what is said."""
    with pytest.raises(SpecError) as caught:
        load_spec(given, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_fixed_value_of_the_space_is_that_of_a_default_that_leaves_it_out() -> None:
    default = {key: value for key, value in SPEC["default"].items() if key != "dropout"}
    spec = make_spec(space={**SPEC["space"], "dropout": 0.25}, default=default)
    assert spec.default_configuration.dropout == 0.25
    with pytest.raises(ValueError, match="dropout is searched but missing from the default; give the default a value"):
        make_spec(default=default)


def test_an_address_is_for_the_executor_ray() -> None:
    assert make_spec(executor={"name": "ray", "address": "auto"}).executor.address == "auto"
    with pytest.raises(ValueError, match="needs the executor ray, not local"):
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
    assert (spec.objective, spec.confirm.runs, spec.confirm.top) == ("metric_in_budget", 9, 3)
    assert (spec.space.label_smoothing, spec.space.dropout) == ((0.0, 0.1), Range(low=0.0, high=0.3))
    assert "preset" not in spec.model_dump()


def test_an_unknown_preset_is_named_with_what_it_is_near(tmp_path: Path) -> None:
    near = refused(write(tmp_path, GOOD + "preset: speed_frist\n"))
    assert "unknown preset 'speed_frist'; did you mean 'speed_first'" in near
    assert "choose from accuracy_first, distributed" in refused(write(tmp_path, GOOD + "preset: [1]\n"))


def test_set_overrides_fields_and_makes_missing_groups(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, GOOD), ["space.learning_rate.high=2e-1", "executor.slots=2", "name=other"])
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
        (
            ", dropout: 0.1}",
            "}",
            "dropout is searched but missing from the default; give the default a value ({path}:9)",
        ),
        ("trials: 20", "trials: 3", "budget.trials = 3 must be >= 4"),
        ("name: toy", "name: to/y", "name = 'to/y'"),
        ("schema_version: 1", "schema_version: 2", "schema_version = 2"),
        ("name: toy", "name: toy\nname: toy", "{path}:3: unreadable YAML: the key 'name' appears twice"),
        ("space:", "space: [", "{path}:7: unreadable YAML"),
        ("space:", "- space:", "unreadable YAML"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = write(tmp_path, GOOD.replace(old, new))
    assert said.replace("{path}", str(path)) in refused(path)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("{name: lion}", "space.optimizer: name = 'lion' must be one of sgd, adam, adamw, adamax, nadam, "),
        ("{momentum: 0.9}", "space.optimizer: must have a name"),
        ("adamw", "space.optimizer = 'adamw': must be a mapping or a list"),
        ("{name: adamw, momentum: 0.9}", "adamw has no option 'momentum'; choose from beta1, beta2, epsilon"),
    ],
)
def test_an_optimizer_that_there_is_not_is_named_with_those_that_there_are(
    tmp_path: Path, optimizer: str, said: str
) -> None:
    assert said in refused(write(tmp_path, GOOD), f"space.optimizer={optimizer}")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("budget.trials=none", "budget.trials = 'none'"),
        ("budget", "must have the form field.name=value"),
        ("name.x=1", "name is not a group of fields"),
        ("spaec.dropout=0", "spaec: unknown key; did you mean 'space'?"),
    ],
)
def test_wrong_overrides_are_named_as_given(tmp_path: Path, override: str, said: str) -> None:
    told = refused(write(tmp_path, GOOD), override)
    assert "--set" in told and said in told


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        load_spec("digit")
    assert caught.value.hint == "did you mean the shipped study 'digits'?"
    assert "a spec's suffix must be .yaml" in refused(write(tmp_path, GOOD, "study.json"))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refused(binary)
    assert "a spec is a mapping" in refused(write(tmp_path, "- 1\n"))


@pytest.mark.slow
def test_shipped_studies_load_and_fit_the_printed_schema() -> None:
    shipped = settings.shipped_studies()
    assert "digits" in shipped
    for name, path in shipped.items():
        assert load_spec(name).name == name
        jsonschema.validate(yaml.safe_load(path.read_text().replace("1e-", "1.0e-")), file_schema())


@pytest.mark.parametrize(
    "change",
    [
        {"target": {"metric": "accuracy", "value": 0.91}},
        {"workload_settings": {"width": 3}},
        {"default": {**SPEC["default"], "learning_rate": 0.2}},
        {"space": {**SPEC["space"], "dropout": 0.1}},
    ],
)
def test_question_hash_follows_the_question_only(change: dict[str, Any]) -> None:
    base = make_spec()
    same = make_spec(budget={"trials": 99, "trial_train_seconds": 1.0}, seed=5, pruner={"name": "none"}, name="other")
    assert same.question_hash == base.question_hash
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
        "scales": [],
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
            "sync_batch_norm": False,
            "data": "auto",
            "loader_workers": 2,
            "measure_noise": True,
            "batch_unit": "samples",
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
            "devices": [1],
            "memory_limit_gib": None,
            "address": None,
        },
        "log": [],
    }


def test_a_dict_is_read_as_a_file_is_and_left_as_it_was() -> None:
    given = {name: value for name, value in SPEC.items() if name not in {"schema_version", "workload"}}
    before = json.dumps(given)
    spec = load_spec(given, ["budget.trials=30"])
    assert (spec.schema_version, spec.budget.trials, json.dumps(given)) == (1, 30, before)
    assert load_spec({**given, "workload": "digits"}) == make_spec() == StudySpec(**{**given, "workload": "digits"})
    assert (
        load_spec({**given, "space": {**SPEC["space"], "weight_decay": (0.0, 1e-4, 1e-3)}}).space == make_spec().space
    )
    wrong: list[tuple[dict[str, object], str]] = [
        ({"seed": math.nan}, "seed = nan must be a finite number (given in Python)"),
        ({"budget": {"trials": 0, "trial_train_seconds": 1}}, "budget.trials = 0: must be >= 1"),
        ({"spaec": 1}, "spaec: unknown key; did you mean 'space'? (given in Python)"),
        ({"preset": "fast"}, "given in Python: unknown preset 'fast'"),
    ]
    assert [said for change, said in wrong if said not in refused({**given, **change})] == []
    circle: dict[str, object] = {}
    circle["space"] = circle
    assert "more than 50 nested levels" in refused(circle)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"command": ["./train.sh", "{batch_size}", "{learning_rate}"]},
            "batch_schedule: a command takes one batch",
        ),
        ({"workload": "objective"}, "batch_schedule: a function takes one batch size"),
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
    with pytest.raises(ValidationError, match="cannot read the gradients of your own program"):
        make_spec(workload="train.py", space=grows)
    grows["batch_schedule"] = {"name": "geometric"}
    assert make_spec(workload="train.py", space=grows).is_program


ABOVE_ZERO = math.ulp(0.0)


@pytest.mark.parametrize(
    ("part", "field", "inside", "outside"),
    [
        (StudySpec, "seed", 0, -1),
        (StudySpec, "seed", 2**31 - 1, 2**31),
        (StudySpec, "name", "x" * 100, "x" * 101),
        (BudgetSpec, "trials", 1, 0),
        (BudgetSpec, "trial_train_seconds", ABOVE_ZERO, 0.0),
        (BudgetSpec, "wall_seconds", ABOVE_ZERO, 0.0),
        (BudgetSpec, "least_improvement", 0.0, -1e-9),
        (BudgetSpec, "least_trials", 0, -1),
        (ConfirmSpec, "top", 1, 0),
        (ConfirmSpec, "runs", 0, -1),
        (PrunerSpec, "slack", 1.0, 1 - 1e-9),
        (PrunerSpec, "checkpoint_gib", 0.0, -1e-9),
        (TrainingSpec, "ghost_batch_size", 2, 1),
        (TrainingSpec, "loader_workers", 0, -1),
        (ExecutorSpec, "slots", 1, 0),
        (ExecutorSpec, "threads", 1, 0),
        (ExecutorSpec, "hang_seconds", ABOVE_ZERO, 0.0),
        (ExecutorSpec, "memory_limit_gib", ABOVE_ZERO, 0.0),
        (BudgetSpec, "trials", 1_000_000, 1_000_001),
        (BudgetSpec, "trial_train_seconds", 1e9, 1.1e9),
        (BudgetSpec, "wall_seconds", 1e9, 1.1e9),
        (BudgetSpec, "least_improvement", 1 - 1e-9, 1.0),
        (BudgetSpec, "least_trials", 1_000_000, 1_000_001),
        (PrunerSpec, "checkpoint_gib", 1e6, 1.1e6),
        (TrainingSpec, "loader_workers", 256, 257),
        (ExecutorSpec, "memory_limit_gib", 1e6, 1.1e6),
    ],
)
def test_a_field_takes_its_bound_and_nothing_beyond(
    part: type[StrictModel], field: str, inside: float | str, outside: float | str
) -> None:
    others: dict[str, Any] = {BudgetSpec: BUDGET, StudySpec: SPEC}.get(part, {})
    assert getattr(part.model_validate({**others, field: inside}), field) == inside
    with pytest.raises(ValidationError) as caught:
        part.model_validate({**others, field: outside})
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


@pytest.mark.parametrize(
    ("part", "fields", "is_right"),
    [
        (ConfirmSpec, {"runs": 3, "max_runs": 3}, True),
        (ConfirmSpec, {"runs": 3, "max_runs": 2}, False),
        (ConfirmSpec, {"runs": 0}, True),
        (ConfirmSpec, {"runs": 0, "max_runs": 5}, False),
        (ConfirmSpec, {"runs": 1, "max_runs": 10_000, "train_seconds": 1e9}, True),
        (ConfirmSpec, {"runs": 1, "max_runs": 10_001}, False),
        (ConfirmSpec, {"runs": 1, "max_runs": 5, "train_seconds": 0.0}, False),
        (ConfirmSpec, {"train_seconds": 9.0}, False),
        *((ExecutorSpec, {"device": device}, True) for device in ("auto", "cpu", "cuda", "cuda:0", "cuda:12")),
        *((ExecutorSpec, {"device": device}, False) for device in ("cuda:", "gpu")),
        *((part, {"name": "unregistered"}, False) for part in (SamplerSpec, PrunerSpec, ExecutorSpec)),
        (TrainingSpec, {"compile": "auto"}, False),
        (TrainingSpec, {"compile": "capture"}, False),
        (TrainingSpec, {"channels_last": "auto"}, False),
    ],
)
def test_further_runs_come_after_the_first_and_a_device_kind_and_mode_must_be_known(
    part: type[StrictModel], fields: dict[str, Any], is_right: bool
) -> None:
    with nullcontext() if is_right else pytest.raises(ValidationError):
        assert part.model_validate(fields).model_dump(include=set(fields)) == fields


@pytest.mark.parametrize("slots", [1.5, True, "2", "all", None])
def test_slots_are_a_whole_number_or_auto(slots: Any) -> None:
    assert ExecutorSpec.model_validate({"slots": "auto"}).slots == "auto"
    with pytest.raises(ValidationError, match="a whole number from 1 to 65536, or auto"):
        ExecutorSpec.model_validate({"slots": slots})


WIDE = make_spec(
    space={
        **SPEC["space"],
        "optimizer": [{"name": "sgd", "momentum": [0.8, 0.9]}, {"name": "adamw", "learning_rate_scale": 0.01}],
        "schedule": {"name": ["constant", "cosine"], "horizon_samples": {"low": 10000, "high": 90000}},
        "model": {"activation": ["relu", "gelu"], "width": {"low": 8, "high": 64}, "bias": [True, False]},
        "loss": {"gamma": {"low": 0.5, "high": 4.0}},
    },
    default={
        **SPEC["default"],
        "schedule": "constant",
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "model": {"activation": "relu", "width": 16, "bias": True},
        "loss": {"gamma": 1.0},
    },
)
BASE = WIDE.default_configuration


GROWING = {"batch_schedule": "milestones", "batch_stages": "2000:64", "batch_rate_rule": "sqrt"}


def changed(parameters: dict[str, Any] | None = None, **fields: Any) -> Configuration:
    return replace(BASE, **fields, parameters={**BASE.parameters, **(parameters or {})})


@pytest.mark.parametrize(
    ("configuration", "named"),
    [
        (changed({"model.activation": "$(id)relu"}), "model.activation"),
        (changed({"model.activation": 3}), "model.activation"),
        (changed({"model.activation": True}), "model.activation"),
        (changed({"model.activation": None}), "model.activation"),
        (changed({"model.width": "16"}), "model.width"),
        (changed({"model.width": 16.5}), "model.width"),
        (changed({"model.width": 65}), "model.width"),
        (changed({"model.bias": 1}), "model.bias"),
        (changed({"model.bias": "true; id"}), "model.bias"),
        (changed({"loss.gamma": "0.5"}), "loss.gamma"),
        (changed({"loss.gamma": math.nan}), "loss.gamma"),
        (changed({"loss.gamma": 10**400}), "loss.gamma"),
        (changed({"loss.gamma": [1.0]}), "loss.gamma"),
        (changed({"model.other": "relu"}), "model.other"),
        (changed({"schedule": "$(id)"}), "schedule"),
        (changed({"schedule": "linear"}), "schedule"),
        (changed({"momentum": "0.9"}), "momentum"),
        (changed({"momentum": 0.5}), "momentum"),
        (changed({"nesterov": "true"}), "nesterov"),
        (changed({"beta_2": 0.9}), "beta_2"),
        (changed({"horizon_samples": "1e5"}), "horizon_samples"),
        (changed({"clip_norm": 0.0}), "clip_norm"),
        (changed({"clip_norm": "tight"}), "clip_norm"),
        (changed({"ema_decay": 1.0}), "ema_decay"),
        (changed({"ema_decay": True}), "ema_decay"),
        (changed(optimizer="$(id)"), "optimizer"),
        (changed(optimizer="adamw"), "missing"),
        (changed(learning_rate="0.1"), "learning_rate"),
        (changed(learning_rate=1e-9), "learning_rate"),
        (changed(learning_rate=-0.1), "learning_rate"),
        (changed(learning_rate=math.inf), "learning_rate"),
        (changed(weight_decay=0.5), "weight_decay"),
        (changed(dropout=0.7), "dropout"),
        (changed(dropout=True), "dropout"),
        (changed(batch_size=48, micro_batch_size=48), "batch_size"),
        (changed(batch_size=2**20, micro_batch_size=2**20), "batch_size"),
        (changed(batch_size=64, micro_batch_size=16), "batch_size"),
        (changed(batch_size="32"), "batch_size"),
        (changed(batch_size=True, micro_batch_size=True), "batch_size"),
        (changed(micro_batch_size=32.0), "micro_batch_size"),
        (changed(accumulation_steps=0), "accumulation_steps"),
        (changed(batch_size=64, world_size=2.0), "world_size"),
        (changed({**GROWING, "batch_stages": "$(id):64"}), "batch_stages"),
        (changed({**GROWING, "batch_stages": "2000:48"}), "48"),
        (changed({**GROWING, "batch_schedule": "$(id)"}), "batch_schedule"),
    ],
)
def test_a_value_that_the_spec_does_not_have_is_named(configuration: Configuration, named: str) -> None:
    problem = problem_with(WIDE, configuration)
    assert problem is not None and named in problem


def sampled_from(spec: StudySpec, draws: random.Random) -> Configuration:
    """Return a configuration as a sampler gives it, in any of its batch sizes and micro-batches."""
    values = {}
    for dimension in spec.space.dimensions():
        between = draws.uniform(dimension.low, dimension.high) if not dimension.choices else None
        values[dimension.name] = draws.choice(dimension.choices) if between is None else between
        if dimension.integer and between is not None:
            values[dimension.name] = round(between)
    size = draws.choice(spec.batch_sizes)
    return spec.space.decode(size, values).in_micro_batches(draws.choice([1, size]))


def test_what_a_sampler_or_a_person_gives_is_admitted() -> None:
    draws = random.Random(0)
    assert {problem_with(WIDE, sampled_from(WIDE, draws)) for _ in range(300)} == {None}
    asked: list[dict[str, Any]] = [
        {"batch_size": 64},
        {"optimizer": "adamw", "batch_size": 128},
        {"schedule": "cosine", "horizon_samples": 20000},
        {"model.activation": "gelu", "model.width": 64, "model.bias": False, "loss.gamma": 0.5},
    ]
    assert [problem_with(WIDE, configuration_of(WIDE, values)) for values in asked] == [None] * len(asked)
    for stages in ("2000:64", "2000:128/4"):
        assert problem_with(WIDE, with_schedule(WIDE, BASE, {"batch_stages": stages})) is None


def test_the_default_is_admitted_outside_the_space_and_what_differs_from_it_is_not() -> None:
    spec = make_spec(default={**SPEC["default"], "batch_size": 100, "learning_rate": 7.0, "dropout": 0.7})
    assert problem_with(spec, spec.default_configuration) is None
    assert "dropout" in str(problem_with(spec, replace(spec.default_configuration, dropout=0.71)))


@pytest.mark.parametrize("phase", [Phase.AUDIT, Phase.TO_BUDGET, Phase.SEARCH])
def test_rules_of_thumb_may_leave_the_searched_ranges_but_give_no_text(phase: Phase) -> None:
    beyond = any_configuration_of(WIDE, {"learning_rate": 30.0})
    plan = make_plan(configuration=beyond, phase=phase)
    assert admitted(WIDE, plan, 1, checkpoint=None).plan.configuration == beyond
    forged = replace(beyond, parameters={**beyond.parameters, "model.activation": "$(id)"})
    with pytest.raises(UsageError, match=r"model\.activation"):
        admitted(WIDE, replace(plan, configuration=forged), 1, checkpoint=None)
    with pytest.raises(UsageError, match="dropout"):
        admitted(WIDE, replace(plan, configuration=replace(beyond, dropout=7.0)), 1, checkpoint=None)
    known: list[dict[str, Any]] = [{"retry_of": 3}, {"resumed": 3}, {"queued": 3}]
    for stored in known:
        if phase is Phase.SEARCH:
            with pytest.raises(UsageError, match="learning_rate"):
                admitted(WIDE, replace(plan, **stored), 4, checkpoint=None)


@pytest.mark.parametrize("name", ["seed", "threads", "eval_every_steps"])
@pytest.mark.parametrize("value", ["$(id)", -1, 1.5, True, None])
def test_a_number_of_a_plan_that_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        admitted(WIDE, make_plan(**{"configuration": BASE, name: value}), 1, checkpoint=None)


def test_a_spec_that_a_database_holds_in_schema_version_1_asks_the_same_question() -> None:
    stored = json.loads((Path(__file__).parents[1] / "data" / "spec_of_schema_1.json").read_text(encoding="utf-8"))
    spec = spec_of(replace(make_study_record(), name=stored["name"], spec=stored))
    assert spec.question_hash == "7f6be88e1866bd6a", "as stored beside it in November 2026"
    assert (spec.pruner.name, spec.budget.trials, spec.space.rungs) == ("balanced", 24, (16, 32, 64, 128, 256, 512))


def test_an_unknown_key_of_a_stored_spec_is_named_and_may_be_of_a_newer_version() -> None:
    stored = make_spec().model_dump(mode="json")
    stored["budget"]["later"] = 1
    with pytest.raises(DatabaseError, match=r"cannot be read: budget\.later: unknown key") as caught:
        spec_of(replace(make_study_record(), spec=stored))
    assert "upgrade bssearch" in str(caught.value.hint)


# Presets --------------------------------------------------------------------------------------------------------------


BARE = """\
schema_version: 1
name: toy
workload: digits
target: {metric: accuracy, value: 0.9}
space:
  batch_size: {low: 8, high: 64}
  learning_rate: {low: 1e-3, high: 5e-1}
default: {batch_size: 32, learning_rate: 1e-1}
budget: {trials: 20, trial_train_seconds: 5}
"""
LINE = 8
"""Of the default."""


def write_preset(folder: Path, preset: str, spec: str = BARE) -> Path:
    path = folder / "mine.yaml"
    path.write_text(f"{spec}preset: {preset}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["large_model", "memory_bound"])
def test_checkpointing_is_switched_on_by_taking_a_mark_away(name: str) -> None:
    assert "\n  # activation_checkpointing: true\n" in settings.presets()[name].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("preset", "parameter"), [("accuracy_first", "weight_decay"), ("fine_tuning", "warmup_epochs")]
)
def test_what_a_preset_searches_and_the_default_lacks_is_said_with_its_name(
    tmp_path: Path, preset: str, parameter: str
) -> None:
    path = write_preset(tmp_path, preset)
    said = f"preset {preset} searches {parameter}: give default.{parameter} too ({path}:{LINE})"
    assert refused(path).splitlines()[0] == said


def test_the_nearest_spec_file_is_proposed(tmp_path: Path) -> None:
    (tmp_path / "my_study.yaml").write_text("name: x", encoding="utf-8")
    with pytest.raises(NotFoundError) as found:
        load_spec(tmp_path / "my_studdy.yaml")
    assert str(tmp_path / "my_study.yaml") in str(found.value.hint)
