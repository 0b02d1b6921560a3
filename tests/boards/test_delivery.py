"""How reports are handed to a board: in their order, evaluations together, again where that fails."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from bssearch.boards.delivery import BATCH_SECONDS, BATCH_SIZE, WAITS, Delivery
from bssearch.boards.events import Answered, Reply, StudyOpened, TrialEnded, TrialObserved, TrialStarted, decode, encode
from tests.boards.test_process import ended, observed, started


class Noting:
    """Notes its calls; the first so many fail."""

    def __init__(self, failures: int = 0) -> None:
        self.calls: list[object] = []
        self.failures = failures

    def _note(self, what: object) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("away")
        self.calls.append(what)

    def opened(self, study: StudyOpened) -> None:
        self._note(study)

    def started(self, trial: TrialStarted) -> None:
        self._note(("started", trial.number))

    def observed(self, number: int, points: Sequence[TrialObserved]) -> None:
        self._note((number, [point.step for point in points]))

    def ended(self, trial: TrialEnded) -> None:
        self._note(("ended", trial.number))

    def answered(self, answer: Answered) -> None:
        self._note(answer)

    def close(self) -> None:
        self._note("close")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.waited: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)


def delivery(board: Noting, clock: Clock) -> tuple[Delivery, list[Reply]]:
    replies: list[Reply] = []
    return Delivery(board, replies.append, lambda: clock.now, clock.sleep), replies


def test_evaluations_wait_for_more_until_a_second_is_over_or_something_else_happens() -> None:
    board, clock = Noting(), Clock()
    one, _ = delivery(board, clock)
    for event in (observed(1, 1), observed(2, 1), observed(1, 2)):
        one.take(event)
    assert (board.calls, one.seconds_left) == ([], BATCH_SECONDS)
    clock.now = BATCH_SECONDS
    one.flush_if_due()
    assert board.calls == [(1, [1, 2]), (2, [1])]
    assert one.seconds_left is None
    one.take(observed(1, 3))
    one.take(ended(1))
    assert board.calls[2:] == [(1, [3]), ("ended", 1)]
    for step in range(BATCH_SIZE):
        one.take(observed(3, step))
    assert board.calls[4] == (3, list(range(BATCH_SIZE)))


def test_a_report_that_fails_is_tried_again_and_given_up_after_the_last_wait() -> None:
    board, clock = Noting(failures=1), Clock()
    one, replies = delivery(board, clock)
    one.take(started(1))
    assert (board.calls, clock.waited) == ([("started", 1)], [WAITS[0]])
    assert replies == [Reply(why="ConnectionError: away"), Reply(handled=1)]
    board.failures = 3
    one.take(started(2))
    one.take(started(3))
    assert board.calls == [("started", 1), ("started", 3)]
    assert replies[-2:] == [Reply(failed=1, why="ConnectionError: away"), Reply(handled=1)]


@given(
    st.builds(
        TrialObserved,
        number=st.integers(0),
        step=st.integers(0),
        train_seconds=st.floats(0, 1e9),
        value=st.floats(allow_nan=False),
        figures=st.dictionaries(st.text(), st.floats(allow_nan=False)),
    )
)
def test_an_event_is_the_same_on_the_other_side(event: TrialObserved) -> None:
    line = encode(event)
    assert line.count(b"\n") == 1
    assert decode(line) == event
