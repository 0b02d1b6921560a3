"""An answer as Python shows it: a chart and a table in a notebook, a data frame."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from bssearch.analysis import answer as stored

if TYPE_CHECKING:
    import pandas as pd

    from bssearch.analysis.answer import Batch
    from bssearch.analysis.objectives.base import Objective


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart as an SVG document without a script. A notebook shows it, light or dark as the screen is."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return self.svg  # inline, so that its tooltips work


class Answer(stored.Answer):
    """Which batch size is optimal, and the evidence; the fields are those of ``bssearch best --format json``.

    A notebook shows it as its sentence, the chart, a table of the batch sizes, and the caveats.
    """

    @classmethod
    def of(cls, found: stored.Answer) -> Self:
        """Return an answer with the ways to show it."""
        return cls.model_construct(found.model_fields_set, **{name: getattr(found, name) for name in cls.model_fields})

    @property
    def frame(self) -> pd.DataFrame:
        """Return the batch sizes as a data frame, one row each, with the columns of ``batches.csv``."""
        import pandas as pd

        from bssearch.commands.trials import flat_table

        columns, rows = flat_table([row.model_dump(mode="json") for row in self.batches])
        return pd.DataFrame(rows, columns=columns)

    def plot(self) -> Picture:
        """Return the chart of the objective against batch size: intervals, lower bounds, the law."""
        from bssearch.pages.plots import objective_picture

        return Picture(objective_picture(self))

    def _repr_html_(self) -> str:
        """Return the answer for a notebook: no scripts, and every text escaped."""
        from bssearch.analysis.headline import headline

        headings, rows = _table(self)
        notes = "".join(f"<li>{html.escape(one.message)}</li>" for one in self.warnings)
        return (
            f"<p><b>{html.escape(headline(self))}</b></p>{self.plot().svg}"
            f"<table><thead>{_line('th', headings)}</thead><tbody>{''.join(_line('td', row) for row in rows)}</tbody>"
            f"</table>{notes and f'<ul>{notes}</ul>'}"
        )


def _table(found: stored.Answer) -> tuple[list[str], list[Sequence[str]]]:
    """Return the headings and the rows of the batch sizes."""
    from bssearch.analysis.objectives.time_to_target import TIME

    objective = stored.objective_in(found)
    headings = ["batch size", "train seconds to the target", "steps", "learning rate", "trials that reached it"]
    if objective.name != TIME.name:
        headings.insert(1, objective.axis_title)
    return headings, [list(_cells(found, row, objective, TIME)) for row in found.batches]


def _cells(found: stored.Answer, row: Batch, objective: Objective, time: Objective) -> Iterator[str]:
    from bssearch.analysis.headline import with_interval
    from bssearch.pages.words import in_words

    yield f"{row.batch_size}{' ←' if row.batch_size == found.optimal.batch_size else ''}"
    if objective.name != time.name:
        yield in_words(None) if row.objective_value is None else with_interval(row.objective_value, objective.digits)
    known, bound = row.time_to_target_s, row.lower_bound_s
    yield with_interval(known) if known is not None else f"> {bound:.3g}" if bound is not None else in_words(None)
    yield in_words(row.steps_to_target)
    yield in_words(row.best.parameters.get("learning_rate") if row.best else None)
    yield f"{row.reached} of {row.trials}"


def _line(cell: str, texts: Sequence[Any]) -> str:
    return f"<tr>{''.join(f'<{cell}>{html.escape(str(text))}</{cell}>' for text in texts)}</tr>"
