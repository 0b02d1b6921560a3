"""What a parameter may be: its limits, what lies in a domain, what is nearest to a value."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from bssearch.spec.space.domains import (
    LIMITS,
    BatchLadder,
    Dimension,
    Domain,
    Range,
    RelativeLearningRate,
    Schedule,
    bounds,
    describe,
    domain_kind,
    holds,
)
from bssearch.spec.space.optimizers import Sgd
from bssearch.spec.space.search_space import SearchSpace

NEAR_ZERO, NEAR_ONE = 1e-12, 1 - 1e-12
CLOSED_BELOW = ("dropout", "label_smoothing", "momentum", "beta1", "beta2")


def space_with(field: str, value: Any) -> SearchSpace:
    """Return a space with a value of a parameter, wherever in the spec the parameter stands."""
    fields: dict[str, Any] = {"batch_size": 8, "learning_rate": 0.1}
    if field == "momentum":
        fields["optimizer"] = {"name": "sgd", "momentum": value, "nesterov": False}
    elif field in {"beta1", "beta2", "epsilon"}:
        fields["optimizer"] = {"name": "adamw", field: value}
    elif field == "horizon_samples":
        fields["schedule"] = {"name": "cosine", "horizon_samples": value}
    elif field == "decay_share":
        fields["schedule"] = {"name": "warmup_stable_decay", "horizon_samples": 1000, "decay_share": value}
    else:
        fields[field] = value
    return SearchSpace.model_validate(fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, 0.0) for field in ("warmup_epochs", "weight_decay", *CLOSED_BELOW)),
        *((field, NEAR_ONE) for field in (*CLOSED_BELOW, "ema_decay")),
        *((field, NEAR_ZERO) for field in ("clip_norm", "ema_decay", "epsilon")),
        *((field, 1e9) for field in ("warmup_epochs", "weight_decay", "clip_norm", "epsilon", "horizon_samples")),
        ("horizon_samples", 1.0),
    ],
)
def test_a_parameter_may_be_all_that_its_limits_allow(field: str, value: float) -> None:
    space_with(field, value)
    space_with(field, [value, value])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, -NEAR_ZERO) for field in ("warmup_epochs", "weight_decay", *CLOSED_BELOW)),
        *((field, 1.0) for field in (*CLOSED_BELOW, "ema_decay")),
        *((field, 0.0) for field in ("clip_norm", "ema_decay", "epsilon")),
        ("horizon_samples", 0.999),
    ],
)
def test_a_parameter_beyond_its_limits_is_refused_fixed_listed_or_in_a_range(field: str, value: float) -> None:
    inside = 0.5 if value <= 0 or value == 1.0 else 2.0
    low, high = sorted((inside, value))
    for domain in (value, [inside, value], {"low": low, "high": high}):
        with pytest.raises(ValidationError):
            space_with(field, domain)
    space_with(field, inside)


def test_each_limited_parameter_is_a_field_of_the_space() -> None:
    for field in LIMITS:
        assert space_with(field, 1.0 if field == "horizon_samples" else 0.5)


@pytest.mark.parametrize(
    ("low", "log", "is_log"),
    [(0.1, None, True), (0.0, None, False), (-1.0, None, False), (0.1, False, False), (0.1, True, True)],
)
def test_a_range_above_zero_is_searched_on_a_log_scale_unless_it_says_otherwise(
    low: float, log: bool | None, is_log: bool
) -> None:
    assert Range(low=low, high=1.0, log=log).is_log is is_log


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_a_log_scale_begins_above_zero(low: float) -> None:
    with pytest.raises(ValidationError):
        Range(low=low, high=1.0, log=True)
    assert not Range(low=low, high=1.0, log=False).is_log


@pytest.mark.parametrize("made", [Range, RelativeLearningRate])
def test_a_range_of_one_value_is_none(made: type[Range | RelativeLearningRate]) -> None:
    with pytest.raises(ValidationError):
        made(low=0.5, high=0.5)


def test_the_form_of_a_value_says_what_kind_of_domain_it_is() -> None:
    assert [domain_kind(one) for one in (0.5, True, [0.5], (0.5,), {"low": 0}, Range(low=0, high=1))] == [
        "fixed",
        "fixed",
        "choices",
        "choices",
        "range",
        "range",
    ]
    domain: TypeAdapter[Domain] = TypeAdapter(Domain)
    assert domain.validate_python([0.1, 0.2]) == (0.1, 0.2)
    with pytest.raises(ValidationError):
        domain.validate_python([])


def test_the_bounds_of_a_domain_are_its_least_and_its_greatest_value() -> None:
    assert bounds(Range(low=-1.0, high=2.0)) == (-1.0, 2.0)
    assert bounds((3, 1, 2)) == (1, 3)
    assert bounds(0.5) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("domain", "value", "inside"),
    [
        (Range(low=0.1, high=0.3), 0.2, True),
        (Range(low=0.1, high=0.3), 0.1, True),
        (Range(low=0.1, high=0.3), 0.3, True),
        (Range(low=0.1, high=0.3), 0.1 * (1 - 1e-12), True),
        (Range(low=0.1, high=0.3), 0.3 * (1 + 1e-12), True),
        (Range(low=0.1, high=0.3), 0.0999, False),
        (Range(low=0.1, high=0.3), 0.3001, False),
        ((0.1, 0.3), 0.3, True),
        ((0.1, 0.3), 0.1 + 0.2, True),
        ((0.1, 0.3), 0.2, False),
        (0.3, 0.1 + 0.2, True),
        (0.3, 0.31, False),
        (("sgd", "adamw"), "adamw", True),
        (("sgd", "adamw"), "lion", False),
        (("sgd", "adamw"), 0.5, False),
        ((True, False), True, True),
        (None, 0.5, False),
        (0.5, None, False),
    ],
)
def test_a_value_lies_in_a_domain_up_to_rounding_at_its_ends(domain: Any, value: Any, inside: bool) -> None:
    assert holds(domain, value) is inside


def test_a_domain_in_words_has_every_number_times_the_factor() -> None:
    for domain, numbers in ((Range(low=0.1, high=0.3), ("1", "3")), ((0.1, 0.3), ("1", "3")), (0.2, ("2",))):
        assert all(one in describe(domain, 10.0) for one in numbers)
        assert all(f"{float(one) / 10:g}" in describe(domain) for one in numbers)
    assert "True" in describe(True, 10.0) and "10" not in describe(True, 10.0)


RATES = Dimension("learning_rate", low=0.1, high=0.4, log=True)


@pytest.mark.parametrize(
    ("value", "nearest"), [(0.2, 0.2), (0.01, 0.1), (1.0, 0.4), (0.1, 0.1), (0.4, 0.4), (None, 0.1), (0.0, 0.1)]
)
def test_the_nearest_of_a_range_is_the_value_itself_or_an_end(value: float | None, nearest: float) -> None:
    assert RATES.nearest(value) == nearest


@pytest.mark.parametrize(
    ("choices", "value", "nearest"),
    [
        ((0.1, 0.2, 0.4), 0.2, 0.2),
        ((1, 10, 100), 40, 100),  # by ratio: 40 is 4 times 10, and 100 is 2.5 times 40
        ((1, 10, 100), 30, 10),
        ((0.5, 10), 4, 10),
        ((0, 10, 100), 40, 10),  # a zero has no ratio: by difference
        ((1, 10, 100), 0, 1),
        ((-5, 1, 8), 5, 8),
        (("sgd", "adamw"), 0.5, "sgd"),
        ((8, "auto"), 9, 8),
        (("auto", 8), 9, "auto"),
        ((8, 16), "auto", 8),
        ((True, False), 0.7, True),
        ((16, 8), None, 16),
    ],
)
def test_the_nearest_choice_is_by_ratio_where_all_are_above_zero(choices: Any, value: Any, nearest: Any) -> None:
    assert Dimension("one", choices=choices).nearest(value) == nearest


def test_a_coordinate_that_is_not_used_has_some_value_of_its_dimension() -> None:
    assert Dimension("one", low=0.25, high=0.5).any_value == 0.25
    assert Dimension("one", choices=("b", "a")).any_value == "b"


@pytest.mark.parametrize(
    ("low", "high", "rungs"), [(8, 8, (8,)), (1, 2, (1, 2)), (9, 16, (16,)), (8, 15, (8,)), (64, 64, (64,))]
)
def test_a_ladder_holds_both_its_ends(low: int, high: int, rungs: tuple[int, ...]) -> None:
    assert BatchLadder(low=low, high=high).rungs == rungs


@pytest.mark.parametrize(("low", "high"), [(16, 8), (9, 15), (0, 8)])
def test_a_ladder_without_a_rung_is_refused(low: int, high: int) -> None:
    with pytest.raises(ValidationError):
        BatchLadder(low=low, high=high)


@pytest.mark.parametrize(
    ("names", "horizon", "is_right"),
    [
        ("constant", None, True),
        ("cosine", 1000, True),
        ("linear", [1000, 2000], True),
        (["constant", "linear"], 1000, True),
        (["constant", "constant"], None, True),
        ("cosine", None, False),
        (["constant", "linear"], None, False),
        ("constant", 1000, False),
        (["constant"], 1000, False),
    ],
)
def test_a_schedule_has_a_horizon_where_one_of_its_kinds_decays(names: Any, horizon: Any, is_right: bool) -> None:
    fields = {"name": names, "horizon_samples": horizon}
    if is_right:
        assert Schedule.model_validate(fields).names == ((names,) if isinstance(names, str) else tuple(names))
    else:
        with pytest.raises(ValidationError):
            Schedule.model_validate(fields)


def test_nesterov_needs_a_momentum_above_zero_in_all_of_its_domain() -> None:
    for momentum in (0.0, (0.0, 0.9), Range(low=0.0, high=0.9)):
        with pytest.raises(ValidationError):
            Sgd(momentum=momentum)
        assert not Sgd(momentum=momentum, nesterov=False).nesterov
    assert Sgd(momentum=0.1).nesterov
