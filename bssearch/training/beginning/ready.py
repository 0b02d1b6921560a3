"""A trainer whose step is recorded before its time starts, where the settings say so."""

from __future__ import annotations

from collections.abc import Callable

from bssearch.records import Configuration
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
    """Return a new trainer, its step recorded where the computation has graphs.

    ``begin`` puts it where its training begins. Raises `NotCapturableError` where the step cannot be recorded: eager
    steps would take another time than those of the other trials.
    """
    trainer = Trainer(workload, configuration, train, computation, seed)
    try:
        begin(trainer)
        if computation.graphs is not None:
            trainer.capture()
    except BaseException:
        trainer.close()
        raise
    return trainer
