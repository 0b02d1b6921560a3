from __future__ import annotations

from dataclasses import replace

import pytest

from bssearch.analysis.build_answer import at_step_time, predict_for_device
from bssearch.errors import TargetNotReachedError, UsageError
from bssearch.records import Phase, TrialRecord, TrialState
from bssearch.records.batch_schedule import with_batch_schedule
from tests.analysis.test_report import study
from tests.factories import make_probe, make_spec, make_trial, with_outcome
from tests.records.test_batch_schedule import milestones

SIZES = (16, 32, 64)
SPEC = make_spec()


def runs() -> list[TrialRecord]:
    """Steps that fall with the batch size; on the study's own device batch 64 is the fastest."""
    steps = {16: 400, 32: 250, 64: 180}
    return [
        make_trial(
            100 * size + seed,
            batch_size=size,
            steps=steps[size] + seed,
            seconds=0.01 * (steps[size] + seed),
            phase=Phase.CONFIRM,
            seed=seed,
        )
        for size in SIZES
        for seed in range(3)
    ]


def test_the_same_steps_at_other_step_times_have_another_optimum() -> None:
    slow = {size: make_probe(size, step_seconds=0.001 * size) for size in SIZES}
    found = predict_for_device(study(), SPEC, runs(), slow, "tiny")
    assert found.optimal.batch_size == 16
    assert found.optimal.time_to_target_s is not None
    assert found.optimal.time_to_target_s.median == pytest.approx(401 * 0.016)
    assert found.optimal.time_to_target_s.basis == "steps_x_step_time"
    assert found.device.model_dump() == {
        "name": "tiny",
        "type": "unknown",
        "memory_bytes": None,
        "precision": None,
        "torch_version": None,
        "compile_mode": None,
        "threads": None,
    }
    assert found.next == [], "no command runs on another device"
    assert found.warnings[0].code == "predicted"
    assert not {"contended", "measurement"} & {notice.code for notice in found.warnings}


def test_what_the_study_s_own_device_took_says_nothing_of_another() -> None:
    timed = [
        make_trial(
            run.number,
            batch_size=run.configuration.batch_size,
            steps=run.outcome.steps_to_target or 0,
            seconds=9.0,
            phase=Phase.CONFIRM,
            seed=run.seed,
            undelayed_train_seconds=9.0,
            reference_seconds=1e-4,
        )
        for run in runs()
        if run.outcome is not None
    ]
    timed = [with_outcome(run, steps=400) for run in timed if run.outcome is not None]
    slow = {size: make_probe(size, step_seconds=0.001 * size) for size in SIZES}
    found, plain = (predict_for_device(study(), SPEC, given, slow, "tiny") for given in (timed, runs()))
    assert found.optimal.time_to_target_s == plain.optimal.time_to_target_s


def test_a_batch_size_without_a_step_time_is_left_out_and_named() -> None:
    found = predict_for_device(study(), SPEC, runs(), {32: make_probe(32, step_seconds=0.1)}, "tiny")
    assert [row.batch_size for row in found.batches if row.trials] == [32]
    told = {notice.code: notice.message for notice in found.warnings}
    assert "16, 64" in told["no_step_time"]


def test_trials_whose_batch_grows_are_left_out_and_counted() -> None:
    first = runs()[0].configuration
    growing = with_batch_schedule(first, milestones((0, 16), (160, 64)))
    grown = [
        make_trial(9000 + seed, configuration=growing, steps=1, seconds=0.001, phase=Phase.AUDIT, seed=seed)
        for seed in range(3)
    ]
    times = {size: make_probe(size, step_seconds=0.001 * size) for size in SIZES}
    found = predict_for_device(study(), SPEC, [*runs(), *grown], times, "tiny")
    assert found.batch_schedule is None, "their steps are of more than one size"
    (notice,) = (one for one in found.warnings if one.code == "growing_batches_left_out")
    assert notice.message == "3 trials left out: their batch grows"
    alone = predict_for_device(study(), SPEC, runs(), times, "tiny")
    assert found.batches == alone.batches
    assert notice not in alone.warnings


def test_step_times_of_other_batch_sizes_alone_are_refused() -> None:
    with pytest.raises(UsageError, match="no step time is of a batch size that study 'toy' ran: it ran 16, 32"):
        predict_for_device(study(), SPEC, runs(), {7: make_probe(7)}, "tiny")


def test_step_times_of_batch_sizes_that_missed_alone_are_refused_and_those_wanted_are_listed() -> None:
    missed = make_trial(1, batch_size=8, state=TrialState.EXHAUSTED, seconds=3.0)
    with pytest.raises(TargetNotReachedError) as caught:
        predict_for_device(study(), SPEC, [*runs(), missed], {8: make_probe(8), 7: make_probe(7)}, "tiny")
    assert str(caught.value) == "the step times are of batch sizes of study 'toy' that did not reach the target: 8"
    assert caught.value.hint == "give step times of batch sizes that reached it: 16, 32, 64"


def test_a_study_in_which_nothing_reached_is_refused_without_a_predicted_second() -> None:
    with pytest.raises(TargetNotReachedError, match="no trial of study 'toy' has a known number of steps") as caught:
        predict_for_device(
            study(), SPEC, [make_trial(1, state=TrialState.EXHAUSTED, seconds=3.0)], {32: make_probe(32)}, "tiny"
        )
    assert caught.value.hint == "`bssearch trial list toy` shows how they ended"


def test_a_bound_moves_with_the_step_time_and_a_trial_that_runs_stays() -> None:
    capped = make_trial(1, state=TrialState.CAPPED, seconds=3.0, last_miss_step=300)
    moved = at_step_time(capped, 0.5)
    assert moved.outcome is not None
    assert (moved.outcome.last_miss_seconds, moved.outcome.contended) == (150.0, False)
    running = replace(capped, state=TrialState.RUNNING, outcome=None)
    assert at_step_time(running, 0.5) is running
