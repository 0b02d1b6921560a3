"""Repeats of simulations in parallel processes; their number does not change results."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from bssearch.settings import environment_with

PROCESSES = 2  # more take memory, and most machines have two spare cores

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Result = TypeVar("Result")

_SHARED: Any = None  # shared by all simulations of a process of `repeating`


@contextmanager
def repeating(one: Callable[..., Result], shared: object, processes: int) -> Iterator[Callable[..., Iterator[Result]]]:
    """Yield a map of ``one(shared, *given, repeat)`` over some repeats, in order; with 0 ``processes`` in this one.

    ``one`` is a function of a module. The map takes the repeats, and the given arguments after them.
    """
    if processes == 0:
        yield lambda repeats, *given: map(partial(one, shared, *given), repeats)
        return
    # One thread each: faster here, and alike on any number of cores.
    with environment_with(dict.fromkeys(THREADS, "1")):
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(processes, spawn, initializer=_have, initargs=(shared,))
        try:
            yield lambda repeats, *given: pool.map(partial(_run, one, *given), repeats)
        finally:
            pool.shutdown(cancel_futures=True)


def _run(one: Callable[..., Result], *given: object) -> Result:
    return one(_SHARED, *given)


def _have(shared: object) -> None:
    """Keep shared values in a process, which ignores Ctrl-C and ends with its parent."""
    global _SHARED
    _SHARED = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
