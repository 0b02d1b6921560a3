"""Checkpoints of paused trials, in a local folder or in a remote store with a local staging folder.

The remote store is any URL that fsspec opens. A remote object is a JSON header of `HEADER_BYTES` and a trial's file.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import unquote, urlsplit

from bssearch.errors import BSSearchError, CheckpointError, UsageError, require, with_hint
from bssearch.files import make_guarded_folder, new_guarded_file
from bssearch.records import COULD_NOT_PAUSE, Phase, StudyRecord, TrialOutcome, TrialPlan, TrialRecord, TrialState
from bssearch.search.history import INTERRUPTED
from bssearch.search.leases import Leases, is_alive
from bssearch.settings import CHECKPOINT_DIR_VARIABLE, checkpoint_folder, checkpoint_url
from bssearch.spec import StudySpec
from bssearch.storage.connection.engine import masked
from bssearch.storage.repository import Store

HEADER_BYTES = 512  # more than the JSON of two digests and two numbers

CHUNK_BYTES = 4 * 2**20  # at 1 MB/s, a chunk takes a few seconds

PATIENCE_SECONDS = 60.0  # longest time without progress, because the store's library retries failed requests

TICK_SECONDS = 0.2  # longest delay before an unwanted transfer ends

_KIND = "checkpoint of bssearch, 1"
_NAME = re.compile(r"trial-(\d+)\.pt(\..*)?")

OnProgress = Callable[[], None]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Held:
    """The trials with a complete checkpoint. ``sizes`` has the bytes of each trial's complete and incomplete files."""

    saved: frozenset[int] = frozenset()
    sizes: Mapping[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    def without(self, numbers: Collection[int]) -> Held:
        left = {number: size for number, size in self.sizes.items() if number not in numbers}
        return Held(self.saved.difference(numbers), left)

    def beside(self, number: int, size: int) -> Held:
        return Held(self.saved | {number}, {**self.sizes, number: size})


def _held_of(files: Iterable[tuple[str, int]]) -> Held:
    # The saved trials among files (name, bytes)
    saved, sizes = set[int](), Counter[int]()
    for name, size in files:
        if match := _NAME.fullmatch(name):
            sizes[int(match[1])] += size
            if match[2] is None:
                saved.add(int(match[1]))
    return Held(frozenset(saved), sizes)


class SilentStoreError(CheckpointError):
    """The store made no progress for `PATIENCE_SECONDS`."""


class CheckpointStore:
    """A study's checkpoints, in the folder ``mark`` below a URL.

    Methods block, and raise `CheckpointError` if the store fails or makes no progress.
    """

    def __init__(self, url: str, mark: str) -> None:
        check_store_url(url)
        self._url, self._mark = url, mark
        self._shown = masked(url)

    def look(self) -> Held:
        def listed(_: OnProgress) -> Held:
            files, folder = self._opened
            files.invalidate_cache(folder)
            try:
                entries = files.ls(folder, detail=True)
            except FileNotFoundError:
                return Held()
            return _held_of((entry["name"].rstrip("/").rpartition("/")[2], entry["size"] or 0) for entry in entries)

        return self._ask("listing failed", listed)

    def try_out(self) -> None:

        def write(_: OnProgress) -> None:
            files, path = self._opened[0], self._path("written")
            self._make_folder()
            files.pipe_file(path, bytes(2**10))
            files.rm_file(path)

        self._ask("writing failed", write)

    def put(self, number: int, file: Path) -> int:
        """Store or replace a trial's file, and return the object's size in bytes."""

        def write(on_progress: OnProgress) -> int:
            try:
                return self._put(number, file, on_progress)
            except BaseException:
                with suppress(Exception):
                    self._remove(f"trial-{number}.pt.part")
                raise

        return self._ask(f"storing trial {number} failed", write)

    def _put(self, number: int, file: Path, on_progress: OnProgress) -> int:
        files, place = self._opened[0], self._path(f"trial-{number}.pt")
        self._make_folder()
        self._remove(f"trial-{number}.pt", f"trial-{number}.pt.part")
        with file.open("rb") as content:
            digest = _digest(content, on_progress)  # also moves the position to the end, which gives the size
            fields = {
                "kind": _KIND,
                "study": self._mark,
                "trial": number,
                "bytes": content.tell(),
                "sha256": digest,
            }
            header = json.dumps(fields).encode().ljust(HEADER_BYTES - 1) + b"\n"
            content.seek(0)
            with files.open(f"{place}.part", "wb") as target:
                target.write(header)
                while chunk := content.read(CHUNK_BYTES):
                    target.write(chunk)
                    on_progress()
            written = HEADER_BYTES + content.tell()
        on_progress()
        files.mv(f"{place}.part", place)
        return written

    def get(self, number: int, file: Path, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Download a trial's file while ``is_wanted()`` is true. Reject damaged files and other trials' files."""

        def read(on_progress: OnProgress) -> None:
            # a unique name, because an abandoned download may still write to an earlier name
            part = file.with_name(f"{file.name}.{uuid.uuid4().hex[:8]}.part")
            try:
                self._get(number, part, on_progress)
                on_progress()
                part.replace(file)
            finally:
                part.unlink(missing_ok=True)

        self._ask(f"downloading trial {number} failed", read, is_wanted)

    def _get(self, number: int, part: Path, on_progress: OnProgress) -> None:
        with self._opened[0].open(self._path(f"trial-{number}.pt"), "rb") as source:
            header = self._checked(number, source.read(HEADER_BYTES))
            with new_guarded_file(part) as target:
                while chunk := source.read(CHUNK_BYTES):
                    target.write(chunk)
                    on_progress()
                size = target.tell()
                target.seek(0)
                digest = _digest(target, on_progress)
        require(size == header["bytes"], f"the file has {size} of {header['bytes']} bytes", error=_UnfitError)
        message = "the file is damaged: the file's SHA-256 differs from the stored SHA-256"
        require(digest == header["sha256"], message, error=_UnfitError)

    def remove(self, number: int) -> None:
        names = f"trial-{number}.pt", f"trial-{number}.pt.part"
        self._ask(f"deleting trial {number} failed", lambda _: self._remove(*names))

    def clear(self) -> None:
        for number in self.look().sizes:
            self.remove(number)

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        files, root = url_to_fs(self._url)
        return files, posixpath.join(root, self._mark)

    def _path(self, name: str) -> str:
        return posixpath.join(self._opened[1], name)

    def _make_folder(self) -> None:
        # makes the study's folder, but never the URL's folder, because a mount may be missing
        files, folder = self._opened
        with suppress(FileExistsError):
            files.mkdir(folder, create_parents=False)

    def _remove(self, *names: str) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._opened[0].rm_file(self._path(name))

    def _checked(self, number: int, header: bytes) -> dict[str, Any]:
        try:
            found = json.loads(header)
            kind, study, trial = found["kind"], found["study"], found["trial"]
        except (ValueError, KeyError, TypeError):
            raise _UnfitError("the file is not a checkpoint of bssearch") from None
        require(kind == _KIND, f"the file is a {kind}; expected a {_KIND}", error=_UnfitError)
        require(study == self._mark, f"the file belongs to study {study}; expected {self._mark}", error=_UnfitError)
        require(trial == number, f"the file belongs to trial {trial}; expected {number}", error=_UnfitError)
        return dict(found)

    def _ask(
        self, failure: str, work: Callable[[OnProgress], Result], is_wanted: Callable[[], bool] = lambda: True
    ) -> Result:
        try:
            return _patiently(work, is_wanted)
        except Exception as error:
            text = self._described(error)
            kind: type[CheckpointError] = SilentStoreError if isinstance(error, _SilentError) else CheckpointError
        raise kind(
            f"the checkpoint store {self._shown}: {failure}: {text}",
            hint=f"check {CHECKPOINT_DIR_VARIABLE}, the network and your permissions",
        )

    def _described(self, error: Exception) -> str:
        text = str(error) if isinstance(error, _UnfitError) else f"{type(error).__name__}: {error}"
        if isinstance(error, FileNotFoundError):
            text = f"file not found: {error.filename or error}"
        elif isinstance(error, OSError) and error.strerror:
            text = error.strerror
        text = next(iter(text.strip().splitlines()), "").rstrip(": ").replace(self._url, self._shown)
        for secret in _secrets(self._url):
            text = text.replace(secret, "***")
        return text


class _UnfitError(BSSearchError):
    pass


class _SilentError(_UnfitError):
    pass


def _patiently(work: Callable[[OnProgress], Result], is_wanted: Callable[[], bool]) -> Result:
    # Run `work` in a thread, because a blocked library call does not return; abandoned work ends at the next progress.
    result: Future[Result] = Future()
    heard, is_given_up = time.monotonic(), False

    def on_progress() -> None:
        nonlocal heard
        heard = time.monotonic()
        require(not is_given_up, "abandoned", error=_UnfitError)

    def run() -> None:
        try:
            result.set_result(work(on_progress))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="bssearch checkpoint", daemon=True).start()
    try:
        while not wait([result], TICK_SECONDS).done:
            is_silent = time.monotonic() - heard > PATIENCE_SECONDS
            require(not is_silent, f"no progress for {PATIENCE_SECONDS:g} s", error=_SilentError)
            require(is_wanted(), "no longer wanted", error=_UnfitError)
    finally:
        is_given_up = True
    return result.result()


def check_store_url(url: str) -> None:
    """Raise `UsageError` for an invalid store URL or a missing package."""
    named = f"{CHECKPOINT_DIR_VARIABLE} = {masked(url)!r}"
    scheme, _, rest = url.partition("://")
    require(
        "::" not in url and rest.strip("/") and re.fullmatch(r"[A-Za-z][\w+.-]*", scheme),
        f"{named} is not a folder or URL",
        hint="give a folder, or a URL such as s3://BUCKET/FOLDER",
    )
    import fsspec

    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise UsageError(f"{named} needs a package that is not installed: {error}") from None
    except ValueError:
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise UsageError(f"{named}: unknown protocol {scheme}://; choose from {known}") from None


def _digest(file: IO[bytes], on_progress: OnProgress) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
        on_progress()
    return digest.hexdigest()


def _secrets(url: str) -> list[str]:
    try:
        password = urlsplit(url).password
    except ValueError:
        return []
    return [password, unquote(password)] if password else []


LOOK_SECONDS = 5.0  # interval between listings of a remote store

SILENT_SECONDS = 600.0  # interval between listings of a silent store, because a listing takes `PATIENCE_SECONDS`


def check_checkpoint_place() -> None:
    if (url := checkpoint_url()) is not None:
        check_store_url(url)


class Checkpoints:
    """A study's checkpoints, independent of the study's name and the database's address.

    Workers write to the guarded ``folder`` (`bssearch.files`). With a remote store, the driver uploads the file
    (`send`) before a trial counts as paused. The driver downloads the file (`bring`) before the trial resumes.
    """

    def __init__(self, study: StudyRecord) -> None:
        self.folder = checkpoint_folder() / study.mark
        url = checkpoint_url()
        self._store = None if url is None else CheckpointStore(url, study.mark)
        self._is_writable = True
        self.refusal = self.away = ""
        self._known = Held()
        self._next_look = 0.0

    def file_for(self, number: int) -> Path | None:
        """Return the path of a trial's checkpoint, or None if the folder is unusable."""
        if self._is_writable:
            try:
                make_guarded_folder(self.folder)
            except OSError as error:
                self._is_writable = False
                self._refuse(error)
        return self._place(number) if self._is_writable else None

    def is_writable(self) -> bool:
        """True if the folder and the remote store are writable. If False, `refusal` gives the reason."""
        try:
            make_guarded_folder(self.folder)
            with tempfile.NamedTemporaryFile(dir=self.folder) as file:
                file.write(bytes(2**20))
            if self._store is not None:
                with self._noting_silence():
                    self._store.try_out()
        except (OSError, CheckpointError) as error:
            self._refuse(error)
            return False
        return True

    def has(self, number: int) -> bool:
        return number in self.held().saved

    def held(self) -> Held:
        """Return the saved trials.

        A remote store's list is up to `LOOK_SECONDS` old, and empty if the store fails.
        """
        if self._store is None:
            return self._files_here()
        if time.monotonic() >= self._next_look:
            try:
                with self._noting_silence():
                    self._known, self.away = self._store.look(), ""
                self._next_look = time.monotonic() + LOOK_SECONDS
            except CheckpointError as error:
                self._note_away(error)
        return self._known

    def send(self, number: int) -> None:
        """Move a trial's file to the remote store, if any. A `CheckpointError` also deletes the file."""
        if self._store is None:
            return
        try:
            with self._noting_silence():
                self._known = self._known.beside(number, self._store.put(number, self._place(number)))
        finally:
            self._remove_here(number)

    def bring(self, number: int, is_wanted: Callable[[], bool]) -> None:
        if self._store is not None:
            with self._noting_silence():
                self._store.get(number, self._place(number), is_wanted)

    def present(self) -> frozenset[int]:
        return frozenset({*self.held().sizes, *self._files_here().sizes})

    def forget(self, number: int) -> None:
        """Delete a trial's files, without an error if the remote store fails."""
        self._remove_here(number)
        if self._store is not None and number in self._known.sizes:
            self._known = self._known.without({number})
            with suppress(CheckpointError), self._noting_silence():
                self._store.remove(number)

    def close(self) -> None:
        with suppress(OSError):
            self.folder.rmdir()

    def clear(self) -> None:
        """Delete all files. Raises `CheckpointError` if the remote store fails."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._store is not None:
            self._store.clear()

    def _place(self, number: int) -> Path:
        return self.folder / f"trial-{number}.pt"

    def _files_here(self) -> Held:
        found = []
        for file in self._glob("trial-*"):
            with suppress(OSError):
                found.append((file.name, file.stat().st_size))
        return _held_of(found)

    def _remove_here(self, number: int) -> None:
        for file in self._glob(f"{self._place(number).name}*"):
            with suppress(OSError):
                file.unlink(missing_ok=True)

    def _glob(self, pattern: str) -> list[Path]:
        with suppress(OSError):
            return [*self.folder.glob(pattern)]
        return []

    def _refuse(self, error: OSError | CheckpointError) -> None:
        if isinstance(error, OSError):
            self.refusal = f"{self.folder} is unusable: {error.strerror or error}"
        else:
            self.refusal = with_hint(error)

    @contextmanager
    def _noting_silence(self) -> Iterator[None]:
        try:
            yield
        except SilentStoreError as error:
            self._note_away(error)
            raise

    def _note_away(self, error: CheckpointError) -> None:
        pause = SILENT_SECONDS if isinstance(error, SilentStoreError) else LOOK_SECONDS
        self._known, self.away, self._next_look = Held(), with_hint(error), time.monotonic() + pause


class WaitingTrials(Checkpoints):
    """A study's paused trials, which any driver with the checkpoint may resume.

    A driver with paused trials holds a claim as a sign of life.
    """

    def __init__(self, spec: StudySpec, store: Store, leases: Leases, note: Callable[[str], None]) -> None:
        super().__init__(store.studies.get(spec.name))
        self._spec, self._study_store, self._leases, self._note = spec, store, leases, note
        self._noted = ""

    @property
    def are_saved(self) -> bool:
        return self._spec.pruner.checkpoint_gib > 0

    def found(self) -> tuple[frozenset[int], int]:
        """The trials with a checkpoint that this driver can read, and the bytes of all files."""
        held = self.held()
        if self.away and self.away != self._noted:
            self._noted = self.away
            self._note(f"paused trials cannot resume for now: {self.away}")
        return held.saved, held.bytes

    def saves(self, plan: TrialPlan) -> bool:
        return plan.phase is Phase.SEARCH and self.are_saved

    def stored(self, number: int, outcome: TrialOutcome) -> TrialOutcome:
        """Store a paused trial's checkpoint and return the outcome, which is PRUNED if the store fails."""
        if outcome.state is TrialState.PAUSED:
            try:
                self.send(number)
            except CheckpointError as error:
                reason = f"{outcome.reason}; {COULD_NOT_PAUSE}: {with_hint(error)}"
                return replace(outcome, state=TrialState.PRUNED, reason=reason)
        return outcome

    def bring_back(self, resumed: TrialRecord, is_wanted: Callable[[], bool]) -> TrialOutcome | None:
        """Fetch a checkpoint and return None. On failure, return FAILED, or PAUSED if the trial is no longer wanted."""
        try:
            self.bring(resumed.number, is_wanted)
        except CheckpointError as error:
            if is_wanted() or resumed.outcome is None:
                return TrialOutcome(state=TrialState.FAILED, reason=with_hint(error))
            return replace(resumed.outcome, reason=INTERRUPTED)
        return None

    def ended(self, trial: TrialRecord) -> None:
        """Delete an ended trial's checkpoint. If the trial is paused, take this driver's claim instead."""
        if trial.state is TrialState.PAUSED:
            # takes the claim each time, because other drivers release claims without a lease
            self._leases.take(_claim_of(self._leases.owner))
        else:
            self.forget(trial.number)

    def forget_ended(self, trials: Sequence[TrialRecord], running: Collection[int]) -> None:
        over = {one.number for one in trials if one.state.is_finished and one.state is not TrialState.PAUSED}
        for number in over & self.present() - {*running}:
            self.forget(number)

    def settle(self, trials: Sequence[TrialRecord], state: TrialState, *, for_disk: bool) -> None:
        if not for_disk:
            self._leases.look()
        ours = [trial.number for trial in trials if for_disk or self._is_ours(trial)]
        gone = [str(number) for number in ours if not self.has(number)]
        if gone:
            self._note(f"ending paused trials whose checkpoints this driver cannot read: {', '.join(gone)}")
        for number in self._study_store.trials.settle_paused(self._spec.name, ours, state):
            self.forget(number)
        self.close()

    def leave(self) -> None:
        # Without the claim, other drivers may end this driver's paused trials.
        self._leases.give_back(_claim_of(self._leases.owner))

    def _is_ours(self, trial: TrialRecord) -> bool:
        # True if this driver or a dead driver paused the trial; a living process without a lease serves other studies
        owner = trial.lease_owner
        if owner is None or owner == self._leases.owner:
            return True
        alive = is_alive(owner) is not False
        if alive:
            alive = self._leases.has_lease(owner) or not self.has(trial.number)
        if not alive:
            self._study_store.leases.release(self._spec.name, _claim_of(owner), owner=owner)
        return not alive


def _claim_of(owner: str) -> str:
    return f"waiting trials {owner.rpartition('/')[2]}"
