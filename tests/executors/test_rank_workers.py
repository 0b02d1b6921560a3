"""Trials of several ranks in real worker processes: their steps, their ends, and their failures."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from bssearch.executors.base import Executor
from bssearch.records import TrialRequest, TrialState
from tests.executors.line_workload import opened, request_trial, run_to_the_end
from tests.factories import changed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """Yield an executor for the tests that leave its worker alive."""
    with opened(tmp_path_factory.mktemp("shared")) as executor:
        yield executor


def on_ranks(request: TrialRequest, size: int) -> TrialRequest:
    configuration = request.plan.configuration
    micro = configuration.micro_batch_size // size
    return changed(request, configuration=replace(configuration, world_size=size, micro_batch_size=micro))


def curve(executor: Executor, request: TrialRequest) -> tuple[TrialState, list[tuple[int, float, float | None]]]:
    outcome, seen = run_to_the_end(executor, request)
    assert outcome.traceback is None, outcome.traceback
    observations = [event.observation for event in seen]
    return outcome.state, [(one.step, one.metric, one.loss) for one in observations]


def test_ranks_learn_as_one_process_does_and_one_worker_serves_any_number(shared: Executor) -> None:
    alone_state, alone = curve(shared, request_trial(1))
    assert alone_state is TrialState.REACHED
    for number, size in enumerate((2, 4, 2, 1), 2):
        state, seen = curve(shared, on_ranks(request_trial(number), size))
        assert state is alone_state
        assert [step for step, _, _ in seen] == [step for step, _, _ in alone]
        for (_, metric, loss), (_, metric_alone, loss_alone) in zip(seen, alone, strict=True):
            assert metric == pytest.approx(metric_alone, abs=1e-6)
            assert loss == (None if loss_alone is None else pytest.approx(loss_alone, rel=1e-5))
