"""CPU seconds of running processes, and values in files of ``/proc``."""

import os
import re
import resource
import time
from contextlib import suppress
from pathlib import Path

MPS_SERVER = "nvidia-cuda-mps-server"  # computes for client processes, which NVML also lists

_SCHEDULED_TIME = 2  # the clock of a process: ~pid << 3 | CPUCLOCK_SCHED, as clock_getcpuclockid(3) returns it


def found_in(file: Path, pattern: str) -> str | None:
    try:
        found = re.search(pattern, file.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else found[1]


def process_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, or 0 if the process ended or is in another container."""
    with suppress(OSError):
        return time.clock_gettime(~pid << 3 | _SCHEDULED_TIME) if pid else 0.0
    return 0.0


def descendants_seconds(pid: int) -> float:
    """Return the CPU seconds of a process's descendants. For this process, children that ended count, too."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN) if pid == os.getpid() else None
    seconds = 0.0 if ended is None else ended.ru_utime + ended.ru_stime
    return seconds + sum(process_seconds(child) + descendants_seconds(child) for child in children_of(pid))


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread may have ended
            found += map(int, children.read_text().split())
    return found
