"""Requests: each wrong field of a plan is named with its value, in Python and from texts."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest

import bssearch as api
from bssearch.errors import UsageError
from bssearch.planning.learning_rate import LearningRateRequest
from bssearch.planning.memory import MemoryPlanRequest
from bssearch.planning.requests import Request, RequestError, options_of, read
from bssearch.planning.scale import AccumulationRequest, ScaleRequest
from bssearch.planning.start import StartRequest

RATE = {"from_batch": 256, "learning_rate": 0.1, "batch": 512}
SCALE = {"devices": 1, "batch": 8, "alpha_s": 0.1, "beta_s": 0.1, "b_crit": 100.0}
MEMORY = {"parameters": 10**6}
BERT = {"layers": 12, "hidden": 768, "heads": 12, "sequence": 512}


@pytest.mark.parametrize(
    ("plan", "right", "wrong"),
    [
        (api.plan_accumulation, {"batch": 8}, {"batch": 0}),
        (api.plan_accumulation, {"batch": 8}, {"batch": 10**10}),
        (api.plan_accumulation, {"batch": 8}, {"batch": 8.5}),
        (api.plan_accumulation, {"batch": 8}, {"batch": True}),
        (api.plan_accumulation, {"batch": 8}, {"batch": "8"}),
        (api.plan_accumulation, {"batch": 8}, {"micro": 0}),
        (api.plan_accumulation, {"batch": 8}, {"devices": 0}),
        (api.plan_accumulation, {"batch": 8}, {"batch_norm_layers": -1}),
        (api.plan_accumulation, {"batch": 8}, {"bacth": 8}),
        (api.plan_learning_rate, RATE, {"from_batch": 10**400}),
        (api.plan_learning_rate, RATE, {"learning_rate": 0.0}),
        (api.plan_learning_rate, RATE, {"learning_rate": math.nan}),
        (api.plan_learning_rate, RATE, {"learning_rate": math.inf}),
        (api.plan_learning_rate, RATE, {"weight_decay": -0.1}),
        (api.plan_learning_rate, RATE, {"dropout": 1.0}),
        (api.plan_learning_rate, RATE, {"optimizer": "AdamW"}),
        (api.plan_learning_rate, RATE, {"rule": "liner"}),
        (api.plan_learning_rate, RATE, {"rate_rule": "sqr"}),
        (api.plan_scale, SCALE, {"alpha_s": -1.0}),
        (api.plan_scale, SCALE, {"beta_s": 0.0}),
        (api.plan_scale, SCALE, {"overlap": 1.5}),
        (api.plan_scale, SCALE, {"devices": 4097}),
        (api.plan_scale, SCALE, {"parameters": 0}),
        (api.plan_start, {}, {"memory_gib": 0.0}),
        (api.plan_start, {}, {"target": math.inf}),
        (api.plan_start, {}, {"workload": ""}),
        (api.plan_start, {}, {"start": "finetuning"}),
        (api.plan_memory, MEMORY, {"parameters": "1.5"}),
        (api.plan_memory, MEMORY, {"parameters": "1e99999999999999999999"}),
        (api.plan_memory, MEMORY, {"parameters": 10**5000}),
        (api.plan_memory, MEMORY, {"parameters": [1]}),
        (api.plan_memory, MEMORY, {"precision": "int8"}),
        (api.plan_memory, MEMORY, {"memory_gib": math.nan}),
        (api.plan_memory, MEMORY, {"memory_gib": "24"}),
        (api.plan_memory, MEMORY, {"stage": 4}),
        (api.plan_memory, MEMORY | BERT, {"layers": 2.5}),
        (api.plan_memory, MEMORY | BERT, {"mlp": "moe"}),
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
        (api.plan_accumulation, {"batch": 8, "micro": 4, "max_micro": 4}, ["micro = 4", "max_micro = 4"]),
        (api.plan_learning_rate, {**RATE, "rule": "linear", "rate_rule": "sqrt"}, ["rate_rule = 'sqrt'", "linear"]),
        (api.plan_learning_rate, {**RATE, "beta2": 0.9}, ["beta2 = 0.9", "'sgd'"]),
        (api.plan_scale, {**SCALE, "per_device_batch": 8}, ["batch = 8", "per_device_batch = 8"]),
        (api.plan_scale, {**SCALE, "batch": None}, ["batch = None", "per_device_batch = None"]),
        (api.plan_scale, {**SCALE, "beta_s": None}, ["alpha_s", "beta_s"]),
        (api.plan_scale, {**SCALE, "step_times": "times.csv"}, ["step_times = times.csv", "alpha_s"]),
        (api.plan_scale, {**SCALE, "b_crit_low": 200.0}, ["b_crit_low = 200", "b_crit = 100"]),
        (api.plan_scale, {**SCALE, "b_crit_high": 50.0}, ["b_crit_high = 50", "b_crit = 100"]),
        (api.plan_scale, {**SCALE, "b_crit": None, "b_crit_low": 50.0}, ["b_crit_low", "b_crit"]),
        (api.plan_scale, {**SCALE, "at_batch": 8}, ["at_batch = 8", "samples_to_target"]),
        (api.plan_scale, {**SCALE, "price_per_device_hour": 2.0}, ["price_per_device_hour = 2", "samples_to_target"]),
        (api.plan_scale, {**SCALE, "devices": 2}, ["devices = 2", "bandwidth_gb_s", "parameters"]),
        (api.plan_start, {"price_per_device_hour": 2.0}, ["price_per_device_hour = 2", "priority = 'speed'"]),
        (api.plan_start, {"batch": 512, "train_samples": 100}, ["batch = 512", "train_samples = 100"]),
        (api.plan_start, {"batch": 4096}, ["batch = 4096", "1077"]),
        (api.plan_memory, {}, ["parameters", "model"]),
        (api.plan_memory, {**MEMORY, "mixed": "pure"}, ["mixed = 'pure'", "precision"]),
        (api.plan_memory, {**MEMORY, "precision": "fp8", "mixed": "pure"}, ["mixed = 'pure'", "fp8"]),
        (api.plan_memory, {**MEMORY, "device": "h10"}, ["device = 'h10'", "h100-80gb"]),
        (api.plan_memory, {**MEMORY, "device": "a100-40gb", "memory_gib": 80.0}, ["memory_gib = 80", "a100-40gb"]),
        (api.plan_memory, {**MEMORY, "layers": 12}, ["layers = 12", "hidden, heads, sequence"]),
        (api.plan_memory, {**MEMORY, "fused_attention": False}, ["fused_attention = False", "layers"]),
        (api.plan_memory, {**MEMORY, "micro_batch": 8}, ["micro_batch = 8", "layers"]),
        (api.plan_memory, {**MEMORY, "checkpointing": True}, ["checkpointing = True", "layers"]),
        (api.plan_memory, {**MEMORY, **BERT, "heads": 7}, ["heads = 7", "hidden = 768"]),
        (api.plan_memory, {**MEMORY, **BERT, "kv_heads": 5}, ["kv_heads = 5", "heads = 12"]),
        (api.plan_memory, {**MEMORY, "stage": 2}, ["stage = 2", "devices"]),
        (api.plan_memory, {**MEMORY, "input_shape": (3, 8, 8)}, ["input_shape", "model"]),
        (api.plan_memory, {**MEMORY, "model": "a:b"}, ["parameters", "model = a:b"]),
        (api.plan_memory, {"model": "a:b", "hidden": 5}, ["hidden", "model = a:b"]),
        (api.plan_memory, {"model": "a:b", "precision": "fp8"}, ["fp8"]),
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
    parameters = inspect.signature(api.plan_accumulation).parameters
    assert list(parameters) == list(AccumulationRequest.model_fields)
    assert parameters["devices"].default == 1 and parameters["batch"].default is inspect.Parameter.empty
