"""A tiny workload that misbehaves on request, and an executor that runs it in real processes."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from bssearch.executors.base import Event, Executor, ExecutorSettings
from bssearch.executors.slots import LocalExecutor
from bssearch.records import (
    Configuration,
    Observation,
    ParameterValue,
    Target,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRequest,
    TrialState,
    TrialStop,
)
from tests.factories import changed, make_request
from tests.waiting import PATIENCE_S

# The trial's dropout chooses the behaviour, so that one worker can show all behaviours in turn.
BEHAVIOURS = [
    "learn",
    "raise",
    "sys.exit",
    "segfault",
    "exit",
    "hang",
    "hold_lock",
    "print",
    "environment",
    "start_child_and_hold_lock",
    "fork_and_segfault",
    "out_of_memory",
    "diverge",
    "say",
]

WORKLOAD = """
import ctypes
import gc
import json
import os
import subprocess
import sys
import time

import torch

from bssearch.records import MetricInfo
from bssearch.workloads.data import Data, Part

BEHAVIOURS = %(behaviours)r


class Line:
    metrics = {"score": MetricInfo(low=0.0, high=1.0, chance=0.0)}

    def __init__(self, fault="", at=40, report="", spares_first=False):
        self.fault, self.at, self.report = fault, at, report
        self.is_spared = spares_first and "--rank" not in sys.argv
        if fault == "infinite bound":
            self.metrics = {"score": MetricInfo(low=float("-inf"))}
        self.behaviour = "learn"
        self.calls = 0

    def load(self, device):
        if self.fault == "load raises":
            raise ValueError("no such table")
        if self.fault == "rank dies at start" and "--rank" in sys.argv:
            os._exit(3)
        if self.fault == "load segfaults":
            ctypes.string_at(0)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(96, 4, generator=generator)
        targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
        parts = [Part(inputs[s].to(device), targets[s].to(device)) for s in (slice(64), slice(64, 80), slice(80, 96))]
        return Data(*parts)

    def build_model(self, *, dropout):
        self.behaviour = BEHAVIOURS[round(dropout * 100)]
        self.calls = 0
        return torch.nn.Linear(4, 1)

    def loss(self, model, inputs, targets, *, label_smoothing):
        self.calls += 1
        if self.calls == self.at and not self.is_spared:
            self.misbehave()
        error = torch.nn.functional.mse_loss(model(inputs), targets)
        return error * float("nan") if self.behaviour == "diverge" and self.calls >= self.at else error

    def misbehave(self):
        if self.behaviour == "raise":
            raise RuntimeError("the user's own mistake")
        if self.behaviour == "say":
            print("said by the workload")
        if self.behaviour == "out_of_memory":
            raise MemoryError("no more of it")
        if self.behaviour == "sys.exit":
            sys.exit("enough")
        if self.behaviour == "fork_and_segfault" and os.fork() == 0:
            time.sleep(1000)
        if self.behaviour in ("segfault", "fork_and_segfault"):
            ctypes.string_at(0)
        if self.behaviour == "hang":
            time.sleep(1000)
        if self.behaviour == "exit":
            os._exit(3)
        if self.behaviour == "print":
            print('{"kind": "exit"}', flush=True)
            os.write(1, b"not json\\n")
            subprocess.run(["echo", "from a child"], check=True)
            assert sys.stdin.read() == ""
        if self.behaviour == "environment":
            with open(self.report, "w") as file:
                environment = dict(os.environ)
                collection = {"collects": gc.isenabled(), "exempt_objects": gc.get_freeze_count()}
                json.dump({"environment": environment, **collection}, file)
        if self.behaviour == "start_child_and_hold_lock":
            subprocess.Popen(["sleep", "1000"])
            open(self.report, "w").close()
        if self.behaviour in ("hold_lock", "start_child_and_hold_lock"):
            ctypes.PyDLL(None).sleep(1000)

    def evaluate(self, model, part):
        error = torch.nn.functional.mse_loss(model(part.inputs), part.targets).item()
        return {"score": 1.0 / (1.0 + error)}
"""


def write_workload(folder: Path) -> Path:
    path = folder / "line.py"
    path.write_text(WORKLOAD % {"behaviours": BEHAVIOURS})
    return path


def request_trial(number: int, behaviour: str = "learn", *, seconds: float = 30.0, target: float = 0.9) -> TrialRequest:
    return make_request(
        number=number,
        configuration=Configuration(
            batch_size=8, micro_batch_size=8, learning_rate=0.05, dropout=BEHAVIOURS.index(behaviour) / 100
        ),
        seed=1,
        target=Target(metric="score", value=target),
        train_seconds_limit=seconds,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=2,
    )


def request_endless_trial(number: int, behaviour: str = "learn", *, seconds: float = 60.0) -> TrialRequest:
    """Return a request whose target is out of reach, for as long as a test may take."""
    request = request_trial(number, behaviour, seconds=seconds, target=2.0)
    return changed(request, configuration=replace(request.plan.configuration, learning_rate=0.001))


def wait_for(
    executor: Executor, satisfied: Callable[[list[Event]], object], seconds: float = PATIENCE_S
) -> list[Event]:
    """Return all events once they satisfy; fail after some seconds."""
    events: list[Event] = []
    deadline = time.monotonic() + seconds
    while not satisfied(events):
        assert time.monotonic() < deadline, f"not in {seconds} s; so far {events[-3:]}"
        events += executor.events(0.5)
    return events


def outcomes(events: list[Event]) -> dict[int, TrialOutcome]:
    """Return the outcome of each ended trial; fail if a trial ended twice."""
    ended = [event for event in events if isinstance(event, TrialEnded)]
    numbers = [event.number for event in ended]
    assert len(numbers) == len(set(numbers)), f"ended twice: {numbers}"
    return {event.number: event.outcome for event in ended}


def seen(events: list[Event]) -> list[Observation]:
    return [event.observation for event in events if isinstance(event, TrialObserved)]


def run_to_the_end(executor: Executor, request: TrialRequest) -> tuple[TrialOutcome, list[Observation]]:
    executor.submit(request)
    events = wait_for(executor, lambda events: request.number in outcomes(events))
    assert executor.events(0.0) == []
    return outcomes(events)[request.number], seen(events)


def run_and_stop(
    executor: Executor, request: TrialRequest, state: TrialState, *, after: int
) -> tuple[TrialOutcome, list[Observation]]:
    """Run a trial and stop it after some observations."""
    executor.submit(request)
    events = wait_for(executor, lambda events: len(seen(events)) >= after)
    executor.stop(TrialStop(request.number, state, "as asked"))
    if not outcomes(events):
        events += wait_for(executor, outcomes)
    return outcomes(events)[request.number], seen(events)


def worker_pids(executor: LocalExecutor) -> list[int]:
    """Return the process ids of the executor's living workers."""
    pids = [slot.worker.pid for slot in executor._slots if slot.worker]
    return [pid for pid in pids if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@contextmanager
def opened(
    folder: Path,
    *,
    slots: int = 1,
    hang_seconds: float = 60.0,
    device: str = "cpu",
    log_folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    **settings: ParameterValue,
) -> Iterator[LocalExecutor]:
    """Yield an executor of the tiny workload, and close it."""
    write_workload(folder)
    line = ExecutorSettings(
        workload="line.py:Line",
        workload_settings=settings,
        folder=folder,
        slots=slots,
        hang_seconds=hang_seconds,
        device=device,
        log_folder=log_folder,
        environment=environment or {},
    )
    with closing(LocalExecutor(line)) as executor:
        yield executor
