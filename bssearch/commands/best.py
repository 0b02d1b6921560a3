"""A stored study's answer in Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bssearch.analysis.answer import Answer as Answer
from bssearch.search.finding import answer
from bssearch.spec.reader import spec_of
from bssearch.storage.repository import Store, open_store

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart as an SVG document, light or dark in notebooks."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return self.svg  # inline, for its tooltips


def plot(answer: Answer) -> Picture:
    """Return the chart of the objective against batch size."""
    from bssearch.figures.plots import objective_picture

    return Picture(objective_picture(answer))


def frame(answer: Answer) -> pd.DataFrame:
    """Return a data frame with a row per batch size."""
    import pandas as pd

    from bssearch.exchange.trial_rows import flat_table

    columns, rows = flat_table([row.model_dump(mode="json") for row in answer.batches])
    return pd.DataFrame(rows, columns=columns)


def page(answer: Answer) -> str:
    """Return the answer as HTML for a notebook."""
    from bssearch.figures.page import in_notebook

    return in_notebook(answer)


Answer.plot, Answer.frame, Answer._repr_html_ = plot, property(frame), page


def best(study: str, *, db: str | None = None, target: float | None = None) -> Answer:
    """Return a stored study's answer, optionally for a ``target`` no harder than its own.

    Raises `NotFoundError`, `DatabaseError`, `TargetNotReachedError`, and `UsageError` for a harder target.
    """
    with open_store(db, write=False) as store:
        return answer(store, study, target)


def predict(store: Store, study: str, step_times: Path, device_name: str | None = None) -> Answer:
    """Return a stored study's answer by another device's step times; see `predict_for_device`.

    The device's name defaults to the file's.
    """
    from bssearch.analysis.build_answer import predict_for_device
    from bssearch.exchange.importers.step_times import read_step_times

    record = store.studies.get(study)
    times = read_step_times(step_times)
    return predict_for_device(record, spec_of(record), store.trials.of(study), times, device_name or step_times.stem)
