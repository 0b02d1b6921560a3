"""Storage of paused trials, as one driver sees them: a local folder, or a remote store with a local staging folder."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from bssearch.errors import CheckpointError
from bssearch.files import make_guarded_folder
from bssearch.records import COULD_NOT_PAUSE, Phase, StudyRecord, TrialOutcome, TrialPlan, TrialRecord, TrialState
from bssearch.search.history import INTERRUPTED
from bssearch.search.leases import Leases, is_alive
from bssearch.search.pruners.checkpoint_store import CheckpointStore, Held, SilentStoreError, check_store_url, held_of
from bssearch.settings import checkpoint_folder, checkpoint_url
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store

LOOK_SECONDS = 5.0
"""Seconds for which a store's listing is cached."""

SILENT_SECONDS = 600.0
"""Seconds to skip a silent store; each request takes a minute."""


def check_checkpoint_place() -> None:
    """Raise `UsageError` if ``BSSEARCH_CHECKPOINT_DIR`` is an invalid URL or its package is missing."""
    url = checkpoint_url()
    if url is not None:
        check_store_url(url)


class CheckpointFolder:
    """The files of one study, readable by this user or group only (`bssearch.files.make_guarded_folder`)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def try_out(self) -> None:
        """Write and delete a file; raise `OSError` on failure."""
        make_guarded_folder(self.path)
        with tempfile.NamedTemporaryFile(dir=self.path) as file:
            file.write(bytes(2**20))

    def place(self, number: int) -> Path:
        """Return the path of a trial's file."""
        return self.path / f"trial-{number}.pt"

    def look(self) -> Held:
        """Return the trials in the folder, skipping concurrently deleted files."""
        found = []
        for file in self._files("trial-*"):
            with suppress(OSError):
                found.append((file.name, file.stat().st_size))
        return held_of(found)

    def remove(self, number: int) -> None:
        """Delete a trial's files, incomplete ones included."""
        for file in self._files(f"{self.place(number).name}*"):
            with suppress(OSError):
                file.unlink(missing_ok=True)

    def _files(self, pattern: str) -> list[Path]:
        with suppress(OSError):
            return [*self.path.glob(pattern)]
        return []

    def close(self) -> None:
        """Delete the folder if it is empty."""
        with suppress(OSError):
            self.path.rmdir()

    def clear(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


class Checkpoints:
    """Checkpoints of a study, independent of study name and database address.

    Workers write to ``folder``, which is private because its files decide how trials resume. With a remote store, the
    driver uploads (`send`) before a trial counts as paused and downloads (`bring`) before it resumes. ``refusal``: why
    checkpoints are impossible; ``away``: why the store cannot be listed. Raises `UsageError` for an invalid store URL.
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
        """Return the local folder."""
        return self._here.path

    def file_for(self, number: int) -> Path | None:
        """Return the file to save a trial to; None if the folder is unusable."""
        if self._is_writable:
            try:
                make_guarded_folder(self.folder)
            except OSError as error:
                self._is_writable = False
                self._refuse(error)
        return self._here.place(number) if self._is_writable else None

    def is_writable(self) -> bool:
        """Test by writing a file, in a remote store too."""
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
        """Return whether a trial is saved."""
        return number in self.held().saved

    def held(self) -> Held:
        """Return the saved trials; a remote list may be seconds old, and is empty while unreachable."""
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
        """Return the trials with any file left, local or remote."""
        return frozenset({*self.held().sizes, *self._here.look().sizes})

    def forget(self, number: int) -> None:
        """Delete a trial's files; remote failures are ignored."""
        self._here.remove(number)
        if self._store is not None and number in self._known.sizes:
            self._known = self._known.without({number})
            with suppress(CheckpointError), self._noting_silence():
                self._store.remove(number)

    def close(self) -> None:
        """Delete the folder if it is empty."""
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


class WaitingTrials(Checkpoints):
    """Paused trials and checkpoints of a study; any driver with the checkpoint may resume a trial.

    While its trials are paused, this driver holds a claim that shows that it is alive.
    """

    def __init__(self, spec: StudySpec, store: Store, leases: Leases, note: Callable[[str], None]) -> None:
        super().__init__(store.study(spec.name))
        self._spec, self._study_store, self._leases, self._note = spec, store, leases, note
        self._told = ""
        self._has_claim = False

    @property
    def are_saved(self) -> bool:
        """Return whether trials are checkpointed."""
        return self._spec.pruner.checkpoint_gib > 0

    def found(self) -> tuple[frozenset[int], int]:
        """Return the accessible checkpoints and their bytes; report an unreachable store."""
        held = self.held()
        if self.away and self.away != self._told:
            self._told = self.away
            self._note(f"what waits cannot go on for now: {self.away}")
        return held.saved, held.bytes

    def saves(self, plan: TrialPlan) -> bool:
        """Return whether to checkpoint a planned trial."""
        return plan.phase is Phase.SEARCH and self.are_saved

    def stored(self, number: int, outcome: TrialOutcome) -> TrialOutcome:
        """Store a paused trial's checkpoint; return its outcome, pruned on failure."""
        if outcome.state is TrialState.PAUSED:
            try:
                self.send(number)
            except CheckpointError as error:
                reason = f"{outcome.reason}; {COULD_NOT_PAUSE}: {error}"
                return replace(outcome, state=TrialState.PRUNED, reason=reason)
        return outcome

    def bring_back(self, resumed: TrialRecord, is_wanted: Callable[[], bool]) -> TrialOutcome | None:
        """Fetch a checkpoint; return the trial's outcome on failure. An unwanted trial stays paused."""
        try:
            self.bring(resumed.number, is_wanted)
        except CheckpointError as error:
            if is_wanted() or resumed.outcome is None:
                return TrialOutcome(state=TrialState.FAILED, reason=str(error))
            return replace(resumed.outcome, reason=INTERRUPTED)
        return None

    def ended(self, trial: TrialRecord) -> None:
        """Delete the checkpoint of a trial that ended here, unless paused."""
        if trial.state is TrialState.PAUSED:
            if not self._has_claim:
                self._has_claim = self._leases.take(_claim_of(self._leases.owner))
        else:
            self.forget(trial.number)

    def forget_ended(self, trials: Sequence[TrialRecord], running: Collection[int]) -> None:
        """Delete checkpoints of trials that ended for good, except those running here."""
        over = {one.number for one in trials if one.state.is_finished and one.state is not TrialState.PAUSED}
        for number in over & self.present() - {*running}:
            self.forget(number)

    def settle(self, trials: Sequence[TrialRecord], state: TrialState, *, for_disk: bool) -> None:
        """End paused trials of this driver or of dead drivers; all if ``for_disk``."""
        if not for_disk:
            self._leases.look()
        ours = [trial.number for trial in trials if for_disk or self._is_ours(trial)]
        gone = [str(number) for number in ours if not self.has(number)]
        if gone:
            self._note(f"what was saved of them is gone, so they do not go on: trial {', '.join(gone)}")
        for number in self._study_store.settle_paused(self._spec.name, ours, state):
            self.forget(number)
        self.close()

    def leave(self) -> None:
        """Release the paused trials to other drivers."""
        self._leases.give_back(_claim_of(self._leases.owner))

    def _is_ours(self, trial: TrialRecord) -> bool:
        """True if this or a dead driver paused it; claims decide, as a live process may serve other studies."""
        owner = trial.lease_owner
        if owner is None or owner == self._leases.owner:
            return True
        alive = is_alive(owner) is not False
        if alive:
            alive = self._leases.has_lease(owner) or not self.has(trial.number)
        if not alive:
            self._study_store.release(self._spec.name, _claim_of(owner), owner=owner)
        return not alive


def _claim_of(owner: str) -> str:
    return f"waiting trials {owner.rpartition('/')[2]}"
