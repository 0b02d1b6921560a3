"""The spec of a study whose training is a command: what it must say, and what makes it another question."""

from pathlib import Path
from typing import Any

import pytest

from bssearch.errors import SpecError, UsageError
from bssearch.records import ParameterValue
from bssearch.spec import load_spec
from bssearch.spec.model import COMMAND, filled, values_of
from tests.factories import make_spec

LOG = {"step": r"step (\d+)", "accuracy": r"acc=(\S+)"}
SPEC: dict[str, Any] = {
    "name": "toy",
    "command": ["bash", "train.sh", "{batch_size}", "{learning_rate}"],
    "target": {"metric": "accuracy", "value": 0.9},
    "space": {"batch_size": [16, 32], "learning_rate": {"low": 0.01, "high": 1.0}},
    "default": {"batch_size": 32, "learning_rate": 0.1},
    "budget": {"trials": 20, "trial_train_seconds": 10.0},
}
RATE = SPEC["space"]["learning_rate"]


def test_a_command_stands_for_the_workload() -> None:
    spec = load_spec(SPEC)
    assert (spec.workload, spec.is_program, spec.command) == (COMMAND, True, tuple(SPEC["command"]))


def test_torchrun_starts_a_rank_for_each_device() -> None:
    command = ["torchrun", "--standalone", "--nproc-per-node={devices}", "train.py"]
    spec = load_spec({**SPEC, "command": command, "executor": {"devices": [1, 2]}})
    configuration = spec.default_configuration.on_devices(2, 16)
    values = values_of(configuration, {}, seed=0, evaluate_every=1, threads=1, device="cpu")
    assert filled(spec.command, values)[2] == "--nproc-per-node=2"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"command": ["a", "{batch_size}", "{learning_rate}", "{rate}"]},
            "{rate} is no name of this study; choose from ",
        ),
        (
            {"report": LOG, "command": ["a", "{batch_size}"]},
            "learning_rate is searched, and the command does not take {learning_rate}",
        ),
        (
            {"report": LOG, "command": ["a", "{learning_rate}"]},
            "batch_size is searched, and the command does not take {batch_size}",
        ),
        (
            {
                "report": LOG,
                "space": {**SPEC["space"], "loss": {"alpha": [0.1, 0.2]}},
                "default": {**SPEC["default"], "loss": {"alpha": 0.1}},
            },
            "alpha is searched, and the command does not take {alpha}",
        ),
        (
            {"report": {**LOG, "step": r"step \d+"}},
            "must have one group, the value; it has 0",
        ),
        ({"report": {**LOG, "step": r"(step) (\d+)"}}, "must have one group, the value; it has 2"),
        ({"report": {**LOG, "step": r"Epoch \[(\d+)/"}}, "reads epochs"),
        ({"report": {**LOG, "step": r"epochs:\s+(\d+)"}}, "reads epochs"),
        ({"report": {**LOG, "step": "step (["}}, "is no regular expression: unterminated character set"),
        ({"report": {"accuracy": "acc=(.)"}}, "report has no expression for step; it has accuracy"),
        ({"report": {"step": "step (.)"}}, "report has no expression for accuracy; it has step"),
        ({"workload": "digits"}, "a command replaces the workload; workload = 'digits'"),
        ({"arguments": ["--epochs"]}, "arguments are those of a script"),
        ({"training": {"precision": "bf16"}}, "training says how bssearch computes steps"),
        ({"workload_settings": {"width": 3}}, "workload_settings are those of a workload class"),
        ({"executor": {"name": "inline"}}, "executor.name = inline runs a workload"),
        ({"command": "bash train.sh {batch_size}"}, "it must be a list with an item for each argument"),
        ({"command": ["a", 5]}, "5 must be a text, in quotes"),
        ({"command": ["a", {"batch_size": None}]}, "must be a text, in quotes: as in '5' and '{batch_size}'"),
        ({"command": ["a\0b", "{batch_size}", "{learning_rate}"]}, "command.0"),
        ({"command": [], "report": LOG}, "there is no command"),
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
        load_spec({**SPEC, **changes})
    assert said in caught.value.message


def test_names_of_the_space_have_places_and_micro_batches_may_stand_for_batches() -> None:
    own = {"model": {"hidden": [8, 16]}, "loss": {"alpha": {"low": 0.1, "high": 1.0}}, "optimizer": {"name": "adamw"}}
    command = ["a", "{micro_batch_size}", "{accumulation_steps}", "{learning_rate}", "{hidden}/{alpha}", "{optimizer}"]
    default = {**SPEC["default"], "model": {"hidden": 8}, "loss": {"alpha": 0.5}}
    assert load_spec({**SPEC, "space": {**SPEC["space"], **own}, "default": default, "command": command})
    fixed = {"batch_size": [32], "learning_rate": RATE}
    assert load_spec({**SPEC, "space": fixed, "command": ["a", "{learning_rate}"]}), "what is not searched needs none"


def test_values_stand_in_their_places_and_are_not_read_again() -> None:
    values: dict[str, ParameterValue] = {"seed": 3, "rate": 1e-05, "nesterov": True, "name": "{seed} $HOME"}
    words = ["{seed}{seed}", "--rate={rate}", "{nesterov}", "{name}", "{}", "{a b}", "{{seed}}"]
    assert filled(words, values) == ["33", "--rate=1e-05", "true", "{seed} $HOME", "{}", "{a b}", "{3}"]
    with pytest.raises(UsageError, match=r"\{x\} is no name of this study; choose from name, nesterov, rate, seed"):
        filled(["{x}"], values)


def test_a_command_is_part_of_the_question_and_nothing_of_it_where_there_is_none(tmp_path: Path) -> None:
    assert make_spec().question_hash == HASH
    plain = load_spec(SPEC).question_hash
    longer = load_spec({**SPEC, "command": [*SPEC["command"], "-v"]}).question_hash
    assert len({plain, longer, load_spec({**SPEC, "report": LOG}).question_hash}) == 3
    assert load_spec({**SPEC, "budget": {"trials": 9, "trial_train_seconds": 9.0}}).question_hash == plain


HASH = "bfc9d4bdf64f329e"
"""Of the factory's spec, which files of studies hold: a new field at its default must not change it."""
