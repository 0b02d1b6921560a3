"""The passes of a loop over its data: over one loader, or over what a function makes of each micro-batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, cast

from bssearch.errors import UsageError
from bssearch.integrations.asked import Asked
from bssearch.integrations.assignment import Assignment
from bssearch.integrations.sampler import SeededSampler

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
            self._begin(stages.last(steps).micro_batch_size)
            self._assignment.skipped()
        behind = self._begin(size)
        sampler = self._sampler()
        if behind is None or (sampler is not None and sampler.is_at_start):
            return
        batches = iter(self._loader)
        for _ in range(behind):
            next(batches, None)
        self._assignment.skipped()
        self._pass = batches

    def next(self, size: int) -> None:
        """Begin another pass, with micro-batches of a size."""
        self._begin(size)

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

    def _begin(self, size: int) -> int | None:
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
