"""From a few answers to a spec that runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bssearch.commands.check import check
from bssearch.commands.launch import Launch
from bssearch.errors import LaunchError
from bssearch.planning.memory import plan_memory
from bssearch.planning.start import QUESTIONS, StartPlan, StartRequest, plan_start
from bssearch.records import WorkloadDescription
from bssearch.spec import load_spec
from bssearch.spec.space.optimizers import SCRATCH_RATES
from tests.search.law import LawExecutor

FINE_TUNING: dict[str, Any] = {"memory_gib": 24, "start": "fine_tuning", "parameters": 110_000_000}
SCRATCH: dict[str, Any] = {
    "memory_gib": 80,
    "devices": 8,
    "parameters": 1_300_000_000,
    "sample_mib": 300.0,
    "workload": "mine.py:Mine",
    "train_samples": 50_000,
}
BOUND: dict[str, Any] = {"memory_gib": 8, "parameters": 350_000_000, "sample_mib": 150.0, "priority": "memory"}


class Large(LawExecutor):
    """Has the training samples that a plan was told of."""

    def describe(self) -> WorkloadDescription:
        return replace(super().describe(), train_samples=50_000)


def codes(found: StartPlan) -> set[str]:
    """Return what `bssearch check` finds suspicious of a plan's spec, its workload by a law."""
    return {one.code for one in check(found.spec, Launch(make_executor=lambda *_: Large())).findings}


def test_fine_tuning_on_24_gib_takes_small_batches_and_rates_a_tenth_of_those_from_scratch() -> None:
    found = plan_start(**FINE_TUNING)
    assert found.spec.preset == "fine_tuning"
    assert found.spec.space.rungs == (8, 16, 32, 64)
    assert [found.spec.default.batch_size, found.spec.default.learning_rate] == pytest.approx([16, 1e-4])
    assert found.spec.space.max_micro_batch_size is None
    assert "fine_tuning_learning_rate" not in codes(found)


def test_from_scratch_on_eight_devices_of_80_gib_searches_what_they_make_together() -> None:
    found = plan_start(**SCRATCH)
    assert found.spec.space.rungs == (256, 512, 1024, 2048)
    assert found.safe_micro_batch == math.floor((0.8 * 80 * 2**30 - 16 * 1.3e9) / (300 * 2**20))
    assert found.spec.space.max_micro_batch_size == 64, "32 to 64 a device"
    assert found.spec.default.learning_rate == pytest.approx(1e-3)
    assert not codes(found) & {"learning_rate_fixed", "no_warmup", "default_outside_space"}


def test_bound_by_memory_on_8_gib_accumulates_the_micro_batches_that_fit() -> None:
    found = plan_start(**BOUND)
    assert found.fixed_bytes == 16 * 350_000_000
    assert found.safe_micro_batch == 8
    assert found.spec.space.max_micro_batch_size == 8
    assert found.spec.space.rungs[-1] > 8
    assert "activation_checkpointing" in found.yaml
    assert "default_outside_space" not in codes(found)


@pytest.mark.slow
@pytest.mark.parametrize("answers", [FINE_TUNING, {**SCRATCH, "workload": "digits", "train_samples": None}, BOUND])
def test_with_the_stand_in_each_way_passes_a_real_check(answers: dict[str, Any]) -> None:
    found = check(plan_start(**answers).spec)
    assert found.trial.steps > 0
    assert not {one.code for one in found.findings} & {"default_diverges", "metric_never_moves", "out_of_memory"}


@pytest.mark.parametrize(
    ("start", "priority", "devices", "workload"),
    [
        ("scratch", "speed", 1, "digits"),
        ("fine_tuning", "speed", 8, "train.py"),
        ("scratch", "accuracy", 3, "train.py"),
        ("fine_tuning", "accuracy", 1, "digits"),
        ("scratch", "cost", 8, "digits"),
        ("fine_tuning", "cost", 3, "train.py"),
        ("scratch", "memory", 1, "train.py"),
        ("fine_tuning", "memory", 8, "digits"),
    ],
)
def test_every_way_comes_to_a_spec_that_loads_from_its_file(
    start: str, priority: str, devices: int, workload: str, tmp_path: Path
) -> None:
    found = plan_start(start=start, priority=priority, devices=devices, workload=workload)
    path = tmp_path / "spec.yaml"
    path.write_text(found.yaml)
    assert load_spec(path) == found.spec
    assert found.spec.space.outside(found.spec.default_configuration) == []


@pytest.mark.parametrize("optimizer", SCRATCH_RATES)
def test_every_optimizer_has_its_usual_rate_and_rule(optimizer: str) -> None:
    spec = plan_start(optimizer=optimizer, seconds=1e-5, target=1e-7).spec
    assert spec.default.learning_rate == SCRATCH_RATES[optimizer]
    assert spec.target.value == 1e-7
    rate: Any = spec.space.learning_rate
    assert rate.rule == ("linear" if optimizer in ("sgd", "lars") else "sqrt")
    assert rate.low < spec.default.learning_rate < rate.high


def test_every_line_with_a_choice_has_its_reason_beside_it() -> None:
    found = plan_start(priority="accuracy", devices=4, train_samples=100_000)
    without = [
        line.strip().partition(":")[0] for line in found.yaml.splitlines() if "#" not in line and line.partition(":")[2]
    ]
    zeros = {"warmup_epochs", "weight_decay", "dropout", "label_smoothing"}
    assert set(without) <= {"schema_version", "name", "optimizer", "pruner", "batch_size", *zeros}
    assert {"batch_size", "learning_rate", "objective", "max_micro_batch_size", "confirm"} <= found.reasons.keys()


def test_what_is_used_today_is_the_default_to_the_last_digit() -> None:
    spec = plan_start(batch=48, learning_rate=0.00123456789).spec
    assert (spec.default.batch_size, spec.default.learning_rate) == (48, 0.00123456789)


def test_names_are_quoted_in_the_yaml() -> None:
    found = plan_start(metric='a "b": {c}', workload="x y.py:Z", train_samples=5000)
    assert yaml.safe_load(found.yaml)["target"]["metric"] == 'a "b": {c}'
    assert found.spec.workload == "x y.py:Z"


@pytest.mark.parametrize(("optimizer", "kept"), [("adamw", "adamw"), ("sgd", "momentum")])
def test_what_does_not_depend_on_the_batch_is_that_of_plan_memory(optimizer: str, kept: str) -> None:
    found = plan_start(parameters=1000, optimizer=optimizer)
    assert found.fixed_bytes == plan_memory(parameters=1000, precision="bf16", optimizer=kept).fixed_bytes > 0


@pytest.mark.parametrize(
    ("answers", "cures"),
    [
        ({"parameters": "7B", "devices": 8}, ["--device h200", "--stage 3"]),
        ({"parameters": "1.3B"}, ["--optimizer"]),
        ({"sample_mib": 30.0 * 1024}, ["--device"]),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_what_would_hold_it(
    answers: dict[str, Any], cures: list[str]
) -> None:
    with pytest.raises(LaunchError, match="memory_gib = 24") as caught:
        plan_start(**answers)
    assert [cure for cure in cures if cure not in (caught.value.hint or "")] == []


def test_questions_are_options_with_defaults() -> None:
    assert all(StartRequest.model_fields[name].default is not None for name in QUESTIONS)
