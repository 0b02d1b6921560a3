"""How many samples a micro-batch has: the length of one of its tensors or lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A part of a batch whose length is the number of samples: its keys from the batch inwards, and its axis.

    ``axis`` is None for a list or tuple.
    """

    keys: tuple[Any, ...]
    axis: int | None
    length: int


class BatchRows:
    """Counts the samples of each micro-batch, in the part of it that has as many as asked for in the first one.

    A batch may be a tensor, an array, a list of samples or of their rows, or nested tuples, lists and mappings of
    these. If no part of the first micro-batch has the size, the first tensor counts, or else the first list; if that is
    longer than the size, the samples cannot be told.
    """

    def __init__(self) -> None:
        self._place: Place | None = None

    def first(self, batch: Any, size: int) -> None:
        """Choose the part that counts from the first micro-batch of a size."""
        self._place = _chosen(list(_places(batch)), size)

    def count(self, batch: Any, size: int) -> int | None:
        """Return the number of samples of a micro-batch, None if it cannot be told; ``size`` is the full one."""
        length = None if self._place is None else _length_at(batch, self._place)
        if length is None:
            self.first(batch, size)
            length = None if self._place is None else self._place.length
        return length


def _places(batch: Any, keys: tuple[Any, ...] = ()) -> Iterator[Place]:
    shape = getattr(batch, "shape", None)
    if isinstance(shape, tuple):
        yield from (Place(keys, axis, int(length)) for axis, length in enumerate(shape[:2]))
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _places(value, (*keys, key))
    elif isinstance(batch, list | tuple):
        yield Place(keys, None, len(batch))
        for index, value in enumerate(batch):
            yield from _places(value, (*keys, index))


def _chosen(places: list[Place], size: int) -> Place | None:
    """Return the place that counts: tensors by their first axis, then lists, then the second axis (time first)."""
    tensors = [place for place in places if place.axis == 0]
    lists = [place for place in places if place.axis is None]
    second = [place for place in places if place.axis == 1]
    full = next((place for place in (*tensors, *lists, *second) if place.length == size), None)
    # Without a full one the columns of a tuple come before the tuple itself.
    first = full or next(iter((*tensors, *sorted(lists, key=lambda place: not place.keys))), None)
    # A longer one, such as a flat tensor of tokens, does not count samples.
    return None if first is None or first.length > size else first


def _length_at(batch: Any, place: Place) -> int | None:
    try:
        for key in place.keys:
            batch = batch[key]
        return len(batch) if place.axis is None else int(batch.shape[place.axis])
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
