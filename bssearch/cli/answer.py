"""Print an answer as text, JSON, rows or a configuration."""

import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from textwrap import wrap
from typing import Any

import yaml

from bssearch.analysis.answer import Answer, Batch, Figure, objective_in
from bssearch.analysis.generalisation import Generalisation, final_rows
from bssearch.analysis.headline import (
    about_columns,
    about_cost,
    about_device,
    about_devices,
    about_growing,
    about_law,
    comparisons,
    further_metrics,
    how_sure,
    speedup_shares,
    trade_off_rows,
    what_else,
    with_interval,
)
from bssearch.analysis.measured import NoiseAnswer
from bssearch.analysis.shape import Parameters
from bssearch.cli.arguments import Export
from bssearch.cli.output import Format, cell, console, print_table, say, show_model
from bssearch.commands.best import ScheduledTraining, training_loop
from bssearch.records import Goal
from bssearch.records.text import noise_scale, number, percent, plural, visible, with_precision
from bssearch.settings import DATABASE_URL_VARIABLE
from bssearch.storage.connection.engine import masked

TIME_COLUMN = "time_to_target"

GENERALISATION_COLUMNS = ("batch", "final_metric", "test_metric", "worse_by", "runs")


def print_found(found: Answer, form: Format, *, details: bool = False, db: str | None = None) -> None:
    """Print an answer. Its commands have ``--db`` unless ``BSSEARCH_DB_URL`` is ``db``; ``URL`` hides a password."""
    if db is not None and masked(db) != masked(os.environ.get(DATABASE_URL_VARIABLE, "")):
        place = "URL" if "***" in masked(db) else shlex.quote(db)
        steps = [step.model_copy(update={"command": f"{step.command} --db {place}"}) for step in found.next]
        found = found.model_copy(update={"next": steps})
    show_model(form, found, partial(print_answer, details=details), found.batches)


SCREEN_COLUMNS = 80
SCREEN_LINES = 23  # a terminal of 24 lines also shows the prompt
BAR_CELLS = 24
NOTES = 3
NO_BREAK = "\u00a0"


def print_answer(found: Answer, *, details: bool = False) -> None:
    out = console()
    title, *lines = _without_notes(found) if details else screen(found)
    out.print(title, style="bold")
    for line in lines:
        out.print(line, soft_wrap=True)
    if details:
        print_details(found)


def _without_notes(found: Answer) -> list[str]:
    return [*_title(found), *_certainty(found), "", *_bars(found), "", *_configuration(found)]


def screen(found: Answer) -> list[str]:
    """Return an answer's lines for an 80 × 24 terminal. Many batch sizes or `GRAVE` notes may need more lines."""
    lines, shown = _without_notes(found), 0
    is_grave = sum(warning.code in GRAVE for warning in found.warnings)
    notes = [f"note: {one.message}" for one in sorted(found.warnings, key=lambda one: one.code not in GRAVE)]
    notes[is_grave:is_grave] = filter(None, [what_else(found)])
    for text in notes[: max(NOTES, is_grave)]:
        note = _wrapped(text)
        if shown >= is_grave and len(lines) + len(note) + 1 > SCREEN_LINES:
            break
        lines += note
        shown += 1
    hidden = len(notes) - shown
    rest = f" ({plural(hidden, 'more note')})" if hidden else ""
    return [*lines, *_wrapped(f"More: bssearch best {found.study} --details{rest} or --export yaml")]


def _wrapped(text: str, indent: str = "") -> list[str]:
    text = re.sub(r"(?<=\d) (?=(?:s|%)(?:\W|$))", NO_BREAK, text)
    lines = wrap(text, SCREEN_COLUMNS, initial_indent=indent, subsequent_indent=indent or "  ", break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in lines]


def _title(found: Answer) -> Iterator[str]:
    train = f"Train with batch {found.optimal.batch_size}{' (predicted)' * found.is_predicted}."
    question = f"{found.study} · {found.target.in_words}"
    figure, objective = found.optimal.objective_value, objective_in(found)
    row = next((one for one in found.batches if one.batch_size == found.optimal.batch_size), None)
    seeds = plural(figure.runs, "fresh seed" if row is not None and row.confirmed else "run")
    over = "predicted, not measured" if found.predicted else f"over {seeds}"
    reaches = "to the target " * objective.stops_at_target
    takes = f"{with_interval(figure, objective.digits, objective.unit)} {reaches}{over}"
    over_largest, over_default = comparisons(found)
    yield f"{train}{question:>{SCREEN_COLUMNS - len(train)}}" if len(train + question) < SCREEN_COLUMNS else train
    shares = speedup_shares(found)
    for text in (takes, over_largest, f"{over_default}{': ' * bool(shares)}{shares}"):
        yield from _wrapped(text, "  ")


def _certainty(found: Answer) -> list[str]:
    if found.predicted is not None:
        return [f"Critical batch size {found.predicted.b_crit.in_words}."]
    if found.within_5_percent is not None:
        lines = _wrapped(f"{'Provisional' if found.provisional else 'Final'}: {how_sure(found)}.")
    elif found.provisional:
        is_confirmed = any(row.confirmed for row in found.batches)
        why = (
            "the probability of this batch size is unknown"
            if is_confirmed
            else "no batch size is confirmed with fresh seeds yet"
        )
        lines = _wrapped(f"Provisional: {why}.")
    else:
        lines = []
    step = found.settling
    if found.provisional and step is not None:
        lines += [f"  next: {step.command}", *_wrapped(step.why, "        ")]
    return lines


def _bars(found: Answer) -> Iterator[str]:
    objective = objective_in(found)
    default = _default(found)
    rows = [*found.batches, *([] if default is None or default in found.batches else [default])]
    texts = [_bar_text(found, row, objective.digits) for row in rows]
    wide = max(21, *map(len, texts))
    scale = _scale(rows, BAR_CELLS + 21 - wide)
    yield f" {'batch':>7}  {objective.axis_title + ' [95 %]':<{23 + BAR_CELLS}}  tried"
    for row, text in zip(rows, texts, strict=True):
        mark = "▶" if row.batch_size == found.optimal.batch_size else " "
        size, tried = f"{mark}{row.batch_size:>6}", _runs(found, row, is_default=row is default)
        if row not in found.batches:
            size, tried = "default", f"with batch {row.batch_size}"
        drawn = f"{text:<{wide}}  {_bar(scale, row)}"
        yield f" {size}  {drawn:<{23 + BAR_CELLS}}  {tried}".rstrip()


def _default(found: Answer) -> Batch | None:
    # The default's row: the batch size's own row if retuning brought no gain
    ratio, best = found.speedup.over_default, found.optimal.objective_value
    row = next((one for one in found.batches if one.batch_size == found.speedup.default_batch_size), None)
    if ratio is None or row is None:
        return None
    value = best.median * ratio.value
    figure = row.objective_lower_bound if row.objective_value is None else row.objective_value.median
    if figure is not None and math.isclose(value, figure):
        return row
    known = None if ratio.at_least else Figure(median=value, low=None, high=None, runs=1)
    return row.model_copy(update={"objective_value": known, "objective_lower_bound": value})


def _bar_text(found: Answer, row: Batch, digits: int) -> str:
    if (figure := _figure(row, digits)) is not None:
        return figure
    if row.trials or row.predicted_s is None or found.objective != TIME_COLUMN:
        return "–"
    return f"~ {with_interval(row.predicted_s)}"


def _scale(rows: Sequence[Batch], cells: int) -> Callable[[float], int]:
    # Bar cells of a figure, on a logarithmic scale if all figures are positive.
    known = [row.objective_value for row in rows if row.objective_value is not None]
    values = [value for one in known for value in (one.low, one.median, one.high) if value is not None]
    values += [row.objective_lower_bound for row in rows if row.objective_lower_bound is not None]
    on = math.log if min(values) > 0 else float
    low, high = on(min(values)), on(max(values))
    return lambda value: 2 + round((cells - 2) * (on(value) - low) / (high - low)) if high > low else cells // 2


def _bar(scale: Callable[[float], int], row: Batch) -> str:
    figure = row.objective_value
    if figure is None:
        return "" if row.objective_lower_bound is None else "·" * scale(row.objective_lower_bound)
    if figure.low is None or figure.high is None:
        return "█" * scale(figure.median)
    low, median, high = map(scale, (figure.low, figure.median, figure.high))
    return "█" * low + "▓" * (median - low) + "░" * (high - median)


def _runs(found: Answer, row: Batch, *, is_default: bool) -> str:
    figure = row.objective_value
    if figure is None:
        return _without_figure(row)
    if found.predicted is not None:
        return figure.origin
    seeds = plural(figure.runs, "seed" if row.confirmed else "run")
    if is_default:
        return f"{seeds}, default size"
    if row.batch_size == found.optimal.batch_size:
        return seeds
    if row.batch_size in found.worse:
        return f"{seeds}, {objective_in(found).comparative[1]}"
    if row.batch_size in found.tied:
        return f"{seeds}, within 5 %"
    if not row.confirmed:
        return f"{seeds}, unconfirmed"
    return f"{seeds}, hardly tuned" if row.untuned else f"{seeds}, may be best"


def _without_figure(row: Batch) -> str:
    if not row.ended:
        return "not tried" if row.predicted_s is None else "not tried: predicted"
    if "reached" in row.ended:
        return f"{row.ended['reached']} of {sum(row.ended.values())} reached the target"
    return ", ".join(f"{count} {state}" for state, count in row.ended.items())


def _configuration(found: Answer) -> list[str]:
    best = found.optimal
    known = {name: value for name, value in best.parameters.items() if value is not None}
    values = [
        f"{'no ' * (not value)}{name}" if isinstance(value, bool) else f"{name} {cell(value)}"
        for name, value in known.items()
    ]
    if best.accumulation_steps > 1:
        values = [f"micro_batch_size {best.micro_batch_size} × {best.accumulation_steps} steps", *values]
    lines = _wrapped(", ".join(value.replace(" ", NO_BREAK) for value in values))
    places = [] if found.is_predicted else [found.device.in_words]
    if best.test_metric is not None:
        places.append(f"test {found.target.metric} {cell(best.test_metric)}")
    places.append(about_cost(found))
    told = further_metrics(found), about_devices(found), about_growing(found)
    return [*lines, *_wrapped(" · ".join(filter(None, places))), *_wrapped(" ".join(filter(None, told)))]


def print_details(found: Answer) -> None:
    print_table(
        batch_rows(found),
        (
            "batch",
            *([] if found.objective == TIME_COLUMN else [found.objective, TIME_COLUMN]),
            *("steps", "ms/step"),
            *["host-bound"] * any(row.host_bound_share is not None for row in found.batches),
            *("learning_rate", "regime", "trials"),
        ),
    )
    print_trade_offs(found)
    noise = found.measured.noise_scale
    told = (
        what_else(found),
        further_metrics(found, training=True),
        *about_law(found),
        about_device(found),
        "" if noise is None else about_noise(noise),
    )
    say(*filter(None, told))
    if found.generalisation is not None:
        print_generalisation(found.generalisation, found.target.metric)
    if found.quick is not None:
        say(f"{found.quick.in_words}.")
    say(*(f"note: {warning.message}" for warning in found.warnings))
    for step in found.next:
        if step != found.settling:
            console().print(f"next: {step.command}  ({step.why})", soft_wrap=True)


def print_trade_offs(found: Answer) -> None:
    headings, rows = trade_off_rows(found)
    if not rows:
        return
    print_table([dict(zip(headings, row, strict=True)) for row in rows], headings)
    say(*about_columns(found))


def print_generalisation(found: Generalisation, metric: str) -> None:
    say(f"Final {metric} of each batch size after {found.train_seconds:g} train seconds, without a stop at the target:")
    print_table(
        [dict(zip(GENERALISATION_COLUMNS, row, strict=True)) for row in final_rows(found)], GENERALISATION_COLUMNS
    )


def about_noise(noise: NoiseAnswer) -> str:
    one = f"trial {noise.trial}" if noise.step is None else f"step {noise.step}"
    where = one if noise.trials is None else f"pooled over {noise.trials} trials of batch {noise.batch_size}"
    scale = noise_scale(noise.scale, noise.low, noise.high)
    adam = "" if noise.adam_low is None else f", {noise_scale(noise.adam_scale, noise.adam_low, noise.adam_high)}"
    place = "near the target" if noise.far_from_target is None else f"far from the target ({noise.far_from_target})"
    return f"Gradient noise scale {place}: {scale} samples{adam and f'{adam} for Adam'} ({where})."


def batch_rows(found: Answer) -> list[dict[str, Any]]:
    return [
        {
            **({} if found.objective == TIME_COLUMN else {found.objective: _figure(row)}),
            "batch": f"{row.batch_size}{' ←' if row.batch_size == found.optimal.batch_size else ''}",
            TIME_COLUMN: _time_of(row),
            "steps": row.steps_to_target,
            "ms/step": None if row.step_time_s is None else float(f"{1000 * row.step_time_s:.3g}"),
            "host-bound": None if row.host_bound_share is None else percent(row.host_bound_share),
            "learning_rate": (row.best.parameters if row.best else {}).get("learning_rate"),
            "regime": f"{row.regime or '–'}{', hardly tuned' if row.untuned else ''}",
            "trials": ", ".join(f"{count} {state}" for state, count in row.ended.items()) or None,
        }
        for row in found.batches
    ]


def _figure(row: Batch, digits: int = 4) -> str | None:
    if row.objective_value is not None:
        return with_interval(row.objective_value, digits)
    return None if row.objective_lower_bound is None else f"> {number(row.objective_lower_bound, digits)}"


def _time_of(row: Batch) -> str | None:
    if (time := row.time_to_target_s) is not None:
        return f"{with_interval(time, unit=' s')} ({time.origin})"
    if row.lower_bound_s is not None:
        return f"> {row.lower_bound_s:.3g} s"
    if row.trials or row.predicted_s is None:
        return None
    return f"not tried; predicted {with_interval(row.predicted_s, unit=' s')}"


# Codes of caveats that go with exported values.
GRAVE = frozenset(
    {
        "running",
        "unconfirmed",
        "confirmation_incomplete",
        "confirmation_missed",
        "retargeted",
        "predicted",
        "batch_unit",
    }
)


def exported(answer: Answer, form: Export, values: Parameters | None = None) -> str:
    """Format the best configuration, or ``values``, as YAML, arguments or a Python dictionary."""
    values = values or answer.optimal.values
    if form == "yaml":
        return _yaml(values, [*header(answer), *(f"note: {caveat}" for caveat in grave(answer))])
    if form == "args":
        return visible(shlex.join(arguments(values))) + "\n"
    return "{\n" + "".join(f"    {name!r}: {value!r},\n" for name, value in values.items()) + "}\n"


def exported_schedule(answer: Answer, found: ScheduledTraining, form: Export) -> str:
    if form == "args":
        return visible(shlex.join(arguments(found.values))) + "\n"
    notes = (f"note: {caveat}" for caveat in (*found.notes, *grave(answer)))
    comments = [*header(answer)[:2], "the best schedule of growing batches", *notes]
    if form == "yaml":
        return _yaml({**found.values, "stages": list(found.stages)}, comments)
    return training_loop(found, map(_one_line, comments))


def _yaml(values: Mapping[str, object], comments: Iterable[str]) -> str:
    lines = "".join(f"# {_one_line(comment)}\n" for comment in comments)
    return lines + yaml.safe_dump(dict(values), sort_keys=False)


def _one_line(comment: str) -> str:
    return " ".join(visible(comment).split())


def grave(answer: Answer) -> list[str]:
    unsure = [f"provisional: {how_sure(answer)}"] if answer.provisional and answer.within_5_percent is not None else []
    return unsure + [warning.message for warning in answer.warnings if warning.code in GRAVE]


def header(answer: Answer) -> list[str]:
    target = answer.target
    return [
        f"study {answer.study}: {target.metric} {'>=' if target.goal is Goal.MAXIMIZE else '<='} {target.value!r}",
        f"on {with_precision(answer.device.name, answer.device.precision)}",
        _takes(answer),
    ]


def _takes(answer: Answer) -> str:
    time, figure = answer.optimal.time_to_target_s, answer.optimal.objective_value
    known = (
        f"with {with_interval(figure, unit=objective_in(answer).unit)}"
        if time is None
        else f"in {with_interval(time, unit=' s')} of training"
    )
    return f"{known} ({'' if answer.predicted else 'median of '}{(time or figure).origin})"


def arguments(values: Parameters) -> Iterator[str]:
    """Yield command-line options for all values except None. Booleans become ``--name`` or ``--no-name``."""
    for name, value in values.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        elif value is not None:
            yield from (f"--{option}", str(value))
