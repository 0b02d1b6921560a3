"""Which confirmation runs decide: those of configurations that have had theirs, and none of what plainly misses."""

from dataclasses import replace

import pytest
from scipy.stats import binom

from bssearch.analysis.build_answer import build_answer
from bssearch.analysis.objectives import make_objective
from bssearch.analysis.optimum import HALF, begun_late, decide, fewest_runs, plain_misses, plainly_missed
from bssearch.errors import TargetNotReachedError
from bssearch.records import Phase, StudyRecord, Target, TrialRecord, TrialState, at_most
from tests.factories import EPOCH, make_environment, make_probe, make_spec, make_trial, not_none

SIZES = (8, 16, 32, 64, 128)


def runs(batch_size: int, reached: int, missed: int = 0, *, start: int, seconds: float = 1.0) -> list[TrialRecord]:
    """Return confirmation runs numbered from ``start``; those that reach the target come first."""
    return [
        make_trial(
            start + seed,
            batch_size=batch_size,
            seconds=seconds,
            phase=Phase.CONFIRM,
            seed=seed,
            state=TrialState.REACHED if seed < reached else TrialState.EXHAUSTED,
            best_metric=0.9 if seed < reached else 0.8,
        )
        for seed in range(reached + missed)
    ]


def searched() -> list[TrialRecord]:
    return [make_trial(n, batch_size=size, seconds=2.0 + n) for n, size in enumerate(SIZES, start=1)]


@pytest.mark.parametrize(("reached", "missed", "is_plain"), [(0, 4, False), (0, 5, True), (1, 6, False), (1, 7, True)])
def test_a_share_is_plainly_below_half_where_its_upper_bound_is(reached: int, missed: int, is_plain: bool) -> None:
    found = plain_misses(runs(32, reached, missed, start=1))
    assert bool(found) is is_plain
    count = reached + missed
    assert bool(binom.cdf(reached, count, HALF) < 0.05) is is_plain, "as little as that is rarer than one in twenty"
    if found:
        assert f"{reached} of {count} runs" in plainly_missed(found[0])
        assert binom.cdf(reached, count, at_most(reached, count)) == pytest.approx(0.05), "Clopper & Pearson"


def test_what_says_nothing_of_a_configuration_is_no_miss_and_a_seed_counts_once() -> None:
    missed = runs(32, 0, 4, start=1)
    lost = [
        replace(missed[0], number=10 + n, seed=10 + n, state=state)
        for n, state in enumerate((TrialState.LOST, TrialState.CANCELLED, TrialState.FAILED, TrialState.OOM))
    ]
    assert plain_misses([*missed, *lost, replace(missed[0], number=20)]) == []
    assert plain_misses([*missed, replace(missed[0], number=21, seed=9)])


def test_a_run_to_the_budget_is_no_miss_where_no_target_ends_it() -> None:
    metric = make_objective("metric_in_budget", Target(metric="accuracy", value=0.9))
    assert plain_misses(runs(32, 0, 9, start=1), metric) == []


def test_what_plainly_misses_needs_no_more_runs() -> None:
    trials = [*runs(32, 9, start=1), *runs(64, 0, 5, start=20)]
    assert fewest_runs(trials, 9) == 9
    assert fewest_runs([*trials, *runs(16, 0, 4, start=40)], 9) == 4


def test_neighbours_that_began_when_all_others_had_their_runs_take_nothing_back_while_they_are_made() -> None:
    finalists = [*runs(32, 3, start=10), *runs(8, 3, start=20, seconds=5.0)]
    for count in (0, 1, 2):
        begun = [
            make_trial(39, batch_size=16, state=TrialState.RUNNING, phase=Phase.CONFIRM, seed=9),
            *runs(64, count, start=30, seconds=0.1),
        ]
        trials = [*searched(), *finalists, *begun]
        assert set(begun_late(trials, 3).values()) == ({16, 64} if count else {16})
        found = not_none(decide(trials, 3))
        assert found.confirmed and found.optimal.configuration.batch_size == 32
        assert not found.by_batch[64].is_confirmed, "what it has so far does not count"
    whole = not_none(decide([*searched(), *finalists, *runs(64, 3, start=30, seconds=0.1)], 3))
    assert whole.optimal.configuration.batch_size == 64


@pytest.mark.parametrize(
    ("begun", "confirmation_runs", "why"),
    [
        (runs(64, 2, start=11), 3, "it began before the others had had their runs"),
        (runs(128, 2, start=30), 3, "it lies not beside what is recommended"),
        (runs(64, 2, start=30), 7, "the others have not had all of theirs"),
    ],
)
def test_a_finalist_half_confirmed_takes_the_verdict_back(
    begun: list[TrialRecord], confirmation_runs: int, why: str
) -> None:
    others = [replace(trial, number=number) for trial, number in zip(runs(32, 3, start=1), (10, 15, 20), strict=True)]
    assert not not_none(decide([*searched(), *others, *begun], confirmation_runs)).confirmed, why


def test_with_one_run_each_nothing_tells_neighbours_from_finalists() -> None:
    running = make_trial(30, batch_size=64, state=TrialState.RUNNING, phase=Phase.CONFIRM)
    assert not not_none(decide([*searched(), *runs(32, 1, start=10), running], 1)).confirmed


def answer_of(trials: list[TrialRecord], runs_asked_for: int = 3) -> set[str]:
    spec = make_spec(confirm={"runs": runs_asked_for})
    study = StudyRecord.created(spec.new_study("tester"), EPOCH, make_environment())
    found = build_answer(study, spec, trials, {size: make_probe(size) for size in SIZES})
    return {notice.code for notice in found.warnings}


def test_the_answer_says_that_neighbours_are_being_confirmed_and_stays_confirmed() -> None:
    codes = answer_of([*searched(), *runs(32, 3, start=10), *runs(64, 1, start=30)])
    assert codes & {"confirmation_incomplete", "unconfirmed"} == {"confirmation_incomplete"}


def test_the_answer_says_whose_confirmation_was_stopped_and_not_that_it_is_incomplete() -> None:
    codes = answer_of([*searched(), *runs(32, 9, start=10), *runs(64, 0, 5, start=30)], runs_asked_for=9)
    assert codes & {"confirmation_stopped", "confirmation_incomplete"} == {"confirmation_stopped"}


def test_one_hit_and_nine_misses_give_the_share_of_all_ten() -> None:
    with pytest.raises(TargetNotReachedError, match=r"\(batch 32\) does in 1 of 10 runs; at most one run in 2\.5 does"):
        answer_of(
            [make_trial(1, batch_size=32), *[replace(one, seed=100 + one.seed) for one in runs(32, 0, 9, start=2)]]
        )
