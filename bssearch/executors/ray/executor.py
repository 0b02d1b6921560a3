"""Trials on a Ray cluster, with a worker process per slot."""

import ctypes
import importlib
import logging
import os
import platform
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from bssearch.errors import LaunchError, UsageError, require, with_hint
from bssearch.executors.base import (
    Command,
    ExecutorSettings,
    Load,
    Loaded,
    Refused,
    Reply,
    decode_command,
    decode_reply,
    encode,
)
from bssearch.executors.process import Death, Inbox, WorkerHandle, WorkerProcess, hide_secrets, is_secret
from bssearch.executors.slots import LogFolder, Slot, SlotExecutor
from bssearch.records import (
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRequest,
    TrialState,
)
from bssearch.records.text import plural
from bssearch.settings import CHECKPOINT_DIR_VARIABLE, DATA_DIR_VARIABLE, checkpoint_url, environment_with

MOST_LOG_BYTES = 1 << 16  # bytes per reply, because Ray sends less than 100 KiB without its object store

# Maximum delay of an evaluation, because an answer takes 3 ms of CPU time on both sides. Beside one-second trials, 20
# answers per second made steps 7 to 10 % slower. 5 answers per second had hardly any effect.
GATHER_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Place:
    """An actor's node, machine and bssearch version. ``has_folder`` says whether the study's folder exists."""

    node: str
    machine: str
    version: str
    has_folder: bool


@dataclass(frozen=True, slots=True)
class Heard:
    """A worker's new output and replies, and the worker's death if known."""

    log: bytes
    replies: tuple[bytes, ...]
    death: Death | None = None


class SlotActor:
    """A Ray actor that owns a slot's successive workers. Thread-safe."""

    def __init__(self) -> None:
        # On Linux the kernel kills a worker with its starting thread. This thread lives as long as the actor.
        self._home = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bssearch worker")
        self._logs = LogFolder(None)
        self._log = self._logs.file_of(0)
        self._worker: WorkerProcess | None = None
        self._inbox: Inbox = queue.SimpleQueue()
        self._waiting: list[Reply | None] = []
        self._death: Death | None = None
        self._burial = threading.Lock()
        self._log_passed = self._log_due = 0

    def place(self, current: str, folder: str) -> Place:
        """Enter the driver's ``current`` folder if the folder exists, and return the actor's `Place`."""
        import ray

        with suppress(OSError):
            os.chdir(current)
        return Place(
            node=ray.get_runtime_context().get_node_id(),
            machine=platform.node(),
            version=version("bssearch"),
            has_folder=Path(folder).is_dir(),
        )

    def start(self, slot: int, threads: int, environment: Mapping[str, str]) -> int:
        """Start a worker once any earlier worker is dead. Returns the process id."""
        self._log.write_bytes(b"")
        self._log_passed = self._log_due = 0
        self._death = None
        self._worker = self._home.submit(
            WorkerProcess, slot=slot, threads=threads, log=self._log, inbox=self._inbox, environment=environment
        ).result()
        return self._worker.pid

    def tell(self, line: bytes) -> None:
        if self._worker is not None:
            self._worker.send(decode_command(line))

    def hear(self, seconds: float) -> Heard:
        """Return the worker's new output and replies, after at most ``seconds`` + `GATHER_SECONDS`.

        The end of a trial empties the log.
        """
        if not self._waiting:
            self._listen(seconds)
        with self._log.open("rb") as file:
            file.seek(self._log_passed)
            log = file.read(MOST_LOG_BYTES)
        self._log_passed += len(log)
        if self._log_passed < self._log_due:  # replies follow all earlier output
            return Heard(log, ())
        replies, self._waiting = [one for one in self._waiting if one is not None], []
        if any(isinstance(one, TrialEnded) for one in replies):
            os.truncate(self._log, 0)  # the worker appends at the new end
            self._log_passed = self._log_due = 0
        return Heard(log, tuple(encode(one) for one in replies), self._death)

    def write_stack(self) -> None:
        if self._worker is not None:
            self._worker.write_stack()

    def kill(self) -> None:
        if self._worker is not None and self._death is None:
            self._worker.kill()

    def leave(self) -> None:
        self._bury()
        self._home.shutdown()
        self._logs.close()

    def _listen(self, seconds: float) -> None:
        with suppress(queue.Empty):
            self._waiting.append(self._inbox.get(timeout=seconds)[1])
            gathered = time.monotonic() + GATHER_SECONDS
            while self._waiting[-1] == "heartbeat" or isinstance(self._waiting[-1], TrialObserved):
                self._waiting.append(self._inbox.get(timeout=max(0.0, gathered - time.monotonic()))[1])
        if None in self._waiting:
            self._bury()
        self._log_due = self._log.stat().st_size

    def _bury(self) -> None:
        with self._burial:
            if self._worker is not None and self._death is None:
                self._death = self._worker.bury()


CONNECT_SECONDS = 30.0  # seconds for a cluster to answer

STORE_BYTES = 100 * 2**20  # near Ray's minimum of 75 MiB, because actors' replies need no store

QUIET = {"log_to_driver": False, "configure_logging": False}  # stdout is for the answer

# environment of a local Ray
OWN_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no reports to Ray's makers
    "RAY_worker_niceness": "0",  # the same priority as with the executor local
    "RAY_memory_monitor_refresh_ms": "0",  # the kernel handles a lack of memory, as with the executor local
}


_SIGACTION_BYTES = 512  # above the size of sigaction(2)'s structure everywhere (152 on Linux)


@dataclass(frozen=True, slots=True)
class Node:
    """A node's total CPUs and GPUs."""

    name: str
    cpus: float
    gpus: float

    def slots(self, threads: int, gpus: int) -> int:
        return int(min([self.cpus // threads, *([self.gpus // gpus] if gpus else [])]))


class Cluster:
    """The connection to a Ray cluster.

    The class reuses an open connection. Otherwise, if ``address`` is None, a local Ray starts, which ends with this
    process.
    """

    def __init__(self, address: str | None) -> None:
        require(
            address is None or "://" not in address,
            f"executor.address = {address!r} must be auto or HOST:PORT, because bssearch must run on the cluster",
            hint="run bssearch on the cluster: `ray job submit -- bssearch run …`",
        )
        self.ray = _imported()
        self._is_own = not self.ray.is_initialized()
        if not self._is_own:
            return
        hide_secrets()
        logging.getLogger("ray").setLevel(logging.ERROR)
        with _unchanged_by_ray():
            if address is None:
                self._begin()
            else:
                self._connect(address)

    def _begin(self) -> None:
        try:
            with environment_with(OWN_RAY):
                self.ray.init("local", include_dashboard=False, object_store_memory=STORE_BYTES, **QUIET)
        except Exception as error:
            raise LaunchError(
                f"Ray does not start on this machine: {said_by(error)}",
                hint="set executor.name: local to run without Ray",
            ) from error

    def _connect(self, address: str) -> None:
        failures: list[Exception] = []

        def connect() -> None:
            try:
                self.ray.init(address=address, **QUIET)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=connect, name="bssearch ray", daemon=True)
        thread.start()
        thread.join(CONNECT_SECONDS)
        why = said_by(failures[0]) if failures else f"no answer for {CONNECT_SECONDS:g} s"
        require(
            not failures and not thread.is_alive(),
            f"executor.address = {address!r}: cannot reach a Ray cluster at this address: {why}",
            hint="check `ray status`, or remove executor.address to start Ray on this machine",
            error=LaunchError,
        )

    def nodes(self) -> list[Node]:
        return [
            Node(one["NodeManagerHostname"], one["Resources"].get("CPU", 0.0), one["Resources"].get("GPU", 0.0))
            for one in self.ray.nodes()
            if one["Alive"]
        ]

    def close(self) -> None:
        """Close the connection that this object opened, and stop a local Ray. Idempotent."""
        if self._is_own:
            self._is_own = False
            with _sigterm_as_it_is():
                self.ray.shutdown()


def said_by(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if any(line.startswith('File "') for line in lines) else lines[0]


def _imported() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UsageError(
            "the executor ray needs Ray, which is not installed", hint="pip install 'bssearch[ray]'"
        ) from None


@contextmanager
def _unchanged_by_ray() -> Iterator[None]:
    # Ray's processes inherit the environment, and clusters show command lines, both of which may hold secrets.
    secrets = {name: value for name, value in os.environ.items() if is_secret(name, value)}
    for name in secrets:
        del os.environ[name]
    try:
        with (  # `create`, because another version of Ray may lack the functions
            mock.patch("ray._private.utils.get_entrypoint_name", lambda: "bssearch", create=True),
            # prints to stdout
            mock.patch("ray._private.worker.listen_error_messages", lambda *_: None, create=True),
            _sigterm_as_it_is(),
        ):
            yield
    finally:
        os.environ.update(secrets)


@contextmanager
def _sigterm_as_it_is() -> Iterator[None]:
    # Ray replaces the handler from any thread, but `signal` restores a handler only in the main thread.
    libc, handler = ctypes.CDLL(None), signal.getsignal(signal.SIGTERM)
    before = ctypes.create_string_buffer(_SIGACTION_BYTES)
    libc.sigaction(signal.SIGTERM, None, before)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        libc.sigaction(signal.SIGTERM, before, None)


HEAR_SECONDS = 1.0  # an actor answers after this wait even without a reply

SILENCE_SECONDS = 60.0  # seconds until a silent actor counts as lost (network partition)


class ActorWorker(WorkerHandle):
    """A worker in an actor on ``machine``. An actor that is silent for `SILENCE_SECONDS` counts as lost."""

    def __init__(
        self,
        ray: Any,
        actor: Any,
        *,
        slot: int,
        threads: int,
        log: Path,
        inbox: Inbox,
        environment: Mapping[str, str],
        place: Place,
    ) -> None:
        super().__init__(slot, log, inbox)
        self.place, self.machine = place.node, place.machine
        self._ray, self._actor = ray, actor
        self.death: Death | None = None
        self._asked: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._start = partial(actor.start.remote, slot, threads, dict(environment))
        self._listener = threading.Thread(target=self._listen, name=f"bssearch slot {slot}", daemon=True)
        self._talker = threading.Thread(target=self._talk, name=f"bssearch slot {slot} (commands)", daemon=True)
        self._listener.start()

    def send(self, command: Command) -> None:
        self._asked.put(partial(self._actor.tell.remote, encode(command)))

    def has_exited(self) -> bool:
        return self.death is not None

    def write_stack(self) -> None:
        self._asked.put(self._actor.write_stack.remote)

    def kill(self) -> None:
        self._asked.put(self._actor.kill.remote)

    def bury(self) -> Death:
        self._asked.put(None)
        self._listener.join()
        assert self.death is not None, "the listener ended without the worker's death"
        return self.death

    def _talk(self) -> None:
        while (ask := self._asked.get()) is not None:
            with suppress(self._ray.exceptions.RayError):  # the listener notices a lost actor
                self._ray.get(ask(), timeout=SILENCE_SECONDS)

    def _listen(self) -> None:
        try:
            self.pid = self._ray.get(self._start(), timeout=SILENCE_SECONDS)
            self._talker.start()
            while self.death is None:
                self._take(self._ray.get(self._actor.hear.remote(HEAR_SECONDS), timeout=HEAR_SECONDS + SILENCE_SECONDS))
        except self._ray.exceptions.GetTimeoutError:  # a GetTimeoutError is an OSError, too
            self._end(TrialState.LOST, f"{self.machine} has not answered for {SILENCE_SECONDS:g} s")
        except self._ray.exceptions.RayTaskError as error:  # the actor's error may be of any class
            self._end(TrialState.FAILED, f"the actor on {self.machine} failed: {said_by(error)}")
        except self._ray.exceptions.RayError as error:
            self._end(TrialState.LOST, f"Ray lost the actor on {self.machine}: {said_by(error)}")
        except OSError as error:
            self._end(TrialState.FAILED, f"writing the log {self.log} failed: {error.strerror}")
        except ValueError as error:
            self._end(TrialState.FAILED, f"a reply of {self.machine} is unreadable: {error}")
        finally:
            self.reply(None)

    def _take(self, heard: Heard) -> None:
        if heard.log:
            with self.log.open("ab") as log:
                log.write(heard.log)
        for line in heard.replies:
            self.reply(decode_reply(line))
        self.death = heard.death

    def _end(self, state: TrialState, reason: str) -> None:
        self.death = Death(0, verdict=(state, reason))
        # The actor may still be alive.
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor, no_restart=True)


PLACE_SECONDS = 60.0  # seconds for Ray to place a slot, because a cluster with room needs few seconds

LEAVE_SECONDS = 3.0  # seconds for an actor's clean-up before Ray kills the actor

ATTEMPTS = 3  # attempts at a request if Ray loses nodes

CALLS_AT_ONCE = 4  # methods that run at once in an actor, because one method always listens

T = TypeVar("T")


@dataclass(slots=True)
class _Seat:
    actor: Any
    asked: Any
    place: Place | None = None
    worker: ActorWorker | None = None


class RayExecutor(SlotExecutor):
    """An `Executor` on a Ray cluster.

    Each slot is an actor with ``threads`` CPUs and a GPU. If the cluster has no GPU or the device is ``cpu``, actors
    have no GPU. The executor drops a lost slot if no node has room. The workload, data and checkpoints need the same
    paths on all nodes.
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
        return self._gpus > 0  # Ray gives a GPU to one actor

    def submit(self, request: TrialRequest) -> None:
        """Start a trial in a free slot.

        If no node replaces a lost node, the trial is lost, and the executor drops the slot. Raises `LaunchError`
        instead if the executor has no other slot, or if the slot never had a node.
        """
        try:
            self._again(partial(super().submit, request))
        except _NoNodeError as error:
            if error.slot not in self._had_a_node or len(self._slots) == 1:
                raise
            self._slots = [slot for slot in self._slots if slot.index != error.slot]
            self.slots = len(self._slots)
            outcome = TrialOutcome(state=TrialState.LOST, reason=with_hint(error))
            self._events.append(TrialEnded(request.number, outcome))

    def close(self) -> None:
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
        from tenacity import Retrying, retry_if_exception, stop_after_attempt

        retrying = Retrying(
            retry=retry_if_exception(self._is_of_lost_node), stop=stop_after_attempt(ATTEMPTS), reraise=True
        )
        return retrying(work)

    def _is_of_lost_node(self, error: BaseException) -> bool:
        is_lost = any(slot.failure is not None and slot.failure.is_lost for slot in self._slots)
        return isinstance(error, _ActorLostError) or (is_lost and type(error) is LaunchError)

    def _started(self, slot: Slot, environment: Mapping[str, str]) -> WorkerHandle:
        for one in self._slots:  # all slots at once, because each slot takes a second or two
            seat = self._seats.get(one.index)
            death = seat.worker.death if seat is not None and seat.worker is not None else None
            if seat is None or (death is not None and death.verdict is not None):  # the actor is gone
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
        actor = (
            self._cluster.ray.remote(SlotActor)
            .options(
                num_cpus=self._settings.threads,
                num_gpus=self._gpus,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=CALLS_AT_ONCE,
                scheduling_strategy="SPREAD",
            )
            .remote()
        )
        return _Seat(actor, actor.place.remote(str(Path.cwd()), str(self._settings.folder)))

    def _placed(self, slot: Slot, seat: _Seat) -> Place:
        ray = self._cluster.ray
        threads = self._settings.threads
        needs = plural(threads, "CPU") + (" and a GPU" if self._gpus else "")
        try:
            place: Place = ray.get(seat.asked, timeout=PLACE_SECONDS)
            require(
                place.version == version("bssearch"),
                f"slot {slot.index}: {place.machine} has bssearch {place.version}, "
                f"but this machine has {version('bssearch')}",
                hint="install the same version of bssearch on each node",
                error=LaunchError,
            )
            require(
                place.has_folder or (self._settings.program is None and ".py" not in self._settings.workload),
                f"slot {slot.index}: {place.machine} has no folder {self._settings.folder}",
                hint="put the workload at the same path on each node, on a shared file system",
                error=LaunchError,
            )
        except ray.exceptions.GetTimeoutError:
            self._leave(slot)
            raise _NoNodeError(
                f"slot {slot.index}: for {PLACE_SECONDS:g} s no node of the Ray cluster had {needs} free", slot.index
            ) from None
        except ray.exceptions.RayError as error:
            self._leave(slot)
            raise (LaunchError if isinstance(error, ray.exceptions.RayTaskError) else _ActorLostError)(
                f"slot {slot.index}: the Ray actor does not start: {said_by(error)}",
                hint="check the nodes with `ray status`, and install this machine's versions of bssearch and Ray on "
                "each node",
            ) from error
        except LaunchError:
            self._leave(slot)
            raise
        self._had_a_node.add(slot.index)
        return place

    def _leave(self, slot: Slot) -> None:
        self._cluster.ray.kill(self._seats.pop(slot.index).actor, no_restart=True)

    def _load_of(self, slot: Slot) -> Load:
        # The worker sees only its own devices.
        return Load(settings=replace(self._settings, slots=1), slot=0, revision=self._revision)

    def _worker_environment(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name == DATA_DIR_VARIABLE},
            **super()._worker_environment(),
        }

    def _about_idle_devices(self) -> str | None:
        words = (
            f"executor.slots = {self.slots}, but the Ray cluster has room for {self._room} slots with a GPU; set "
            "executor.slots = auto to use the whole cluster"
        )
        return words if self._gpus and self.slots < self._room else None

    def _take(self, worker: WorkerHandle, reply: Reply | None) -> None:
        if isinstance(reply, Loaded):
            assert isinstance(worker, ActorWorker) and reply.device_name is not None
            kind, machine = self._kind = self._kind or (reply.device_name, worker.machine)
            if reply.device_name != kind:
                reply = Refused(
                    error="launch",
                    message=f"slot {worker.slot}: {worker.machine} has {reply.device_name}, but {machine} has {kind}: "
                    "times on different kinds of device are not comparable",
                    hint="use a Ray cluster with one kind of device, or one study per kind of device",
                )
        super()._take(worker, reply)


class _ActorLostError(LaunchError):
    pass


class _NoNodeError(LaunchError):
    def __init__(self, message: str, slot: int) -> None:
        super().__init__(message, hint="wait for free resources, which `ray status` lists, or add a node")
        self.slot = slot


def _gpus_of_a_slot(settings: ExecutorSettings, nodes: Sequence[Node]) -> int:
    require(
        settings.device in {"auto", "cpu", "cuda"},
        f"executor.device = {settings.device!r} must be auto, cpu or cuda with the executor ray, "
        "because Ray chooses the GPU",
    )
    there_are = any(node.gpus >= 1 for node in nodes)
    require(
        settings.device != "cuda" or there_are,
        "executor.device = 'cuda': no node of the Ray cluster has a GPU",
        hint="set executor.device: auto, or add a node with a GPU to the cluster",
    )
    return int(there_are and settings.device != "cpu")


def _check_checkpoint_place(nodes: Sequence[Node]) -> None:
    url = checkpoint_url()
    machines = len({node.name for node in nodes})
    require(
        url is None or machines <= 1,
        f"{CHECKPOINT_DIR_VARIABLE} = {str(url).partition('://')[0]}://… must be a folder, because the Ray cluster has "
        f"{machines} machines and only the driver's machine can use an object store",
        hint="name a folder that all machines share",
    )


def _room(settings: ExecutorSettings, nodes: Sequence[Node], gpus: int) -> int:
    most = int(max((node.cpus for node in nodes), default=0))
    require(
        settings.threads <= most,
        f"executor.threads = {settings.threads} must be <= {most}, the CPU count of the Ray cluster's largest node",
        hint="lower executor.threads, or add a node with more CPUs",
    )
    room = sum(node.slots(settings.threads, gpus) for node in nodes)
    require(
        room,
        f"no node of the Ray cluster with a GPU has {plural(settings.threads, 'CPU')} (executor.threads)",
        hint="lower executor.threads, or add a node with a GPU and more CPUs",
    )
    require(
        settings.least_slots <= room,
        f"executor.slots = {settings.slots} must be <= {room}, the Ray cluster's room for slots with "
        f"{'a GPU and ' if gpus else ''}executor.threads = {settings.threads}",
        hint="set executor.slots = auto to use the whole cluster",
    )
    return room
