from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
import torch

from bssearch.errors import WorkloadError
from bssearch.probes import step_time
from bssearch.probes.step_time import measure_step_time
from bssearch.records import Configuration, StepTime, StepTimeRequest
from tests.training.toys import FakeTime, Toy, configuration, on_cpu, toy_data

Measure = Callable[..., StepTime]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Return a probe of a workload whose losses and evaluations take the given seconds, one after the other."""

    def measured(losses: list[float], evaluations: list[float], probed: Configuration | None = None) -> StepTime:
        time = FakeTime()
        monkeypatch.setattr(step_time, "clock_for", lambda device: time.clock())
        of_losses, of_evaluations = itertools.cycle(losses), iter(evaluations)

        def evaluated(metrics: Mapping[str, float]) -> Mapping[str, float]:
            time.pass_by(next(of_evaluations))
            return metrics

        toy = Toy(on_loss=lambda: time.pass_by(next(of_losses)), on_evaluate=evaluated)
        request = StepTimeRequest(configuration=probed or configuration())
        return measure_step_time(request, toy, toy_data(), on_cpu())

    return measured


def test_the_median_step_and_evaluation_are_timed_apart(measure: Measure) -> None:
    measured = measure([0.005, 0.007, 0.9], [0.3, 0.1, 0.2])
    assert measured.step_seconds == pytest.approx(0.007)
    assert measured.evaluation_seconds == pytest.approx(0.2)
    assert (measured.batch_size, measured.micro_batch_size, measured.out_of_memory) == (20, 20, False)


def test_fast_steps_are_timed_thirty_times(measure: Measure) -> None:
    assert measure([0.001], [0.1] * 3).steps_timed == 30


def test_steps_are_timed_for_half_a_second(measure: Measure) -> None:
    assert measure([0.0501], [0.1] * 3).steps_timed == 10


def test_slow_steps_are_timed_five_times_and_slow_evaluations_once(measure: Measure) -> None:
    measured = measure([3.0], [0.7])
    assert measured.steps_timed == 5
    assert measured.evaluation_seconds == pytest.approx(0.7)


def test_the_steps_before_time_starts_are_not_counted(measure: Measure) -> None:
    assert measure([50.0, 50.0, 50.0, *[0.1] * 5], [0.7]).step_seconds == pytest.approx(0.1)


def test_accumulation_is_timed_as_it_is_run(measure: Measure) -> None:
    accumulated = configuration(20, micro_batch_size=5, accumulation_steps=4)
    assert measure([0.002], [0.7], accumulated).step_seconds == pytest.approx(0.008)


def test_a_real_clock_gives_real_times() -> None:
    measured = measure_step_time(StepTimeRequest(configuration=configuration()), Toy(), toy_data(), on_cpu())
    assert measured.step_seconds is not None and 1e-5 < measured.step_seconds < 1
    assert measured.evaluation_seconds is not None and 1e-6 < measured.evaluation_seconds < 1


@pytest.mark.parametrize("at_loss", [1, 6])
def test_out_of_memory_is_an_answer(at_loss: int) -> None:
    calls = itertools.count(1)

    def fail() -> None:
        if next(calls) == at_loss:
            raise torch.OutOfMemoryError("CUDA out of memory")

    measured = measure_step_time(
        StepTimeRequest(configuration=configuration()), Toy(on_loss=fail), toy_data(), on_cpu()
    )
    assert measured.out_of_memory
    assert (measured.step_seconds, measured.evaluation_seconds, measured.steps_timed) == (None, None, 0)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(WorkloadError, match="200 must be <= 100"):
        measure_step_time(StepTimeRequest(configuration=configuration(200)), Toy(), toy_data(), on_cpu())
