"""A study's page: answer, charts, tables, growing batches, rules of thumb, reproduction."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from markupsafe import Markup

from bssearch.analysis.answer import Answer, Batch, BatchScheduleAnswer, Ratio, objective_in
from bssearch.analysis.generalisation import final_rows
from bssearch.analysis.headline import (
    about_columns,
    about_device,
    about_devices,
    about_growing,
    about_law,
    headline,
    speedup_shares,
    trade_off_rows,
    with_interval,
)
from bssearch.analysis.measured import NoiseAnswer
from bssearch.analysis.objectives import TIME, Objective, objective_of
from bssearch.analysis.rules.rule_book import BROKE, CHANGED_PARAMETER, HELD
from bssearch.figures import plots
from bssearch.figures.html import PageContent, Row, Section, Table, Tile, rendered
from bssearch.figures.svg import ACCENT, MUTED, SECOND, Chart, Point, Series, Shape, extent, value_axis
from bssearch.records import (
    TRAINING,
    Configuration,
    Environment,
    MemoryBasis,
    Observation,
    RunStage,
    StudyRecord,
    TrialRecord,
    grouped,
    growing_schedule,
    run_stages,
)
from bssearch.records.text import (
    NOTHING,
    ends,
    in_words,
    memory,
    noise_scale,
    number,
    percent,
    plural,
    sentence,
    span,
    with_precision,
)
from bssearch.spec import StudySpec

Pairs = Sequence[tuple[float, float]]
Run = tuple[TrialRecord, Sequence[Observation]]


def growing(answer: Answer, run: Run | None, optimum: Sequence[Observation]) -> Section | None:
    found = answer.batch_schedule
    if found is None:
        return None
    stages = [] if run is None else run_stages(*run)
    charts = {}
    if run is not None and stages:
        charts = {
            "batch-growth": _batch_growth_chart(answer, stages),
            "rate-growth": _rate_growth_chart(run[1], stages, optimum),
        }
    return Section(
        name="growing",
        title="Growing batch",
        text=about_growing(answer),
        charts=charts,
        table=_stage_table(found, stages),
        notes=[" ".join(_about_stages(found, answer.measured.noise_scale, run))],
    )


def _batch_growth_chart(answer: Answer, stages: Sequence[RunStage]) -> Chart:
    noise, best = answer.measured.noise_scale, answer.optimal.batch_size
    end = stages[-1].start_samples + stages[-1].samples
    constant = next((row.samples_to_target for row in answer.batches if row.batch_size == best), None) or end
    last = max(end, constant)
    series = [
        _constant([(0.0, best), (constant, best)], f"batch {best}, the best constant size"),
        _stairs([(one.start_samples, one.batch_size) for one in stages], end),
    ]
    if noise is not None and noise.scale:
        series.append(
            Series(
                name="gradient noise scale",
                points=[Point(samples, noise.scale) for samples in (0.0, last)],
                colour=MUTED,
                width=1.5,
                dash="dot",
            )
        )
    return Chart(
        x=value_axis("training samples seen", [0.0, last], log=False),
        y=replace(
            value_axis("batch size", extent(series), log=True),
            ticks=[(float(size), str(size)) for size in sorted({best, *(one.batch_size for one in stages)})],
        ),
        series=series,
    )


def _rate_growth_chart(
    curve: Sequence[Observation], stages: Sequence[RunStage], optimum: Sequence[Observation]
) -> Chart:
    end = stages[-1].start_samples + stages[-1].samples
    points, constant = _rates(curve), _rates(optimum)
    series = [
        *([_constant(constant, "the best constant size")] if constant else []),
        _grown(points, "vh") if points else _stairs([(one.start_samples, one.learning_rate) for one in stages], end),
    ]
    return Chart(
        x=value_axis(
            "training samples seen", [0.0, end, *(point.x for one in series for point in one.points)], log=False
        ),
        y=value_axis("learning rate", extent(series), log=True),
        series=series,
    )


def _grown_trials(trials: Sequence[TrialRecord], answer: Answer, objective: Objective) -> Section | None:
    groups = grouped((one.configuration.key, one) for one in trials if one.configuration.grows)
    if not groups:
        return None
    best = set() if answer.batch_schedule is None else {*answer.batch_schedule.trial_numbers}
    figured = [(_median(group, objective), group) for group in groups.values()]
    ranked = sorted(figured, key=lambda one: (one[0] is None, one[0] or 0.0, one[1][0].number))
    return Section(
        name="grown-trials",
        title="Trials with a growing batch",
        text="The table has a row per configuration, with the median over runs; the best schedule is bold. The law "
        "and the table of batch sizes leave out trials with a growing batch.",
        table=Table(
            ["Batch", sentence(objective.axis_title), "First learning rate", "Ended", "Trials"],
            [
                Row(_grown_cells(group, figure, objective), any(one.number in best for one in group))
                for figure, group in ranked
            ],
        ),
    )


def _grown_cells(group: Sequence[TrialRecord], figure: float | None, objective: Objective) -> list[str]:
    configuration = group[0].configuration
    schedule = growing_schedule(configuration)
    return [
        schedule.in_words,
        NOTHING if figure is None else f"{number(objective.shown(figure))}{objective.unit}",
        f"{in_words(configuration.learning_rate)}, {schedule.rate_rule.in_words}",
        ", ".join(f"{count} {state}" for state, count in Counter(trial.state.value for trial in group).items()),
        ", ".join(str(trial.number) for trial in group),
    ]


def _median(group: Iterable[TrialRecord], objective: Objective) -> float | None:
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


def _about_stages(found: BatchScheduleAnswer, noise: NoiseAnswer | None, run: Run | None) -> Iterator[str]:
    if run is not None:
        reached = plural(found.reached, "run")
        yield f"The charts show trial {run[0].number}, the median of {reached} that reached the target."
    if found.noise_share is None:
        yield "The table splits the steps to the target by stage; the seconds of a stage are steps × step time."
    else:
        yield "Batch sizes are samples / steps between evaluations; seconds are measured."
    if noise is not None and noise.scale:
        yield f"Gradient noise scale of the optimum: {noise_scale(noise.scale, noise.low, noise.high)}."


def _stairs(points: Pairs, end: float) -> Series:
    return _grown([*points, (end, points[-1][1])], "hv")


def _grown(points: Pairs, shape: Shape) -> Series:
    name = "the batch that grows"
    return Series(name=name, points=_with_tooltips(points, name), colour=ACCENT, width=2.5, shape=shape)


def _constant(points: Pairs, name: str) -> Series:
    return Series(name=name, points=_with_tooltips(points, name), colour=SECOND, width=1.75, dash="dash", shape="vh")


def _with_tooltips(points: Pairs, name: str) -> list[Point]:
    return [Point(x, y, f"{name}\n{number(x, 4)} samples: {number(y, 4)}") for x, y in points]


def _rates(curve: Sequence[Observation]) -> list[tuple[float, float]]:
    known = [(float(one.samples), one.learning_rate) for one in curve if one.step and one.learning_rate > 0]
    return known if len(known) > 1 else []


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPicture:
    """The data for a study's page."""

    study: StudyRecord
    spec: StudySpec
    answer: Answer
    trials: Sequence[TrialRecord]
    curves: Mapping[int, Sequence[Observation]]
    audit: Mapping[str, Any] | None = None
    grown: tuple[TrialRecord, Sequence[Observation]] | None = None


def in_notebook(answer: Answer) -> str:
    return rendered(
        "notebook.html",
        headline=headline(answer),
        picture=Markup(plots.objective_picture(answer)),
        table=_batches(answer).table,
        warnings=[warning.message for warning in answer.warnings],
    )


def page_of(picture: StudyPicture) -> PageContent:
    best = picture.answer.optimal.batch_size
    return PageContent(
        title=f"{picture.study.name}: optimal batch size",
        kicker=_kicker(picture),
        heading=f"Train with batch {best}{' (provisional)' if picture.answer.provisional else ''}",
        headline=headline(picture.answer),
        tiles=_tiles_of(picture.answer, picture.spec),
        warnings=[sentence(warning.message) for warning in picture.answer.warnings],
        sections=_sections(picture),
        reproduction=reproduction_of(picture.study, picture.spec),
    )


def _kicker(picture: StudyPicture) -> str:
    device = picture.answer.device
    ended = [trial.ended_at for trial in picture.trials if trial.ended_at is not None]
    parts = [
        picture.study.name,
        picture.spec.workload,
        with_precision(device.name, device.precision),
        plural(len(picture.trials), "trial"),
    ]
    return " · ".join([*parts, *([f"until {max(ended):%d %B %Y}"] if ended else [])])


def _sections(picture: StudyPicture) -> list[Section]:
    answer, objective = picture.answer, objective_of(picture.spec, picture.study.target)
    default = _known_default(picture)
    grew = any(trial.configuration.grows for trial in picture.trials)
    found = [
        _objective(picture),
        Section(
            name="recipe",
            title="Train with",
            text=f"The optimum's configuration ran in {plural(len(answer.optimal.trial_numbers), 'trial')}.",
            table=Table(
                ["Parameter", "Value"],
                [Row([name, in_words(value)]) for name, value in answer.optimal.values.items() if value is not None],
            ),
        ),
        _batches(answer),
        _grown_trials(picture.trials, answer, objective),
        _devices(answer),
        growing(answer, picture.grown, picture.curves.get(answer.optimal.batch_size, ())),
        Section(
            name="steps",
            title="Steps and samples",
            text="Along the dotted line, doubling the batch halves the steps (perfect). Above the line, doubling "
            "saves less than half of the steps (diminishing) or few steps (maximal). Hollow points are hardly tuned.",
            absent="The charts are missing, because no batch size has a known number of steps to the target.",
            charts={"steps": plots.steps_chart(answer), "samples": plots.samples_chart(answer)},
            notes=[" ".join(about_law(answer))],
        ),
        Section(
            name="curves",
            title="Learning curves",
            text="Each line is the best run of a batch size, dotted if no run reached the target.",
            absent="The chart is missing, because the runs have no stored evaluations.",
            charts={"curves": plots.curves_chart(answer, picture.curves)},
            notes=_about_seconds(answer),
        ),
        _front(picture),
        Section(
            name="learning-rate",
            title="Learning rate and batch size",
            text=f"Points are trials{' with a constant batch' if grew else ''}."
            + (" The lines scale the default's learning rate linearly and by the square root." if default else ""),
            absent="The chart is missing, because the trials' learning rates are unknown.",
            charts={"rates": plots.learning_rate_chart(picture.trials, objective, default)},
        ),
        Section(
            name="device",
            title="Throughput and memory",
            text="The batch size with the highest throughput need not reach the target first.",
            absent="The charts are missing, because step times and peak memory are unknown.",
            charts={"throughput": plots.throughput_chart(answer), "memory": plots.memory_chart(answer)},
            notes=list(filter(None, [about_device(answer)])),
        ),
        _trained_for_the_same_time(answer),
        _promised_and_found(answer),
        _audit(picture.audit),
    ]
    return [section for section in found if section is not None]


def _devices(answer: Answer) -> Section | None:
    if not answer.by_devices:
        return None
    return Section(
        name="devices",
        title="More devices",
        text=about_devices(answer),
        charts={"devices": plots.devices_chart(answer)},
        table=Table(
            ["Devices", "Batch", "Seconds", "Speed-up", "Efficiency", "Device-seconds", "All-reduce, share of step"],
            [
                Row(
                    [
                        one.world_size,
                        one.batch_size,
                        f"{number(one.seconds)}{ends(one.low, one.high)}{'' if one.runs else ', predicted'}",
                        f"{number(one.speedup.value, 2)}×{ends(one.speedup.low, one.speedup.high, 2)}",
                        percent(one.efficiency),
                        number(one.cost),
                        NOTHING if one.reduce_share is None else percent(one.reduce_share),
                    ],
                    one.on_front,
                )
                for one in answer.by_devices
            ],
            caption="A row is bold if no other number of devices is better in seconds and cost.",
        ),
    )


def _objective(picture: StudyPicture) -> Section:
    answer, default = picture.answer, _known_default(picture)
    stopped = " over seeds; arrows are lower bounds of runs that stopped before the target. Lower is better."
    return Section(
        name="objective",
        title=objective_in(answer).title(answer.target.metric, answer.target.in_words),
        text="Each point has the batch size's best learning rate and regularisation. Bars are 95 % intervals"
        f"{stopped if objective_in(answer).stops_at_target else '.'}",
        charts={
            "objective": plots.objective_chart(answer, default.batch_size if default else None),
            "time": plots.time_chart(answer),
        },
        notes=[
            *_without_figure(answer),
            *([f"The gain over your default is {shares}."] if (shares := speedup_shares(answer)) else []),
        ],
    )


def _about_seconds(answer: Answer) -> list[str]:
    bases = {row.time_to_target_s.basis for row in answer.batches if row.time_to_target_s is not None}
    if "wall" in bases:
        return ["Seconds are wall-clock seconds, with evaluations."]
    if "steps_x_step_time" not in bases:
        return []
    return [
        "The curves show measured seconds, with delays by other work on the device. Some times to the target are steps "
        "× step time, without delays."
    ]


def _front(picture: StudyPicture) -> Section:
    priced = picture.spec.price_per_device_hour is not None
    cost = "Cost is the price of device-hours." if priced else "Cost is the number of samples."
    answer = picture.answer
    headings, rows = trade_off_rows(answer)
    best = str(answer.optimal.batch_size)
    absent = "The chart is missing, because no batch size has both seconds and samples to the target."
    drawn = (
        "Along the line, less time costs more. Every other compared batch is no faster and no cheaper than a batch on "
        f"the line. {cost}"
    )
    return Section(
        name="front",
        title="Trade-offs: time, cost, memory, generalisation",
        text=drawn if answer.front else absent,
        absent=absent,
        charts={"front": plots.front_chart(answer, priced=priced)},
        table=Table([sentence(one) for one in headings], [Row(row, row[0] == best) for row in rows]) if rows else None,
        notes=[*_about_front(answer), *([" ".join(about_columns(answer))] if rows else [])],
    )


def _about_front(answer: Answer) -> list[str]:
    point = next((one for one in answer.front if one.batch_size == answer.optimal.batch_size), None)
    if point is None or point.on_front:
        return []
    size, least = answer.optimal.batch_size, answer.recommendation.least_batch_size
    why = {
        "least": f"this batch has the least {objective_in(answer).noun}",
        "law": f"the medians of batch {least} and this batch are alike, and all runs together favour batch {size}",
        "smallest_shown_within_5_percent": f"this batch is the smallest size shown to be within 5 % of batch {least}",
    }[answer.recommendation.rule]
    return [f"Batch {size} is not on the line, but {why}."]


def _known_default(picture: StudyPicture) -> Configuration | None:
    return picture.spec.default_configuration if picture.spec.default_is_known else None


def _without_figure(answer: Answer) -> list[str]:
    missing = [
        f"{row.batch_size} ({_ended(row) or 'not run'})"
        for row in answer.batches
        if row.objective_value is None and row.objective_lower_bound is None
    ]
    text = "The chart leaves out batch sizes without a result or a lower bound"
    return [f"{text}: {', '.join(missing)}."] if missing else []


def _batches(answer: Answer) -> Section:
    has_host_bound = any(row.host_bound_share is not None for row in answer.batches)
    return Section(
        name="batches",
        title="Batch sizes",
        text="Each row is the best configuration of a batch size; the optimum is bold.",
        table=Table(
            [
                "Batch",
                f"{objective_in(answer).label} [95 %]",
                "Steps",
                "Samples",
                "ms/step",
                *(["Host-bound"] if has_host_bound else []),
                "Learning rate",
                "Regime",
                "Trials",
            ],
            [
                Row(_cells(answer, row, has_host_bound), row.batch_size == answer.optimal.batch_size)
                for row in answer.batches
            ],
        ),
    )


def _regime(row: Batch) -> str | None:
    slope = row.slope
    if slope is None or slope.low is None or slope.high is None:
        return row.regime
    figures = f"{slope.value:.2f} [{slope.low:.2f}, {slope.high:.2f}]"
    return f"{row.regime} (slope {figures.replace('-', '−')})"  # browsers break lines at hyphens


def _cells(answer: Answer, row: Batch, has_host_bound: bool) -> list[str]:
    figure = row.objective_value
    bound, unit = row.objective_lower_bound, objective_in(answer).unit
    if figure is not None:
        shown = f"{number(figure.median)}{unit}{ends(figure.low, figure.high)}, {figure.origin}"
    elif bound is not None:
        shown = f"> {number(bound)}{unit}"
    elif row.predicted_s is not None and not row.trials and answer.objective == TIME.name:
        shown = f"not tried; predicted {with_interval(row.predicted_s, unit=unit)}"
    else:
        shown = NOTHING
    rate, share = row.best.parameters.get("learning_rate") if row.best else None, row.host_bound_share
    untuned = f"hardly tuned: {'; '.join(row.untuned_because)}" if row.untuned else None
    return [
        f"{row.batch_size}",
        shown,
        in_words(row.steps_to_target),
        NOTHING if row.samples_to_target is None else number(row.samples_to_target),
        NOTHING if row.step_time_s is None else number(1000 * row.step_time_s),
        *([NOTHING if share is None else percent(share)] if has_host_bound else []),
        in_words(rate),
        ", ".join(part for part in (_regime(row), untuned) if part) or NOTHING,
        _ended(row) or NOTHING,
    ]


def _ended(row: Batch) -> str:
    return ", ".join(f"{count} {state}" for state, count in row.ended.items())


def _audit(audit: Mapping[str, Any] | None) -> Section | None:
    if audit is None or not audit["rules"]:
        return None
    slope = audit.get("learning_rate_slope")
    return Section(
        name="audit",
        title="Rules of thumb on this workload",
        text="Regret is the rule's objective value divided by the tuned optimum's at the same batch size. For rules "
        "about a ratio, such as noise scale / critical batch size, regret is this ratio. Brackets are 95 % intervals. "
        f"For most rules, HELD means an interval below {HELD:.2f}, and BROKE an interval above {BROKE:.2f}.",
        table=Table(
            ["Rule", "Batch", "Verdict", "Regret", "Gives", "Because"],
            [Row(_rule_cells(rule)) for rule in sorted(audit["rules"], key=lambda one: one["verdict"] == "not_run")],
        ),
        notes=[] if not slope else [_slope(slope)],
    )


def _rule_cells(rule: Mapping[str, Any]) -> list[str]:
    regret = rule.get("regret")
    return [
        str(rule["rule"]).replace("_", " "),
        in_words(rule.get("batch_size")),
        str(rule["verdict"]).replace("_", " ").upper(),
        NOTHING if not regret else _regret(regret),
        _given(str(rule["rule"]), rule.get("configuration") or {}),
        str(rule.get("reason") or NOTHING),
    ]


def _given(rule: str, configuration: Mapping[str, Any]) -> str:
    about = {str(one): name for one, name in CHANGED_PARAMETER.items()}.get(rule)
    shown = configuration if about is None else {about: configuration.get(about)}
    return ", ".join(f"{name} {in_words(value)}" for name, value in shown.items() if value is not None) or NOTHING


def _regret(regret: Mapping[str, Any]) -> str:
    interval = ends(regret.get("low"), regret.get("high"))
    return f"{'≥ ' if regret.get('at_least') else ''}{number(regret['value'])}{interval}"


def _slope(slope: Mapping[str, Any]) -> str:
    excluded = ", ".join(in_words(one) for one in slope.get("excludes") or [])
    return (
        f"The tuned learning rate grows as batch size to the power {number(slope['estimate'])} "
        f"[{number(slope['low'])}, {number(slope['high'])}]; linear scaling has power 1, and square-root scaling has "
        "power 0.5."
        f"{f' The interval excludes {excluded}.' if excluded else ''}"
    )


def _promised_and_found(answer: Answer) -> Section | None:
    # The section on the quick answer beside the search's; None without a quick answer
    promise = answer.quick
    if promise is None:
        return None
    ratio = NOTHING if promise.time_ratio is None else f"{number(promise.time_ratio)}×"
    held = "overlaps" if promise.holds else "misses"
    return Section(
        name="quick",
        title="Promised and found",
        text=f"The quick answer promised training {number(promise.gain)}× as fast as with the default. The promised "
        f"90 % interval {held} the batch sizes within 5 % of the best.",
        table=Table(
            ["", "Batch", "Range", "Time / the optimum's time"],
            [
                Row(["Promised", f"{promise.batch_size:,}", span(promise.interval), ratio]),
                Row(["Found", f"{promise.found_batch_size:,}", span(promise.found_flat_range), "1×"], marked=True),
            ],
        ),
        notes=["Promised: a 90 % interval of the best batch size. Found: batch sizes within 5 % of the best time."],
    )


def _trained_for_the_same_time(answer: Answer) -> Section | None:
    # The section on final metrics after equal train seconds; None without such runs
    found = answer.generalisation
    if found is None:
        return None
    best = [one.batch_size for one in found.batches].index(found.best_batch_size)
    return Section(
        name="generalisation",
        title="Trained for the same time",
        text=f"Each batch size trained for {number(found.train_seconds)} s, without a stop at the target. The table "
        "has median final metrics, and the distance to the best metric with a 95 % interval.",
        table=Table(
            ["Batch", f"Validation {answer.target.metric}", f"Test {answer.target.metric}", "Worse by", "Runs"],
            [Row(cells, index == best) for index, cells in enumerate(final_rows(found))],
        ),
    )


SHORT_SPEC = 25  # the page folds specs with more lines


def reproduction_of(study: StudyRecord, spec: StudySpec) -> dict[str, Any]:
    import yaml

    name = study.name
    text = yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)
    how = "The spec below describes the imported runs."
    commands = [f"bssearch report {shlex.quote(name)} --html report.html"]
    if not spec.is_imported:
        how = (
            f"Save the spec below as {name}.yaml beside the workload. Compare results only on the same kind of device."
        )
        commands.insert(0, f"bssearch run {shlex.quote(f'./{name}.yaml')}")
    return {
        "facts": facts_of(study.environment),
        "how": how,
        "commands": "\n".join(commands),
        "spec": text,
        "spec_is_short": text.count("\n") <= SHORT_SPEC,
    }


def facts_of(environment: Environment | None) -> list[tuple[str, str]]:
    if environment is None:
        return []
    memory = environment.device_memory_bytes
    known = {
        "Device": environment.device_name,
        "Device memory": None if memory is None else f"{number(memory / 2**30)} GiB",
        "Precision": environment.precision,
        "Compile mode": environment.compile_mode,
        "torch": environment.torch_version,
        "CUDA": environment.cuda_version,
        "cuDNN": environment.cudnn_version,
        "Driver": environment.driver_version,
        "Python": environment.python_version,
        "Host": environment.host,
        "Workload’s digest": environment.workload_revision,
        "Git revision": environment.git_revision,
        "Libraries": ", ".join(environment.libraries),
    }
    return [(name, str(value)) for name, value in known.items() if value]


def _tiles_of(answer: Answer, spec: StudySpec) -> list[Tile]:
    best, largest = answer.optimal, answer.largest_that_fits
    accumulated = f"{best.accumulation_steps} × {best.micro_batch_size}" if best.accumulation_steps > 1 else ""
    tiles = [
        Tile("Optimal batch size", f"{best.batch_size:,}", accumulated),
        _figure_tile(answer),
        Tile("Within 5 %", span(answer.flat_range), "medians around the optimum"),
        Tile(
            largest.in_words.capitalize(),
            f"{largest.batch_size:,}",
            "; ".join(filter(None, (_times(answer, answer.speedup.over_largest), largest.reason))),
        ),
    ]
    if spec.default_is_known:
        tiles.append(
            Tile(
                "Your default",
                f"{spec.default.batch_size:,}",
                _times(answer, answer.speedup.over_default) or "unknown",
            )
        )
    if answer.fit is not None and answer.fit.verdict != "too_few_points":
        fits = "the law fits" if answer.fit.verdict == "fits" else "the law fits poorly"
        tiles.append(Tile("Critical batch size", answer.fit.b_crit.in_words, fits))
    if answer.measured.noise_scale is not None:
        tiles.append(_noise(answer.measured.noise_scale))
    if best.test_metric is not None:
        tiles.append(Tile(f"Test {answer.target.metric}", number(best.test_metric), "of the optimum, at the target"))
    for name, figure in best.further_metrics.items():
        shown = ends(figure.low, figure.high).strip()
        tiles.append(
            Tile(
                name.capitalize() if name.startswith(TRAINING) else f"Test {name}",
                number(figure.median),
                f"of the optimum, at the target{shown and f', 95 % interval {shown}'}",
            )
        )
    if best.peak_memory_bytes is not None:
        is_of_device = best.peak_memory_basis in (None, MemoryBasis.DEVICE)
        of = "of the optimum" if is_of_device else "growth of the process's memory in a trial of the optimum"
        tiles.append(Tile("Peak memory", memory(best.peak_memory_bytes), of))
    return tiles


def _figure_tile(answer: Answer) -> Tile:
    figure, objective = answer.optimal.objective_value, objective_in(answer)
    interval = ends(figure.low, figure.high)
    about = f"95 % interval{interval}, {figure.origin}" if interval else figure.origin
    return Tile(objective.label, f"{number(figure.median)}{objective.unit}", about)


def _times(answer: Answer, ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    noun = objective_in(answer).noun
    shown = f"{number(ratio.value)}×{ends(ratio.low, ratio.high)}"
    return f"{'at least ' if ratio.at_least else ''}{shown} the {noun} of the optimum"


def _noise(noise: NoiseAnswer) -> Tile:
    place = "" if noise.far_from_target is None else ", measured far from the target"
    source = place if noise.trials is None else f", over {noise.trials} trials"
    return Tile("Gradient noise scale", noise_scale(noise.scale, noise.low, noise.high), f"samples{source}")
