"""A stored study's answer: with its table, chart and page in Python, and predicted for another device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from bssearch.analysis import answer as stored
from bssearch.analysis.derived import predict_for_device
from bssearch.importers.step_times import read_step_times
from bssearch.search.finding import answer
from bssearch.spec.stored import spec_of
from bssearch.storage.repository import Store, open_store

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


def best(study: str, *, db: str | None = None, target: float | None = None) -> Answer:
    """Return a stored study's answer, for another target too that is no harder than its own.

    Raises `NotFoundError`, `DatabaseError`, `TargetNotReachedError`, and `UsageError` for a harder target.
    """
    with open_store(db, write=False) as store:
        return Answer.of(answer(store, study, target))


def predict(store: Store, study: str, step_times: Path, device_name: str | None = None) -> stored.Answer:
    """Return the answer of a stored study with the step times of a file; see `predict_for_device`.

    The device's name is by default the file's. Raises the errors of `read_step_times` and `predict_for_device`, and
    `NotFoundError`.
    """
    record = store.study(study)
    times = read_step_times(step_times)
    return predict_for_device(record, spec_of(record), store.trials(study), times, device_name or step_times.stem)
