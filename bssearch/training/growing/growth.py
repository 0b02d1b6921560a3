"""Which batch the next step of a trial has, where that changes, and the rows that it is made of."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Generator, Iterator
from typing import Any

import torch

from bssearch.batch_schedule import Stage, batch_schedule_of, stages_of
from bssearch.errors import WorkloadError
from bssearch.records import Configuration


class Growth:
    """Where a trial stands in its batch schedule; one without a schedule has a single stage.

    ``samples`` and ``micro_batches`` are those of the steps so far, ``epoch`` and ``offset`` the place of the next
    step's first sample: the whole epochs before it and the samples of its own. An epoch ends where what is left of it
    is less than the next batch. ``train_samples`` is None where the workload makes its batches itself.
    """

    def __init__(self, configuration: Configuration, train_samples: int | None) -> None:
        self._train_samples = train_samples
        self.schedule = batch_schedule_of(configuration)
        self.stages = stages_of(configuration, self.schedule)
        self.samples = self.micro_batches = self.epoch = self.offset = 0
        self._place = 0
        self._check()

    @property
    def stage(self) -> Stage:
        """Return the stage of the next step."""
        return self.stages[self._place]

    @property
    def next_size(self) -> int | None:
        """Return the batch size of the stage after this one, None in the last."""
        following = self.stages[self._place + 1 : self._place + 2]
        return following[0].batch_size if following else None

    @property
    def place(self) -> int:
        """Return the place of the next step's stage among the stages."""
        return self._place

    @property
    def position(self) -> int:
        """Return the whole steps of the first batch size that see so many samples: the rate's schedule counts these."""
        return self.samples // self.stages[0].batch_size

    @property
    def rate_factor(self) -> float:
        """Return what the learning rate is multiplied by at the batch size of the next step."""
        return 1.0 if self.schedule is None else self.schedule.rate_factor(self.stage.batch_size)

    @property
    def is_measured(self) -> bool:
        """Return whether the trial decides by what it measures when its batch grows."""
        return self.schedule is not None and self.schedule.is_measured

    def stepped(self) -> None:
        """Take note of a step, and begin the stage that is due."""
        stage = self.stage
        self.samples += stage.batch_size
        self.offset += stage.batch_size
        self.micro_batches += stage.accumulation_steps
        if not self.is_measured:
            while self._place + 1 < len(self.stages) and self.stages[self._place + 1].start_samples <= self.samples:
                self._place += 1
        self._end_epoch()

    def grow(self) -> None:
        """Begin the next stage; of a schedule that is measured, whose trial says when."""
        self._place += 1
        self._end_epoch()

    def ahead(self) -> Growth:
        """Return what goes on from here by itself, for who prepares batches before their steps."""
        return copy.copy(self)

    def state(self) -> dict[str, Any]:
        """Return where it stands, to be saved."""
        return {
            "samples": self.samples,
            "micro_batches": self.micro_batches,
            "epoch": self.epoch,
            "offset": self.offset,
            "place": self._place,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved place."""
        self.samples, self.micro_batches = state["samples"], state["micro_batches"]
        self.epoch, self.offset, self._place = state["epoch"], state["offset"], state["place"]

    def _end_epoch(self) -> None:
        if self._train_samples is not None and self.offset + self.stage.batch_size > self._train_samples:
            self.epoch, self.offset = self.epoch + 1, 0

    def _check(self) -> None:
        """Raise `WorkloadError` for a batch that the training part does not hold, or a stream cannot make."""
        for stage in self.stages:
            if self._train_samples is None and stage.micro_batch_size != self.stages[0].micro_batch_size:
                raise WorkloadError(
                    f"batch {stage.batch_size} has micro-batches of {stage.micro_batch_size}: where the workload makes "
                    f"its batches itself they must stay at {self.stages[0].micro_batch_size}"
                )
            if self._train_samples is not None and stage.batch_size > self._train_samples:
                raise WorkloadError(
                    f"batch_size = {stage.batch_size} must be <= {self._train_samples}, the number of training samples"
                )


def growing_rows(
    epochs: Iterator[torch.Tensor], growth: Growth, *, ahead: bool = False
) -> Generator[torch.Tensor, None, None]:
    """Yield the rows (micro-batch size,) of each micro-batch of the steps from where a trial stands.

    ``epochs`` are the whole orders (training samples,) from the trial's epoch on. The next step's are those of the
    stage in force when the first of them is asked for; with ``ahead`` it moves on by itself.
    """
    try:
        for epoch, order in zip(itertools.count(growth.epoch), epochs):
            while growth.epoch == epoch:
                stage, begin = growth.stage, growth.offset
                yield from torch.split(order[begin : begin + stage.batch_size], stage.micro_batch_size)
                if ahead:
                    growth.stepped()
    finally:
        if isinstance(epochs, Generator):
            epochs.close()
