"""Records for tests, with defaults for all fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from bssearch.analysis.law.quick import QuickAnswer
from bssearch.records import (
    Configuration,
    Environment,
    NoiseRequest,
    Observation,
    ParameterValue,
    Phase,
    ProbeRecord,
    StudyRecord,
    Target,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialRequest,
    TrialState,
)
from bssearch.spec import StudySpec

if TYPE_CHECKING:
    from bssearch.storage.repository import Store

T = TypeVar("T")
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)

SPEC: dict[str, Any] = {
    "schema_version": 1,
    "name": "toy",
    "workload": "digits",
    "target": {"metric": "accuracy", "value": 0.9, "goal": "maximize"},
    "space": {
        "batch_size": {"low": 8, "high": 128},
        "learning_rate": {"reference_batch": 32, "low": 0.01, "high": 1.0, "rule": "sqrt"},
        "weight_decay": [0.0, 1e-4, 1e-3],
        "dropout": {"low": 0.0, "high": 0.5},
    },
    "default": {"batch_size": 32, "learning_rate": 0.1, "weight_decay": 0.0, "dropout": 0.1},
    "sampler": {"name": "tpe"},
    "pruner": {"name": "race", "slack": 1.3},
    "budget": {"trials": 20, "trial_train_seconds": 10.0},
}


def not_none(value: T | None) -> T:
    """Value that must not be None."""
    assert value is not None
    return value


def make_spec(**changes: Any) -> StudySpec:
    return StudySpec.model_validate({**SPEC, **changes})


def make_study_record() -> StudyRecord:
    spec = make_spec()
    return StudyRecord(
        name=spec.name,
        spec={},
        spec_hash=spec.question_hash,
        objective=spec.objective,
        target=spec.record_target,
        created_by="test",
        created_at=EPOCH,
        environment=None,
    )


def store_study(store: Store, spec: StudySpec, environment: Environment | None = None) -> None:
    """Store a study that is bound to a device."""
    store.studies.create(spec.new_study("test"))
    store.studies.bind(spec.name, environment or make_environment())


def make_environment(**changes: Any) -> Environment:
    values: dict[str, Any] = {
        "device_name": "Test CPU",
        "device_type": "cpu",
        "device_memory_bytes": 8 * 2**30,
        "precision": "fp32",
        "compile_mode": "none",
        "torch_version": "2.13.0",
        "cuda_version": None,
        "driver_version": None,
        "python_version": "3.11.7",
        "host": "test",
        "workload_revision": "abc",
    }
    return Environment(**{**values, **changes})


def make_plan(**changes: Any) -> TrialPlan:
    values: dict[str, Any] = {
        "configuration": Configuration(batch_size=32, micro_batch_size=32, learning_rate=0.1),
        "sampled": None,
        "phase": Phase.SEARCH,
        "seed": 0,
        "train_seconds_limit": 10.0,
        "eval_every_steps": 5,
    }
    return TrialPlan(**{**values, **changes})


def make_request(number: int, *, target: Target, **values: Any) -> TrialRequest:
    """Request for a trial with values of its plan and of the request; see `changed`."""
    given = {name: values.pop(name) for name in ("configuration", "seed", "train_seconds_limit")}
    plan = TrialPlan(sampled=None, phase=Phase.SEARCH, **given)
    return changed(TrialRequest(number=number, plan=plan, target=target), **values)


def make_noise_request(configuration: Configuration, **changes: Any) -> NoiseRequest:
    """Request for a noise measurement, without limits unless given."""
    given: dict[str, Any] = {
        "seed": 3,
        "target": Target(metric="accuracy", value=0.9),
        "train_seconds_limit": 1e9,
        "noise_seconds_limit": 1e9,
        "eval_every_steps": 5,
    }
    return NoiseRequest(configuration=configuration, **{**given, **changes})


def changed(
    request: TrialRequest, *, resumes: bool | None = None, tested: bool | None = None, **changes: Any
) -> TrialRequest:
    """Request with other values of itself or its plan; `tested`: evaluate the test part at the end."""
    if resumes is not None:
        changes["resumed"] = request.number if resumes else None
    if tested is not None:
        changes["phase"] = Phase.CONFIRM if tested else Phase.SEARCH
    own = {name: changes.pop(name) for name in ("number", "target", "checkpoint", "branch") if name in changes}
    return replace(request, plan=replace(request.plan, **changes), **own)


def make_trial(
    number: int,
    *,
    batch_size: int = 32,
    state: TrialState = TrialState.REACHED,
    seconds: float = 1.0,
    steps: int = 100,
    phase: Phase = Phase.SEARCH,
    learning_rate: float = 0.1,
    sampled: Mapping[str, ParameterValue] | None = None,
    best_metric: float | None = 0.9,
    contended: bool = False,
    product: float | None = None,
    uncapped: bool = False,
    retry_of: int | None = None,
    seed: int = 0,
    configuration: Configuration | None = None,
    **outcome: Any,
) -> TrialRecord:
    """Trial; `seconds` is its time to the target if it reached the target, else its training time."""
    reached = state is TrialState.REACHED
    ended = None
    if state.is_finished:
        ended = TrialOutcome(
            state=state,
            reason="as the test has it",
            train_seconds=seconds,
            wall_seconds=seconds,
            time_to_target_s=seconds if reached else None,
            last_miss_seconds=None if reached else seconds,
            steps_to_target=steps if reached else None,
            best_metric=best_metric,
            final_metric=None if best_metric is None else best_metric - 1e-9 * seed,  # runs of two seeds differ
            contended=contended,
            **outcome,
        )
    created = EPOCH + timedelta(seconds=10 * number)
    return TrialRecord(
        number=number,
        state=state,
        phase=phase,
        uncapped=uncapped,
        configuration=configuration
        or Configuration(batch_size=batch_size, micro_batch_size=batch_size, learning_rate=learning_rate),
        sampled=sampled,
        seed=seed,
        train_seconds_limit=10.0,
        eval_every_steps=5,
        threads=1,
        retry_of=retry_of,
        lease_owner=None,
        lease_expires_at=None,
        created_at=created,
        ended_at=created + timedelta(seconds=5) if state.is_finished else None,
        steps_x_step_time_s=product,
        outcome=ended,
    )


def with_outcome(trial: TrialRecord, **changes: Any) -> TrialRecord:
    """Trial that has ended, with other fields of its outcome."""
    return replace(trial, outcome=replace(not_none(trial.outcome), **changes))


def make_probe(batch_size: int, **changes: Any) -> ProbeRecord:
    values: dict[str, Any] = {
        "batch_size": batch_size,
        "micro_batch_size": batch_size,
        "step_seconds": 0.001 * batch_size,
        "evaluation_seconds": 0.01,
        "steps_timed": 10,
        "peak_memory_bytes": None,
        "out_of_memory": False,
        "eval_every_steps": 5,
    }
    return ProbeRecord(**{**values, **changes})


def make_curve(*points: tuple[float, float], batch_size: int = 32) -> list[Observation]:
    """Observations at (train seconds, metric), ten steps apart."""
    return [
        Observation(
            step=10 * index,
            samples=10 * index * batch_size,
            train_seconds=seconds,
            metric=metric,
            loss=None,
            learning_rate=0.1,
        )
        for index, (seconds, metric) in enumerate(points)
    ]


def make_quick(**changes: Any) -> QuickAnswer:
    """Quick answer that recommends batch 128 for a default of 256."""
    fields: dict[str, Any] = {
        "study": "study",
        "metric": "accuracy",
        "target": 0.97,
        "default_batch_size": 256,
        "optimal": {"batch_size": 128, "micro_batch_size": 64, "accumulation_steps": 2, "learning_rate": 0.05},
        "interval": [64, 200],
        "flat_range": [90, 180],
        "gain": 1.6,
        "learning_rate_gain": 1.0,
        "learning_rate_range": [0.01, 0.2],
        "largest_micro_batch_size": 64,
        "b_crit": {"estimate": 120.0, "low": 60.0, "high": 240.0},
        "noise_scale": None,
        "alpha_s": None,
        "beta_s": None,
        "runs": [{"trial": 1, "batch_size": 256, "learning_rate": 0.1, "steps": None, "train_seconds": 3.0}],
        "seconds": 42.0,
        "warnings": [{"code": "one_batch_size", "message": "only one batch size came there"}],
    }
    return QuickAnswer.model_validate({**fields, **changes})


def quick_at(size: int, low: int, high: int, noise_scale: float | None = None) -> QuickAnswer:
    """Quick answer that recommends a batch size within an interval."""
    optimal = {"batch_size": size, "micro_batch_size": size, "accumulation_steps": 1, "learning_rate": 0.05}
    return make_quick(optimal=optimal, interval=[low, high], noise_scale=noise_scale)
