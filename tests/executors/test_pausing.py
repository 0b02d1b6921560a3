"""Trials that are paused in one worker process and go on in another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bssearch.executors.base import Ended, Event, Observed
from bssearch.executors.slots import LocalExecutor
from bssearch.records import Observation, TrialOutcome, TrialRequest, TrialState
from tests.executors.line_workload import opened, outcomes, request_endless_trial, wait_for, worker_pids

STEPS = 2500


def request_long_trial(number: int, checkpoint: Path, behaviour: str = "learn") -> TrialRequest:
    """Return a request that ends after so many steps, out of reach of its target."""
    endless = request_endless_trial(number, behaviour)
    configuration = replace(
        endless.configuration, parameters={"horizon_samples": 8 * STEPS, "ema_decay": 0.99, "momentum": 0.95}
    )
    return replace(endless, configuration=configuration, eval_every_steps=100, checkpoint=str(checkpoint))


def steps_of(events: list[Event]) -> list[int]:
    return [event.observation.step for event in events if isinstance(event, Observed)]


def run(
    executor: LocalExecutor, request: TrialRequest, pause_after: int | None = None
) -> tuple[TrialOutcome, list[Observation]]:
    """Run a trial to its end, or pause it once it has been evaluated after so many steps."""
    executor.submit(request)
    events: list[Event] = []
    if pause_after is not None:
        events += wait_for(executor, lambda seen: any(step >= pause_after for step in steps_of(seen)))
        executor.stop(request.number, TrialState.PAUSED, "later")
    if not any(isinstance(one, Ended) for one in events):
        events += wait_for(executor, lambda seen: request.number in outcomes(seen))
    return outcomes(events)[request.number], [one.observation for one in events if isinstance(one, Observed)]


def timeless(observations: list[Observation]) -> list[Observation]:
    return [replace(one, train_seconds=0.0) for one in observations]


@pytest.mark.slow
def test_a_trial_goes_on_in_another_worker_process_bit_for_bit_or_ends_as_ever_where_that_dies(tmp_path: Path) -> None:
    request = request_long_trial(1, tmp_path / "trial-1")
    with opened(tmp_path) as executor:
        whole, curve = run(executor, replace(request, checkpoint=None))
        paused, first = run(executor, request, pause_after=500)
        (pid,) = worker_pids(executor)
    with opened(tmp_path, at=1500) as executor:
        executor.describe()
        assert worker_pids(executor) != [pid]
        again, second = run(executor, replace(request, resumes=True), pause_after=1200)
        outcome, third = run(executor, replace(request, resumes=True))
        deadly = request_long_trial(2, tmp_path / "trial-2", "exit")
        assert run(executor, deadly, pause_after=500)[0].state is TrialState.PAUSED
        died, seen = run(executor, replace(deadly, resumes=True))
    assert (died.state, died.reason, seen != []) == (TrialState.FAILED, "worker exited with code 3", True)
    assert (paused.state, paused.reason, again.state) == (TrialState.PAUSED, "later", TrialState.PAUSED)
    assert 500 <= paused.steps < again.steps < STEPS == outcome.steps == whole.steps
    assert (outcome.state, outcome.reason) == (whole.state, whole.reason)
    assert timeless([*first, *second, *third]) == timeless(curve)
    seconds = [one.train_seconds for one in (*first, *second, *third)]
    assert seconds == sorted(seconds)
    assert paused.train_seconds < again.train_seconds < outcome.train_seconds
    assert outcome.warmup_seconds > again.warmup_seconds > paused.warmup_seconds
    ledgers = outcome.train_seconds + outcome.evaluation_seconds + outcome.warmup_seconds + outcome.other_seconds
    assert 0 <= outcome.wall_seconds - ledgers < 0.05 * outcome.wall_seconds
