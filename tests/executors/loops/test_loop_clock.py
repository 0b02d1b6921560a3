import pytest

from bssearch.executors.loops.trial_run import WARM_UP_STEPS, LoopClock
from tests.executors.loops.loops import clock_of
from tests.training.toys import FakeTime


@pytest.fixture
def fake() -> FakeTime:
    return FakeTime()


@pytest.fixture
def clock(fake: FakeTime) -> LoopClock:
    """Return a clock that trains."""
    found = LoopClock(clock_of(fake), threads=1)
    found.train()
    return found


def stepped(clock: LoopClock, fake: FakeTime, *seconds: float) -> None:
    for one in seconds:
        fake.pass_by(one)
        clock.stepped()


def test_seconds_stand_still_until_the_excess_of_the_first_steps_is_known_and_never_run_backwards(
    fake: FakeTime, clock: LoopClock
) -> None:
    told = []
    for seconds in (50.0, 9.0, 2.0, 2.0, 2.0, 6.0, 1.0):
        stepped(clock, fake, seconds)
        told.append(clock.train_seconds())
    assert told[:WARM_UP_STEPS] == [0, 0, 0]
    assert told[3] == 8 and told == sorted(told)
    assert clock.excess == pytest.approx(48 + 7)
    assert clock.train_seconds() == pytest.approx(72 - 55)


def test_a_hit_in_the_first_steps_has_its_seconds(fake: FakeTime, clock: LoopClock) -> None:
    stepped(clock, fake, 5.0, 2.0)
    assert clock.train_seconds(is_hit=True) == 4


def test_the_first_steps_of_each_process_are_warm_up(fake: FakeTime, clock: LoopClock) -> None:
    stepped(clock, fake, 11.0, *[1.0] * 5)
    second = LoopClock(clock_of(fake), threads=1)
    second.restore(clock.state())
    second.train()
    assert second.train_seconds() == 0
    stepped(second, fake, 21.0, *[1.0] * 5)
    assert second.excess == 30
    assert second.state() == {"excess": 30.0, "told": 0.0}


def test_waits_for_a_cpu_in_the_first_steps_are_no_excess(fake: FakeTime, clock: LoopClock) -> None:
    for waited in (0.0, 30.0, 50.0):
        fake.waited_seconds += waited
        stepped(clock, fake, 2.0 + waited)
    assert clock.excess == 0
    assert clock.train_seconds(is_hit=True) == 6
