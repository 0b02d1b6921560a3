"""Who runs a trial: the driver process named in a trial's lease."""

from __future__ import annotations

import os
import socket
import uuid

import psutil


def this_driver() -> str:
    """Return a name for a driver of this process: host, process, its start time and a mark of its own."""
    started = psutil.Process().create_time()
    return f"{socket.gethostname()}/{os.getpid()}/{started:.2f}/{uuid.uuid4().hex[:8]}"


def is_alive(owner: str) -> bool | None:
    """Return whether the driver named in a lease still runs; None for one of another host."""
    host, pid, started, _ = owner.rsplit("/", 3)
    if host != socket.gethostname():
        return None
    try:
        process = psutil.Process(int(pid))
        return abs(process.create_time() - float(started)) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
