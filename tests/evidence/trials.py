"""Trials outside a study: steps timed at a ladder of batch sizes, and runs to the target."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from bssearch.commands.probes import run_request
from bssearch.executors.base import Executor
from bssearch.records import Configuration, Goal, ProbeRecord, TrialOutcome, TrialRequest, TrialState
from bssearch.search.calibration import measure_step_time_at
from bssearch.spec import StudySpec
from bssearch.spec.space import UNKNOWN
from tests.evidence.task import Found
from tests.factories import make_request

OUT_OF_REACH = 1e9
"""A metric beyond the reach of every training."""


def step_times_at(
    spec: StudySpec, executor: Executor, sizes: Iterable[int], seconds: float, may_go_on: Callable[[], bool]
) -> Iterable[Found]:
    """Yield the step time of the default at each batch size, while there is time; see `bssearch.records.StepTime`."""
    for size in sizes:
        if not may_go_on():
            return
        measured = measure_step_time_at(spec, executor, size, UNKNOWN, seconds_limit=seconds)
        yield {"batch_size": size, "fits": False} if measured is None else row_of(measured)


def row_of(measured: Any) -> Found:
    """Return a step time as a row, with its host-bound share."""
    return {**asdict(measured), "host_bound_share": getattr(measured, "host_bound_share", None)}


def run_to_target(
    spec: StudySpec, executor: Executor, configuration: Configuration, probe: ProbeRecord, seed: int, cap: float
) -> TrialOutcome:
    """Train a configuration to the spec's target, for ``cap`` train seconds at most.

    Cadence and micro-batches follow from the step time ``probe`` of the batch size, as in a study.
    """
    assert probe.eval_every_steps is not None, "the batch size was timed"
    request = make_request(
        number=1,
        configuration=configuration.in_micro_batches(probe.micro_batch_size),
        seed=seed,
        target=spec.record_target,
        train_seconds_limit=cap,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=probe.eval_every_steps,
        threads=spec.executor.threads,
    )
    outcome, _ = run_request(executor, request)
    return outcome


def for_seconds(
    spec: StudySpec, configuration: Configuration, seconds: float, eval_every_steps: int, number: int = 1
) -> TrialRequest:
    """Return a request to train for ``seconds`` toward a target that is out of reach."""
    target = spec.record_target
    return make_request(
        number=number,
        configuration=configuration,
        seed=number,
        target=replace(target, value=OUT_OF_REACH if target.goal is Goal.MAXIMIZE else -OUT_OF_REACH),
        train_seconds_limit=seconds,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=eval_every_steps,
        stop_at_target=False,
        threads=spec.executor.threads,
    )
