from __future__ import annotations

import itertools
import time

import pytest
import torch
from toys import CPU, Toy, configuration, toy_data

from bssearch.errors import WorkloadError
from bssearch.probes.step_time import STEPS, measure_step_time
from bssearch.records import StepTimeRequest


def test_the_median_step_and_evaluation_are_timed_apart() -> None:
    toy = Toy(on_loss=lambda: time.sleep(0.004), on_evaluate=lambda metrics: time.sleep(0.02) or metrics)
    measured = measure_step_time(StepTimeRequest(configuration=configuration()), toy, toy_data(), CPU)
    assert measured.step_seconds is not None and 0.004 < measured.step_seconds < 0.02
    assert measured.evaluation_seconds is not None and 0.02 < measured.evaluation_seconds < 0.05
    assert (measured.batch_size, measured.micro_batch_size, measured.out_of_memory) == (20, 20, False)
    assert STEPS[0] <= measured.steps_timed <= STEPS[1]


def test_slow_steps_are_timed_five_times() -> None:
    toy = Toy(on_loss=lambda: time.sleep(0.11))
    measured = measure_step_time(StepTimeRequest(configuration=configuration()), toy, toy_data(), CPU)
    assert measured.steps_timed == 5


def test_accumulation_is_timed_as_it_is_run() -> None:
    toy = Toy(on_loss=lambda: time.sleep(0.002))
    accumulated = configuration(20, micro_batch_size=5, accumulation_steps=4)
    measured = measure_step_time(StepTimeRequest(configuration=accumulated), toy, toy_data(), CPU)
    assert measured.step_seconds is not None and measured.step_seconds > 0.008


@pytest.mark.parametrize("at_loss", [1, 6])
def test_out_of_memory_is_an_answer(at_loss: int) -> None:
    calls = itertools.count(1)

    def fail() -> None:
        if next(calls) == at_loss:
            raise torch.OutOfMemoryError("CUDA out of memory")

    measured = measure_step_time(StepTimeRequest(configuration=configuration()), Toy(on_loss=fail), toy_data(), CPU)
    assert measured.out_of_memory
    assert (measured.step_seconds, measured.evaluation_seconds, measured.steps_timed) == (None, None, 0)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(WorkloadError, match="200 must be <= 100"):
        measure_step_time(StepTimeRequest(configuration=configuration(200)), Toy(), toy_data(), CPU)
