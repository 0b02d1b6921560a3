"""Simulations side by side: the repeats of each in some processes, whose number changes nothing but the time."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from bssearch.errors import UsageError
from bssearch.settings import environment_with

PROCESSES = 2
"""A choice: more take memory, and most machines have two cores to spare."""

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Shared = TypeVar("Shared")
Result = TypeVar("Result")
Summary = TypeVar("Summary")

_SHARED: Any = None
"""What all simulations of a process of `repeating` share."""


@contextmanager
def repeating(
    one: Callable[[Shared, str, str, int], Result], shared: Shared, processes: int
) -> Iterator[Callable[[str, str, Sequence[int]], Iterator[Result]]]:
    """Yield what runs the repeats of a sampler and a pruner, in order; with 0 ``processes`` in this one.

    ``one`` is a function of a module: of what is ``shared``, a sampler, a pruner and the number of the repeat.
    """
    if processes == 0:
        yield lambda sampler, pruner, repeats: map(partial(one, shared, sampler, pruner), repeats)
        return
    # One thread each: faster here, and alike on any number of cores.
    with environment_with(dict.fromkeys(THREADS, "1")):
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(processes, spawn, initializer=_have, initargs=(shared,))
        try:
            yield lambda sampler, pruner, repeats: pool.map(partial(_run, one, sampler, pruner), repeats)
        finally:
            pool.shutdown(cancel_futures=True)


def run_pairs(
    one: Callable[[Shared, str, str, int], Result],
    shared: Shared,
    pairs: Sequence[tuple[str, str]],
    summarize: Callable[[Sequence[Result]], Summary],
    *,
    repeats: int,
    processes: int,
    done: Callable[[str, str], None],
) -> dict[tuple[str, str], Summary]:
    """Return the summary of every pair of a sampler and a pruner over its repeats; ``done`` is called with each.

    Raises `UsageError` for fewer than 1 repeat.
    """
    if repeats < 1:
        raise UsageError(f"repeats = {repeats} must be >= 1")
    found = {}
    with repeating(one, shared, processes) as mapped:
        for sampler, pruner in dict.fromkeys(pairs):
            found[sampler, pruner] = summarize(list(mapped(sampler, pruner, range(repeats))))
            done(sampler, pruner)
    return found


def _run(one: Callable[[Any, str, str, int], Result], sampler: str, pruner: str, repeat: int) -> Result:
    return one(_SHARED, sampler, pruner, repeat)


def _have(shared: object) -> None:
    """Keep what is shared in a process; leave Ctrl-C to the one that started it, and end with that."""
    global _SHARED
    _SHARED = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
