"""Batches that a workload's samples are collated to, and batches that a workload makes itself.

The random numbers that are drawn on the way, such as by a ``Dataset`` that augments its samples, follow from the
trial's seed and the position of the micro-batch: they are the same for any number of loader processes, and where a
paused trial goes on.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from bssearch.errors import WorkloadError
from bssearch.training.own.seeding import seed_of, seeded
from bssearch.workloads.data import Batch, BatchStream, DatasetPart, pair_of
from bssearch.workloads.nested import moved, tensors

Place = tuple[int, npt.NDArray[np.int64]]
"""A micro-batch's position in the trial, and its rows."""

_END = object()


class CollatedSamples(Dataset[Batch]):
    """Collates the samples of a micro-batch, in a process that loads data or in the trial's own."""

    def __init__(self, part: DatasetPart, seed: int) -> None:
        self._part = part
        self._seed = seed

    def __getitem__(self, place: Place) -> Batch:
        position, rows = place
        with seeded(self._seed, position):
            return self._part.gather(torch.from_numpy(rows))


def streamed(
    stream: BatchStream, micro_batch_size: int, device: torch.device, seed: int, *, skip: int
) -> Generator[Batch, None, None]:
    """Return the workload's own micro-batches on the device, epoch after epoch, without the first ``skip``.

    These are made now, and dropped. Raises `WorkloadError` for a batch of another size, and for an epoch without one.
    """
    batches = _endless(stream, micro_batch_size, device, seed)
    for _ in range(skip):
        next(batches)
    return batches


def _endless(stream: BatchStream, size: int, device: torch.device, seed: int) -> Generator[Batch, None, None]:
    position, epoch = 0, 0
    while True:
        begun_at = position
        for batch in _whole_batches(_epoch(stream, size, seed, epoch, position), size):
            yield moved(batch, device)
            position += 1
        if position == begun_at:
            raise WorkloadError(f"train_batches(batch_size={size}) gave no batch of {size} samples in an epoch")
        epoch += 1


def _epoch(stream: BatchStream, size: int, seed: int, epoch: int, position: int) -> Iterator[Batch]:
    """Yield the batches of one epoch as the workload makes them."""
    with seeded(seed, position):
        made = stream.train_batches(size, seed_of(seed, epoch))
        if not isinstance(made, Iterable):
            raise WorkloadError(f"train_batches() returned a {type(made).__name__}; it must be an iterable of batches")
        batches = iter(made)
    while True:
        with seeded(seed, position):
            batch: Any = next(batches, _END)
        if batch is _END:
            return
        yield pair_of(batch, "train_batches()")
        position += 1


def _whole_batches(batches: Iterator[Batch], size: int) -> Iterator[Batch]:
    """Yield the batches that have as many samples as asked; the last one may have fewer and is left out."""
    short = None
    for batch in batches:
        samples = _samples_in(batch)
        if short is not None or samples > size:
            wrong = samples if short is None else short
            raise WorkloadError(
                f"train_batches(batch_size={size}) gave a batch of {wrong} samples; it must have {size}, "
                "and only the last of an epoch may have fewer"
            )
        if samples < size:
            short = samples
        else:
            yield batch


def _samples_in(batch: Batch) -> int:
    """Return the rows of the first tensor of a batch."""
    found = [tensor for part in batch for tensor in tensors(part) if tensor.ndim]
    if not found:
        raise WorkloadError("train_batches() gave a batch without a tensor of shape (samples, …)")
    return len(found[0])
