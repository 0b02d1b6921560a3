"""The order of bssearch's own loop where the batch grows, for a loader of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bssearch.integrations.growing.stages import LoopStages
from bssearch.integrations.sampler import SeededSampler


class GrowingSampler(SeededSampler):
    """The rows from a trial's next step on, one epoch after the other; see `bssearch.training.growing.growth.Growth`.

    An epoch ends where what is left of it is less than the next batch. A pass ends with its epoch, or before the first
    step whose micro-batches have another size; the next pass goes on there. ``steps`` returns those that are done: a
    pass begins after them, whatever a pass before it has yielded. Raises `UsageError` where the largest batch is larger
    than the data.
    """

    def __init__(self, samples: int, stages: LoopStages, seed: int, steps: Callable[[], int]) -> None:
        super().__init__(samples, stages.largest, seed)
        self._stages = stages
        self._steps = steps
        self._done = self._epoch = self._offset = 0
        self._order: tuple[int, torch.Tensor] = -1, torch.empty(0)

    @property
    def is_at_start(self) -> bool:
        """Return whether the next pass begins with its epoch."""
        self._catch_up()
        return self._offset == 0

    def __len__(self) -> int:
        self._catch_up()
        return self._end - self._offset

    def __iter__(self) -> Iterator[int]:
        self._catch_up()
        drawn, order = self._order
        while drawn < self._epoch:
            drawn, order = drawn + 1, self._next_epoch()
        self._order = drawn, order
        yield from order[self._offset : self._end].tolist()

    @property
    def _end(self) -> int:
        """Return where the next pass ends in its epoch."""
        steps, end = self._done, self._offset
        while True:
            end += self._stages.at(steps).batch_size
            steps += 1
            if end + self._stages.at(steps).batch_size > self._samples or self._stages.has_new_micro_batches(steps):
                return end

    def _catch_up(self) -> None:
        """Take note of the steps that were done."""
        while self._done < self._steps():
            self._offset += self._stages.at(self._done).batch_size
            self._done += 1
            if self._offset + self._stages.at(self._done).batch_size > self._samples:
                self._epoch, self._offset = self._epoch + 1, 0


def sampler_of(
    samples: int, stages: LoopStages, seed: int, steps: Callable[[], int], samples_behind: int
) -> SeededSampler:
    """Return the sampler of a trial; ``steps`` returns those that are done, ``samples_behind`` were seen by them."""
    if stages.grows:
        return GrowingSampler(samples, stages, seed, steps)
    size = stages.at(0).batch_size
    return SeededSampler(samples, size, seed, after_steps=samples_behind // size)
