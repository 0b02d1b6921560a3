"""The host-bound share, on a CUDA device that is none."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from bssearch.executors.base import decode_reply, encode
from bssearch.records import StepTime, StepTimeRequest, TrialEnded
from bssearch.training import probes
from bssearch.training.clock import RUN_AHEAD, CudaClock
from bssearch.training.probes import measure_step_time
from bssearch.training.trainer import Trainer
from tests.training.fake_cuda import FakeCuda
from tests.training.toys import Run, Toy, configuration, on_cpu, request, toy_data


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Return a device with a queue of a thousand launches."""
    found = FakeCuda()
    found.install(monkeypatch)
    return found


@pytest.fixture
def clock(cuda: FakeCuda) -> CudaClock:
    return cuda.clock()


def train(
    cuda: FakeCuda,
    clock: CudaClock,
    *,
    steps: int,
    host: float,
    device: float,
    launches: int = 10,
    before: Callable[[int], object] = lambda step: None,
) -> None:
    """Train a segment of steps that take the host and the device so many seconds each."""
    with clock.ledger("train"):
        for step in range(steps):
            before(step)
            cuda.launch(host, device, launches)
            clock.pace()


@pytest.mark.parametrize("steps", [1, 3, RUN_AHEAD - 1, 10 * RUN_AHEAD])
@pytest.mark.parametrize("host", [0.001, 0.05])
def test_with_a_slow_device_the_share_is_the_host_s_work_however_short_the_segments(
    cuda: FakeCuda, clock: CudaClock, steps: int, host: float
) -> None:
    for _ in range(3):
        train(cuda, clock, steps=steps, host=host, device=0.1)
    assert clock.host_bound_share == pytest.approx(host / 0.1, rel=0.15)


@pytest.mark.parametrize(
    ("segment", "first_wait", "later_waits", "share"),
    [
        ({"host": 0.01, "device": 0.1, "launches": 130}, 0.0, 0.0, 0.1),  # a full queue: it waits inside launches
        ({"host": 0.01, "device": 0.1, "launches": 700}, 0.0, 0.0, 0.1),
        ({"host": 0.01, "device": 0.1}, 0.05, 0.0, 0.1),  # a long first step says nothing of the others
        ({"host": 0.001, "device": 0.02}, 0.0, 0.1, 1.0),  # a wait for data is work of the host
        ({"host": 0.1, "device": 0.02}, 0.0, 0.0, 1.0),
    ],
)
def test_the_share_of_a_long_segment_tells_waits_for_the_device_from_waits_for_data(
    cuda: FakeCuda, clock: CudaClock, segment: dict[str, Any], first_wait: float, later_waits: float, share: float
) -> None:
    wait = cuda.time.pass_by
    train(cuda, clock, steps=200, before=lambda step: wait(later_waits if step else first_wait), **segment)
    assert clock.host_bound_share == pytest.approx(share, rel=0.1)


def test_what_is_read_of_the_device_in_a_segment_counts_as_a_wait_and_outside_as_nothing(
    cuda: FakeCuda, clock: CudaClock
) -> None:
    with clock.ledger("train"):
        cuda.launch(1.0, 3.0)
        clock.pace()
        with clock.waiting():
            cuda.wait_until(cuda.busy_until)
        cuda.launch(1.0, 1.0)
        clock.pace()
    with clock.ledger("evaluation"), clock.waiting():
        cuda.time.pass_by(100.0)
    assert clock.host_bound_share == pytest.approx(2 / 6)


def test_segments_that_end_in_an_error_are_counted(cuda: FakeCuda, clock: CudaClock) -> None:
    with pytest.raises(KeyError), clock.ledger("train"):
        cuda.launch(1.0, 3.0)
        raise KeyError
    assert clock.host_bound_share == pytest.approx(1 / 4)


def test_the_share_is_that_of_all_parts_of_a_trial_that_was_paused(cuda: FakeCuda) -> None:
    first = cuda.clock()
    assert first.host_bound_share is None
    train(cuda, first, steps=100, host=0.01, device=0.1)
    state = json.loads(json.dumps(first.state()))
    whole = cuda.clock()
    whole.restore(state)
    assert whole.host_bound_share == first.host_bound_share
    train(cuda, whole, steps=100, host=0.1, device=0.01)
    assert whole.host_bound_share == pytest.approx((100 * 0.01 + 100 * 0.1) / 20, rel=0.02)
    whole.start()
    assert whole.host_bound_share is None


@pytest.mark.slow
def test_a_trial_tells_its_share_with_the_look_at_its_first_loss_as_a_wait(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = Trainer.first_step_problem

    def look(trainer: Trainer) -> str | None:
        cuda.wait_until(cuda.busy_until)
        return looked(trainer)

    monkeypatch.setattr(Trainer, "first_step_problem", look)
    toy = Toy(on_loss=lambda: cuda.launch(0.1, 0.4))
    asked = request(target=0.999, eval_every_steps=1, train_seconds_limit=0.9)
    outcome = Run(asked, toy, clock=cuda.clock()).outcome
    assert outcome.host_bound_share == pytest.approx(0.1 / 0.5)
    assert Run(asked, Toy()).outcome.host_bound_share is None
    ended = decode_reply(encode(TrialEnded(number=7, outcome=outcome)))
    assert isinstance(ended, TrialEnded) and ended.outcome.host_bound_share == outcome.host_bound_share


def test_a_step_time_tells_its_share(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "clock_for", lambda device: cuda.clock())
    asked = StepTimeRequest(configuration=configuration(), seconds_limit=0.5)
    toy = Toy(on_loss=lambda: cuda.launch(0.0002, 0.001, launches=400))
    measured = measure_step_time(asked, toy, toy_data(), on_cpu())
    assert measured.step_seconds == pytest.approx(0.001, rel=0.1)
    assert measured.host_bound_share == pytest.approx(0.2, rel=0.1), "its launches fill the queue"
    told = decode_reply(encode(measured))
    assert isinstance(told, StepTime) and told.host_bound_share == measured.host_bound_share
