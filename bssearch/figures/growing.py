"""The sections about growing batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from bssearch.analysis.answer import Answer, BatchScheduleAnswer
from bssearch.analysis.headline import about_growing
from bssearch.analysis.numbers import noise_scale, number
from bssearch.analysis.objectives.base import Objective
from bssearch.figures.chart import ACCENT, MUTED, SECOND, Chart, Point, Series, Shape, extent, value_axis
from bssearch.figures.html import Row, Section, Table
from bssearch.records import Observation, TrialRecord
from bssearch.records.batch_schedule import RunStage, batch_schedule_of, run_stages
from bssearch.records.text import NOTHING, in_words, plural, sentence

Pairs = Sequence[tuple[float, float]]
Run = tuple[TrialRecord, Sequence[Observation]]


def growing(answer: Answer, run: Run | None, optimum: Sequence[Observation]) -> Section | None:
    """Return the section of the best schedule; None if no schedule reached the target."""
    found = answer.batch_schedule
    if found is None:
        return None
    stages = [] if run is None else run_stages(*run)
    return Section(
        name="growing",
        title="Growing batch",
        text=about_growing(answer),
        charts={
            "batch-growth": batch_growth_chart(answer, stages),
            "rate-growth": rate_growth_chart([] if run is None else run[1], stages, optimum),
        },
        table=_stage_table(found, stages),
        notes=_about_stages(answer, run),
    )


def batch_growth_chart(answer: Answer, stages: Sequence[RunStage]) -> Chart | None:
    """Return batch size over samples seen, beside the optimum's and the noise scale."""
    if not stages:
        return None
    noise, best = answer.measured.noise_scale, answer.optimal.batch_size
    end = stages[-1].start_samples + stages[-1].samples
    constant = next((row.samples_to_target for row in answer.batches if row.batch_size == best), None) or end
    last = max(end, constant)
    series = [
        _constant([(0.0, best), (constant, best)], f"batch {best}, the best constant size"),
        _stairs([(one.start_samples, one.batch_size) for one in stages], end),
    ]
    if noise is not None and noise.scale:
        ends = [Point(0.0, noise.scale), Point(last, noise.scale)]
        series.append(Series(name="gradient noise scale", points=ends, colour=MUTED, width=1.5, dash="dot"))
    ticks = [(float(size), str(size)) for size in sorted({best, *(one.batch_size for one in stages)})]
    return Chart(
        x=value_axis("training samples seen", [0.0, last], log=False),
        y=replace(value_axis("batch size", extent(series), log=True), ticks=ticks),
        series=series,
    )


def rate_growth_chart(
    curve: Sequence[Observation], stages: Sequence[RunStage], optimum: Sequence[Observation]
) -> Chart | None:
    """Return learning rate over samples seen, for the schedule's run and the optimum's.

    From each evaluation's last step; without evaluations, from the stage.
    """
    if not stages:
        return None
    end = stages[-1].start_samples + stages[-1].samples
    points, constant = _rates(curve), _rates(optimum)
    series = [_constant(constant, "the best constant size")] if constant else []
    if points:
        series.append(_grown(points, "vh"))
    else:
        series.append(_stairs([(one.start_samples, one.learning_rate) for one in stages], end))
    last = max(end, *(point.x for one in series for point in one.points))
    return Chart(
        x=value_axis("training samples seen", [0.0, last], log=False),
        y=value_axis("learning rate", extent(series), log=True),
        series=series,
    )


def grown_trials(trials: Sequence[TrialRecord], answer: Answer, objective: Objective) -> Section | None:
    """Return a table of the schedules that were run; None if no batch grew."""
    groups: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        if trial.configuration.grows:
            groups.setdefault(trial.configuration.key, []).append(trial)
    if not groups:
        return None
    best = set() if answer.batch_schedule is None else {*answer.batch_schedule.trial_numbers}
    figures = {key: _figure(group, objective) for key, group in groups.items()}
    order = sorted(groups, key=lambda key: (figures[key] is None, figures[key] or 0.0, groups[key][0].number))
    ranked = [groups[key] for key in order]
    rows = [Row(_cells(group, objective), any(one.number in best for one in group)) for group in ranked]
    return Section(
        name="grown-trials",
        title="Trials with a growing batch",
        text="One row per schedule, with the median of its runs; the best is bold. The law and the table of batch "
        "sizes leave these trials out.",
        table=Table(["Batch", sentence(objective.axis_title), "Learning rate at first", "Ended", "Trials"], rows),
    )


def _cells(group: Sequence[TrialRecord], objective: Objective) -> list[str]:
    configuration, figure = group[0].configuration, _figure(group, objective)
    schedule = batch_schedule_of(configuration)
    assert schedule is not None, "its batch grows"
    ended = Counter(trial.state.value for trial in group)
    return [
        schedule.in_words,
        NOTHING if figure is None else f"{number(objective.shown(figure))}{objective.unit}",
        f"{in_words(configuration.learning_rate)}, {schedule.rate_rule.in_words}",
        ", ".join(f"{count} {state}" for state, count in ended.items()),
        ", ".join(str(trial.number) for trial in group),
    ]


def _figure(group: Iterable[TrialRecord], objective: Objective) -> float | None:
    figures = [figure for trial in group if (figure := objective.figure(trial)) is not None]
    return median(figures) if figures else None


def _stage_table(found: BatchScheduleAnswer, ran: Sequence[RunStage]) -> Table | None:
    planned = [
        (one.start_samples, one, one.steps, one.steps * one.batch_size, one.seconds)
        for one in found.stages
        if one.start_samples is not None and one.steps is not None
    ]
    measured = [(one.start_samples, one, one.steps, one.samples, one.train_seconds) for one in ran]
    rows = [
        Row(
            [
                f"{start:,}",
                _split(stage.batch_size, stage.micro_batch_size),
                in_words(stage.learning_rate),
                in_words(steps),
                f"{samples:,.0f}",
                NOTHING if seconds is None else number(seconds),
            ]
        )
        for start, stage, steps, samples, seconds in planned or measured
    ]
    return Table(["From sample", "Batch", "Learning rate", "Steps", "Samples", "Seconds"], rows) if rows else None


def _split(batch_size: int, micro_batch_size: int) -> str:
    count = batch_size // micro_batch_size
    return str(batch_size) if count == 1 else f"{batch_size} ({count} × {micro_batch_size})"


def _about_stages(answer: Answer, run: Run | None) -> list[str]:
    found, noise = answer.batch_schedule, answer.measured.noise_scale
    assert found is not None, "the section is of a schedule"
    notes = []
    if run is not None:
        notes.append(f"The charts show trial {run[0].number}, the median of {plural(found.runs, 'run')}.")
    if found.noise_share is not None:
        notes.append("Batch sizes are samples / steps between its evaluations; seconds are measured.")
    else:
        notes.append("The table shows the median run up to the target; its seconds are steps × step time.")
    if noise is not None and noise.scale:
        scale = noise_scale(noise.scale, noise.low, noise.high)
        notes.append(f"Gradient noise scale of the optimum: {scale}.")
    return [" ".join(notes)]


def _stairs(points: Pairs, end: float) -> Series:
    return _grown([*points, (end, points[-1][1])], "hv")


def _grown(points: Pairs, shape: Shape) -> Series:
    name = "the batch that grows"
    return Series(name=name, points=_told(points, name), colour=ACCENT, width=2.5, shape=shape)


def _constant(points: Pairs, name: str) -> Series:
    return Series(name=name, points=_told(points, name), colour=SECOND, width=1.75, dash="dash", shape="vh")


def _told(points: Pairs, name: str) -> list[Point]:
    return [Point(x, y, f"{name}\n{number(x, 4)} samples: {number(y, 4)}") for x, y in points]


def _rates(curve: Sequence[Observation]) -> list[tuple[float, float]]:
    known = [(float(one.samples), one.learning_rate) for one in curve if one.step and one.learning_rate > 0]
    return known if len(known) > 1 else []
