"""A trainer whose step is recorded before its time starts, where the settings say so."""

from __future__ import annotations

from collections.abc import Callable

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
    trainer = Trainer(workload, configuration, train, computation, seed)
    begin(trainer)
    if computation.graphs is None:
        return trainer
    try:
        trainer.capture()
        return trainer
    except NotCapturableError as error:
        computation.warn(f"compile = 'capture': steps run eager, they cannot be captured: {error}")
        trainer.close()
    trainer = Trainer(workload, configuration, train, computation, seed)
    begin(trainer)
    return trainer
