"""How often a trial is evaluated: by the number of evaluations, and by what they cost."""

from __future__ import annotations

import pytest

from bssearch.records import StepTime
from bssearch.training.course import eval_every_steps, probe_record


@pytest.mark.parametrize(
    ("step_seconds", "evaluation_seconds", "full_limit", "steps"),
    [
        (0.001, 0.0, 10.0, 10),  # a thousand evaluations in 10 s
        (0.001, 0.0, 10.5, 11),  # no more than that
        (0.001, 0.01, 10.0, 40),  # an evaluation of 10 ms is a fifth of 40 ms of steps and itself
        (0.001, 0.01, 100.0, 100),
        (0.001, 1.0, 10.0, 500),  # twenty evaluations in 10 s, whatever they cost
        (1.0, 0.0, 10.0, 1),
        (1.0, 100.0, 1.0, 1),
    ],
)
def test_evaluations_are_at_most_a_thousand_and_a_fifth_of_the_time_and_at_least_twenty(
    step_seconds: float, evaluation_seconds: float, full_limit: float, steps: int
) -> None:
    assert eval_every_steps(step_seconds, evaluation_seconds, full_limit) == steps


@pytest.mark.parametrize(
    ("step_seconds", "evaluation_seconds", "cadence"), [(0.001, 0.01, 40), (None, 0.01, None), (0.001, None, None)]
)
def test_a_step_time_is_kept_with_the_cadence_that_follows_from_it(
    step_seconds: float | None, evaluation_seconds: float | None, cadence: int | None
) -> None:
    measured = StepTime(
        batch_size=64, micro_batch_size=32, step_seconds=step_seconds, evaluation_seconds=evaluation_seconds,
        steps_timed=7, peak_memory_bytes=123, step_seconds_low=0.0005, contended=True, reason="a neighbour",
    )  # fmt: skip
    found = probe_record(measured, 10.0)
    assert found.eval_every_steps == cadence
    for name in ("batch_size", "micro_batch_size", "step_seconds", "steps_timed", "step_seconds_low", "reason"):
        assert getattr(found, name) == getattr(measured, name)
