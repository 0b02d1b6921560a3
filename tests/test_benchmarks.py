"""The bars of the benchmarks that judge single studies."""

from __future__ import annotations

import math

import pytest

from bssearch.analysis.answer import Answer
from tests.benchmarks import memory_plan, other_finders, quick_answers
from tests.benchmarks.reconfirmation import meets_bar
from tests.benchmarks.table_task import disagreements
from tests.documents import ROOT
from tests.factories import not_none

DIGITS = Answer.model_validate_json((ROOT / "tests" / "data" / "digits.best.json").read_text())


@pytest.mark.parametrize(
    ("held", "count", "is_met"), [(13, 15, True), (12, 15, False), (9, 10, True), (8, 10, False), (0, 0, False)]
)
def test_thirteen_of_fifteen_or_as_large_a_share(held: int, count: int, is_met: bool) -> None:
    assert meets_bar(held, count) is is_met


@pytest.mark.parametrize(
    ("own", "others", "is_met"),
    [(1.0, [0.95, 8.0, math.inf], True), (1.0, [0.85, 8.0], False), (math.inf, [math.inf], False)],
)
def test_what_another_tool_finds_may_not_be_sooner_at_the_target(own: float, others: list[float], is_met: bool) -> None:
    assert other_finders.meets_bar(own, others) is is_met


def answer_with(flat: list[int], batch_size: int, time: tuple[float, float] | None) -> Answer:
    known = not_none(DIGITS.optimal.time_to_target_s)
    changed = None if time is None else known.model_copy(update={"low": time[0], "high": time[1]})
    optimal = DIGITS.optimal.model_copy(update={"batch_size": batch_size, "time_to_target_s": changed})
    return DIGITS.model_copy(update={"flat_range": flat, "optimal": optimal})


FIRST = answer_with([64, 256], 128, (1.0, 2.0))


@pytest.mark.parametrize(
    ("other", "count"),
    [
        (FIRST, 0),
        (answer_with([128, 256], 256, (1.9, 3.0)), 0),
        (answer_with([256, 512], 256, (1.9, 3.0)), 1),
        (answer_with([64, 512], 512, (1.9, 3.0)), 1),
        (answer_with([512, 512], 512, (1.9, 3.0)), 2),
        (answer_with([64, 256], 128, (2.1, 3.0)), 1),
        (answer_with([64, 256], 128, (0.5, 0.9)), 1),
        (answer_with([64, 256], 128, None), 1),
    ],
)
def test_answers_agree_within_each_others_flat_range_and_interval(other: Answer, count: int) -> None:
    assert len(disagreements(FIRST, other)) == count
    assert len(disagreements(other, FIRST)) == count


def test_a_quick_answer_is_judged_by_steps_times_seconds() -> None:
    truth = quick_answers.Truth(
        by_rule={32: 100.0, 64: 60.0, 128: 40.0, 256: math.inf}, tuned={32: 49.0, 64: 30.0, 128: 20.5, 256: 20.0}
    )
    seconds = {32: 1.0, 64: 1.0, 128: 1.5, 256: 2.5}
    found = quick_answers.judged(quick_answers.Found(32, (16, 64), 50.0, seconds), truth, seconds)
    assert (found.by_rule, found.tuned, found.as_it_stands) == pytest.approx((100 / 60, 49 / 30, 100 / 30))
    assert found.holds and found.width == 4
    missed = quick_answers.judged(quick_answers.Found(256, (129, 300), 50.0, seconds), truth, seconds)
    assert missed.by_rule == math.inf and not missed.holds, "64 and 128 are the best when tuned"


@pytest.mark.parametrize(
    ("predicted", "peak", "is_missed"),
    [(1.14, 1.0, False), (0.84, 1.0, True), (0.6, 0.5, False), (0.65, 0.5, True), (2.2, 2.0, False), (1.69, 2.0, True)],
)
def test_a_peak_is_met_within_15_percent_from_a_gib_on_and_150_mib_below(
    predicted: float, peak: float, is_missed: bool
) -> None:
    assert memory_plan.misses(round(predicted * 2**30), round(peak * 2**30)) is is_missed
