"""The page shows batches that grow beside the best batch that stays, and keeps them out of the other figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bssearch.analysis.answer import Answer
from bssearch.analysis.growing import typical_run
from bssearch.analysis.headline import about_growing
from bssearch.analysis.objectives.base import objective_of
from bssearch.analysis.report import build_answer
from bssearch.batch_schedule import BatchSchedule, Stage, with_batch_schedule
from bssearch.pages import trial_plots
from bssearch.pages.chart import Series
from bssearch.pages.growing import growing, grown_trials
from bssearch.pages.html import Section
from bssearch.pages.page import StudyPicture, render
from bssearch.records import Configuration, GradientNoise, Observation, Phase, TrialRecord, TrialState
from bssearch.scaling import LearningRateRule
from tests.factories import make_probe, make_spec, make_trial
from tests.pages.test_page import Elements
from tests.pages.test_plots import SIZES, law_trials, names, study_of, xs, ys
from tests.test_batch_schedule import milestones

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
    """Return a trial of the search for a schedule, and runs that repeat it with the seeds of the confirmation."""
    phases = [Phase.GROWTH] + runs * [Phase.AUDIT]
    trials = []
    for place, phase in enumerate(phases):
        trial = make_trial(
            first + place,
            configuration=with_batch_schedule(BASE, schedule),
            phase=phase,
            seed=place - 1,
            steps=steps + place,
            seconds=0.6 + 0.01 * place,
            samples=2240,
            **changes,
        )
        assert trial.outcome is not None
        trials.append(replace(trial, outcome=replace(trial.outcome, steps=40)))
    return trials


def curve(points: Sequence[tuple[int, int, float]] = CURVE) -> list[Observation]:
    rates = {0: 0.1, 20: 0.1, 35: 0.1 * 2**0.5, 40: 0.2}
    return [
        Observation(step=step, samples=samples, train_seconds=at, metric=0.5, loss=None, learning_rate=rates[step])
        for step, samples, at in points
    ]


def picture(schedule: BatchSchedule = PLANNED, **changes: Any) -> StudyPicture:
    noise = GradientNoise(scale=90.0, low=50.0, high=200.0, passes=9, trace=90.0, square=1.0)
    trials = law_trials(noise=noise)
    trials += grown(schedule, len(trials), **changes)
    answer = build_answer(study_of(SPEC), SPEC, trials, PROBES)
    assert answer.batch_schedule is not None
    run = typical_run(answer.batch_schedule, trials)
    assert run is not None
    best = answer.optimal.batch_size
    constant = [replace(one, samples=one.step * best, learning_rate=0.3) for one in curve()]
    return StudyPicture(
        study=study_of(SPEC),
        spec=SPEC,
        answer=answer,
        trials=trials,
        curves={best: constant},
        grown=(run, curve()),
    )


def section(found: StudyPicture) -> Section:
    made = growing(found.answer, found.grown, found.curves[found.answer.optimal.batch_size])
    assert made is not None
    return made


def lines(found: StudyPicture, name: str) -> dict[str, Series]:
    return {series.name: series for series in section(found).drawn[name].series}


def test_the_batch_is_drawn_in_steps_beside_the_one_that_stays_and_the_noise_scale() -> None:
    found = picture()
    best = found.answer.optimal.batch_size
    drawn = lines(found, "batch-growth")
    assert list(drawn) == [f"batch {best}, the best that stays", "the batch that grows", "gradient noise scale"]
    steps = drawn["the batch that grows"]
    assert (xs(steps), ys(steps)) == ([0, 640, 1600, 2240], [32, 64, 128, 128])
    assert steps.shape == "hv", "a size holds from where it begins"
    flat = drawn[f"batch {best}, the best that stays"]
    row = next(one for one in found.answer.batches if one.batch_size == best)
    assert (xs(flat), ys(flat)) == ([0.0, row.samples_to_target], [best, best])
    noise = found.answer.measured.noise_scale
    assert noise is not None
    assert ys(drawn["gradient noise scale"]) == [noise.scale, noise.scale]
    assert [text for _, text in section(found).drawn["batch-growth"].y.ticks] == ["32", "64", "128"]
    assert {one.dash for one in drawn.values()} == {"dash", "solid", "dot"}, "told apart without colours"


def test_the_learning_rate_is_that_of_the_evaluations_and_of_the_optimum_s() -> None:
    found = picture()
    drawn = lines(found, "rate-growth")
    grows = drawn["the batch that grows"]
    assert xs(grows) == [640, 1600, 2240]
    assert ys(grows) == pytest.approx([0.1, 0.1 * 2**0.5, 0.2])
    assert grows.shape == "vh", "an evaluation tells of the step before it"
    assert ys(drawn["the best that stays"]) == [0.3, 0.3, 0.3]
    assert found.grown is not None
    by_stage = growing(found.answer, (found.grown[0], []), [])
    assert by_stage is not None
    (stages,) = by_stage.drawn["rate-growth"].series
    assert ys(stages) == pytest.approx([0.1, 0.1 * 2**0.5, 0.2, 0.2])
    assert stages.shape == "hv"


def test_the_stages_have_their_steps_samples_and_seconds_to_the_target() -> None:
    found = picture()
    made = section(found)
    assert made.text == about_growing(found.answer)
    assert made.table is not None
    assert found.answer.batch_schedule is not None
    assert found.answer.batch_schedule.stages[2].steps == 7  # of 42 to the target in the median run
    assert [row.cells for row in made.table.rows] == [
        ["0", "32", "0.1", "20", "640", "0.328"],
        ["640", "64 (2 × 32)", "0.1414", "15", "960", "–"],  # only whole batches of 64 were timed
        ["1,600", "128", "0.2", "7", "896", "0.249"],
    ]


def test_of_sizes_that_the_trials_decided_the_page_has_those_that_one_had() -> None:
    found = picture(BY_NOISE)
    made = section(found)
    steps = lines(found, "batch-growth")["the batch that grows"]
    assert (xs(steps), ys(steps)) == ([0, 640, 1600, 2240], [32, 64, 128, 128])
    assert made.table is not None
    assert [row.cells[:2] + row.cells[3:] for row in made.table.rows] == [
        ["0", "32", "20", "640", "0.2"],
        ["640", "64", "15", "960", "0.3"],
        ["1,600", "128", "5", "640", "0.1"],
    ]
    assert "the samples over the steps between its evaluations" in made.notes[0]
    assert found.grown is not None and f"Drawn is trial {found.grown[0].number}," in made.notes[0]


def test_every_schedule_stands_in_a_table_of_its_own_the_best_first_and_in_no_other_figure() -> None:
    found = picture()
    missed = grown(BY_NOISE, 90, runs=0, state=TrialState.CAPPED)
    trials = [*found.trials, *missed]
    objective = objective_of(SPEC, found.study.target)
    made = grown_trials(trials, found.answer, objective)
    assert made is not None and made.table is not None
    numbers = [one.number for one in trials if one.configuration.grows]
    assert [(row.cells, row.marked) for row in made.table.rows] == [
        (
            [
                "32, then 64 from 640 samples on, 128 from 1,600 samples on",
                "0.615 s",
                "0.1, ∝ √batch",
                "4 reached",
                ", ".join(map(str, numbers[:4])),
            ],
            True,
        ),
        (
            [
                "32, then 64, 128 once within 0.5 × the gradient noise scale",
                "–",
                "0.1, ∝ √batch",
                "1 capped",
                "90",
            ],
            False,
        ),
    ]
    constant = law_trials()
    assert grown_trials(constant, found.answer, objective) is None
    drawn = trial_plots.learning_rate_chart(trials, objective, None)
    assert drawn == trial_plots.learning_rate_chart(
        [one for one in trials if not one.configuration.grows], objective, None
    )
    assert names(drawn) == ["reached the target"]
    assert drawn is not None
    assert len(drawn.series[0].points) == len(constant)


def test_a_trial_whose_batch_grows_does_not_stand_for_its_first_batch_size() -> None:
    found = picture()
    alone = replace(BASE, batch_size=48, micro_batch_size=48)
    first = with_batch_schedule(alone, milestones((0, 48), (480, 96)))
    trials = [*found.trials, make_trial(99, configuration=first, phase=Phase.GROWTH)]
    assert trial_plots.curve_trials(found.answer, trials) == trial_plots.curve_trials(found.answer, found.trials)


def test_growing_batches_change_neither_the_law_nor_the_rows_of_the_batch_sizes() -> None:
    found = picture()
    alone = build_answer(study_of(SPEC), SPEC, [one for one in found.trials if not one.configuration.grows], PROBES)
    assert alone.batch_schedule is None
    same = {"fit", "batches", "optimal", "front"}
    assert found.answer.model_dump(include=same) == alone.model_dump(include=same)


def rendered(found: StudyPicture) -> tuple[str, list[str]]:
    page = render(found)
    return page, Elements(page).texts


@pytest.mark.parametrize("schedule", [PLANNED, BY_NOISE])
def test_the_page_has_both_sections_after_the_batch_sizes(schedule: BatchSchedule) -> None:
    found = picture(schedule)
    page, texts = rendered(found)
    order = re.findall(r'<section id="([\w-]+)"', page)
    place = order.index("batches")
    assert order[place : place + 4] == ["batches", "grown-trials", "growing", "steps"]
    assert about_growing(found.answer) in texts
    assert any(text.startswith("Every trial whose batch stays. ") for text in texts)
    assert all(f'<div class="figure" id="figure-{name}">' in page for name in section(found).drawn)
    assert not re.findall(r"#[0-9a-f]{6}|rgb\(", page.partition("</style>")[2]), "colours of the style sheet alone"


def test_a_study_without_schedules_has_neither_section() -> None:
    found = picture()
    plain: Answer = found.answer.model_copy(update={"batch_schedule": None})
    trials = [one for one in found.trials if not one.configuration.grows]
    page, _ = rendered(replace(found, answer=plain, trials=trials, grown=None))
    assert "Every trial. The lines" in page
    assert "grown-trials" not in page and 'id="growing"' not in page
