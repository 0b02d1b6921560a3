"""Whether something else used the machine while a trial ran or a step was timed.

On a GPU its driver tells who computes there, at each look; where it cannot, only the memory in use does, and that is
said. On the CPU the kernel's own account tells: the busy seconds of the CPUs that this process may use (`/proc/stat`,
time stolen by a hypervisor included), less those of this process and its children, and less those of its parent, which
samples and writes to the database, and of its boards, which have the lowest priority (what they cost a core shows in
its pace). What is left others have used. Where there is no such account nothing is said.
What shares a core without being on that account shows in the core's own pace (`bssearch.training.contention`).
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
from bssearch.training.nvml import POWER_CAP, computing_processes, known_other_processes, throttle_reasons
from bssearch.training.process_times import children_of, descendants_seconds, process_seconds

FULL_SHARE = 0.6
"""The share of all CPUs in use from which work slows other work: a choice. Caches, memory and boost clock are shared,
and where a core shows as two CPUs the core itself."""

LEAST_OTHERS = 0.2
"""CPUs that others may take without a word: a choice; an idle desktop and the kernel always take some."""

GROWTH_BYTES = 2**30
"""So much more of a GPU's memory in use, beside this process's tensors, is another program's: a choice. What this
process takes beside its tensors grows, too, as it loads kernels, by some hundred MiB."""

UNKNOWN = (
    "whether other programs computed on the device is not known: the driver's list of processes is not readable, or "
    "has other numbers, as in a container"
)

_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal: proc_stat(5)


@dataclass(frozen=True, slots=True)
class Contention:
    """Whether the measurement had the machine to itself; ``reason`` says what it shared it with.

    ``unknown`` says what nobody could tell, where nothing else speaks of contention.
    """

    contended: bool
    reason: str | None = None
    unknown: str | None = None

    @property
    def warnings(self) -> list[str]:
        """Return what a trial's record warns of."""
        return [f"contended: {self.reason}"] if self.reason is not None else [*filter(None, [self.unknown])]


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Seconds since some moment in the past: ``wall``, of ``cpus`` CPUs ``busy`` in all, ``ours``, our ``parent``'s."""

    wall: float
    busy: float
    ours: float
    parent: float
    cpus: int

    def less(self, other: CpuUse) -> CpuUse:
        """Return the seconds without those of another use of the same CPUs."""
        return CpuUse(
            wall=self.wall - other.wall,
            busy=self.busy - other.busy,
            ours=self.ours - other.ours,
            parent=self.parent - other.parent,
            cpus=self.cpus,
        )


class ContentionMeter:
    """Compares the use of the machine at two moments, and looks at its pace between them.

    ``threads`` is how many CPUs the work between them can use; ``core`` has the pace of the core on which it runs,
    None where that is not what its time depends on.
    """

    def __init__(
        self,
        device: torch.device,
        threads: int,
        core: CorePace | None = None,
        read_cpu: Callable[[], CpuUse | None] | None = None,
    ) -> None:
        self._device = device
        self._threads = threads
        self._core = core
        self._read_cpu = read_cpu or cpu_use
        self._before: CpuUse | None = None
        self._looks: list[float] = []
        self._slow_before = self._looks_before = 0
        self._gpu = DeviceWatch(device) if device.type == "cuda" else None

    def count_siblings(self) -> None:
        """Count all that this process's parent has started as its own: the ranks of one trial; before `start`."""
        self._read_cpu = cpu_use_of_siblings

    def start(self) -> None:
        """Begin to watch."""
        self._before = self._read_cpu()
        self._looks = []
        self._slow_before = self._looks_before = 0
        if self._gpu is not None:
            self._gpu.start()

    def state(self) -> dict[str, Any]:
        """Return what was seen since the start, to be saved."""
        after = self._read_cpu()
        used = None if self._before is None or after is None else asdict(after.less(self._before))
        slow, looks = self._slow_looks()
        on_gpu = [] if self._gpu is None else self._gpu.reasons()
        return {"used": used, "slow": slow, "looks": looks, "on_gpu": on_gpu}

    def restore(self, state: dict[str, Any]) -> None:
        """Add what was seen in an earlier part of the work."""
        if self._before is not None and state["used"] is not None:
            self._before = self._before.less(CpuUse(**state["used"]))
        self._slow_before, self._looks_before = state["slow"], state["looks"]
        if self._gpu is not None:
            self._gpu.add(state["on_gpu"])

    def look(self) -> None:
        """Look at the GPU, or the pace of the core; called now and then, while they are awake."""
        if self._gpu is not None:
            self._gpu.look()
        if self._core is not None:
            self._looks.append(self._core.look())

    def stop(self) -> Contention:
        """Return what was seen since the start."""
        after = self._read_cpu()
        reasons = [] if self._gpu is None else self._gpu.reasons()
        if self._before is not None and after is not None:
            crowd = cpu_crowd(self._before, after, self._threads)
            reasons += [] if crowd is None else [crowd]
        slow, looks = self._slow_looks()
        if are_too_many(slow, looks):
            reasons.append(f"the core was slow at {slow} of {looks} looks")
        unknown = UNKNOWN if self._gpu is not None and self._gpu.is_unknown and not reasons else None
        return Contention(bool(reasons), "; ".join(reasons) or None, unknown)

    def _slow_looks(self) -> tuple[int, int]:
        """Return how many looks were slow by what is known of the core they were at, and how many there were."""
        slow = 0 if self._core is None else sum(map(self._core.is_slow, self._looks))
        return self._slow_before + slow, self._looks_before + len(self._looks)


class DeviceWatch:
    """What else happens on a GPU: at each look, who computes there and what of its memory is not this process's.

    ``is_unknown`` where a look could not say who computes there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._since = time.time()
        self._memory_bytes: int | None = None
        self._clear()

    def _clear(self) -> None:
        self.is_unknown = False
        self._reasons: dict[str, None] = {}
        self._grown_bytes = 0

    def start(self) -> None:
        """Begin anew."""
        self._clear()
        self._since = time.time()
        self._memory_bytes = memory_of_others(self._device)

    def add(self, reasons: Iterable[str]) -> None:
        """Add what an earlier part of the work has seen."""
        self._reasons = dict.fromkeys(reasons) | self._reasons

    def look(self) -> None:
        """Note what is to be seen at this moment, and who has computed since the last look."""
        others, since = known_other_processes(self._device), self._since
        self._since = time.time()
        self.is_unknown |= others is None
        seen = dict.fromkeys([*(others or []), *computing_processes(self._device, since)])
        self._reasons |= {f"process {pid} ({name}) uses the device": None for pid, name in seen}
        slowdowns = (reason for reason in throttle_reasons(self._device) if reason != POWER_CAP)
        self._reasons |= {f"the device slows down: {reason}": None for reason in slowdowns}
        memory = memory_of_others(self._device)
        if memory is not None and self._memory_bytes is not None:
            self._grown_bytes = max(self._grown_bytes, memory - self._memory_bytes)

    def reasons(self) -> list[str]:
        """Return what all looks have seen, with one at this moment."""
        self.look()
        grown = f"others took {self._grown_bytes / 2**30:.3g} GiB of the device's memory meanwhile"
        return [*self._reasons, *([grown] if self._grown_bytes >= GROWTH_BYTES else [])]


def memory_of_others(device: torch.device) -> int | None:
    """Return the bytes in use on a GPU beside what this process's allocator holds there; None where nobody says.

    The driver's own, the contexts and libraries of all processes, this one's too, are among them: compare two moments.
    """
    try:
        free, total = torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError):  # a device that failed, or a PyTorch without CUDA
        return None
    return total - free - torch.cuda.memory_reserved(device)


def cpu_crowd(before: CpuUse, after: CpuUse, threads: int) -> str | None:
    """Return what others took of the CPUs, where it was so much that it shows in our times.

    That is: others used more than `LEAST_OTHERS` CPUs, and they and we together more than `FULL_SHARE` of those there
    are; we use ``threads``, or what this process and its children did where that is more. One busy process beside one
    thread crowds two CPUs and not eight, and it does crowd a job that has a thread on each. From what others used the
    resolution of the account is taken off first, one tick of each CPU: a trial of milliseconds is not judged by
    rounding.
    """
    seconds = after.wall - before.wall
    if seconds <= 0:
        return None
    ours = after.ours - before.ours
    resolution = after.cpus * _tick_seconds()
    others = (after.busy - before.busy - ours - (after.parent - before.parent) - resolution) / seconds
    if others < LEAST_OTHERS or others + max(threads, ours / seconds) < FULL_SHARE * after.cpus:
        return None
    return f"other processes used {others:.1f} of {after.cpus} CPUs"


def cpu_use(stat: Path = Path("/proc/stat"), parents: Iterable[int] | None = None) -> CpuUse | None:
    """Return the use of the CPUs so far; None where the kernel keeps no such account.

    ``parents`` are the processes that started this one and work for the same run, by default the one above it.
    """
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return None
    cpus = os.sched_getaffinity(0)
    return CpuUse(
        wall=time.perf_counter(),
        busy=_busy_ticks(lines, cpus) * _tick_seconds(),
        ours=time.process_time() + descendants_seconds(os.getpid()),
        parent=sum(map(_driver_seconds, [os.getppid()] if parents is None else parents)),
        cpus=len(cpus),
    )


def cpu_use_of_siblings() -> CpuUse | None:
    """Return the use of the CPUs so far, where the other children of this process's parent work for the same."""
    use = cpu_use()
    return None if use is None else replace(use, ours=descendants_seconds(os.getppid()))


def _busy_ticks(lines: Iterable[str], cpus: Iterable[int]) -> int:
    names = {f"cpu{cpu}" for cpu in cpus}
    counts = [fields[1:] for fields in map(str.split, lines) if fields[0] in names]
    return sum(int(count[field]) for count in counts for field in _BUSY_FIELDS)


def _driver_seconds(pid: int) -> float:
    """Return the seconds of CPU that a process has had, with those of the boards that it reports to.

    A board that has ended counts on, until the driver reaps it: else its past would turn up as another's.
    """
    boards = [child for child in children_of(pid) if _name(child) == BOARD_PROCESS]
    return process_seconds(pid) + sum(process_seconds(board) + descendants_seconds(board) for board in boards)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


def _tick_seconds() -> float:
    return 1 / os.sysconf("SC_CLK_TCK")


SLOW = 1.4
"""A look is slow where it takes this many times as long as the fastest: below the 1.7 times that a core was measured to
take while its other hardware thread was at work."""

SLOW_SHARE = 0.25
SLOW_LOOKS = 2
"""A measurement is contended where at least this share of its looks, and this many, are slow: with a quarter of them at
1.4 times, its steps take a tenth longer."""

REMEMBERED = 1000
"""Looks among which the fastest is sought: a choice."""

SPINS = 3
_ROUNDS = 3000
"""Spins in a look, of which the fastest counts, and rounds in a spin: a choice."""

SIDE = 128
PRODUCTS = 2
"""Rows and columns of the matrices of the reference kernel, and products that are timed after one that warms the
caches (what ran before must not matter): a tenth of a millisecond or so. Choices."""

LOOK_SECONDS = 0.02
"""The kernel is timed at most once in so many seconds, so that it stays below some percent of the time: a choice."""


class CorePace:
    """Looks at the pace of the core, and compares with the fastest of late; a process keeps one for all its trials.

    A look takes about a quarter of a millisecond, on a core that is awake: one that idled before takes longer. Until
    the core has once gone at its full pace, slow looks are not known for what they are; of a pace that it has not kept
    up for `REMEMBERED` looks nothing is known any more.
    """

    def __init__(self, spin: Callable[[], float] | None = None) -> None:
        self._spin = spin or _spin_seconds
        self._looks: deque[float] = deque(maxlen=REMEMBERED)

    def look(self) -> float:
        """Return how long the piece of work takes now, in seconds (the first of a few tries finds cold caches)."""
        seconds = min(self._spin() for _ in range(SPINS))
        self._looks.append(seconds)
        return seconds

    @property
    def slow_above(self) -> float:
        """The seconds above which a look was slow, by all that is known now."""
        return SLOW * min(self._looks)

    def is_slow(self, seconds: float) -> bool:
        """Return whether a look was slow, by all that is known now."""
        return seconds > self.slow_above


class ReferenceKernel:
    """Times products of two small matrices, in seconds of CPU: fixed work beside which steps are timed.

    A core that others share does all work more slowly for a while. What a step took over what the kernel took at the
    same moment changes less. ``seconds`` is the median of the looks so far, None before the first. Looks that come
    sooner than ``period`` seconds after the last are left out.
    """

    def __init__(self, period: float = LOOK_SECONDS) -> None:
        self._period = period
        self._matrix = torch.ones(SIDE, SIDE)
        self._looks: list[float] = []
        self._next = 0.0

    @classmethod
    def where_it_tells(cls, device: torch.device, threads: int) -> ReferenceKernel | None:
        """Return a kernel where steps are computed by one thread of a CPU, None where others do the work."""
        return cls() if device.type == "cpu" and threads == 1 else None

    @property
    def seconds(self) -> float | None:
        """Return the median of the looks, None without any."""
        return statistics.median(self._looks) if self._looks else None

    def look(self) -> None:
        """Time the kernel once."""
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + self._period
        self._multiply(1)
        started = time.thread_time()
        self._multiply(PRODUCTS)
        self._looks.append(time.thread_time() - started)

    def state(self) -> dict[str, Any]:
        """Return the looks, to be saved."""
        return {"looks": list(self._looks)}

    def restore(self, state: dict[str, Any]) -> None:
        """Add the looks of an earlier part of the work."""
        self._looks = [*state["looks"], *self._looks]

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._matrix, self._matrix)


def are_too_many(slow: int, looks: int) -> bool:
    """Return whether too many of a measurement's looks were slow (`SLOW_SHARE`, `SLOW_LOOKS`) for its time to count."""
    return slow >= SLOW_LOOKS and slow >= SLOW_SHARE * looks


def _spin_seconds() -> float:
    total, started = 0, time.perf_counter()
    for number in range(_ROUNDS):
        total += number
    return time.perf_counter() - started
