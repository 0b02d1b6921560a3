"""Studies in a SQLite file of a folder: where the file is, which trials it holds, and what its driver has told."""

from __future__ import annotations

from pathlib import Path

from bssearch.records import Phase, TrialRecord
from bssearch.search.listener import Listener
from bssearch.storage.repository import open_store


class Ear(Listener):
    """Keeps the notes of a driver."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def url_in(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


def trials_in(folder: Path, phase: Phase | None = None, name: str = "toy") -> list[TrialRecord]:
    with open_store(url_in(folder), write=False) as store:
        return store.trials.of(name, phase=phase)
