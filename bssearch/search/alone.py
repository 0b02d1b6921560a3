"""Trials outside a study: one at a time on an executor, their curves returned and nothing stored."""

from __future__ import annotations

from bssearch.errors import InterruptedRunError, LaunchError
from bssearch.executors.base import Ended, Executor, Observed
from bssearch.records import Configuration, Observation, Phase, ProbeRecord, TrialOutcome, TrialRequest, TrialState
from bssearch.search.cadence import probe_record
from bssearch.search.calibration import default_at
from bssearch.search.interrupts import Interrupts
from bssearch.search.seeds import trial_seed
from bssearch.spec import StudySpec

POLL_SECONDS = 0.2


def step_time_of_default(spec: StudySpec, executor: Executor, batch_size: int) -> ProbeRecord:
    """Time the default configuration at a batch size; the cadence is that of the study's own trials."""
    measured = executor.measure_step_time(default_at(spec, batch_size))
    return probe_record(measured, spec.budget.trial_train_seconds)


def run_default(
    spec: StudySpec, executor: Executor, index: int, *, eval_every_steps: int, limit: float, stop_at_target: bool
) -> tuple[TrialOutcome, list[Observation]]:
    """Run the default configuration with the seed of this index; return its outcome and curve.

    One that goes on past the target may have a target that means nothing, so it is never judged by its way from chance.
    Raises `LaunchError` where the trial fails or runs out of memory, `InterruptedRunError` on Ctrl-C.
    """
    full = stop_at_target and limit >= spec.budget.trial_train_seconds
    request = TrialRequest(
        number=index + 1,
        configuration=spec.default_configuration,
        seed=trial_seed(spec.seed, Phase.PROBE, index),
        target=spec.record_target,
        train_seconds_limit=limit,
        limit_state=TrialState.EXHAUSTED if full else TrialState.CAPPED,
        eval_every_steps=eval_every_steps,
        stop_at_target=stop_at_target,
        threads=spec.executor.threads,
    )
    outcome, curve = _run(executor, request)
    if outcome.state in {TrialState.FAILED, TrialState.OOM}:
        configuration: Configuration = request.configuration
        raise LaunchError(f"the default configuration (batch {configuration.batch_size}) fails: {outcome.reason}")
    return outcome, curve


def _run(executor: Executor, request: TrialRequest) -> tuple[TrialOutcome, list[Observation]]:
    curve: list[Observation] = []
    try:
        with Interrupts(on_second=executor.kill) as interrupts:
            executor.submit(request)
            while True:
                if interrupts.count:
                    executor.stop(request.number, TrialState.CANCELLED, "stopped by the user")
                for event in executor.events(timeout=POLL_SECONDS):
                    match event:
                        case Observed(_, observation):
                            curve.append(observation)
                        case Ended(_, outcome):
                            if interrupts.count:
                                raise InterruptedRunError("stopped; nothing is stored of it")
                            return outcome, curve
    except KeyboardInterrupt:
        raise InterruptedRunError("killed; nothing is stored of it") from None
