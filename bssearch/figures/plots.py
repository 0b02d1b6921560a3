"""The charts of a study's page. A chart without data is None."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date

import numpy as np

from bssearch.analysis.answer import Answer, Batch, Figure as Median, Time, objective_in
from bssearch.analysis.batches import LAW_NOT_TIMED
from bssearch.analysis.objectives import TIME, Objective
from bssearch.analysis.shape import Fit, Law, parameters_of
from bssearch.figures.svg import (
    ACCENT,
    INK,
    MUTED,
    PADDING,
    SECOND,
    THIRD,
    Band,
    Chart,
    ColourScale,
    Dash,
    Point,
    ReferenceLine,
    Series,
    Symbol,
    batch_axis,
    extent,
    picture,
    round_numbers,
    sequence_colour,
    short_name,
    value_axis,
)
from bssearch.records import (
    Configuration,
    LearningRateRule,
    Observation,
    Target,
    TrialRecord,
    TrialState,
    learning_rate_factor,
)
from bssearch.records.text import number, plural, span

REGIME_SYMBOLS: Mapping[str | None, Symbol] = {
    None: "circle",
    "perfect": "circle",
    "diminishing": "square",
    "maximal": "diamond",
    "undecided": "cross",
}


def objective_picture(answer: Answer, *, default_batch_size: int | None = None, measured_on: date | None = None) -> str:
    chart = objective_chart(answer, default_batch_size)
    objective, best = objective_in(answer), answer.optimal
    title = f"{objective.axis_title.capitalize()} by batch size"
    if objective.stops_at_target:
        title += f": {answer.target.in_words}"
    value = f" at {number(best.objective_value.median)}{objective.unit}"
    figured = [row for row in answer.batches if row.objective_value is not None]
    seeds = " over fresh seeds" if all(row.confirmed for row in figured) else ""
    return picture(
        chart,
        title=title,
        subtitle=f"median and 95 % interval{seeds}, with each batch size's best hyperparameters",
        footnote=", ".join(
            [f"study {answer.study}", answer.device.name, *([] if measured_on is None else [measured_on.isoformat()])]
        ),
        about=f"{title}. Optimal: batch {best.batch_size}{value}.",
    )


def objective_chart(answer: Answer, default_batch_size: int | None = None) -> Chart:
    objective = objective_in(answer)
    series = [
        *_law_of_figures(answer),
        *_medians(answer),
        *_lower_bounds(answer),
        *([] if default_batch_size is None else _default(answer, default_batch_size)),
    ]
    low, high = answer.flat_range
    largest, over = answer.largest_that_fits, answer.speedup.over_largest
    times = "" if over is None else f", {'> ' if over.at_least else ''}{number(over.value)}× the optimum"
    return Chart(
        x=batch_axis(_sizes(answer)),
        y=value_axis(objective.axis_title, extent(series), log=objective.has_ratios),
        series=series,
        bands=[Band(f"within 5 %: {span(answer.flat_range)}", low / 2**0.2, high * 2**0.2)],
        rules=[
            ReferenceLine(
                at=largest.batch_size, name=f"{largest.in_words}: {largest.batch_size}{times}", is_upright=True
            )
        ],
    )


def time_chart(answer: Answer) -> Chart | None:
    """Draw the seconds to the target. Returns None if the times are unknown or are the objective."""
    known = [(row.batch_size, row.time_to_target_s) for row in answer.batches if row.time_to_target_s is not None]
    if not known or answer.objective == TIME.name:
        return None
    series = [Series(name="best tuned", points=[_median(size, time) for size, time in known], symbol="circle")]
    return Chart(x=batch_axis(_sizes(answer)), y=value_axis(TIME.axis_title, extent(series), log=True), series=series)


def steps_chart(answer: Answer) -> Chart | None:
    return _against_law(answer, lambda row: row.steps_to_target, "optimizer steps", _steps_by_law, slope=-1)


def samples_chart(answer: Answer) -> Chart | None:
    return _against_law(
        answer,
        lambda row: row.samples_to_target,
        "training samples",
        lambda law, size: size * _steps_by_law(law, size),
        slope=0,
    )


def front_chart(answer: Answer, *, priced: bool) -> Chart | None:
    confirmed = {row.batch_size for row in answer.batches if row.confirmed}
    points = {
        one.batch_size: Point(
            one.time_to_target_s,
            one.cost,
            f"batch {one.batch_size}\n{number(one.time_to_target_s, 4)} s, cost {number(one.cost, 4)}",
            str(one.batch_size),
        )
        for one in sorted(answer.front, key=lambda one: one.time_to_target_s)
    }
    front = {one.batch_size for one in answer.front if one.on_front}
    single = points.keys() - front - confirmed if confirmed else set()
    return _trade_offs(
        [point for size, point in points.items() if size in front],
        [point for size, point in points.items() if size not in front | single],
        _apart(
            "a single search trial, not compared", [point for size, point in points.items() if size in single], "circle"
        ),
        Series(
            name="recommended",
            points=[Point(point.x, point.y) for size, point in points.items() if size == answer.optimal.batch_size],
            colour=SECOND,
            symbol="star",
            size=14,
        ),
        cost="price" if priced else "training samples",
    )


def devices_chart(answer: Answer) -> Chart | None:
    points = [
        (
            one.on_front,
            Point(
                one.seconds,
                one.cost,
                f"{plural(one.world_size, 'device')}, batch {one.batch_size}\n"
                f"{number(one.seconds)} s, cost {number(one.cost)}",
                plural(one.world_size, "device"),
            ),
        )
        for one in sorted(answer.by_devices, key=lambda one: one.seconds)
    ]
    front, beaten = [[point for on_front, point in points if on_front is wanted] for wanted in (True, False)]
    return _trade_offs(front, beaten, cost="device-seconds")


def _trade_offs(front: Sequence[Point], beaten: Sequence[Point], *more: Series, cost: str) -> Chart | None:
    series = [
        Series(name="best trade-offs", points=front, symbol="circle", width=1.5, shape="hv"),
        Series(name="worse in time and cost", points=beaten, symbol="circle", colour=MUTED),
        *more,
    ]
    points = [point for one in series for point in one.points]
    if not points:
        return None
    return Chart(
        x=value_axis("train seconds to the target", [one.x for one in points], log=True, room=2 * PADDING),
        y=value_axis(f"{cost} to the target", [one.y for one in points], log=True, room=2 * PADDING),
        series=[one for one in series if one.points],
    )


def throughput_chart(answer: Answer) -> Chart | None:
    series = _connected(answer, lambda row: row.samples_per_s)
    y = series and value_axis("training samples per second", extent([series]), log=True)
    return Chart(x=batch_axis(_sizes(answer)), y=y, series=[series]) if series and y else None


def memory_chart(answer: Answer) -> Chart | None:
    """Draw peak memory, and the device's memory if a peak is at least a quarter of the device's memory."""
    peaks = [row.peak_memory_bytes for row in answer.batches if row.peak_memory_bytes is not None]
    name, unit = ("GiB", 2**30) if max(peaks, default=0) >= 2**30 else ("MiB", 2**20)
    series = _connected(answer, lambda row: None if row.peak_memory_bytes is None else row.peak_memory_bytes / unit)
    if series is None:
        return None
    limit = (answer.device.memory_bytes or 0) / unit
    limits = [limit] if limit and max(extent([series])) >= limit / 4 else []
    return Chart(
        x=batch_axis(_sizes(answer)),
        y=value_axis(f"peak memory, {name}", [0.0, *extent([series]), *limits], log=False),
        series=[series],
        rules=[ReferenceLine(at=limit, name="memory of the device", colour=SECOND) for limit in limits],
    )


def _law_curve(points: Sequence[tuple[float, float]], name: str, fit: Fit) -> Series:
    fits = fit.verdict == "fits"
    return Series(
        name=name if fits else f"{name} (poor fit)",
        points=[Point(*one) for one in points],
        colour=THIRD,
        width=2,
        dash="solid" if fits else "dash",
    )


def _against_law(
    answer: Answer,
    value: Callable[[Batch], float | None],
    title: str,
    expected: Callable[[Law, float], float],
    slope: int,
) -> Chart | None:
    known = [(row, one) for row in answer.batches if (one := value(row)) is not None]
    if not known:
        return None
    series = []
    if (fit := _drawn_law(answer)) is not None:
        series.append(_law_curve([(size, expected(fit, size)) for size in _dense_sizes(fit.residuals)], "the law", fit))
    if len(known) > 1:
        (first, at_first), last = known[0], known[-1][0].batch_size
        series.append(
            Series(
                name="perfect scaling",
                points=[
                    Point(size, at_first * (size / first.batch_size) ** slope) for size in (first.batch_size, last)
                ],
                colour=MUTED,
                width=1.5,
                dash="dot",
            )
        )
    for regime, symbol in REGIME_SYMBOLS.items():
        for is_hollow, name in ((False, regime or ""), (True, f"{regime or 'smallest'}, hardly tuned")):
            here = [(row.batch_size, one) for row, one in known if (row.regime, row.untuned) == (regime, is_hollow)]
            if here:
                series.append(
                    Series(
                        name=name,
                        points=[Point(size, one, f"batch {size}: {number(one, 4)}") for size, one in here],
                        colour=MUTED if regime is None else ACCENT,
                        symbol=symbol,
                        is_hollow=is_hollow,
                    )
                )
    return Chart(
        x=batch_axis(_sizes(answer)),
        y=value_axis(f"{title} to the target", [one for _, one in known], log=True),
        series=series,
    )


def _connected(answer: Answer, value: Callable[[Batch], float | None]) -> Series | None:
    known = [(row.batch_size, one) for row in answer.batches if (one := value(row)) is not None]
    points = [Point(size, one, f"batch {size}: {number(one, 4)}") for size, one in known]
    return Series(points=points, width=1.5, symbol="circle", size=9) if points else None


def _medians(answer: Answer) -> Iterator[Series]:
    best, unit = answer.optimal.batch_size, objective_in(answer).unit
    known = [(row, row.objective_value) for row in answer.batches if row.objective_value is not None]
    for is_hollow, name in ((False, "confirmed by fresh seeds"), (True, "a single search trial")):
        others = [(row, one) for row, one in known if row.batch_size != best and row.confirmed is not is_hollow]
        if points := [_median(row.batch_size, one, row) for row, one in others]:
            yield Series(name=name, points=points, symbol="circle", is_hollow=is_hollow)
    for row, one in known:
        if row.batch_size == best:
            yield Series(
                name="optimal",
                points=[_median(best, one, row, f"{best}: {number(one.median)}{unit}")],
                colour=SECOND,
                symbol="star",
                size=14,
            )


def _median(size: int, figure: Median | Time, row: Batch | None = None, label: str = "") -> Point:
    about = f"batch {size}: {number(figure.median, 4)}" + ("" if row is None else f"\n{_about(row)}")
    return Point(size, figure.median, about, label, figure.low, figure.high)


def _lower_bounds(answer: Answer) -> Iterator[Series]:
    exceeds, unit = objective_in(answer).exceeds, objective_in(answer).unit
    points = [
        Point(
            row.batch_size,
            bound,
            f"batch {row.batch_size}: {exceeds} than {number(bound, 4)}\n{_about(row)}",
            f"> {number(bound)}{unit}",
        )
        for row in answer.batches
        if (bound := row.objective_lower_bound) is not None
    ]
    if points:
        yield Series(name="lower bound (target missed)", points=points, colour=MUTED, symbol="arrow", size=12)


def _default(answer: Answer, batch_size: int) -> Iterator[Series]:
    ratio, best = answer.speedup.over_default, answer.optimal.objective_value
    if ratio is None:
        return
    value, more = best.median * ratio.value, f"{objective_in(answer).exceeds} than " if ratio.at_least else ""
    yield _apart(
        "your default (lower bound)" if more else "your default",
        [
            Point(
                batch_size,
                value,
                f"your default, batch {batch_size}: {more}{number(value, 4)}",
                f"{'> ' if ratio.at_least else ''}{number(ratio.value)}× the optimum",
            )
        ],
        "arrow" if ratio.at_least else "diamond",
    )


def _apart(name: str, points: Sequence[Point], symbol: Symbol) -> Series:
    return Series(name=name, points=points, colour=INK, symbol=symbol, is_hollow=True)


def _law_of_figures(answer: Answer) -> Iterator[Series]:
    fit = _drawn_law(answer)
    if fit is None:
        return
    objective = objective_in(answer)
    timed = {row.batch_size: row.step_time_s for row in answer.batches if row.step_time_s is not None}
    inside = [size for size in timed if min(fit.residuals) <= size <= max(fit.residuals)]
    needs_step_times = objective.predicted(1.0, 1.0, None) is None
    if needs_step_times and (len(inside) < 2 or not all(warning.code != LAW_NOT_TIMED for warning in answer.warnings)):
        return
    points = [
        (size, value)
        for size in _dense_sizes(inside if needs_step_times else fit.residuals)
        if (value := objective.predicted(_steps_by_law(fit, size), size, _step_seconds_at(timed, size))) is not None
    ]
    if points:
        yield _law_curve(points, "law × step time" if needs_step_times else "the law", fit)


def _step_seconds_at(timed: Mapping[int, float], size: float) -> float | None:
    # Step seconds at a size, by log-log interpolation
    known = np.log([*timed.items()])
    return math.exp(np.interp(math.log(size), known[:, 0], known[:, 1])) if timed else None


def _steps_by_law(law: Law, size: float) -> float:
    return law.s_min * (1 + law.b_crit.estimate / size)


def _drawn_law(answer: Answer) -> Fit | None:
    fit = answer.fit
    return None if fit is None or fit.verdict == "too_few_points" else fit


def _dense_sizes(sizes: Collection[int]) -> list[float]:
    # Batch sizes close enough for a smooth curve
    low, high = min(sizes), max(sizes)
    return [float(one) for one in np.geomspace(low, high, max(2, round(12 * math.log2(high / low)) + 1))]


def _about(row: Batch) -> str:
    parts = [f"{row.reached} of {plural(row.trials, 'trial')} reached the target"]
    time = row.time_to_target_s
    if time is not None:
        parts.append("a single run" if time.runs == 1 else f"{'median of ' * bool(time.runs)}{time.origin}")
        if time.basis != "measured":
            parts.append(time.basis)
    return "\n".join([*parts, *row.untuned_because])


def _sizes(answer: Answer) -> list[int]:
    return [row.batch_size for row in answer.batches]


CURVE_POINTS = 200  # most points of a learning curve, more than a screen can separate

ENDED: dict[str, tuple[Symbol, str, set[TrialState]]] = {
    "stopped before the target": ("triangle", MUTED, {state for state in TrialState if state.is_censored}),
    "diverged": ("x", SECOND, {TrialState.DIVERGED}),
    "out of memory": ("square", SECOND, {TrialState.OOM}),
}


def curve_trials(answer: Answer, trials: Iterable[TrialRecord]) -> dict[int, int]:
    """Map each batch size to the number of the best trial, or else of the trial nearest to the target."""
    chosen = {row.batch_size: row.best.trial for row in answer.batches if row.best is not None}
    nearest: dict[int, tuple[float, int]] = {}
    for trial in trials:
        size = trial.configuration.batch_size
        metric = None if trial.configuration.grows or trial.outcome is None else trial.outcome.best_metric
        if size not in chosen and metric is not None:
            nearest[size] = max(nearest.get(size, (-math.inf, 0)), (answer.target.gain(metric), trial.number))
    return dict(sorted({**{size: one for size, (_, one) in nearest.items()}, **chosen}.items()))


def curves_chart(answer: Answer, curves: Mapping[int, Sequence[Observation]]) -> Chart | None:
    drawn = {size: points for size, curve in curves.items() if len(points := thinned(curve)) > 1}
    if not drawn:
        return None
    best = answer.optimal.batch_size
    reached = {row.batch_size for row in answer.batches if row.reached}
    return _curves(
        [
            Series(
                name=f"{size} (optimal)" if size == best else str(size),
                points=_curve(points, f"batch {size}"),
                colour=sequence_colour(index / max(1, len(drawn) - 1)),
                width=4 if size == best else 1.75,
                dash="solid" if size in reached else "dot",
            )
            for index, (size, points) in enumerate(drawn.items())
        ],
        answer.target,
        log=True,
    )


def recent_curves_chart(target: Target, runs: Sequence[tuple[TrialRecord, Sequence[Observation]]]) -> Chart | None:
    drawn = [(trial, points) for trial, curve in runs if (points := thinned(curve))]
    if not drawn:
        return None
    return _curves(
        [
            Series(
                name=f"trial {trial.number}, batch {trial.configuration.batch_size}",
                points=_curve(points, f"trial {trial.number}"),
                colour=sequence_colour(index / max(1, len(drawn) - 1)),
                width=2,
                symbol="circle" if len(points) == 1 else None,
            )
            for index, (trial, points) in enumerate(drawn)
        ],
        target,
        log=False,
    )


def _curve(curve: Sequence[Observation], name: str) -> list[Point]:
    return [
        Point(one.train_seconds, one.metric, f"{name}\n{number(one.train_seconds, 4)} s: {number(one.metric, 4)}")
        for one in curve
    ]


def _curves(series: Sequence[Series], target: Target, *, log: bool) -> Chart:
    return Chart(
        x=value_axis("train seconds", [0.0] * (not log) + [point.x for one in series for point in one.points], log=log),
        y=value_axis(short_name(target.metric), [*extent(series), target.value], log=False),
        series=series,
        rules=[ReferenceLine(at=target.value, name=f"target {target.goal.sign} {target.value:g}", colour=ACCENT)],
    )


def learning_rate_chart(
    trials: Sequence[TrialRecord], objective: Objective, default: Configuration | None
) -> Chart | None:
    known = [
        (trial, rate)
        for trial in trials
        if not trial.configuration.grows and (rate := _learning_rate(trial.configuration)) is not None
    ]
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
        series.append(
            Series(
                name="your default",
                points=[_mark(default, default.learning_rate, "your default")],
                colour=INK,
                symbol="diamond",
                is_hollow=True,
            )
        )
        rates.append(default.learning_rate)
        sizes.add(default.batch_size)
    return Chart(
        x=batch_axis(sorted(sizes)), y=value_axis("learning rate", rates, log=True), series=series, colours=colours
    )


def _rule_line(rule: LearningRateRule, default: Configuration, sizes: Iterable[int]) -> Series:
    size = default.batch_size
    dash: Dash = "dash" if rule is LearningRateRule.LINEAR else "dot"
    return Series(
        name=f"{rule.value} rule",
        points=[
            Point(one, default.learning_rate * learning_rate_factor(rule, one, size)) for one in sorted({*sizes, size})
        ],
        colour=MUTED,
        width=1.5,
        dash=dash,
    )


def _coloured(
    valued: Sequence[tuple[TrialRecord, float, float]], objective: Objective
) -> tuple[list[Series], ColourScale]:
    logs = [objective.log(value) or 0.0 for _, _, value in valued]
    low, high = min(logs), max(logs)

    def share(log: float) -> float:
        return (log - low) / ((high - low) or 1.0)

    points = [
        _mark(
            trial.configuration,
            rate,
            f"trial {trial.number}: {number(objective.shown(value))}",
            sequence_colour(share(objective.log(value) or 0.0)),
        )
        for trial, rate, value in sorted(valued, key=lambda one: -one[2])
    ]
    ticks = [low, (low + high) / 2, high]
    if objective.has_ratios:
        ticks = [math.log(tick) for tick in round_numbers(math.exp(low), math.exp(high))]
    texts = [(share(tick), number(objective.shown(objective.from_log(tick)))) for tick in ticks]
    name = "reached the target" if objective.stops_at_target else "measured"
    series = Series(name=name, points=points, colour=sequence_colour(0.5), symbol="circle", size=8)
    return [series], ColourScale(objective.axis_title.removesuffix(" to the target"), texts)


def _mark(configuration: Configuration, rate: float, about: str, colour: str | None = None) -> Point:
    place = f"batch {configuration.batch_size}, learning rate {number(rate)}"
    return Point(configuration.batch_size, rate, f"{about}\n{place}", colour=colour)


def _learning_rate(configuration: Configuration) -> float | None:
    rate = parameters_of(configuration)["learning_rate"]
    return rate if isinstance(rate, float) and rate > 0 else None


def thinned(curve: Sequence[Observation]) -> list[Observation]:
    """Return at most `CURVE_POINTS` finite evaluations after step 0."""
    finite = [one for one in curve if math.isfinite(one.metric) and one.train_seconds > 0]
    if len(finite) <= CURVE_POINTS:
        return finite
    return [finite[round(index)] for index in np.linspace(0, len(finite) - 1, CURVE_POINTS)]
