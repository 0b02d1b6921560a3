"""The figures of a study's page that show one figure of each batch size. None where nothing is known to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bssearch.analysis.answer import Answer, Batch, Ratio, objective_in
from bssearch.analysis.batches import LAW_NOT_TIMED
from bssearch.analysis.law.fitted import Fit, Law
from bssearch.analysis.objectives.time_to_target import TIME
from bssearch.pages.axes import (
    ACCENT,
    BAND,
    INK,
    MUTED,
    PADDING,
    PAGE,
    SECOND,
    Figure,
    batch_axis,
    framed,
    label,
    value_axis,
)
from bssearch.pages.traces import (
    dense_sizes,
    dotted_line,
    extent,
    hollow_marker,
    interval_trace,
    law_curve,
    lower_bounds,
    reference_line,
)

REGIME_SYMBOLS: Mapping[str | None, str] = {
    None: "circle",
    "perfect": "circle",
    "diminishing": "square",
    "maximal": "diamond",
    "undecided": "cross",
}


def objective_figure(answer: Answer, default_batch_size: int | None = None) -> Figure | None:
    """Return the objective's figure against batch size: intervals, lower bounds, the law, the range within 5 %.

    ``default_batch_size``: where to show what the default took, None for nowhere.
    """
    objective = objective_in(answer)
    known = [row for row in answer.batches if row.objective_value is not None]
    if not known:
        return None
    missed = [(row, bound) for row in answer.batches if (bound := row.objective_lower_bound) is not None]
    data = [_band(answer), _law_line(answer), *_with_intervals(answer, known)]
    if missed:
        data.append(lower_bounds([(row.batch_size, bound, _row_text(row)) for row, bound in missed], objective.exceeds))
    if default_batch_size is not None and answer.speedup.over_default is not None:
        data.append(_default_mark(answer, default_batch_size, answer.speedup.over_default))
    drawn = [trace for trace in data if trace is not None]
    values = [value for trace in drawn for value in extent(trace)]
    y = value_axis(objective.axis_title, values, log=objective.has_ratios)
    _stretch_band(drawn[0], y)
    figure = framed(drawn, batch_axis(_sizes(answer)), y)
    _mark_largest(figure, answer)
    return figure


def time_figure(answer: Answer) -> Figure | None:
    """Return seconds to the target against batch size, for a study with another objective."""
    known = [row for row in answer.batches if row.time_to_target_s is not None]
    if not known or answer.objective == TIME.name:
        return None
    points = [(row.batch_size, row.time_to_target_s) for row in known]
    trace = interval_trace([(size, one) for size, one in points if one is not None], "best tuned", ACCENT)
    return framed([trace], batch_axis(_sizes(answer)), value_axis(TIME.axis_title, extent(trace), log=True))


def steps_figure(answer: Answer) -> Figure | None:
    """Return steps to the target against batch size, by regime, with the law and the slope of perfect scaling."""
    return _against_law(
        answer,
        lambda row: row.steps_to_target,
        "optimizer steps",
        _steps_by_law,
        slope=-1,
    )


def samples_figure(answer: Answer) -> Figure | None:
    """Return samples to the target against batch size, by regime, with the law and the level of perfect scaling."""
    return _against_law(
        answer,
        lambda row: row.samples_to_target,
        "training samples",
        lambda law, size: size * _steps_by_law(law, size),
        slope=0,
    )


def front_figure(answer: Answer, *, priced: bool) -> Figure | None:
    """Return each batch size's time and cost to the target; ``priced``: the cost is money, else samples."""
    if not answer.front:
        return None
    front = sorted((one for one in answer.front if one.on_front), key=lambda one: one.time_to_target_s)
    others = [one for one in answer.front if not one.on_front]
    confirmed = {row.batch_size for row in answer.batches if row.confirmed}
    single = [one for one in others if confirmed and one.batch_size not in confirmed]
    beaten = [one for one in others if one not in single]
    best = [one for one in answer.front if one.batch_size == answer.optimal.batch_size]
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers+text" if points is front else "markers+text",
            "name": name,
            "x": [one.time_to_target_s for one in points],
            "y": [one.cost for one in points],
            "text": [str(one.batch_size) for one in points],
            "textposition": position,
            "textfont": {"color": INK},
            "cliponaxis": False,
            "marker": marker,
            "line": {"color": ACCENT, "width": 1.5, "shape": "hv"},
            "hovertemplate": "batch %{text}<br>%{x:.4~g} s, cost %{y:.4~s}<extra></extra>",
        }
        for name, points, marker, position in (
            ("best trade-offs", front, {"color": ACCENT, "size": 9}, "bottom left"),
            ("beaten in both", beaten, {"color": MUTED, "size": 9}, "top right"),
            ("a single search trial, not compared", single, hollow_marker("circle-open"), "top right"),
        )
        if points
    ]
    if best:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "recommended",
                "x": [one.time_to_target_s for one in best],
                "y": [one.cost for one in best],
                "marker": {"color": SECOND, "size": 14, "symbol": "star"},
                "hoverinfo": "skip",
            }
        )
    seconds, costs = [one.time_to_target_s for one in answer.front], [one.cost for one in answer.front]
    cost = "price" if priced else "training samples"
    x = value_axis("train seconds to the target", seconds, log=True, room=2 * PADDING)
    return framed(data, x, value_axis(f"{cost} to the target", costs, log=True, room=2 * PADDING))


def throughput_figure(answer: Answer) -> Figure | None:
    """Return samples per second against batch size."""
    return _plain(answer, lambda row: row.samples_per_s, "training samples a second", log=True)


def memory_figure(answer: Answer) -> Figure | None:
    """Return peak memory against batch size, in GiB or MiB, with the device's own where the peaks come near it."""
    peaks = [row.peak_memory_bytes for row in answer.batches if row.peak_memory_bytes is not None]
    name, size = ("GiB", 2**30) if max(peaks, default=0) >= 2**30 else ("MiB", 2**20)
    title = f"peak memory, {name}"

    def shown(row: Batch) -> float | None:
        return None if row.peak_memory_bytes is None else row.peak_memory_bytes / size

    figure = _plain(answer, shown, title, log=False)
    limit = (answer.device.memory_bytes or 0) / size
    if figure is None or not limit or max(figure["data"][0]["y"]) < limit / 4:
        return figure
    figure["layout"]["yaxis"] = value_axis(title, [0.0, *figure["data"][0]["y"], limit], log=False)
    figure["layout"]["shapes"] = [reference_line("h", limit, SECOND)]
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
        sizes = dense_sizes(list(fit.residuals))
        data.append(law_curve([(size, expected(fit, size)) for size in sizes], "the law", fit))
    if len(known) > 1:
        (first, at_first), last = known[0], known[-1][0].batch_size
        ends = [(size, at_first * (size / first.batch_size) ** slope) for size in (first.batch_size, last)]
        data.append(dotted_line(ends, "perfect scaling"))
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
            trace = interval_trace([(size, one) for size, one in points if one is not None], name, fill)
            trace["customdata"] = [_row_text(row) for row in here]
            trace["hovertemplate"] = "batch %{x}: %{y:.4~g}<br>%{customdata}<extra></extra>"
            if name == "optimal":
                trace["marker"] |= {"size": 14, "symbol": "star"}
            traces.append(trace)
    return traces


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
        "marker": {**hollow_marker("arrow-up-open" if ratio.at_least else "diamond-open"), "size": 12},
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
    """Return the objective that the law predicts, up to the largest batch size that reached the target."""
    fit = _drawn_law(answer)
    if fit is None:
        return None
    objective, sizes = objective_in(answer), list(fit.residuals)
    timed = {row.batch_size: row.step_time_s for row in answer.batches if row.step_time_s is not None}
    inside = [size for size in timed if min(sizes) <= size <= max(sizes)]
    needs_step_times = objective.predicted(1.0, 1.0, None) is None
    is_timed = all(warning.code != LAW_NOT_TIMED for warning in answer.warnings)
    if needs_step_times and (len(inside) < 2 or not is_timed):
        return None
    points = []
    for size in dense_sizes(inside if needs_step_times else sizes):
        figure = objective.predicted(_steps_by_law(fit, size), size, _step_seconds_at(timed, size))
        if figure is not None:
            points.append((size, figure))
    name = "law × step time" if needs_step_times else "the law"
    return law_curve(points, name, fit) if points else None


def _step_seconds_at(timed: Mapping[int, float], size: float) -> float | None:
    """Return the seconds of a step, log-log interpolated between the batch sizes that were timed; None without any."""
    if not timed:
        return None
    return math.exp(np.interp(math.log(size), np.log(list(timed)), np.log(list(timed.values()))))


def _steps_by_law(law: Law, size: float) -> float:
    """Return S_min·(1 + B_crit / B)."""
    return law.s_min * (1 + law.b_crit.estimate / size)


def _drawn_law(answer: Answer) -> Fit | None:
    """Return the law where enough batch sizes speak for or against it."""
    fit = answer.fit
    return None if fit is None or fit.verdict == "too_few_points" else fit


def _mark_largest(figure: Figure, answer: Answer) -> None:
    """Mark the largest batch size that fits, or was tried, by a line, named at the top of the figure."""
    largest = answer.largest_that_fits
    size = largest.batch_size
    figure["layout"]["shapes"] = [reference_line("v", size, MUTED)]
    figure["layout"]["annotations"] = [
        {
            "x": math.log10(size),
            "yref": "paper",
            "y": 1,
            "text": f"{largest.in_words}: {size} ",
            "showarrow": False,
            "xanchor": "right",
            "yanchor": "top",
            "font": {"color": MUTED},
        }
    ]


def _row_text(row: Batch) -> str:
    """Return the text beside a batch size's figure when it is pointed at."""
    parts = [f"{row.reached} of {row.trials} trials reached the target"]
    time = row.time_to_target_s
    if time is not None:
        parts.append("a single run" if time.runs == 1 else f"median of {time.runs} runs")
        if time.basis != "measured":
            parts.append(label(time.basis))
    return "<br>".join([*parts, *(label(reason) for reason in row.untuned_because)])


def _sizes(answer: Answer) -> list[int]:
    return [row.batch_size for row in answer.batches]
