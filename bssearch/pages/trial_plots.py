"""The charts that show trials one by one: learning curves, and learning rate against batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from bssearch.analysis.answer import Answer
from bssearch.analysis.numbers import number
from bssearch.analysis.objectives.base import Objective
from bssearch.analysis.shape import parameters_of
from bssearch.pages.chart import (
    ACCENT,
    INK,
    MUTED,
    SECOND,
    Axis,
    Chart,
    ColourScale,
    Dash,
    Point,
    Rule,
    Series,
    Symbol,
    batch_axis,
    extent,
    round_numbers,
    sequence_colour,
    short_name,
    value_axis,
)
from bssearch.records import Configuration, Observation, Target, TrialRecord, TrialState
from bssearch.scaling import LearningRateRule, learning_rate_factor

CURVE_POINTS = 200
"""Points of a learning curve on the page: a choice, more than a screen tells apart."""

ENDED: dict[str, tuple[Symbol, str, set[TrialState]]] = {
    "stopped before the target": ("triangle", MUTED, {state for state in TrialState if state.is_censored}),
    "diverged": ("x", SECOND, {TrialState.DIVERGED}),
    "out of memory": ("square", SECOND, {TrialState.OOM}),
}


def curve_trials(answer: Answer, trials: Iterable[TrialRecord]) -> dict[int, int]:
    """Return by batch size the trial whose curve stands for it: its fastest, else the one that came nearest."""
    chosen = {row.batch_size: row.best.trial for row in answer.batches if row.best is not None}
    sign = 1 if answer.target.goal == "maximize" else -1
    nearest: dict[int, tuple[float, int]] = {}
    for trial in trials:
        if trial.configuration.grows:
            continue
        size = trial.configuration.batch_size
        metric = None if trial.outcome is None else trial.outcome.best_metric
        if size not in chosen and metric is not None:
            nearest[size] = max(nearest.get(size, (-math.inf, 0)), (sign * metric, trial.number))
    return dict(sorted({**{size: one for size, (_, one) in nearest.items()}, **chosen}.items()))


def curves_chart(answer: Answer, curves: Mapping[int, Sequence[Observation]]) -> Chart | None:
    """Return the metric over train seconds of one run for each batch size, the optimum's the widest."""
    drawn = {size: points for size, curve in curves.items() if len(points := thinned(curve)) > 1}
    if not drawn:
        return None
    best = answer.optimal.batch_size
    reached = {row.batch_size for row in answer.batches if row.reached}
    series = [
        Series(
            name=f"{size} (optimal)" if size == best else str(size),
            points=_curve(points, f"batch {size}"),
            colour=sequence_colour(index / max(1, len(drawn) - 1)),
            width=4 if size == best else 1.75,
            dash="solid" if size in reached else "dot",
        )
        for index, (size, points) in enumerate(drawn.items())
    ]
    seconds = [point.x for one in series for point in one.points]
    return _curves(series, value_axis("train seconds", seconds, log=True), answer.target)


def recent_curves_chart(target: Target, runs: Sequence[tuple[TrialRecord, Sequence[Observation]]]) -> Chart | None:
    """Return the metric over train seconds of some trials of a study that need not have an answer."""
    drawn = [(trial, points) for trial, curve in runs if (points := thinned(curve))]
    if not drawn:
        return None
    series = [
        Series(
            name=f"trial {trial.number}, batch {trial.configuration.batch_size}",
            points=_curve(points, f"trial {trial.number}"),
            colour=sequence_colour(index / max(1, len(drawn) - 1)),
            width=2,
            symbol="circle" if len(points) == 1 else None,
        )
        for index, (trial, points) in enumerate(drawn)
    ]
    seconds = [point.x for one in series for point in one.points]
    return _curves(series, value_axis("train seconds", [0.0, *seconds], log=False), target)


def _curve(curve: Sequence[Observation], name: str) -> list[Point]:
    return [
        Point(one.train_seconds, one.metric, f"{name}\n{number(one.train_seconds, 4)} s: {number(one.metric, 4)}")
        for one in curve
    ]


def _curves(series: Sequence[Series], seconds: Axis, target: Target) -> Chart:
    """Return curves with the target as a line across them."""
    metric = value_axis(short_name(target.metric), [*extent(series), target.value], log=False)
    rule = Rule(at=target.value, name=f"target {target.goal.sign} {target.value:g}", colour=ACCENT)
    return Chart(x=seconds, y=metric, series=series, rules=[rule])


def learning_rate_chart(
    trials: Sequence[TrialRecord], objective: Objective, default: Configuration | None
) -> Chart | None:
    """Return learning rate and batch size of all trials, coloured by the objective, with the lines of two rules.

    The rules start at the default; without a default they are left out. So are trials whose batch grows, whose
    learning rate is unknown, or that failed, were lost or cancelled.
    """
    constant = [trial for trial in trials if not trial.configuration.grows]
    known = [(trial, rate) for trial in constant if (rate := _learning_rate(trial.configuration)) is not None]
    valued = [(trial, rate, value) for trial, rate in known if (value := objective.figure(trial)) is not None]
    series, colours = _coloured(valued, objective) if valued else ([], None)
    for name, (symbol, colour, states) in ENDED.items():
        points = [
            _mark(trial.configuration, rate, name)
            for trial, rate in known
            if trial.state in states and objective.figure(trial) is None
        ]
        if points:
            series.append(Series(name=name, points=points, colour=colour, symbol=symbol, size=8, is_hollow=True))
    if not series:
        return None
    sizes, rates = {trial.configuration.batch_size for trial, _ in known}, extent(series)
    if default is not None:
        series += [_rule_line(rule, default, sizes) for rule in (LearningRateRule.LINEAR, LearningRateRule.SQRT)]
        mark = _mark(default, default.learning_rate, "your default")
        series.append(Series(name="your default", points=[mark], colour=INK, symbol="diamond", is_hollow=True))
        rates.append(default.learning_rate)
        sizes.add(default.batch_size)
    y = value_axis("learning rate", rates, log=True)
    return Chart(x=batch_axis(sorted(sizes)), y=y, series=series, colours=colours)


def _rule_line(rule: LearningRateRule, default: Configuration, sizes: Iterable[int]) -> Series:
    size = default.batch_size
    points = [
        Point(one, default.learning_rate * learning_rate_factor(rule, one, size)) for one in sorted({*sizes, size})
    ]
    dash: Dash = "dash" if rule is LearningRateRule.LINEAR else "dot"
    return Series(name=f"{rule.value} rule", points=points, colour=MUTED, width=1.5, dash=dash)


def _coloured(
    valued: Sequence[tuple[TrialRecord, float, float]], objective: Objective
) -> tuple[list[Series], ColourScale]:
    """Return trials coloured by the logarithm of their value, the best over the others, with the scale."""
    logs = [objective.log(value) or 0.0 for _, _, value in valued]
    low, high = min(logs), max(logs)

    def share(log: float) -> float:
        return (log - low) / ((high - low) or 1.0)

    name = "reached the target" if objective.stops_at_target else "measured"
    points = [
        _mark(
            trial.configuration,
            rate,
            f"trial {trial.number}: {number(objective.shown(value))}",
            sequence_colour(share(objective.log(value) or 0.0)),
        )
        for trial, rate, value in sorted(valued, key=lambda one: -one[2])
    ]
    ticks = _log_ticks(low, high) if objective.has_ratios else [low, (low + high) / 2, high]
    texts = [(share(tick), number(objective.shown(objective.from_log(tick)))) for tick in ticks]
    series = Series(name=name, points=points, colour=sequence_colour(0.5), symbol="circle", size=8)
    return [series], ColourScale(objective.axis_title.removesuffix(" to the target"), texts)


def _log_ticks(low: float, high: float) -> list[float]:
    return [math.log(tick) for tick in round_numbers(math.exp(low), math.exp(high))]


def _mark(configuration: Configuration, rate: float, about: str, colour: str | None = None) -> Point:
    """Return a trial's or a configuration's point at batch size and learning rate."""
    place = f"batch {configuration.batch_size}, learning rate {number(rate)}"
    return Point(configuration.batch_size, rate, f"{about}\n{place}", colour=colour)


def _learning_rate(configuration: Configuration) -> float | None:
    """Return the learning rate; None where it is not known, as it may be of imported runs."""
    rate = parameters_of(configuration)["learning_rate"]
    return rate if isinstance(rate, float) and rate > 0 else None


def thinned(curve: Sequence[Observation]) -> list[Observation]:
    """Return at most `CURVE_POINTS` of the finite points after step 0, which a logarithmic axis cannot show."""
    finite = [one for one in curve if math.isfinite(one.metric) and one.train_seconds > 0]
    if len(finite) <= CURVE_POINTS:
        return finite
    return [finite[round(index)] for index in np.linspace(0, len(finite) - 1, CURVE_POINTS)]
