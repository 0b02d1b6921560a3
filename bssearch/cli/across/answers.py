"""``best`` without a study: what all studies that match have found, and whether they agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bssearch.cli.output import Format, console, print_table, show_model

if TYPE_CHECKING:
    from bssearch.commands.across.answers import AcrossAnswer

MOST_TOLD = 3
"""Disagreements that people are told at most: a choice; JSON has all of them."""


def print_across(found: AcrossAnswer, form: Format) -> None:
    """Print answers across studies: for people, whole as JSON, or each answer as a row."""
    from bssearch.commands.display.rows import ANSWERED

    show_model(form, found, _print_answers, found.answers, ANSWERED)


def _print_answers(found: AcrossAnswer) -> None:
    """Print for people what each study has found, and in a sentence whether they agree."""
    from bssearch.commands.across.agreement import in_words
    from bssearch.commands.display.rows import ANSWERED, answered_row

    out = console()
    print_table([answered_row(one) for one in found.answers], ANSWERED)
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
