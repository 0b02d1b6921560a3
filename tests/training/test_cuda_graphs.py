"""How CUDA graphs are asked for, by a stand-in for PyTorch's CUDA: none of this has a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from bssearch.executors.loaded import failed, trial_ended
from bssearch.training.captured import graphs
from bssearch.training.captured.graphs import CudaGraphs

DEVICE = torch.device("cuda", 1)


class FakeCuda:
    """Streams, one allocator, and graphs that take 300 bytes of it, of which tensors hold 100 after the recording."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[Any] = []
        self.reserved, self.allocated, self.peak = 1000, 800, 900
        self.mode: int | str = 0
        self.streams = 0
        monkeypatch.setattr(graphs, "STREAMS", {})
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self.new_graph)
        for name in ("graph_pool_handle", "graph", "stream", "current_stream", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.said.append("empty"))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(self, "mode", mode))
        monkeypatch.setattr(graphs, "peak_memory_bytes", lambda device: self.peak)
        monkeypatch.setattr(graphs, "reset_peak_memory", self.reset_peak)

    def reset_peak(self, device: torch.device) -> None:
        self.peak = self.allocated

    def new_stream(self, device: torch.device) -> FakeCuda:
        self.streams += 1
        return self

    def wait_stream(self, other: Any) -> None:
        self.said.append("wait")

    def current_stream(self, device: torch.device) -> FakeCuda:
        return self

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def synchronize(self, device: torch.device) -> None:
        self.said.append("synchronize")

    def graph_pool_handle(self) -> str:
        return "pool"

    def new_graph(self) -> FakeCuda:
        return self

    def replay(self) -> None:
        self.said.append("replay")

    def reset(self) -> None:
        self.said.append("reset")

    @contextmanager
    def graph(self, graph: Any, **asked: Any) -> Iterator[None]:
        self.said.append(asked)
        yield
        self.reserved, self.allocated = self.reserved + 300, self.allocated + 100
        self.peak = self.allocated + 150


def test_the_graphs_of_a_trial_share_a_pool_and_a_stream_and_bind_this_thread_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    made = CudaGraphs(DEVICE)
    done: list[str] = []
    made.apart(lambda: done.append("apart"))
    replays = [made.record(lambda: done.append("recorded")) for _ in range(2)]
    for replay in replays:
        replay()
    asked = {"pool": "pool", "stream": cuda, "capture_error_mode": "thread_local"}
    assert cuda.said == ["wait", "wait", "synchronize", "empty", asked, asked, "replay", "replay"]
    assert done == ["apart", "recorded", "recorded"]


def test_all_trials_record_on_one_stream_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each stream that cuBLAS has seen it keeps a workspace."""
    cuda = FakeCuda(monkeypatch)
    for _ in range(3):
        CudaGraphs(DEVICE).record(lambda: None)
    assert cuda.streams == 1
    CudaGraphs(torch.device("cuda", 0))
    assert cuda.streams == 2


def test_graphs_are_gone_once_they_are_closed_those_that_failed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at a later collection: PyTorch would then free the workspace that the next graphs have on that stream."""
    monkeypatch.setattr(graphs, "FAILED", [])
    cuda = FakeCuda(monkeypatch)
    made = CudaGraphs(DEVICE)
    made.record(lambda: None)

    def fail() -> None:
        raise ValueError("cannot be recorded")

    with pytest.raises(ValueError, match="cannot be recorded"):
        made.record(fail)
    made.close()
    assert cuda.said.count("reset") == 2
    made.close()
    assert cuda.said.count("reset") == 2


def test_memory_that_only_replays_use_is_told_from_what_tensors_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    made = CudaGraphs(DEVICE)
    assert (made.peak_bytes, made.idle_bytes) == (None, 0)
    for _ in range(2):
        made.record(lambda: None)
    assert made.idle_bytes == 2 * (300 - 100)
    assert made.peak_bytes == 800 + 2 * 100 + 150 and cuda.peak == 1000


def test_waits_for_the_device_are_refused_inside_of_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    made = CudaGraphs(DEVICE)
    with pytest.raises(RuntimeError), made.refusing_waits():
        assert cuda.mode == "error"
        raise RuntimeError("called a synchronizing CUDA operation")
    assert cuda.mode == 0


def test_a_worker_in_which_a_recording_failed_takes_no_more_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "FAILED", [])
    FakeCuda(monkeypatch)

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert not trial_ended(1, failed(ValueError())).broken
    with pytest.raises(torch.OutOfMemoryError):
        CudaGraphs(DEVICE).record(fail)
    assert graphs.FAILED == ["OutOfMemoryError"] and trial_ended(1, failed(ValueError())).broken
