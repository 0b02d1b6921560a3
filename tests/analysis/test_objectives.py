import math
import statistics
from dataclasses import replace
from statistics import stdev
from typing import Any, ClassVar

import pytest
from hypothesis import given, strategies as st
from scipy.stats import binom

from bssearch import UsageError, registry
from bssearch.analysis.batches import survival
from bssearch.analysis.build_answer import at_target, other_target, refuse_another_target
from bssearch.analysis.law.batch_model import WIDEST_GAP, fit_step_time, throughput_knee
from bssearch.analysis.objectives import AS_GOOD, TIME, CommonSeconds, make_objective, seconds_to_target
from bssearch.analysis.optimum import (
    Verdict,
    beaten,
    compared,
    decide,
    estimate,
    far_behind,
    fewest_runs,
    half_width,
    ignore_their_seeds,
    median_samples,
    ratio_interval,
    runs_to_settle,
    without_early_ends,
)
from bssearch.records import (
    FLAT_RATIO,
    Configuration,
    DeviceUse,
    Goal,
    Observation,
    Phase,
    ProbeRecord,
    StepTime,
    Target,
    TrialRecord,
    TrialState,
    student_t,
)
from bssearch.records.step_times import MIDMEAN_ERROR, STEP_DEVIATION, VISIT_DEVIATION, VISIT_FREEDOM, step_seconds_of
from tests.factories import make_probe, make_spec, make_trial, not_none, with_outcome

ACCURACY = Target(metric="accuracy", value=0.9)
LOSS = Target(metric="loss", value=3.0, goal=Goal.MINIMIZE)
REACHED = make_trial(1, batch_size=32, steps=100, seconds=2.0, last_miss_step=95)
WITH_DROPOUT = Configuration(batch_size=32, micro_batch_size=32, learning_rate=0.1, dropout=0.1)
CAPPED = make_trial(2, batch_size=32, state=TrialState.CAPPED, seconds=5.0, last_miss_step=240)


def test_each_objective_has_its_figure_of_a_trial_that_reached() -> None:
    outcome = replace(not_none(REACHED.outcome), device_use=DeviceUse(mean_power_watts=300.0))
    two_devices = Configuration(batch_size=32, micro_batch_size=16, learning_rate=0.1, world_size=2)
    trial = replace(REACHED, outcome=outcome, configuration=two_devices)
    assert TIME.figure(trial) == 2.0
    assert make_objective("samples_to_target", ACCURACY).figure(trial) == 3200
    assert make_objective("cost_to_target", ACCURACY, 36.0).figure(trial) == pytest.approx(2 * 2.0 * 36.0 / 3600)
    assert make_objective("energy_to_target", ACCURACY).figure(trial) == 600.0
    whole = replace(trial, outcome=replace(outcome, train_seconds=trial.train_seconds_limit))
    assert make_objective("metric_in_budget", ACCURACY).figure(whole) == -0.9


def test_samples_are_those_that_a_trial_counted() -> None:
    objective = make_objective("samples_to_target", ACCURACY)
    # A hundred steps of 32 would be 3,200 samples; each epoch ends with a smaller batch.
    smaller = with_outcome(REACHED, steps=100, samples=2400)
    assert objective.figure(smaller) == 2400
    assert objective.figure(with_outcome(REACHED, steps=200, samples=4800)) == 2400
    assert objective.bound(with_outcome(CAPPED, steps=250, samples=6000)) == 240 * 24
    best = not_none(decide([smaller], 1, objective)).optimal
    assert (best.value, median_samples(best)) == (2400, 2400)


def test_a_figure_is_flat_up_to_5_percent_above_the_least_and_no_further() -> None:
    assert TIME.is_flat(2.0, 2.0)
    assert TIME.is_flat(FLAT_RATIO * 2.0, 2.0)
    assert not TIME.is_flat(FLAT_RATIO * 2.0 + 1e-9, 2.0)


def test_a_contended_run_counts_with_steps_times_step_time() -> None:
    shared = make_trial(1, seconds=5.0, contended=True, product=2.0)
    assert TIME.figure(shared) == 2.0
    assert make_objective("cost_to_target", ACCURACY, 3600.0).figure(shared) == 2.0


def test_runs_are_compared_by_seconds_of_one_kind() -> None:
    alone = make_trial(1, batch_size=32, steps=100, seconds=2.0)
    shared = make_trial(2, batch_size=64, steps=50, seconds=9.0, contended=True, product=3.0)
    assert TIME.between([alone, alone], {(32, 32, 1): 0.5}) is TIME
    assert TIME.between([alone, shared], {}) is TIME, "nobody knows a step time at batch 32"
    known = TIME.between([alone, shared], {(32, 32, 1): 0.01})
    assert (known.figure(alone), known.figure(shared)) == (1.0, 3.0)
    assert {known.basis(alone), known.basis(shared)} == {"steps_x_step_time"}
    again = TIME.between([alone, shared], {(32, 32, 1): 0.01, (64, 64, 1): 0.04})
    assert again.figure(shared) == 2.0, "a step time measured since replaces the run's own"
    missed = make_trial(3, batch_size=64, state=TrialState.CAPPED, seconds=9.0, contended=True, last_miss_step=200)
    assert again.bound(missed) == 8.0
    elsewhere = make_trial(4, batch_size=128, seconds=7.0)
    assert (again.figure(elsewhere), again.basis(elsewhere)) == (7.0, "measured")


def test_a_quarter_of_a_configurations_runs_may_have_shared_the_device() -> None:
    alone = [make_trial(number, steps=100, seconds=2.0) for number in range(3)]
    shared = [make_trial(number, steps=100, seconds=9.0, contended=True, product=4.0) for number in (3, 4)]
    few = TIME.between([*alone, shared[0]], {(32, 32, 1): 0.01})
    assert few is TIME and few.figure(shared[0]) == 4.0
    assert TIME.between([*alone, *shared], {(32, 32, 1): 0.01}).figure(alone[0]) == 1.0
    many = TIME.between(
        [*alone, make_trial(5, batch_size=64, steps=50, seconds=9.0, contended=True, product=3.0)], {(32, 32, 1): 0.01}
    )
    assert many.figure(alone[0]) == 1.0, "all runs of one configuration shared it"


def test_of_several_step_times_the_first_measured_alone_counts() -> None:
    timed = [
        make_probe(32, step_seconds=9.0, contended=True),
        make_probe(32, step_seconds=1.0),
        make_probe(32, step_seconds=2.0),
        make_probe(32, micro_batch_size=16, step_seconds=3.0, contended=True),
        make_probe(64, step_seconds=None, out_of_memory=True),
    ]
    assert step_seconds_of(timed) == {(32, 32, 1): 1.0, (32, 16, 1): 3.0}


@pytest.mark.parametrize("name", registry.names("objectives"))
@pytest.mark.parametrize(
    "state", [state for state in TrialState if state not in {TrialState.REACHED, TrialState.EXHAUSTED}]
)
def test_only_a_trial_that_came_to_its_end_has_a_figure(name: str, state: TrialState) -> None:
    trial = make_trial(1, state=state, seconds=10.0, device_use=DeviceUse(mean_power_watts=300.0))
    assert make_objective(name, ACCURACY).figure(trial) is None


@pytest.mark.parametrize(
    ("name", "exhausted", "paused"),
    [
        ("time_to_target", 10.0, 10.0),
        ("samples_to_target", 240 * 32, 240 * 32),
        ("cost_to_target", 10.0 / 3600, 10.0 / 3600),
        ("energy_to_target", 3000.0, 3000.0),
        ("metric_in_budget", None, None),
    ],
)
def test_where_a_trial_missed_bounds_its_figure_and_running_out_of_memory_does_not(
    name: str, exhausted: float | None, paused: float | None
) -> None:
    objective = make_objective(name, ACCURACY)
    for state, bound in ((TrialState.EXHAUSTED, exhausted), (TrialState.PAUSED, paused), (TrialState.OOM, None)):
        trial = make_trial(
            1, state=state, seconds=10.0, last_miss_step=240, device_use=DeviceUse(mean_power_watts=300.0)
        )
        assert objective.bound(trial) == (None if bound is None else pytest.approx(bound))


def budgeted(number: int, metric: float, state: TrialState = TrialState.EXHAUSTED, **changes: object) -> TrialRecord:
    """Return a trial that trained to its limit of 10 s."""
    return make_trial(number, state=state, seconds=10.0, best_metric=metric, **changes)  # type: ignore[arg-type]


def test_the_metric_counts_of_trials_that_trained_to_their_limit_whether_or_not_they_met_the_target() -> None:
    objective = make_objective("metric_in_budget", ACCURACY)
    assert objective.figure(budgeted(1, 0.8)) == -0.8
    assert objective.figure(budgeted(2, 0.95, TrialState.REACHED)) == -0.95
    assert objective.figure(make_trial(3, seconds=4.0, best_metric=0.95)) is None
    scheduled = Configuration(
        batch_size=32, micro_batch_size=32, learning_rate=0.1, parameters={"horizon_samples": 640}
    )
    assert objective.figure(make_trial(4, seconds=4.0, best_metric=0.95, configuration=scheduled, samples=640)) == -0.95


@pytest.mark.parametrize("state", [TrialState.PAUSED, TrialState.OOM, TrialState.CANCELLED])
def test_a_trial_without_a_figure_does_not_win_the_metric_in_a_budget(state: TrialState) -> None:
    spec = make_spec(objective="metric_in_budget")
    trials = [budgeted(1, 0.8), budgeted(2, 0.99, state, batch_size=64)]
    verdict = decide(trials, 0, make_objective(spec.objective, spec.record_target))
    assert verdict is not None and verdict.optimal.configuration.batch_size == 32


@pytest.mark.parametrize("goal", Goal)
@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-300, 1e-12, 1e-4, 0.9, 3.0, 1e9, 1e300])
def test_figures_are_ordered_as_the_metrics_whatever_the_target(goal: Goal, value: float) -> None:
    objective = make_objective("metric_in_budget", Target(metric="quality", value=value, goal=goal))
    metrics = [-1e300, -1e9, -1.0, -1e-9, 0.0, 1e-12, 0.1, 0.5, 0.5 + 1e-12, 0.9, 1.0, 3.0, 878.0, 1e9, 1e300]
    figures = [objective.figure(budgeted(1, metric)) for metric in metrics]
    known = [figure for figure in figures if figure is not None]
    assert len(known) == len(metrics) and all(map(math.isfinite, known))
    assert known == sorted(known, reverse=goal is Goal.MAXIMIZE)
    assert len(set(known)) == len(metrics), "no two metrics have the same figure"
    assert [objective.shown(figure) for figure in known] == metrics
    for one in known:
        for other in known:
            assert math.isfinite(objective.ratio(one, other)) and objective.ratio(one, other) > 0
            assert (objective.ratio(one, other) >= 1) >= (one >= other)


@pytest.mark.parametrize("target", [ACCURACY, LOSS])
def test_metrics_half_a_percent_of_the_target_apart_are_as_good_as_times_five_percent_apart(target: Target) -> None:
    objective = make_objective("metric_in_budget", target)
    worse = target.value + (-1 if target.goal is Goal.MAXIMIZE else 1) * AS_GOOD * target.value
    least, next_best = (objective.figure(budgeted(1, metric)) for metric in (target.value, worse))
    assert least is not None and next_best is not None
    assert objective.ratio(next_best, least) == pytest.approx(FLAT_RATIO)
    assert objective.is_flat(least + 0.99 * (next_best - least), least)
    assert not objective.is_flat(least + 1.01 * (next_best - least), least)


def test_an_objective_that_is_not_known_is_refused_by_its_name_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="'beauty' is not known; choose from time_to_target"):
        make_objective("beauty")
    with pytest.raises(ValueError, match="must be one of time_to_target"):
        make_spec(objective="beauty")


def measured(number: int, **changes: Any) -> TrialRecord:
    """Return a trial of 100 steps that others disturbed: half of its two seconds it had no CPU."""
    given = {"seconds": 2.0, "contended": True, "undelayed_train_seconds": 1.0, "reference_seconds": 2e-4, **changes}
    return with_outcome(make_trial(number, **given), steps=100)


class TestStepTimesOfTheTrialsThemselves:
    """Two batch sizes whose runs others disturbed, the larger one's more: by the wall they seem equally fast."""

    SMALL: ClassVar[list[TrialRecord]] = [measured(n) for n in (1, 2, 3)]
    LARGE: ClassVar[list[TrialRecord]] = [measured(n, batch_size=64, reference_seconds=4e-4) for n in (4, 5, 6)]

    def test_seconds_of_cpu_over_the_kernel_s_are_compared_whatever_was_timed_apart(self) -> None:
        objective = TIME.between([*self.SMALL, *self.LARGE], {(32, 32, 1): 9.0, (64, 64, 1): 1.0})
        assert [objective.figure(run) or 0.0 for run in (*self.SMALL, *self.LARGE)] == pytest.approx(
            [2**0.5] * 3 + [2**-0.5] * 3
        ), "at the kernel's pace, √8e-4 s"
        assert {objective.basis(run) for run in self.SMALL} == {"steps_x_step_time"}

    def test_a_run_that_missed_is_bounded_in_the_same_seconds(self) -> None:
        missed = measured(7, state=TrialState.EXHAUSTED, last_miss_step=50)
        assert TIME.between(self.SMALL, {}).bound(missed) == pytest.approx(0.5)
        assert TIME.bound(missed) is None, "its own seconds say nothing"

    def test_the_trials_of_the_search_tell_of_step_times_too_and_disturbed_ones_only_where_there_are_no_others(
        self,
    ) -> None:
        alone = [measured(n, contended=False, undelayed_train_seconds=0.5) for n in (7, 8, 9)]
        assert TIME.between(self.SMALL, {}, alone[:2]).figure(self.SMALL[0]) == pytest.approx(0.5 ** (2 / 5))
        assert TIME.between(self.SMALL, {}, alone).figure(self.SMALL[0]) == pytest.approx(0.5)
        other = [measured(n, contended=False, configuration=WITH_DROPOUT) for n in (7, 8, 9)]
        assert TIME.between(self.SMALL, {}, other).figure(self.SMALL[0]) == pytest.approx(1.0), "another kind of step"

    def test_one_run_without_them_leaves_all_to_what_was_timed_apart(self) -> None:
        runs = [*self.SMALL, *self.LARGE, make_trial(8, batch_size=64, contended=True)]
        assert not_none(TIME.between(runs, {(32, 32, 1): 9.0, (64, 64, 1): 1.0}).common).pooled is None
        assert TIME.between(runs, {}).common is None

    def test_intervals_hold_the_error_of_the_step_time_and_what_may_be_left_in_it(self) -> None:
        objective = TIME.between([*self.SMALL, *self.LARGE], {})
        small, large = estimate(self.SMALL, objective), estimate(self.LARGE, objective)
        assert small.step_time is not None and small.step_time.excess == pytest.approx(math.log(2.0) / 2)
        runs = 3 * 100 / (100 + (STEP_DEVIATION / VISIT_DEVIATION) ** 2)  # Each weighs a little less than a long one.
        error = VISIT_DEVIATION * math.sqrt(VISIT_FREEDOM / (4 + VISIT_FREEDOM) / runs)
        half = student_t(4 + VISIT_FREEDOM) * error
        common = small.step_time.common
        references = [run.outcome.reference_seconds for run in (*self.SMALL, *self.LARGE) if run.outcome is not None]
        assert common == pytest.approx(MIDMEAN_ERROR * stdev(math.log(one or 0.0) for one in references) / math.sqrt(6))
        whole = half_width([(error**2, 4 + VISIT_FREEDOM), (common**2, 4 + VISIT_FREEDOM)])
        assert small.high == pytest.approx(2**0.5 * math.exp(whole))
        assert small.low == pytest.approx(1.0 / math.exp(whole))
        low, high = ratio_interval(small, large) or (0.0, 0.0)
        wide = math.exp(half * math.sqrt(2))
        left = large.excess - small.excess
        assert left > 0.5, "more may be left in the larger one's step time, which may be so much faster"
        assert (low, high) == pytest.approx((2 / wide, 2 * wide * math.exp(left)), rel=0.02)
        assert (ratio_interval(large, small) or (0.0, 0.0)) == pytest.approx((1 / high, 1 / low))

    def test_of_one_kind_of_configuration_a_ratio_has_no_error_of_a_step_time(self) -> None:
        faster = [replace(run, configuration=replace(run.configuration, learning_rate=0.2)) for run in self.SMALL]
        objective = TIME.between([*self.SMALL, *faster], {})
        assert ratio_interval(estimate(self.SMALL, objective), estimate(faster, objective)) == pytest.approx((1.0, 1.0))


def curve(*metrics: float) -> list[Observation]:
    """One evaluation every 10 steps of 0.1 s, of batches of 4."""
    return [
        Observation(
            step=10 * index,
            samples=40 * index,
            train_seconds=1.0 * index,
            metric=metric,
            loss=None,
            learning_rate=0.1,
        )
        for index, metric in enumerate(metrics)
    ]


def test_a_trial_has_reached_an_other_target_where_its_curve_first_meets_it() -> None:
    trial = make_trial(1, seconds=4.0, undelayed_train_seconds=3.0)
    trial = with_outcome(trial, steps=40, samples=160, tokens=1600, test_metric=0.88)
    moved = at_target(trial, curve(0.1, 0.5, 0.7, 0.6, 0.9), replace(ACCURACY, value=0.6), step_seconds=0.2)
    outcome = not_none(moved.outcome)
    assert moved.state is outcome.state is TrialState.REACHED
    assert (outcome.last_miss_step, outcome.first_hit_step, outcome.steps_to_target) == (10, 20, 15)
    assert outcome.time_to_target_s == pytest.approx(1.5)
    assert moved.steps_x_step_time_s == pytest.approx(15 * 0.2)
    assert (outcome.steps, outcome.samples, outcome.tokens, outcome.final_metric) == (20, 80, 800, 0.7)
    assert outcome.test_metric is None
    assert outcome.undelayed_train_seconds == pytest.approx(3.0 * 20 / 40)


@pytest.mark.parametrize("state", [TrialState.CAPPED, TrialState.PRUNED, TrialState.EXHAUSTED, TrialState.DIVERGED])
def test_however_it_ended_later_what_it_reached_it_reached(state: TrialState) -> None:
    trial = make_trial(1, state=state)
    assert at_target(trial, curve(0.1, 0.7), replace(ACCURACY, value=0.6), 0.1).state is TrialState.REACHED
    assert at_target(trial, curve(0.1, 0.5), replace(ACCURACY, value=0.6), 0.1) == trial


@pytest.mark.parametrize("state", [TrialState.FAILED, TrialState.LOST, TrialState.CANCELLED])
def test_a_trial_that_says_nothing_says_nothing_of_another_target_either(state: TrialState) -> None:
    trial = make_trial(1, state=state)
    assert at_target(trial, curve(0.1, 0.7), replace(ACCURACY, value=0.6), 0.1) == trial


def test_an_objective_that_no_target_enters_has_no_answer_for_another_target() -> None:
    for name in registry.names("objectives"):
        if name != "metric_in_budget":
            refuse_another_target(make_objective(name, ACCURACY))
    with pytest.raises(UsageError, match="metric_in_budget has no answer for another target") as caught:
        refuse_another_target(make_objective("metric_in_budget", ACCURACY))
    assert caught.value.hint is not None


def test_a_target_met_before_the_first_step_is_refused() -> None:
    with pytest.raises(UsageError, match=r"target 0\.05 is met before the first step: trial 3 starts with .* 0\.1"):
        at_target(make_trial(3, seconds=1.0), curve(0.1, 0.9), replace(ACCURACY, value=0.05), 0.1)


@pytest.mark.parametrize(
    ("goal", "own", "harder", "easier"), [(Goal.MAXIMIZE, 0.9, 0.91, 0.5), (Goal.MINIMIZE, 2.0, 1.9, 3.0)]
)
def test_only_a_target_as_easy_as_the_studys_can_be_answered(
    goal: Goal, own: float, harder: float, easier: float
) -> None:
    target = Target(metric="m", value=own, goal=goal)
    assert other_target(target, easier).value == easier
    assert other_target(target, own) == target
    with pytest.raises(UsageError, match=f"target {harder:g} is harder than m {own:g}"):
        other_target(target, harder)
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(UsageError, match=f"target {value:g} must be a finite number"):
            other_target(target, value)


def test_only_reached_trials_have_a_time() -> None:
    found = {state: seconds_to_target(make_trial(0, state=state, seconds=2.0)) for state in TrialState}
    assert found == {**dict.fromkeys(TrialState), TrialState.REACHED: 2.0}


def test_contended_runs_are_judged_by_steps_times_step_time() -> None:
    contended = make_trial(0, seconds=5.0, contended=True, product=2.0)
    assert seconds_to_target(contended) == 2.0
    alone = [make_trial(n, seconds=1.0 + n, product=0.1) for n in (1, 2)]
    mostly_alone = estimate([contended, *alone])
    assert (mostly_alone.median, mostly_alone.basis, mostly_alone.low is None) == (2.0, "measured", False)
    mostly_shared = estimate([contended, make_trial(8, seconds=9.0, contended=True, product=4.0), alone[0]])
    assert (mostly_shared.median, mostly_shared.basis) == (2.0, "steps_x_step_time")
    assert estimate([contended, alone[0]]).basis == "steps_x_step_time", "one half is enough"
    assert estimate(alone).basis == "measured"


def test_interval_is_students_t_on_logarithms() -> None:
    seconds = [2.0, 2.5, 3.2]
    found = estimate([make_trial(n, seconds=value) for n, value in enumerate(seconds)])
    logs = [math.log(value) for value in seconds]
    half = 4.302652729911275 * statistics.stdev(logs) / math.sqrt(3)  # t(0.975, 2), any table
    assert found.median == 2.5
    assert found.low == pytest.approx(math.exp(statistics.fmean(logs) - half))
    assert found.high == pytest.approx(math.exp(statistics.fmean(logs) + half))
    assert student_t(1e9) == pytest.approx(1.959964, abs=1e-5)


def between(last_miss: int, first_hit: int, seconds: float = 0.437) -> list[TrialRecord]:
    """Return three runs of equal seconds that hit between the same two evaluations."""
    trials = [make_trial(n, seconds=seconds, steps=(last_miss + first_hit) // 2) for n in range(3)]
    return [
        with_outcome(one, last_miss_step=last_miss, first_hit_step=first_hit)
        for one in trials
        if one.outcome is not None
    ]


def test_runs_that_hit_at_the_same_evaluation_have_the_width_of_its_gap() -> None:
    found = estimate(between(90, 110))
    low, high = not_none(found.low), not_none(found.high)
    assert high / low > 110 / 90 and low < 0.437 < high
    # A uniform distribution of width w has the standard deviation w/√12.
    assert found.log_deviation == pytest.approx(math.log(110 / 90) / math.sqrt(12))
    many = estimate([replace(one, seed=n) for n, one in enumerate(between(90, 110) * 10)])
    assert math.log(not_none(many.high) / not_none(many.low)) / 2 == pytest.approx(1.96 * found.log_deviation, rel=0.01)
    low, high = ratio_interval(many, many) or (0.0, 0.0)
    assert math.log(high / low) / 2 == pytest.approx(1.96 * found.log_deviation * math.sqrt(2), rel=0.01)
    unknown = estimate([make_trial(n, seconds=0.437) for n in range(3)])
    assert (unknown.median, unknown.low, unknown.high) == (0.437, None, None)


def test_the_gap_counts_up_to_a_width_and_not_for_what_is_no_hit_at_the_target() -> None:
    found = estimate(between(1, 1000))
    assert found.log_deviation == pytest.approx(WIDEST_GAP / math.sqrt(12)) == estimate(between(0, 20)).log_deviation
    assert estimate(between(90, 110)[:1]).log_deviation == 0.0
    unseen = [with_outcome(one, first_hit_step=None) for one in between(90, 110) if one.outcome]
    assert estimate(unseen).log_deviation == 0.0


def test_seeds_that_differ_by_more_than_the_gap_count_by_themselves() -> None:
    runs = [
        with_outcome(one, time_to_target_s=seconds)
        for one, seconds in zip(between(99, 101), (1.0, 2.0, 4.0), strict=True)
        if one.outcome is not None
    ]
    assert estimate(runs).log_deviation == pytest.approx(math.log(2))


def test_missed_runs_count_as_longer_than_all() -> None:
    missed = make_trial(9, state=TrialState.EXHAUSTED, seconds=10.0)
    found = estimate([make_trial(0, seconds=1.0), make_trial(1, seconds=2.0), missed])
    assert (found.median, found.low, found.high, found.reached) == (2.0, None, None, 2)
    assert estimate([make_trial(0, seconds=1.0), missed]).median is None


def test_ratio_bound_needs_three_runs_on_both_sides() -> None:
    three = estimate([make_trial(n, seconds=1.0 + 0.01 * n) for n in range(3)])
    assert ratio_interval(three, estimate([make_trial(n, seconds=1.0) for n in range(2)])) is None
    assert 1.0 < not_none(ratio_interval(three, three))[1] < 1.05


def test_the_interval_of_a_ratio_is_welchs_and_turns_round_with_its_sides() -> None:
    slow = estimate([make_trial(n, seconds=value) for n, value in enumerate((2.0, 2.4, 1.8))])
    fast = estimate([make_trial(n, seconds=value) for n, value in enumerate((1.0, 1.01, 0.99, 1.02))])
    found, turned = ratio_interval(slow, fast), ratio_interval(fast, slow)
    # By scipy.stats.ttest_ind(…, equal_var=False).confidence_interval() of the logarithms.
    assert found == pytest.approx((1.42654, 2.92268), rel=1e-5)
    assert turned == pytest.approx((1 / 2.92268, 1 / 1.42654), rel=1e-5)


# The optimum ----------------------------------------------------------------------------------------------------------


def confirmed(times: dict[int, list[float]], steps: dict[int, int] | None = None) -> list[TrialRecord]:
    return [
        make_trial(
            1000 * size + seed,
            batch_size=size,
            seconds=value,
            steps=(steps or {}).get(size, 100),
            phase=Phase.CONFIRM,
            seed=seed,
        )
        for size, values in times.items()
        for seed, value in enumerate(values)
    ]


def verdict(times: dict[int, list[float]]) -> Verdict:
    return not_none(decide(confirmed(times), 3))


def test_the_smallest_batch_size_shown_to_be_within_5_percent_is_recommended() -> None:
    found = verdict({16: [1.5, 1.51, 1.52], 32: [1.02, 1.021, 1.022], 64: [1.0, 1.001, 1.002]})
    assert (found.optimal.configuration.batch_size, found.least.configuration.batch_size) == (32, 64)
    assert (found.rule, found.tied) == ("smallest_shown_within_5_percent", [32, 64])


def test_what_may_be_within_5_percent_is_not_shown_to_be() -> None:
    found = verdict({32: [0.8, 1.0, 1.3], 64: [0.9, 0.99, 1.1]})
    assert (found.optimal.configuration.batch_size, found.rule, found.tied) == (64, "least", [64])


@pytest.mark.parametrize(
    ("recommended", "best", "rule"),
    [(64, 64, "least"), (32, 64, "smallest_shown_within_5_percent"), (16, 16, "law"), (16, 32, "law")],
)
def test_another_batch_size_is_recommended_with_its_reason(recommended: int, best: int, rule: str) -> None:
    found = verdict({16: [1.0, 1.5, 2.0], 32: [0.9, 1.2, 1.6], 64: [0.8, 1.1, 1.6]}).recommending(recommended, best)
    assert (found.optimal.configuration.batch_size, found.rule) == (recommended, rule)
    assert found.least.configuration.batch_size == 64


def test_of_two_configurations_with_one_median_the_one_with_the_smaller_mean_counts() -> None:
    trials = [
        make_trial(10 * place + seed, learning_rate=rate, seconds=one, phase=Phase.CONFIRM, seed=seed)
        for place, (rate, seconds) in enumerate([(0.1, (1.0, 2.0, 4.0)), (0.2, (1.0, 2.0, 3.0))])
        for seed, one in enumerate(seconds)
    ]
    assert not_none(decide(trials, 3)).optimal.configuration.learning_rate == 0.2


def test_the_flat_range_of_another_recommendation_does_not_reach_to_what_is_not_flat() -> None:
    found = verdict({16: [1.0, 1.5, 2.0], 32: [0.9, 1.2, 1.6], 64: [0.8, 1.1, 1.6]}).recommending(16, 16)
    assert found.flat_range == (16, 16)


def test_the_flat_range_ends_at_the_first_batch_size_that_is_not_flat_on_either_side() -> None:
    medians = {8: 1.01, 16: 2.0, 32: 1.02, 64: 1.0, 128: 1.03, 256: 2.0, 512: 1.01}
    assert verdict({size: [one, one * 1.1, one * 0.9] for size, one in medians.items()}).flat_range == (32, 128)
    assert verdict({8: [1.0, 1.1, 0.9], 16: [2.0, 2.1, 1.9]}).flat_range == (8, 8)
    assert verdict({8: [1.01, 1.1, 0.9], 16: [1.0, 1.1, 0.9]}).flat_range == (8, 16)


def test_three_runs_of_each_decide_though_more_were_asked_for() -> None:
    trials = confirmed({32: [1.0, 1.0, 1.0, 1.0], 64: [1.1, 1.1, 1.1]})
    assert fewest_runs(trials, 7) == 3
    assert not_none(decide(trials, 7)).confirmed
    assert decide([*trials, *confirmed({128: [0.5]})], 7) is None, (
        "one configuration has had a single run: nothing is decided, and there is no search"
    )


CLOSE = {32: [0.9, 1.0, 1.1], 64: [1.0, 1.1, 1.2]}


def test_a_beaten_configuration_needs_one_run() -> None:
    trials = confirmed({**CLOSE, 128: [9.0]})
    [one] = {trial.configuration.key for trial in trials if trial.configuration.batch_size == 128}
    assert beaten(trials) == {one}
    assert fewest_runs(trials, 3) == 3
    assert not_none(decide(trials, 3)).by_batch[128].value == 9.0
    noisy = {32: [0.3, 1.0, 3.0], 64: [0.4, 1.1, 3.0]}
    for undecided in (confirmed({**CLOSE, 128: [1.3]}), confirmed({**noisy, 128: [9.0]}), confirmed({128: [9.0]})):
        assert beaten(undecided) == set()


def test_misses_show_no_noise_and_a_configuration_with_a_miss_is_not_the_best() -> None:
    missed = [with_state(one, TrialState.EXHAUSTED, 30.0) for one in confirmed({256: [1.0, 1.0, 1.0]})]
    assert beaten([*confirmed({32: CLOSE[32], 128: [9.0]}), *missed]) == set(), "two degrees of freedom are too few"
    diverged = [replace(one, state=TrialState.DIVERGED) for one in confirmed({16: [0.1] * 7})[3:]]
    fast = [*confirmed({16: [0.1, 0.11, 0.12]}), *diverged]
    assert beaten([*fast, *confirmed(CLOSE)]) == set()
    assert beaten([*confirmed({16: [0.1, 0.11, 0.12]}), *confirmed(CLOSE)])


def test_a_run_beside_other_work_does_not_end_a_confirmation() -> None:
    [single] = confirmed({128: [9.0]})
    shared = with_outcome(single, contended=True, undelayed_train_seconds=1.0)
    assert beaten([*confirmed(CLOSE), shared]) == far_behind([*confirmed(CLOSE), shared]) == set()
    by_product = replace(with_outcome(single, contended=True), steps_x_step_time_s=9.0)
    assert beaten([*confirmed(CLOSE), by_product]) == {single.configuration.key}


def test_on_a_busy_machine_runs_with_known_paces_compare_by_a_common_step_time() -> None:
    known = {"contended": True, "reference_seconds": 1e-4}
    runs = [
        with_outcome(one, steps=steps, steps_to_target=steps, undelayed_train_seconds=seconds, **known)
        for one in confirmed({**CLOSE, 128: [9.0]})
        if (seconds := not_none(one.outcome).train_seconds) and (steps := round(100 * seconds))
    ]
    [slow] = {one.configuration.key for one in runs if one.configuration.batch_size == 128}
    assert beaten(runs) == set()
    assert beaten(runs, compared(runs, TIME)) == {slow}
    assert set(not_none(decide(runs, 3)).by_batch) == {32, 64, 128}


def test_no_configuration_is_far_behind_the_last_miss_of_another() -> None:
    [early] = [with_state(one, TrialState.EXHAUSTED, 0.1) for one in confirmed({16: [1.0]})]
    assert far_behind([early, *confirmed(CLOSE)]) == set()
    slow = confirmed({128: [2.5]})
    assert far_behind([early, *confirmed(CLOSE), *slow]) == {slow[0].configuration.key}


def with_state(trial: TrialRecord, state: TrialState, missed_at: float) -> TrialRecord:
    ended = with_outcome(trial, state=state, time_to_target_s=None, steps_to_target=None, last_miss_seconds=missed_at)
    return replace(ended, state=state)


def test_few_runs_of_a_beaten_configuration_confirm_nothing_for_another_target() -> None:
    kept, single, several = confirmed(CLOSE), confirmed({128: [9.0]}), confirmed({256: [9.0, 9.1, 9.2]})
    searched = make_trial(1, batch_size=128)
    found = [replace(one, phase=Phase.SEARCH) for one in single]
    assert without_early_ends([*kept, *single, *several, searched], TIME) == [*kept, *found, *several, searched]


@pytest.mark.parametrize(
    ("reached", "missed", "ends"),
    [
        (20, 2, (6, 17)),  # 1-based; binom.cdf(5, 22, 0.5) = 0.0085, binom.cdf(6, 22, 0.5) = 0.026
        (16, 6, None),  # the 17th is a miss
        (5, 1, None),
        (8, 1, (2, 8)),
    ],
)
def test_with_missed_runs_the_interval_of_the_median_is_between_order_statistics(
    reached: int, missed: int, ends: tuple[int, int] | None
) -> None:
    times = runs([float(n) for n in range(1, reached + 1)], [30.0] * missed)
    found = estimate(times)
    assert (found.low, found.high) == (pytest.approx(ends) if ends else (None, None))
    other = estimate(confirmed({32: [1.0, 1.1, 1.2]}))
    assert ratio_interval(found, other) is None, "a miss has no logarithm"
    if ends is not None:
        beyond = [2 * binom.cdf(one, reached + missed, 0.5) for one in (ends[0] - 1, ends[0])]
        assert beyond[0] <= 0.05 < beyond[1]


def test_a_single_run_has_the_pooled_noise_in_a_ratio() -> None:
    runs = confirmed({32: [0.9, 1.0, 1.1], 128: [9.0]})
    several, single = (estimate([one for one in runs if one.configuration.batch_size == size]) for size in (32, 128))
    assert ratio_interval(single, several) is None
    low, high = not_none(ratio_interval(single, several, (0.1, 8.0)))
    half = student_t(8.0) * 0.1
    assert low < math.exp(single.log_mean - several.log_mean - half) and high > 9.0 * math.exp(half)


def test_seed_deviation_is_pooled_over_batch_sizes() -> None:
    found = verdict({16: [1.0, math.e**0.1, math.e**0.2], 32: [2.0, 2.0, 2.0]})
    assert found.seed_deviation == pytest.approx(math.sqrt((0.1**2 * 2 + 0) / 4))


@pytest.mark.parametrize(("variation", "ratio", "runs"), [(0.042, 1.05, 13), (0.042, 1.10, 5)])
def test_runs_to_settle_are_those_of_a_t_test_with_80_percent_power(variation: float, ratio: float, runs: int) -> None:
    """At the MLPerf reference runs' median noise, 4.2 %; exact, where 16 (c/δ)² gives 12 and 4."""
    assert runs_to_settle(math.sqrt(math.log1p(variation**2)), ratio) == runs


def test_the_least_of_several_that_are_as_good_looks_faster_than_it_is() -> None:
    near = [0.9, 1.0, 1.12, 1.0]
    alone = verdict({32: near, 64: [2 * one for one in near]}).optimal.estimate
    flat = verdict({size: [one * (1 + size / 1e5) for one in near] for size in (32, 64, 128, 256)})
    assert flat.least.selection > 0.01
    assert not_none(flat.least.estimate.high) == pytest.approx(
        not_none(alone.high) * math.exp(flat.least.selection), rel=0.01
    )
    assert flat.least.estimate.low == pytest.approx(alone.low, rel=0.01)
    assert flat.by_batch[256].selection == 0.0


SIZES = [4, 8, 16, 32, 64, 128, 256, 512]


def line(alpha: float, beta: float, sizes: list[int] = SIZES) -> list[StepTime]:
    return [make_probe(size, step_seconds=alpha + beta * size) for size in sizes]


@given(st.floats(0, 1), st.floats(1e-7, 1e-2))
def test_a_line_is_found_again(alpha: float, beta: float) -> None:
    fit = not_none(fit_step_time(line(alpha, beta)))
    assert fit.alpha_seconds == pytest.approx(alpha, rel=1e-6, abs=1e-6 * beta)
    assert fit.beta_seconds == pytest.approx(beta, rel=1e-6)
    assert fit.max_residual < 1e-6


def test_the_relative_error_is_made_small_not_the_absolute_one() -> None:
    """The largest batch is 100 times as slow: by absolute error it alone would fix the line."""
    fit = not_none(fit_step_time([*line(0.001, 1e-5), make_probe(10_000, step_seconds=0.2)]))
    assert fit.alpha_seconds == pytest.approx(0.001, rel=0.1)
    assert fit.max_residual == pytest.approx(0.45, abs=0.05)


def test_a_step_without_samples_takes_no_negative_time() -> None:
    fit = not_none(fit_step_time([make_probe(size, step_seconds=1e-5 * size**1.2) for size in SIZES]))
    assert fit.alpha_seconds == 0
    assert 1e-5 * 4**0.2 < fit.beta_seconds < 1e-5 * 512**0.2


def test_two_sizes_are_no_line_and_neither_are_steps_that_get_faster() -> None:
    assert fit_step_time(line(0.001, 1e-5, [4, 8])) is None
    assert fit_step_time([make_probe(size, step_seconds=1 / size) for size in SIZES]) is None


def test_accumulated_sizes_and_those_out_of_memory_are_left_out() -> None:
    accumulated = make_probe(1024, micro_batch_size=256, step_seconds=9.0)
    assert fit_step_time(
        [*line(0.001, 1e-5), accumulated, make_probe(2048, step_seconds=None, out_of_memory=True)]
    ) == fit_step_time(line(0.001, 1e-5))


def test_an_accumulated_step_is_its_micro_batches_and_one_update() -> None:
    fit = not_none(fit_step_time([*line(0.001, 1e-5), make_probe(96, step_seconds=0.002)]))
    assert fit.predict(384, 96, update_seconds=0.0005) == pytest.approx(4 * (0.002 - 0.0005) + 0.0005)


@pytest.mark.parametrize(
    ("timed", "knee"),
    [(line(0.001, 1e-4), 128), (line(0.001, 1e-5), 512), ([make_probe(8, step_seconds=None)], None)],
)
def test_throughput_levels_off_at_nine_tenths_of_the_largest(timed: list[ProbeRecord], knee: int | None) -> None:
    """The throughput is B / (B + α/β) of the limit: at 64, 128 and 512 with α/β = 10 that is 0.865, 0.928, 0.981."""
    assert throughput_knee(timed) == knee


def test_a_micro_batch_that_was_not_timed_is_predicted() -> None:
    fit = not_none(fit_step_time(line(0.001, 1e-5)))
    assert fit.predict(300, 300, update_seconds=0.0005) == pytest.approx(0.004)
    assert fit.predict(600, 300, update_seconds=0.0005) == pytest.approx(2 * 0.0035 + 0.0005)


# Survival -------------------------------------------------------------------------------------------------------------


def runs(reached: list[float], missed: list[float], state: TrialState = TrialState.EXHAUSTED) -> list[TrialRecord]:
    times = [make_trial(n, seconds=value) for n, value in enumerate(reached)]
    return times + [make_trial(100 + n, seconds=value, state=state) for n, value in enumerate(missed)]


@pytest.mark.parametrize(
    ("reached", "missed", "mean", "median", "share"),
    [
        ([2.0, 4.0, 6.0], [10.0], (2 + 4 + 6 + 10) / 4, 6.0, 0.75),
        # S = 2/3 after 2; the run that left at 3 is no longer at risk; S = 0 after 6.
        ([2.0, 6.0], [3.0], 2 + 4 * 2 / 3, 6.0, 1.0),
        ([2.0], [10.0, 10.0], (2 + 10 + 10) / 3, None, 1 / 3),
        ([2.0, 3.0], [10.0, 10.0], (2 + 3 + 10 + 10) / 4, None, 0.5),
    ],
)
def test_the_mean_is_restricted_to_the_horizon_and_the_median_needs_most_runs(
    reached: list[float], missed: list[float], mean: float, median: float | None, share: float
) -> None:
    found = not_none(survival(runs(reached, missed)))
    assert (found.mean_s, found.reached_share) == pytest.approx((mean, share))
    assert (found.horizon_s, found.median_s) == (max(*reached, *missed), median)


def test_seconds_are_of_the_kind_that_the_measure_counts() -> None:
    reached = [make_trial(n, seconds=9.0, steps=steps, contended=True) for n, steps in enumerate((20, 40, 60))]
    missed = make_trial(9, seconds=30.0, state=TrialState.EXHAUSTED, last_miss_step=100, contended=True)
    found = not_none(survival([*reached, missed], replace(TIME, common=CommonSeconds({(32, 32, 1): 0.1}))))
    assert found.mean_s == pytest.approx((2 + 4 + 6 + 10) / 4)
    assert (found.horizon_s, found.median_s) == (10.0, 6.0)
    assert survival([*reached, missed]) is None  # when the last was last seen alone to miss is not known


@pytest.mark.parametrize(
    "found",
    [
        runs([2.0, 3.0], []),
        runs([], [10.0, 10.0]),
        runs([2.0], [10.0], TrialState.PRUNED),
        runs([2.0], [10.0], TrialState.DIVERGED),
        [*runs([2.0], []), replace(*runs([], [10.0]), train_seconds_limit=20.0)],
    ],
)
def test_nothing_is_said_where_censoring_depends_on_the_run_or_nothing_is_censored(found: list[TrialRecord]) -> None:
    assert survival(found) is None


# Seeds that are ignored -----------------------------------------------------------------------------------------------


def run(seed: int, steps: int, metric: float) -> TrialRecord:
    return with_outcome(make_trial(seed, seed=seed), steps=steps, final_metric=metric)


def test_runs_with_the_same_steps_and_metric_under_every_seed_ignore_it() -> None:
    alike = [run(1, 20, 0.91), run(2, 20, 0.91), run(3, 20, 0.91)]
    others = [run(4, 40, 0.92), run(5, 40, 0.92)]
    assert ignore_their_seeds([alike, others])
    assert not ignore_their_seeds([alike]), "two that are like another one may be by chance"
    assert not ignore_their_seeds([alike, [*others, run(6, 40, 0.93)]])
    assert not ignore_their_seeds([[run(1, 20, 0.91)], [run(2, 20, 0.91)]]), "they are of two configurations"
