"""The page shows growing batches beside the best constant batch, and keeps them out of the other figures."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bssearch.analysis.build_answer import build_answer
from bssearch.analysis.growing import typical_run
from bssearch.figures import plots
from bssearch.figures.page import StudyPicture
from bssearch.records import (
    BatchSchedule,
    Configuration,
    GradientNoise,
    LearningRateRule,
    Observation,
    Phase,
    Stage,
    TrialRecord,
    with_batch_schedule,
)
from tests.factories import make_probe, make_spec, make_trial, not_none, with_outcome
from tests.figures.test_plots import SIZES, law_trials, study_of
from tests.records.test_batch_schedule import milestones

BASE = Configuration(batch_size=32, micro_batch_size=32, learning_rate=0.1)
PLANNED = milestones((0, 32), (640, 64, 32), (1600, 128))
BY_NOISE = BatchSchedule(
    name="noise_scale",
    stages=(Stage(0, 32, 32), Stage(0, 64, 64), Stage(0, 128, 128)),
    rate_rule=LearningRateRule.SQRT,
    noise_share=0.5,
)
CURVE = [(0, 0, 0.0), (20, 640, 0.2), (35, 1600, 0.5), (40, 2240, 0.6)]
SPEC = make_spec()
PROBES = {size: make_probe(size, step_seconds=0.01 + 0.0002 * size) for size in SIZES}


def grown(schedule: BatchSchedule, first: int, *, runs: int = 3, steps: int = 40, **changes: Any) -> list[TrialRecord]:
    """Search trial of a schedule, and its repeats with the confirmation's seeds."""
    trials = [
        make_trial(
            first + place,
            configuration=with_batch_schedule(BASE, schedule),
            phase=phase,
            seed=place - 1,
            steps=steps + place,
            seconds=0.6 + 0.01 * place,
            samples=2240,
            **changes,
        )
        for place, phase in enumerate([Phase.GROWTH] + runs * [Phase.AUDIT])
    ]
    return [with_outcome(trial, steps=40) for trial in trials]


def curve(points: Sequence[tuple[int, int, float]] = CURVE) -> list[Observation]:
    rates = {0: 0.1, 20: 0.1, 35: 0.1 * 2**0.5, 40: 0.2}
    return [
        Observation(step=step, samples=samples, train_seconds=at, metric=0.5, loss=None, learning_rate=rates[step])
        for step, samples, at in points
    ]


def picture(schedule: BatchSchedule = PLANNED, **changes: Any) -> StudyPicture:
    trials = law_trials(noise=GradientNoise(scale=90.0, low=50.0, high=200.0, passes=9, trace=90.0, square=1.0))
    trials += grown(schedule, len(trials), **changes)
    answer = build_answer(study_of(SPEC), SPEC, trials, PROBES)
    run = not_none(typical_run(not_none(answer.batch_schedule), trials))
    best = answer.optimal.batch_size
    return StudyPicture(
        study=study_of(SPEC),
        spec=SPEC,
        answer=answer,
        trials=trials,
        curves={best: [replace(one, samples=one.step * best, learning_rate=0.3) for one in curve()]},
        grown=(run, curve()),
    )


def test_a_trial_whose_batch_grows_does_not_count_for_its_first_batch_size() -> None:
    found = picture()
    first = with_batch_schedule(replace(BASE, batch_size=48, micro_batch_size=48), milestones((0, 48), (480, 96)))
    trials = [*found.trials, make_trial(99, configuration=first, phase=Phase.GROWTH)]
    assert plots.curve_trials(found.answer, trials) == plots.curve_trials(found.answer, found.trials)


def test_growing_batches_change_neither_the_law_nor_the_rows_of_the_batch_sizes() -> None:
    found = picture()
    alone = build_answer(study_of(SPEC), SPEC, [one for one in found.trials if not one.configuration.grows], PROBES)
    assert alone.batch_schedule is None
    same = {"fit", "batches", "optimal", "front"}
    assert found.answer.model_dump(include=same) == alone.model_dump(include=same)
