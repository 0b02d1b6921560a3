"""Drivers' leases of trials and claims, and checks whether drivers are alive."""

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

LONGEST_LOOK = 2 * HEARTBEAT_SECONDS  # most seconds to count between two looks; in longer gaps, no database answered

GONE_AFTER = 2 * LEASE_SECONDS  # a driver without renewals is dead, even if the process exists

PROC = Path("/proc")


_living: set[str] = set()


@contextmanager
def living(owner: str) -> Iterator[None]:
    _living.add(owner)
    try:
        yield
    finally:
        _living.discard(owner)


def this_driver() -> str:
    pid = os.getpid()
    return "/".join([socket.gethostname(), str(pid), _place(), _start(pid), uuid.uuid4().hex[:8]])


def is_alive(owner: str) -> bool | None:
    """True if a driver is alive, False if dead, None if unknown.

    Returns None for drivers on other machines or in other containers, and for hidden or suspended processes.
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
    # The mark of a boot and a namespace, which make a process id unique
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (PROC / "self/ns/pid").readlink()
    except OSError:  # not Linux
        boot, namespace = str(uuid.getnode()), Path()
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]


def _start(pid: int) -> str:
    try:
        # The 22nd field of proc(5)'s stat, in ticks since boot. The second field, in brackets, may have any characters.
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return f"{psutil.Process(pid).create_time():.0f}"
    except ProcessLookupError:
        raise psutil.NoSuchProcess(pid) from None


@contextmanager
def heartbeat(beat: Callable[[], object]) -> Iterator[None]:
    """Call ``beat`` every `HEARTBEAT_SECONDS` in a background thread. A `BSSearchError` of ``beat`` has no effect."""
    # The main loop reports database errors, and a lease outlasts three beats.
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
    expires_at: datetime
    unrenewed_seconds: float = 0.0


class ClaimLostError(Exception):
    """This driver no longer holds the claim."""


class Leases:
    """The leases and claims of driver ``owner``, and the renewals of other drivers' leases.

    The database clock may jump, so another driver's lease expires only after `LEASE_SECONDS` without an observed
    renewal.
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
        renew = partial(self._store.leases.heartbeat, self._study, self.owner, LEASE_SECONDS)
        with living(self.owner), heartbeat(renew):
            yield

    def mark_lost(self) -> list[int]:
        self.look()
        return self._store.leases.mark_lost(self._study, is_alive=self.is_alive)

    def look(self) -> None:
        """Record the renewals of leases since the last call."""
        leases, now = self._store.leases.ends(self._study), self._clock()
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
        """False if dead or silent (no renewal) for `GONE_AFTER` s; None if unknown and silent for `LEASE_SECONDS`."""
        alive, seen = is_alive(owner), self._seen.get(owner)
        unrenewed = 0.0 if seen is None else seen.unrenewed_seconds
        if alive is False or unrenewed >= GONE_AFTER:
            return False
        return None if alive is None and unrenewed >= LEASE_SECONDS else True

    def has_lease(self, owner: str) -> bool:
        """True if a driver renewed its lease within `LEASE_SECONDS`."""
        seen = self._seen.get(owner)
        return seen is not None and seen.unrenewed_seconds < LEASE_SECONDS

    def take(self, name: str) -> bool:
        self.look()
        found = self._store.leases.claim(
            self._study, name, owner=self.owner, lease_seconds=LEASE_SECONDS, is_alive=self.is_alive
        )
        if found:
            self._held.add(name)
        return found

    def check(self, name: str) -> None:
        if not self._store.leases.holds(self._study, name, owner=self.owner):
            raise ClaimLostError(name)

    def give_back(self, name: str) -> None:
        if name in self._held:
            self._held.discard(name)
            self._store.leases.release(self._study, name, owner=self.owner)

    @contextmanager
    def held(self, name: str, wait: Callable[[], None]) -> Iterator[None]:
        """Call ``wait`` until the claim is free, then hold the claim in this context."""
        while not self.take(name):
            wait()
        try:
            yield
        except BaseException:
            with suppress(DatabaseError):
                self.give_back(name)
            raise
        self.give_back(name)
