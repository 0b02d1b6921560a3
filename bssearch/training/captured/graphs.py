"""Work on a device, recorded once and replayed: CUDA graphs, behind a seam that a test on a CPU can stand in for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from bssearch.training.memory import peak_memory_bytes, reset_peak_memory

Work = Callable[[], None]

FAILED: list[str] = []
"""What recordings failed of in this process. PyTorch may go on to take its random numbers and memory for those of a
recording: its generator then refuses to draw outside of one."""

STREAMS: dict[torch.device, torch.cuda.Stream] = {}
"""The stream of all recordings on a device. PyTorch keeps a workspace for cuBLAS of each stream (32 MiB with
``:4096:8``, in each thread): with a new stream for each trial they would pile up, and count towards the next one's
peak."""


class Graphs(Protocol):
    """Records the work of one trial; its graphs share one memory pool and are replayed in the order of recording."""

    def apart(self, work: Work) -> None:
        """Do work where it will be recorded, after what came before and before what comes next."""
        ...

    def refusing_waits(self) -> AbstractContextManager[None]:
        """Return a block in which PyTorch raises `RuntimeError` where the host would wait for the device."""
        ...

    def record(self, work: Work) -> Work:
        """Return what replays the work; it is not done now."""
        ...

    def close(self) -> None:
        """Let go of all that was recorded; nothing can be replayed any more."""
        ...

    @property
    def peak_bytes(self) -> int | None:
        """Return the most that tensors held up to the last recording, None where nobody says."""
        ...

    @property
    def idle_bytes(self) -> int:
        """Return what the pool keeps for replays and no tensor holds."""
        ...


class CudaGraphs:
    """CUDA graphs on one device (PyTorch's "CUDA semantics", section CUDA Graphs).

    A replay allocates nothing: what it needs lies in the pool from the recording on, and counts towards the peak.
    Recording is bound to this thread alone (``thread_local``): another one may draw an epoch's order meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device not in STREAMS:
            STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream = STREAMS[device]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._before: tuple[int, int] | None = None
        self.peak_bytes: int | None = None
        self.idle_bytes = 0

    def apart(self, work: Work) -> None:
        """Do work on the stream of the recordings: autograd keeps the stream that a parameter was first used on."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    @contextmanager
    def refusing_waits(self) -> Iterator[None]:
        """Have PyTorch raise where the host would wait for the device (`torch.cuda.set_sync_debug_mode`)."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():  # it warns that it is a prototype, and does not know every wait
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def record(self, work: Work) -> Work:
        """Return what replays the work; it is not done now. Raises what PyTorch does where it cannot be recorded."""
        if self._before is None:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            self._before = self._memory()
        graph, failures = torch.cuda.CUDAGraph(), []
        self._graphs.append(graph)
        # Where the end of a failed recording raises, PyTorch does not go back to the stream from before, as this does.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)):
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    try:
                        work()
                    except BaseException as error:
                        failures.append(error)
                        raise
            except BaseException as error:
                FAILED.append(type(error).__name__)
                if failures:  # what the work raised, and not that it could not be recorded
                    raise failures[0] from None
                raise
        reserved, allocated = (now - then for now, then in zip(self._memory(), self._before, strict=True))
        self.idle_bytes = max(0, reserved - allocated)
        self.peak_bytes = max(self.peak_bytes or 0, peak_memory_bytes(self._device) or 0)
        reset_peak_memory(self._device)
        replay: Work = graph.replay
        return replay

    def close(self) -> None:
        """Let go of the graphs now, not when the last reference to them goes.

        With a graph newer PyTorch gives cuBLAS's workspace of the stream back. By the time of a later collection that
        would be the workspace of the next trial's graphs.
        """
        while self._graphs:
            self._graphs.pop().reset()

    def _memory(self) -> tuple[int, int]:
        return torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
