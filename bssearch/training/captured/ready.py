"""A trainer whose step is recorded before its time starts, where the settings say so."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

from bssearch.records import Configuration
from bssearch.training.captured.step import NotCapturableError
from bssearch.training.computation import Computation
from bssearch.training.trainer import Trainer
from bssearch.workloads.base import Workload
from bssearch.workloads.data import Part


def ready_trainer(
    workload: Workload,
    configuration: Configuration,
    train: Part,
    computation: Computation,
    seed: int,
    begin: Callable[[Trainer], None] = lambda trainer: None,
) -> Trainer:
    """Return a new trainer, its step recorded where the settings say so; where it cannot be, a warning says why.

    ``begin`` puts it where its training begins.
    """
    made = partial(_begun, workload, configuration, train, computation, seed, begin)
    if computation.graphs is None:
        return made(captures=False)
    try:
        return made(captures=True)
    except NotCapturableError as error:
        computation.warn(f"compile = 'capture': steps run eager, they cannot be captured: {error}")
    gc.collect()  # the trainer that tried, before another one takes as much memory
    return made(captures=False)


def _begun(
    workload: Workload,
    configuration: Configuration,
    train: Part,
    computation: Computation,
    seed: int,
    begin: Callable[[Trainer], None],
    *,
    captures: bool,
) -> Trainer:
    trainer = Trainer(workload, configuration, train, computation, seed)
    try:
        begin(trainer)
        if captures:
            trainer.capture()
    except BaseException:
        trainer.close()
        raise
    return trainer
