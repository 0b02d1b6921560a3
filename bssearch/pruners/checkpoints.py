"""Where the trials of a study that wait are kept: files of this host, one a trial, of one study each in one folder."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from bssearch.files import make_private_folder
from bssearch.records import StudyRecord
from bssearch.settings import checkpoint_folder


class Checkpoints:
    """The checkpoints of one study, however its database is addressed and whatever it is called.

    Its folder is this user's alone: what lies in it decides how trials go on. ``why_not`` says why there can be none.
    """

    def __init__(self, study: StudyRecord) -> None:
        self.folder = checkpoint_folder() / study.mark
        self._is_writable = True
        self.why_not = ""

    def file_for(self, number: int) -> Path | None:
        """Return the file that a trial may be saved to, None where there can be none."""
        if self._is_writable:
            try:
                make_private_folder(self.folder)
            except OSError as error:
                self._is_writable, self.why_not = False, error.strerror or str(error)
        return self._file(number) if self._is_writable else None

    def is_writable(self) -> bool:
        """Return whether a file can be written, by writing one."""
        try:
            make_private_folder(self.folder)
            with tempfile.NamedTemporaryFile(dir=self.folder) as file:
                file.write(bytes(2**20))
        except OSError:
            return False
        return True

    def has(self, number: int) -> bool:
        """Return whether a trial waits on this host."""
        return self._file(number).is_file()

    def saved(self) -> frozenset[int]:
        """Return the trials that wait on this host."""
        names = (file.name.removeprefix("trial-").removesuffix(".pt") for file in self.folder.glob("trial-*.pt"))
        return frozenset(int(name) for name in names if name.isdecimal())

    def forget(self, number: int) -> None:
        """Delete what is kept of a trial."""
        for file in self.folder.glob(f"{self._file(number).name}*"):  # a part of one that was being written, too
            with suppress(OSError):
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete the folder, where nothing waits in it any more."""
        with suppress(OSError):
            self.folder.rmdir()

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
