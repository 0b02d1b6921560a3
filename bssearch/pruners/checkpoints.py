"""Where the trials of a study that wait are kept: in a folder, or in a store elsewhere with a folder on the way."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from bssearch.errors import CheckpointError
from bssearch.pruners.checkpoint_folder import CheckpointFolder, Held
from bssearch.pruners.checkpoint_store import CheckpointStore, check_store_url
from bssearch.pruners.transfer import Transfer, ignoring_progress
from bssearch.records import StudyRecord
from bssearch.settings import checkpoint_folder, checkpoint_url

LOOK_SECONDS = 5.0
"""How long what a store elsewhere holds counts as known before it is asked again. A choice."""

LAST_SECONDS = 10.0
"""How long a driver that ends waits for what it has deleted elsewhere to be gone. A choice."""


def check_checkpoint_place() -> None:
    """Raise `UsageError` where ``BSSEARCH_CHECKPOINT_DIR`` is a URL that names no store, or a package is missing."""
    url = checkpoint_url()
    if url is not None:
        check_store_url(url)


class Checkpoints:
    """The checkpoints of one study, however its database is addressed and whatever it is called.

    Workers write to its ``folder``, which is not for strangers: what lies in it decides how trials go on. Where they
    are kept in a store elsewhere a file is sent there (`send`) before its trial counts as paused, and brought (`bring`)
    before it goes on; what the store holds is looked up in the background. ``why_not`` says why there can be none,
    ``refusal`` is the whole sentence, ``away`` says what is wrong with a store whose content is not known.
    Raises `UsageError` where ``BSSEARCH_CHECKPOINT_DIR`` is a URL that names no store.
    """

    def __init__(self, study: StudyRecord) -> None:
        self._here = CheckpointFolder(checkpoint_folder() / study.mark)
        url = checkpoint_url()
        self._store = None if url is None else CheckpointStore(url, study.mark)
        self._is_writable = True
        self.why_not = self.refusal = self.away = ""
        self._known = Held()
        self._look: Transfer[Held] | None = None
        self._next_look: float | None = None
        self._is_outdated = False
        self._deletions: dict[int, Transfer[None]] = {}

    @property
    def folder(self) -> Path:
        """Return where workers write."""
        return self._here.path

    @property
    def are_elsewhere(self) -> bool:
        """Return whether they are kept in a store elsewhere."""
        return self._store is not None

    def file_for(self, number: int) -> Path | None:
        """Return the file that a trial may be saved to, None where there can be none."""
        if self._is_writable:
            try:
                self._here.make()
            except OSError as error:
                self._is_writable = False
                self._refuse(error)
        return self._here.place(number) if self._is_writable else None

    def is_writable(self) -> bool:
        """Return whether a file can be written, by writing one; in a store elsewhere, too."""
        try:
            self._here.try_out()
            if self._store is not None:
                attempt = Transfer(self._store.shown, ignoring_progress(self._store.try_out))
                attempt.wait()
                attempt.result()
        except (OSError, CheckpointError) as error:
            self._refuse(error)
            return False
        return True

    def has(self, number: int) -> bool:
        """Return whether a trial waits where this driver can have it go on."""
        return number in self.held().saved

    def held(self) -> Held:
        """Return what is kept; of a store elsewhere, what it held a few seconds ago, nothing while it is away."""
        if self._store is None:
            return self._here.look()
        self._note_deletions()
        if self._look is None and (self._next_look is None or time.monotonic() >= self._next_look):
            self._is_outdated = False
            self._look = Transfer(self._store.shown, ignoring_progress(self._store.look))
        if self._look is not None:
            if self._next_look is None:  # What waits goes on before anything begins.
                self._look.wait()
            if self._look.is_over:
                self._take(self._look)
        return self._known

    def send(self, number: int) -> Transfer[int]:
        """Begin to send the file of a trial to the store elsewhere; once that is over, `note_sent`."""
        assert self._store is not None
        file, store = self._here.place(number), self._store
        return Transfer(store.shown, lambda on_progress: store.put(number, file, on_progress))

    def note_sent(self, number: int, transfer: Transfer[int]) -> None:
        """Take note of what has become of a `send`; raise `CheckpointError` where the trial is not in the store."""
        self._here.remove(number)
        self._is_outdated = True
        self._known = self._known.beside(number, transfer.result())

    def bring(self, number: int) -> Transfer[None]:
        """Begin to bring the file of a trial here, in the place of what lies here of it."""
        assert self._store is not None
        file, store = self._here.place(number), self._store
        return Transfer(store.shown, lambda on_progress: store.get(number, file, on_progress))

    def leave_there(self, number: int) -> None:
        """Delete what a `bring` has put here, or begun to, of a trial that goes on waiting in the store elsewhere."""
        assert self._store is not None
        self._here.remove(number)

    def present(self) -> frozenset[int]:
        """Return the trials of which anything is left, here or elsewhere."""
        return frozenset({*self.held().sizes, *self._here.look().sizes})

    def forget(self, number: int) -> None:
        """Delete what is kept of a trial; in a store elsewhere in the background."""
        self._here.remove(number)
        if self._store is not None and number in self._known.sizes:
            self._known, self._is_outdated = self._known.without({number}), True
            self._deletions[number] = Transfer(
                self._store.shown, ignoring_progress(partial(self._store.remove, number))
            )

    def finish(self) -> None:
        """Wait a while for what is being deleted."""
        until = time.monotonic() + LAST_SECONDS
        for deletion in self._deletions.values():
            deletion.wait(until - time.monotonic())

    def close(self) -> None:
        """Delete the folder, where nothing waits in it any more."""
        self._here.close()

    def clear(self) -> None:
        """Delete what is kept of every trial; raise `CheckpointError` where the store elsewhere does not."""
        self._here.clear()
        if self._store is not None:
            self._store.clear()

    def _refuse(self, error: OSError | CheckpointError) -> None:
        """Say why there can be none."""
        if isinstance(error, CheckpointError):
            self.why_not = self.refusal = str(error)
        else:
            self.why_not = error.strerror or str(error)
            self.refusal = f"{self.folder} cannot be used: {self.why_not}"

    def _take(self, look: Transfer[Held]) -> None:
        """Take in what a store holds; what was sent or deleted since it was asked is known better."""
        self._look, self._next_look = None, time.monotonic() + LOOK_SECONDS
        if self._is_outdated:
            self._next_look = time.monotonic()
            return
        try:
            self._known, self.away = look.result().without(self._deletions), ""
        except CheckpointError as error:
            self._known, self.away = Held(), str(error)

    def _note_deletions(self) -> None:
        """Forget the deletions that are over; what is seen from now on holds without them."""
        for number in [number for number, deletion in self._deletions.items() if deletion.is_over]:
            del self._deletions[number]
            self._is_outdated = True
