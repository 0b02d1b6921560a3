"""How an answer is printed: for people, as JSON, its batch sizes as rows, or what to train with for a program."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from bssearch.analysis.answer import Answer, Batch, objective_in
from bssearch.analysis.generalisation import Generalisation, final_rows
from bssearch.analysis.headline import (
    about_device,
    about_growing,
    about_law,
    further_metrics,
    headline,
    how_sure,
    shares_of_speedup,
    with_interval,
)
from bssearch.analysis.measured import NoiseAnswer
from bssearch.analysis.numbers import noise_scale, number
from bssearch.analysis.shape import Parameters
from bssearch.analysis.trade_offs import about_columns, trade_off_rows
from bssearch.cli.arguments import Export
from bssearch.cli.output import Format, cell, console, print_table, show_model
from bssearch.commands.growing import ScheduledTraining, training_loop
from bssearch.records import Goal
from bssearch.records.text import visible

TIME_COLUMN = "time_to_target"
BATCH_COLUMNS = ("batch", TIME_COLUMN, "steps", "ms/step", "learning_rate", "regime", "trials")
GENERALISATION_COLUMNS = ("batch", "final_metric", "test_metric", "worse_by", "runs")


def print_found(found: Answer, form: Format) -> None:
    """Print an answer: for people, whole as JSON, or its batch sizes as rows."""
    show_model(form, found, print_answer, found.batches)


def print_answer(found: Answer) -> None:
    """Print an answer for people: the sentence, the configuration, the batch sizes, the caveats."""
    out = console()
    out.print(headline(found), style="bold")
    if (shares := shares_of_speedup(found)) is not None:
        out.print(shares)
    known = {key: value for key, value in found.optimal.parameters.items() if value is not None}
    parameters = ", ".join(f"{key} {cell(value)}" for key, value in known.items())
    accumulated = found.optimal.accumulation_steps
    micro = f" ({accumulated} × {found.optimal.micro_batch_size})" if accumulated > 1 else ""
    out.print(f"Train with: batch_size {found.optimal.batch_size}{micro}{parameters and f', {parameters}'}")
    is_predicted = any(warning.code == "predicted" for warning in found.warnings)
    where = [] if is_predicted else [f"measured on {found.device.in_words}"]
    if found.optimal.test_metric is not None:
        where = [f"test {found.target.metric} {cell(found.optimal.test_metric)} at the target", *where]
    if where:
        told = "; ".join(where)
        out.print(f"{told[0].upper()}{told[1:]}.")
    for further in filter(None, (further_metrics(found), about_growing(found))):
        out.print(further)
    figure = _figure_column(found)
    columns: tuple[str, ...] = BATCH_COLUMNS if figure is None else (BATCH_COLUMNS[0], figure, *BATCH_COLUMNS[1:])
    if any(row.host_bound_share is not None for row in found.batches):
        after = columns.index("ms/step") + 1
        columns = (*columns[:after], "host-bound", *columns[after:])
    print_table(batch_rows(found), columns)
    print_trade_offs(found)
    noise = found.measured.noise_scale
    for line in filter(None, (*about_law(found), about_device(found), noise and about_noise(noise))):
        out.print(line)
    if found.generalisation is not None:
        print_generalisation(found.generalisation, found.target.metric)
    if found.quick is not None:
        out.print(f"{found.quick.in_words}.")
    for warning in found.warnings:
        out.print(f"note: {warning.message}")
    for step in found.next:
        if step != found.settling:
            out.print(f"next: {step.command}  ({step.why})", soft_wrap=True)


def print_trade_offs(found: Answer) -> None:
    """Print what the batch sizes take besides time, and what they come to; nothing where none of that is known."""
    headings, rows = trade_off_rows(found)
    if not rows:
        return
    print_table([dict(zip(headings, row, strict=True)) for row in rows], headings)
    for line in about_columns(found):
        console().print(line)


def print_generalisation(found: Generalisation, metric: str) -> None:
    """Print what the batch sizes come to in the same train seconds, as a table for people."""
    console().print(f"Trained to {found.train_seconds:g} s each, whenever the target was reached ({metric}):")
    print_table(
        [dict(zip(GENERALISATION_COLUMNS, row, strict=True)) for row in final_rows(found)], GENERALISATION_COLUMNS
    )


def about_noise(noise: NoiseAnswer) -> str:
    """Return the gradient noise scale, and where it was measured."""
    one = f"trial {noise.trial}" if noise.step is None else f"step {noise.step}"
    where = one if noise.trials is None else f"pooled over {noise.trials} trials of batch {noise.batch_size}"
    scale = noise_scale(noise.scale, noise.low, noise.high)
    adam = "" if noise.adam_low is None else f", {noise_scale(noise.adam_scale, noise.adam_low, noise.adam_high)}"
    place = "near the target" if noise.far_from_target is None else f"far from the target ({noise.far_from_target})"
    return f"Gradient noise scale {place}: {scale} samples{adam and f'{adam} as Adam sees it'} ({where})."


def batch_rows(found: Answer) -> list[dict[str, Any]]:
    """Return the batch sizes of an answer as rows for people."""
    rows = []
    for row in found.batches:
        parameters = row.best.parameters if row.best else {}
        rows.append(
            {
                "batch": f"{row.batch_size}{' ←' if row.batch_size == found.optimal.batch_size else ''}",
                "time_to_target": _time_of(row),
                **_figure(found, row),
                "steps": row.steps_to_target,
                "ms/step": None if row.step_time_s is None else float(f"{1000 * row.step_time_s:.3g}"),
                "host-bound": None if row.host_bound_share is None else f"{row.host_bound_share:.0%}",
                "learning_rate": parameters.get("learning_rate"),
                "regime": f"{row.regime or '–'}{', untuned?' if row.untuned else ''}",
                "trials": ", ".join(f"{count} {state}" for state, count in row.ended.items()) or None,
            }
        )
    return rows


def _figure(found: Answer, row: Batch) -> dict[str, str | None]:
    """Return the objective's figure under the name of its column, where that is not the time."""
    name = _figure_column(found)
    if name is None:
        return {}
    known, bound = row.objective_value, row.objective_lower_bound
    if known is None:
        return {name: None if bound is None else f"> {number(bound, 4)}"}
    interval = "" if known.low is None or known.high is None else f" [{number(known.low, 4)}, {number(known.high, 4)}]"
    return {name: f"{number(known.median, 4)}{interval}"}


def _figure_column(found: Answer) -> str | None:
    """Return the column of the objective's figure; None for time, which has one in every answer."""
    return None if found.objective == TIME_COLUMN else found.objective


def _time_of(row: Batch) -> str | None:
    """Return a row's time to the target: measured, bounded from below, or as the law predicts it where nothing ran."""
    time, bound = row.time_to_target_s, row.lower_bound_s
    if time is None and bound is not None:
        return f"> {bound:.3g} s"
    if time is None:
        predicted = None if row.trials else row.predicted_s
        return None if predicted is None else f"not tried; predicted {with_interval(predicted, unit=' s')}"
    return f"{with_interval(time, unit=' s')} ({time.runs} run{'' if time.runs == 1 else 's'})"


GRAVE = frozenset(
    {"running", "unconfirmed", "confirmation_incomplete", "confirmation_missed", "retargeted", "predicted"}
)
"""Codes of the caveats without which the values would be taken for more than they are."""


def exported(answer: Answer, form: Export) -> str:
    """Return the winner's values as a YAML mapping, as command line arguments, or as a Python dictionary.

    Every value is read back as it was: floats are written in full, and so that plain YAML takes them for floats.
    """
    values = winner(answer)
    if form == "yaml":
        return _yaml(values, [*header(answer), *(f"note: {caveat}" for caveat in grave(answer))])
    if form == "args":
        return visible(shlex.join(arguments(values))) + "\n"
    return "{\n" + "".join(f"    {name!r}: {value!r},\n" for name, value in values.items()) + "}\n"


def exported_schedule(answer: Answer, found: ScheduledTraining, form: Export) -> str:
    """Return the best schedule of growing batches: values with their stages, arguments, or a training loop in Python.

    The loop is a module of its own, for which the values alone would not do.
    """
    if form == "args":
        return visible(shlex.join(arguments(found.values))) + "\n"
    notes = (f"note: {caveat}" for caveat in (*found.notes, *grave(answer)))
    comments = [*header(answer)[:2], "the best batch that grows", *notes]
    if form == "yaml":
        return _yaml({**found.values, "stages": list(found.stages)}, comments)
    return training_loop(found, map(_one_line, comments))


def _yaml(values: Mapping[str, object], comments: Iterable[str]) -> str:
    lines = "".join(f"# {_one_line(comment)}\n" for comment in comments)
    return lines + yaml.safe_dump(dict(values), sort_keys=False)


def _one_line(comment: str) -> str:
    return " ".join(visible(comment).split())


def winner(answer: Answer) -> Parameters:
    """Return the winner's values by name; the micro-batch only where batches are accumulated from some."""
    best = answer.optimal
    values: Parameters = {"batch_size": best.batch_size}
    if best.accumulation_steps > 1:
        values |= {"micro_batch_size": best.micro_batch_size, "accumulation_steps": best.accumulation_steps}
    return values | best.parameters


def grave(answer: Answer) -> list[str]:
    """Return the caveats that whoever trains with the values must know."""
    unsure = (
        [f"provisional: it {how_sure(answer)}"] if answer.provisional and answer.within_5_percent is not None else []
    )
    return unsure + [warning.message for warning in answer.warnings if warning.code in GRAVE]


def header(answer: Answer) -> list[str]:
    """Return sentences that say where the values are from."""
    target = answer.target
    return [
        f"study {answer.study}: {target.metric} {'>=' if target.goal is Goal.MAXIMIZE else '<='} {target.value!r}",
        f"on {answer.device.name}, {answer.device.precision}",
        _takes(answer),
    ]


def _takes(answer: Answer) -> str:
    """Return what it takes to reach the target: seconds, or, where they are not known, the objective's figure."""
    time, figure = answer.optimal.time_to_target_s, answer.optimal.objective_value
    assert figure is not None, "an optimum has its figure"
    known = (
        f"with {with_interval(figure, unit=objective_in(answer).unit)}"
        if time is None
        else f"in {with_interval(time, unit=' s')} of training"
    )
    runs = (time or figure).runs
    return f"{known} (median of {runs} run{'s' * (runs > 1)})"


def arguments(values: Parameters) -> list[str]:
    """Return values as options: ``--name value``, and ``--name`` or ``--no-name`` for booleans; none for None."""
    words: list[str] = []
    for name, value in values.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            words += [f"--{option}", str(value)]
    return words
