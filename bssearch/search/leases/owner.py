"""Who runs a trial: the driver process named in a trial's lease."""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil

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
