"""``track-record``: how often quick answers held, over the studies of a database."""

from __future__ import annotations

import statistics

from bssearch.analysis.law.promise import Promise
from bssearch.analysis.shape import Model
from bssearch.errors import TargetNotReachedError
from bssearch.search.finding import answer, stored_quick
from bssearch.storage.repository import Store


class Kept(Promise):
    """The promise of one study."""

    study: str


class TrackRecord(Model):
    """The quick answers that a search has been held against, and ``waiting``, the studies still without one.

    ``held`` of them hold: their interval meets the flat range that the search found. ``median_time_ratio`` is that of
    the time at the promised batch size over that of the optimum, null where none is known.
    """

    studies: list[Kept]
    held: int
    median_time_ratio: float | None
    waiting: list[str]


def track_record(store: Store) -> TrackRecord:
    """Return how often the quick answers of a database's studies held."""
    kept, waiting = [], []
    for study in store.studies():
        if stored_quick(store, study.name) is None:
            continue
        try:
            promise = answer(store, study.name).quick
        except TargetNotReachedError:
            promise = None
        if promise is None:
            waiting.append(study.name)
        else:
            kept.append(Kept(study=study.name, **promise.model_dump()))
    ratios = [one.time_ratio for one in kept if one.time_ratio is not None]
    return TrackRecord(
        studies=kept,
        held=sum(one.holds for one in kept),
        median_time_ratio=statistics.median(ratios) if ratios else None,
        waiting=waiting,
    )
