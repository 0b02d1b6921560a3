"""The gap between batch sizes trained to the same limit, and whether more regularisation closed it."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from bssearch.analysis.build_answer import build_answer
from bssearch.analysis.certainty import TUNING_GAP, heights
from bssearch.analysis.generalisation import Generalisation, generalisation, notable_gap
from bssearch.analysis.notices import about_generalisation
from bssearch.analysis.optimum import Verdict, decide
from bssearch.records import Configuration, Goal, Phase, Target, TrialRecord, TrialState
from tests.analysis.test_report import study
from tests.factories import make_probe, make_spec, make_trial, not_none, with_outcome

ACCURACY = Target(metric="accuracy", value=0.9)
LOSS = Target(metric="loss", value=2.0, goal=Goal.MINIMIZE)
LIMIT = 10.0


def at(size: int, **changes: Any) -> Configuration:
    return Configuration(batch_size=size, micro_batch_size=size, learning_rate=0.1, **changes)


def to_budget(configuration: Configuration, *finals: float, start: int = 100, **changes: Any) -> list[TrialRecord]:
    """Return runs that reached the target on the way and went on to their limit."""
    values: dict[str, Any] = {"phase": Phase.TO_BUDGET, "uncapped": True, "seconds": LIMIT, "test_metric": finals[0]}
    changes = {"configuration": configuration, **values, **changes}
    return [
        with_outcome(make_trial(start + seed, seed=seed, **changes), final_metric=final)
        for seed, final in enumerate(finals)
    ]


def found(*audits: list[TrialRecord], target: Target = ACCURACY) -> Generalisation | None:
    trials = [one for group in audits for one in group]
    searched = [
        make_trial(n, configuration=next(one.configuration for one in trials if one.configuration.batch_size == size))
        for n, size in enumerate(sorted({one.configuration.batch_size for one in trials}))
    ]
    return generalisation(trials, not_none(decide([*searched, *trials], 3)), target)


def test_without_runs_to_the_full_limit_there_is_nothing_to_say() -> None:
    for runs in (
        to_budget(at(32), 0.9, 0.9, 0.9, phase=Phase.AUDIT, seconds=2.0),
        to_budget(at(32), 0.8, 0.8, 0.8, phase=Phase.AUDIT, state=TrialState.EXHAUSTED),
        to_budget(at(64), 0.1, state=TrialState.DIVERGED),
        [replace(to_budget(at(32), 0.9)[0], state=TrialState.RUNNING)],
    ):
        assert found(runs) is None


def test_while_a_run_to_another_limit_has_no_end_the_earlier_limit_counts() -> None:
    running = replace(to_budget(at(16), 0.95, start=300)[0], state=TrialState.RUNNING, outcome=None)
    longer = replace(running, train_seconds_limit=2 * LIMIT)
    answer = not_none(found(to_budget(at(16), 0.95, 0.96, 0.94), to_budget(at(128), 0.95, start=200), [longer]))
    assert (answer.train_seconds, len(answer.batches)) == (LIMIT, 2)


def test_that_something_else_used_the_device_is_said() -> None:
    answer = not_none(
        found(to_budget(at(16), 0.95, 0.96, 0.94), to_budget(at(128), 0.95, 0.95, 0.95, contended=True, start=200))
    )
    assert [row.contended for row in answer.batches] == [0, 3]
    (notice,) = about_generalisation(answer, ACCURACY)
    assert notice.code == "generalisation_contended"
    assert notice.message.startswith("3 of 6 runs of 10 s shared the device with other work")


def test_the_gap_is_to_the_best_batch_size_with_welchs_interval() -> None:
    answer = not_none(found(to_budget(at(16), 0.95, 0.96, 0.94), to_budget(at(128), 0.91, 0.92, 0.90, start=200)))
    assert (answer.train_seconds, answer.best_batch_size, answer.notable_gap) == (LIMIT, 16, 0.02)
    best, largest = answer.batches
    assert (best.runs, best.final_metric, best.test_metric, best.gap) == (3, 0.95, 0.95, None)
    assert (largest.final_metric, largest.trial_numbers) == (0.91, [200, 201, 202])
    gap = not_none(largest.gap)
    # Two sides of three runs with s = 0.01: 0.04 ± t(4) 0.01 √(2/3), t(4) = 2.776445
    assert (gap.value, gap.low, gap.high) == pytest.approx((0.04, 0.0173302, 0.0626698), abs=1e-6)
    codes = about_generalisation(answer, ACCURACY)
    assert [notice.code for notice in codes] == ["generalisation_gap"]
    assert codes[0].message == (
        "after 10 train seconds, batch 128 reaches accuracy 0.91, 0.04 worse than batch 16 "
        "(95 % interval [0.0173, 0.0627] excludes 0). Retune dropout, weight decay and label smoothing at batch 128, "
        "or use batch 16 or less"
    )


def test_worse_is_positive_where_less_is_better_too() -> None:
    answer = not_none(
        found(to_budget(at(16), 1.5, 1.5, 1.5), to_budget(at(128), 1.6, 1.6, 1.6, start=200), target=LOSS)
    )
    gap = not_none(answer.batches[1].gap)
    assert (gap.value, gap.low, gap.high) == pytest.approx((0.1, 0.1, 0.1))
    assert answer.best_batch_size == 16
    assert answer.notable_gap == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("target", "metrics", "expected"),
    [
        (ACCURACY, [0.95, 0.99], 0.02),
        (replace(ACCURACY, metric="bleu", value=30.0), [31.0], 0.6),
        (replace(ACCURACY, value=0.9), [0.95, 1.2], 0.018),
        (replace(LOSS, value=0.3), [0.29], 0.006),
        (replace(ACCURACY, metric="log_likelihood", value=-50.0), [-49.0], 1.0),
    ],
)
def test_two_points_are_of_a_bounded_metric_else_of_the_target(
    target: Target, metrics: list[float], expected: float
) -> None:
    assert notable_gap(target, metrics) == pytest.approx(expected)


def test_a_gap_within_two_points_is_no_warning_and_below_three_runs_it_has_no_interval() -> None:
    small = found(to_budget(at(16), 0.95, 0.95), to_budget(at(64), 0.94, 0.93, start=200))
    assert about_generalisation(small, ACCURACY) == []
    large = not_none(found(to_budget(at(16), 0.95, 0.95), to_budget(at(64), 0.92, 0.92, start=200)))
    assert not_none(large.batches[1].gap).low is None
    assert "(no interval, because a batch size has fewer" in about_generalisation(large, ACCURACY)[0].message


@pytest.mark.parametrize(("regularised", "closed"), [(0.945, True), (0.92, False)])
def test_whether_more_regularisation_closed_the_gap_of_the_largest(regularised: float, closed: bool) -> None:
    trials = [to_budget(at(32, dropout=0.2), *[0.95] * 3), to_budget(at(128, dropout=0.2), *[0.91] * 3, start=200)]
    answer = not_none(found(*trials, to_budget(at(128, dropout=0.4, weight_decay=1e-3), *[regularised] * 3, start=300)))
    assert answer.closed is closed
    assert [row.batch_size for row in answer.batches] == [32, 128]
    more = not_none(answer.more_regularised)
    assert (more.parameters["dropout"], more.final_metric) == (0.4, regularised)
    assert not_none(more.gap).value == pytest.approx(0.95 - regularised)
    how = "More regularisation (weight_decay 0.001, dropout 0.4)"
    verb = (
        f"closes the gap (accuracy {regularised:g}); use this regularisation at batch 128, or use"
        if closed
        else "does not close the gap"
    )
    assert f"{how} {verb}" in about_generalisation(answer, ACCURACY)[0].message  # fmt: skip


def test_where_there_is_no_gap_regularisation_closes_none() -> None:
    harder = to_budget(at(128, dropout=0.4), *[0.97] * 3, start=300)
    answer = not_none(found(to_budget(at(32), *[0.95] * 3), to_budget(at(128), *[0.945] * 3, start=200), harder))
    assert answer.closed is None
    assert not_none(not_none(answer.more_regularised).gap).value == pytest.approx(-0.02)


def test_runs_that_ended_before_their_limit_are_counted_and_left_out() -> None:
    diverged = to_budget(at(128), 0.2, 0.1, start=200, seconds=4.0)  # after the target
    early = [replace(one, seed=7 + one.seed) for one in diverged]
    answer = not_none(found(to_budget(at(128), 0.94, 0.95, 0.93), early, to_budget(at(16), 0.9, 0.9, 0.9, start=300)))
    assert [(row.runs, row.ended_early, row.final_metric) for row in answer.batches] == [(3, 0, 0.9), (3, 2, 0.94)]


def test_a_schedule_that_ended_and_a_target_that_was_missed_are_ends_too() -> None:
    decaying = at(32, parameters={"schedule": "cosine", "horizon_samples": 3200})
    short = to_budget(decaying, 0.95, 0.95, 0.95, seconds=3.0, samples=3200)
    missed = to_budget(at(128), 0.85, 0.85, 0.85, start=200, state=TrialState.EXHAUSTED)
    assert [row.runs for row in not_none(found(short, missed)).batches] == [3, 3]
    assert found(to_budget(decaying, 0.95, seconds=3.0, samples=3100)) is None


def test_only_runs_of_the_newest_limit_are_compared() -> None:
    old = [replace(trial, train_seconds_limit=5.0) for trial in to_budget(at(16), 0.8, 0.8, seconds=5.0)]
    answer = not_none(found(old, to_budget(at(128), 0.9, 0.9, start=200)))
    assert [row.batch_size for row in answer.batches] == [128]


def test_the_answer_holds_it_and_warns_and_for_an_easier_target_it_does_not() -> None:
    spec = make_spec(budget={"trials": 20, "trial_train_seconds": LIMIT})
    trials = [
        make_trial(1, configuration=at(16), seconds=1.0),
        make_trial(2, configuration=at(64), seconds=2.0),
        *to_budget(at(16), 0.95, 0.95, 0.95),
        *to_budget(at(64), 0.91, 0.91, 0.91, start=200),
    ]
    probes = {size: make_probe(size) for size in (16, 64)}
    answer = build_answer(study(spec), spec, trials, probes)
    assert [row.batch_size for row in not_none(answer.generalisation).batches] == [16, 64]
    assert "generalisation_gap" in {notice.code for notice in answer.warnings}
    assert answer.optimal.trial_numbers == [1]
    easier = replace(study(spec), target=replace(spec.record_target, value=0.8))
    assert build_answer(easier, spec, trials, probes).generalisation is None
    assert build_answer(study(spec), spec, trials[:2], probes).generalisation is None


CURVATURE = 0.1
SIZES = (16, 32, 64, 128)


def seconds(size: int, rate: float, power: float = 0.5, noise: float = 0.0) -> float:
    off = math.log2(rate) - math.log2(0.1) - power * (math.log2(size) - 5)
    return math.exp(CURVATURE * off**2 + noise) * (1 + 100 / size)


def search(rates: Mapping[int, Sequence[float]], noise: float = 0.02) -> list[TrialRecord]:
    rng = random.Random(0)
    return [
        make_trial(n, batch_size=size, learning_rate=rate, seconds=seconds(size, rate, noise=rng.gauss(0, noise)))
        for n, (size, rate) in enumerate([(size, rate) for size, some in rates.items() for rate in some])
    ]


def verdict_over(trials: list[TrialRecord]) -> Verdict:
    slowest_first = sorted(trials, key=lambda one: -(one.outcome.time_to_target_s or math.inf) if one.outcome else 0)
    best = {trial.configuration.batch_size: trial for trial in slowest_first}
    runs = [
        replace(trial, number=1000 * size + seed, phase=Phase.CONFIRM, seed=seed)
        for size, trial in best.items()
        for seed in range(3)
    ]
    return not_none(decide([*trials, *runs], 3))


def mean_heights(trials: list[TrialRecord], verdict: Verdict | None = None) -> dict[int, float]:
    over = verdict or verdict_over(trials)
    means, covariances = heights(over, trials, [one.configuration for one in over.by_batch.values()])
    assert means.any() == covariances.any()
    return dict(zip(over.by_batch, means.tolist(), strict=True)) if means.any() else {}


def test_a_batch_size_that_was_only_tried_far_from_the_bottom_lies_above_it() -> None:
    bottom = {size: 0.1 * (size / 32) ** 0.5 for size in SIZES}
    around = (0.25, 0.5, 1.0, 2.0, 4.0)
    rates = {size: tuple(bottom[size] * factor for factor in around) for size in SIZES}
    rates[64] = (bottom[64] / 8, bottom[64] / 4)
    found = mean_heights(search(rates))
    assert found[64] == pytest.approx(CURVATURE * 4, abs=0.12)
    assert max(found[size] for size in SIZES if size != 64) < 0.03


def test_with_little_to_see_the_best_is_taken_to_be_tuned_about_as_well_as_searches_do() -> None:
    rates = {size: (0.1 * (size / 32) ** 0.5, 0.12) for size in SIZES}
    assert all(0 < height < TUNING_GAP for height in mean_heights(search(rates, noise=0.2)).values())


def test_too_few_trials_show_no_valley() -> None:
    assert mean_heights(search({16: (0.05, 0.1), 32: (0.1, 0.2), 64: (0.1,)})) == {}
    same = search({size: (0.1,) for size in SIZES})
    assert mean_heights([*same, *(replace(one, number=one.number + 50, seed=9) for one in same)]) == {}


def test_trials_of_another_optimizer_say_nothing() -> None:
    trials = search({size: (0.05, 0.1, 0.2) for size in SIZES})
    other = [
        replace(one, number=500 + one.number, configuration=replace(one.configuration, optimizer="adamw"))
        for one in search({32: (1e-4, 1e-3, 1e-2)})
    ]
    verdict = verdict_over(trials)
    assert mean_heights([*trials, *other], verdict) == mean_heights(trials, verdict)


def test_a_trial_that_missed_the_target_for_long_shows_that_the_valley_is_steep() -> None:
    bottom = {size: 0.1 * (size / 32) ** 0.5 for size in SIZES}
    rates: dict[int, Sequence[float]] = {size: (bottom[size], 1.1 * bottom[size], 1.2 * bottom[size]) for size in SIZES}
    rates[64] = (2 * bottom[64], 2.1 * bottom[64])
    trials = search(rates, noise=0.05)
    watched = [
        make_trial(
            300 + size,
            batch_size=size,
            learning_rate=4 * bottom[size],
            state=TrialState.CAPPED,
            seconds=5 * seconds(size, bottom[size]),
        )
        for size in SIZES
    ]
    verdict = verdict_over(trials)
    assert mean_heights([*trials, *watched], verdict)[64] > 1.5 * mean_heights(trials, verdict)[64]
