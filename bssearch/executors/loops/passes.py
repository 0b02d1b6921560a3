"""Passes over the training data, and samplers."""

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar, cast

import torch
from torch.utils.data import Sampler

from bssearch.errors import require
from bssearch.executors.loops.assignment import Assignment, LoopStages
from bssearch.executors.loops.following import FieldsRead
from bssearch.executors.loops.pitfalls import about_order
from bssearch.training.batches import TokenBatches, TokenStep

FEWER_SAMPLES = "lower space.batch_size.high in the spec, or use more training data"


class SeededSampler(Sampler[int]):
    """Yields a new permutation of the samples per epoch, except the last incomplete batch.

    The sampler skips the batches of ``after_steps`` steps. A rank draws ``share`` of every ``share`` × ``ranks``
    samples, so the number of ranks does not change the batches.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        seed: int,
        *,
        after_steps: int = 0,
        share: int = 1,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        require(
            batch_size <= samples,
            f"batch_size = {batch_size} must be <= {samples}, the number of training samples",
            hint=FEWER_SAMPLES,
        )
        self._samples = samples
        self._whole = samples - samples % batch_size
        self._share, self._rank, self._ranks = share, rank, ranks
        self._generator = torch.Generator().manual_seed(seed)
        passed, self._seen = divmod(after_steps * batch_size, self._whole)
        for _ in range(passed):
            self._next_epoch()

    @property
    def is_at_start(self) -> bool:
        """True if the next pass is a whole epoch."""
        return self._seen == 0

    def __len__(self) -> int:
        return self._whole // self._ranks

    def __iter__(self) -> Iterator[int]:
        rows = self._next_epoch()[self._seen : self._whole].tolist()
        self._seen = 0
        for start in range(self._rank * self._share, len(rows), self._ranks * self._share):
            yield from rows[start : start + self._share]

    def _next_epoch(self) -> torch.Tensor:
        return torch.randperm(self._samples, generator=self._generator)


class GrowingSampler(SeededSampler):
    """A sampler for a batch size schedule.

    A pass ends with the epoch, or before the micro-batch size changes. The next pass starts after step ``steps()``.
    """

    def __init__(self, samples: int, stages: LoopStages, seed: int, steps: Callable[[], int]) -> None:
        super().__init__(samples, stages.largest, seed)
        self._stages = stages
        self._steps = steps
        self._done = self._epoch = self._offset = 0
        self._order: tuple[int, torch.Tensor] = -1, torch.empty(0)

    @property
    def is_at_start(self) -> bool:
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
        steps, end = self._done, self._offset
        while True:
            end += self._stages.at(steps).batch_size
            steps += 1
            if end + self._stages.at(steps).batch_size > self._samples or self._stages.has_new_micro_batches(steps):
                return end

    def _catch_up(self) -> None:
        while self._done < self._steps():
            self._offset += self._stages.at(self._done).batch_size
            self._done += 1
            if self._offset + self._stages.at(self._done).batch_size > self._samples:
                self._epoch, self._offset = self._epoch + 1, 0


class TokenSampler(Sampler[list[int]]):
    """Yields a rank's share of `TokenBatches`."""

    def __init__(self, batches: TokenBatches, rank: int, ranks: int, after_steps: int) -> None:
        self._batches = batches
        self._rank = rank
        self._ranks = ranks
        self._epoch = batches.epoch()
        self.is_at_start = True
        self._drawn = 0
        self._steps: dict[int, TokenStep] = {}  # by number; a loader draws steps ahead of the training
        while self._drawn < after_steps:
            if (step := next(self._epoch, None)) is None:
                self._epoch = batches.epoch()
            else:
                self._note(step)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._epoch:
            self._note(step)
            yield from self._own(step)
        self._epoch, self.is_at_start = self._batches.epoch(), True

    def tokens(self, number: int) -> list[list[int]]:
        """Return each sample's number of tokens in all ranks' micro-batches of step ``number``.

        The sampler forgets earlier steps.
        """
        for earlier in [one for one in self._steps if one < number]:
            del self._steps[earlier]
        return [[self._batches.lengths[row] for row in rows] for rows in self._steps.get(number, ())]

    def own_tokens(self, number: int) -> list[list[int]]:
        return self._own(self.tokens(number))

    def _own(self, step: list[list[int]]) -> list[list[int]]:
        share = len(step) // self._ranks
        return step[self._rank * share : (self._rank + 1) * share]

    def _note(self, step: TokenStep) -> None:
        self.is_at_start = False
        self._steps[self._drawn] = step
        self._drawn += 1


T = TypeVar("T")

MakeLoader = Callable[[int], Iterable[T]]
Given = Iterable[T] | MakeLoader[T]


class Passes(Generic[T]):
    """The passes over the loader, or loader function, that the user gives to `batches`."""

    def __init__(
        self,
        given: Given[T],
        assignment: Assignment,
        asked: FieldsRead,
        sampler: Callable[[], SeededSampler | TokenSampler | None],
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
        """Begin the first pass, within which a trial may resume."""
        stages = self._assignment.stages
        if stages.has_new_micro_batches(steps):  # Both loaders may share generators.
            self.begin(stages.last(steps).micro_batch_size)
            self._assignment.skipped()
        behind = self.begin(size)
        if (unshuffled := about_order(self._loader)) is not None:
            self._assignment.warned(unshuffled)
        sampler = self._sampler()
        if behind is None or (sampler is not None and sampler.is_at_start):
            return
        batches = iter(self._loader)
        for _ in range(behind):
            next(batches, None)
        self._assignment.skipped()  # the loader drew random numbers when the pass began
        self._pass = batches

    def batches(self) -> Iterator[T]:
        """Yield a pass's micro-batches, and time the waits for data."""
        entered, self._is_empty = self._now(), True
        for batch in self._pass:
            self._is_empty = False
            self._assignment.waited(self._now() - entered)
            yield batch
            entered = self._now()

    def check(self, size: int) -> None:
        """Raise `UsageError` if the pass is empty, unless the trial resumed within the pass."""
        require(
            not self._is_empty or self._pass is not self._loader,
            f"the loader of batches() is empty, at a micro-batch size of {size}",
            hint="give a loader with at least one batch; do not give an iterator, which ends after one pass",
        )

    def begin(self, size: int) -> int | None:
        """Begin a pass; see `Assignment.passes`. Raises `UsageError` if the user's function returns no loader."""
        if self._make is not None:
            self._asked.note("micro_batch_size")
            if size != self._size:
                self._loader, self._size = self._make(size), size
                require(
                    _is_loader(self._loader),
                    f"the function given to batches() returned {type(self._loader).__name__}; expected a loader",
                    hint="call trial.batches(lambda size: DataLoader(data, batch_size=size, ...))",
                )
        self._pass = self._loader
        return self._assignment.passes(self._loader, self._sampler() is not None)


def _is_loader(given: object) -> bool:
    return hasattr(given, "__getitem__") or isinstance(given, Iterable)
