"""Time on a GPU: events against the host's clock, and how far the host may run ahead."""

import time

import pytest
import torch

from bssearch.records import TrialState
from bssearch.training.clock import RUN_AHEAD, clock_for
from tests.gpu.conftest import MakeComputation
from tests.gpu.runs import digits_request, run

pytestmark = pytest.mark.gpu


def work(device: torch.device, times: int) -> None:
    square = torch.randn(2048, 2048, device=device)
    for _ in range(times):
        square = square @ square / square.norm()


def test_a_segment_lasts_as_long_by_events_as_by_the_host(device: torch.device) -> None:
    clock = clock_for(device)
    with clock.ledger("warmup"):
        work(device, 10)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    with clock.ledger("train"):
        work(device, 500)
    host_seconds = time.perf_counter() - started
    assert clock.seconds("train") == pytest.approx(host_seconds, rel=0.05)


def test_work_that_was_queued_before_a_segment_is_not_in_it(device: torch.device) -> None:
    clock = clock_for(device)
    with clock.ledger("evaluation"):
        work(device, 500)
    with clock.ledger("train"):
        work(device, 5)
    assert clock.seconds("train") < clock.seconds("evaluation") / 5


def test_the_host_does_not_run_further_ahead_than_stated(device: torch.device) -> None:
    clock = clock_for(device)
    done: list[torch.cuda.Event] = []
    furthest = 0
    with clock.ledger("train"):
        for _ in range(10 * RUN_AHEAD):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            done.append(event)
            clock.pace()
            furthest = max(furthest, sum(not event.query() for event in done))  # type: ignore[no-untyped-call]
    assert 1 < furthest <= RUN_AHEAD


def test_a_stop_takes_effect_at_the_next_step_of_the_host(computation: MakeComputation) -> None:
    steps = 0
    asked_at: list[int] = []

    def on_progress() -> None:
        nonlocal steps
        steps += 1
        if steps == 40:
            asked_at.append(steps)

    def stop() -> tuple[TrialState, str] | None:
        return (TrialState.PRUNED, "enough") if asked_at else None

    endless = digits_request(stop_at_target=False, eval_every_steps=1000)
    outcome, _ = run(computation(), endless, stop=stop, on_progress=on_progress)
    assert outcome.state is TrialState.PRUNED
    assert outcome.steps <= 40


def test_the_ledgers_add_up_to_the_wall_time(computation: MakeComputation) -> None:
    outcome, _ = run(computation())
    ledgers = outcome.train_seconds + outcome.evaluation_seconds + outcome.warmup_seconds + outcome.other_seconds
    assert outcome.state is TrialState.REACHED
    assert ledgers == pytest.approx(outcome.wall_seconds, rel=0.01, abs=0.01)
