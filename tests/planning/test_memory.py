"""`plan memory` from numbers and of traced models: arithmetic, micro-batches that fit, and refused requests."""

import inspect
import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import bssearch
from bssearch.errors import LaunchError, UsageError
from bssearch.planning.learning_rate import LearningRateRequest
from bssearch.planning.memory import MemoryPlan, MemoryPlanRequest
from bssearch.planning.memory.models import real_model
from bssearch.planning.memory.parameters import (
    BY_NAME,
    STATES,
    NumberFormat,
    ParameterBytes,
    Transformer,
    parameter_bytes,
    sample_bytes,
)
from bssearch.planning.memory.request import GIB
from bssearch.planning.memory.traced import Allocation, PeakByBatch, StepLifetimes
from bssearch.planning.requests import Request, RequestError, options_of, read
from bssearch.planning.scale import AccumulationRequest, ScaleRequest
from bssearch.planning.start import StartRequest
from tests.benchmarks import memory_plan
from tests.cli.task import bssearch as run

BASE: dict[str, Any] = {"layers": 12, "hidden": 768, "heads": 12, "sequence": 512, "vocabulary": 30522}
"""BERT-base."""


def of_parameters(parameters: int, precision: str = "fp32", **asked: Any) -> ParameterBytes:
    return parameter_bytes(MemoryPlanRequest(parameters=parameters, precision=precision, **asked))


@pytest.mark.parametrize(
    ("precision", "mixed", "weights", "gradients", "state", "master", "copies"),
    [
        ("fp32", None, 4, 4, 8, 0, 0),
        ("bf16", "master", 2, 2, 8, 4, 0),
        ("fp16", "autocast", 4, 4, 8, 0, 2),
        ("bf16", "pure", 2, 2, 4, 0, 0),
        ("fp8", "master", 1, 2, 8, 4, 0),
    ],
)
def test_bytes_a_parameter_with_adam(
    precision: str, mixed: str | None, weights: int, gradients: int, state: int, master: int, copies: int
) -> None:
    found = of_parameters(1000, precision, mixed=mixed, optimizer="adam")
    assert (found.weights, found.gradients, found.optimizer_state) == (1000 * weights, 1000 * gradients, 1000 * state)
    assert (found.master_weights, found.autocast_copies) == (1000 * master, 1000 * copies)
    assert found.fixed == 1000 * (weights + gradients + state + master)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_of_7_5_billion_parameters_over_64_devices(stage: int, gigabytes: float) -> None:
    """Figure 1 of Rajbhandari et al. 2020, arXiv 1910.02054."""
    found = of_parameters(7_500_000_000, "fp16", optimizer="adam", stage=stage, devices=64)
    assert found.fixed / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_optimizers_in_their_order() -> None:
    state = {name: of_parameters(10**6, optimizer=name).optimizer_state for name in STATES}
    assert (state["sgd"], state["momentum"], state["adamw"]) == (0, 4 * 10**6, 8 * 10**6)
    assert state["adafactor"] == state["adam"] / 2 and 0 < state["adafactor-factored"] < 0.01 * state["adam"]
    assert state["adam8bit"] / 10**6 == pytest.approx(2 * (1 + 4 / 256), rel=1e-3)
    muon = of_parameters(10**8, optimizer="muon", **BASE)
    assert muon.optimizer_state == 4 * (10**8 + 768 * 30522), "embeddings have the two states of AdamW"


MASTER = BY_NAME["bf16", "master"]


def layer_bytes(form: NumberFormat = MASTER, *, checkpointing: bool = False, **changes: Any) -> int:
    """Bytes of one more layer."""
    two, one = (
        sample_bytes(Transformer(**{**BASE, **changes, "layers": layers}), form, checkpointing=checkpointing).total
        for layers in (2, 1)
    )
    return two - one


def test_a_layer_keeps_the_bytes_of_korthikanti() -> None:
    """Equation 2 of arXiv 2205.05198: s·b·h·(34 + 5·a·s/h) bytes; § 5: 2·s·b·h if all is recomputed."""
    tokens, heads, hidden = 512, 12, 768
    assert layer_bytes() == tokens * hidden * 34 + 5 * heads * tokens**2
    assert layer_bytes(checkpointing=True) == 2 * tokens * hidden


def test_checkpointing_keeps_the_layers_inputs_and_the_larger_of_logits_and_one_layer() -> None:
    tokens, hidden = 512, 768
    layer, inputs = tokens * hidden * 34 + 5 * 12 * tokens**2, (12 * 2 + 5) * tokens * hidden
    for vocabulary, beside in ((None, layer), (100, layer), (30522, 12 * tokens * 30522)):
        model = Transformer(**{**BASE, "vocabulary": vocabulary})
        assert sample_bytes(model, MASTER, checkpointing=True).total == inputs + beside


def test_attention_is_quadratic_in_the_sequence_unless_it_is_fused() -> None:
    unfused, fused = (
        [layer_bytes(sequence=sequence, fused_attention=flag) for sequence in (4096, 8192)] for flag in (False, True)
    )
    assert unfused[1] > 3.5 * unfused[0]
    assert fused[1] == 2 * fused[0]


def test_fewer_heads_for_keys_and_values_another_mlp_and_no_dropout() -> None:
    tokens, hidden = 512, 768
    assert layer_bytes() - layer_bytes(kv_heads=3) == 2 * 2 * tokens * hidden * 3 // 4
    assert layer_bytes(mlp="swiglu", intermediate=2048) - layer_bytes() == 2 * tokens * (4 * 2048 - 2 * 4 * hidden)
    assert layer_bytes() - layer_bytes(dropout=False) == 2 * tokens * hidden + 12 * tokens**2 * 3
    assert layer_bytes(BY_NAME["bf16", "autocast"]) - layer_bytes() == 2 * 2 * tokens * hidden, "norms are in fp32"


def test_logits_are_a_separate_term_in_fp32() -> None:
    plan = bssearch.plan_memory(parameters="110M", precision="bf16", **BASE)
    assert next(one for one in plan.terms if one.term == "logits").bytes_per_sample == 512 * 30522 * 12
    assert plan.activation_bytes_per_sample == sum(one.bytes_per_sample for one in plan.terms)


NETWORKS = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "efficientnet_b0": 5_288_548,
    "convnext_tiny": 28_589_128,
    "unet": 31_037_698,
}


@pytest.mark.parametrize(("name", "parameters"), NETWORKS.items())
def test_a_networks_parameters_are_those_of_timm_and_its_activations_follow_the_image(
    name: str, parameters: int
) -> None:
    small, large = (
        bssearch.plan_memory(network=name, input_shape=(3, side, side), memory_gib=24) for side in (224, 448)
    )
    assert small.parameters == parameters
    assert (large.activation_bytes_per_sample or 0) / (small.activation_bytes_per_sample or 1) == pytest.approx(4, 0.01)


def test_a_network_of_ones_own_has_the_given_stages_and_checkpointing_keeps_less() -> None:
    asked: dict[str, Any] = {"network": "resnet18", "input_shape": (3, 32, 32), "micro_batch": 512}
    whole, short, again = (
        bssearch.plan_memory(**asked, **changes)
        for changes in ({}, {"stages": (1, 1), "channels": (16, 32)}, {"checkpointing": True})
    )
    stem, first, second = 3 * 16 * 49 + 2 * 16, 2 * 16 * 16 * 9 + 4 * 16, 16 * 32 * 9 + 32 * 32 * 9 + 4 * 32
    assert short.parameters == stem + first + second + (16 * 32 + 2 * 32) + 33 * 1000
    assert (again.peak_bytes or 0) < (whole.peak_bytes or 0)


def test_adapters_train_alone_on_a_quantised_model() -> None:
    model: dict[str, Any] = {"parameters": "110M", "precision": "bf16", "optimizer": "adam", **BASE}
    whole, adapted, quantised = (
        bssearch.plan_memory(**model, **changes)
        for changes in ({}, {"lora_rank": 8}, {"lora_rank": 8, "base_precision": "int4"})
    )
    hidden, layers = 768, 12
    trained = layers * 8 * (4 * 2 * hidden + 2 * 5 * hidden)
    assert adapted.trainable_parameters == trained and whole.trainable_parameters == 110_000_000
    assert adapted.fixed_bytes == 2 * 110_000_000 + 16 * trained
    assert (adapted.activation_bytes_per_sample or 0) - (whole.activation_bytes_per_sample or 0) == (
        2 * 512 * 8 * 6 * layers
    )
    blocks = layers * (12 * hidden**2 + 4 * hidden)
    assert adapted.weights_bytes - quantised.weights_bytes == pytest.approx(blocks * (2 - 0.5625))


def test_frozen_and_offloaded_numbers_take_no_memory_of_the_device() -> None:
    frozen, offloaded = (
        of_parameters(10**6, "bf16", **changes)
        for changes in ({"trainable_parameters": 10**5}, dict[str, Any](offload_optimizer=True))
    )
    assert (frozen.weights, frozen.gradients, frozen.optimizer_state, frozen.master_weights) == (
        2 * 10**6,
        2 * 10**5,
        8 * 10**5,
        4 * 10**5,
    )
    assert (offloaded.gradients, offloaded.optimizer_state, offloaded.master_weights, offloaded.foreach) == (
        2 * 10**6,
        0,
        0,
        0,
    )


def test_seven_billion_parameters_are_fine_tuned_on_24_gib() -> None:
    """Micro-batch 1 to 2 of 2,048 tokens, accumulated: with adapters; all of the parameters do not fit."""
    model: dict[str, Any] = {"parameters": "7B", "precision": "bf16", "layers": 32, "hidden": 4096, "heads": 32}
    llama: dict[str, Any] = {
        "sequence": 2048,
        "vocabulary": 32000,
        "intermediate": 11008,
        "mlp": "swiglu",
        "fused_attention": True,
        "dropout": False,
    }
    plan = bssearch.plan_memory(**model, **llama, lora_rank=16, base_precision="int4", memory_gib=24)
    assert plan.safe_micro_batch in (1, 2)
    with pytest.raises(LaunchError) as refused:
        bssearch.plan_memory(**model, **llama, memory_gib=24)
    assert "--lora-rank 16" in (refused.value.hint or "")


def test_the_largest_micro_batch_is_the_free_memory_over_a_sample() -> None:
    plan = bssearch.plan_memory(parameters=110_000_000, precision="bf16", optimizer="adam", memory_gib=24, **BASE)
    assert plan.fixed_bytes == 16 * 110_000_000
    assert plan.activation_bytes_per_sample is not None
    assert plan.largest_micro_batch == (24 * GIB - plan.fixed_bytes) // plan.activation_bytes_per_sample
    assert plan.safe_micro_batch == (int(0.8 * 24 * GIB) - plan.fixed_bytes) // plan.activation_bytes_per_sample
    assert plan.headroom_bytes == round(0.2 * 24 * GIB)
    named = bssearch.plan_memory(parameters=110_000_000, device="RTX 4090", **BASE)
    assert named.memory_bytes == 24564 * 2**20
    assert any(one.term == "workspaces" and one.bytes > 512 * 2**20 for one in named.terms), "its context"


def test_activations_need_an_architecture_and_batches_need_the_memory() -> None:
    bare = bssearch.plan_memory(parameters=10**8, memory_gib=24)
    assert (bare.activation_bytes_per_sample, bare.largest_micro_batch, bare.safe_micro_batch) == (None, None, None)
    assert bssearch.plan_memory(parameters=10**8, **BASE).largest_micro_batch is None


def test_sharding_gathers_two_layers_at_stage_three_and_makes_room() -> None:
    whole, sharded = (
        bssearch.plan_memory(parameters="110M", memory_gib=8, stage=stage, devices=8, **BASE) for stage in (0, 3)
    )
    assert sharded.fixed_bytes * 8 == pytest.approx(whole.fixed_bytes, rel=1e-6)
    assert {one.term for one in sharded.terms} - {one.term for one in whole.terms} == {"gathered_weights"}
    assert (sharded.largest_micro_batch or 0) > (whole.largest_micro_batch or 0)


def test_the_table_has_the_same_numbers_as_separate_plans() -> None:
    asked: dict[str, Any] = {"parameters": "350M", "memory_gib": 16.0, **BASE}
    table = bssearch.plan_memory(**asked, table=True).table
    assert {one.checkpointing for one in table} == {False, True}
    for row in random.Random(0).sample(table, 8):
        chosen: dict[str, Any] = {"precision": row.precision, "mixed": row.mixed, "optimizer": row.optimizer}
        alone = bssearch.plan_memory(**asked, **chosen, checkpointing=row.checkpointing)
        assert alone.fixed_bytes == row.fixed_bytes
        assert (alone.largest_micro_batch, alone.safe_micro_batch) == (row.largest_micro_batch, row.safe_micro_batch)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"precision": "bf16", "device": "t4"}, "t4 has no bf16"),
        ({"precision": "fp8", "device": "a100"}, "a100-80gb has no fp8"),
        ({"devices": 8}, "Each of 8 devices holds all weights"),
    ],
)
def test_limits_of_a_device_or_a_flag_are_noted(asked: dict[str, Any], said: str) -> None:
    assert any(said in note for note in bssearch.plan_memory(parameters=10**6, **asked).notes)
    better: dict[str, Any] = {"device": "l4"} if "device" in asked else {"stage": 1}
    assert not any(said in note for note in bssearch.plan_memory(parameters=10**6, **{**asked, **better}).notes)


def test_only_a_gpu_needs_more_memory_to_update_all_tensors_at_once() -> None:
    # 4 × 4 bytes per parameter between steps, and 4 bytes more during a GPU's update
    asked: dict[str, Any] = {"parameters": 2**30, "memory_gib": 17, "precision": "fp32", "optimizer": "adamw"}
    said = {one: bssearch.plan_memory(**asked, device=one).notes for one in ("cuda", "cpu")}
    assert {one: any("foreach=False" in note for note in notes) for one, notes in said.items()} == {
        "cuda": True,
        "cpu": False,
    }


@pytest.mark.parametrize(
    ("given", "count"),
    [("4.1M", 4_100_000), ("2.01k", 2010), ("66.955B", 66_955_000_000), ("1_000", 1000), (1.1e8, 110_000_000)],
)
def test_a_decimal_number_of_parameters_is_exact(given: str | float, count: int) -> None:
    assert bssearch.plan_memory(parameters=given).parameters == count


def cures_of(error: LaunchError) -> list[dict[str, Any]]:
    """Options of each cure in a hint."""
    found = []
    for cure in (error.hint or "").removeprefix("use options that fit: ").split("; "):
        words = cure.split(" (")[0].split()
        flags = {name.removeprefix("--"): value for name, value in itertools.pairwise(words) if name.startswith("--")}
        found.append({key: int(value) if value.isdigit() else value for key, value in flags.items()})
    return found


def test_parameters_that_do_not_fit_are_refused_with_cures_that_fit() -> None:
    asked: dict[str, Any] = {"parameters": "7B", "precision": "bf16", "device": "h100"}
    with pytest.raises(LaunchError) as caught:
        bssearch.plan_memory(**asked)
    assert "7,000,000,000 parameters in bf16 (master) with adamw take 104 GiB" in caught.value.message
    cures = cures_of(caught.value)
    assert [next(iter(cure)) for cure in cures] == ["device", "precision", "optimizer", "stage", "stage", "stage"]
    assert all(bssearch.plan_memory(**{**asked, **cure}) for cure in cures)


@pytest.mark.parametrize(
    ("parameters", "mixed", "device"),
    [
        ("900M", "master", "rtx-3080-10gb"),
        ("900M", "autocast", "t4"),
        ("2B", "master", "t4"),
        ("2B", "autocast", "rtx-3080-10gb"),
        ("7B", "master", "h100"),
        ("7B", "autocast", "t4"),
    ],
)
def test_a_proposed_option_fits_with_autocasts_copies_and_computes_the_precision(
    parameters: str, mixed: str, device: str
) -> None:
    asked: dict[str, Any] = {"parameters": parameters, "precision": "bf16", "mixed": mixed, "device": device}
    try:
        plans = [bssearch.plan_memory(**asked)]
    except LaunchError as error:
        changed = [{**asked, **({"mixed": None} if "precision" in cure else {}), **cure} for cure in cures_of(error)]
        plans = [bssearch.plan_memory(**one) for one in changed]
        for one, found in zip(changed, plans, strict=True):
            is_new = (one["device"], one["precision"]) != (device, "bf16")
            assert not (is_new and any("has no bf16" in note for note in found.notes))
    assert all(map(has_room, plans))


def has_room(found: MemoryPlan) -> bool:
    """True if weights, autocast's copies and workspaces fit the device."""
    beside = sum(one.bytes for one in found.terms if one.term in {"autocast_copies", "workspaces"})
    return found.fixed_bytes + beside <= (found.memory_bytes or 0)


def test_a_drivers_name_of_a_device_suggests_the_device() -> None:
    for name, near in {"NVIDIA A100-SXM4-80GB": "a100-80gb", "NVIDIA GeForce RTX 4090": "rtx-4090"}.items():
        with pytest.raises(UsageError, match=near):
            bssearch.plan_memory(parameters=10, device=name)


BERT = ["--parameters", "110M", *(word for name, value in BASE.items() for word in (f"--{name}", str(value)))]

CONTRACT = [
    "weights_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "master_weights_bytes",
    "fixed_bytes",
    "activation_bytes_per_sample",
    "largest_micro_batch",
    "safe_micro_batch",
]


def test_the_contract_holds_and_torch_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['bssearch', 'plan', 'memory', '--parameters', '110000000', '--precision', 'bf16', "
        "'--optimizer', 'adam', '--memory-gib', '24', '--layers', '12', '--hidden', '768', '--heads', '12', "
        "'--sequence', '512', '--vocabulary', '30522', '--checkpointing', '--format', 'json']\n"
        "from bssearch.cli.app import app; app(standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(isinstance(found[key], int) for key in CONTRACT)
    assert found["fixed_bytes"] == 16 * 110_000_000
    bare = run("plan", "memory", "--parameters", "1000", "--format", "json", cwd=tmp_path)
    assert [json.loads(bare.stdout)[key] for key in CONTRACT[-3:]] == [None, None, None]


@pytest.mark.parametrize(
    ("memory_gib", "said"),
    [
        (2.0, ["Safe micro-batch: none", "Largest micro-batch: none"]),
        (2.5, ["Safe micro-batch: none", "Largest micro-batch: 1"]),
    ],
)
def test_people_read_none_instead_of_0(memory_gib: float, said: list[str], tmp_path: Path) -> None:
    shown = run("plan", "memory", *BERT, "--memory-gib", str(memory_gib), cwd=tmp_path).stdout
    assert [words for words in said if words not in shown] == []


# Requests -------------------------------------------------------------------------------------------------------------


RATE = {"from_batch": 256, "learning_rate": 0.1, "batch": 512}
SCALE = {"devices": 1, "batch": 8, "alpha_s": 0.1, "beta_s": 0.1, "b_crit": 100.0}
MEMORY = {"parameters": 10**6}
BERT_WORDS = {"layers": 12, "hidden": 768, "heads": 12, "sequence": 512}


@pytest.mark.parametrize(
    ("plan", "right", "wrong"),
    [
        (bssearch.plan_accumulation, {"batch": 8}, {"batch": 0}),
        (bssearch.plan_accumulation, {"batch": 8}, {"batch": 10**10}),
        (bssearch.plan_accumulation, {"batch": 8}, {"batch": 8.5}),
        (bssearch.plan_accumulation, {"batch": 8}, {"batch": True}),
        (bssearch.plan_accumulation, {"batch": 8}, {"batch": "8"}),
        (bssearch.plan_accumulation, {"batch": 8}, {"micro": 0}),
        (bssearch.plan_accumulation, {"batch": 8}, {"devices": 0}),
        (bssearch.plan_accumulation, {"batch": 8}, {"batch_norm_layers": -1}),
        (bssearch.plan_accumulation, {"batch": 8}, {"bacth": 8}),
        (bssearch.plan_learning_rate, RATE, {"from_batch": 10**400}),
        (bssearch.plan_learning_rate, RATE, {"learning_rate": 0.0}),
        (bssearch.plan_learning_rate, RATE, {"learning_rate": math.nan}),
        (bssearch.plan_learning_rate, RATE, {"learning_rate": math.inf}),
        (bssearch.plan_learning_rate, RATE, {"weight_decay": -0.1}),
        (bssearch.plan_learning_rate, RATE, {"dropout": 1.0}),
        (bssearch.plan_learning_rate, RATE, {"optimizer": "AdamW"}),
        (bssearch.plan_learning_rate, RATE, {"rule": "liner"}),
        (bssearch.plan_learning_rate, RATE, {"rate_rule": "sqr"}),
        (bssearch.plan_scale, SCALE, {"alpha_s": -1.0}),
        (bssearch.plan_scale, SCALE, {"beta_s": 0.0}),
        (bssearch.plan_scale, SCALE, {"overlap": 1.5}),
        (bssearch.plan_scale, SCALE, {"devices": 4097}),
        (bssearch.plan_scale, SCALE, {"parameters": 0}),
        (bssearch.plan_start, {}, {"memory_gib": 0.0}),
        (bssearch.plan_start, {}, {"target": math.inf}),
        (bssearch.plan_start, {}, {"workload": ""}),
        (bssearch.plan_start, {}, {"start": "finetuning"}),
        (bssearch.plan_memory, MEMORY, {"parameters": "1.5"}),
        (bssearch.plan_memory, MEMORY, {"parameters": "1e99999999999999999999"}),
        (bssearch.plan_memory, MEMORY, {"parameters": 10**5000}),
        (bssearch.plan_memory, MEMORY, {"parameters": [1]}),
        (bssearch.plan_memory, MEMORY, {"precision": "int8"}),
        (bssearch.plan_memory, MEMORY, {"memory_gib": math.nan}),
        (bssearch.plan_memory, MEMORY, {"memory_gib": "24"}),
        (bssearch.plan_memory, MEMORY, {"stage": 4}),
        (bssearch.plan_memory, MEMORY | BERT_WORDS, {"layers": 2.5}),
        (bssearch.plan_memory, MEMORY | BERT_WORDS, {"mlp": "moe"}),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(
    plan: Callable[..., Any], right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as caught:
        plan(**{**right, **wrong})
    assert list(caught.value.problems) == list(wrong)
    assert next(iter(wrong)) in caught.value.message and len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("plan", "given", "named"),
    [
        (bssearch.plan_accumulation, {"batch": 8, "micro": 4, "max_micro": 4}, ["micro = 4", "max_micro = 4"]),
        (
            bssearch.plan_learning_rate,
            {**RATE, "rule": "linear", "rate_rule": "sqrt"},
            ["rate_rule = 'sqrt'", "linear"],
        ),
        (bssearch.plan_learning_rate, {**RATE, "beta2": 0.9}, ["beta2 = 0.9", "'sgd'"]),
        (bssearch.plan_scale, {**SCALE, "per_device_batch": 8}, ["batch = 8", "per_device_batch = 8"]),
        (bssearch.plan_scale, {**SCALE, "batch": None}, ["batch = None", "per_device_batch = None"]),
        (bssearch.plan_scale, {**SCALE, "beta_s": None}, ["alpha_s", "beta_s"]),
        (bssearch.plan_scale, {**SCALE, "step_times": "times.csv"}, ["step_times = times.csv", "alpha_s"]),
        (bssearch.plan_scale, {**SCALE, "b_crit_low": 200.0}, ["b_crit_low = 200", "b_crit = 100"]),
        (bssearch.plan_scale, {**SCALE, "b_crit_high": 50.0}, ["b_crit_high = 50", "b_crit = 100"]),
        (bssearch.plan_scale, {**SCALE, "b_crit": None, "b_crit_low": 50.0}, ["b_crit_low", "b_crit"]),
        (bssearch.plan_scale, {**SCALE, "at_batch": 8}, ["at_batch = 8", "samples_to_target"]),
        (
            bssearch.plan_scale,
            {**SCALE, "price_per_device_hour": 2.0},
            ["price_per_device_hour = 2", "samples_to_target"],
        ),
        (bssearch.plan_scale, {**SCALE, "devices": 2}, ["devices = 2", "bandwidth_gb_s", "parameters"]),
        (bssearch.plan_start, {"price_per_device_hour": 2.0}, ["price_per_device_hour = 2", "priority = 'speed'"]),
        (bssearch.plan_start, {"batch": 512, "train_samples": 100}, ["batch = 512", "train_samples = 100"]),
        (bssearch.plan_start, {"batch": 4096}, ["batch = 4096", "1077"]),
        (bssearch.plan_memory, {}, ["parameters", "model"]),
        (bssearch.plan_memory, {**MEMORY, "mixed": "pure"}, ["mixed = 'pure'", "precision"]),
        (bssearch.plan_memory, {**MEMORY, "precision": "fp8", "mixed": "pure"}, ["mixed = 'pure'", "fp8"]),
        (bssearch.plan_memory, {**MEMORY, "device": "h10"}, ["device = 'h10'", "h100-80gb"]),
        (bssearch.plan_memory, {**MEMORY, "device": "a100-40gb", "memory_gib": 80.0}, ["memory_gib = 80", "a100-40gb"]),
        (bssearch.plan_memory, {**MEMORY, "layers": 12}, ["layers = 12", "hidden, heads, sequence"]),
        (bssearch.plan_memory, {**MEMORY, "fused_attention": False}, ["fused_attention = False", "layers"]),
        (bssearch.plan_memory, {**MEMORY, "micro_batch": 8}, ["micro_batch = 8", "layers"]),
        (bssearch.plan_memory, {**MEMORY, "checkpointing": True}, ["checkpointing = True", "layers"]),
        (bssearch.plan_memory, {**MEMORY, **BERT_WORDS, "heads": 7}, ["heads = 7", "hidden = 768"]),
        (bssearch.plan_memory, {**MEMORY, **BERT_WORDS, "kv_heads": 5}, ["kv_heads = 5", "heads = 12"]),
        (bssearch.plan_memory, {**MEMORY, "stage": 2}, ["stage = 2", "devices"]),
        (bssearch.plan_memory, {**MEMORY, "input_shape": (3, 8, 8)}, ["input_shape", "model"]),
        (bssearch.plan_memory, {**MEMORY, "model": "a:b"}, ["parameters", "model = a:b"]),
        (bssearch.plan_memory, {"model": "a:b", "hidden": 5}, ["hidden", "model = a:b"]),
        (bssearch.plan_memory, {"model": "a:b", "precision": "fp8"}, ["fp8"]),
        (bssearch.plan_memory, {"model": "a:b", "lora_rank": 8}, ["lora_rank", "model = a:b"]),
        (bssearch.plan_memory, {"model": "a:b", "offload_optimizer": True}, ["offload_optimizer"]),
        (bssearch.plan_memory, {"network": "resnet18"}, ["resnet18", "input_shape"]),
        (bssearch.plan_memory, {"network": "unet", "input_shape": (3, 250, 224)}, ["250x224", "16"]),
        (bssearch.plan_memory, {"network": "resnet18", "input_shape": (32, 32)}, ["input_shape = 32x32", "3x224x224"]),
        (bssearch.plan_memory, {"network": "resnet18", "input_shape": (3, 32, 32), "stages": (1,)}, ["stages = 1"]),
        (
            bssearch.plan_memory,
            {"network": "resnet18", "input_shape": (3, 32, 32), "hidden": 8},
            ["hidden = 8", "resnet18"],
        ),
        (bssearch.plan_memory, {**MEMORY, "stages": (2, 2)}, ["stages", "network"]),
        (bssearch.plan_memory, {**MEMORY, "lora_rank": 8}, ["lora_rank = 8", "layers"]),
        (bssearch.plan_memory, {**MEMORY, "base_precision": "int4"}, ["base_precision = int4", "lora_rank"]),
        (bssearch.plan_memory, {**MEMORY, "trainable_parameters": 10**12}, ["trainable_parameters", "at most"]),
    ],
)
def test_values_that_contradict_each_other_are_named(
    plan: Callable[..., Any], given: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        plan(**given)
    assert [name for name in named if name not in caught.value.message] == []


REQUESTS = (MemoryPlanRequest, LearningRateRequest, AccumulationRequest, ScaleRequest, StartRequest)


@pytest.mark.parametrize("model", REQUESTS)
def test_every_option_has_a_help_and_a_default_among_its_choices(model: type[Request]) -> None:
    for name, option in options_of(model).items():
        default = model.model_fields[name].default
        assert option.help.endswith(".") and name in model.model_fields
        assert not option.choices or default is None or default in option.choices


def test_texts_are_read_only_if_they_are_said_to_be_texts() -> None:
    given = {"batch": "64", "micro": "16"}
    assert read(AccumulationRequest, given, are_texts=True) == AccumulationRequest(batch=64, micro=16)
    with pytest.raises(RequestError) as caught:
        read(AccumulationRequest, given)
    assert set(caught.value.problems) == {"batch", "micro"}
    with pytest.raises(RequestError) as caught:
        read(AccumulationRequest, {}, are_texts=True)
    assert list(caught.value.problems) == ["batch"]


def test_a_function_has_the_fields_of_its_request_as_keywords() -> None:
    parameters = inspect.signature(bssearch.plan_accumulation).parameters
    assert list(parameters) == list(AccumulationRequest.model_fields)
    assert parameters["devices"].default == 1 and parameters["batch"].default is inspect.Parameter.empty


# Traced models --------------------------------------------------------------------------------------------------------


HERE = "tests.planning.test_memory"


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.project = nn.Linear(64, 192)
        self.norm = nn.LayerNorm(64)
        self.dropout = dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(tokens)
        query, key, value = self.project(hidden).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        result: torch.Tensor = self.norm(hidden + mixed.transpose(1, 2).flatten(2))
        return result


def perceptron(width: int = 256, depth: int = 4) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)]
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(width, 10))


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 256), nn.LayerNorm(256))


def with_loss() -> tuple[nn.Module, Any]:
    return perceptron(), lambda model, size: model(torch.zeros(size, 256)).square().mean()


class LooksAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.line(inputs[inputs[:, 0] > 0])
        return result


def not_a_module() -> int:
    return 3


def downloads() -> nn.Module:
    import urllib.request

    urllib.request.urlopen("http://weights.example/net.pt")
    return perceptron()


def from_the_hub() -> Any:
    return pytest.importorskip("transformers").AutoModel.from_pretrained("no-one/no-model")


def raises() -> nn.Module:
    raise ValueError("width must be even")


def leaves() -> nn.Module:
    raise SystemExit(3)


def plan(name: str, **asked: Any) -> MemoryPlan:
    shape = {"Attention": (128,), "convolutions": (3, 32, 32), "LooksAtValues": (8,), "with_loss": None}.get(
        name, (256,)
    )
    inputs = {"input_shape": shape, "vocabulary": 50 if name == "Attention" else None}
    return bssearch.plan_memory(model=f"{HERE}:{name}", **{**inputs, **asked})


def term(found: MemoryPlan, name: str, size: int | None = None) -> int:
    """Bytes of a term at a micro-batch size, by default the plan's."""
    lines = [one for one in found.terms if one.term == name]
    size = (found.micro_batch or 0) if size is None else size
    return sum(one.bytes + size * one.bytes_per_sample for one in lines)


@pytest.mark.parametrize(
    ("name", "size", "checkpointing"),
    [("perceptron", 512, False), ("perceptron", 512, True), ("convolutions", 64, False), ("Attention", 64, False)],
)
def test_the_predicted_peak_equals_a_real_steps_allocations(name: str, size: int, checkpointing: bool) -> None:
    """The benchmark `memory_plan.py` checks real models; this test checks sizes beyond the traced sizes."""
    found = plan(name, device="cpu", micro_batch=size, checkpointing=checkpointing)
    request = {"Attention": ((128,), 50), "convolutions": ((3, 32, 32), None)}.get(name, ((256,), None))
    case = memory_plan.Case(f"{HERE}:{name}", (size, size), shape=request[0], vocabulary=request[1])
    real = memory_plan.measured(case, size, checkpointing)
    assert found.peak_bytes == pytest.approx(real, rel=0.05)
    assert real > 2 * found.fixed_bytes or name == "perceptron"


@pytest.mark.parametrize("name", ["perceptron", "Attention"])
def test_the_terms_add_up_to_the_peak_with_the_gradients_of_earlier_micro_batches(name: str) -> None:
    found = plan(name, device="cpu", micro_batch=300)
    beside = sum(term(found, one.term, 300) for one in found.terms if one.when != "update")
    assert beside - found.gradients_bytes <= (found.peak_bytes or 0) <= beside * 1.001
    always = sum(one.bytes for one in found.terms if one.when == "always" and one.term != "workspaces")
    assert always == found.fixed_bytes


def test_weights_gradients_and_state_are_counted_and_not_a_function_of_the_batch() -> None:
    found = plan("perceptron", device="cpu", optimizer="adamw")
    parameters = 4 * (256 * 256 + 256) + 256 * 10 + 10
    assert found.parameters == parameters
    assert found.weights_bytes == found.gradients_bytes == 4 * parameters
    assert found.optimizer_bytes == pytest.approx(8 * parameters, rel=0.001)
    assert plan("perceptron", optimizer="sgd", device="cpu").optimizer_bytes == 0
    assert plan("perceptron", optimizer="momentum", device="cpu").optimizer_bytes == 4 * parameters
    unknown_to_torch = plan("perceptron", optimizer="adam8bit", device="cpu").optimizer_bytes
    assert unknown_to_torch == pytest.approx(2.03 * parameters, rel=0.01)


def test_a_gpu_updates_all_tensors_at_once_and_rounds_blocks() -> None:
    on_cpu, on_gpu = (
        plan("perceptron", device=device, micro_batch=1, model_settings={"depth": 12}) for device in ("cpu", "cuda")
    )
    assert term(on_gpu, "foreach_temporaries") > 3 * term(on_cpu, "foreach_temporaries") > 0
    assert term(on_gpu, "weights") % 512 == 0 < term(on_gpu, "weights") - term(on_cpu, "weights")


def test_autocast_copies_the_weights_and_pure_bf16_halves_all_terms() -> None:
    asked = {"device": "a100", "micro_batch": 64}
    full, mixed = plan("Attention", **asked), plan("Attention", precision="bf16", **asked)
    pure = plan("Attention", precision="bf16", mixed="pure", **asked)
    assert term(full, "autocast_copies") == 0 < term(mixed, "autocast_copies")
    assert mixed.fixed_bytes == full.fixed_bytes == pytest.approx(2 * pure.fixed_bytes, rel=0.05)
    assert term(mixed, "activations") < term(full, "activations")


def test_a_gpu_keeps_norms_in_fp32_under_autocast() -> None:
    on_cpu, on_gpu = (
        plan("normed", device=device, precision="bf16", micro_batch=1000).activation_bytes_per_sample or 0
        for device in ("cpu", "a100")
    )
    assert on_gpu - on_cpu > 0.9 * 256 * 2 * 2, "two more bytes of each number that goes into one"


@pytest.mark.parametrize(("device", "precision"), [("a100", "bf16"), ("a100", "fp32"), ("t4", "fp16")])
def test_attention_uses_the_devices_kernels(device: str, precision: str) -> None:
    """A CPU keeps the scores of attention with dropout; flash and memory-efficient attention do not."""
    asked: dict[str, Any] = {"model_settings": {"dropout": 0.1}, "input_shape": (1024,), "micro_batch": 8}
    scores = 4 * 1024**2 * 4
    on_cpu = plan("Attention", device="cpu", **asked).activation_bytes_per_sample or 0
    found = plan("Attention", device=device, precision=precision, **asked)
    assert (found.activation_bytes_per_sample or 0) < scores / 4 < scores < on_cpu


def test_logits_are_a_separate_term() -> None:
    found = plan("perceptron", device="cpu", micro_batch=1000)
    assert term(found, "logits") == 1000 * 10 * 4
    assert term(found, "activations") >= 1000 * 256 * 4 * 4 * 2


def test_a_stage_shards_its_terms() -> None:
    whole, second, third = (plan("perceptron", stage=stage, devices=4, device="cpu") for stage in (0, 2, 3))
    assert (second.weights_bytes, third.weights_bytes * 4) == (whole.weights_bytes, whole.weights_bytes)
    assert second.gradients_bytes * 4 == whole.gradients_bytes
    asked: dict[str, Any] = {"devices": 4, "device": "cpu", "precision": "bf16", "micro_batch": 300}
    autocast = [plan("perceptron", stage=stage, **asked) for stage in (2, 3)]
    assert term(autocast[0], "autocast_copies") == 4 * term(autocast[1], "autocast_copies") > 0
    assert second.optimizer_bytes * 4 == pytest.approx(whole.optimizer_bytes, rel=0.001)


def test_the_largest_micro_batch_is_the_last_whose_peak_fits() -> None:
    found = plan("perceptron", device="cpu", memory_gib=0.1)
    largest = found.largest_micro_batch or 0
    sums = [sum(term(found, one.term, size) for one in found.terms if one.when != "update") for size in (0, 1)]
    accumulating = [sums[0] + size * (sums[1] - sums[0]) for size in (largest, largest + 1)]
    assert accumulating[0] <= 0.1 * GIB < accumulating[1]
    assert (plan("perceptron", device="cpu", micro_batch=largest).peak_bytes or 0) <= 0.1 * GIB
    assert 0 < (found.safe_micro_batch or 0) < 0.85 * largest


def test_a_model_that_does_not_fit_is_refused_with_traceable_precisions() -> None:
    wide: dict[str, Any] = {"model_settings": {"width": 512}, "input_shape": (512,), "device": "cpu"}
    with pytest.raises(LaunchError, match="without activations") as caught:
        plan("perceptron", memory_gib=0.01, **wide)
    assert "--precision bf16 --mixed pure" in (caught.value.hint or "")
    assert plan("perceptron", memory_gib=0.01, precision="bf16", mixed="pure", **wide)


@pytest.mark.slow
def test_a_model_may_bring_its_loss_and_the_table_its_other_precisions() -> None:
    found = plan("with_loss", device="cuda", memory_gib=1.0, table=True)
    rows = {(one.precision, one.mixed, one.optimizer, one.checkpointing): one for one in found.table}
    assert {key[0] for key in rows} == {"fp32", "bf16"} and {key[3] for key in rows} == {False, True}
    plain, twice = (rows["fp32", None, "adamw", flag] for flag in (False, True))
    assert (plain.largest_micro_batch or 0) < (twice.largest_micro_batch or 0)
    assert plain.fixed_bytes == pytest.approx(found.fixed_bytes, rel=0.01), "the blocks of its state apart"


@pytest.mark.slow
def test_a_configuration_file_is_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99}
    configuration = transformers.BertConfig(intermediate_size=64, **settings)
    configuration.architectures = ["BertForMaskedLM"]
    configuration.save_pretrained(tmp_path)
    asked: dict[str, Any] = {"sequence": 16, "device": "cpu", "micro_batch": 3}
    from_file = bssearch.plan_memory(model=f"transformers:{tmp_path}", **asked)
    settings["intermediate_size"] = 64
    named = bssearch.plan_memory(model="transformers:BertForMaskedLM", model_settings=settings, **asked)
    assert from_file.peak_bytes == named.peak_bytes
    assert term(from_file, "logits") >= 3 * 16 * 99 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("downloads", {}, "needs the network (weights.example)"),
        ("from_the_hub", {}, "needs the network"),
        ("LooksAtValues", {}, "reads tensor values"),
        ("not_a_module", {}, "gave int; name or return a torch.nn.Module"),
        ("raises", {}, "failed to build: ValueError: width must be even"),
        ("leaves", {}, "failed to build: SystemExit: 3"),
        ("perceptron", {"input_shape": None}, "needs --input"),
        ("perceptron", {"input_shape": (7,)}, "failed to train: "),
        ("perceptron", {"input_shape": (0,)}, "input_shape"),
        ("perceptron", {"precision": "bf16", "mixed": "master"}, "mixed"),
        ("convolutions", {"checkpointing": True}, "has no blocks to recompute"),
        ("nothing", {}, "has no 'nothing'"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused_with_the_reason(
    name: str, asked: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # a hub that was imported before tries five times
    with pytest.raises(UsageError) as caught:
        plan(name, **asked)
    assert said in caught.value.message


@pytest.mark.parametrize("name", ["net.py", "resnet50", "net.py:"])
def test_a_model_without_a_name_is_refused_with_the_forms_of_names(name: str) -> None:
    with pytest.raises(
        UsageError, match=r"must be FILE\.py:NAME, package\.module:NAME, transformers:CLASS or timm:NAME"
    ):
        bssearch.plan_memory(model=name)


class Endless(nn.Module):
    """A model of transformers without a largest number of positions."""

    main_input_name = "input_ids"
    config_class = SimpleNamespace

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(10, 4)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": self.embedding(input_ids)}


def test_a_model_without_a_largest_number_of_positions_takes_any_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(Endless=Endless))
    short, long = (bssearch.plan_memory(model="transformers:Endless", sequence=length) for length in (512, 1024))
    assert (long.activation_bytes_per_sample or 0) > (short.activation_bytes_per_sample or 0)


@pytest.mark.parametrize("name", ["transformers:google-bert/bert-base-uncased", "transformers:NoSuchClass"])
def test_a_hubs_name_is_no_model(name: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match="transformers has no class") as caught:
        bssearch.plan_memory(model=name)
    assert "plans do not download models" in (caught.value.hint or "")


def test_tied_weights_count_once() -> None:
    made = real_model(MemoryPlanRequest(model=f"{HERE}:Attention", input_shape=(8,), vocabulary=50))
    assert sum(one.numel() for one in made.module.parameters()) == plan("Attention", device="cpu").parameters


def test_the_peak_is_the_highest_line_of_all_events() -> None:
    def lifetimes(size: int) -> StepLifetimes:
        forward = Allocation(1, 10 * size, "forward", size, 1, end=3)
        update = Allocation(4, 100, "optimizer", 1, 1, end=5)
        return StepLifetimes(size, 0, [Allocation(0, 7, "build", 1, 1, term="weights"), forward, update])

    curve = PeakByBatch(lifetimes(2), lifetimes(4))
    assert [curve.peak_bytes(size) for size in (1, 9, 11, 100)] == [107, 107, 117, 1007]
    assert [curve.largest(limit) for limit in (106, 107, 117, 1010)] == [0, 10, 11, 100]
    assert curve.terms(100)["forward"] == (0, 10) and "optimizer" not in curve.terms(100)
