"""How sure a recommendation is, against verdicts of runs drawn around known means."""

import math
import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from bssearch.analysis.build_answer import build_answer
from bssearch.analysis.certainty import ENOUGH, Beliefs, Certainty, beliefs
from bssearch.analysis.objectives import make_objective
from bssearch.analysis.optimum import HALF, Verdict, begun_late, decide, fewest_runs, plain_misses, plainly_missed
from bssearch.analysis.posterior import (
    DEPARTURES,
    FREEDOM,
    OCTAVES_BEYOND,
    SHARED,
    SLOPE_WEIGHTS,
    SLOPES,
    Numbers,
    Runs,
    infer,
)
from bssearch.errors import TargetNotReachedError
from bssearch.records import Configuration, Phase, StudyRecord, Target, TrialRecord, TrialState, at_most
from bssearch.records.noise_scale import STEPS_DEVIATION
from tests.factories import EPOCH, make_environment, make_probe, make_spec, make_trial, not_none, with_outcome


def runs(batch_size: int, *seconds: float, start: int = 0, dropout: float | None = None) -> list[TrialRecord]:
    """Confirmation runs; those of equal ``dropout`` have the same sampled values, whatever their batch size."""
    return [
        make_trial(
            start + 10 * batch_size + seed,
            configuration=Configuration(
                batch_size=batch_size, micro_batch_size=batch_size, learning_rate=0.1, dropout=dropout or 0.0
            ),
            seconds=one,
            phase=Phase.CONFIRM,
            seed=seed,
            sampled=None if dropout is None else {"dropout": dropout},
        )
        for seed, one in enumerate(seconds)
    ]


def certainty(
    verdict: Verdict, law: dict[int, float], trials: Sequence[TrialRecord] = (), sizes: Sequence[int] = ()
) -> Certainty | None:
    """Certainty of a verdict; ``law``: figures of one step by batch size."""
    found = believed(verdict, law, trials, sizes)
    return None if found is None else found.certainty()


def believed(
    verdict: Verdict, law: dict[int, float], trials: Sequence[TrialRecord] = (), sizes: Sequence[int] = ()
) -> Beliefs | None:
    return beliefs(verdict, {size: (figure, 0.02) for size, figure in law.items()}, trials, sizes)


def verdict_over(*trials: TrialRecord, confirmation_runs: int = 3) -> Verdict:
    return not_none(decide(list(trials), confirmation_runs))


def spread(seconds: float, apart: float, count: int, turned: int = 0) -> list[float]:
    """Runs around a median, evenly spread on the scale of logarithms with a deviation of ``apart``.

    Of two lists that are ``turned`` differently, the seeds have nothing in common.
    """
    middle = (count - 1) / 2
    scale = apart / math.sqrt(sum((place - middle) ** 2 for place in range(count)) / (count - 1))
    places = [(place * (turned + 1)) % count for place in range(count)]
    return [seconds * math.exp(scale * (place - middle)) for place in places]


def test_far_apart_is_sure_and_near_is_not() -> None:
    far = not_none(certainty(verdict_over(*runs(32, *spread(1.0, 0.05, 5)), *runs(64, *spread(3.0, 0.05, 5))), {}))
    near = not_none(certainty(verdict_over(*runs(32, *spread(1.0, 0.2, 5)), *runs(64, *spread(1.1, 0.2, 5, 1))), {}))
    assert far.within_5_percent > 0.97
    assert 0.4 < near.within_5_percent < ENOUGH


def test_the_memory_of_many_runs_is_bounded() -> None:
    many = verdict_over(*runs(32, *spread(1.0, 0.05, 3000)), *runs(64, *spread(1.2, 0.05, 3000), start=9000))
    tracemalloc.start()
    known = not_none(certainty(many, {}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert known.within_5_percent > 0.99
    assert peak < 150e6


@pytest.mark.parametrize("slower", [1.2, 2.0, 3.0])
def test_a_slow_default_tells_nothing_of_the_level_of_its_batch_size(slower: float) -> None:
    best = [*runs(64, *spread(1.0, 0.05, 5), dropout=0.1), *runs(128, *spread(1.2, 0.05, 5), dropout=0.1)]
    default = runs(64, *spread(slower, 0.05, 5), start=5000, dropout=0.3)
    known = not_none(believed(verdict_over(*best, *default), {}))
    assert (known.recommended, known.share > 0.95) == (64, True)


@pytest.mark.parametrize("carried", [1.2, 2.0])
def test_values_carried_to_a_batch_size_that_they_do_not_suit_do_not_decide(carried: float) -> None:
    best = [*runs(64, *spread(1.0, 0.05, 5), dropout=0.1), *runs(128, *spread(0.85, 0.05, 5), dropout=0.2)]
    known = not_none(believed(verdict_over(*best, *runs(128, *spread(carried, 0.05, 5), start=5000, dropout=0.1)), {}))
    assert (known.recommended, known.share > 0.95) == (128, True)


def test_where_other_hyperparameters_were_searched_more_may_be_hidden() -> None:
    found = verdict_over(*runs(32, *spread(1.0, 0.01, 9)), *runs(64, *spread(1.1, 0.01, 9)))
    rates = [0.01 * 2**octave for octave in range(8)]

    def share(dropouts: tuple[float, float]) -> float:
        searched = [
            make_trial(
                place,
                seconds=1.0,
                configuration=Configuration(
                    batch_size=(32, 64)[place % 2],
                    micro_batch_size=(32, 64)[place % 2],
                    learning_rate=rate,
                    dropout=dropouts[place // 2 % 2],
                ),
            )
            for place, rate in enumerate(rates)
        ]
        return not_none(certainty(found, {}, searched)).within_5_percent

    assert share((0.0, 0.5)) < share((0.0, 0.0))


def test_a_batch_size_that_was_not_confirmed_counts_by_its_one_trial() -> None:
    settled = [*runs(32, *spread(1.0, 0.05, 5)), *runs(64, *spread(3.0, 0.05, 5))]
    rival = make_trial(1, batch_size=128, seconds=0.99)
    alone, beside = certainty(verdict_over(*settled), {}), certainty(verdict_over(rival, *settled), {})
    assert not_none(beside).within_5_percent < ENOUGH <= not_none(alone).within_5_percent


def share_of(own: list[float], other: list[float], dropout: float = 0.1) -> float:
    """Probability of a verdict over batch 32 at dropout 0.1, and batch 64."""
    verdict = verdict_over(*runs(32, *own, dropout=0.1), *runs(64, *other, dropout=dropout))
    return not_none(certainty(verdict, {})).within_5_percent


def test_common_seeds_are_compared_seed_by_seed() -> None:
    paired, apart = (share_of(spread(1.0, 0.2, 7), spread(1.1, 0.2, 7, turned)) for turned in (0, 1))
    assert 1 - paired < 0.6 * (1 - apart)


def test_equal_values_compare_batch_sizes_whatever_better_values_would_gain() -> None:
    equal, unlike = (share_of(spread(1.0, 0.1, 7), spread(1.15, 0.1, 7, 1), dropout) for dropout in (0.1, 0.3))
    assert equal > unlike + 0.02


def test_a_lucky_second_configuration_makes_its_batch_size_no_better_than_all_runs_say() -> None:
    own, other = runs(32, *spread(1.0, 0.1, 7), dropout=0.1), runs(64, *spread(1.1, 0.1, 7), dropout=0.1)
    lucky = runs(64, 0.8, 0.97, 1.1, start=2000, dropout=0.3)
    found, without = (not_none(believed(verdict_over(*own, *other, *some), {})) for some in (lucky, []))
    assert (found.best, without.best) == (32, 32)
    assert verdict_over(*own, *other, *lucky).least.configuration.batch_size == 64


def test_the_law_lets_neighbours_tell_of_each_other() -> None:
    """Five sizes on a law whose noise is large: by the law the middle one is the best."""
    rng = random.Random(0)
    law = {16: 2.0, 32: 1.3, 64: 1.0, 128: 1.3, 256: 2.0}
    steps = {size: one / (1 + 64 / size) for size, one in law.items()}
    trials = [
        run
        for turned, (size, one) in enumerate(law.items())
        for run in runs(size, *spread(one * math.exp(rng.gauss(0, 0.02)), 0.35, 5, turned % 4))
    ]
    without, pooled, level = (
        not_none(certainty(verdict_over(*trials), figures)).within_5_percent
        for figures in ({}, steps, {size: 7 * one for size, one in steps.items()})
    )
    assert pooled > without + 0.05
    assert level == pytest.approx(pooled, abs=0.02), "the level does not matter"


def test_the_next_run_is_of_the_recommended_or_its_likeliest_rival() -> None:
    found = not_none(
        believed(
            verdict_over(
                *runs(16, *spread(3.0, 0.2, 5)), *runs(32, *spread(1.0, 0.2, 5, 1)), *runs(64, *spread(1.05, 0.2, 5, 2))
            ),
            {},
        )
    )
    assert {*found.contenders()[:2]} == {32, 64}
    far = believed(verdict_over(*runs(32, *spread(1.0, 0.02, 5)), *runs(64, *spread(3.0, 0.02, 5, 1))), {})
    assert not_none(far).contenders() == []


def test_of_search_trials_alone_nothing_is_sure_and_of_one_size_everything() -> None:
    assert certainty(verdict_over(make_trial(1, seconds=1.0), make_trial(2, batch_size=64)), {}) is None
    assert not_none(certainty(verdict_over(*runs(32, 1.0, 1.1, 0.9)), {})).within_5_percent == 1.0


@pytest.mark.parametrize(
    ("best", "other"),
    [((0.0, 0.0, 0.0), (1.0, 1.2, 1.1)), ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0))],
    ids=["the best took no time", "no spread"],
)
def test_nothing_is_known_without_time_or_spread(best: tuple[float, ...], other: tuple[float, ...]) -> None:
    assert certainty(verdict_over(*runs(32, *best), *runs(64, *other)), {}) is None


def test_a_batch_size_that_was_never_reached_between_two_others_may_be_better() -> None:
    verdict = verdict_over(*runs(32, *spread(1.0, 0.02, 5)), *runs(128, *spread(1.12, 0.02, 5)))
    ladders = (32, 128), (32, 64, 128), (16, 32, 128), (32, 128, 256)
    told = [certainty(verdict, {}, (), sizes) for sizes in ladders]
    whole, gap, beside, far = (0.0 if one is None else one.within_5_percent for one in told)
    assert gap < whole - 0.1
    assert beside < gap, "it lies beside the best"
    assert gap < far < whole
    assert told[1] is not None and told[1].settles == "tuning"


def test_a_batch_size_beyond_is_as_much_worse_as_the_law_says() -> None:
    verdict = verdict_over(*(run for size, one in LAW.items() for run in runs(size, *spread(one, 0.02, 5))))
    shares = [certainty(verdict, {**LAW, 512: one}, (), (*LAW, 512)) for one in (0.7, 1.5)]
    near, far = (0.0 if one is None else one.within_5_percent for one in shares)
    whole = certainty(verdict, LAW)
    assert whole is not None and near < far - 0.1 and far == pytest.approx(whole.within_5_percent, abs=0.01)


LAW = {32: 1.0, 64: 0.9, 128: 0.8, 256: 0.75}


def test_a_batch_size_that_was_stopped_before_the_best_had_reached_may_be_better() -> None:
    known = [*runs(32, *spread(1.0, 0.02, 5)), *runs(64, *spread(1.3, 0.02, 5))]

    def sure(*seconds: float, batch_size: int = 16) -> float:
        stopped = [
            make_trial(900 + place, batch_size=batch_size, state=TrialState.EXHAUSTED, seconds=one)
            for place, one in enumerate(seconds)
        ]
        return not_none(certainty(verdict_over(*known, *stopped), {})).within_5_percent

    assert sure(0.5) < sure() - 0.1
    assert sure(0.5) < sure(1.2), "it needs longer than the best"
    assert sure(0.5, batch_size=128) > sure(0.5), "it lies beside a slower one"
    alone = certainty(
        verdict_over(*known[:5], make_trial(900, batch_size=64, state=TrialState.EXHAUSTED, seconds=0.5)), {}
    )
    assert alone is not None and alone.within_5_percent < 0.9


# The posterior --------------------------------------------------------------------------------------------------------


LOG_SIZES = np.log([16.0, 32, 64, 128, 256])
BASE = np.log(1 + LOG_SIZES)
STEP_ERROR = 0.03
SEEDS = 6


def draw(rng: np.random.Generator, missed_share: float) -> tuple[Numbers, float, Runs]:
    """True levels and log B_crit, and runs; the longest ``missed_share`` of them are censored."""
    beyond = OCTAVES_BEYOND * math.log(2)
    log_b_crit = rng.uniform(LOG_SIZES[0] - beyond, LOG_SIZES[-1] + beyond)
    prior = np.gradient(DEPARTURES) * np.exp(-((DEPARTURES / STEPS_DEVIATION) ** 2) / 2)
    departure = rng.choice(DEPARTURES, p=prior / prior.sum())
    levels = BASE + np.logaddexp(0, log_b_crit - LOG_SIZES) + math.hypot(departure, STEP_ERROR) * rng.normal(size=5)
    weights = SHARED * (1 - SHARED)
    shared, slope = rng.choice(SHARED, p=weights / weights.sum()), rng.choice(SLOPES, p=SLOPE_WEIGHTS)
    scale = 0.2
    scales = scale * np.exp(slope * (LOG_SIZES - LOG_SIZES.mean()))
    effects = math.sqrt(shared) * scale * rng.normal(size=SEEDS)
    own = math.sqrt(1 - shared) * scales[:, None] * rng.standard_t(FREEDOM, size=(5, SEEDS))
    logs = levels[:, None] + effects + own
    limit = np.quantile(logs, 1 - missed_share)
    rows = [
        (place, seed, min(logs[place, seed], limit), 0.0, bool(logs[place, seed] > limit))
        for place in range(5)
        for seed in range(SEEDS)
    ]
    return levels, float(log_b_crit), Runs.of_rows(rows)


@pytest.mark.parametrize("miss", [2.0, 20.0, 60.0])
@pytest.mark.parametrize("noise", [1e-3, 1e-5])
def test_a_run_that_missed_far_above_the_law_counts_with_its_last_miss(miss: float, noise: float) -> None:
    hits = [(0, seed, noise * value, 0.0, False) for seed, value in enumerate((-1, 0, 1))]
    misses = [(1, seed, miss, 0.0, True) for seed in range(2)]
    runs = Runs.of_rows([*hits, *misses, (1, 2, 0.0, 0.0, False)])
    found = infer(runs, np.log([32.0, 64.0]), np.zeros(2), np.full(2, 0.02))
    assert found.levels[:, 1].mean() == pytest.approx(miss, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("missed_share", [0.0, 0.2])
def test_intervals_hold_what_they_promise_over_draws_from_the_prior(missed_share: float) -> None:
    rng, ranks, of_b_crit = np.random.default_rng(5), [], []
    for _ in range(300):
        levels, log_b_crit, runs = draw(rng, missed_share)
        found = infer(runs, LOG_SIZES, BASE, np.full(5, STEP_ERROR))
        drawn = found.levels - found.levels.mean(axis=1, keepdims=True)
        ranks += (drawn < levels - levels.mean()).mean(axis=0).tolist()
        of_b_crit.append(float((found.log_b_crit < log_b_crit).mean()))
    for shares, error in ((np.array(ranks), 0.03), (np.array(of_b_crit), 0.06)):
        inside = {level: np.mean(np.abs(shares - 0.5) < level / 2) for level in (0.5, 0.9)}
        assert inside == pytest.approx({0.5: 0.5, 0.9: 0.9}, abs=error)
        assert shares.mean() == pytest.approx(0.5, abs=error)


@pytest.mark.parametrize(("alone", "settles"), [(0, "idle_machine"), (2, "runs")])
def test_runs_slowed_by_other_work_need_an_idle_machine_unless_some_ran_alone(alone: int, settles: str) -> None:
    def slowed(seconds: float, waits: float, turned: int, batch_size: int) -> list[TrialRecord]:
        made = runs(batch_size, *spread(seconds, 0.05, 12, turned))
        return [
            with_outcome(
                run,
                steps=1000,
                steps_to_target=round(1000 * not_none(not_none(run.outcome).train_seconds)),
                train_seconds=waits,
                undelayed_train_seconds=1.0,
                reference_seconds=1e-4,
                contended=run.seed >= alone,
            )
            for run in made
        ]

    told = not_none(certainty(verdict_over(*slowed(1.0, 1.2, 0, 32), *slowed(1.1, 3.0, 1, 64)), {}))
    assert told.settles == settles
    assert told.within_5_percent < ENOUGH


# Plain misses ---------------------------------------------------------------------------------------------------------


SIZES = (8, 16, 32, 64, 128)


def confirming(
    batch_size: int, reached: int, missed: int = 0, *, start: int, seconds: float = 1.0
) -> list[TrialRecord]:
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
    found = plain_misses(confirming(32, reached, missed, start=1))
    assert bool(found) is is_plain
    count = reached + missed
    assert bool(binom.cdf(reached, count, HALF) < 0.05) is is_plain, "as little as that is rarer than one in twenty"
    if found:
        assert f"{reached} of {count} runs" in plainly_missed(found[0])
        assert binom.cdf(reached, count, at_most(reached, count)) == pytest.approx(0.05), "Clopper & Pearson"


def test_what_says_nothing_of_a_configuration_is_no_miss_and_a_seed_counts_once() -> None:
    missed = confirming(32, 0, 4, start=1)
    lost = [
        replace(missed[0], number=10 + n, seed=10 + n, state=state)
        for n, state in enumerate((TrialState.LOST, TrialState.CANCELLED, TrialState.FAILED, TrialState.OOM))
    ]
    assert plain_misses([*missed, *lost, replace(missed[0], number=20)]) == []
    assert plain_misses([*missed, replace(missed[0], number=21, seed=9)])


def test_a_run_to_the_budget_is_no_miss_where_no_target_ends_it() -> None:
    metric = make_objective("metric_in_budget", Target(metric="accuracy", value=0.9))
    assert plain_misses(confirming(32, 0, 9, start=1), metric) == []


def test_what_plainly_misses_needs_no_more_runs() -> None:
    trials = [*confirming(32, 9, start=1), *confirming(64, 0, 5, start=20)]
    assert fewest_runs(trials, 9) == 9
    assert fewest_runs([*trials, *confirming(16, 0, 4, start=40)], 9) == 4


def test_neighbours_that_began_when_all_others_had_their_runs_take_nothing_back_while_they_are_made() -> None:
    finalists = [*confirming(32, 3, start=10), *confirming(8, 3, start=20, seconds=5.0)]
    for count in (0, 1, 2):
        begun = [
            make_trial(39, batch_size=16, state=TrialState.RUNNING, phase=Phase.CONFIRM, seed=9),
            *confirming(64, count, start=30, seconds=0.1),
        ]
        trials = [*searched(), *finalists, *begun]
        assert set(begun_late(trials, 3).values()) == ({16, 64} if count else {16})
        found = not_none(decide(trials, 3))
        assert found.confirmed and found.optimal.configuration.batch_size == 32
        assert not found.by_batch[64].is_confirmed, "what it has so far does not count"
    whole = not_none(decide([*searched(), *finalists, *confirming(64, 3, start=30, seconds=0.1)], 3))
    assert whole.optimal.configuration.batch_size == 64


@pytest.mark.parametrize(
    ("begun", "confirmation_runs", "why"),
    [
        (confirming(64, 2, start=11), 3, "it began before the others had had their runs"),
        (confirming(128, 2, start=30), 3, "it lies not beside what is recommended"),
        (confirming(64, 2, start=30), 7, "the others have not had all of theirs"),
    ],
)
def test_a_finalist_half_confirmed_takes_the_verdict_back(
    begun: list[TrialRecord], confirmation_runs: int, why: str
) -> None:
    others = [
        replace(trial, number=number) for trial, number in zip(confirming(32, 3, start=1), (10, 15, 20), strict=True)
    ]
    assert not not_none(decide([*searched(), *others, *begun], confirmation_runs)).confirmed, why


def test_with_one_run_each_nothing_tells_neighbours_from_finalists() -> None:
    running = make_trial(30, batch_size=64, state=TrialState.RUNNING, phase=Phase.CONFIRM)
    assert not not_none(decide([*searched(), *confirming(32, 1, start=10), running], 1)).confirmed


def answer_of(trials: list[TrialRecord], runs_asked_for: int = 3) -> set[str]:
    spec = make_spec(confirm={"runs": runs_asked_for})
    study = StudyRecord.created(spec.new_study("tester"), EPOCH, make_environment())
    found = build_answer(study, spec, trials, {size: make_probe(size) for size in SIZES})
    return {notice.code for notice in found.warnings}


def test_the_answer_says_that_neighbours_are_being_confirmed_and_stays_confirmed() -> None:
    codes = answer_of([*searched(), *confirming(32, 3, start=10), *confirming(64, 1, start=30)])
    assert codes & {"confirmation_incomplete", "unconfirmed"} == {"confirmation_incomplete"}


def test_the_answer_says_whose_confirmation_was_stopped_and_not_that_it_is_incomplete() -> None:
    codes = answer_of([*searched(), *confirming(32, 9, start=10), *confirming(64, 0, 5, start=30)], runs_asked_for=9)
    assert codes & {"confirmation_stopped", "confirmation_incomplete"} == {"confirmation_stopped"}


def test_one_hit_and_nine_misses_give_the_share_of_all_ten() -> None:
    with pytest.raises(TargetNotReachedError, match=r"batch 32 came closest: 1 of 10 runs .*; at most 39 % of runs"):
        answer_of(
            [
                make_trial(1, batch_size=32),
                *[replace(one, seed=100 + one.seed) for one in confirming(32, 0, 9, start=2)],
            ]
        )
