"""``best`` without a study: what all studies that match have found, and whether they agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bssearch.cli.output import Format, cell, console, print_table, show_model

if TYPE_CHECKING:
    from bssearch.commands.across.answers import AcrossAnswer, StudyAnswer

COLUMNS = (
    "study",
    "database",
    "device",
    "who",
    "when",
    "optimal",
    "learning_rate",
    "figure",
    "within 5 %",
    "provisional",
)
MOST_TOLD = 3
"""Disagreements that people are told at most: a choice; JSON has all of them."""


def print_across(found: AcrossAnswer, form: Format) -> None:
    """Print answers across studies: for people, whole as JSON, or each answer as a row."""
    show_model(form, found, _print_answers, found.answers, COLUMNS)


def _print_answers(found: AcrossAnswer) -> None:
    """Print for people what each study has found, and in a sentence whether they agree."""
    from bssearch.commands.across.agreement import in_words

    out = console()
    print_table([_row(one) for one in found.answers], COLUMNS)
    for sentence in in_words(found.agreement):
        out.print(sentence, style="bold")
    told = found.agreement.disagreements
    for disagreement in told[:MOST_TOLD]:
        out.print(disagreement.message)
    if len(told) > MOST_TOLD:
        out.print(f"{len(told) - MOST_TOLD} more pairs do not agree: --format json has them.")
    for one in found.answers:
        if one.copy_of is not None:
            out.print(f"note on {one.study} in {one.database}: it is a copy of {one.copy_of}, and does not count again")
        if one.note is not None:
            out.print(f"note on {one.study}: {one.note}")


def _row(one: StudyAnswer) -> dict[str, Any]:
    """Return a study's row for people."""
    row = {"study": one.study, "database": one.database, "device": one.device, "who": one.created_by}
    row["when"] = one.created_at[:10]
    if one.optimal is None or one.flat_range is None:
        return {**row, "figure": "no answer"}
    low, high = one.flat_range
    return {
        **row,
        "optimal": one.optimal.batch_size,
        "learning_rate": cell(one.optimal.parameters.get("learning_rate")),
        "figure": _figure(one),
        "within 5 %": str(low) if low == high else f"{low}–{high}",
        "provisional": "yes" if one.provisional else "no",
    }


def _figure(one: StudyAnswer) -> str | None:
    """Return what the target takes: the objective's figure with its unit, interval and runs."""
    from bssearch.analysis.headline import with_interval

    figure = None if one.optimal is None else one.optimal.objective_value
    if figure is None:
        return None
    return f"{with_interval(figure, unit=one.unit)} ({figure.runs} run{'' if figure.runs == 1 else 's'})"
