"""A stand-in for worker processes on a machine with GPUs: it answers at once, without computing."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bssearch.executors import slots as local
from bssearch.executors.base import (
    Command,
    Load,
    Loaded,
    Refused,
)
from bssearch.executors.process import Death, Inbox, WorkerHandle
from bssearch.records import MemoryRequest, MemoryUse, StepTime, StepTimeRequest, TrialRequest
from tests.executors.fake import DESCRIPTION


class Node:
    """A machine with some CUDA devices, perhaps 0; keeps the commands to its workers.

    ``step_seconds``: seconds of a step on each device.
    """

    def __init__(self, devices: int, step_seconds: Mapping[int, float] | None = None) -> None:
        self.devices = devices
        self.step_seconds = step_seconds or {}
        self.workers: list[ScriptedWorker] = []
        self.refuses: int | None = None
        """Number of the device that cannot time steps."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the local executor start workers here."""

        def start(**given: Any) -> ScriptedWorker:
            self.workers.append(ScriptedWorker(self, **given))
            return self.workers[-1]

        monkeypatch.setattr(local, "WorkerProcess", start)
        monkeypatch.setattr(local, "may_have_gpus", lambda: self.devices > 0)

    def told(self, kind: type[Any]) -> list[tuple[int, Any]]:
        """Return all commands of a kind with the number of the worker, counted from the first that was started."""
        return [(at, one) for at, worker in enumerate(self.workers) for one in worker.told if isinstance(one, kind)]


class ScriptedWorker(WorkerHandle):
    """A worker of a `Node`, in place of a `WorkerProcess`; its trials never end by themselves."""

    def __init__(
        self,
        node: Node,
        *,
        slot: int,
        log: Path,
        inbox: Inbox,
        threads: int,
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(slot, log, inbox)
        self.environment = environment
        self.told: list[Command] = []
        self._node = node
        self._has_ended = False

    @property
    def device(self) -> int:
        """The number of the slot's device."""
        return self.slot % max(1, self._node.devices)

    def send(self, command: Command) -> None:
        """Keep the command, and answer it."""
        self.told.append(command)
        match command:
            case Load():
                name = f"cuda:{self.device}" if self._node.devices else "cpu"
                uuid = f"GPU-{self.device}" if self._node.devices else None
                self.reply(Loaded(device=name, device_uuid=uuid, devices=max(1, self._node.devices)))
            case "describe":
                self.reply(DESCRIPTION)
            case StepTimeRequest() if self.device == self._node.refuses:
                self.reply(Refused(error="launch", message="no device"))
            case StepTimeRequest():
                one, seconds = command.configuration, self._node.step_seconds.get(self.device, 0.01)
                self.reply(
                    StepTime(
                        batch_size=one.batch_size,
                        micro_batch_size=one.micro_batch_size,
                        step_seconds=seconds,
                        evaluation_seconds=seconds,
                        steps_timed=10,
                        peak_memory_bytes=None,
                    )
                )
            case MemoryRequest():
                micro = command.configuration.micro_batch_size
                self.reply(MemoryUse(micro_batch_size=micro, fits=True, peak_memory_bytes=None))
            case "exit":
                self.kill()
            case TrialRequest():
                pass

    def has_exited(self) -> bool:
        return self._has_ended

    def write_stack(self) -> None:
        """Do nothing."""

    def kill(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self.reply(None)

    def bury(self) -> Death:
        return Death(-signal.SIGKILL)
