"""Which configurations a spec lets train: those of its space, and its default."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from bssearch.commands.trials import any_configuration_of, configuration_of, with_schedule
from bssearch.errors import UsageError
from bssearch.records import Configuration, Phase
from bssearch.spec import StudySpec
from bssearch.spec.admission import admitted, problem_with
from tests.factories import SPEC, make_plan, make_spec

WIDE = make_spec(
    space={
        **SPEC["space"],
        "optimizer": [{"name": "sgd", "momentum": [0.8, 0.9]}, {"name": "adamw", "learning_rate_scale": 0.01}],
        "schedule": {"name": ["constant", "cosine"], "horizon_samples": {"low": 10000, "high": 90000}},
        "model": {"activation": ["relu", "gelu"], "width": {"low": 8, "high": 64}, "bias": [True, False]},
        "loss": {"gamma": {"low": 0.5, "high": 4.0}},
    },
    default={
        **SPEC["default"],
        "schedule": "constant",
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "model": {"activation": "relu", "width": 16, "bias": True},
        "loss": {"gamma": 1.0},
    },
)
BASE = WIDE.default_configuration


GROWING = {"batch_schedule": "milestones", "batch_stages": "2000:64", "batch_rate_rule": "sqrt"}


def changed(parameters: dict[str, Any] | None = None, **fields: Any) -> Configuration:
    return replace(BASE, **fields, parameters={**BASE.parameters, **(parameters or {})})


@pytest.mark.parametrize(
    ("configuration", "named"),
    [
        (changed({"model.activation": "$(id)relu"}), "model.activation"),
        (changed({"model.activation": 3}), "model.activation"),
        (changed({"model.activation": True}), "model.activation"),
        (changed({"model.activation": None}), "model.activation"),
        (changed({"model.width": "16"}), "model.width"),
        (changed({"model.width": 16.5}), "model.width"),
        (changed({"model.width": 65}), "model.width"),
        (changed({"model.bias": 1}), "model.bias"),
        (changed({"model.bias": "true; id"}), "model.bias"),
        (changed({"loss.gamma": "0.5"}), "loss.gamma"),
        (changed({"loss.gamma": math.nan}), "loss.gamma"),
        (changed({"loss.gamma": 10**400}), "loss.gamma"),
        (changed({"loss.gamma": [1.0]}), "loss.gamma"),
        (changed({"model.other": "relu"}), "model.other"),
        (changed({"schedule": "$(id)"}), "schedule"),
        (changed({"schedule": "linear"}), "schedule"),
        (changed({"momentum": "0.9"}), "momentum"),
        (changed({"momentum": 0.5}), "momentum"),
        (changed({"nesterov": "true"}), "nesterov"),
        (changed({"beta_2": 0.9}), "beta_2"),
        (changed({"horizon_samples": "1e5"}), "horizon_samples"),
        (changed(optimizer="$(id)"), "optimizer"),
        (changed(optimizer="adamw"), "missing"),
        (changed(learning_rate="0.1"), "learning_rate"),
        (changed(learning_rate=1e-9), "learning_rate"),
        (changed(learning_rate=-0.1), "learning_rate"),
        (changed(learning_rate=math.inf), "learning_rate"),
        (changed(weight_decay=0.5), "weight_decay"),
        (changed(dropout=0.7), "dropout"),
        (changed(dropout=True), "dropout"),
        (changed(batch_size=48, micro_batch_size=48), "batch_size"),
        (changed(batch_size=2**20, micro_batch_size=2**20), "batch_size"),
        (changed(batch_size=64, micro_batch_size=16), "batch_size"),
        (changed(batch_size="32"), "batch_size"),
        (changed(batch_size=True, micro_batch_size=True), "batch_size"),
        (changed(micro_batch_size=32.0), "micro_batch_size"),
        (changed(accumulation_steps=0), "accumulation_steps"),
        (changed(batch_size=64, world_size=2.0), "world_size"),
        (changed({**GROWING, "batch_stages": "$(id):64"}), "batch_stages"),
        (changed({**GROWING, "batch_stages": "2000:48"}), "48"),
        (changed({**GROWING, "batch_schedule": "$(id)"}), "batch_schedule"),
    ],
)
def test_a_value_that_the_spec_does_not_have_is_named(configuration: Configuration, named: str) -> None:
    problem = problem_with(WIDE, configuration)
    assert problem is not None and named in problem


def sampled_from(spec: StudySpec, draws: random.Random) -> Configuration:
    """Return a configuration as a sampler gives it, in any of its batch sizes and micro-batches."""
    values = {}
    for dimension in spec.space.dimensions():
        between = draws.uniform(dimension.low, dimension.high) if not dimension.choices else None
        values[dimension.name] = draws.choice(dimension.choices) if between is None else between
        if dimension.integer and between is not None:
            values[dimension.name] = round(between)
    size = draws.choice(spec.batch_sizes)
    return spec.space.decode(size, values).in_micro_batches(draws.choice([1, size]))


def test_what_a_sampler_or_a_person_gives_is_admitted() -> None:
    draws = random.Random(0)
    for _ in range(300):
        assert problem_with(WIDE, sampled_from(WIDE, draws)) is None
    asked: list[dict[str, Any]] = [
        {"batch_size": 64},
        {"optimizer": "adamw", "batch_size": 128},
        {"schedule": "cosine", "horizon_samples": 20000},
        {"model.activation": "gelu", "model.width": 64, "model.bias": False, "loss.gamma": 0.5},
    ]
    for values in asked:
        assert problem_with(WIDE, configuration_of(WIDE, values)) is None
    for stages in ("2000:64", "2000:128/4"):
        assert problem_with(WIDE, with_schedule(WIDE, BASE, {"batch_stages": stages})) is None


def test_the_default_is_admitted_outside_the_space_and_what_differs_from_it_is_not() -> None:
    default = {**SPEC["default"], "batch_size": 100, "learning_rate": 7.0, "dropout": 0.7}
    spec = make_spec(default=default)
    assert problem_with(spec, spec.default_configuration) is None
    assert "dropout" in str(problem_with(spec, replace(spec.default_configuration, dropout=0.71)))


@pytest.mark.parametrize("phase", [Phase.AUDIT, Phase.TO_BUDGET, Phase.SEARCH])
def test_rules_of_thumb_may_leave_the_searched_ranges_but_give_no_text(phase: Phase) -> None:
    beyond = any_configuration_of(WIDE, {"learning_rate": 30.0})
    plan = make_plan(configuration=beyond, phase=phase)
    assert admitted(WIDE, plan, 1, checkpoint=None).plan.configuration == beyond
    forged = replace(beyond, parameters={**beyond.parameters, "model.activation": "$(id)"})
    with pytest.raises(UsageError, match=r"model\.activation"):
        admitted(WIDE, replace(plan, configuration=forged), 1, checkpoint=None)
    with pytest.raises(UsageError, match="dropout"):
        admitted(WIDE, replace(plan, configuration=replace(beyond, dropout=7.0)), 1, checkpoint=None)
    known: list[dict[str, Any]] = [{"retry_of": 3}, {"resumed": 3}, {"queued": 3}]
    for stored in known:
        if phase is Phase.SEARCH:
            with pytest.raises(UsageError, match="learning_rate"):
                admitted(WIDE, replace(plan, **stored), 4, checkpoint=None)


@pytest.mark.parametrize("name", ["seed", "threads", "eval_every_steps"])
@pytest.mark.parametrize("value", ["$(id)", -1, 1.5, True, None])
def test_a_number_of_a_plan_that_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        admitted(WIDE, make_plan(**{"configuration": BASE, name: value}), 1, checkpoint=None)
