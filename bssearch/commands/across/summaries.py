"""``studies``: the studies of a database that match, each as a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bssearch.commands.across.matching import StudyFilter, device_of, precision_of
from bssearch.storage.repository import Store


def study_rows(store: Store, asked: StudyFilter, *, archived: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a flat row for each study that matches, the oldest first: the contract of ``studies --format json``.

    ``archived`` ones only where they are asked for. The store is closed.
    """
    with store:
        records = {one.name: one for one in store.study_records()}
        for one in store.studies():
            study = records.get(one.name)  # None of one that was made in this moment
            if study is None or not asked.matches(study) or (one.archived_at is not None and not archived):
                continue
            yield {
                "name": one.name,
                "workload": one.workload,
                "target": one.target,
                "objective": one.objective,
                "trials": one.trials,
                "reached": one.reached,
                "running": one.running,
                "created_by": one.created_by,
                "created_at": one.created_at.isoformat(timespec="seconds"),
                "archived_at": one.archived_at and one.archived_at.isoformat(timespec="seconds"),
                "database": store.masked_url,
                "device": device_of(study) or None,
                "precision": precision_of(study) or None,
            }
