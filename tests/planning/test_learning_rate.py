"""A configuration for another batch size, by each rule."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bssearch.planning.learning_rate import RULES_OF_THUMB, LearningRateRequest, RuledConfiguration, plan_rules

Tuned = dict[str, Any]

SGD: Tuned = {"from_batch": 256, "learning_rate": 0.1, "weight_decay": 1e-4, "dropout": 0.1}
ADAMW: Tuned = {
    "from_batch": 64,
    "learning_rate": 1e-3,
    "optimizer": "adamw",
    "weight_decay": 0.01,
    "ema_decay": 0.999,
}


def ruled(tuned: Tuned, batch: int, rule: str, **options: Any) -> RuledConfiguration:
    return plan_rules(LearningRateRequest(**tuned, batch=batch, rule=[rule], **options)).rules[rule]


def test_the_rules_give_goyals_rates_at_32_times_the_batch() -> None:
    rates = {name: ruled(SGD, 8192, name).learning_rate for name in ("none", "linear", "sqrt")}
    assert rates == {"none": 0.1, "linear": pytest.approx(3.2), "sqrt": pytest.approx(0.1 * math.sqrt(32))}


def test_from_eight_times_the_batch_on_every_rule_but_none_warms_up_for_five_epochs_at_least() -> None:
    assert ruled(SGD, 2047, "linear").warmup_epochs == 0
    assert ruled(SGD, 2048, "linear").warmup_epochs == 5
    assert ruled(SGD, 2048, "none").warmup_epochs == 0
    assert ruled({"from_batch": 256, "learning_rate": 0.1, "warmup_epochs": 8.0}, 2048, "sqrt").warmup_epochs == 8


def test_the_betas_follow_malladi_and_marek() -> None:
    sde = ruled(ADAMW, 256, "sde")
    assert [sde.learning_rate, sde.beta1, sde.beta2, sde.epsilon] == pytest.approx([2e-3, 0.6, 0.996, 0.5e-8])
    marek = {"from_batch": 512, "learning_rate": 4.8e-3, "optimizer": "adamw", "beta2": 0.95}
    assert ruled(marek, 1, "half_life").beta2 == pytest.approx(0.99990, abs=5e-6), "their repository's value"
    assert ruled(ADAMW, 256, "ema_half_life").ema_decay == pytest.approx(0.999**4)


def test_weight_decay_keeps_the_timescale_under_each_rule_for_the_rate() -> None:
    kept = {rule: ruled(ADAMW, 256, "timescale", rate_rule=rule).weight_decay for rule in ("none", "sqrt", "linear")}
    assert kept == {"none": pytest.approx(0.04), "sqrt": pytest.approx(0.02), "linear": pytest.approx(0.01)}
    assert ruled(ADAMW, 256, "sqrt_weight_decay").weight_decay == pytest.approx(0.02)


def test_the_rate_of_other_rules_is_linear_with_sgd_and_by_the_root_with_adam() -> None:
    assert ruled(SGD, 1024, "sqrt_dropout").learning_rate == pytest.approx(0.4)
    assert ruled(SGD, 1024, "sqrt_dropout").dropout == pytest.approx(0.2)
    assert ruled(ADAMW, 256, "label_smoothing").learning_rate == pytest.approx(2e-3)
    assert ruled(ADAMW, 256, "label_smoothing").label_smoothing == 0.1


@pytest.mark.parametrize("name", RULES_OF_THUMB)
def test_at_its_own_batch_size_a_rule_changes_nothing_but_what_it_adds(name: str) -> None:
    found, tuned = ruled(ADAMW, 64, name), LearningRateRequest(**ADAMW, batch=64)
    whole = {**tuned.tuned, "learning_rate": tuned.learning_rate, "warmup_epochs": tuned.warmup_epochs}
    assert {parameter: getattr(found, parameter) for parameter in whole} == pytest.approx(whole)
    assert found.holds and found.breaks and found.source


@pytest.mark.parametrize(
    ("tuned", "batch", "rule", "codes"),
    [
        ({"from_batch": 64, "learning_rate": 0.1}, 256, "sqrt", []),
        ({"from_batch": 64, "learning_rate": 0.1}, 8192, "linear", ["linear_rule", "layerwise_not_needed"]),
        (ADAMW, 128, "sqrt", ["sqrt_rule", "weight_decay_rule"]),
    ],
)
def test_what_bears_on_the_case_is_put_right_and_nothing_else(
    tuned: Tuned, batch: int, rule: str, codes: list[str]
) -> None:
    plan = plan_rules(LearningRateRequest(**tuned, batch=batch, rule=[rule]))
    assert [one.code for one in plan.notes] == codes


@pytest.mark.parametrize(
    ("tuned", "batch", "rule", "said"),
    [
        (ADAMW, 576, "sde", None),
        (ADAMW, 640, "sde", "κ(1 − β) = 1"),
        (SGD, 1024, "sde", "sgd"),
        (ADAMW, 256, "linear", "adamw"),
        (SGD, 1024, "timescale", "sgd"),
        (SGD, 1024, "ema_half_life", "ema_decay"),
    ],
)
def test_what_contradicts_a_rule_in_this_case_is_told(tuned: Tuned, batch: int, rule: str, said: str | None) -> None:
    caveats = ruled(tuned, batch, rule).caveats
    assert said in caveats[0] if said else caveats == []
