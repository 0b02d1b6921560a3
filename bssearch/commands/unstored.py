"""Trials outside a study: nothing is stored."""

from __future__ import annotations

from bssearch.errors import InterruptedRunError, LaunchError
from bssearch.executors.base import Executor
from bssearch.records import (
    Configuration,
    MemoryUse,
    Observation,
    Phase,
    ProbeRecord,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialPlan,
    TrialRequest,
    TrialState,
    TrialStop,
)
from bssearch.search.calibration import measure_step_time_at
from bssearch.search.driver import Interrupts
from bssearch.search.history import trial_seed
from bssearch.spec import StudySpec
from bssearch.spec.space import UNKNOWN, MemoryBoundary

POLL_SECONDS = 0.2  # poll interval for Ctrl-C


def step_time_of_default(
    spec: StudySpec, executor: Executor, batch_size: int, memory: MemoryBoundary = UNKNOWN
) -> ProbeRecord:
    """Time the default at a batch size, as real trials are timed; raise `LaunchError` if nothing fits."""
    too_large: list[MemoryUse] = []
    probe = measure_step_time_at(spec, executor, batch_size, memory, too_large.append)
    if probe is None:
        tried = ", ".join(str(use.micro_batch_size) for use in reversed(too_large))
        raise LaunchError(
            f"batch size {batch_size} does not fit into memory, in whatever micro-batches: {tried} ran out of it",
            hint="a smaller model or evaluation, or a device with more memory (see executor.memory_limit_gib)",
        )
    return probe


def run_default(
    spec: StudySpec, executor: Executor, index: int, *, probe: ProbeRecord, limit: float, stop_at_target: bool
) -> tuple[TrialOutcome, list[Observation]]:
    """Run the default with the seed of ``index``; return its outcome and curve.

    Without ``stop_at_target`` the target is not used. Raises `LaunchError` if the trial fails, `InterruptedRunError` on
    Ctrl-C.
    """
    assert probe.eval_every_steps is not None, "the default was timed"
    full = stop_at_target and limit >= spec.budget.trial_train_seconds
    request = TrialRequest(
        number=index + 1,
        plan=TrialPlan(
            configuration=spec.default_configuration.in_micro_batches(probe.micro_batch_size),
            sampled=None,
            phase=Phase.PROBE,
            seed=trial_seed(spec.seed, Phase.PROBE, index),
            train_seconds_limit=limit,
            limit_state=TrialState.EXHAUSTED if full else TrialState.CAPPED,
            eval_every_steps=probe.eval_every_steps,
            stop_at_target=stop_at_target,
            threads=spec.executor.threads,
        ),
        target=spec.record_target,
    )
    outcome, curve = run_request(executor, request)
    if outcome.state in {TrialState.FAILED, TrialState.OOM}:
        configuration: Configuration = request.plan.configuration
        raise LaunchError(f"the default configuration (batch {configuration.batch_size}) fails: {outcome.reason}")
    return outcome, curve


def run_request(
    executor: Executor, request: TrialRequest, *, until_step: int | None = None
) -> tuple[TrialOutcome, list[Observation]]:
    """Run one trial, stopping at ``until_step``; return its outcome and curve.

    Raises `LaunchError` if no worker starts, `InterruptedRunError` on Ctrl-C.
    """
    curve: list[Observation] = []
    try:
        with Interrupts(on_second=executor.kill) as interrupts:
            executor.submit(request)
            while True:
                if interrupts.count:
                    executor.stop(TrialStop(request.number, TrialState.CANCELLED, "stopped by the user"))
                for event in executor.events(timeout=POLL_SECONDS):
                    match event:
                        case TrialObserved(_, observation):
                            curve.append(observation)
                            if until_step is not None and observation.step >= until_step:
                                executor.stop(TrialStop(request.number, TrialState.CANCELLED, "it has been looked at"))
                        case TrialEnded(_, outcome):
                            if interrupts.count:
                                raise InterruptedRunError("stopped; its results are not stored")
                            return outcome, curve
    except KeyboardInterrupt:
        raise InterruptedRunError("killed; its results are not stored") from None
