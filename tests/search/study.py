"""A study in a folder's SQLite file."""

from collections.abc import Sequence
from pathlib import Path

from bssearch.records import Phase, TrialRecord, TrialState
from bssearch.storage.repository import open_store


def url_in(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


def trials_in(
    folder: Path, phase: Phase | None = None, name: str = "toy", *, states: Sequence[TrialState] | None = None
) -> list[TrialRecord]:
    with open_store(url_in(folder), write=False) as store:
        return store.trials.of(name, phase=phase, states=states)
