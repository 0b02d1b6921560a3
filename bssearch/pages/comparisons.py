"""Sections that hold the answer against something else: the same training time, and what a quick answer promised."""

from __future__ import annotations

from bssearch.analysis.answer import Answer
from bssearch.analysis.generalisation import final_rows
from bssearch.analysis.numbers import number
from bssearch.pages.html import Row, Section, Table
from bssearch.pages.words import NOTHING


def promised_and_found(answer: Answer) -> Section | None:
    """Return what `bssearch quick` had promised beside what the search has found; None where nothing was promised.

    The time of either is that at its batch size over the optimum's, tuned by the search.
    """
    promise = answer.quick
    if promise is None:
        return None
    ratio = NOTHING if promise.time_ratio is None else f"{number(promise.time_ratio)}×"
    held = "holds" if promise.holds else "does not hold"
    return Section(
        name="quick",
        title="Promised and found",
        text=f"bssearch quick had promised {number(promise.gain)}× over the default before the search. Its 90 % "
        f"interval {held} what was found.",
        table=Table(
            ["", "Batch", "Range", "Time over the optimum"],
            [
                Row(["Promised", f"{promise.batch_size:,}", _range(promise.interval), ratio]),
                Row(["Found", f"{promise.found_batch_size:,}", _range(promise.found_flat_range), "1×"], marked=True),
            ],
        ),
        notes=["The promised range holds the optimum with 90 %, the found one is what is within 5 % of it."],
    )


def _range(ends: list[int]) -> str:
    low, high = ends
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def trained_for_the_same_time(answer: Answer) -> Section | None:
    """Return the final metric of each batch size in the same train seconds; None where none was trained so."""
    found = answer.generalisation
    if found is None:
        return None
    best = [one.batch_size for one in found.batches].index(found.best_batch_size)
    return Section(
        name="generalisation",
        title="Trained for the same time",
        text=f"Each batch size trained for {number(found.train_seconds)} s, whenever it reached the target: the median "
        "final metrics, and by how much they are worse than the best, with a 95 % interval.",
        table=Table(
            ["Batch", f"Validation {answer.target.metric}", f"Test {answer.target.metric}", "Worse by", "Runs"],
            [Row(cells, index == best) for index, cells in enumerate(final_rows(found))],
        ),
    )
