"""Where the trials of a study that wait are kept: files of this host, one a trial, of one study each in one folder."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path

from bssearch.records import StudyRecord
from bssearch.settings import checkpoint_folder


class Checkpoints:
    """The checkpoints of one study of one database."""

    def __init__(self, database_url: str, study: StudyRecord) -> None:
        told = f"{database_url} {study.name} {study.created_at.isoformat()}"
        digest = hashlib.sha256(told.encode()).hexdigest()[:12]
        self.folder = checkpoint_folder() / f"{study.name}-{digest}"
        self._is_writable = True

    def file_for(self, number: int) -> Path | None:
        """Return the file that a trial may be saved to, None where there can be none."""
        if self._is_writable:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError:
                self._is_writable = False
        return self._file(number) if self._is_writable else None

    def has(self, number: int) -> bool:
        """Return whether a trial waits on this host."""
        return self._file(number).is_file()

    def forget(self, number: int) -> None:
        """Delete what is kept of a trial."""
        with suppress(OSError):
            self._file(number).unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete what is kept of every trial."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def bytes(self) -> int:
        """Return how much they take."""
        total = 0
        for file in self.folder.glob("trial-*"):
            with suppress(OSError):
                total += file.stat().st_size
        return total

    def _file(self, number: int) -> Path:
        return self.folder / f"trial-{number}.pt"
