import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from bssearch.records import Configuration, LearningRateRule, learning_rate_factor
from bssearch.spec.space import (
    OPTIMIZERS,
    UNKNOWN,
    MemoryBoundary,
    SearchSpace,
    choose_micro_batch,
    in_force,
    split_batch,
)
from tests.factories import make_probe, make_spec, not_none

WIDE: dict[str, Any] = {
    "batch_size": {"low": 4, "high": 1000},
    "learning_rate": {"reference_batch": 64, "low": 0.01, "high": 1.0, "rule": "sqrt"},
    "warmup_epochs": [0, 1, 2],
    "weight_decay": {"low": 1e-5, "high": 1e-2},
    "dropout": {"low": 0.0, "high": 0.5},
    "label_smoothing": 0.1,
    "clip_norm": [0.5, 1.0],
    "ema_decay": {"low": 0.9, "high": 0.999, "log": False},
    "optimizer": [{"name": "sgd", "momentum": [0.8, 0.9]}, {"name": "adamw", "learning_rate_scale": 0.01}],
    "schedule": {"name": ["constant", "cosine"], "horizon_samples": {"low": 1000, "high": 9000}},
}


def space(**changes: Any) -> SearchSpace:
    return SearchSpace.model_validate({**WIDE, **changes})


def test_ladder_holds_the_powers_of_two_between_its_bounds() -> None:
    assert space(batch_size={"low": 5, "high": 70}).rungs == (8, 16, 32, 64)
    assert space(batch_size=[96, 32, 96]).rungs == (32, 96)
    assert space(batch_size=48).rungs == (48,)


@pytest.mark.parametrize(
    ("rule", "factor"), [(LearningRateRule.LINEAR, 4.0), (LearningRateRule.SQRT, 2.0), (LearningRateRule.NONE, 1.0)]
)
def test_learning_rate_rules_at_four_times_the_batch(rule: LearningRateRule, factor: float) -> None:
    assert learning_rate_factor(rule, 256, 64) == factor
    assert learning_rate_factor(rule, 64, 256) == 1 / factor
    plain = SearchSpace.model_validate(
        {"batch_size": [64, 256], "learning_rate": {"reference_batch": 64, "low": 0.01, "high": 1.0, "rule": rule}}
    )
    assert plain.decode(256, {"reference_learning_rate": 0.1}).learning_rate == pytest.approx(0.1 * factor)


@given(st.data())
def test_what_is_sampled_comes_back_from_the_configuration(data: st.DataObject) -> None:
    wide = space()
    batch_size = data.draw(st.sampled_from(wide.rungs))
    sampled = {
        dimension.name: data.draw(
            st.sampled_from(dimension.choices) if dimension.choices else st.floats(dimension.low, dimension.high)
        )
        for dimension in wide.dimensions()
    }
    configuration = wide.decode(batch_size, sampled)
    back = not_none(wide.encode(configuration))
    assert math.isclose(float(back["reference_learning_rate"] or 0), float(sampled["reference_learning_rate"] or 0))
    again = wide.decode(batch_size, back)
    assert (again.parameters, again.dropout) == (configuration.parameters, configuration.dropout)


def test_configuration_outside_the_space_has_no_coordinates() -> None:
    wide = space()
    inside = wide.decode(64, {dimension.name: dimension.any_value for dimension in wide.dimensions()})
    assert wide.encode(inside) is not None
    assert space(batch_size=[32]).encode(inside) is None
    assert space(learning_rate={"low": 0.5, "high": 1.0}).encode(inside) is None
    assert space(label_smoothing=0.0).encode(inside) is None
    assert space(optimizer={"name": "adamw"}).encode(inside) is None


def test_an_adamw_trial_carries_its_own_parameters_and_learning_rate_scale() -> None:
    configuration = space().decode(
        64,
        {
            "reference_learning_rate": 0.5,
            "warmup_epochs": 0,
            "weight_decay": 1e-3,
            "dropout": 0.0,
            "clip_norm": 1.0,
            "ema_decay": 0.99,
            "optimizer": "adamw",
            "sgd.momentum": 0.8,
            "schedule": "cosine",
            "horizon_samples": 2000.4,
        },
    )
    assert configuration.learning_rate == pytest.approx(0.005)
    assert configuration.parameters == {
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
        "schedule": "cosine",
        "horizon_samples": 2000,
        "clip_norm": 1.0,
        "ema_decay": 0.99,
    }


@pytest.mark.parametrize(
    ("batch_size", "largest", "split"), [(64, None, (64, 1)), (64, 64, (64, 1)), (64, 48, (32, 2)), (96, 50, (48, 2))]
)
def test_batches_beyond_the_micro_batch_accumulate(
    batch_size: int, largest: int | None, split: tuple[int, int]
) -> None:
    assert split_batch(batch_size, largest) == split


@pytest.mark.parametrize(("rate", "at_edge"), [(0.0101, True), (0.1, False), (0.99, True)])
def test_learning_rate_at_the_edge_of_its_range_is_noticed(rate: float, at_edge: bool) -> None:
    one = space(optimizer={"name": "sgd"})
    values = {dimension.name: dimension.any_value for dimension in one.dimensions()}
    assert one.at_edge(one.decode(256, {**values, "reference_learning_rate": rate})) is at_edge


def searched_everywhere(name: str) -> dict[str, Any]:
    """Return an optimizer with every option searched that can be: a range from its default, or both switches."""
    options = OPTIMIZERS[name].option_defaults()
    numbers = {
        option: {"low": min(default, default * 1.0005), "high": max(default, default * 1.0005)}
        for option, default in options.items()
        if isinstance(default, float) and default
    }
    return {"name": name, **numbers, **{option: [True, False] for option, value in options.items() if value is False}}


@pytest.mark.parametrize("together", [False, True], ids=["alone", "among the others"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_options_of_every_optimizer_can_be_searched(name: str, together: bool) -> None:
    wide = space(
        optimizer=[searched_everywhere(other) for other in OPTIMIZERS] if together else searched_everywhere(name)
    )
    sampled = {one.name: one.choices[-1] if one.choices else one.high for one in wide.dimensions()} | {
        "optimizer": name
    }
    configuration = wide.decode(64, sampled)
    back = wide.encode(configuration)
    assert back is not None and wide.decode(64, back).parameters == configuration.parameters
    assert set(OPTIMIZERS[name].option_defaults()) <= configuration.parameters.keys()
    for option, domain in searched_everywhere(name).items():
        if option != "name":
            assert configuration.parameters[option] == (domain["high"] if isinstance(domain, dict) else False)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch_rules", {"betas": "sqrt"}, "Input should be 'none', 'half_life' or 'sde'"),
        (
            "schedule",
            {"name": "cosine", "horizon_samples": 9, "decay_share": 0.1},
            "decay_share needs warmup_stable_decay",
        ),
        ("schedule", {"name": "warmup_stable_decay", "horizon_samples": 9, "decay_share": 0}, "must be in (0, 1]"),
        ("optimizer", {"name": "lars", "nesterov": [True, False], "momentum": 0}, "nesterov needs momentum > 0"),
        (
            "optimizer",
            {"name": "adam", "momentum": 0.9},
            "adam has no option 'momentum'; choose from beta1, beta2, epsilon",
        ),
        ("optimizer", {"name": "adafactor", "beta2_decay": [-0.8, 0.1]}, "0.1 must be <= 0"),
        ("optimizer", {"name": "adafactor", "clipping_threshold": 0.5}, "0.5 must be >= 1"),
        ("optimizer", {"name": "lars", "trust_coefficient": 0}, "0 must be > 0"),
        ("optimizer", {"name": "lamb", "beta1": 1}, "1 must be in [0, 1)"),
        ("batch_size", {"low": 33, "high": 60}, "no power of two from low = 33 to high = 60"),
        ("batch_size", [], "at least 1 item"),
        ("learning_rate", {"low": 1.0, "high": 0.1}, "low = 1 must be < high = 0.1"),
        ("dropout", 1.0, "1 must be in [0, 1)"),
        ("dropout", {"low": 0.3, "high": 0.1}, "low = 0.3 must be < high = 0.1"),
        ("weight_decay", {"low": 0, "high": 0.1, "log": True}, "must be > 0 on a log scale"),
        ("weight_decay", [-0.1], "-0.1 must be >= 0"),
        ("ema_decay", {"low": 0.9, "high": 1.0}, "1 must be in (0, 1)"),
        ("ema_decay", [0.0, 0.9], "0 must be in (0, 1)"),
        ("optimizer", {"name": "sgd", "momentum": 0.0}, "nesterov needs momentum > 0"),
        ("optimizer", {"name": "lion"}, "does not match any of the expected tags"),
        ("schedule", {"name": "cosine"}, "a cosine schedule needs horizon_samples"),
        ("schedule", {"horizon_samples": 5}, "a constant schedule takes no horizon_samples"),
        ("max_micro_batch_size", 0, "greater than or equal to 1"),
    ],
)
def test_wrong_spaces_say_what_is_wrong(field: str, value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        space(**{field: value})


def test_what_is_measured_for_all_trials_has_the_regularisation_that_the_space_can_switch_on() -> None:
    space = SearchSpace.model_validate(
        {"batch_size": 8, "learning_rate": 0.1, "dropout": {"low": 0.0, "high": 0.3}, "label_smoothing": [0.0, 0.1]}
    )
    plain = Configuration(batch_size=8, micro_batch_size=8, learning_rate=0.1)
    on = space.with_all_regularisation(plain)
    assert (on.dropout, on.label_smoothing) == (0.3, 0.1)
    assert space.with_all_regularisation(replace(plain, dropout=0.05)).dropout == 0.05
    without = SearchSpace.model_validate({"batch_size": 8, "learning_rate": 0.1})
    assert without.with_all_regularisation(plain) == plain


def test_what_a_space_leaves_out_is_as_plain_as_it_can_be() -> None:
    least = SearchSpace.model_validate({"batch_size": 8, "learning_rate": 0.1})
    assert least.dimensions() == ()
    plain = Configuration(
        batch_size=8,
        micro_batch_size=8,
        learning_rate=0.1,
        warmup_epochs=0.0,
        weight_decay=0.0,
        dropout=0.0,
        label_smoothing=0.0,
        optimizer="sgd",
        parameters={"momentum": 0.9, "nesterov": True, "schedule": "constant"},
    )
    assert least.decode(8, {}) == plain
    adamw = SearchSpace.model_validate({"batch_size": 8, "learning_rate": 0.1, "optimizer": {"name": "adamw"}})
    assert adamw.decode(8, {}).parameters == {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "schedule": "constant"}
    assert adamw.decode(8, {}).learning_rate == 0.1


def test_a_relative_learning_rate_follows_the_root_from_64_where_nothing_else_is_said() -> None:
    found = SearchSpace.model_validate({"batch_size": [16, 64], "learning_rate": {"low": 0.01, "high": 1.0}})
    assert found.decode(64, {"reference_learning_rate": 0.1}).learning_rate == 0.1
    assert found.decode(16, {"reference_learning_rate": 0.1}).learning_rate == pytest.approx(0.05)


def test_the_nearest_of_a_space_has_the_learning_rate_at_its_reference() -> None:
    found = SearchSpace.model_validate({"batch_size": [16, 64], "learning_rate": {"low": 0.01, "high": 1.0}})
    size, values = found.nearest(Configuration(batch_size=20, micro_batch_size=20, learning_rate=0.05))
    assert size == 16
    assert values["reference_learning_rate"] == pytest.approx(0.1)


RELATIVE = {"reference_batch": 64, "low": 0.01, "high": 1.0, "rule": "sqrt"}


def ruled(rules: dict[str, str], **changes: Any) -> SearchSpace:
    fields: dict[str, Any] = {"optimizer": {"name": "adamw", "beta2": [0.99, 0.999]}, "schedule": {}, **changes}
    return space(learning_rate=RELATIVE, weight_decay={"low": 0.01, "high": 0.1}, batch_rules=rules, **fields)


@pytest.mark.parametrize(
    ("rules", "name", "at_reference", "at_four_times"),
    [
        ({"betas": "half_life"}, "beta2", 0.999, 0.999**4),
        ({"betas": "half_life"}, "beta1", 0.9, 0.9),
        ({"betas": "sde"}, "beta2", 0.999, 0.996),
        ({"betas": "sde"}, "beta1", 0.9, 0.6),
        ({"betas": "sde"}, "epsilon", 1e-8, 5e-9),
        ({"ema_decay": "half_life"}, "ema_decay", 0.99, 0.99**4),
        ({"weight_decay": "sqrt"}, "weight_decay", 0.05, 0.1),
        ({"weight_decay": "timescale"}, "weight_decay", 0.05, 0.05 * 4 / 2),
    ],
)
def test_a_rule_carries_a_parameter_over_from_the_reference_batch_and_back(
    rules: dict[str, str], name: str, at_reference: float, at_four_times: float
) -> None:
    one = ruled(rules)
    sampled: dict[str, Any] = {dimension.name: dimension.any_value for dimension in one.dimensions()}
    sampled |= {key: value for key, value in ((name, at_reference),) if key in sampled}
    for batch_size, value in ((64, at_reference), (256, at_four_times)):
        configuration = one.decode(batch_size, sampled)
        assert configuration.parameters.get(name, getattr(configuration, name, None)) == pytest.approx(value, rel=1e-12)
        assert one.encode(configuration) == pytest.approx(sampled) and one.outside(configuration) == []


def test_a_beta_that_the_rule_would_make_negative_is_zero() -> None:
    one = ruled({"betas": "sde"}, batch_size=[64, 1024])
    sampled = {dimension.name: dimension.any_value for dimension in one.dimensions()}
    assert one.decode(1024, sampled).parameters["beta1"] == 0.0
    assert one.encode(one.decode(1024, sampled)) is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_rules": {"betas": "half_life"}, "optimizer": {"name": "sgd"}}, "the space has no beta2"),
        ({"batch_rules": {"ema_decay": "half_life"}, "ema_decay": None}, "the space has no ema_decay"),
        ({"batch_rules": {"weight_decay": "sqrt"}, "weight_decay": 0.0}, "the space has no weight_decay"),
        ({"batch_rules": {"weight_decay": "sqrt"}, "learning_rate": [0.1]}, "weight_decay = sqrt needs learning_rate"),
    ],
)
def test_rules_without_their_parameter_say_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        space(**changes)


def test_a_decay_after_a_stable_rate_has_its_share_searched_or_given() -> None:
    kind = {"name": "warmup_stable_decay", "horizon_samples": 1000}
    plain = space(schedule=kind)
    sampled = {dimension.name: dimension.any_value for dimension in plain.dimensions()}
    assert plain.decode(64, sampled).parameters["decay_share"] == 0.2
    searched = space(schedule={**kind, "decay_share": [0.1, 0.5]})
    configuration = searched.decode(64, {**sampled, "decay_share": 0.5})
    assert configuration.parameters["decay_share"] == 0.5
    again = searched.encode(configuration)
    assert again is not None and again["decay_share"] == 0.5


GROWS: dict[str, Any] = {"batch_size": {"low": 8, "high": 64}, "learning_rate": 0.1}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"start": 17}, "batch_schedule.start: 17 is not one of 8, 16, 32, 64"),
        ({"end": [32, 128]}, "batch_schedule.end: 128 is not one of"),
        ({"start": 64, "end": 32}, r"no start of \[64\] is below an end of \[32\]"),
        ({"milestones": {400: 32}}, "milestones is given, but name is geometric"),
        ({"name": "milestones"}, "milestones is missing, but name is milestones"),
        ({"name": "seesaw"}, "set space.schedule to one of cosine, linear, warmup_stable_decay, not constant"),
        ({"name": ["geometric", "milestones"], "milestones": {}}, "should have at least 1 item"),
        ({"name": "milestones", "milestones": {10**15: 32}}, "should be less than 1000000000000000"),
        ({"name": "milestones", "milestones": {64 * one: one for one in range(9, 80)}}, "should have at most 63 items"),
        ({"name": "milestones", "milestones": {400: 32, 800: 16}}, "a batch may only grow"),
        ({"name": "milestones", "milestones": {400: 8}}, "milestones: 8 must be > 8, the start"),
        ({"name": "milestones", "milestones": {1: 64}}, "batch_schedule.milestones: 1 must be >= 32, the first step"),
        ({"name": "milestones", "milestones": {400: 16, 410: 64}}, "milestones: 410 must be >= 416, one step of 16"),
        ({"name": "milestones", "milestones": {400: 48}}, "batch_schedule.milestones: 48 is not one of"),
        ({"name": ["linear", "linear"]}, "name lists 'linear' twice"),
        ({"begin": 0.5, "until": 0.5}, "least begin 0.5 must be < greatest until 0.5"),
        ({"until": -1}, r"-1 must be in \[0, 100\]"),
        ({"noise_share": 0}, "0 must be > 0"),
    ],
)
def test_a_batch_schedule_that_means_nothing_is_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        SearchSpace.model_validate({**GROWS, "batch_schedule": given})


def test_a_batch_schedule_is_no_coordinate_of_the_search_and_no_part_of_the_question() -> None:
    plain = SearchSpace.model_validate(GROWS)
    grows = SearchSpace.model_validate({**GROWS, "batch_schedule": {"name": ["geometric", "linear"]}})
    assert plain.dimensions() == grows.dimensions()
    specs = [
        make_spec(space=one.model_dump(), default={"batch_size": 32, "learning_rate": 0.1}) for one in (plain, grows)
    ]
    assert specs[0].question_hash == specs[1].question_hash and specs[0] != specs[1]


def test_the_boundary_is_monotone() -> None:
    boundary = MemoryBoundary.of(fitting=[8, 100, 64], too_large=[128, 96])
    assert boundary == MemoryBoundary(fits=64, too_large=96)
    assert [size for size in (64, 95, 96, 1000) if boundary.may_fit(size)] == [64, 95]
    assert boundary.without(32) == MemoryBoundary(fits=None, too_large=32)
    assert boundary.without(200) == boundary
    assert UNKNOWN.may_fit(10**9)
    assert UNKNOWN.without(1).nothing_fits and not boundary.nothing_fits


@pytest.mark.parametrize(
    ("batch_size", "cap", "memory", "micro"),
    [
        (64, None, UNKNOWN, 64),
        (64, 48, UNKNOWN, 32),
        (64, 48, MemoryBoundary(fits=8), 32),  # what fits is no bound
        (64, None, MemoryBoundary(too_large=64), 32),
        (96, None, MemoryBoundary(too_large=64), 48),
        (64, 16, MemoryBoundary(fits=32, too_large=64), 16),
        (1024, None, MemoryBoundary(fits=1000, too_large=1050), 512),  # 1024 is not known to fit
        (4096, None, MemoryBoundary(fits=1030, too_large=1050), 1024),
        (960, None, MemoryBoundary(fits=8, too_large=500), 480),  # what is known to fit is far below
        (97, None, MemoryBoundary(too_large=97), 1),
        (8, None, MemoryBoundary(too_large=1), None),
    ],
)
def test_a_batch_is_split_into_the_largest_micro_batches_that_may_fit(
    batch_size: int, cap: int | None, memory: MemoryBoundary, micro: int | None
) -> None:
    assert choose_micro_batch(batch_size, cap, memory) == micro


@pytest.mark.parametrize(("too_large", "size"), [(None, 64), (64, 32), (17, 16), (16, None)])
def test_the_step_time_in_force_is_that_of_the_largest_split_below_the_boundary(
    too_large: int | None, size: int | None
) -> None:
    timed = {size: make_probe(64, micro_batch_size=size) for size in (16, 32, 64)}
    others = [make_probe(64, micro_batch_size=32, step_seconds=9.0), make_probe(128, out_of_memory=True)]
    found = in_force([*timed.values(), *others], MemoryBoundary(too_large=too_large))
    assert found == ({} if size is None else {64: timed[size]})


def test_a_step_time_measured_alone_takes_the_place_of_one_that_was_not_but_for_its_cadence() -> None:
    shared = make_probe(64, step_seconds=9.0, contended=True, eval_every_steps=3)
    alone = make_probe(64, step_seconds=1.0, eval_every_steps=7)
    assert in_force([shared, alone, make_probe(64, step_seconds=2.0, eval_every_steps=8)], UNKNOWN) == {
        64: make_probe(64, step_seconds=1.0, eval_every_steps=3)
    }
    assert in_force([alone, shared], UNKNOWN) == {64: alone}


def test_a_batch_is_split_by_its_largest_divisor_up_to_the_limit() -> None:
    for batch in range(1, 70):
        for most in range(1, 75):
            micro = max(size for size in range(1, most + 1) if batch % size == 0)
            assert split_batch(batch, most) == (micro, batch // micro)
    assert split_batch(999_999_937, 999_999_936) == (1, 999_999_937), "a prime"
