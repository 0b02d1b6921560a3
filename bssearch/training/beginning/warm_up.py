"""A warm-up before the time of a trial starts: the device and the libraries meet its shapes."""

from __future__ import annotations

from dataclasses import replace

from bssearch.batch_schedule import constant_configurations
from bssearch.errors import BSSearchError
from bssearch.records import Configuration
from bssearch.training.computation import Computation
from bssearch.training.memory import is_out_of_memory
from bssearch.training.own.optimizers import ignored_learning_rate
from bssearch.training.trainer import Trainer, check_split
from bssearch.workloads.base import Workload
from bssearch.workloads.data import Data

WARM_UP_STEPS = 2


def warm_up(
    workload: Workload, configuration: Configuration, data: Data, computation: Computation, metric: str, seed: int
) -> None:
    """Let the device and the libraries meet every shape of a trial before its time starts.

    A throw-away model evaluates the validation part once and takes the first two steps of the trial, on the rows that
    its seed draws for them: no batch is met here that the trial does not meet itself. Where the batch grows, others
    take two steps of each size. Where it fails compiled and not uncompiled, compiling is given up. It changes the
    random state: build the trial's own trainer afterwards, which seeds it and is then what it would be without the
    warm-up. Raises `WorkloadError` where a batch is larger than the training part.
    """
    check_split(configuration, len(data.train))
    try:
        _take_first_steps(workload, configuration, data, computation, metric, seed)
    except BSSearchError:
        raise
    except Exception as error:
        if not computation.compiles or is_out_of_memory(error):
            raise
        with computation.without_compiling():
            _take_first_steps(workload, configuration, data, computation, metric, seed)
        computation.fallback(error)


def _take_first_steps(
    workload: Workload, configuration: Configuration, data: Data, computation: Computation, metric: str, seed: int
) -> None:
    # The trial's own rows: made-up ones, or the first of a part that is sorted by length, may hold not a single token.
    for place, one in enumerate(constant_configurations(replace(configuration, warmup_epochs=0.0))):
        with Trainer(workload, one, data.train, computation, seed) as trainer:
            if place == 0:
                trainer.evaluate(data.validation, metric)
            for _ in range(WARM_UP_STEPS):
                trainer.step()
            ignored = ignored_learning_rate(workload, trainer.model, one)
            if ignored is not None:
                computation.warn(ignored)
