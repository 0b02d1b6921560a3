"""``bssearch best --export``: the winner's values, for a training of one's own to read."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from bssearch.pages.words import visible
from bssearch.records import Goal

if TYPE_CHECKING:
    from bssearch.analysis.answer import Answer
    from bssearch.analysis.shape import Parameters
    from bssearch.commands.growing.values import ScheduledTraining


GRAVE = frozenset({"running", "unconfirmed", "confirmation_incomplete", "confirmation_missed", "retargeted"})
"""Codes of the caveats without which the values would be taken for more than they are."""


class Export(StrEnum):
    """What the winner's values are written as."""

    YAML = "yaml"
    ARGS = "args"
    PYTHON = "python"


def exported(answer: Answer, form: Export) -> str:
    """Return the winner's values as a YAML mapping, as command line arguments, or as a Python dictionary.

    Every value is read back as it was: floats are written in full, and so that plain YAML takes them for floats.
    """
    values = winner(answer)
    if form is Export.YAML:
        return _yaml(values, [*header(answer), *(f"note: {caveat}" for caveat in grave(answer))])
    if form is Export.ARGS:
        return visible(shlex.join(arguments(values))) + "\n"
    return "{\n" + "".join(f"    {name!r}: {value!r},\n" for name, value in values.items()) + "}\n"


def exported_schedule(answer: Answer, found: ScheduledTraining, form: Export) -> str:
    """Return the best schedule of growing batches: values with their stages, arguments, or a training loop in Python.

    The loop is a module of its own, for which the values alone would not do.
    """
    if form is Export.ARGS:
        return visible(shlex.join(arguments(found.values))) + "\n"
    notes = (f"note: {caveat}" for caveat in (*found.notes, *grave(answer)))
    comments = [*header(answer)[:2], "the best batch that grows", *notes]
    if form is Export.YAML:
        return _yaml({**found.values, "stages": list(found.stages)}, comments)
    from bssearch.commands.growing.loop import training_loop

    return training_loop(found, map(_one_line, comments))


def _yaml(values: Mapping[str, object], comments: Iterable[str]) -> str:
    import yaml

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
    from bssearch.analysis.headline import how_sure

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
    from bssearch.analysis.answer import objective_in
    from bssearch.analysis.headline import with_interval

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
