"""Storage of paused trials: a local folder, or a remote store with a local staging folder."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bssearch.errors import CheckpointError
from bssearch.files import make_guarded_folder
from bssearch.records import StudyRecord
from bssearch.search.pruners.checkpoint_store import CheckpointStore, Held, SilentStoreError, check_store_url, held_of
from bssearch.settings import checkpoint_folder, checkpoint_url

LOOK_SECONDS = 5.0

SILENT_SECONDS = 600.0
"""Each request takes a minute."""


def check_checkpoint_place() -> None:
    """Raise `UsageError` if the checkpoint URL is invalid or its package is missing."""
    url = checkpoint_url()
    if url is not None:
        check_store_url(url)


class CheckpointFolder:
    """Files of one study, in a guarded folder (`bssearch.files`)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def try_out(self) -> None:
        """Write and delete a file; raise `OSError` on failure."""
        make_guarded_folder(self.path)
        with tempfile.NamedTemporaryFile(dir=self.path) as file:
            file.write(bytes(2**20))

    def place(self, number: int) -> Path:
        """Path of a trial's file."""
        return self.path / f"trial-{number}.pt"

    def look(self) -> Held:
        """Trials in the folder."""
        found = []
        for file in self._files("trial-*"):
            with suppress(OSError):
                found.append((file.name, file.stat().st_size))
        return held_of(found)

    def remove(self, number: int) -> None:
        """Delete a trial's files."""
        for file in self._files(f"{self.place(number).name}*"):
            with suppress(OSError):
                file.unlink(missing_ok=True)

    def _files(self, pattern: str) -> list[Path]:
        with suppress(OSError):
            return [*self.path.glob(pattern)]
        return []

    def close(self) -> None:
        """Delete the folder if empty."""
        with suppress(OSError):
            self.path.rmdir()

    def clear(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


class Checkpoints:
    """Checkpoints of a study, independent of its name and the database's address.

    Workers write to ``folder``, which is private because its files decide how trials resume. With a remote store, the
    driver uploads (`send`) before a trial counts as paused and downloads (`bring`) before it resumes.
    """

    def __init__(self, study: StudyRecord) -> None:
        self._here = CheckpointFolder(checkpoint_folder() / study.mark)
        url = checkpoint_url()
        self._store = None if url is None else CheckpointStore(url, study.mark)
        self._is_writable = True
        self.refusal = self.away = ""
        self._known = Held()
        self._next_look = 0.0

    @property
    def folder(self) -> Path:
        """Local folder."""
        return self._here.path

    def file_for(self, number: int) -> Path | None:
        """File to save a trial to; None if the folder is unusable."""
        if self._is_writable:
            try:
                make_guarded_folder(self.folder)
            except OSError as error:
                self._is_writable = False
                self._refuse(error)
        return self._here.place(number) if self._is_writable else None

    def is_writable(self) -> bool:
        """Test by writing, in a remote store too; sets `refusal`."""
        try:
            self._here.try_out()
            if self._store is not None:
                with self._noting_silence():
                    self._store.try_out()
        except (OSError, CheckpointError) as error:
            self._refuse(error)
            return False
        return True

    def has(self, number: int) -> bool:
        """True if a trial is saved."""
        return number in self.held().saved

    def held(self) -> Held:
        """Saved trials; a remote list may be seconds old, and is empty while unreachable."""
        if self._store is None:
            return self._here.look()
        if time.monotonic() >= self._next_look:
            try:
                with self._noting_silence():
                    self._known, self.away = self._store.look(), ""
                self._next_look = time.monotonic() + LOOK_SECONDS
            except CheckpointError as error:
                self._note_away(error)
        return self._known

    def send(self, number: int) -> None:
        """Move a trial's file to the remote store, if any; raise `CheckpointError` on failure."""
        if self._store is None:
            return
        try:
            with self._noting_silence():
                self._known = self._known.beside(number, self._store.put(number, self._here.place(number)))
        finally:
            self._here.remove(number)

    def bring(self, number: int, is_wanted: Callable[[], bool]) -> None:
        """Copy a trial's file from the remote store, if any; raise `CheckpointError` on failure."""
        if self._store is not None:
            with self._noting_silence():
                self._store.get(number, self._here.place(number), is_wanted)

    def present(self) -> frozenset[int]:
        """Trials with any file left."""
        return frozenset({*self.held().sizes, *self._here.look().sizes})

    def forget(self, number: int) -> None:
        """Delete a trial's files, remote ones if listed; ignore remote failures."""
        self._here.remove(number)
        if self._store is not None and number in self._known.sizes:
            self._known = self._known.without({number})
            with suppress(CheckpointError), self._noting_silence():
                self._store.remove(number)

    def close(self) -> None:
        """Delete the folder if empty."""
        self._here.close()

    def clear(self) -> None:
        """Delete all files; raise `CheckpointError` if the remote store fails."""
        self._here.clear()
        if self._store is not None:
            self._store.clear()

    def _refuse(self, error: OSError | CheckpointError) -> None:
        self.refusal = str(error)
        if isinstance(error, OSError):
            self.refusal = f"{self.folder} cannot be used: {error.strerror or error}"

    @contextmanager
    def _noting_silence(self) -> Iterator[None]:
        try:
            yield
        except SilentStoreError as error:
            self._note_away(error)
            raise

    def _note_away(self, error: CheckpointError) -> None:
        pause = SILENT_SECONDS if isinstance(error, SilentStoreError) else LOOK_SECONDS
        self._known, self.away, self._next_look = Held(), str(error), time.monotonic() + pause
