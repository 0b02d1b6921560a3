"""Step times from several visits, against visits drawn from the model that they are fitted to; curves and texts."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from bssearch.records import Configuration, Goal, ParameterValue, Target, Visit, crossing, sparkline
from bssearch.records.step_times import (
    PACED,
    VISIT_DEVIATION,
    VISIT_FREEDOM,
    StepSeconds,
    TrialPace,
    fit_step_times,
    pool_paces,
    seconds_of_steps,
    steps_at_first_size,
    timed_as,
    with_step_time,
    with_visits,
)
from bssearch.records.text import LONGEST_TEXT, shortened, visible, with_precision
from tests.factories import make_curve, make_probe, make_trial

SECONDS = {16: 0.002, 128: 0.006, 512: 0.018}


def visit(number: int, batch_size: int, seconds: float, **changes: Any) -> Visit:
    made = Visit(
        visit=number, batch_size=batch_size, micro_batch_size=batch_size, step_seconds=seconds, steps_timed=100
    )
    return replace(made, **changes)


def drawn(rng: random.Random, visits: int, *, together: float, apart: float) -> list[Visit]:
    """Return rounds over all sizes whose seconds vary by ``together`` from round to round, and by ``apart`` alone."""
    found = []
    for number in range(1, visits + 1):
        slow = rng.gauss(0, together)
        for size, seconds in SECONDS.items():
            found.append(visit(number, size, seconds * math.exp(slow + rng.gauss(0, apart))))
    return found


def test_a_round_that_was_slow_for_all_sizes_is_told_from_a_slow_size() -> None:
    visits = [*drawn(random.Random(2), 2, together=0.0, apart=0.0), visit(3, 16, 0.004), visit(3, 128, 0.012)]
    fitted = fit_step_times(tuple(visits))
    assert fitted[128, 128, 1].seconds / fitted[16, 16, 1].seconds == pytest.approx(3.0)
    assert fitted[512, 512, 1].seconds / fitted[16, 16, 1].seconds == pytest.approx(9.0, rel=0.15)
    assert fitted[16, 16, 1].error.visits == 3


def test_one_visit_is_known_no_better_than_visits_are_elsewhere() -> None:
    error = fit_step_times((visit(1, 16, 0.002),))[16, 16, 1].error
    assert (error.own, error.common) == pytest.approx((VISIT_DEVIATION, VISIT_DEVIATION))
    assert (error.freedom, error.visits) == (VISIT_FREEDOM, 1)
    assert fit_step_times(()) == {}


def test_seconds_of_cpu_over_the_kernel_s_take_out_what_others_took() -> None:
    """Wall times of the larger size are three times as long beside others, the smaller one's are not."""
    quiet: dict[str, Any] = {"reference_seconds": 1e-4, "contended": False}
    busy: dict[str, Any] = {"reference_seconds": 1.5e-4, "contended": True}
    visits = [
        visit(1, 16, 0.002, undelayed_step_seconds=0.002, **quiet),
        visit(1, 512, 0.018, undelayed_step_seconds=0.018, **quiet),
        visit(2, 16, 0.003, undelayed_step_seconds=0.003, **busy),
        visit(2, 512, 0.054, undelayed_step_seconds=0.027, **busy),
    ]
    fitted = fit_step_times(tuple(visits))
    assert fitted[16, 16, 1].seconds == pytest.approx(0.0025), "at the median pace of the kernel"
    assert fitted[512, 512, 1].seconds / fitted[16, 16, 1].seconds == pytest.approx(9.0)


def test_a_split_without_visits_keeps_its_first_measurement() -> None:
    imported, probed = make_probe(8), make_probe(16)
    kept, fitted = with_visits([imported, probed], [visit(1, 16, 0.5, settled=True)])
    assert kept == imported
    assert fitted.step_seconds == pytest.approx(0.5)
    assert fitted.settled


def pace(steps: int = 1000, seconds: float = 0.01, undelayed: float = 0.01, **changes: Any) -> TrialPace:
    return TrialPace(steps, seconds, undelayed, **{"reference_seconds": 1e-4, "contended": False, **changes})


def test_of_trials_that_nothing_disturbed_there_is_nothing_left_to_take_off() -> None:
    quiet, busy = [pace(100, 0.012)] * 3, [pace(100, 0.02, contended=True)] * 3
    alone = pool_paces({"a": [*quiet, *busy], "b": busy}, {"a"})
    assert [alone[key].excess for key in "ab"] == pytest.approx([0.0, math.log(2)])
    both = pool_paces({"a": [*quiet, *busy], "b": busy}, {"a", "b"})
    assert both["a"].excess == pytest.approx((math.log(1.2) + math.log(2)) / 2), "all of both kinds count"
    assert alone["a"].seconds == both["a"].seconds == pytest.approx(0.01)


def test_the_pace_of_a_study_is_that_of_the_middle_half_of_its_trials() -> None:
    slowed = [pace(reference_seconds=seconds) for seconds in (9e-4, 8e-4)]
    quiet = pool_paces({"a": [pace()] * 8}, {"a"})["a"]
    assert quiet.common == 0.0 and pool_paces({"a": [*[pace()] * 6, *slowed]}, {"a"})["a"].common > 0.1
    assert quiet.seconds == pytest.approx(0.01)
    swapped = pool_paces({"a": [pace()] * 7, "b": [pace(reference_seconds=2e-4)]}, {"a", "b"})
    assert swapped["a"].seconds == pytest.approx(0.01) and swapped["b"].seconds == pytest.approx(0.005)
    assert swapped["a"].common == swapped["b"].common


def test_later_trials_change_no_kind_but_their_own() -> None:
    first = [pace(number=number) for number in range(PACED)]
    later = [pace(number=PACED + number, reference_seconds=2e-4) for number in range(PACED)]
    before = pool_paces({"b": first[1::2], "a": first[::2]}, {"a"})
    after = pool_paces({"b": [*later, *first[1::2]], "a": first[::2]}, {"a"})
    assert (after["a"].seconds, after["a"].common) == (before["a"].seconds, before["a"].common)
    assert after["b"].seconds < before["b"].seconds


def test_a_trial_of_few_steps_weighs_less_than_a_long_one() -> None:
    long, short = [pace(10_000)] * 3, pace(3, 0.03, 0.03)
    one = pool_paces({"a": [*long, short]}, {"a"})["a"]
    share = 0.25 / (3 * 10_000 / 10_009 + 0.25)
    assert one.seconds == pytest.approx(0.01 * 3**share), "a quarter of the weight of a long one"
    assert pool_paces({"a": long}, {"a"})["a"].error < pool_paces({"a": [pace(3)] * 3}, {"a"})["a"].error
    assert pool_paces({"a": [short]}, {"a"})["a"].seconds == pytest.approx(0.03), "alone it is all there is"


def test_the_host_bound_share_of_a_step_time_is_the_median_of_the_undisturbed_visits() -> None:
    def share_of(*visits: Visit) -> float | None:
        [found] = with_visits([make_probe(16, host_bound_share=0.9)], visits)
        return found.host_bound_share

    quiet = [visit(number, 16, 0.002, host_bound_share=share) for number, share in enumerate((0.1, 0.3, 0.2), start=1)]
    busy = [visit(number, 16, 0.004, host_bound_share=0.8, contended=True) for number in (4, 5)]
    assert share_of(*quiet, *busy) == 0.2
    assert share_of(*busy) == 0.8
    assert share_of(visit(1, 16, 0.002), *quiet[:1]) == 0.1, "a visit of an older version tells nothing"
    assert share_of(visit(1, 16, 0.002)) is None
    assert share_of() == 0.9, "a step time that nobody visited keeps its own"


GROWN = Configuration(
    batch_size=16,
    micro_batch_size=16,
    learning_rate=0.1,
    parameters={"batch_schedule": "milestones", "batch_stages": "160:128 672:512/256", "batch_rate_rule": "sqrt"},
)
TIMED: StepSeconds = {(16, 16, 1): 0.002, (128, 128, 1): 0.006, (512, 256, 1): 0.018}


def test_steps_of_a_batch_that_grows_take_the_step_times_of_the_sizes_that_it_has() -> None:
    # Ten steps of 16, four of 128 (to 672 samples), the rest of 512.
    assert seconds_of_steps(GROWN, 10, TIMED) == pytest.approx(10 * 0.002)
    assert seconds_of_steps(GROWN, 16, TIMED) == pytest.approx(10 * 0.002 + 4 * 0.006 + 2 * 0.018)
    assert steps_at_first_size(GROWN, 16, TIMED) == pytest.approx(10 + 4 * 3 + 2 * 9)
    only: StepSeconds = {(16, 16, 1): 0.002}
    assert seconds_of_steps(GROWN, 12, only) is None, "that of 128 is not known"
    assert seconds_of_steps(GROWN, 10, only) == pytest.approx(0.02), "it has not grown yet"
    plain = replace(GROWN, parameters={})
    assert steps_at_first_size(plain, 16, {}) == 16 and timed_as(plain) != timed_as(GROWN)


def test_a_batch_that_grows_by_what_it_measures_has_no_step_times() -> None:
    own: dict[str, ParameterValue] = {
        "batch_schedule": "noise_scale",
        "batch_stages": "128",
        "batch_rate_rule": "none",
        "batch_noise_share": 1.0,
    }
    assert seconds_of_steps(replace(GROWN, parameters=own), 10, TIMED) is None


def test_the_product_of_a_trial_is_that_of_the_sizes_that_it_had() -> None:
    trial = make_trial(1, configuration=GROWN, steps=16)
    assert with_step_time(trial, TIMED).steps_x_step_time_s == pytest.approx(0.02 + 0.024 + 0.036)
    assert with_step_time(trial, {}) is trial


# Curves and texts -----------------------------------------------------------------------------------------------------


ACCURACY = Target(metric="accuracy", value=0.9)
LOSS = Target(metric="loss", value=0.5, goal=Goal.MINIMIZE)


def test_crossing_is_interpolated_by_the_same_fraction() -> None:
    miss, hit = make_curve((1.0, 0.8), (3.0, 0.96))
    found = crossing(miss, hit, ACCURACY)
    assert (found.last_miss_step, found.first_hit_step) == (0, 10)
    assert found.train_seconds == pytest.approx(1.0 + 2.0 * 0.625)
    assert found.steps == 7  # 6.25, rounded up
    assert crossing(None, make_curve((0.0, 0.4))[0], LOSS).train_seconds == 0.0
    above, below = make_curve((0.0, 1.0), (1.0, 0.0))
    assert crossing(above, below, LOSS).train_seconds == pytest.approx(0.5)


def test_target_met_at_once_takes_no_steps() -> None:
    assert crossing(None, make_curve((0.0, 0.95))[0], ACCURACY).steps == 0


def test_sparkline_shows_the_ends_of_a_long_curve() -> None:
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([]) == ""
    long = sparkline([index / 999 for index in range(1000)])
    assert (len(long), long[0], long[-1]) == (40, "▁", "█")
    assert sparkline([0.0] * 10 + [1.0], width=3) == "▁▁█", "the last value is shown, however few there are to show"


# Texts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, LONGEST_TEXT, LONGEST_TEXT + 1, 10**7])
def test_a_long_text_keeps_its_start_and_end_and_says_how_long_it_was(length: int) -> None:
    text = ("start" + "x" * length + "end")[-length:] if length else ""
    short = shortened(text)
    assert len(short) <= LONGEST_TEXT and shortened(short) == short
    assert short[:100] == text[:100] and short[-100:] == text[-100:]
    assert (f"({length:,} characters)" in short) == (length > LONGEST_TEXT)


@pytest.mark.parametrize("code", [0, 7, 8, 9, 10, 11, 13, 27, 31, 32, 126, 127, 155, 159, 160, 0xD800, 0xDFFF, 0xE000])
def test_control_characters_and_lone_surrogates_are_replaced_but_no_tabs_and_line_breaks(code: int) -> None:
    is_shown = code in (9, 10) or 32 <= code < 127 or 160 <= code < 0xD800 or code > 0xDFFF
    assert visible(f"a{chr(code)}b") == (f"a{chr(code)}b" if is_shown else "a\ufffdb")


@pytest.mark.parametrize(
    ("device", "precision", "said"),
    [
        ("AMD EPYC", "fp32", "AMD EPYC, fp32"),
        ("AMD EPYC", "own", "AMD EPYC"),
        ("AMD EPYC", None, "AMD EPYC"),
        (None, "unknown", ""),
        ("unknown", "unknown", "device unknown"),
    ],
)
def test_a_precision_that_only_a_program_knows_is_left_out(
    device: str | None, precision: str | None, said: str
) -> None:
    assert with_precision(device, precision) == said
