"""A board rests between its deliveries, and hurries once the driver has no more to say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from bssearch.boards.delivery import Delivery
from bssearch.boards.events import TrialObserved, encode
from bssearch.boards.serve import CPU_SHARE, LONGEST_REST_SECONDS, LOOK_SECONDS, READ_AHEAD, Pace, Stream, Usage, serve


class Clocks:
    """Seconds of a CPU and of the world, which go on as a test says."""

    def __init__(self) -> None:
        self.cpu = self.now = 0.0

    def pace(self) -> Pace:
        return Pace(lambda: self.cpu, lambda: self.now)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)


def observed(step: int) -> bytes:
    return encode(TrialObserved(number=1, step=step, train_seconds=1.0, value=0.5, figures={}))


def test_work_is_followed_by_a_rest_that_keeps_to_the_share() -> None:
    clocks = Clocks()
    pace = clocks.pace()
    assert pace.seconds_left == 0
    clocks.cpu, clocks.now = 0.01, 0.01
    pace.worked()
    assert 0.01 / (0.01 + pace.seconds_left) == pytest.approx(CPU_SHARE)
    clocks.now += pace.seconds_left
    assert pace.seconds_left == 0


def test_rests_add_up() -> None:
    clocks = Clocks()
    pace = clocks.pace()
    for _ in range(3):
        clocks.cpu += 0.02
        pace.worked()
    assert 0.06 / (0.06 + pace.seconds_left) == pytest.approx(CPU_SHARE)


def test_no_rest_is_longer_than_somebody_waits_for_a_trial_to_appear() -> None:
    clocks = Clocks()
    pace = clocks.pace()
    for _ in range(2):
        clocks.cpu += 5.0
        pace.worked()
    assert pace.seconds_left == LONGEST_REST_SECONDS


def test_what_was_used_by_a_process_that_ended_unseen_gives_no_rest_back() -> None:
    clocks = Clocks()
    pace = clocks.pace()
    clocks.cpu = 0.1
    pace.worked()
    rest = pace.seconds_left
    clocks.cpu = 0.05
    pace.worked()
    assert pace.seconds_left == rest


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who a process has started")
def test_what_a_library_does_in_a_process_of_its_own_is_used_too() -> None:
    clocks = Clocks()
    usage = Usage(lambda: clocks.now)
    before = usage() - time.process_time()
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        assert usage() - time.process_time() - before < 0.1  # not looked at again so soon
        clocks.now = LOOK_SECONDS
        assert usage() - time.process_time() - before >= 0.3
        busy.communicate(b"\n")


def test_what_is_written_is_read_ahead_of_its_delivery_up_to_a_bound(pipe: tuple[int, int]) -> None:
    read, write = pipe
    stream = Stream(read)
    stream.read(0)
    assert not stream.waiting
    for step in range(3):
        os.write(write, observed(step))
    stream.read(0)
    assert [one.step for one in stream.waiting if isinstance(one, TrialObserved)] == [0, 1, 2]
    stream.waiting.extend([stream.waiting[0]] * READ_AHEAD)
    os.write(write, observed(3))
    stream.read(0)
    assert len(stream.waiting) == READ_AHEAD + 3
    os.close(write)
    stream.read(0)
    assert stream.is_closed and not stream.has_ended  # there is one in the pipe


def test_once_the_driver_has_closed_its_end_all_is_delivered_without_a_rest(pipe: tuple[int, int]) -> None:
    read, write = pipe
    clocks = Clocks()
    handled: list[int] = []

    class Slow:
        """A board of which every report takes CPU seconds that ask for a rest of minutes."""

        def observed(self, number: int, points: list[TrialObserved]) -> None:
            clocks.cpu += 10.0
            handled.extend(point.step for point in points)

    for step in range(5):
        os.write(write, observed(step))
    os.close(write)
    delivery = Delivery(Slow(), lambda reply: None)  # type: ignore[arg-type]
    serve(Stream(read), delivery, clocks.pace())
    delivery.flush()
    assert handled == [0, 1, 2, 3, 4]
