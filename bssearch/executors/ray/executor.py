"""Runs trials on a Ray cluster: one worker process for each slot, on whichever node Ray gives the slot."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from bssearch.errors import LaunchError, UsageError
from bssearch.executors.base import Ended, ExecutorSettings
from bssearch.executors.driven_worker import Worker
from bssearch.executors.messages import Load, Loaded, Refused, Reply
from bssearch.executors.ray.actor import Place, SlotActor
from bssearch.executors.ray.cluster import Cluster, Node, said_by
from bssearch.executors.ray.worker import ActorWorker
from bssearch.executors.slot import Slot
from bssearch.executors.slot_executor import SlotExecutor
from bssearch.records import (
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
    StepTime,
    StepTimeRequest,
    TrialOutcome,
    TrialRequest,
    TrialState,
    WorkloadDescription,
)
from bssearch.settings import CHECKPOINT_DIR_VARIABLE, DATA_DIR_VARIABLE, checkpoint_url

PLACE_SECONDS = 60.0
"""How long Ray may take to give a slot a node: a choice. It takes seconds where there is room."""

LEAVE_SECONDS = 3.0
"""How long an actor may take to clear up before it is killed: a choice."""

ATTEMPTS = 3
"""How often what is asked of a worker is tried, where each time its node is lost: a choice."""

CALLS_AT_ONCE = 4
"""How many methods of an actor may run at once: one listens all the time. A choice."""

T = TypeVar("T")


@dataclass(slots=True)
class _Seat:
    """The actor of a slot, where it is, and the last worker that it had."""

    actor: Any
    asked: Any
    place: Place | None = None
    worker: ActorWorker | None = None


class RayExecutor(SlotExecutor):
    """Runs trials on a Ray cluster; see `bssearch.executors.base.Executor`.

    Each slot is an actor, on the node that Ray chooses, with ``threads`` CPUs and, where the cluster has GPUs and the
    device is not ``cpu``, a GPU of its own. Ray does not restart it: a trial that is lost with it is told as lost, and
    the next one has a new actor. A slot for which there is no node any more is given up. The workload, its data and
    checkpoints must lie on each node where they lie here.

    Raises `UsageError` where Ray is not installed, for more slots or threads than the cluster has room for, and where a
    cluster of several machines would have checkpoints in a store that is no folder;
    `LaunchError` where no cluster answers.
    """

    def __init__(self, settings: ExecutorSettings) -> None:
        self._cluster = Cluster(settings.address)
        try:
            nodes = self._cluster.nodes()
            self._gpus = _gpus_of_a_slot(settings, nodes)
            self._room = _room(settings, nodes, self._gpus)
            _check_checkpoint_place(nodes)
        except BaseException:
            self._cluster.close()
            raise
        slots = self._room if settings.slots == "auto" else settings.slots
        super().__init__(replace(settings, slots=slots, device="cuda" if self._gpus else "cpu"))
        self._seats: dict[int, _Seat] = {}
        self._had_a_node: set[int] = set()
        self._kind: tuple[str, str] | None = None

    @property
    def slots_apart(self) -> bool:
        """Whether each slot has a device of its own: Ray gives a GPU to one actor."""
        return self._gpus > 0

    def describe(self) -> WorkloadDescription:
        """Load the workload on a node and return what it offers; raise `WorkloadError` or `LaunchError`."""
        return self._again(super().describe)

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        """Time isolated steps on a node while no trial runs."""
        return self._again(partial(super().measure_step_time, request))

    def measure_step_times(self, requests: Sequence[StepTimeRequest]) -> list[StepTime]:
        """Time as `measure_step_time` does, as many at once as there are slots."""
        return self._again(partial(super().measure_step_times, requests))

    def step_times_by_device(self, request: StepTimeRequest) -> dict[str, StepTime]:
        """Time one configuration in all slots at once; return the times by device."""
        return self._again(partial(super().step_times_by_device, request))

    def measure_memory(self, request: MemoryRequest, *, reserve: bool = False) -> MemoryUse:
        """Find out in a process of its own on a node whether a micro-batch size fits; not while a trial runs."""
        return self._again(partial(super().measure_memory, request, reserve=reserve))

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        """Measure the gradient noise scale near a target on a node while no trial runs."""
        return self._again(partial(super().measure_noise, request))

    def submit(self, request: TrialRequest) -> None:
        """Start a trial in a free slot; raise `LaunchError` if no worker can be started.

        Where there is no node any more for a slot that had one, the trial is lost and the slot given up, unless it is
        the last.
        """
        try:
            self._again(partial(super().submit, request))
        except _NoNodeError as error:
            gone = next(slot for slot in self._slots if slot.index == error.slot)
            if error.slot not in self._had_a_node or len(self._slots) == 1:
                raise
            self._slots.remove(gone)
            self.slots = len(self._slots)
            self._events.append(Ended(request.number, TrialOutcome(state=TrialState.LOST, reason=str(error))))

    def close(self) -> None:
        """End what runs, as cancelled, and let go of the actors, and of a Ray that was started here."""
        super().close()
        ray = self._cluster.ray
        if self._seats:
            leaving = [seat.actor.leave.remote() for seat in self._seats.values()]
            ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_SECONDS)
        for seat in self._seats.values():
            ray.kill(seat.actor, no_restart=True)
        self._seats.clear()
        self._cluster.close()

    def _again(self, work: Callable[[], T]) -> T:
        """Have something done, and again where a worker or an actor is lost meanwhile: its slot gets another node."""
        for _ in range(ATTEMPTS - 1):
            try:
                return work()
            except _NoNodeError:
                raise
            except _ActorLostError:
                continue
            except LaunchError:
                if not any(slot.failure is not None and slot.failure.is_lost for slot in self._slots):
                    raise
        return work()

    def _started(self, slot: Slot, environment: Mapping[str, str]) -> Worker:
        """Return a new worker in the slot's actor; in a new one where there is none, or it is lost."""
        for one in self._slots:  # all at once: each takes a second or two
            seat = self._seats.get(one.index)
            if seat is None or (seat.worker is not None and seat.worker.is_lost):
                self._seats[one.index] = self._asked_for()
        seat = self._seats[slot.index]
        place = seat.place = seat.place or self._placed(slot, seat)
        seat.worker = ActorWorker(
            self._cluster.ray,
            seat.actor,
            slot=slot.index,
            threads=self._settings.threads,
            log=slot.log,
            inbox=self._inbox,
            environment=environment,
            place=place,
        )
        return seat.worker

    def _asked_for(self) -> _Seat:
        """Ask Ray for an actor; it is placed in time."""
        made = self._cluster.ray.remote(SlotActor).options(
            num_cpus=self._settings.threads,
            num_gpus=self._gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=CALLS_AT_ONCE,
            scheduling_strategy="SPREAD",
        )
        actor = made.remote()
        return _Seat(actor, actor.place.remote(str(Path.cwd()), str(self._settings.folder.resolve())))

    def _placed(self, slot: Slot, seat: _Seat) -> Place:
        """Wait until the slot's actor has a node; raise `LaunchError` where it gets none, or one that will not do."""
        ray = self._cluster.ray
        threads = self._settings.threads
        needs = f"{threads} CPU{'s' * (threads > 1)}" + (" and a GPU" if self._gpus else "")
        try:
            place: Place = ray.get(seat.asked, timeout=PLACE_SECONDS)
            self._check(slot, place)
        except ray.exceptions.GetTimeoutError:
            self._leave(slot)
            raise _NoNodeError(
                f"slot {slot.index}: for {PLACE_SECONDS:g} s no node of the Ray cluster had {needs} free", slot.index
            ) from None
        except ray.exceptions.RayError as error:
            self._leave(slot)
            has_raised = isinstance(error, ray.exceptions.RayTaskError)
            raise (LaunchError if has_raised else _ActorLostError)(
                f"slot {slot.index}: its Ray actor cannot be started: {said_by(error)}",
                hint="bssearch and Ray must be installed on each node, in the versions that are here",
            ) from error
        except LaunchError:
            self._leave(slot)
            raise
        self._had_a_node.add(slot.index)
        return place

    def _check(self, slot: Slot, place: Place) -> None:
        """Raise `LaunchError` where a node has another bssearch, or not the folder of the workload."""
        if place.version != version("bssearch"):
            raise LaunchError(
                f"slot {slot.index}: {place.machine} has bssearch {place.version}, this machine {version('bssearch')}"
            )
        in_a_file = self._settings.program is not None or ".py" in self._settings.workload
        if in_a_file and not place.has_folder:
            raise LaunchError(
                f"slot {slot.index}: {place.machine} has no folder {self._settings.folder.resolve()}",
                hint="the workload must lie at the same path on each node, on a file system that they share",
            )

    def _leave(self, slot: Slot) -> None:
        """Let go of a slot's actor."""
        self._cluster.ray.kill(self._seats.pop(slot.index).actor, no_restart=True)

    def _load_of(self, slot: Slot) -> Load:
        """Return what a worker loads: of the devices of its node it sees its own."""
        return Load.of(replace(self._settings, slots=1), 0, revision=self._revision)

    def _worker_environment(self) -> dict[str, str]:
        """Return what is added to the environment of a node: where the data lie, too."""
        here = {name: os.environ[name] for name in (DATA_DIR_VARIABLE,) if name in os.environ}
        return here | super()._worker_environment()

    def _about_idle_devices(self) -> str | None:
        """Return that GPUs have nothing to do."""
        if not self._gpus or self.slots >= self._room:
            return None
        return f"{self.slots} of {self._room} GPUs run trials: executor.slots = auto gives each a slot"

    def _take(self, worker: Worker, reply: Reply | None) -> None:
        super()._take(worker, self._of_one_kind(worker, reply) if isinstance(reply, Loaded) else reply)

    def _of_one_kind(self, worker: Worker, reply: Loaded) -> Reply:
        """Return what a worker said that has loaded; a refusal where its device is of another kind than the first."""
        assert isinstance(worker, ActorWorker) and reply.device_name is not None
        self._kind = self._kind or (reply.device_name, worker.machine)
        kind, machine = self._kind
        if reply.device_name == kind:
            return reply
        return Refused(
            error="launch",
            message=f"slot {worker.slot}: {worker.machine} has {reply.device_name}, {machine} has {kind}: times of one "
            "kind of device do not compare with those of another",
            hint="a Ray cluster of nodes of one kind, or a study for each kind",
        )


class _ActorLostError(LaunchError):
    """An actor was lost before it had a place: Ray, its node or its process has failed."""


class _NoNodeError(LaunchError):
    """No node has room for a slot."""

    def __init__(self, message: str, slot: int) -> None:
        super().__init__(message, hint="`ray status` says who has what of the cluster")
        self.slot = slot


def _gpus_of_a_slot(settings: ExecutorSettings, nodes: Sequence[Node]) -> int:
    """Return how many GPUs a slot has; raise `UsageError` for a device that Ray cannot give."""
    if settings.device not in {"auto", "cpu", "cuda"}:
        raise UsageError(
            f"executor.device = {settings.device!r} must be auto, cpu or cuda with the executor ray: "
            "which GPU a slot has is Ray's to say"
        )
    there_are = any(node.gpus >= 1 for node in nodes)
    if settings.device == "cuda" and not there_are:
        raise UsageError("executor.device = 'cuda': no node of the Ray cluster has a GPU")
    return int(there_are and settings.device != "cpu")


def _check_checkpoint_place(nodes: Sequence[Node]) -> None:
    """Raise `UsageError` where checkpoints are sent to a store from this machine, and trials run on others too."""
    url = checkpoint_url()
    machines = len({node.name for node in nodes})
    if url is not None and machines > 1:
        raise UsageError(
            f"{CHECKPOINT_DIR_VARIABLE} = {url.partition('://')[0]}://…: on a Ray cluster of {machines} machines it "
            "must name a folder: a store's files are sent and brought by the driver's machine alone",
            hint="name a folder that all machines share",
        )


def _room(settings: ExecutorSettings, nodes: Sequence[Node], gpus: int) -> int:
    """Return how many slots the cluster has room for; raise `UsageError` where that is too little."""
    most = int(max((node.cpus for node in nodes), default=0))
    if settings.threads > most:
        raise UsageError(
            f"executor.threads = {settings.threads} must be <= {most}, the CPUs of the largest node of the Ray cluster"
        )
    room = sum(node.slots(settings.threads, gpus) for node in nodes)
    if settings.least_slots > room:
        kind = "a GPU and " if gpus else ""
        raise UsageError(
            f"executor.slots = {settings.slots} must be <= {room}: the Ray cluster has room for so many slots with "
            f"{kind}executor.threads = {settings.threads}",
            hint="executor.slots = auto takes as many as there are",
        )
    return room
