"""A configuration for another batch size, by each rule."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bssearch.errors import UsageError
from bssearch.planning.learning_rate import RULES_OF_THUMB, RuledConfiguration, Tuned, plan_rules

SGD = Tuned(batch=256, learning_rate=0.1, weight_decay=1e-4, dropout=0.1)
ADAMW = Tuned(batch=64, learning_rate=1e-3, optimizer="adamw", weight_decay=0.01, ema_decay=0.999)


def ruled(tuned: Tuned, batch: int, rule: str, **options: Any) -> RuledConfiguration:
    return plan_rules(tuned, batch, [rule], **options).rules[rule]


def test_the_rules_give_goyals_rates_at_32_times_the_batch() -> None:
    rates = {name: ruled(SGD, 8192, name).learning_rate for name in ("none", "linear", "sqrt")}
    assert rates == {"none": 0.1, "linear": pytest.approx(3.2), "sqrt": pytest.approx(0.1 * math.sqrt(32))}


def test_from_eight_times_the_batch_on_every_rule_but_none_warms_up_for_five_epochs_at_least() -> None:
    assert ruled(SGD, 2047, "linear").warmup_epochs == 0
    assert ruled(SGD, 2048, "linear").warmup_epochs == 5
    assert ruled(SGD, 2048, "none").warmup_epochs == 0
    assert ruled(Tuned(batch=256, learning_rate=0.1, warmup_epochs=8.0), 2048, "sqrt").warmup_epochs == 8


def test_the_betas_follow_malladi_and_marek() -> None:
    sde = ruled(ADAMW, 256, "sde")
    assert [sde.learning_rate, sde.beta1, sde.beta2, sde.epsilon] == pytest.approx([2e-3, 0.6, 0.996, 0.5e-8])
    marek = Tuned(batch=512, learning_rate=4.8e-3, optimizer="adamw", beta2=0.95)
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
    found, whole = ruled(ADAMW, 64, name), ADAMW.whole()
    for parameter in ("learning_rate", "warmup_epochs", "weight_decay", "beta1", "beta2", "epsilon", "ema_decay"):
        assert getattr(found, parameter) == pytest.approx(getattr(whole, parameter)), parameter


@pytest.mark.parametrize("name", RULES_OF_THUMB)
def test_every_rule_says_where_it_holds_and_breaks_with_a_source(name: str) -> None:
    rule = RULES_OF_THUMB[name]
    assert rule.holds and rule.breaks and rule.source


@pytest.mark.parametrize(
    ("tuned", "batch", "rules", "codes"),
    [
        (Tuned(batch=64, learning_rate=0.1), 256, ["sqrt"], []),
        (
            Tuned(batch=64, learning_rate=0.1),
            8192,
            ["linear"],
            ["linear_rule", "layerwise_not_needed", "goyal_figures"],
        ),
        (ADAMW, 128, ["sqrt"], ["sqrt_rule"]),
    ],
)
def test_what_bears_on_the_case_is_put_right_and_nothing_else(
    tuned: Tuned, batch: int, rules: list[str], codes: list[str]
) -> None:
    decays = ["weight_decay_rule"] if tuned.weight_decay else []
    assert sorted(one.code for one in plan_rules(tuned, batch, rules).claims) == sorted([*codes, *decays])


def test_what_contradicts_a_rule_in_this_case_is_told() -> None:
    assert not ruled(ADAMW, 576, "sde").caveats, "9 × 0.1 < 1"
    assert "κ(1 − β) = 1" in ruled(ADAMW, 640, "sde").caveats[0]
    assert "about Adam" in ruled(SGD, 1024, "sde").caveats[0]
    assert "linear rule is for SGD" in ruled(ADAMW, 256, "linear").caveats[0]
    assert "about AdamW" in ruled(SGD, 1024, "timescale").caveats[0]
    assert "no ema_decay" in ruled(SGD, 1024, "ema_half_life").caveats[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": 0}, "from_batch = 0 must be a whole number from 1"),
        ({"batch": 10**400}, "from_batch = a number of 401 digits"),
        ({"learning_rate": 0.0}, "learning_rate = 0 must be a finite number > 0"),
        ({"learning_rate": -1.0}, "learning_rate = -1 must be a finite number > 0"),
        ({"learning_rate": math.nan}, "learning_rate = nan must be a finite number > 0"),
        ({"learning_rate": math.inf}, "learning_rate = inf must be a finite number > 0"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1 must be a finite number >= 0"),
        ({"dropout": 1.0}, r"dropout = 1 must be in [0, 1)"),
        ({"optimizer": "adamv"}, "is not known; did you mean adam"),
        ({"optimizer": "AdamW"}, "is not known; did you mean adamw"),
        ({"beta2": 1.0, "optimizer": "adam"}, r"beta2 = 1 must be in [0, 1)"),
    ],
)
def test_wrong_numbers_and_names_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Tuned(**{"batch": 256, "learning_rate": 0.1, **changes})
    assert said in caught.value.message


def test_unknown_rules_are_told_with_the_nearest_names() -> None:
    with pytest.raises(UsageError, match=r"rule = 'liner' is not known; did you mean linear"):
        plan_rules(SGD, 512, ["liner"])
    with pytest.raises(UsageError, match=r"rate_rule = 'sqr' is not known; did you mean sqrt"):
        plan_rules(SGD, 512, rate_rule="sqr")
    with pytest.raises(UsageError, match=r"batch = 0 must be"):
        plan_rules(SGD, 0)


def test_a_rule_for_the_rate_contradicts_rules_that_say_it_themselves() -> None:
    with pytest.raises(UsageError, match="rate_rule = 'sqrt' contradicts rule = linear"):
        plan_rules(SGD, 512, ["linear"], rate_rule="sqrt")
    assert plan_rules(SGD, 512, ["linear", "half_life"], rate_rule="sqrt")


def test_betas_contradict_an_optimizer_that_has_none() -> None:
    with pytest.raises(UsageError, match=r"beta2 = 0\.9 contradicts optimizer = 'sgd'"):
        plan_rules(Tuned(batch=256, learning_rate=0.1, beta2=0.9), 512)
