import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch

from bssearch.training.clock import LEDGERS, Clock, RunDelay, clock_for
from bssearch.training.nvml import DeviceMeter
from tests.training.toys import FakeTime


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def clock(time: FakeTime) -> Clock:
    return time.clock()


def test_each_ledger_books_only_its_own_blocks(time: FakeTime, clock: Clock) -> None:
    for seconds, name in enumerate(LEDGERS, start=1):
        for _ in range(2):
            with clock.ledger(name):
                time.pass_by(seconds)
    time.pass_by(5)
    assert [clock.seconds(name) for name in LEDGERS] == [2, 4, 6, 8]
    assert clock.wall_seconds == 25


def test_start_sets_everything_to_zero(time: FakeTime, clock: Clock) -> None:
    with clock.ledger("train"):
        time.pass_by(2, cpu_share=0.1)
    clock.start()
    assert (clock.seconds("train"), clock.wall_seconds, clock.cpu_share) == (0, 0, None)


@pytest.mark.parametrize(
    ("owned", "lost", "warns"),
    [(10, 0.11, True), (10, 0.09, False), (0.1, 0.0055, True), (0.1, 0.004, False)],
)
def test_more_than_a_hundredth_of_the_wall_time_outside_all_ledgers_is_a_warning(
    time: FakeTime, clock: Clock, owned: float, lost: float, warns: bool
) -> None:
    with clock.ledger("evaluation"):
        time.pass_by(owned)
    time.pass_by(lost)
    assert bool(clock.warnings(clock.wall_seconds)) is warns


@pytest.mark.parametrize(("cpu_share", "contended"), [(1.0, False), (0.92, False), (0.88, True), (0.5, True)])
def test_one_thread_that_lost_the_processor_while_training_was_contended(cpu_share: float, contended: bool) -> None:
    time = FakeTime()
    full = time.clock()
    without = Clock(now=lambda: time.seconds, cpu_now=lambda: time.cpu_seconds, delay_now=lambda: None)
    with full.ledger("train"), without.ledger("train"):
        time.pass_by(2 * cpu_share)
        time.wait_for_a_cpu(2 * (1 - cpu_share))
    with full.ledger("evaluation"), without.ledger("evaluation"):
        time.pass_by(100, cpu_share=0)
    for clock in (full, without):
        assert clock.cpu_share == pytest.approx(cpu_share)
        assert clock.is_contended(threads=1) is contended
        assert clock.is_contended(threads=2) is False


def test_waits_for_data_are_no_contention_if_the_kernel_reports_waits_for_a_cpu(time: FakeTime, clock: Clock) -> None:
    with clock.ledger("train"):
        time.pass_by(2)
        time.pass_by(8, cpu_share=0)
    assert clock.cpu_share == pytest.approx(0.2) and not clock.is_contended(threads=1)


@pytest.mark.gpu
def test_cuda_train_seconds_are_of_the_device_and_not_of_the_launches() -> None:
    device = torch.device("cuda")
    clock = clock_for(device)
    matrix = torch.randn(4096, 4096, device=device)
    with clock.ledger("warmup"):
        matrix @ matrix
    with clock.ledger("train"):
        for _ in range(50):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        launched = clock.train_seconds_so_far
    assert clock.seconds("train") > 2 * launched
    assert sum(clock.seconds(name) for name in LEDGERS) == pytest.approx(clock.wall_seconds, rel=0.02)


def test_a_restored_clock_continues_every_account_without_the_pause() -> None:
    time = FakeTime()
    first = time.clock()
    for seconds, name in enumerate(LEDGERS, start=1):
        with first.ledger(name):
            time.pass_by(seconds, cpu_share=0.5)
    state = json.loads(json.dumps(first.state()))
    time.pass_by(1000)
    second = time.clock()
    with second.ledger("warmup"):
        time.pass_by(7)
    second.restore(state)
    assert second.train_seconds_so_far == 1
    with second.ledger("train"):
        time.pass_by(3)
    assert [second.seconds(name) for name in LEDGERS] == [4, 2, 10, 4]
    assert second.wall_seconds == 20 and second.warnings(20) == []
    assert second.cpu_share == 3.5 / 4


def test_trials_race_by_seconds_without_waits_for_a_processor(time: FakeTime, clock: Clock) -> None:
    with clock.ledger("train"):
        time.pass_by(2)
        time.wait_for_a_cpu(3)
    with clock.ledger("train"):
        time.pass_by(1)
        time.wait_for_a_cpu(4)
        assert clock.counted_train_seconds(threads=1) == pytest.approx(3)
        assert clock.counted_train_seconds(threads=2) == clock.train_seconds_so_far == 10
    time.wait_for_a_cpu(50)
    assert clock.counted_train_seconds(threads=1) == pytest.approx(3)
    later = time.clock()
    later.restore(clock.state())
    with later.ledger("train"):
        time.pass_by(1)
    assert later.counted_train_seconds(threads=1) == pytest.approx(4)


def test_without_the_kernels_account_of_waits_trials_race_by_all_train_seconds() -> None:
    assert trained([None, None], cpu=4.0).counted_train_seconds(threads=1) == 10.0


def trained(delays: list[float | None], *, cpu: float) -> Clock:
    """Return a clock that has trained for ten seconds of the wall, ``cpu`` of the CPU, between two looks at delays."""
    at = 0
    clock = Clock(lambda: (1.0, 11.0)[at], lambda: (0.0, cpu)[at], lambda: delays[at])
    with clock.ledger("train"):
        at = 1
    return clock


@pytest.mark.parametrize(
    ("delays", "threads", "undelayed"),
    [([2.0, 5.0], 1, 7.0), ([2.0, 5.0], 2, None), ([None, None], 1, 4.0)],
    ids=["waits for data count", "several threads", "a kernel without an account of waits"],
)
def test_waiting_for_data_counts_and_waiting_for_a_processor_does_not(
    delays: list[float | None], threads: int, undelayed: float | None
) -> None:
    assert trained(delays, cpu=4.0).undelayed_train_seconds(threads) == pytest.approx(undelayed)
    assert Clock().undelayed_train_seconds(threads) is None, "nothing has been trained"


def test_a_wait_while_the_account_of_waits_is_read_does_not_change_the_train_seconds() -> None:
    for place in range(10):
        time, waits = FakeTime(), itertools.chain([0.0] * place, [3.0], itertools.repeat(0.0))
        assert_two_seconds_count(time, reading_clock(time, waits))
    time = FakeTime()
    assert_two_seconds_count(time, reading_clock(time, itertools.repeat(3.0)))


def reading_clock(time: FakeTime, waits: Iterator[float]) -> Clock:
    """Return a clock that has to wait for a CPU after each reading of its waits."""

    def delay_now() -> float:
        known = time.waited_seconds
        time.wait_for_a_cpu(next(waits))
        return known

    return Clock(lambda: time.seconds, lambda: time.cpu_seconds, delay_now)


def assert_two_seconds_count(time: FakeTime, clock: Clock) -> None:
    with clock.ledger("train"):
        time.pass_by(2)
        assert clock.counted_train_seconds(threads=1) == pytest.approx(2)
    assert clock.undelayed_train_seconds(threads=1) == pytest.approx(2)
    assert clock.counted_train_seconds(threads=1) == pytest.approx(2)


def test_waits_before_a_pause_do_not_count() -> None:
    before, after = trained([0.0, 4.0], cpu=6.0), trained([0.0, 1.0], cpu=9.0)
    after.restore(before.state())
    assert after.undelayed_train_seconds(threads=1) == pytest.approx(6.0 + 9.0)


@pytest.mark.parametrize(
    ("content", "seconds"),
    [("100 2500000000 7\n", 2.5), (None, None), ("0 0 0\n", None)],
    ids=["seconds", "no file", "a kernel that keeps no account"],
)
def test_the_kernel_s_account_of_waits_is_read_if_it_exists(
    content: str | None, seconds: float | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "schedstat").write_text(content)
    assert RunDelay().seconds(tmp_path / "schedstat") == seconds


def test_the_seconds_of_a_meter_at_the_ends_of_a_train_segment_are_not_training(time: FakeTime, clock: Clock) -> None:
    meter = Mock(spec=DeviceMeter)
    meter.begin.side_effect, meter.end.side_effect = lambda: time.pass_by(3.0), lambda: time.pass_by(5.0)
    clock.meter = meter
    with pytest.raises(KeyError), clock.ledger("train"):
        time.pass_by(1.0)
        raise KeyError
    with clock.ledger("evaluation"):
        time.pass_by(1.0)
    assert meter.mock_calls == [call.begin(), call.end()] and clock.seconds("train") == 1.0
