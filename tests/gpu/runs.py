"""Trials on a GPU, in this process and in a worker's."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from bssearch.executors.base import ExecutorSettings
from bssearch.executors.slots import LocalExecutor
from bssearch.records import Observation, TrialOutcome, TrialRequest, TrialState
from bssearch.spec import TrainingSpec
from bssearch.training.batches import place
from bssearch.training.clock import clock_for
from bssearch.training.computation import Computation
from bssearch.training.loop import Trial
from bssearch.workloads.base import Workload
from bssearch.workloads.digits import Digits
from tests.executors.line_workload import run_to_the_end
from tests.factories import changed
from tests.training.toys import configuration, request, run_trial


def digits_request(**changes: Any) -> TrialRequest:
    """Return a request that takes a few hundred steps to 97 %."""
    settings = configuration(changes.pop("batch_size", 64), learning_rate=0.05, warmup_epochs=0.5, dropout=0.1)
    return changed(request(settings, target=0.97, train_seconds_limit=60.0, eval_every_steps=10), **changes)


def run(
    computation: Computation,
    trial: TrialRequest | None = None,
    workload: Workload | None = None,
    *,
    stop: Callable[[], tuple[TrialState, str] | None] = lambda: None,
    on_progress: Callable[[], None] = lambda: None,
) -> tuple[TrialOutcome, list[Observation]]:
    """Run a trial in this process, of the digits unless another workload is given."""
    workload = workload or Digits()
    data, _ = place(workload.load(torch.device("cpu")), computation)
    seen: list[Observation] = []
    whole = Trial(
        trial or digits_request(),
        workload,
        data,
        computation,
        clock=clock_for(computation.device),
        stop=stop,
        on_progress=on_progress,
    )
    return run_trial(whole, seen.append), seen


def curve(seen: list[Observation]) -> list[tuple[int, float, float | None]]:
    """Return the observations of a trial without their seconds."""
    return [(one.step, one.metric, one.loss) for one in seen]


@contextmanager
def worker(workload: str = "digits", *, folder: Path | None = None, **options: Any) -> Iterator[LocalExecutor]:
    """Yield an executor on the GPU; options that the executor lacks are settings of the training."""
    own = {name: options.pop(name) for name in ("memory_limit_bytes", "allow_busy") if name in options}
    training = TrainingSpec(**{"measure_noise": False, **options})
    settings = ExecutorSettings(workload=workload, folder=folder or Path.cwd(), device="cuda", training=training, **own)
    with closing(LocalExecutor(settings)) as executor:
        yield executor


def run_in(executor: LocalExecutor, trial: TrialRequest) -> tuple[TrialOutcome, list[tuple[int, float, float | None]]]:
    """Run a trial in an executor's worker; return its outcome and its curve."""
    outcome, observations = run_to_the_end(executor, trial)
    return outcome, curve(observations)
