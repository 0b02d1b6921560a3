"""The figures of a study's page. A figure is None where nothing is known to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bssearch.analysis.answer import Answer, Batch, Fit, Law, Ratio, parameters_of
from bssearch.analysis.numbers import number
from bssearch.analysis.objectives.measure import Measure
from bssearch.pages.axes import (
    ACCENT,
    BAND,
    INK,
    MUTED,
    PADDING,
    PAGE,
    SECOND,
    THIRD,
    Figure,
    batch_axis,
    framed,
    label,
    round_numbers,
    value_axis,
)
from bssearch.records import Configuration, Objective, Observation, TrialRecord, TrialState
from bssearch.scaling import LearningRateRule, learning_rate_factor

Pairs = Sequence[tuple[float, float]]

CURVE_POINTS = 200

AXIS_TITLES = {
    Objective.TIME_TO_TARGET: "train seconds to the target",
    Objective.SAMPLES_TO_TARGET: "training samples to the target",
    Objective.COST_TO_TARGET: "cost to the target",
    Objective.ENERGY_TO_TARGET: "joules to the target",
    Objective.METRIC_IN_BUDGET: "metric in the budget",
}
COLOUR_TITLES = {
    Objective.TIME_TO_TARGET: "seconds",
    Objective.SAMPLES_TO_TARGET: "samples",
    Objective.COST_TO_TARGET: "cost",
    Objective.ENERGY_TO_TARGET: "joules",
    Objective.METRIC_IN_BUDGET: "metric",
}
REGIME_SYMBOLS: Mapping[str | None, str] = {
    None: "circle",
    "perfect": "circle",
    "diminishing": "square",
    "maximal": "diamond",
}
STATES = {
    "stopped before the target": ("triangle-up-open", MUTED, {state for state in TrialState if state.is_censored}),
    "diverged": ("x-thin-open", SECOND, {TrialState.DIVERGED}),
    "out of memory": ("square-open", SECOND, {TrialState.OOM}),
}


def objective_figure(answer: Answer, default_batch_size: int | None = None) -> Figure | None:
    """Return the objective's figure against batch size: intervals, lower bounds, the law, the range within 5 %.

    ``default_batch_size``: where to show what the default took, None for nowhere.
    """
    known = [row for row in answer.batches if row.objective_value is not None]
    if not known:
        return None
    missed = [(row, bound) for row in answer.batches if (bound := row.objective_lower_bound) is not None]
    data = [_band(answer), _law_line(answer), *_with_intervals(answer, known)]
    if missed:
        more = "longer" if answer.objective == Objective.TIME_TO_TARGET else "more"
        data.append(_bounds([(row.batch_size, bound, _row_text(row)) for row, bound in missed], more))
    if default_batch_size is not None and answer.speedup.over_default is not None:
        data.append(_default_mark(answer, default_batch_size, answer.speedup.over_default))
    drawn = [trace for trace in data if trace is not None]
    values = [value for trace in drawn for value in _extent(trace)]
    title = AXIS_TITLES[Objective(answer.objective)]
    y = value_axis(title, values, log=answer.objective != Objective.METRIC_IN_BUDGET)
    _stretch_band(drawn[0], y)
    figure = framed(drawn, batch_axis(_sizes(answer)), y)
    _mark_largest(figure, answer)
    return figure


def time_figure(answer: Answer) -> Figure | None:
    """Return seconds to the target against batch size, for a study with another objective."""
    known = [row for row in answer.batches if row.time_to_target_s is not None]
    if not known or answer.objective == Objective.TIME_TO_TARGET:
        return None
    points = [(row.batch_size, row.time_to_target_s) for row in known]
    trace = _interval_trace([(size, one) for size, one in points if one is not None], "best tuned", ACCENT)
    title = AXIS_TITLES[Objective.TIME_TO_TARGET]
    return framed([trace], batch_axis(_sizes(answer)), value_axis(title, _extent(trace), log=True))


def steps_figure(answer: Answer) -> Figure | None:
    """Return steps to the target against batch size, by regime, with the law and the slope of perfect scaling."""
    return _against_law(
        answer,
        lambda row: row.steps_to_target,
        "optimizer steps",
        lambda law, size: law.s_min * (1 + law.b_crit.estimate / size),
        slope=-1,
    )


def samples_figure(answer: Answer) -> Figure | None:
    """Return samples to the target against batch size, by regime, with the law and the level of perfect scaling."""
    return _against_law(
        answer,
        lambda row: row.samples_to_target,
        "training samples",
        lambda law, size: law.s_min * (size + law.b_crit.estimate),
        slope=0,
    )


def front_figure(answer: Answer, *, priced: bool) -> Figure | None:
    """Return what each batch size takes in time and in cost; ``priced``: the cost is money, else samples."""
    if not answer.front:
        return None
    front = sorted((one for one in answer.front if one.on_front), key=lambda one: one.time_to_target_s)
    beaten = [one for one in answer.front if not one.on_front]
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers+text" if colour is ACCENT else "markers+text",
            "name": name,
            "x": [one.time_to_target_s for one in points],
            "y": [one.cost for one in points],
            "text": [str(one.batch_size) for one in points],
            "textposition": position,
            "textfont": {"color": INK},
            "marker": {"color": colour, "size": 9},
            "line": {"color": colour, "width": 1.5, "shape": "hv"},
            "hovertemplate": "batch %{text}<br>%{x:.4~g} s, cost %{y:.4~s}<extra></extra>",
        }
        for name, points, colour, position in (
            ("best trade-offs", front, ACCENT, "bottom left"),
            ("beaten in both", beaten, MUTED, "top right"),
        )
        if points
    ]
    seconds, costs = [one.time_to_target_s for one in answer.front], [one.cost for one in answer.front]
    cost = "price" if priced else "training samples"
    x = value_axis("train seconds to the target", seconds, log=True)
    return framed(data, x, value_axis(f"{cost} to the target", costs, log=True, room=2 * PADDING))


def curve_trials(answer: Answer, trials: Iterable[TrialRecord]) -> dict[int, int]:
    """Return by batch size the trial whose curve stands for it: its fastest, else the one that came nearest."""
    chosen = {row.batch_size: row.best.trial for row in answer.batches if row.best is not None}
    sign = 1 if answer.target.goal == "maximize" else -1
    nearest: dict[int, tuple[float, int]] = {}
    for trial in trials:
        size = trial.configuration.batch_size
        metric = None if trial.outcome is None else trial.outcome.best_metric
        if size not in chosen and metric is not None:
            nearest[size] = max(nearest.get(size, (-math.inf, 0)), (sign * metric, trial.number))
    return dict(sorted({**{size: one for size, (_, one) in nearest.items()}, **chosen}.items()))


def curves_figure(answer: Answer, curves: Mapping[int, Sequence[Observation]]) -> Figure | None:
    """Return the metric over train seconds of one run for each batch size, at most `CURVE_POINTS` points of each."""
    drawn = {size: points for size, curve in curves.items() if len(points := _thin(curve)) > 1}
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
                "color": _along(index, len(drawn)),
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
    figure["layout"]["shapes"] = [_line("h", answer.target.value, ACCENT)]
    figure["layout"]["annotations"] = [
        {
            "xref": "paper",
            "x": 0.01,
            "y": answer.target.value,
            "text": f"target {answer.target.goal.sign} {answer.target.value:g}",
            "showarrow": False,
            "xanchor": "left",
            "yanchor": "bottom",
            "font": {"color": ACCENT},
        }
    ]
    return figure


def learning_rate_figure(
    trials: Sequence[TrialRecord], measure: Measure, default: Configuration | None
) -> Figure | None:
    """Return learning rate and batch size of all trials, coloured by the objective's figure, with two rules' lines.

    ``default``: where the rules start, None where it is not known. Trials whose learning rate is not known, and those
    that say nothing (failed, lost, cancelled), are left out.
    """
    known = [(trial, rate) for trial in trials if (rate := _learning_rate(trial.configuration)) is not None]
    valued = [(trial, rate, value) for trial, rate in known if (value := measure.of(trial)) is not None]
    data = [_coloured(valued, measure)] if valued else []
    for name, (symbol, colour, states) in STATES.items():
        ended = [(trial, rate) for trial, rate in known if trial.state in states and measure.of(trial) is None]
        if ended:
            data.append(_marks(name, ended, {"symbol": symbol, "color": colour, "size": 7}))
    if not data:
        return None
    sizes = sorted({trial.configuration.batch_size for trial, _ in known})
    rates = [rate for trace in data for rate in trace["y"]]
    if default is not None:
        data += [_rule_line(rule, default, sizes) for rule in (LearningRateRule.LINEAR, LearningRateRule.SQRT)]
        data.append(_marks("your default", [(default, default.learning_rate)], _hollow("diamond-open")))
        rates.append(default.learning_rate)
        sizes = sorted({*sizes, default.batch_size})
    return framed(data, batch_axis(sizes), value_axis("learning rate", rates, log=True))


def throughput_figure(answer: Answer) -> Figure | None:
    """Return samples per second against batch size."""
    return _plain(answer, lambda row: row.samples_per_s, "training samples a second", log=True)


def memory_figure(answer: Answer) -> Figure | None:
    """Return peak memory in GiB against batch size, with the device's own where the peaks come near it."""

    def gib(row: Batch) -> float | None:
        return None if row.peak_memory_bytes is None else row.peak_memory_bytes / 2**30

    figure = _plain(answer, gib, "peak memory, GiB", log=False)
    limit = (answer.device.memory_bytes or 0) / 2**30
    if figure is None or not limit or max(figure["data"][0]["y"]) < limit / 4:
        return figure
    figure["layout"]["yaxis"] = value_axis("peak memory, GiB", [0.0, *figure["data"][0]["y"], limit], log=False)
    figure["layout"]["shapes"] = [_line("h", limit, SECOND)]
    return figure


def _against_law(
    answer: Answer,
    value: Callable[[Batch], float | None],
    title: str,
    expected: Callable[[Law, float], float],
    slope: int,
) -> Figure | None:
    known = [(row, one) for row in answer.batches if (one := value(row)) is not None]
    if not known:
        return None
    data = []
    fit = _drawn_law(answer)
    if fit is not None:
        sizes = _span(list(fit.residuals))
        data.append(_curve([(size, expected(fit, size)) for size in sizes], "the law", fit))
    if len(known) > 1:
        (first, at_first), last = known[0], known[-1][0].batch_size
        ends = [(size, at_first * (size / first.batch_size) ** slope) for size in (first.batch_size, last)]
        data.append(_dotted(ends, "perfect scaling"))
    for regime, symbol in REGIME_SYMBOLS.items():
        points = [(row, one) for row, one in known if row.regime == regime]
        if points:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": regime or "smallest",
                    "showlegend": regime is not None,
                    "x": [row.batch_size for row, _ in points],
                    "y": [one for _, one in points],
                    "customdata": ["not tuned" if row.untuned else "" for row, _ in points],
                    "marker": {
                        "symbol": [f"{symbol}-open" if row.untuned else symbol for row, _ in points],
                        "color": MUTED if regime is None else ACCENT,
                        "size": 10,
                        "line": {"color": MUTED if regime is None else ACCENT, "width": 2},
                    },
                    "hovertemplate": "batch %{x}: %{y:,.4~r} %{customdata}<extra></extra>",
                }
            )
    y = value_axis(f"{title} to the target", [one for _, one in known], log=True)
    return framed(data, batch_axis(_sizes(answer)), y)


def _plain(answer: Answer, value: Callable[[Batch], float | None], title: str, *, log: bool) -> Figure | None:
    """Return one figure of each batch size as a line with marks."""
    known = [(row.batch_size, one) for row in answer.batches if (one := value(row)) is not None]
    if not known:
        return None
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [size for size, _ in known],
        "y": [one for _, one in known],
        "marker": {"color": ACCENT, "size": 8},
        "line": {"color": ACCENT, "width": 1.5},
        "hovertemplate": "batch %{x}: %{y:,.4~r}<extra></extra>",
    }
    values = [one for _, one in known] + ([] if log else [0.0])
    figure = framed([trace], batch_axis(_sizes(answer)), value_axis(title, values, log=log))
    figure["layout"]["showlegend"] = False
    return figure


def _with_intervals(answer: Answer, rows: Sequence[Batch]) -> list[Figure]:
    """Return the optimum and the other batch sizes, confirmed ones filled."""
    best = answer.optimal.batch_size
    groups = (
        ("confirmed by fresh seeds", [row for row in rows if row.confirmed and row.batch_size != best], ACCENT),
        ("a single search trial", [row for row in rows if not row.confirmed and row.batch_size != best], PAGE),
        ("optimal", [row for row in rows if row.batch_size == best], SECOND),
    )
    traces = []
    for name, here, fill in groups:
        points = [(row.batch_size, row.objective_value) for row in here]
        if points:
            trace = _interval_trace([(size, one) for size, one in points if one is not None], name, fill)
            trace["customdata"] = [_row_text(row) for row in here]
            trace["hovertemplate"] = "batch %{x}: %{y:.4~g}<br>%{customdata}<extra></extra>"
            if name == "optimal":
                trace["marker"] |= {"size": 14, "symbol": "star"}
            traces.append(trace)
    return traces


def _interval_trace(points: Sequence[tuple[int, Any]], name: str, fill: str) -> Figure:
    """Return figures with their intervals: each has a median, and a low and a high that may be None."""
    edge = ACCENT if fill is PAGE else fill
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [size for size, _ in points],
        "y": [one.median for _, one in points],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [0 if one.high is None else one.high - one.median for _, one in points],
            "arrayminus": [0 if one.low is None else one.median - one.low for _, one in points],
            "color": edge,
            "thickness": 1.5,
            "width": 5,
        },
        "marker": {"color": fill, "size": 9, "line": {"color": edge, "width": 1.75}},
        "hovertemplate": "batch %{x}: %{y:.4~g}<extra></extra>",
    }


def _bounds(points: Iterable[tuple[int, float, str]], more: str) -> Figure:
    """Return lower bounds as arrows upward, what is not known being ``more`` than they are."""
    sizes, values, texts = zip(*points, strict=True)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{more} than this: target not reached",
        "x": list(sizes),
        "y": list(values),
        "customdata": list(texts),
        "marker": {"symbol": "arrow-up", "color": MUTED, "size": 14},
        "hovertemplate": f"batch %{{x}}: {more} than %{{y:.4~g}}<br>%{{customdata}}<extra></extra>",
    }


def _default_mark(answer: Answer, batch_size: int, ratio: Ratio) -> Figure | None:
    """Return the default as run, not the best tuned at its batch size."""
    best = answer.optimal.objective_value
    if best is None:
        return None
    longer = "longer than " if ratio.at_least else ""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"your default{' (longer than this)' if ratio.at_least else ''}",
        "x": [batch_size],
        "y": [best.median * ratio.value],
        "marker": {**_hollow("arrow-up-open" if ratio.at_least else "diamond-open"), "size": 12},
        "hovertemplate": f"your default, batch %{{x}}: {longer}%{{y:.4~g}}<extra></extra>",
    }


def _band(answer: Answer) -> Figure:
    """Return the range within 5 % as an area; `_stretch_band` gives it the height of the figure."""
    low, high = answer.flat_range
    left, right = low / 2**0.2, high * 2**0.2
    span = str(low) if low == high else f"{low} to {high}"
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"within 5 %: {span}",
        "x": [left, left, right, right],
        "y": [],
        "fill": "toself",
        "fillcolor": BAND,
        "line": {"width": 0, "color": BAND},
        "hoverinfo": "skip",
    }


def _stretch_band(band: Figure, axis: Figure) -> None:
    low, high = axis["range"]
    if axis["type"] == "log":
        low, high = 10**low, 10**high
    band["y"] = [low, high, high, low]


def _law_line(answer: Answer) -> Figure | None:
    """Return what the law expects of the objective, up to the largest batch size that reached the target."""
    fit = _drawn_law(answer)
    if fit is None:
        return None
    sizes = list(fit.residuals)
    if answer.objective == Objective.SAMPLES_TO_TARGET:
        expected = [(size, fit.s_min * (size + fit.b_crit.estimate)) for size in _span(sizes)]
        return _curve(expected, "the law", fit)
    timed = {row.batch_size: row.step_time_s for row in answer.batches if row.step_time_s is not None}
    inside = [size for size in timed if min(sizes) <= size <= max(sizes)]
    if answer.objective != Objective.TIME_TO_TARGET or len(inside) < 2:
        return None
    span = _span(inside)
    logs = np.interp(np.log(span), np.log(list(timed)), np.log(list(timed.values())))
    steps = [fit.s_min * (1 + fit.b_crit.estimate / size) for size in span]
    return _curve([(b, s * math.exp(t)) for b, s, t in zip(span, steps, logs, strict=True)], "law × step time", fit)


def _drawn_law(answer: Answer) -> Fit | None:
    """Return the law where enough batch sizes speak for or against it."""
    fit = answer.fit
    return None if fit is None or fit.verdict == "too_few_points" else fit


def _curve(points: Pairs, name: str, fit: Fit) -> Figure:
    """Return a line of the law, dashed and called poor where the law does not fit."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name if fit.verdict == "fits" else f"{name} (poor fit)",
        "x": [size for size, _ in points],
        "y": [value for _, value in points],
        "line": {"color": THIRD, "width": 2, "dash": "solid" if fit.verdict == "fits" else "dash"},
        "hoverinfo": "skip",
    }


def _dotted(points: Pairs, name: str, dash: str = "dot") -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [size for size, _ in points],
        "y": [value for _, value in points],
        "line": {"color": MUTED, "width": 1.5, "dash": dash},
        "hoverinfo": "skip",
    }


def _rule_line(rule: LearningRateRule, default: Configuration, sizes: Sequence[int]) -> Figure:
    size = default.batch_size
    ends = sorted({sizes[0], size, sizes[-1]})
    points = [(float(one), default.learning_rate * learning_rate_factor(rule, one, size)) for one in ends]
    return _dotted(points, f"{rule.value} rule", "dash" if rule is LearningRateRule.LINEAR else "dot")


def _coloured(valued: Sequence[tuple[TrialRecord, float, float]], measure: Measure) -> Figure:
    """Return trials coloured by the logarithm of their figure, with a scale in its own unit."""
    ordered = sorted(valued, key=lambda one: -one[2])  # the best on top
    logs = [math.log(value) for _, _, value in ordered]
    low, high = min(logs), max(logs)
    is_metric = measure.objective is Objective.METRIC_IN_BUDGET
    ticks = [low, (low + high) / 2, high] if is_metric else _log_ticks(low, high)
    trace = _marks("measured" if is_metric else "reached the target", [(trial, rate) for trial, rate, _ in ordered], {})
    trace["marker"] = {
        "size": 8,
        "color": logs,
        "colorscale": [[step / 4, f"var(--seq-{25 * step})"] for step in range(5)],
        "cmin": low,
        "cmax": high if high > low else low + 1,
        "line": {"color": PAGE, "width": 0.5},
        "colorbar": {
            "title": {"text": COLOUR_TITLES[measure.objective], "side": "top"},
            "tickvals": ticks,
            "ticktext": [number(measure.shown(math.exp(tick))) for tick in ticks],
            "thickness": 12,
            "outlinewidth": 0,
        },
    }
    trace["customdata"] = [f"trial {trial.number}: {number(measure.shown(value))}" for trial, _, value in ordered]
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


def _mark_largest(figure: Figure, answer: Answer) -> None:
    """Mark the largest batch size that fits by a line, named at the top of the figure."""
    size = answer.largest_that_fits.batch_size
    figure["layout"]["shapes"] = [_line("v", size, MUTED)]
    figure["layout"]["annotations"] = [
        {
            "x": math.log10(size),
            "yref": "paper",
            "y": 1,
            "text": f"largest that fits: {size} ",
            "showarrow": False,
            "xanchor": "right",
            "yanchor": "top",
            "font": {"color": MUTED},
        }
    ]


def _line(direction: str, at: float, colour: str) -> Figure:
    ends: Figure = {"type": "line", "layer": "below", "line": {"color": colour, "width": 1.25, "dash": "dot"}}
    if direction == "h":
        return {**ends, "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at}
    return {**ends, "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at}


def _hollow(symbol: str) -> Figure:
    return {"symbol": symbol, "color": INK, "size": 11, "line": {"color": INK, "width": 2}}


def _row_text(row: Batch) -> str:
    """Return what stands beside a batch size's figure when it is pointed at."""
    parts = [f"{row.reached} of {row.trials} trials reached the target"]
    time = row.time_to_target_s
    if time is not None:
        parts.append("a single run" if time.runs == 1 else f"median of {time.runs} runs")
        if time.basis == "steps_x_step_time":
            parts.append("steps × step time")
    return "<br>".join([*parts, *(label(reason) for reason in row.untuned_because)])


def _sizes(answer: Answer) -> list[int]:
    return [row.batch_size for row in answer.batches]


def _learning_rate(configuration: Configuration) -> float | None:
    """Return the learning rate; None where it is not known, as it may be of imported runs."""
    rate = parameters_of(configuration)["learning_rate"]
    return rate if isinstance(rate, float) and rate > 0 else None


def _along(index: int, count: int) -> str:
    """Return the colour of one of several things in an order."""
    return f"var(--seq-{round(100 * index / max(1, count - 1))})"


def _span(sizes: Collection[int]) -> list[float]:
    """Return batch sizes from the smallest to the largest, close enough for a smooth line."""
    low, high = min(sizes), max(sizes)
    return [float(one) for one in np.geomspace(low, high, max(2, round(12 * math.log2(high / low)) + 1))]


def _thin(curve: Sequence[Observation]) -> list[Observation]:
    """Return at most `CURVE_POINTS` of the finite points after step 0, which a logarithmic axis cannot show."""
    finite = [one for one in curve if math.isfinite(one.metric) and one.train_seconds > 0]
    if len(finite) <= CURVE_POINTS:
        return finite
    return [finite[round(index)] for index in np.linspace(0, len(finite) - 1, CURVE_POINTS)]


def _extent(trace: Figure) -> list[float]:
    """Return the values that a trace must have room for: its points and the ends of its intervals."""
    errors = trace.get("error_y", {"array": [0] * len(trace["y"]), "arrayminus": [0] * len(trace["y"])})
    ends = zip(trace["y"], errors["array"], errors["arrayminus"], strict=True)
    return [end for value, above, below in ends for end in (value + above, value - below)]
