"""Work for a user's thread after the search has killed a piece."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from bssearch.executors.base import Program
from bssearch.executors.loops.called import CalledExecutor
from bssearch.records import TrialEnded, TrialOutcome, TrialState
from tests.executors.line_workload import request_trial
from tests.factories import not_none


@pytest.fixture
def executor() -> Iterator[CalledExecutor]:
    program = Program(default=request_trial(1).plan.configuration, metric="score")
    with closing(CalledExecutor(program, "cpu", 1, "", allow_busy=False)) as made:
        yield made


def test_a_killed_piece_is_not_given_out(executor: CalledExecutor) -> None:
    executor.submit(request_trial(1))
    executor.kill()
    assert [one.outcome.state for one in executor.events(0.0) if isinstance(one, TrialEnded)] == [TrialState.CANCELLED]
    executor.submit(request_trial(2))
    assert getattr(not_none(executor.next_piece()).assign.work, "number", None) == 2


def test_a_late_reply_of_a_killed_piece_does_not_end_the_next_trial(executor: CalledExecutor) -> None:
    executor.submit(request_trial(1))
    killed = not_none(executor.next_piece())
    executor.kill()
    executor.events(0.0)
    executor.submit(request_trial(2))
    killed.send(TrialEnded(1, TrialOutcome(state=TrialState.REACHED, reason="late")))
    assert executor.events(0.0) == []
    executor.kill()
    (ended,) = executor.events(0.0)
    assert isinstance(ended, TrialEnded) and (ended.number, ended.outcome.state) == (2, TrialState.CANCELLED)
