"""Runs trials on this machine: one long-lived worker process per slot."""

from __future__ import annotations

from collections.abc import Mapping

from bssearch.errors import LaunchError
from bssearch.executors.base import ExecutorSettings, check_threads
from bssearch.executors.process import Worker, WorkerProcess
from bssearch.executors.slots import Slot, SlotExecutor


class LocalExecutor(SlotExecutor):
    """Runs trials in worker processes on this machine; see `bssearch.executors.base.Executor`.

    Call the executor from one thread, and from one that outlives it: the kernel ends the workers with the thread that
    started them. Raises `UsageError` for more threads than there are CPUs.
    """

    def __init__(self, settings: ExecutorSettings) -> None:
        check_threads(settings)
        super().__init__(settings)

    def _started(self, slot: Slot, environment: Mapping[str, str]) -> Worker:
        """Return a new worker process for a slot."""
        try:
            return WorkerProcess(
                slot=slot.index,
                threads=self._settings.threads,
                log=slot.log,
                inbox=self._inbox,
                environment=environment,
            )
        except OSError as error:
            raise LaunchError(f"the worker of slot {slot.index} cannot be started: {error}") from error
