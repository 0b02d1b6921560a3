from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bssearch.analysis.objectives.measure import AS_GOOD, FLAT, TIME, Measure, metric_figure, step_seconds_of
from bssearch.records import Configuration, DeviceUse, Goal, Objective, Target, TrialState
from tests.factories import make_probe, make_trial

ACCURACY = Target(metric="accuracy", value=0.9)
LOSS = Target(metric="loss", value=3.0, goal=Goal.MINIMIZE)
REACHED = make_trial(1, batch_size=32, steps=100, seconds=2.0, last_miss_step=95)
CAPPED = make_trial(2, batch_size=32, state=TrialState.CAPPED, seconds=5.0, last_miss_step=240)


def measure(objective: Objective, target: Target = ACCURACY, price: float = 1.0) -> Measure:
    return Measure(objective, target, price)


def test_each_objective_has_its_figure_of_a_trial_that_reached() -> None:
    assert REACHED.outcome is not None
    outcome = replace(REACHED.outcome, device_use=DeviceUse(mean_power_watts=300.0))
    two_devices = Configuration(batch_size=32, micro_batch_size=16, learning_rate=0.1, world_size=2)
    trial = replace(REACHED, outcome=outcome, configuration=two_devices)
    assert TIME.of(trial) == 2.0
    assert measure(Objective.SAMPLES_TO_TARGET).of(trial) == 3200
    assert measure(Objective.COST_TO_TARGET, price=36.0).of(trial) == pytest.approx(2 * 2.0 * 36.0 / 3600)
    assert measure(Objective.ENERGY_TO_TARGET).of(trial) == 600.0
    assert measure(Objective.METRIC_IN_BUDGET).of(trial) == metric_figure(0.9, ACCURACY)


def test_a_contended_run_counts_with_steps_times_step_time() -> None:
    shared = make_trial(1, seconds=5.0, contended=True, product=2.0)
    assert TIME.of(shared) == 2.0
    assert measure(Objective.COST_TO_TARGET, price=3600.0).of(shared) == 2.0


def test_runs_are_compared_by_seconds_of_one_kind() -> None:
    alone = make_trial(1, batch_size=32, steps=100, seconds=2.0)
    shared = make_trial(2, batch_size=64, steps=50, seconds=9.0, contended=True, product=3.0)
    assert TIME.between([alone, alone], {(32, 32): 0.5}) is TIME
    assert TIME.between([alone, shared], {}) is TIME, "nobody knows a step time at batch 32"
    known = TIME.between([alone, shared], {(32, 32): 0.01})
    assert (known.of(alone), known.of(shared)) == (1.0, 3.0)
    assert {known.basis(alone), known.basis(shared)} == {"steps_x_step_time"}
    again = TIME.between([alone, shared], {(32, 32): 0.01, (64, 64): 0.04})
    assert again.of(shared) == 2.0, "a step time measured since replaces the run's own"
    missed = make_trial(3, batch_size=64, state=TrialState.CAPPED, seconds=9.0, contended=True, last_miss_step=200)
    assert again.bound(missed) == 8.0
    elsewhere = make_trial(4, batch_size=128, seconds=7.0)
    assert (again.of(elsewhere), again.basis(elsewhere)) == (7.0, "measured")


def test_a_quarter_of_a_configurations_runs_may_have_shared_the_device() -> None:
    alone = [make_trial(number, steps=100, seconds=2.0) for number in range(3)]
    shared = [make_trial(number, steps=100, seconds=9.0, contended=True, product=4.0) for number in (3, 4)]
    few = TIME.between([*alone, shared[0]], {(32, 32): 0.01})
    assert few is TIME and few.of(shared[0]) == 4.0
    assert TIME.between([*alone, *shared], {(32, 32): 0.01}).of(alone[0]) == 1.0
    elsewhere = make_trial(5, batch_size=64, steps=50, seconds=9.0, contended=True, product=3.0)
    many = TIME.between([*alone, elsewhere], {(32, 32): 0.01})
    assert many.of(alone[0]) == 1.0, "all runs of one configuration shared it"


def test_a_contended_run_counts_as_such_though_no_product_was_stored() -> None:
    runs = [make_trial(number, steps=100, seconds=9.0, contended=True) for number in range(3)]
    assert TIME.between(runs, {(32, 32): 0.01}).of(runs[0]) == 1.0


def test_the_newest_run_says_how_long_a_step_takes() -> None:
    old, new = (
        make_trial(number, steps=100, seconds=9.0, contended=True, product=product)
        for number, product in ((1, 4.0), (2, 2.0))
    )
    assert TIME.between([new, old], {}).of(old) == 2.0


def test_of_several_step_times_the_first_measured_alone_counts() -> None:
    timed = [
        make_probe(32, step_seconds=9.0, contended=True),
        make_probe(32, step_seconds=1.0),
        make_probe(32, step_seconds=2.0),
        make_probe(32, micro_batch_size=16, step_seconds=3.0, contended=True),
        make_probe(64, step_seconds=None, out_of_memory=True),
    ]
    assert step_seconds_of(timed) == {(32, 32): 1.0, (32, 16): 3.0}


def test_what_was_not_measured_has_no_figure() -> None:
    assert measure(Objective.ENERGY_TO_TARGET).of(REACHED) is None
    for objective in set(Objective) - {Objective.METRIC_IN_BUDGET}:
        assert measure(objective).of(CAPPED) is None
    assert measure(Objective.METRIC_IN_BUDGET).of(make_trial(3, state=TrialState.FAILED)) is None
    assert measure(Objective.METRIC_IN_BUDGET).of(make_trial(3, best_metric=None)) is None


def test_a_stopped_trial_bounds_its_figure() -> None:
    assert TIME.bound(CAPPED) == 5.0
    assert measure(Objective.SAMPLES_TO_TARGET).bound(CAPPED) == 240 * 32
    assert measure(Objective.METRIC_IN_BUDGET).bound(CAPPED) is None
    assert TIME.bound(REACHED) is None
    shared = make_trial(2, state=TrialState.CAPPED, seconds=5.0, contended=True, last_miss_step=240)
    assert TIME.bound(shared) is None
    assert measure(Objective.SAMPLES_TO_TARGET).bound(shared) == 240 * 32


@pytest.mark.parametrize(("target", "better", "worse"), [(ACCURACY, 0.95, 0.9), (LOSS, 2.5, 3.0)])
def test_a_better_metric_has_a_smaller_figure_and_comes_back_from_it(
    target: Target, better: float, worse: float
) -> None:
    of_metric = measure(Objective.METRIC_IN_BUDGET, target)
    assert metric_figure(better, target) < metric_figure(worse, target)
    for metric in (better, worse):
        assert of_metric.shown(metric_figure(metric, target)) == pytest.approx(metric)
    as_good = target.value + (-1 if target.goal is Goal.MAXIMIZE else 1) * AS_GOOD * target.value
    assert metric_figure(as_good, target) / metric_figure(target.value, target) == pytest.approx(FLAT)


def test_a_diverged_loss_is_no_overflow() -> None:
    assert math.isfinite(metric_figure(1e300, LOSS))
    assert metric_figure(1e300, LOSS) > metric_figure(1e2, LOSS)
