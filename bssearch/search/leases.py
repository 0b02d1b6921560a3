"""Who runs a trial or holds a claim: the process that a lease names, its heartbeat, and whether it is still there."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from pathlib import Path

import psutil

from bssearch.errors import BSSearchError, DatabaseError
from bssearch.storage.repository import Store

LEASE_SECONDS = 60.0
HEARTBEAT_SECONDS = 15.0

LONGEST_LOOK = 2 * HEARTBEAT_SECONDS
"""Seconds between two looks count as this at most: in longer ones the database was away, and could renew nothing."""

GONE_AFTER = 2 * LEASE_SECONDS
"""A driver whose lease was seen unrenewed for so many seconds is gone, whatever its process does."""

PROC = Path("/proc")


_living: set[str] = set()


@contextmanager
def living(owner: str) -> Iterator[None]:
    """Have a driver of this process count as alive inside: its process may live on without it."""
    _living.add(owner)
    try:
        yield
    finally:
        _living.discard(owner)


def this_driver() -> str:
    """Return a name for a driver of this process: host, process, where that number holds, its start, its own mark."""
    pid = os.getpid()
    return "/".join([socket.gethostname(), str(pid), _place(), _start(pid), uuid.uuid4().hex[:8]])


def is_alive(owner: str) -> bool | None:
    """Return whether the driver named in a lease still runs; one of this process does while it is `living`.

    None where that cannot be known, and its lease decides: a driver of another machine or container, whatever its host
    is called, one that is hidden from this user, and one that is stopped (Ctrl-Z) and may come back.
    """
    parts = owner.rsplit("/", 4)
    if len(parts) < 5 or parts[0] != socket.gethostname() or parts[2] != _place():
        return None
    try:
        process = psutil.Process(int(parts[1]))
        if _start(process.pid) != parts[3] or process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.pid == os.getpid():
            return owner in _living
        return None if process.status() == psutil.STATUS_STOPPED else True
    except (PermissionError, psutil.AccessDenied):
        return None
    except psutil.Error:
        return False


@cache
def _place() -> str:
    """Return a mark of where process numbers are this machine's: its boot, and the namespace of a container."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (PROC / "self/ns/pid").readlink()
    except OSError:  # no Linux
        boot, namespace = str(uuid.getnode()), Path()
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]


def _start(pid: int) -> str:
    """Return when a process started, on a clock that nobody sets; raise `psutil.NoSuchProcess` where there is none."""
    try:
        # The 22nd field of proc(5)'s stat, in ticks since boot; the second, in brackets, may hold anything.
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return f"{psutil.Process(pid).create_time():.0f}"
    except ProcessLookupError:
        raise psutil.NoSuchProcess(pid) from None


@contextmanager
def heartbeat(beat: Callable[[], object]) -> Iterator[None]:
    """Call ``beat`` every `HEARTBEAT_SECONDS` inside, from a thread of its own, whatever the main loop waits for.

    A beat that fails is left out: the main loop meets the same database and says what is wrong with it, and a lease
    outlasts three beats.
    """
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(HEARTBEAT_SECONDS):
            with suppress(BSSearchError):
                beat()

    thread = threading.Thread(target=run, name="bssearch heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(timeout=HEARTBEAT_SECONDS)


@dataclass(slots=True)
class _Seen:
    """The end of an owner's lease as it was last seen, and for how many seconds it has been the same."""

    expires_at: datetime
    unrenewed_seconds: float = 0.0


class Leases:
    """The leases of a study: those that a driver, the ``owner``, holds, and those of others as seen from here.

    A driver holds a claim while it does what only one driver may do at a time; others take over claims of dead drivers.
    A lease is a moment of the database's clock, which may jump. So the lease of another driver counts as ended only
    after this driver has seen it unrenewed, in one `look` after the other, for as long as a lease lasts.
    """

    def __init__(
        self, store: Store, study: str, owner: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._study, self._clock = store, study, clock
        self.owner = owner or this_driver()
        self._held: set[str] = set()
        self._seen: dict[str, _Seen] = {}
        self._looked_at = clock()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Count as alive inside, and renew the leases."""
        renew = partial(self._store.heartbeat, self._study, self.owner, LEASE_SECONDS)
        with living(self.owner), heartbeat(renew):
            yield

    def mark_lost(self) -> list[int]:
        """Mark the trials of dead drivers as lost; return their numbers."""
        self.look()
        return self._store.mark_lost(self._study, is_alive=self.is_alive)

    def look(self) -> None:
        """See which leases have been renewed since the last look."""
        leases, now = self._store.leases(self._study), self._clock()
        passed, self._looked_at = min(LONGEST_LOOK, now - self._looked_at), now
        for owner in {*self._seen} - {*leases}:
            del self._seen[owner]
        for owner, expires_at in leases.items():
            seen = self._seen.get(owner)
            if seen is None or seen.expires_at != expires_at:
                self._seen[owner] = _Seen(expires_at)
            else:
                seen.unrenewed_seconds += passed

    def is_alive(self, owner: str) -> bool | None:
        """Return whether a driver is there; None where its lease decides, which has been watched for long enough."""
        alive, seen = is_alive(owner), self._seen.get(owner)
        unrenewed = 0.0 if seen is None else seen.unrenewed_seconds
        if alive is False or unrenewed >= GONE_AFTER:
            return False
        return None if alive is None and unrenewed >= LEASE_SECONDS else True

    def has_lease(self, owner: str) -> bool:
        """Return whether a driver holds a lease, which it has renewed for as long as that was watched here."""
        seen = self._seen.get(owner)
        return seen is not None and seen.unrenewed_seconds < LEASE_SECONDS

    def take(self, name: str) -> bool:
        """Return whether this driver has the claim now."""
        self.look()
        found = self._store.claim(
            self._study, name, owner=self.owner, lease_seconds=LEASE_SECONDS, is_alive=self.is_alive
        )
        if found:
            self._held.add(name)
        return found

    def give_back(self, name: str) -> None:
        """Give a claim back, if this driver has it."""
        if name in self._held:
            self._held.discard(name)
            self._store.release(self._study, name, owner=self.owner)

    @contextmanager
    def held(self, name: str, wait: Callable[[], None]) -> Iterator[None]:
        """Hold a claim inside; call ``wait`` as long as another driver has it."""
        while not self.take(name):
            wait()
        try:
            yield
        except BaseException:
            with suppress(DatabaseError):
                self.give_back(name)
            raise
        self.give_back(name)
