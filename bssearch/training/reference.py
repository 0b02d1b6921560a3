"""A reference kernel: fixed work beside which steps are timed, so that times on a slowed machine can be compared.

A machine that others share does all work more slowly for a while: the other hardware thread of a core is at work,
caches are crowded, clocks go down. What a step took over what the kernel took at the same moment changes less.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

SIDE = {"cpu": 128, "cuda": 1024}
"""Rows and columns of the matrices that are multiplied, a tenth of a millisecond or so: choices."""

PRODUCTS = 2
"""Products that are timed, after one that warms the caches: what ran before must not matter."""

LOOK_SECONDS = 0.02
"""A trial looks at most once in so many seconds, so that the kernel stays below some percent of its time: a choice."""


class ReferenceKernel:
    """Times products of two small matrices: in seconds of CPU on one thread, else of the wall clock or the device.

    ``seconds`` is the median of the looks so far, None before the first. With a ``period`` looks that come sooner than
    so many seconds after the last are left out.
    """

    def __init__(self, device: torch.device, period: float = 0.0) -> None:
        side = SIDE.get(device.type, SIDE["cpu"])
        self._device = device
        self._period = period
        self._matrix = torch.ones(side, side, device=device)
        self._looks: list[float] = []
        self._next = 0.0

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
        self._looks.append(self._on_device() if self._device.type == "cuda" else self._on_cpu())

    def state(self) -> dict[str, Any]:
        """Return the looks, to be saved."""
        return {"looks": list(self._looks)}

    def restore(self, state: dict[str, Any]) -> None:
        """Add the looks of an earlier part of the work."""
        self._looks = [*state["looks"], *self._looks]

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._matrix, self._matrix)

    def _on_cpu(self) -> float:
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        started = clock()
        self._multiply(PRODUCTS)
        return clock() - started

    def _on_device(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        self._multiply(PRODUCTS)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
