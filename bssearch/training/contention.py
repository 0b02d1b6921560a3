"""Detects other work on the machine.

One sign is CPU seconds in ``/proc/stat`` that this process did not use. On a GPU, further signs are other processes,
slowdowns and growth of used memory. On a CPU, a slow core is a further sign.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bssearch.settings import BOARD_PROCESS
from bssearch.training.nvml import (
    POWER_CAP,
    computing_processes,
    other_drivers,
    other_processes,
    throttle_reasons,
)
from bssearch.training.process_times import children_of, descendants_seconds, found_in, process_seconds

FULL_SHARE = 0.6  # busier CPUs slow each other, because CPUs share caches, memory bandwidth, boost clock and cores

LEAST_OTHERS = 0.2  # CPUs used by other programs; smaller use is normal for an idle desktop and the kernel

GROWTH_BYTES = 2**30  # growth of GPU memory by other programs; kernels that we load add about 100 MiB

UNKNOWN = (
    "other programs may have used the device: NVML's process list is unreadable or has other process ids, as in a "
    "container"
)

_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")

_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal: proc_stat(5)


@dataclass(frozen=True, slots=True)
class Contention:
    """The result of a check for other work on the machine.

    ``unknown`` says why the check was incomplete.
    """

    contended: bool
    reason: str | None = None
    unknown: str | None = None

    @property
    def warnings(self) -> list[str]:
        return [f"contended: {self.reason}"] if self.reason is not None else [*filter(None, [self.unknown])]


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds in ``wall`` seconds: ``busy`` of all programs, ``ours`` of this process and its descendants."""

    wall: float
    busy: float
    ours: float
    parent: float
    cpus: int

    def less(self, other: CpuUse) -> CpuUse:
        return CpuUse(
            wall=self.wall - other.wall,
            busy=self.busy - other.busy,
            ours=self.ours - other.ours,
            parent=self.parent - other.parent,
            cpus=self.cpus,
        )


class ContentionMeter:
    """Compares the machine's use before and after a trial that uses up to ``threads`` CPUs."""

    def __init__(
        self,
        device: torch.device,
        threads: int,
        core: CorePace | None = None,
        read_cpu: Callable[[], CpuUse | None] | None = None,
        others: Iterable[torch.device] = (),
    ) -> None:
        self._threads = threads
        self._core = core
        self._read_cpu = read_cpu or cpu_use
        self._before: CpuUse | None = None
        self._looks: list[float] = []
        self._slow_before = self._looks_before = 0
        self._gpu = DeviceWatch(device, others) if device.type == "cuda" else None

    def count_siblings(self) -> None:
        """Count the parent's children, a trial's ranks, as this process. Call before `start`."""
        self._read_cpu = cpu_use_of_siblings

    def start(self) -> None:
        self._before = self._read_cpu()
        if self._gpu is not None:
            self._gpu.start()

    def state(self) -> dict[str, Any]:
        after = self._read_cpu()
        used = None if self._before is None or after is None else asdict(after.less(self._before))
        slow, looks = self._slow_looks()
        return {
            "used": used,
            "slow": slow,
            "looks": looks,
            "on_gpu": [] if self._gpu is None else self._gpu.reasons(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        if self._before is not None and state["used"] is not None:
            self._before = self._before.less(CpuUse(**state["used"]))
        self._slow_before, self._looks_before = state["slow"], state["looks"]
        if self._gpu is not None:
            self._gpu.add(state["on_gpu"])

    def look(self) -> None:
        if self._gpu is not None:
            self._gpu.look()
        if self._core is not None:
            self._looks.append(self._core.look())

    def stop(self) -> Contention:
        after = self._read_cpu()
        reasons = [] if self._gpu is None else self._gpu.reasons()
        if self._before is not None and after is not None:
            crowd = cpu_crowd(self._before, after, self._threads)
            drivers = ", ".join(map(str, other_drivers())) if crowd else ""
            also = f"; another bssearch driver runs trials (process {drivers})" if drivers else ""
            reasons += [] if crowd is None else [crowd + also]
        slow, looks = self._slow_looks()
        if slow >= SLOW_LOOKS and slow >= SLOW_SHARE * looks:
            reasons.append(f"the core was slow in {slow} of {looks} timings")
        unknown = UNKNOWN if self._gpu is not None and self._gpu.is_unknown and not reasons else None
        return Contention(bool(reasons), "; ".join(reasons) or None, unknown)

    def _slow_looks(self) -> tuple[int, int]:
        slow = sum(self._core is not None and look > self._core.slow_above for look in self._looks)
        return self._slow_before + slow, self._looks_before + len(self._looks)


class DeviceWatch:
    """Watches the processes and slowdowns of a GPU and of ``others``, and the GPU's memory.

    ``is_unknown`` is True if NVML's process list is unreadable or lacks this process.
    """

    def __init__(self, device: torch.device, others: Iterable[torch.device] = ()) -> None:
        self._device = device
        self._devices = [device, *others]
        self._since = time.time()
        self._memory_bytes: int | None = None
        self.is_unknown = False
        self._reasons: dict[str, None] = {}
        self._grown_bytes = 0

    def start(self) -> None:
        self._since = time.time()
        self._memory_bytes = memory_of_others(self._device)

    def add(self, reasons: Iterable[str]) -> None:
        self._reasons = dict.fromkeys(reasons) | self._reasons

    def look(self) -> None:
        since, self._since = self._since, time.time()
        for device in self._devices:
            others = other_processes(device)
            self.is_unknown |= others is None
            seen = dict.fromkeys([*(others or []), *computing_processes(device, since)])
            self._reasons |= {f"process {pid} ({name}) uses the device": None for pid, name in seen}
            slowdowns = (reason for reason in throttle_reasons(device) or [] if reason != POWER_CAP)
            self._reasons |= {f"the device slows down: {reason}": None for reason in slowdowns}
        memory = memory_of_others(self._device)
        if memory is not None and self._memory_bytes is not None:
            self._grown_bytes = max(self._grown_bytes, memory - self._memory_bytes)

    def reasons(self) -> list[str]:
        self.look()
        grown = f"memory outside PyTorch's allocator grew by {self._grown_bytes / 2**30:.3g} GiB during the trial"
        return [*self._reasons, *([grown] if self._grown_bytes >= GROWTH_BYTES else [])]


def memory_of_others(device: torch.device) -> int | None:
    """Return the GPU bytes outside this process's allocator, including driver and contexts, or None if unknown."""
    try:
        free, total = torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError):  # the device failed, or PyTorch has no CUDA
        return None
    return total - free - torch.cuda.memory_reserved(device)


def cpu_crowd(before: CpuUse, after: CpuUse, threads: int) -> str | None:
    """Describe the CPU use of other programs; return None if this use cannot slow the trial."""
    used = after.less(before)
    if used.wall <= 0:
        return None
    # Subtract one tick per CPU, so that rounding does not decide about trials of milliseconds.
    others = (used.busy - used.ours - used.parent - used.cpus * _TICK_SECONDS) / used.wall
    if others < LEAST_OTHERS or others + max(threads, used.ours / used.wall) < FULL_SHARE * used.cpus:
        return None
    return f"other processes used {others:.1f} of {after.cpus} CPUs"


def cpu_use(stat: Path = Path("/proc/stat"), parents: Iterable[int] | None = None) -> CpuUse | None:
    """Return the CPU use so far, if known.

    ``parents`` are the ids of the processes that started this process.
    """
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return None
    cpus = os.sched_getaffinity(0)
    return CpuUse(
        wall=time.perf_counter(),
        busy=_busy_ticks(lines, cpus) * _TICK_SECONDS,
        ours=time.process_time() + descendants_seconds(os.getpid()),
        parent=sum(map(_driver_seconds, [os.getppid()] if parents is None else parents)),
        cpus=len(cpus),
    )


def cpu_use_of_siblings() -> CpuUse | None:
    use = cpu_use()
    return None if use is None else replace(use, ours=descendants_seconds(os.getppid()))


def _busy_ticks(lines: Iterable[str], cpus: Iterable[int]) -> int:
    names = {f"cpu{cpu}" for cpu in cpus}
    counts = [fields[1:] for fields in map(str.split, lines) if fields[0] in names]
    return sum(int(count[field]) for count in counts for field in _BUSY_FIELDS)


def _driver_seconds(pid: int) -> float:
    # Boards that ended count until the driver reaps them; otherwise their seconds would look like another program's.
    boards = [child for child in children_of(pid) if found_in(Path(f"/proc/{child}/comm"), "(.*)") == BOARD_PROCESS]
    return process_seconds(pid) + sum(process_seconds(board) + descendants_seconds(board) for board in boards)


SLOW = 1.4  # in a measurement, a core with a busy sibling hardware thread took 1.7 times as long

# A quarter of looks at 1.4 times the seconds lengthens steps by 10%.
SLOW_SHARE = 0.25
SLOW_LOOKS = 2

REMEMBERED = 1000  # number of newest looks; the fastest look among these gives the full pace

# Spins per look, of which only the fastest counts, and rounds per spin.
SPINS = 3
_ROUNDS = 3000

# Size of the kernel's square matrices, and timed products after one product that warms the caches: about 0.1 ms.
SIDE = 128
PRODUCTS = 2

LOOK_SECONDS = 0.02  # seconds between timings of the kernel; the timings then cost a few percent


class CorePace:
    """Detects a slow CPU core by timing a fixed piece of work. Use one `CorePace` per process.

    A timing is slow above `SLOW` × the fastest of the last `REMEMBERED` timings.
    """

    def __init__(self, spin: Callable[[], float] | None = None) -> None:
        self._spin = spin or _spin_seconds
        self._looks: deque[float] = deque(maxlen=REMEMBERED)

    def look(self) -> float:
        seconds = min(self._spin() for _ in range(SPINS))
        self._looks.append(seconds)
        return seconds

    @property
    def slow_above(self) -> float:
        return SLOW * min(self._looks)


class ReferenceKernel:
    """Times fixed matrix products in CPU seconds, if one CPU thread computes the steps.

    `look` times the products at most once per ``period`` seconds.
    """

    def __init__(self, device: torch.device, threads: int, period: float = LOOK_SECONDS) -> None:
        self._is_useful = device.type == "cpu" and threads == 1
        self._period = period
        self._matrix = torch.ones(SIDE, SIDE)
        self._looks: list[float] = []
        self._next = 0.0

    @property
    def seconds(self) -> float | None:
        return statistics.median(self._looks) if self._looks else None

    def look(self) -> None:
        now = time.perf_counter()
        if not self._is_useful or now < self._next:
            return
        self._next = now + self._period
        torch.mm(self._matrix, self._matrix)
        started = time.thread_time()
        for _ in range(PRODUCTS):
            torch.mm(self._matrix, self._matrix)
        self._looks.append(time.thread_time() - started)

    def state(self) -> dict[str, Any]:
        return {"looks": list(self._looks)}

    def restore(self, state: dict[str, Any]) -> None:
        self._looks = [*state["looks"], *self._looks]


def _spin_seconds() -> float:
    total, started = 0, time.perf_counter()
    for number in range(_ROUNDS):
        total += number
    return time.perf_counter() - started
