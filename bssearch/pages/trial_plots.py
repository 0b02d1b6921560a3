"""The figures that show trials one by one: learning curves, and learning rate against batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from bssearch.analysis.answer import Answer
from bssearch.analysis.numbers import number
from bssearch.analysis.objectives.base import Objective
from bssearch.analysis.shape import parameters_of
from bssearch.pages.axes import (
    ACCENT,
    MUTED,
    PAGE,
    SECOND,
    Figure,
    batch_axis,
    framed,
    label,
    round_numbers,
    value_axis,
)
from bssearch.pages.traces import dotted_line, hollow_marker, reference_line, sequence_colour
from bssearch.records import Configuration, Observation, Target, TrialRecord, TrialState
from bssearch.scaling import LearningRateRule, learning_rate_factor

CURVE_POINTS = 200
"""Points of a learning curve on the page: a choice, more than a screen tells apart."""

STATES = {
    "stopped before the target": ("triangle-up-open", MUTED, {state for state in TrialState if state.is_censored}),
    "diverged": ("x-thin-open", SECOND, {TrialState.DIVERGED}),
    "out of memory": ("square-open", SECOND, {TrialState.OOM}),
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


def curves_figure(answer: Answer, curves: Mapping[int, Sequence[Observation]]) -> Figure | None:
    """Return the metric over train seconds of one run for each batch size, at most `CURVE_POINTS` points of each."""
    drawn = {size: points for size, curve in curves.items() if len(points := thinned(curve)) > 1}
    if not drawn:
        return None
    best = answer.optimal.batch_size
    reached = {row.batch_size for row in answer.batches if row.reached}
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"{size} (optimal)" if size == best else str(size),
            "x": [one.train_seconds for one in points],
            "y": [one.metric for one in points],
            "line": {
                "color": sequence_colour(index, len(drawn)),
                "width": 4 if size == best else 1.75,
                "dash": "solid" if size in reached else "dot",
            },
            "zorder": int(size == best),
            "hovertemplate": f"batch {size}<br>%{{x:.4~g}} s: %{{y:.4~g}}<extra></extra>",
        }
        for index, (size, points) in enumerate(drawn.items())
    ]
    seconds = [one.train_seconds for points in drawn.values() for one in points]
    metrics = [one.metric for points in drawn.values() for one in points] + [answer.target.value]
    y = value_axis(label(answer.target.metric), metrics, log=False)
    figure = framed(data, value_axis("train seconds", seconds, log=True), y)
    _mark_target(figure, answer.target)
    return figure


def recent_curves_figure(target: Target, runs: Sequence[tuple[TrialRecord, Sequence[Observation]]]) -> Figure | None:
    """Return the metric over train seconds of some trials, of which nothing else needs to be known yet."""
    drawn = [(trial, points) for trial, curve in runs if (points := thinned(curve))]
    if not drawn:
        return None
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers" if len(points) == 1 else "lines",
            "name": f"trial {trial.number}, batch {trial.configuration.batch_size}",
            "x": [one.train_seconds for one in points],
            "y": [one.metric for one in points],
            "line": {"color": sequence_colour(index, len(drawn)), "width": 2},
            "marker": {"color": sequence_colour(index, len(drawn)), "size": 7},
            "hovertemplate": f"trial {trial.number}<br>%{{x:.4~g}} s: %{{y:.4~g}}<extra></extra>",
        }
        for index, (trial, points) in enumerate(drawn)
    ]
    seconds = [one.train_seconds for _, points in drawn for one in points]
    metrics = [one.metric for _, points in drawn for one in points]
    x = value_axis("train seconds", [0.0, *seconds], log=False)
    figure = framed(data, x, value_axis(label(target.metric), [*metrics, target.value], log=False))
    _mark_target(figure, target)
    return figure


def _mark_target(figure: Figure, target: Target) -> None:
    """Draw the target as a line across a figure of curves, named at its left end."""
    figure["layout"]["shapes"] = [reference_line("h", target.value, ACCENT)]
    figure["layout"]["annotations"] = [
        {
            "xref": "paper",
            "x": 0.01,
            "y": target.value,
            "text": f"target {target.goal.sign} {target.value:g}",
            "showarrow": False,
            "xanchor": "left",
            "yanchor": "bottom",
            "font": {"color": ACCENT},
        }
    ]


def learning_rate_figure(
    trials: Sequence[TrialRecord], objective: Objective, default: Configuration | None
) -> Figure | None:
    """Return learning rate and batch size of all trials, coloured by the objective's figure, with two rules' lines.

    ``default``: where the rules start, None where it is not known. Trials whose learning rate is not known, and those
    that say nothing (failed, lost, cancelled), are left out, and so are those whose batch grows.
    """
    constant = [trial for trial in trials if not trial.configuration.grows]
    known = [(trial, rate) for trial in constant if (rate := _learning_rate(trial.configuration)) is not None]
    valued = [(trial, rate, value) for trial, rate in known if (value := objective.figure(trial)) is not None]
    data = [_coloured(valued, objective)] if valued else []
    for name, (symbol, colour, states) in STATES.items():
        ended = [(trial, rate) for trial, rate in known if trial.state in states and objective.figure(trial) is None]
        if ended:
            data.append(_marks(name, ended, {"symbol": symbol, "color": colour, "size": 7}))
    if not data:
        return None
    sizes = sorted({trial.configuration.batch_size for trial, _ in known})
    rates = [rate for trace in data for rate in trace["y"]]
    if default is not None:
        data += [_rule_line(rule, default, sizes) for rule in (LearningRateRule.LINEAR, LearningRateRule.SQRT)]
        data.append(_marks("your default", [(default, default.learning_rate)], hollow_marker("diamond-open")))
        rates.append(default.learning_rate)
        sizes = sorted({*sizes, default.batch_size})
    return framed(data, batch_axis(sizes), value_axis("learning rate", rates, log=True))


def _rule_line(rule: LearningRateRule, default: Configuration, sizes: Sequence[int]) -> Figure:
    size = default.batch_size
    ends = sorted({sizes[0], size, sizes[-1]})
    points = [(float(one), default.learning_rate * learning_rate_factor(rule, one, size)) for one in ends]
    return dotted_line(points, f"{rule.value} rule", "dash" if rule is LearningRateRule.LINEAR else "dot")


def _coloured(valued: Sequence[tuple[TrialRecord, float, float]], objective: Objective) -> Figure:
    """Return trials coloured by the logarithm of their figure, with a scale in its own unit."""
    ordered = sorted(valued, key=lambda one: -one[2])  # the best on top
    logs = [objective.log(value) or 0.0 for _, _, value in ordered]
    low, high = min(logs), max(logs)
    ticks = _log_ticks(low, high) if objective.has_ratios else [low, (low + high) / 2, high]
    trace = _marks(
        "reached the target" if objective.stops_at_target else "measured",
        [(trial, rate) for trial, rate, _ in ordered],
        {},
    )
    trace["marker"] = {
        "size": 8,
        "color": logs,
        "colorscale": [[step / 4, f"var(--seq-{25 * step})"] for step in range(5)],
        "cmin": low,
        "cmax": high if high > low else low + 1,
        "line": {"color": PAGE, "width": 0.5},
        "colorbar": {
            "title": {"text": objective.axis_title.removesuffix(" to the target"), "side": "top"},
            "tickvals": ticks,
            "ticktext": [number(objective.shown(objective.from_log(tick))) for tick in ticks],
            "thickness": 12,
            "outlinewidth": 0,
        },
    }
    trace["customdata"] = [f"trial {trial.number}: {number(objective.shown(value))}" for trial, _, value in ordered]
    trace["hovertemplate"] = "%{customdata}<br>batch %{x}, learning rate %{y:.3~g}<extra></extra>"
    return trace


def _log_ticks(low: float, high: float) -> list[float]:
    return [math.log(tick) for tick in round_numbers(math.exp(low), math.exp(high))]


def _marks(name: str, points: Sequence[tuple[TrialRecord | Configuration, float]], marker: Figure) -> Figure:
    """Return trials, or a configuration, as marks at batch size and learning rate."""
    ran = [one if isinstance(one, Configuration) else one.configuration for one, _ in points]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [one.batch_size for one in ran],
        "y": [rate for _, rate in points],
        "marker": marker,
        "hovertemplate": f"{name}<br>batch %{{x}}, learning rate %{{y:.3~g}}<extra></extra>",
    }


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
