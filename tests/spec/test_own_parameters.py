"""Hyperparameters of the user's own in a spec, its space and its default."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bssearch.commands.trials import configuration_of
from bssearch.errors import SpecError, UsageError
from bssearch.records import ParameterValue, model_parameters, own_parameters
from bssearch.search.samplers.base import make_sampler
from bssearch.search.samplers.time_model.candidates import _beside
from bssearch.spec import Dimension, StudySpec, load_spec, problem_with
from bssearch.spec.model import COMMAND, filled, values_of
from bssearch.spec.space.optimizers import MOST_OWN
from tests.factories import SPEC, make_spec
from tests.search.samplers.made_up import MadeUpStudy, study_spec

SPACE: dict[str, Any] = {
    "model": {"hidden": [64, 128], "depth": {"low": 1, "high": 40}, "kind": ["conv", "dense"], "bias": True},
    "loss": {"alpha": {"low": 0.1, "high": 1.0}, "focal": [False, True]},
}
DEFAULT: dict[str, Any] = {"model": {"hidden": 64, "depth": 2, "kind": "conv"}, "loss": {"alpha": 0.5, "focal": False}}


def spec_of(space: dict[str, Any] = SPACE, default: dict[str, Any] = DEFAULT, **changes: Any) -> StudySpec:
    return make_spec(space={**SPEC["space"], **space}, default={**SPEC["default"], **default}, **changes)


def test_they_live_in_a_configuration_under_their_group_and_are_read_by_bare_name() -> None:
    default = spec_of().default_configuration
    assert default.parameters["model.hidden"] == 64
    assert own_parameters(default) == {
        "hidden": 64,
        "depth": 2,
        "kind": "conv",
        "bias": True,
        "alpha": 0.5,
        "focal": False,
    }
    assert model_parameters(default) == (("bias", True), ("depth", 2), ("hidden", 64), ("kind", "conv"))


def test_a_configuration_goes_to_its_coordinates_and_back() -> None:
    space = spec_of().space
    sampled: dict[str, Any] = {one.name: one.other_than(one.any_value) for one in space.dimensions()}
    assert (sampled["model.depth"], sampled["model.kind"], sampled["loss.focal"]) == (40, "dense", True)
    assert space.encode(space.decode(64, sampled)) == sampled
    assert (
        space.encode(spec_of(SPACE, {**DEFAULT, "model": {**DEFAULT["model"], "hidden": 96}}).default_configuration)
        is None
    )


def test_a_range_of_whole_ends_gives_whole_numbers_unless_it_says_otherwise() -> None:
    def depth(given: dict[str, Any]) -> Dimension:
        space = spec_of({"model": {"depth": given}}, {"model": {"depth": 2}}).space
        return next(one for one in space.dimensions() if one.name == "model.depth")

    assert depth({"low": 1, "high": 4}).integer
    assert not depth({"low": 1, "high": 4, "integer": False}).integer
    assert not depth({"low": 1, "high": 4.0}).integer
    assert depth({"low": 1.0, "high": 4.0, "integer": True}).integer
    space = spec_of().space
    sampled = {**(space.encode(spec_of().default_configuration) or {}), "model.depth": 2.6}
    value = space.decode(64, sampled).parameters["model.depth"]
    assert value == 3 and type(value) is int


def test_a_fraction_in_a_range_of_whole_numbers_is_refused_as_no_whole_number() -> None:
    spec = spec_of()
    default = spec.default_configuration
    broken = replace(default, parameters={**default.parameters, "model.depth": 2.5})
    assert problem_with(spec, broken) == "model.depth = 2.5 must be a whole number in [1, 40]"


def test_what_the_space_fixes_fills_itself_and_a_value_is_as_the_space_writes_it() -> None:
    spec = spec_of({"model": {"hidden": [64], "kind": "conv", "width": [1.0, 2.0]}}, {"model": {"width": 2}})
    assert own_parameters(spec.default_configuration) == {"hidden": 64, "kind": "conv", "width": 2.0}
    assert spec.varied_in_model == ["width"]


@pytest.mark.parametrize(
    ("space", "default", "message"),
    [
        ({"model": {"dropout": [0, 1]}}, {}, "space.model.dropout: bssearch uses this name itself"),
        ({"loss": {"momentum": 0.5}}, {}, "space.loss.momentum: bssearch uses this name itself"),
        ({"model": {"a b": 1}}, {}, "space.model.a b: a name must be a Python identifier"),
        ({"model": {"lambda": 1}}, {}, "space.model.lambda: a name must be a Python identifier"),
        ({"model": {"a": 1}, "loss": {"a": 2}}, {}, "is under both model and loss"),
        ({"model": {f"a{n}": 1 for n in range(MOST_OWN + 1)}}, {}, f"at most {MOST_OWN}"),
        ({"model": {"x" * 51: 1}}, {}, "at most 50 characters"),
        ({"model": {"a": [1, "x"]}}, {}, "must all be numbers, all true or false, or all strings"),
        ({"model": {"a": [1, 1.0]}}, {}, "appears twice"),
        ({"model": {"a": list(range(257))}}, {}, "at most 256"),
        ({"model": {"a": "=x"}}, {}, "space.model.a = '=x': a string must have 1 to 100"),
        ({"model": {"a": "x" * 101}}, {}, "a string must have 1 to 100"),
        ({"model": {"a": 2**60}}, {}, "must be at most 9007199254740992"),
        ({"model": {"a": None}}, {}, "space.model.a = null: must be a number, true or false, or a string"),
        ({"model": {"a": {"low": 1.5, "high": 2, "integer": True}}}, {}, "low = 1.5 must be a whole number"),
        ({"model": {"a": [1, 2]}}, {}, "model.a is searched but missing from the default; give the default a value"),
        ({"model": {"a": [1, 2]}}, {"model": {"a": "x"}}, "model.a = 'x' must be a number, as in space.model.a"),
        ({"model": {"a": {"low": 1, "high": 4}}}, {"model": {"a": 2.5}}, "model.a = 2.5 must be a whole number"),
        ({}, {"loss": {"a": 1}}, "default.loss.a is given, but there is no space.loss.a"),
    ],
)
def test_what_is_wrong_is_named_with_its_bound(
    space: dict[str, Any], default: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        json.dumps({**SPEC, "space": {**SPEC["space"], **space}, "default": {**SPEC["default"], **default}}, indent=1)
    )
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert message in str(caught.value)
    assert "own.yaml" in str(caught.value)


def test_a_grid_of_too_many_combinations_is_refused() -> None:
    names = [f"a{n}" for n in range(21)]
    changes = {
        "space": {"batch_size": [32], "learning_rate": 0.1, "model": {name: [1, 2] for name in names}},
        "default": {"batch_size": 32, "learning_rate": 0.1, "model": dict.fromkeys(names, 1)},
        "sampler": {"name": "grid"},
    }
    with pytest.raises(UsageError, match="more than 1000000"):
        make_sampler(make_spec(**changes))


def test_the_question_is_the_same_without_them_and_another_with_them() -> None:
    assert spec_of({"model": {}}, {"loss": {}}).question_hash == make_spec().question_hash
    spec = spec_of()
    assert spec.question_hash != make_spec().question_hash
    again = StudySpec.model_validate(json.loads(json.dumps(spec.model_dump(mode="json"))))
    assert again == spec
    assert again.question_hash == spec.question_hash


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model.hidden": 96}, "model.hidden = 96 is not one of 64, 128"),
        ({"model.hidden": None}, "model.hidden = None: must be a number"),
        ({"model.kind": "lstm"}, "model.kind = lstm is not one of conv, dense"),
        ({"model.bias": False}, "model.bias = False is not the fixed True"),
        ({"hidden": 128}, "did you mean 'model.hidden'"),
        ({"model": 3}, "unknown parameter 'model'"),
    ],
)
def test_enqueued_values_are_named_as_in_a_configuration(values: dict[str, Any], message: str) -> None:
    found = configuration_of(spec_of(), {"model.hidden": 128, "loss.alpha": 1})
    assert own_parameters(found) == {**own_parameters(spec_of().default_configuration), "hidden": 128, "alpha": 1.0}
    with pytest.raises(UsageError, match=message):
        configuration_of(spec_of(), values)


def test_the_neighbours_of_a_whole_number_are_those_beside_it_however_narrow_the_range() -> None:
    found = _beside(Dimension("model.depth", low=1, high=4, log=True, integer=True), 3, np.random.default_rng(0))
    assert {2, 4} <= set(found)
    assert 3 not in found
    assert len(set(found)) == len(found)


def test_the_limit_of_samples_holds_for_the_model_that_was_timed_alone() -> None:
    """The best's samples take so many seconds at the step time of the default's model; of another nobody knows."""
    spec = study_spec(
        "random",
        objective="samples_to_target",
        space={"batch_size": [32], "learning_rate": [0.1, 0.2], "model": {"hidden": [8, 512]}},
        default={"batch_size": 32, "learning_rate": 0.1, "model": {"hidden": 8}},
        pruner={"name": "cap", "slack": 1.1},
    )
    study = MadeUpStudy(spec)
    study.step()
    limits: dict[Any, float] = {}
    while len(limits) < 2:
        plan, _ = study.planner.next_trial()
        assert plan is not None
        limits[plan.configuration.parameters["model.hidden"]] = plan.train_seconds_limit
        study.run_plan(plan)
    assert limits[8] < limits[512] == spec.budget.trial_train_seconds


# Commands -------------------------------------------------------------------------------------------------------------


LOG = {"step": r"step (\d+)", "accuracy": r"acc=(\S+)"}
COMMANDED: dict[str, Any] = {
    "name": "toy",
    "command": ["bash", "train.sh", "{batch_size}", "{learning_rate}"],
    "target": {"metric": "accuracy", "value": 0.9},
    "space": {"batch_size": [16, 32], "learning_rate": {"low": 0.01, "high": 1.0}},
    "default": {"batch_size": 32, "learning_rate": 0.1},
    "budget": {"trials": 20, "trial_train_seconds": 10.0},
}
RATE = COMMANDED["space"]["learning_rate"]


def test_a_command_stands_for_the_workload() -> None:
    spec = load_spec(COMMANDED)
    assert (spec.workload, spec.is_program, spec.command) == (COMMAND, True, tuple(COMMANDED["command"]))


def test_torchrun_starts_a_rank_for_each_device() -> None:
    command = ["torchrun", "--standalone", "--nproc-per-node={devices}", "train.py"]
    spec = load_spec({**COMMANDED, "command": command, "executor": {"devices": [1, 2]}})
    values = values_of(
        spec.default_configuration.on_devices(2, 16), {}, seed=0, evaluate_every=1, threads=1, device="cpu"
    )
    assert filled(spec.command, values)[2] == "--nproc-per-node=2"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"command": ["a", "{batch_size}", "{learning_rate}", "{rate}"]},
            "unknown placeholder {rate}; choose from ",
        ),
        (
            {"report": LOG, "command": ["a", "{batch_size}"]},
            "learning_rate is searched, but the command does not take {learning_rate}",
        ),
        (
            {"report": LOG, "command": ["a", "{learning_rate}"]},
            "batch_size is searched, but the command does not take {batch_size}",
        ),
        (
            {
                "report": LOG,
                "space": {**COMMANDED["space"], "loss": {"alpha": [0.1, 0.2]}},
                "default": {**COMMANDED["default"], "loss": {"alpha": 0.1}},
            },
            "alpha is searched, but the command does not take {alpha}",
        ),
        (
            {"report": {**LOG, "step": r"step \d+"}},
            "must have one group, for the value, instead of 0",
        ),
        ({"report": {**LOG, "step": r"(step) (\d+)"}}, "must have one group, for the value, instead of 2"),
        ({"report": {**LOG, "step": r"Epoch \[(\d+)/"}}, "reads epochs"),
        ({"report": {**LOG, "step": r"epochs:\s+(\d+)"}}, "reads epochs"),
        ({"report": {**LOG, "step": "step (["}}, "is not a regular expression: unterminated character set"),
        ({"report": {"accuracy": "acc=(.)"}}, "report has no expression for step, only for accuracy; add report.step"),
        ({"report": {"step": "step (.)"}}, "report has no expression for accuracy, only for step; add report.accuracy"),
        ({"workload": "digits"}, "command replaces the workload; remove workload = 'digits'"),
        ({"arguments": ["--epochs"]}, "arguments are for a script"),
        ({"training": {"precision": "bf16"}}, "needs a workload class, because your own program computes the steps"),
        ({"workload_settings": {"width": 3}}, "workload_settings need a workload class"),
        ({"executor": {"name": "inline"}}, "executor.name = inline cannot run a program"),
        ({"command": "bash train.sh {batch_size}"}, "must be a list with an item for each argument"),
        ({"command": ["a", 5]}, "5 must be a string in quotes"),
        ({"command": ["a", {"batch_size": None}]}, "must be a string in quotes, as in '5' or '{batch_size}'"),
        ({"command": ["a\0b", "{batch_size}", "{learning_rate}"]}, "command.0"),
        ({"command": [], "report": LOG}, "add a command or remove report"),
        (
            {"command": ["torchrun", "--nproc_per_node", "2", "train.py"], "executor": {"devices": [1, 2]}},
            "executor: devices = 1, 2: write --nproc-per-node={devices} in the command, not 2",
        ),
        (
            {"command": [], "workload": "train.py:make_trainer", "executor": {"devices": 2}},
            "executor: devices = 2: a function trains in one process",
        ),
    ],
)
def test_what_a_command_lacks_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec({**COMMANDED, **changes})
    assert said in caught.value.message


def test_names_of_the_space_have_places_and_micro_batches_may_stand_for_batches() -> None:
    own = {"model": {"hidden": [8, 16]}, "loss": {"alpha": {"low": 0.1, "high": 1.0}}, "optimizer": {"name": "adamw"}}
    command = ["a", "{micro_batch_size}", "{accumulation_steps}", "{learning_rate}", "{hidden}/{alpha}", "{optimizer}"]
    default = {**COMMANDED["default"], "model": {"hidden": 8}, "loss": {"alpha": 0.5}}
    assert load_spec({**COMMANDED, "space": {**COMMANDED["space"], **own}, "default": default, "command": command})
    assert load_spec(
        {**COMMANDED, "space": {"batch_size": [32], "learning_rate": RATE}, "command": ["a", "{learning_rate}"]}
    ), "what is not searched needs none"


def test_values_stand_in_their_places_and_are_not_read_again() -> None:
    values: dict[str, ParameterValue] = {"seed": 3, "rate": 1e-05, "nesterov": True, "name": "{seed} $HOME"}
    words = ["{seed}{seed}", "--rate={rate}", "{nesterov}", "{name}", "{}", "{a b}", "{{seed}}"]
    assert filled(words, values) == ["33", "--rate=1e-05", "true", "{seed} $HOME", "{}", "{a b}", "{3}"]
    with pytest.raises(UsageError, match=r"unknown placeholder \{x\}; choose from name, nesterov, rate, seed"):
        filled(["{x}"], values)


def test_a_command_is_part_of_the_question_and_nothing_of_it_where_there_is_none(tmp_path: Path) -> None:
    assert make_spec().question_hash == HASH
    plain = load_spec(COMMANDED).question_hash
    longer = load_spec({**COMMANDED, "command": [*COMMANDED["command"], "-v"]}).question_hash
    assert len({plain, longer, load_spec({**COMMANDED, "report": LOG}).question_hash}) == 3
    assert load_spec({**COMMANDED, "budget": {"trials": 9, "trial_train_seconds": 9.0}}).question_hash == plain


HASH = "bfc9d4bdf64f329e"
"""Of the factory's spec, which files of studies hold: a new field at its default must not change it."""
