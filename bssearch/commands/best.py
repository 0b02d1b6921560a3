"""``best``: which batch size a stored study recommends."""

from __future__ import annotations

from bssearch.commands.display.answer import Answer
from bssearch.search.finding import answer
from bssearch.storage.repository import open_store


def best(study: str, *, db: str | None = None, target: float | None = None) -> Answer:
    """Return a stored study's answer, for another target too that is no harder than its own.

    Raises `NotFoundError`, `DatabaseError`, `TargetNotReachedError`, and `UsageError` for a harder target.
    """
    with open_store(db, write=False) as store:
        return Answer.of(answer(store, study, target))
