from __future__ import annotations

import pytest

from bssearch.errors import LaunchError
from bssearch.records import Goal, Observation, Target
from bssearch.search.advice import Advice, Run, summarise, towards_easier

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
        Run(seed_index=index, best_metric=best, best_at_s=9.0, train_seconds=LIMIT) for index, best in enumerate(bests)
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


@pytest.mark.parametrize(
    ("goal", "best", "margin", "expected"),
    [
        (Goal.MAXIMIZE, 0.9876, 0.0123, 0.97),
        (Goal.MAXIMIZE, 0.5, 0.1, 0.4),
        (Goal.MINIMIZE, 1.234, 0.02, 1.26),
        (Goal.MAXIMIZE, 0.98764321, 0.0, 0.9876),
    ],
)
def test_rounding_never_makes_a_target_harder(goal: Goal, best: float, margin: float, expected: float) -> None:
    target = Target(metric="m", value=0.0, goal=goal)
    proposed = towards_easier(target, best, margin)
    assert proposed == pytest.approx(expected)
    assert target.gain(proposed) <= target.gain(best) - margin + 1e-12
