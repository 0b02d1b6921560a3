"""The configurations that rules of thumb give, and when they give none."""

from dataclasses import replace
from typing import Any

import pytest

from bssearch.analysis.rules.rule_book import CHANGED_PARAMETER, RULES, Rule
from bssearch.records import Configuration
from bssearch.records.scaling import LARGEST_DROPOUT, WARMUP_RATIO
from bssearch.spec.space import SearchSpace

SPACE = SearchSpace.model_validate({"batch_size": [16, 256], "learning_rate": 0.1, "warmup_epochs": [0.0, 1.0]})
NO_WARMUP = SearchSpace.model_validate({"batch_size": [16, 256], "learning_rate": 0.1})
BASE = Configuration(
    batch_size=16, micro_batch_size=16, learning_rate=0.1, weight_decay=1e-4, dropout=0.1, optimizer="adamw"
)
TUNED = replace(
    BASE, batch_size=256, micro_batch_size=256, learning_rate=0.3, weight_decay=1e-3, dropout=0.2, warmup_epochs=1.0
)


def given(rule: Rule, base: dict[str, Any] | None = None, tuned: dict[str, Any] | None = None) -> Configuration | str:
    return RULES[rule](SPACE, replace(BASE, **(base or {})), replace(TUNED, **(tuned or {})))


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        (Rule.LINEAR_RATE, 1.6),
        (Rule.SQRT_RATE, 0.4),
        (Rule.WARMUP, 0.0),
        (Rule.WEIGHT_DECAY, 4e-4),
        (Rule.TIMESCALE, 1e-4 * 16 / 3),
        (Rule.DROPOUT, 0.4),
    ],
)
def test_a_rule_changes_one_parameter_of_the_optimum_by_the_ratio_of_the_batch_sizes(rule: Rule, value: float) -> None:
    found = given(rule)
    assert isinstance(found, Configuration)
    name = CHANGED_PARAMETER[rule]
    assert getattr(found, name) == pytest.approx(value)
    assert replace(found, **{name: getattr(TUNED, name)}) == TUNED


def test_every_rule_that_gives_a_configuration_says_which_parameter_it_changes() -> None:
    assert set(CHANGED_PARAMETER) == {*RULES, Rule.LAYERWISE} - {Rule.SDE}, "that changes several"


@pytest.mark.parametrize("rule", [Rule.LINEAR_RATE, Rule.SQRT_RATE, Rule.WEIGHT_DECAY, Rule.TIMESCALE])
def test_what_depends_on_the_optimizer_is_not_carried_from_one_to_another(rule: Rule) -> None:
    assert isinstance(given(rule, {"optimizer": "sgd"}), str)
    assert isinstance(given(rule, tuned={"optimizer": "sgd"}), str)


def test_the_timescale_is_adamws() -> None:
    assert isinstance(given(Rule.TIMESCALE, {"optimizer": "sgd"}, {"optimizer": "sgd"}), str)
    assert isinstance(given(Rule.WEIGHT_DECAY, {"optimizer": "sgd"}, {"optimizer": "sgd"}), Configuration)


@pytest.mark.parametrize(
    ("rule", "without"),
    [
        (Rule.WEIGHT_DECAY, {"weight_decay": 0.0}),
        (Rule.TIMESCALE, {"weight_decay": 0.0}),
        (Rule.DROPOUT, {"dropout": 0.0}),
    ],
)
def test_what_the_default_has_not_cannot_be_scaled(rule: Rule, without: dict[str, float]) -> None:
    assert isinstance(given(rule, without), str)
    assert isinstance(given(rule, tuned=without), Configuration), "the optimum may be without"


@pytest.mark.parametrize(("ratio", "is_about"), [(WARMUP_RATIO, True), (WARMUP_RATIO - 1, False)])
def test_a_warmup_is_advised_from_its_ratio_on(ratio: int, is_about: bool) -> None:
    found = given(Rule.WARMUP, tuned={"batch_size": ratio * 16, "micro_batch_size": ratio * 16})
    assert isinstance(found, Configuration) is is_about


def test_there_is_no_warmup_to_do_without_where_neither_the_space_nor_the_optimum_has_one() -> None:
    without = replace(TUNED, warmup_epochs=0.0)
    assert isinstance(RULES[Rule.WARMUP](NO_WARMUP, BASE, without), str)
    assert RULES[Rule.WARMUP](SPACE, BASE, without) == without
    assert RULES[Rule.WARMUP](NO_WARMUP, BASE, TUNED) == without


def test_no_rule_asks_for_so_much_dropout_that_nothing_trains() -> None:
    found = given(Rule.DROPOUT, {"dropout": 0.5})
    assert isinstance(found, Configuration) and found.dropout == LARGEST_DROPOUT


@pytest.mark.parametrize("rule", list(RULES))
def test_a_parameter_that_imported_runs_do_not_say_is_no_ground_for_a_rule(rule: Rule) -> None:
    unknown = {"parameters": {CHANGED_PARAMETER.get(rule, "learning_rate"): None}}
    assert isinstance(given(rule, unknown), str)
    assert isinstance(given(rule, tuned=unknown), str)
