"""Answers of several studies as rows for people: one a study, texts and numbers under the headings of a table."""

from __future__ import annotations

from typing import Any

from bssearch.analysis.headline import with_interval
from bssearch.analysis.numbers import ends, number
from bssearch.commands.across.answers import StudyAnswer
from bssearch.commands.report import Comparison
from bssearch.pages.words import plural

COMPARED = (
    "study",
    "device",
    "precision",
    "workload",
    "objective",
    "target",
    "optimal",
    "figure",
    "ratio to first",
    "within 5 %",
    "critical batch",
    "largest that fits",
    "test metric",
)
"""The headings of studies side by side."""

ANSWERED = (
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
"""The headings of what all studies that match have found."""


def compared_row(one: Comparison) -> dict[str, Any]:
    """Return a comparison's row."""
    objective = str(one.objective).replace("_", " ")
    head = [one.study, one.device, one.precision, one.workload, objective, one.target]
    if one.optimal_batch_size is None or one.flat_range is None:
        return dict(zip(COMPARED, [*head, None, "target not reached"], strict=False))
    figure, ratio, critical = one.objective_value, one.ratio_to_first, one.b_crit
    poor = "" if one.fit_verdict == "fits" else f" ({str(one.fit_verdict).replace('_', ' ')})"
    figures = [
        one.optimal_batch_size,
        figure and f"{with_interval(figure)} ({plural(figure.runs, 'run')})",
        one.note if ratio is None else f"{number(ratio.value)}{ends(ratio.low, ratio.high)}",
        _span(one.flat_range),
        critical and f"{critical.in_words}{poor}",
        one.largest_that_fits,
        one.test_metric,
    ]
    return dict(zip(COMPARED, [*head, *figures], strict=True))


def answered_row(one: StudyAnswer) -> dict[str, Any]:
    """Return the row of one of the studies that match a question."""
    row = {"study": one.study, "database": one.database, "device": one.device, "who": one.created_by}
    row["when"] = one.created_at[:10]
    if one.optimal is None or one.flat_range is None:
        return {**row, "figure": "no answer"}
    figure = one.optimal.objective_value
    return {
        **row,
        "optimal": one.optimal.batch_size,
        "learning_rate": one.optimal.parameters.get("learning_rate"),
        "figure": figure and f"{with_interval(figure, unit=one.unit)} ({plural(figure.runs, 'run')})",
        "within 5 %": _span(one.flat_range),
        "provisional": "yes" if one.provisional else "no",
    }


def _span(sizes: list[int]) -> str:
    low, high = sizes
    return str(low) if low == high else f"{low}–{high}"
