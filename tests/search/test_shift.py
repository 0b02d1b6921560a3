"""A driver's shift ends, or is interrupted, from another thread."""

import threading

import pytest

from bssearch.errors import InterruptedRunError, LaunchError
from bssearch.search.driver import Interrupts, Shift


def interrupts() -> Interrupts:
    return Interrupts(on_second=lambda: None)


def test_at_its_end_what_runs_goes_on_and_then_it_is_over() -> None:
    shift, asked = Shift(), interrupts()
    shift.join(asked, lambda: None)
    shift.raise_if_over()
    shift.end()
    shift.raise_if_over(running=[3])
    with pytest.raises(InterruptedRunError, match="made room for other studies"):
        shift.raise_if_over()
    assert asked.count == 0


def test_an_interrupt_reaches_each_driver_once_also_one_that_comes_later() -> None:
    shift, early, late = Shift(), interrupts(), interrupts()
    shift.join(early, lambda: None)
    shift.interrupt()
    shift.interrupt()
    shift.join(late, lambda: None)
    assert (early.count, late.count, shift.is_ending) == (1, 1, True)


def test_a_workload_is_loaded_no_further_once_it_is_interrupted() -> None:
    shift, ended = Shift(), []
    with pytest.raises(LaunchError, match="no GPU"), shift.loading(lambda: ended.append("early")):
        raise LaunchError("no GPU")
    with pytest.raises(InterruptedRunError), shift.loading(lambda: ended.append("now")):
        shift.interrupt()
        shift.interrupt()
        raise LaunchError("its process was killed")
    with pytest.raises(InterruptedRunError), shift.loading(lambda: ended.append("late")):
        pytest.fail("nothing is loaded any more")
    assert ended == ["now", "now"], "there was perhaps no process yet to be ended"


def test_what_comes_after_loading_waits_until_the_other_thread_has_ended_it() -> None:
    shift, begun, left, order = Shift(), threading.Event(), threading.Event(), list[str]()

    def end() -> None:
        begun.set()
        left.wait(0.3)  # which it is not: else what comes next is told first
        order.append("ended")

    other = threading.Thread(target=shift.interrupt)
    with shift.loading(end):
        other.start()
        assert begun.wait(60)
    order.append("left")
    left.set()
    other.join()
    assert order == ["ended", "left"]


def test_what_runs_is_killed_by_the_drivers_own_means() -> None:
    shift, killed = Shift(), []
    for name in ("one", "two"):
        shift.join(interrupts(), lambda name=name: killed.append(name))  # type: ignore[misc]
    shift.kill()
    assert killed == ["one", "two"]


def test_waiting_for_others_counts_from_its_beginning_until_there_is_work() -> None:
    now = 0.0
    shift = Shift(clock=lambda: now)
    assert shift.seconds_waited == 0
    shift.wait()
    now = 4.0
    shift.wait()
    now = 5.0
    assert shift.seconds_waited == 5
    shift.work()
    assert shift.seconds_waited == 0
