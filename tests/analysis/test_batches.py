"""The row of each batch size: medians of its best configuration's runs, and bounds where it missed the target."""

from collections.abc import Sequence
from typing import Any

import pytest

from bssearch.analysis.answer import Answer, Batch
from bssearch.analysis.batches import steps_to_target
from bssearch.analysis.optimum import Candidate, median_steps
from bssearch.records import DeviceUse, Phase, TrialRecord, TrialState
from tests.factories import make_spec, make_trial, not_none
from tests.figures.test_plots import answer_of


def two_runs(*steps: int, **changes: Any) -> list[TrialRecord]:
    return [
        make_trial(n, batch_size=64, phase=Phase.CONFIRM, seed=n, steps=one, seconds=0.01 * one, **changes)
        for n, one in enumerate(steps)
    ]


def row_of(answer: Answer, size: int) -> Batch:
    return next(row for row in answer.batches if row.batch_size == size)


def test_steps_are_whole_and_what_is_made_of_them_is_of_the_median() -> None:
    spec = make_spec(objective="samples_to_target", confirm={"runs": 2})
    row = row_of(answer_of(two_runs(4, 5), spec), 64)
    assert row.steps_to_target == 5
    assert row.samples_to_target == 288
    assert row.objective_value is not None and row.objective_value.median == 288
    assert row.steps_x_step_time_s == pytest.approx(4.5 * not_none(row.step_time_s))


def test_the_median_is_not_known_where_half_of_the_runs_missed() -> None:
    runs = two_runs(4, 5, 7)
    assert (median_of(runs), median_of(runs[:2])) == (5, 4.5)
    missed = make_trial(9, batch_size=64, state=TrialState.EXHAUSTED)
    half = Candidate(runs[0].configuration, (runs[0], missed))
    assert (median_steps(half), steps_to_target(half)) == (None, None)


def median_of(runs: Sequence[TrialRecord]) -> float | None:
    return median_steps(Candidate(runs[0].configuration, tuple(runs)))


@pytest.mark.parametrize(
    ("objective", "bound"),
    [
        ("time_to_target", 7.2),
        ("samples_to_target", 300 * 8),
        ("cost_to_target", 7.2 * 2.0 / 3600),
        ("energy_to_target", None),
        ("metric_in_budget", None),
    ],
)
def test_a_bound_is_in_the_unit_of_the_objective(objective: str, bound: float | None) -> None:
    missed = make_trial(1, batch_size=8, state=TrialState.EXHAUSTED, seconds=7.2, last_miss_step=300, best_metric=0.8)
    spec = make_spec(objective=objective, price_per_device_hour=2.0)
    reached = make_trial(0, batch_size=64, device_use=DeviceUse(mean_power_watts=100.0))
    row = row_of(answer_of([reached, missed], spec), 8)
    assert row.objective_lower_bound == (None if bound is None else pytest.approx(bound))
    assert row.lower_bound_s == pytest.approx(7.2)


def test_runs_compared_by_steps_and_step_time_have_their_restricted_mean_in_the_same_seconds() -> None:
    runs = two_runs(200, 300, contended=True, product=1.0)
    missed = make_trial(
        9,
        batch_size=64,
        phase=Phase.CONFIRM,
        seed=9,
        state=TrialState.EXHAUSTED,
        seconds=9.0,
        last_miss_step=400,
        contended=True,
    )
    row = row_of(answer_of([*runs, missed]), 64)
    assert row.restricted is not None and row.step_time_s is not None
    assert row.restricted.mean_s == pytest.approx(row.step_time_s * (200 + 300 + 400) / 3)
    assert row.restricted.horizon_s == pytest.approx(row.step_time_s * 400)
