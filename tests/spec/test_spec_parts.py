"""The bounds of each field of a spec: the least and the greatest that it takes, and nothing beyond."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from bssearch.spec.parts import BudgetSpec, ConfirmSpec, ExecutorSpec, PrunerSpec, SamplerSpec, TrainingSpec
from bssearch.spec.space.domains import StrictModel

BUDGET = {"trials": 10, "trial_train_seconds": 5.0}
ABOVE_ZERO = math.ulp(0.0)


@pytest.mark.parametrize(
    ("part", "field", "least", "below"),
    [
        (BudgetSpec, "trials", 1, 0),
        (BudgetSpec, "trial_train_seconds", ABOVE_ZERO, 0.0),
        (BudgetSpec, "wall_seconds", ABOVE_ZERO, 0.0),
        (BudgetSpec, "least_improvement", 0.0, -1e-9),
        (BudgetSpec, "least_trials", 0, -1),
        (ConfirmSpec, "top", 1, 0),
        (ConfirmSpec, "runs", 0, -1),
        (PrunerSpec, "slack", 1.0, 1 - 1e-9),
        (PrunerSpec, "checkpoint_gib", 0.0, -1e-9),
        (TrainingSpec, "ghost_batch_size", 2, 1),
        (TrainingSpec, "loader_workers", 0, -1),
        (ExecutorSpec, "slots", 1, 0),
        (ExecutorSpec, "threads", 1, 0),
        (ExecutorSpec, "hang_seconds", ABOVE_ZERO, 0.0),
        (ExecutorSpec, "memory_limit_gib", ABOVE_ZERO, 0.0),
    ],
)
def test_a_field_takes_its_least_value_and_none_below(
    part: type[StrictModel], field: str, least: float, below: float
) -> None:
    others: dict[str, Any] = BUDGET if part is BudgetSpec else {}
    assert getattr(part.model_validate({**others, field: least}), field) == least
    with pytest.raises(ValidationError) as caught:
        part.model_validate({**others, field: below})
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


@pytest.mark.parametrize(
    ("part", "field", "most", "above"),
    [
        (BudgetSpec, "trials", 1_000_000, 1_000_001),
        (BudgetSpec, "trial_train_seconds", 1e9, 1.1e9),
        (BudgetSpec, "wall_seconds", 1e9, 1.1e9),
        (BudgetSpec, "least_improvement", 1 - 1e-9, 1.0),
        (BudgetSpec, "least_trials", 1_000_000, 1_000_001),
        (PrunerSpec, "checkpoint_gib", 1e6, 1.1e6),
        (TrainingSpec, "loader_workers", 256, 257),
        (ExecutorSpec, "memory_limit_gib", 1e6, 1.1e6),
    ],
)
def test_a_field_takes_its_greatest_value_and_none_above(
    part: type[StrictModel], field: str, most: float, above: float
) -> None:
    others: dict[str, Any] = BUDGET if part is BudgetSpec else {}
    assert getattr(part.model_validate({**others, field: most}), field) == most
    with pytest.raises(ValidationError) as caught:
        part.model_validate({**others, field: above})
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


@pytest.mark.parametrize(
    ("fields", "is_right"),
    [
        ({"runs": 3, "max_runs": 3}, True),
        ({"runs": 3, "max_runs": 2}, False),
        ({"runs": 0}, True),
        ({"runs": 0, "max_runs": 5}, False),
        ({"runs": 1, "max_runs": 10_000, "train_seconds": 1e9}, True),
        ({"runs": 1, "max_runs": 10_001}, False),
        ({"runs": 1, "max_runs": 5, "train_seconds": 0.0}, False),
        ({"train_seconds": 9.0}, False),
    ],
)
def test_further_runs_come_after_the_first_and_their_seconds_after_them(fields: dict[str, Any], is_right: bool) -> None:
    if is_right:
        assert ConfirmSpec.model_validate(fields).model_dump(include=set(fields)) == fields
    else:
        with pytest.raises(ValidationError):
            ConfirmSpec.model_validate(fields)


@pytest.mark.parametrize(
    ("device", "is_known"),
    [
        ("auto", True),
        ("cpu", True),
        ("cuda", True),
        ("cuda:0", True),
        ("cuda:12", True),
        ("cuda:", False),
        ("gpu", False),
    ],
)
def test_a_device_is_a_name_that_torch_has(device: str, is_known: bool) -> None:
    if is_known:
        assert ExecutorSpec(device=device).device == device
    else:
        with pytest.raises(ValidationError):
            ExecutorSpec(device=device)


@pytest.mark.parametrize("part", [SamplerSpec, PrunerSpec, ExecutorSpec])
def test_a_kind_that_nobody_registered_is_refused(part: type[StrictModel]) -> None:
    with pytest.raises(ValidationError):
        part.model_validate({"name": "nobody's"})


@pytest.mark.parametrize("settings", [{"compile": "auto"}, {"compile": "capture"}, {"channels_last": "auto"}])
def test_a_mode_of_compiling_or_a_layout_that_is_not_known_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainingSpec.model_validate(settings)


@pytest.mark.parametrize("slots", [1.5, True, "2", "all", None])
def test_slots_are_a_whole_number_or_auto(slots: Any) -> None:
    assert ExecutorSpec.model_validate({"slots": "auto"}).slots == "auto"
    with pytest.raises(ValidationError, match="a whole number from 1 to 65536, or auto"):
        ExecutorSpec.model_validate({"slots": slots})
