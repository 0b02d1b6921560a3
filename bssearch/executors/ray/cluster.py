"""Connection to a Ray cluster."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

from bssearch.errors import LaunchError, UsageError
from bssearch.executors.process import hide_secrets, is_secret
from bssearch.settings import environment_with

CONNECT_SECONDS = 30.0  # for a cluster to answer

STORE_BYTES = 100 * 2**20  # near Ray's minimum of 75 MiB; actors' replies are not stored there

# environment of a local Ray
OWN_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",  # tell nobody
    "RAY_worker_niceness": "0",  # trials run beside other programs as those of the executor local do
    "RAY_memory_monitor_refresh_ms": "0",  # what runs out of memory is the kernel's business, as for the executor local
}


_SIGACTION_BYTES = 512  # above sigaction(2)'s structure size everywhere; 152 on Linux


@dataclass(frozen=True, slots=True)
class Node:
    """A node's total CPUs and GPUs."""

    name: str
    cpus: float
    gpus: float

    def slots(self, threads: int, gpus: int) -> int:
        """Slots of these threads and GPUs that fit."""
        return int(min([self.cpus // threads, *([self.gpus // gpus] if gpus else [])]))


class Cluster:
    """A connection to a Ray cluster; without ``address``, to a local Ray that ends with this process.

    Reuses an open connection and keeps it. Raises `UsageError` if Ray is missing or the address is invalid,
    `LaunchError` if no cluster answers.
    """

    def __init__(self, address: str | None) -> None:
        if address is not None and "://" in address:
            raise UsageError(
                f"executor.address = {address!r} must be auto or HOST:PORT: bssearch runs on a machine of the cluster",
                hint="`ray job submit -- bssearch run …` runs it there",
            )
        self.ray = _imported()
        self._is_own = not self.ray.is_initialized()
        self._is_begun = self._is_own and address is None
        if not self._is_own:
            return
        hide_secrets()
        with _unchanged_by_ray():
            if address is None:
                self._begin()
            else:
                self._connect(address)

    def _begin(self) -> None:
        try:
            with environment_with(OWN_RAY):
                self.ray.init("local", include_dashboard=False, object_store_memory=STORE_BYTES, **_quiet())
        except Exception as error:
            raise LaunchError(f"Ray cannot be started on this machine: {said_by(error)}") from error

    def _connect(self, address: str) -> None:
        failures: list[Exception] = []

        def connect() -> None:
            try:
                self.ray.init(address=address, **_quiet())
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=connect, name="bssearch ray", daemon=True)
        thread.start()
        thread.join(CONNECT_SECONDS)
        if failures or thread.is_alive():
            why = said_by(failures[0]) if failures else f"no answer for {CONNECT_SECONDS:g} s"
            raise LaunchError(
                f"executor.address = {address!r}: no Ray cluster can be reached there: {why}",
                hint="`ray status` says whether there is one; without executor.address one is started on this machine",
            )

    def nodes(self) -> list[Node]:
        """Live nodes."""
        return [
            Node(one["NodeManagerHostname"], one["Resources"].get("CPU", 0.0), one["Resources"].get("GPU", 0.0))
            for one in self.ray.nodes()
            if one["Alive"]
        ]

    def close(self) -> None:
        """Disconnect; stop a local Ray. Idempotent."""
        if self._is_own:
            self._is_own = False
            if self._is_begun:
                _kill_autoscaler()
            with _sigterm_as_it_is():
                self.ray.shutdown()


def said_by(error: Exception) -> str:
    """A Ray error as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if any(line.startswith('File "') for line in lines) else lines[0]


def _kill_autoscaler() -> None:
    """A local Ray's autoscaler delays shutdown by a second."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if any(word.endswith("monitor.py") and "autoscaler" in word for word in child.cmdline()):
                child.kill()


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


def _quiet() -> Mapping[str, Any]:
    """Keep Ray silent: stdout is for the answer."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    return {"log_to_driver": False, "configure_logging": False}


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _unchanged_by_ray() -> Iterator[None]:
    """Hide environment, command line and stdout from Ray; keep the SIGTERM handler.

    Ray's processes inherit the environment, and clusters show command lines; both may hold secrets.
    """
    private = importlib.import_module("ray._private")
    instead = {
        (private.utils, "get_entrypoint_name"): lambda: "bssearch",
        (private.worker, "listen_error_messages"): lambda *_: None,
    }
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    secrets = {name: value for name, value in os.environ.items() if is_secret(name, value)}
    for name in secrets:
        del os.environ[name]
    try:
        with _sigterm_as_it_is(), ExitStack() as stack:
            for (module, name), function in instead.items():
                if hasattr(module, name):
                    stack.enter_context(_replaced(module, name, function))
            yield
    finally:
        os.environ.update(secrets)
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _sigterm_as_it_is() -> Iterator[None]:
    """Ray replaces the handler from any thread; `signal` restores it only in the main thread."""
    libc = ctypes.CDLL(None)
    before = ctypes.create_string_buffer(_SIGACTION_BYTES)
    libc.sigaction(signal.SIGTERM, None, before)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, before, None)
