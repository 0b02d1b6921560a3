"""A stand-in for Ray whose actors live in this process, so that tests can lose an actor in every way."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from bssearch.executors.base import Load, Loaded, Reply, decode_command, encode
from bssearch.executors.process import Death
from bssearch.executors.ray import executor as ray_executor
from bssearch.executors.ray.executor import Heard, Node, Place
from bssearch.records import TrialRequest
from tests.executors.fake import DESCRIPTION


class RayError(Exception):
    """The base of Ray's errors."""


class RayTaskError(RayError):
    """A method of an actor has raised."""


class GetTimeoutError(RayError, TimeoutError):
    """No answer in time."""


class Never(Future[Any]):
    """A call without an answer."""


class Actor:
    """An actor on a node; its worker loads, describes, and runs trials that never end.

    If ``is_gone``, each call fails; if ``is_silent``, no call is answered.
    """

    def __init__(self, node: str, kind: str, version: str, *, has_folder: bool = True) -> None:
        self.told: list[Any] = []
        self.node, self.kind, self.version, self.has_folder = node, kind, version, has_folder
        self.is_gone = self.is_silent = self.is_killed = False
        self._death: Death | None = None
        self._replies: list[Reply] = []
        self._said = threading.Condition()
        self._threads = ThreadPoolExecutor()

    def __getattr__(self, name: str) -> Any:
        method = getattr(Actor, f"do_{name}", None)
        if method is None:
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *given: self._call(lambda: method(self, *given)))

    def _call(self, method: Callable[[], Any]) -> Future[Any]:
        return Never() if self.is_silent else self._threads.submit(self._answer, method)

    def _answer(self, method: Callable[[], Any]) -> Any:
        if self.is_gone or self.is_killed:
            raise RayError("The actor died unexpectedly before finishing this task.\n\tclass_name: SlotActor")
        found = method()
        if self.is_gone:
            raise RayError("The actor died unexpectedly before finishing this task.")
        return found

    def do_place(self, current: str, folder: str) -> Place:
        return Place(self.node, f"host of {self.node}", self.version, self.has_folder)

    def do_start(self, slot: int, threads: int, environment: Mapping[str, str]) -> int:
        self.environment = environment
        return 1000 + slot

    def do_tell(self, line: bytes) -> None:
        command = decode_command(line)
        self.told.append(command)
        match command:
            case "describe":
                self.say(DESCRIPTION)
            case "exit":
                self.do_kill()
            case Load():
                self.say(Loaded(device="cuda:0", device_uuid=f"GPU-{self.node}", device_name=self.kind))

    def do_hear(self, seconds: float) -> Heard:
        with self._said:
            self._said.wait_for(lambda: self._replies or self._death or self.is_gone, timeout=0.01)
            replies, self._replies = self._replies, []
        return Heard(b"", tuple(encode(one) for one in replies), self._death)

    def do_kill(self) -> None:
        with self._said:
            self._death = Death(-signal.SIGKILL)
            self._said.notify_all()

    def do_leave(self) -> None: ...

    def runs(self) -> list[int]:
        """Return the numbers of its trials, at least one."""
        deadline = time.monotonic() + 30
        while not (found := [one.number for one in self.told if isinstance(one, TrialRequest)]):
            assert time.monotonic() < deadline, "it was told of no trial"
            time.sleep(0.01)
        return found

    def say(self, reply: Reply) -> None:
        with self._said:
            self._replies.append(reply)
            self._said.notify_all()


class FakeRay:
    """Returns the next of ``actors`` for each request; None stands for a request without an answer."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, GetTimeoutError=GetTimeoutError)

    def __init__(self, actors: Sequence[Actor | None], nodes: Sequence[Node]) -> None:
        self.actors = list(actors)
        self.asked: list[dict[str, Any]] = []
        self.ray = self
        self._nodes = list(nodes)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the cluster that the executor finds."""
        monkeypatch.setattr(ray_executor, "Cluster", lambda address: self)

    def nodes(self) -> list[Node]:
        return self._nodes

    def close(self) -> None: ...

    def remote(self, of: type) -> FakeRay:
        return self

    def options(self, **asked: Any) -> SimpleNamespace:
        self.asked.append(asked)
        return SimpleNamespace(remote=self._next)

    def _next(self) -> Actor:
        found = self.actors.pop(0)
        if found is None:
            found = Actor("nowhere", "", "")
            found.is_silent = True
        return found

    def get(self, asked: Future[Any], timeout: float) -> Any:
        if isinstance(asked, Never):
            raise GetTimeoutError("too late")
        return asked.result(timeout=60)

    def wait(self, asked: Sequence[Future[Any]], *, num_returns: int, timeout: float) -> None: ...

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        assert no_restart
        actor.is_killed = True
