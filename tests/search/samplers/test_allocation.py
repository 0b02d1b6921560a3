import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bssearch.analysis.law.quick import QuickAnswer
from bssearch.errors import UsageError
from bssearch.records import Configuration, GradientNoise, ProbeRecord, Progress, TrialRecord, TrialState
from bssearch.search.history import History
from bssearch.search.samplers.allocation import (
    EVIDENCE_TRIALS,
    EVIDENCE_TRIES,
    RULED_OUT_TRIALS,
    default_is_due,
    evidence_sizes,
    propose,
    propose_evidence,
)
from bssearch.search.samplers.base import Choice, make_sampler
from bssearch.search.samplers.time_model.acquisition import SLOWEST_FALL, step_seconds_at
from bssearch.search.samplers.time_model.candidates import (
    BOUND_DEVIATION,
    ERROR,
    WORST,
    Extrapolation,
    Run,
    extrapolate,
)
from bssearch.search.samplers.time_model.sampler import _noise_scale
from tests.factories import make_probe, make_spec, make_trial, not_none, quick_at
from tests.search.samplers.made_up import MadeUpStudy, seconds_near_64, step_seconds_near_64, study_spec

SIZES = (8, 16, 32, 64, 128)


def history(*trials: TrialRecord, probes: dict[int, ProbeRecord] | None = None) -> History:
    return History(make_spec(), trials, probes or {size: make_probe(size) for size in SIZES})


def default_trial(**changes: object) -> TrialRecord:
    return make_trial(0, configuration=make_spec().default_configuration, **changes)  # type: ignore[arg-type]


def test_the_default_is_due_until_tried_a_lost_one_again_but_not_a_failed_one() -> None:
    assert default_is_due(history())
    assert default_is_due(history(default_trial(state=TrialState.LOST)))
    assert not default_is_due(history(default_trial(state=TrialState.FAILED)))


def test_every_batch_size_gets_its_trials_nearest_to_the_incumbent_first() -> None:
    trials = [default_trial(seconds=2.0)]
    order = []
    for number in range(1, 10):
        proposal = not_none(propose(history(*trials)))
        order.append(proposal.batch_size)
        trials.append(make_trial(number, batch_size=proposal.batch_size, seconds=3.0, state=TrialState.CAPPED))
    assert set(order[:2]) == {16, 64}
    assert set(order[:4]) == {8, 16, 64, 128}
    assert Counter([32, *order]) == dict.fromkeys(SIZES, 2)


def test_evidence_is_the_largest_and_a_rung_each_side_four_times_away() -> None:
    assert evidence_sizes(history(default_trial())) == [128, 8]
    wide = history(default_trial(), probes={size: make_probe(size) for size in (8, 16, 32, 64, 128, 256, 512)})
    assert evidence_sizes(wide) == [512, 8, 128]


def test_from_half_the_budget_evidence_runs_at_batch_sizes_without_a_hit() -> None:
    trials = [default_trial()]
    trials += [make_trial(n, batch_size=16, seconds=1.0) for n in range(1, 4)]
    for n, size in enumerate([8, 8, 32, 64, 64, 128, 128], start=4):
        trials.append(make_trial(n, batch_size=size, seconds=2.0, state=TrialState.CAPPED))
    proposal = propose(history(*trials))
    assert proposal is not None
    assert (proposal.batch_size, proposal.source, proposal.uncapped) == (128, "transfer", True)
    sources = []
    while proposal is not None and proposal.uncapped and proposal.batch_size == 128:
        sources.append(proposal.source)
        trials.append(make_trial(len(trials), batch_size=128, state=TrialState.EXHAUSTED, uncapped=True))
        proposal = propose(history(*trials))
    assert sources == ["transfer", "baseline", "sample"]


def test_evidence_that_fails_is_not_tried_for_ever() -> None:
    trials = [default_trial()]
    trials += [make_trial(n, batch_size=16, seconds=1.0) for n in range(1, 4)]
    for n, size in enumerate([8, 8, 32, 64, 64, 128, 128, 128], start=4):
        trials.append(make_trial(n, batch_size=size, seconds=2.0, state=TrialState.CAPPED))
    for _ in range(EVIDENCE_TRIES):
        assert (proposal := propose(history(*trials))) is not None and proposal.batch_size == 128
        trials.append(make_trial(len(trials), batch_size=128, state=TrialState.FAILED, uncapped=True))
    assert (proposal := propose(history(*trials))) is not None and proposal.batch_size != 128


def test_rivals_of_the_optimum_are_tuned_too() -> None:
    trials = [default_trial(seconds=8.0, uncapped=True)]  # batch 32
    trials += [make_trial(n, batch_size=size, seconds=1.0 if size == 8 else 4.0) for n, size in enumerate([8] * 6, 1)]
    trials += [make_trial(n, batch_size=size, seconds=4.0) for n, size in enumerate([16, 16, 32, 64, 64, 128, 128], 7)]
    asked = []
    while (proposal := propose(history(*trials))) is not None and proposal.uncapped:
        asked.append(proposal.batch_size)
        trials.append(make_trial(len(trials), batch_size=proposal.batch_size, seconds=4.0, uncapped=True))
    assert Counter(asked) == {128: EVIDENCE_TRIALS, 32: EVIDENCE_TRIALS - 1}  # the default itself was one


def test_remaining_trials_go_to_the_fastest_batch_sizes() -> None:
    trials = [default_trial(seconds=1.0)]
    for _ in range(60):
        number = len(trials)
        proposal = not_none(propose(history(*trials)))
        slowness = {8: 4.0, 16: 2.0, 32: 1.0, 64: 1.1, 128: 3.0}[proposal.batch_size]
        trials.append(make_trial(number, batch_size=proposal.batch_size, seconds=slowness, uncapped=proposal.uncapped))
    counts = Counter(trial.configuration.batch_size for trial in trials)
    assert counts[32] > counts[16] > counts[8] >= 2
    assert counts[64] > counts[16]
    assert min(counts.values()) >= 2


def test_a_small_budget_still_buys_evidence_before_second_trials() -> None:
    spec = make_spec(budget={"trials": 9, "trial_train_seconds": 10.0})
    trials = [
        default_trial(),
        *(
            make_trial(n, batch_size=size, state=TrialState.CAPPED, seconds=2.0)
            for n, size in enumerate((8, 16, 64, 128), start=1)
        ),
    ]
    proposal = not_none(propose(History(spec, trials, {size: make_probe(size) for size in SIZES})))
    assert (proposal.batch_size, proposal.uncapped) == (128, True)


def ladder(quick: QuickAnswer | None, *, at_32: float) -> list[int]:
    """Batch sizes in trial order if the default takes ``at_32`` seconds and others 3."""
    trials, order = [default_trial(seconds=at_32)], []
    for number in range(1, 10):
        known = history(*trials)
        known.quick = quick
        proposal = not_none(propose(known))
        order.append(proposal.batch_size)
        trials.append(make_trial(number, batch_size=proposal.batch_size, seconds=3.0))
    return order


def test_the_ladder_begins_at_the_quick_answer_and_contains_every_batch_size() -> None:
    order = ladder(quick_at(128, 16, 128), at_32=2.0)
    assert order[:4] == [128, 64, 16, 8]
    assert Counter([32, *order]) == dict.fromkeys(SIZES, 2)


def test_a_quick_answer_reduces_the_evidence_for_unlikely_batch_sizes_unless_the_best_trial_contradicts() -> None:
    def evidence(quick: QuickAnswer | None) -> Counter[int]:
        trials = [default_trial(seconds=1.0, uncapped=True)]
        while True:
            known = history(*trials)
            known.quick = quick
            proposal = propose_evidence(known)
            if proposal is None:
                return Counter(trial.configuration.batch_size for trial in trials[1:])
            trials.append(make_trial(len(trials), batch_size=proposal.batch_size, seconds=3.0, uncapped=True))

    assert evidence(None) == {8: EVIDENCE_TRIALS, 128: EVIDENCE_TRIALS}
    assert evidence(quick_at(32, 16, 64)) == {8: RULED_OUT_TRIALS, 128: EVIDENCE_TRIALS}
    assert evidence(quick_at(128, 64, 128)) == evidence(None)


LISTS = {
    "batch_size": [8, 16, 64],
    "learning_rate": [0.03, 0.1, 0.3],
    "weight_decay": 0.0,
    "dropout": [0.0, 0.1],
}


def grid(**changes: Any) -> MadeUpStudy:
    default = {"batch_size": 16, "learning_rate": 0.1, "dropout": 0.0}
    return MadeUpStudy(study_spec("grid", **{"space": LISTS, "default": default, **changes}))


def ending(study: MadeUpStudy) -> str | None:
    return study.sampler.ending(study.history)


@pytest.fixture
def study() -> MadeUpStudy:
    return grid()


def test_a_grid_is_tried_whole_once_and_then_says_so(study: MadeUpStudy) -> None:
    tried = [study.step().configuration for _ in range(18)]
    assert tried[0] == study.spec.default_configuration
    assert len({configuration.key for configuration in tried}) == 18
    assert {one.batch_size for one in tried[:8]} == {8, 16, 64}, "in no order"
    assert study.choose() is None
    assert ending(study) == "trials ran all 18 combinations of the grid"
    assert study.restarted().choose() is None


def test_at_a_batch_size_it_has_an_end_too(study: MadeUpStudy) -> None:
    while (choice := study.choose(batch_size=64)) is not None:
        assert choice.configuration.batch_size == 64
        study.run(choice)
    assert len(study.trials) == 6
    assert ending(study) is None
    assert study.choose() is not None


def test_a_lost_or_out_of_memory_combination_is_tried_again_but_a_failed_one_is_not(
    study: MadeUpStudy,
) -> None:
    study.step()
    again = study.step(TrialState.LOST).configuration
    assert study.step(TrialState.OOM).configuration == again
    assert study.step().configuration == again
    assert study.step(TrialState.FAILED).configuration not in [study.step().configuration for _ in range(15)]
    assert study.choose() is None


def test_combinations_that_do_not_fit_are_excluded_until_they_do(study: MadeUpStudy) -> None:
    probes = study.history.probes
    study.history.probes = {size: probe for size, probe in probes.items() if size != 64}
    assert 64 not in [study.step().configuration.batch_size for _ in range(12)]
    assert study.choose() is None
    assert ending(study) == "trials ran all 12 combinations of the grid at feasible batch sizes"
    study.history.probes = probes
    assert not_none(study.choose()).configuration.batch_size == 64
    assert ending(study) is None


def test_unused_parameters_do_not_distinguish_combinations() -> None:
    space = {
        "batch_size": [8, 16],
        "learning_rate": 0.1,
        "optimizer": [{"name": "sgd", "momentum": [0.8, 0.9]}, {"name": "adamw"}],
    }
    study = grid(space=space, default={"batch_size": 8, "learning_rate": 0.1, "optimizer": {"name": "adamw"}})
    while (choice := study.choose()) is not None:
        study.run(choice)
    assert len(study.trials) == 6, "AdamW once, SGD with either momentum, at two batch sizes"
    assert ending(study) == "trials ran all 6 combinations of the grid"


def test_a_space_with_a_range_or_too_many_combinations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="cannot use the ranges of learning_rate, dropout"):
        make_sampler(study_spec("grid"))
    monkeypatch.setattr("bssearch.search.samplers.base.MOST_CELLS", 5)
    with pytest.raises(UsageError, match="6 combinations at each batch size, more than 5"):
        grid()


# The time model -------------------------------------------------------------------------------------------------------


PRUNED, REACHED, RUNNING = TrialState.PRUNED, TrialState.REACHED, TrialState.RUNNING


def study_of(**changes: Any) -> MadeUpStudy:
    return MadeUpStudy(study_spec("auto", **changes), seconds_near_64, step_time=step_seconds_near_64)


@pytest.mark.parametrize("state", [TrialState.LOST, TrialState.CANCELLED, TrialState.FAILED, TrialState.OOM])
def test_missing_and_out_of_memory_trials_are_no_evidence(state: TrialState) -> None:
    """A good and a bad missing trial lead to the same choice."""
    chosen = []
    for batch_size, rate, seconds in ((128, 0.4, 0.1), (16, 0.02, 50.0)):
        study = study_of()
        study.step()
        study.step()
        sampled = {"reference_learning_rate": rate, "weight_decay": 1e-4, "dropout": 0.3}
        study.run(Choice(study.spec.space.decode(batch_size, sampled), sampled), state, seconds)
        chosen.append(not_none(study.choose()))
    one, other = chosen
    # numpy 1.26 rounds the same sums differently
    assert other.expected_improvement == pytest.approx(one.expected_improvement, rel=1e-12)
    assert other == replace(one, expected_improvement=other.expected_improvement)


@pytest.mark.parametrize(
    ("space", "default"),
    [
        ({"batch_size": [8, 64], "learning_rate": 0.1}, {"batch_size": 8, "learning_rate": 0.1}),
        ({"batch_size": 64, "learning_rate": [0.03, 0.1, 0.3]}, {"batch_size": 64, "learning_rate": 0.1}),
        (
            {"batch_size": [8, 64], "learning_rate": [0.1, 0.3], "dropout": [0.0, 0.1]},
            {"batch_size": 8, "learning_rate": 0.1, "dropout": 0.0},
        ),
        (
            {
                "batch_size": {"low": 8, "high": 64},
                "learning_rate": {"low": 0.01, "high": 1.0},
                "optimizer": [{"name": "sgd"}, {"name": "adamw", "learning_rate_scale": 0.01, "beta2": [0.99, 0.999]}],
                "schedule": {"name": ["constant", "cosine"], "horizon_samples": {"low": 1000, "high": 10000}},
            },
            {
                "batch_size": 8,
                "learning_rate": 0.1,
                "optimizer": {"name": "sgd"},
                "schedule": "cosine",
                "horizon_samples": 2000,
            },
        ),
        (
            {
                "batch_size": {"low": 8, "high": 64},
                "learning_rate": {"low": 0.01, "high": 1.0},
                "clip_norm": {"low": 0.1, "high": 10.0},
            },
            {"batch_size": 16, "learning_rate": 0.1, "clip_norm": 1.0},
        ),
        (
            {"batch_size": [8, 64], "learning_rate": {"low": 0.01, "high": 1.0}, "weight_decay": [0.0, 1e-4]},
            {"batch_size": 24, "learning_rate": 5.0, "weight_decay": 1e-3, "clip_norm": 1.0},
        ),
        (
            {"batch_size": [8, 64], "learning_rate": {"low": 0.01, "high": 1.0}, "optimizer": {"name": "sgd"}},
            {"batch_size": 8, "learning_rate": 0.001, "optimizer": {"name": "adamw"}},
        ),
    ],
    ids=["rate fixed", "one batch size", "lists", "categories", "clip_norm", "default outside", "other optimizer"],
)
def test_spaces_of_every_shape_can_be_searched(space: dict[str, Any], default: dict[str, Any]) -> None:
    study = study_of(space=space, default=default)
    assert study.step().configuration == study.spec.default_configuration
    for state in (RUNNING, PRUNED, TrialState.DIVERGED, REACHED, TrialState.CAPPED, REACHED, REACHED):
        choice = study.step(state)
        assert study.spec.space.outside(choice.configuration) == []
        assert (
            study.spec.space.decode(choice.configuration.batch_size, not_none(choice.sampled)) == choice.configuration
        )


def test_a_default_outside_the_space_is_followed_by_the_nearest_size_inside() -> None:
    space = {"batch_size": [8, 64], "learning_rate": [0.01, 0.03, 0.1, 0.3], "weight_decay": [0.0, 1e-4, 1e-3]}
    study = study_of(space=space, default={"batch_size": 48, "learning_rate": 0.09, "weight_decay": 9e-4})
    first, second = study.step(), study.step()
    assert first.sampled is None
    assert second.configuration.batch_size == 64
    assert second.sampled == {"reference_learning_rate": 0.1, "weight_decay": 1e-3}


def test_what_it_expects_falls_as_more_is_known_and_all_batch_sizes_contend_before_a_hit() -> None:
    study = study_of()
    study.step(TrialState.EXHAUSTED)
    assert study.sampler.contenders(study.history) == [8, 16, 32, 64, 128]
    study.step()
    first, expected = study.choose(), []
    for _ in range(20):
        expected.append(study.step().expected_improvement)
    assert first is not None and first.expected_improvement is not None
    assert 0 <= not_none(expected[-1]) < 0.1 * first.expected_improvement
    contenders = study.sampler.contenders(study.history)
    assert 64 in contenders
    assert 8 not in contenders


def with_noise(number: int, scale: float | None, adam: float | None = None, **changes: Any) -> TrialRecord:
    return make_trial(number, noise=GradientNoise(scale=scale, adam_scale=adam), **changes)


@pytest.mark.parametrize(
    ("trials", "scale"),
    [
        ([with_noise(1, 10.0), with_noise(2, 90.0), with_noise(3, 20.0)], 20.0),
        ([with_noise(1, 10.0, 50.0)], 50.0),
        ([with_noise(1, None, 50.0), with_noise(2, 30.0)], 40.0),
        ([with_noise(1, None), with_noise(2, 30.0)], 30.0),
        ([with_noise(1, 0.0), with_noise(2, 30.0)], 30.0),
        ([with_noise(1, None)], None),
        ([with_noise(1, 30.0, state=TrialState.CAPPED)], None),
        ([], None),
    ],
)
def test_the_noise_scale_is_the_median_over_trials_that_reached(trials: list[TrialRecord], scale: float | None) -> None:
    assert _noise_scale(History(study_spec("auto"), trials)) == scale


def test_a_quick_answer_gives_the_noise_scale_until_trials_measure_it() -> None:
    quick = quick_at(64, 32, 128, noise_scale=500.0)
    before, after = History(study_spec("auto")), History(study_spec("auto"), [with_noise(1, 30.0)])
    before.quick = after.quick = quick
    assert (_noise_scale(before), _noise_scale(after)) == (500.0, 30.0)


@pytest.mark.parametrize(("size", "noise"), [(8, 4.0), (512, 4000.0)])
def test_a_quick_answer_that_is_far_off_is_overcome_by_the_trials(size: int, noise: float) -> None:
    """The optimum is at batch 64; trials find it despite a wrong quick answer."""
    study = study_of()
    study.history.quick = quick_at(size, size, size, noise_scale=noise)
    for _ in range(25):
        study.step()
    best = [Configuration(batch_size=size, micro_batch_size=size, learning_rate=0.2) for size in study.spec.batch_sizes]
    assert study.history.value(study.history.incumbent) == pytest.approx(min(map(seconds_near_64, best)), rel=0.05)
    assert {trial.configuration.batch_size for trial in study.trials} >= {32, 64, 128}


@pytest.mark.parametrize(
    ("known", "size", "seconds"),
    [
        ({8: 1.0, 16: 1.2, 32: 1.6}, 16, 1.2),
        ({8: 1.0, 16: 1.2}, 128, 4.0),
        ({16: 1.2, 128: 6.0}, 72, (1.2 + 6.0) / 2),
        ({32: 1.6}, 64, 1.6),
        ({8: 1.0, 16: 0.9}, 1024, 1.0),
        ({8: 1.0, 16: 2.0}, 1, SLOWEST_FALL),
    ],
    ids=["known", "beyond", "between", "one alone", "no line falls", "not below a share of the next"],
)
def test_an_unknown_step_time_lies_on_the_line_through_its_neighbours(
    known: dict[int, float], size: int, seconds: float
) -> None:
    assert step_seconds_at(known, size) == pytest.approx(seconds)


MOST = 128


def run(point: int, *points: tuple[float, float], hit: float | None = None, **changes: bool) -> Run:
    """An ended trial with evaluations at (train seconds, gain)."""
    progress = Progress()
    for train_seconds, gain in points:
        progress.add(train_seconds, gain)
    return Run(point, progress, hit=hit, **{"running": False, **changes})


def line(point: int, seconds: float, until: float = 1.0, **changes: bool) -> Run:
    """A trial that rises evenly to 1 at ``seconds``, run to the share ``until``."""
    shares = np.linspace(0.0, until, 11).tolist()
    return run(point, *((seconds * share, share) for share in shares), hit=seconds if until == 1.0 else None, **changes)


def seen(*runs: Run, most: int = MOST) -> Extrapolation:
    return not_none(extrapolate(runs, 1.0, most))


def test_the_time_of_a_hit_is_known_exactly() -> None:
    found = seen(line(0, 10.0), line(1, 20.0))
    assert np.exp(found.log_seconds) == pytest.approx([10.0, 20.0])
    assert found.variance.tolist() == [0.0, 0.0]
    assert not found.is_bound.any()
    assert found.points.tolist() == [0, 1]


@pytest.mark.parametrize("running", [False, True])
def test_a_stopped_trial_is_estimated_by_its_pace_with_more_error_the_earlier_it_stopped(running: bool) -> None:
    found = seen(line(0, 10.0), line(1, 20.0, until=0.8, running=running), line(2, 20.0, until=0.2, running=running))
    assert np.exp(found.log_seconds[1:]) == pytest.approx([20.0, 20.0])
    assert 0 < found.variance[1] < found.variance[2]
    assert found.variance[2] == pytest.approx((found.error * math.log(5)) ** 2)
    assert not found.is_bound.any()


def test_what_is_far_behind_takes_at_least_so_long() -> None:
    found = seen(line(0, 10.0), line(1, 100.0, until=0.3))
    assert found.is_bound.tolist() == [False, True]
    assert math.exp(found.log_seconds[1]) == pytest.approx(WORST * 10.0)
    assert found.variance[1] >= BOUND_DEVIATION**2


def test_a_capped_trial_close_to_the_target_takes_longer_than_its_cap() -> None:
    found = seen(line(0, 10.0), run(1, (0.0, 0.0), (5.0, 0.97), (9.0, 0.97), (10.0, 0.97), (13.0, 0.97)))
    assert found.is_bound.tolist() == [False, True]
    assert math.exp(found.log_seconds[1]) == pytest.approx(13.0), "its pace alone says 11"


def test_a_diverged_trial_takes_longer_than_any_even_without_a_curve() -> None:
    found = seen(line(0, 10.0), run(1, diverged=True), run(2, (1.0, 0.9), diverged=True))
    assert found.points.tolist() == [0, 1, 2]
    assert found.is_bound.tolist() == [False, True, True]
    assert np.exp(found.log_seconds[1:]) == pytest.approx([60.0, 60.0])


def test_a_trial_without_steps_or_with_only_nan_is_no_evidence() -> None:
    silent = [run(1), run(2, (0.0, 0.1)), run(3, (1.0, math.nan), (2.0, math.nan))]
    assert seen(line(0, 10.0), *silent).points.tolist() == [0]
    assert extrapolate(silent, 1.0, MOST) is None


def test_a_gain_that_is_not_a_number_hides_no_other() -> None:
    """Neither as a winner's first gain nor in the level of chance."""
    winner = run(0, (0.0, math.nan), (2.0, 0.2), (6.0, 0.6), (10.0, 1.0), hit=10.0)
    found = seen(winner, run(1, (0.0, 0.01), (1.0, 0.01)), line(2, 20.0, until=0.5))
    assert np.isfinite(found.log_seconds).all()
    assert math.exp(found.log_seconds[0]) == pytest.approx(10.0)
    assert found.is_bound.tolist() == [False, True, False]


def test_before_the_first_hit_trials_are_compared_with_the_furthest_one() -> None:
    found = seen(line(0, 40.0, until=0.5), line(1, 80.0, until=0.25), line(2, 20.0, until=0.3))
    assert found.log_seconds - found.log_seconds[0] == pytest.approx(np.log([1, 2, 0.5]), abs=0.15)
    assert not found.is_bound.any(), "the first is its own measure, the others are on their way"


def test_a_first_trial_at_chance_is_no_measure() -> None:
    noise = run(0, (0.0, 0.001), (1.0, 0.02), (2.0, 0.02), (3.0, 0.021))
    assert extrapolate([noise], 1.0, MOST) is None
    assert seen(noise, line(1, 40.0, until=0.3)).is_bound.tolist() == [True, False]


def test_each_winner_counts_once_in_the_error_as_all_the_others_predict_it() -> None:
    """Straight lines predict each other exactly, so only their number changes the prior's weight of 4."""
    for winners in (2, 3, 5):
        found = seen(*(line(number, 10.0 + 5 * number) for number in range(winners)))
        assert found.error == pytest.approx(ERROR * math.sqrt(4 / (4 + winners)))
    assert seen(line(0, 10.0)).error == ERROR, "a winner alone has no others"


def test_only_the_twelve_fastest_winners_count() -> None:
    late = run(99, (0.0, 0.0), (500.0, 0.0), (1000.0, 1.0), hit=1000.0)
    alike = [line(number, 10.0 + number) for number in range(12)]
    stopped = line(50, 20.0, until=0.5)
    assert seen(*alike, late, stopped).log_seconds[-1] == pytest.approx(math.log(20.0))
    assert seen(*alike[:11], late, stopped).log_seconds[-1] != pytest.approx(math.log(20.0), abs=1e-3)


@pytest.mark.parametrize("count", [8, 9, 15, 16, 17, 40, 100])
def test_no_more_different_points_are_kept_than_asked_for(count: int) -> None:
    kept = set(seen(*(line(point, 10.0 + point) for point in range(count)), most=16).points.tolist())
    assert len(kept) == min(count, 16)
    assert set(range(min(count, 12))) <= kept, "the best three quarters"


@pytest.mark.parametrize(("lost", "kept"), [(0, 0), (1, 1), (15, 15), (16, 8), (47, 16), (48, 12), (160, 15)])
def test_a_sample_of_diverged_trials_is_enough(lost: int, kept: int) -> None:
    found = seen(line(0, 10.0), *[Run(100 + place, Progress(), running=False, diverged=True) for place in range(lost)])
    assert len(found.points) == 1 + kept <= 1 + MOST // 8
    assert found.variance[1:].tolist() == [BOUND_DEVIATION**2] * kept
    assert found.is_bound[1:].all() and not found.is_bound[0]
    assert np.exp(found.log_seconds[1:]) == pytest.approx([WORST * 10.0] * kept)


@pytest.mark.parametrize(("seconds", "running", "shows"), [(0.9, True, False), (1.1, True, True), (0.9, False, True)])
def test_a_trial_under_way_shows_something_from_a_tenth_of_the_fastest_time_on(
    seconds: float, running: bool, shows: bool
) -> None:
    assert (1 in seen(line(0, 10.0), run(1, (0.0, 0.0), (seconds, seconds / 10), running=running)).points) is shows


@pytest.mark.parametrize(("gain", "is_bound"), [(0.04, True), (0.06, False)])
def test_within_a_twentieth_of_the_way_from_the_worst_a_trial_is_at_chance(gain: float, is_bound: bool) -> None:
    assert seen(line(0, 10.0), run(1, (0.0, 0.0), (2.0, gain))).is_bound[1] == is_bound


def test_a_pace_is_that_of_the_evaluations_after_seven_tenths_of_the_time() -> None:
    slow_start = [(0.0, 0.0), (6.9, 0.05), (7.0, 0.35), (10.0, 0.5)]
    assert np.exp(seen(line(0, 10.0), run(1, *slow_start)).log_seconds[1]) == pytest.approx(20.0)
