"""Runs that are alike whatever their seed say nothing of how far seeds differ."""

from bssearch.analysis.optimum import ignore_their_seeds
from bssearch.records import TrialRecord
from tests.factories import make_trial, with_outcome


def run(seed: int, steps: int, metric: float) -> TrialRecord:
    return with_outcome(make_trial(seed, seed=seed), steps=steps, final_metric=metric)


def test_runs_with_the_same_steps_and_metric_under_every_seed_ignore_it() -> None:
    alike = [run(1, 20, 0.91), run(2, 20, 0.91), run(3, 20, 0.91)]
    others = [run(4, 40, 0.92), run(5, 40, 0.92)]
    assert ignore_their_seeds([alike, others])
    assert not ignore_their_seeds([alike]), "two that are like another one may be by chance"
    assert not ignore_their_seeds([alike, [*others, run(6, 40, 0.93)]])
    assert not ignore_their_seeds([[run(1, 20, 0.91)], [run(2, 20, 0.91)]]), "they are of two configurations"
