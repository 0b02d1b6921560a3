from __future__ import annotations

import pytest

from bssearch.commands.check import LEAST, Advice, DefaultRun, summarise, towards_easier
from bssearch.commands.check import advise as advise_on
from bssearch.errors import LaunchError, UsageError
from bssearch.records import Goal, Observation, Target, TrialState
from tests.factories import make_spec
from tests.search.law import LawExecutor

LIMIT = 10.0


def saturating(best: float, start: float = 0.1) -> list[Observation]:
    """Get from start to best in ten even steps over ten seconds, the last of them without progress."""
    metrics = [start + min(1.0, index / 9) * (best - start) for index in range(11)]
    return [
        Observation(step=index, samples=index, train_seconds=float(index), metric=metric, loss=None, learning_rate=0.1)
        for index, metric in enumerate(metrics)
    ]


def advise(target: Target, bests: list[float], start: float = 0.1, margin: float | None = None) -> Advice:
    curves = [saturating(best, start) for best in bests]
    runs = [
        DefaultRun(seed_index=index, best_metric=best, best_at_s=9.0, train_seconds=LIMIT)
        for index, best in enumerate(bests)
    ]
    return summarise(target, LIMIT, runs, curves, margin)


def test_the_proposal_is_the_median_best_less_a_margin_that_every_run_reaches() -> None:
    advice = advise(Target(metric="accuracy", value=0.5), [0.93, 0.9, 0.91])
    assert advice.median_best == 0.91
    assert advice.margin == pytest.approx(0.02 * (0.91 - 0.1))
    assert advice.proposed == 0.89  # 0.8938, rounded towards the easier side at the margin's place
    row = next(row for row in advice.targets if row.target == advice.proposed)
    assert row.reached == 3
    wide = advise(Target(metric="accuracy", value=0.5), [0.95, 0.7, 0.9])
    assert wide.margin == pytest.approx(0.2)
    assert wide.proposed == 0.7


def test_the_table_shows_how_the_time_grows_with_the_target() -> None:
    advice = advise(Target(metric="accuracy", value=0.5), [0.9, 0.9, 0.9])
    times = [row.time_to_target_s or 0.0 for row in advice.targets]
    assert times == sorted(times)
    assert times[0] > 0
    half = advice.targets[0]
    assert half.target == pytest.approx(0.5)
    assert half.time_to_target_s == pytest.approx(4.5)
    assert half.share_of_limit == pytest.approx(0.45)


def test_for_a_loss_less_is_harder() -> None:
    advice = advise(Target(metric="loss", value=1.0, goal=Goal.MINIMIZE), [1.5, 1.52, 1.48], start=4.5, margin=0.05)
    assert advice.proposed == 1.55
    targets = [row.target for row in advice.targets]
    assert targets == sorted(targets, reverse=True)
    assert any("spec's target of 1 is harder" in note for note in advice.notes)


def test_a_default_that_learns_nothing_gets_no_advice() -> None:
    with pytest.raises(LaunchError, match=r"never got better than an untrained model's 0\.1"):
        advise(Target(metric="accuracy", value=0.5), [0.1, 0.1, 0.1])


@pytest.mark.parametrize(("goal", "bad"), [(Goal.MAXIMIZE, 0.14), (Goal.MAXIMIZE, 0.05), (Goal.MINIMIZE, 2.9)])
def test_one_bad_seed_does_not_drag_the_proposal_down_to_an_untrained_model(goal: Goal, bad: float) -> None:
    start, good = (0.1, 0.9) if goal is Goal.MAXIMIZE else (3.0, 0.7777)
    target = Target(metric="m", value=0.5, goal=goal)
    advice = advise(target, [good, bad, good, good, good], start=start)
    halfway = start + LEAST * (good - start)
    assert target.gain(halfway) <= target.gain(advice.proposed) < target.gain(good)
    row = next(row for row in advice.targets if row.target == advice.proposed)
    assert row.reached == 4
    assert row.time_to_target_s is not None and row.time_to_target_s > 1
    assert "1 of 5 runs of the default miss the proposal" in advice.notes


def test_the_luckiest_untrained_model_does_not_meet_the_proposal() -> None:
    target = Target(metric="accuracy", value=0.5)
    curves = [saturating(0.9, start) for start in (0.1, 0.1, 0.6)]
    runs = [DefaultRun(seed_index=index, best_metric=0.9, best_at_s=9.0, train_seconds=LIMIT) for index in range(3)]
    advice = summarise(target, LIMIT, runs, curves, None)
    assert (advice.untrained, advice.proposed) == (0.6, 0.893)
    with pytest.raises(UsageError, match=r"margin = 0\.3 leads to a target of 0\.6, which an untrained model meets"):
        summarise(target, LIMIT, runs, curves, 0.3)


def test_a_spec_whose_own_target_nothing_can_reach_is_no_obstacle() -> None:
    executor = LawExecutor()
    advise_on(make_spec(target={"metric": "accuracy", "value": 97}), executor, runs=2)
    # Only a trial at the study's own limit is judged by its way from chance to the target.
    assert [request.plan.limit_state for request in executor.requests] == [TrialState.CAPPED] * 2


@pytest.mark.parametrize("margin", [float("nan"), float("inf"), -0.1])
def test_a_margin_that_is_none_is_refused_before_anything_runs(margin: float) -> None:
    executor = LawExecutor()
    with pytest.raises(UsageError, match=r"margin = .* must be a finite number >= 0"):
        advise_on(make_spec(), executor, runs=1, margin=margin)
    assert executor.requests == []


@pytest.mark.parametrize(
    ("goal", "best", "margin", "way", "expected"),
    [
        (Goal.MAXIMIZE, 0.9876, 0.0123, 0.9, 0.97),
        (Goal.MAXIMIZE, 0.5, 0.1, 0.4, 0.4),
        (Goal.MAXIMIZE, 0.3, 0.1, 0.3, 0.2),
        (Goal.MINIMIZE, 1.234, 0.02, 3.0, 1.26),
        (Goal.MAXIMIZE, 0.98764321, 0.0, 0.9, 0.9876),
        (Goal.MAXIMIZE, 1234567.8, 0.5, 1e6, 1234567.3),
        (Goal.MINIMIZE, 0.0, 0.0, 3.0, 0.0),
        (Goal.MAXIMIZE, 7e11, 123456.0, 6e11, 6.998e11),
        (Goal.MAXIMIZE, 1e-7, 2e-9, 1e-7, 9.8e-8),
        (Goal.MAXIMIZE, 0.9, 1e-30, 0.8, 0.9),
    ],
)
def test_rounding_never_makes_a_target_harder(
    goal: Goal, best: float, margin: float, way: float, expected: float
) -> None:
    target = Target(metric="m", value=0.0, goal=goal)
    proposed = towards_easier(target, best, margin, way)
    assert proposed == pytest.approx(expected, rel=1e-3)
    assert target.gain(proposed) <= target.gain(best) - margin + 1e-16
    assert target.gain(proposed) >= target.gain(best) - margin - 0.02 * way
