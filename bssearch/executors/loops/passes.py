"""The passes of a loop over its data, and the order of bssearch's own loop for a loader of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.data import Sampler

from bssearch.errors import UsageError
from bssearch.executors.loops.assignment import Assignment, LoopStages
from bssearch.executors.loops.following import Asked


class SeededSampler(Sampler[int]):
    """The rows of one epoch after the other, each a new permutation; the last, incomplete batch is left out.

    Each pass is the next epoch; its length is a whole number of batches. The first one leaves out what the first
    ``after_steps`` steps of ``batch_size`` samples have seen. Raises `UsageError` where a batch is larger than the
    data.
    """

    def __init__(self, samples: int, batch_size: int, seed: int, *, after_steps: int = 0) -> None:
        if batch_size > samples:
            raise UsageError(f"batch_size = {batch_size} must be <= {samples}, the number of training samples")
        self._samples = samples
        self._whole = samples - samples % batch_size
        self._generator = torch.Generator().manual_seed(seed)
        passed, self._seen = divmod(after_steps * batch_size, self._whole)
        for _ in range(passed):
            self._next_epoch()

    @property
    def is_at_start(self) -> bool:
        """Return whether the next pass is a whole epoch."""
        return self._seen == 0

    def __len__(self) -> int:
        return self._whole

    def __iter__(self) -> Iterator[int]:
        rows = self._next_epoch()[self._seen : self._whole]
        self._seen = 0
        yield from rows.tolist()

    def _next_epoch(self) -> torch.Tensor:
        return torch.randperm(self._samples, generator=self._generator)


class RankSampler(SeededSampler):
    """One rank's share of what `SeededSampler` yields: of each micro-batch of all ranks ``share`` rows in a row.

    So the samples of a batch are the same, however many ranks share it.
    """

    def __init__(
        self, samples: int, batch_size: int, seed: int, *, share: int, rank: int, ranks: int, after_steps: int = 0
    ) -> None:
        super().__init__(samples, batch_size, seed, after_steps=after_steps)
        self._share = share
        self._rank = rank
        self._ranks = ranks

    def __len__(self) -> int:
        return super().__len__() // self._ranks

    def __iter__(self) -> Iterator[int]:
        rows = list(super().__iter__())
        for start in range(self._rank * self._share, len(rows), self._ranks * self._share):
            yield from rows[start : start + self._share]


class GrowingSampler(SeededSampler):
    """The rows from a trial's next step on, one epoch after the other; see `bssearch.training.batches.Growth`.

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


T = TypeVar("T")

MakeLoader = Callable[[int], Iterable[T]]
Given = Iterable[T] | MakeLoader[T]


class Passes(Generic[T]):
    """The passes over what was ``given`` to `batches`; ``now`` gives the seconds by which waits are timed.

    Where the batch grows a loader keeps its micro-batches. Raises `UsageError` where a later batch is not made of
    them.
    """

    def __init__(
        self,
        given: Given[T],
        assignment: Assignment,
        asked: Asked,
        sampler: Callable[[], SeededSampler | None],
        now: Callable[[], float],
    ) -> None:
        self._assignment = assignment
        self._asked = asked
        self._sampler = sampler
        self._now = now
        self._size: int | None = None
        self._make: MakeLoader[T] | None = None
        self._loader: Iterable[T] = ()
        self._pass: Iterable[T] = ()
        self._is_empty = True
        if callable(given) and not _is_loader(given):
            self._make = given
            asked.note("micro_batch_size")
        else:
            self._loader = cast(Iterable[T], given)
            assignment.stages.keep_micro_batches()

    def first(self, size: int, steps: int) -> None:
        """Begin the first pass, after so many steps; of a trial that was paused in a pass go on where it was.

        A loader draws random numbers as a pass over it begins: those of the moment of the pause follow that. Where it
        was paused between two loaders the first one is made once more, for the generators that the two may share.
        """
        stages = self._assignment.stages
        if stages.has_new_micro_batches(steps):
            self.begin(stages.last(steps).micro_batch_size)
            self._assignment.skipped()
        behind = self.begin(size)
        sampler = self._sampler()
        if behind is None or (sampler is not None and sampler.is_at_start):
            return
        batches = iter(self._loader)
        for _ in range(behind):
            next(batches, None)
        self._assignment.skipped()
        self._pass = batches

    def batches(self) -> Iterator[T]:
        """Yield the micro-batches of the pass at hand; the waits for them are noted."""
        entered, self._is_empty = self._now(), True
        for batch in self._pass:
            self._is_empty = False
            self._assignment.waited(self._now() - entered)
            yield batch
            entered = self._now()

    def check(self, size: int) -> None:
        """Raise `UsageError` where a pass was empty; the rest of one that was begun before a pause may be."""
        if self._is_empty and self._pass is self._loader:
            raise UsageError(
                f"the loader of batches() is empty, at a micro-batch size of {size}",
                hint="drop_last leaves fewer samples out; an iterator can be gone through once",
            )

    def begin(self, size: int) -> int | None:
        """Begin another pass, with micro-batches of a size; return how many of them are to be skipped, if any."""
        if self._make is not None:
            self._asked.note("micro_batch_size")
            if size != self._size:
                self._loader, self._size = _checked(self._make(size)), size
        self._pass = self._loader
        return self._assignment.passes(self._loader, self._sampler() is not None)


def _is_loader(given: object) -> bool:
    return hasattr(given, "__getitem__") or isinstance(given, Iterable)


def _checked(made: Any) -> Any:
    if not _is_loader(made):
        raise UsageError(
            f"the function given to batches() returned a {type(made).__name__}; it must return a loader",
            hint="trial.batches(lambda size: DataLoader(data, batch_size=size, ...))",
        )
    return made
