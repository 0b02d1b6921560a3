"""An answer as Python shows it: a chart and a table in a notebook, a data frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from bssearch.analysis import answer as stored

if TYPE_CHECKING:
    import pandas as pd


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
        from bssearch.pages.page import in_notebook

        return in_notebook(self)
