"""The data of a workload: its parts, in the forms that ``load`` may return.

* `Part`: tensors with a row a sample, alone or in nestings of dicts, lists and tuples
* `DatasetPart`: a map-style ``Dataset``, or any sequence of samples, which are collated batch by batch
* `BatchStream`: a training part whose batches the workload makes itself
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from bssearch.errors import WorkloadError

if TYPE_CHECKING:
    import torch

# Nestings of dicts, lists and tuples with tensors in them, as `torch.utils._pytree` sees them.

Nesting = Any
"""A tensor, or dicts, lists and tuples of nestings."""

CONTAINERS = (dict, list, tuple)


def mapped(function: Callable[[Any], Any], value: Nesting) -> Nesting:
    """Return a nesting like the one given with the function's result in the place of each leaf."""
    if not isinstance(value, CONTAINERS):
        return function(value)
    from torch.utils._pytree import tree_map

    return tree_map(function, value)


def leaves(value: Nesting) -> list[Any]:
    """Return the leaves in their order."""
    if not isinstance(value, CONTAINERS):
        return [value]
    from torch.utils._pytree import tree_leaves

    return tree_leaves(value)


def places(value: Nesting) -> list[tuple[str, Any]]:
    """Return each leaf with its place, such as ``['ids'][0]``; that of a lone leaf is empty."""
    if not isinstance(value, CONTAINERS):
        return [("", value)]
    from torch.utils._pytree import keystr, tree_flatten_with_path

    return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(value)[0]]


def tensors(value: Nesting) -> list[torch.Tensor]:
    """Return those of the leaves that are tensors."""
    import torch

    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def moved(value: Nesting, device: torch.device, *, non_blocking: bool = False) -> Nesting:
    """Return a nesting with its tensors on a device; other leaves stay as they are."""
    import torch

    def to_device(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=non_blocking) if isinstance(leaf, torch.Tensor) else leaf

    return mapped(to_device, value)


Collate = Callable[[list[Any]], Any]
Batch = tuple[Nesting, Nesting]


@dataclass(frozen=True, eq=False)
class Part:
    """One part of the data, whole: ``inputs`` (samples, …) and ``targets`` (samples, …), on one device.

    Either is a tensor or a nesting of dicts, lists and tuples of tensors; each tensor has a row a sample. ``loss``,
    ``augment`` and ``evaluate`` get the same nesting, its tensors cut to the rows of a batch.
    """

    inputs: Nesting
    targets: Nesting

    has_rows: ClassVar[bool] = True
    """Whether samples can be gathered by their row."""

    @staticmethod
    def of(samples: Any, *, collate: Collate | None = None) -> DatasetPart:
        """Return a part made of samples: a map-style ``Dataset``, a list, anything with a length and an index.

        ``collate`` makes a batch of a list of samples: a pair (inputs, targets), or a mapping or a tensor, which is
        then the inputs, with targets None. Without it the workload's ``collate`` does, or else PyTorch's
        ``default_collate``.
        """
        return DatasetPart(samples, collate)

    def __len__(self) -> int:
        return len(leaves(self.inputs)[0])

    @property
    def device(self) -> torch.device:
        """Return where the rows lie."""
        device: torch.device = leaves(self.inputs)[0].device
        return device

    @property
    def bytes(self) -> int:
        """Return the memory that the part takes."""
        return sum(tensor.nbytes for tensor in [*leaves(self.inputs), *leaves(self.targets)])

    def to(self, device: torch.device) -> Part:
        """Return the part on a device; itself where it is there already."""
        return Part(moved(self.inputs, device), moved(self.targets, device))

    def gather(self, rows: torch.Tensor) -> Batch:
        """Return (inputs, targets) of some rows (samples,), in their order, where the part lies."""
        return _cut(self.inputs, rows), _cut(self.targets, rows)

    def chunks(self, size: int) -> Iterator[Batch]:
        """Yield (inputs, targets) in order, ``size`` samples at a time; the last chunk may be smaller."""
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield _cut(self.inputs, rows), _cut(self.targets, rows)


class HostPart(Part):
    """A part that stays on the host, from where its batches are brought to the device."""

    @property
    def device(self) -> torch.device:
        """Return the CPU."""
        import torch

        return torch.device("cpu")

    @property
    def bytes(self) -> int:
        """Return 0: nothing of it lies on the device."""
        return 0


class DatasetPart(HostPart):
    """A part made of samples, which stay on the host; `chunks` brings collated batches to the device."""

    def __init__(self, samples: Any, collate: Collate | None = None, device: torch.device | None = None) -> None:
        self.samples = samples
        self.collate = collate
        self._chunks_go_to = device

    @property
    def inputs(self) -> NoReturn:
        """Raise `WorkloadError`: only batches have inputs."""
        raise self._has_no("inputs")

    @property
    def targets(self) -> NoReturn:
        """Raise `WorkloadError`: only batches have targets."""
        raise self._has_no("targets")

    def __len__(self) -> int:
        return len(self.samples)

    def to(self, device: torch.device) -> DatasetPart:
        """Return the part with chunks on a device."""
        return DatasetPart(self.samples, self.collate, device)

    def gather(self, rows: torch.Tensor) -> Batch:
        """Return the collated (inputs, targets) of some rows (samples,), in their order, on the host."""
        return self._collated(rows.tolist())

    def chunks(self, size: int) -> Iterator[Batch]:
        """Yield collated (inputs, targets) in order, ``size`` samples at a time; the last chunk may be smaller."""
        for start in range(0, len(self), size):
            batch = self._collated(range(start, min(start + size, len(self))))
            yield batch if self._chunks_go_to is None else moved(batch, self._chunks_go_to)

    def _collated(self, rows: Sequence[int]) -> Batch:
        # The method by which PyTorch's own loader asks a Dataset for many samples at once, where it has one.
        many = getattr(self.samples, "__getitems__", None)
        samples = [self.samples[row] for row in rows] if many is None else many(list(rows))
        if self.collate is not None:
            return pair_of(self.collate(samples), "collate()")
        from torch.utils.data import default_collate

        return pair_of(default_collate(samples), "default_collate()")

    def _has_no(self, name: str) -> WorkloadError:
        return WorkloadError(
            f"a part made of a {type(self.samples).__name__} has no {name} as a whole",
            hint="go through it in batches: for inputs, targets in part.chunks(256)",
        )


class BatchStream(HostPart):
    """A training part whose batches the workload's ``train_batches`` makes; ``samples`` is how many an epoch has."""

    has_rows = False

    def __init__(self, train_batches: Callable[[int, int], Iterable[Any]], samples: int) -> None:
        self.train_batches = train_batches
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def to(self, device: torch.device) -> BatchStream:
        """Return the part itself."""
        return self


@dataclass(frozen=True, slots=True)
class Data:
    """Training, validation and test parts. The search sees train and validation; test is for the winner.

    Each is a `Part`, or what `Part.of` makes one of: a map-style ``Dataset``, a ``Subset``, a list of samples.
    ``train`` may be None where the workload has ``train_batches``.
    """

    train: Any
    validation: Any
    test: Any


def _cut(value: Nesting, rows: torch.Tensor | slice) -> Nesting:
    """Return some rows of each tensor; that of a lone one is in the time of every step, without further calls."""
    return mapped(lambda leaf: leaf[rows], value) if isinstance(value, CONTAINERS) else value[rows]


def pair_of(batch: Any, maker: str) -> Batch:
    """Return a batch as (inputs, targets): a pair as it is, a mapping or a lone tensor as inputs without targets.

    Mappings become dicts. Raises `WorkloadError` for a tuple or list that is no pair.
    """
    if not isinstance(batch, tuple | list):
        return _as_dict(batch), None
    if len(batch) != 2:
        raise WorkloadError(
            f"{maker} gave a {type(batch).__name__} of {len(batch)} as a batch; it must be a pair (inputs, targets), "
            "or a mapping"
        )
    return _as_dict(batch[0]), _as_dict(batch[1])


def _as_dict(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) and not isinstance(value, dict) else value


# Splits of data into parts: fixed and stratified, the same on every machine and for every seed.


def stratified_order(labels: np.ndarray) -> np.ndarray:
    """Return all row numbers sorted by label, shuffled within each label by a generator whose stream is frozen."""
    shuffled = np.random.RandomState(0).permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def evenly(rows: np.ndarray, count: int) -> np.ndarray:
    """Return ``count`` of the rows at even distances: of rows in stratified order, each label's share of them."""
    return rows[np.arange(count) * len(rows) // count]
