"""A stored study's answer: with its table, chart and page in Python, and predicted for another device."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bssearch.analysis import answer as stored
from bssearch.analysis.derived import predict_for_device
from bssearch.importers.step_times import read_step_times
from bssearch.search.finding import answer
from bssearch.spec.stored import spec_of
from bssearch.storage.repository import Store, open_store

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

    from bssearch.analysis.answer import Batch
    from bssearch.analysis.objectives.base import Objective


class Answer(stored.Answer):
    """Which batch size is optimal, and the evidence; the fields are those of ``bssearch best --format json``.

    A notebook shows it as its sentence, a table of the batch sizes, and the caveats.
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

    def plot(self) -> Figure:
        """Return plotly's figure of the objective against batch size: intervals, lower bounds, the law.

        Raises `UsageError` where plotly is not installed.
        """
        from bssearch.pages.interactive import plotly_figure
        from bssearch.pages.plots import objective_figure

        return plotly_figure(objective_figure(self) or {})

    def _repr_html_(self) -> str:
        """Return the answer for a notebook: no scripts, and every text escaped."""
        from bssearch.analysis.headline import headline

        headings, rows = _table(self)
        notes = "".join(f"<li>{html.escape(one.message)}</li>" for one in self.warnings)
        return (
            f"<p><b>{html.escape(headline(self))}</b></p>"
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
