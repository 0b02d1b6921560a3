"""When confirmation runs have settled the recommendation, and which batch sizes could still change it."""

from __future__ import annotations

from bssearch.analysis.certainty import Standing, standing
from bssearch.analysis.optimum import decide
from bssearch.records import Phase, TrialRecord, TrialState
from tests.factories import make_trial, not_none

STEADY = (0.999, 1.0, 1.001)
NOISY = (0.9, 1.0, 1.1)
MISSED = TrialState.EXHAUSTED


def runs(batch_size: int, median: float, spread: tuple[float, ...] = STEADY, missed: int = 0) -> list[TrialRecord]:
    """Return confirmation runs around a median, and after them some that missed the target."""
    states = [TrialState.REACHED] * len(spread) + [MISSED] * missed
    seconds = [median * factor for factor in spread] + [10.0] * missed
    return [
        make_trial(
            1000 * batch_size + seed,
            batch_size=batch_size,
            seconds=value,
            state=state,
            phase=Phase.CONFIRM,
            seed=seed,
        )
        for seed, (value, state) in enumerate(zip(seconds, states, strict=True))
    ]


def stand(*trials: list[TrialRecord]) -> Standing:
    return not_none(standing(not_none(decide([one for group in trials for one in group], 3))))


def sizes(found: Standing) -> tuple[int, int, list[int], list[int]]:
    """Return the least, the recommended, the undecided and what is to run, as batch sizes."""
    to_run = [one.configuration.batch_size for one in found.to_run]
    least, recommended = found.least.configuration.batch_size, found.recommended.configuration.batch_size
    return least, recommended, found.undecided_batch_sizes, to_run


def test_runs_far_apart_settle_it() -> None:
    found = stand(runs(16, 2.0, NOISY), runs(32, 1.0, NOISY), runs(64, 3.0, NOISY))
    assert sizes(found) == (32, 32, [], [])
    assert found.is_settled


def test_a_smaller_batch_size_that_may_be_within_5_percent_is_undecided_and_a_larger_one_is_not() -> None:
    spread = (0.98, 1.0, 1.02)
    smaller = stand(runs(16, 1.05, spread), runs(32, 1.0, spread))
    assert sizes(smaller) == (32, 32, [16], [32, 16])
    larger = stand(runs(64, 1.05, spread), runs(32, 1.0, spread))
    assert sizes(larger) == (32, 32, [], [])  # whatever it is, 32 is within 5 % of it


def test_a_larger_batch_size_is_undecided_where_it_could_be_faster_by_more_than_5_percent() -> None:
    assert sizes(stand(runs(64, 1.02, NOISY), runs(32, 1.0, NOISY))) == (32, 32, [64], [32, 64])


def test_batch_sizes_shown_to_be_as_good_as_each_other_are_settled_though_neither_is_shown_to_be_better() -> None:
    assert sizes(stand(runs(16, 1.001), runs(32, 1.0), runs(64, 1.001))) == (32, 16, [], [])


def test_the_recommended_runs_too_where_it_is_not_shown_to_be_near_a_rival_of_the_least() -> None:
    found = stand(runs(16, 1.04), runs(32, 1.0), runs(64, 1.01, (0.97, 1.0, 1.03)))
    assert sizes(found) == (32, 16, [64], [32, 16, 64])


def test_where_a_run_missed_nothing_is_shown_and_more_runs_do_not_help() -> None:
    rival = stand(runs(16, 1.5, missed=1), runs(32, 1.0))
    assert sizes(rival) == (32, 32, [16], [])
    least = stand(runs(16, 1.5), runs(32, 1.0, missed=1))
    assert sizes(least) == (32, 32, [16], [])
    refuted = stand(runs(16, 1.5, missed=3), runs(32, 1.0))
    assert sizes(refuted) == (32, 32, [], [])  # three of six missed: it is no candidate


def test_before_confirmation_nothing_stands() -> None:
    assert standing(not_none(decide([make_trial(1), make_trial(2, batch_size=64)], 3))) is None
