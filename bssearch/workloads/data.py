"""The forms of data: `Part`, `DatasetPart`, `BatchStream` and `TokenPart`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, cast

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from bssearch.errors import WorkloadError, require
from bssearch.records.text import plural
from bssearch.workloads.base import kind_of

Nesting = Any  # a tensor, or dicts, lists and tuples of nestings

CONTAINERS = (dict, list, tuple)


def mapped(function: Callable[[Any], Any], value: Nesting) -> Nesting:
    return tree_map(function, value) if isinstance(value, CONTAINERS) else function(value)


def leaves(value: Nesting) -> list[Any]:
    return tree_leaves(value) if isinstance(value, CONTAINERS) else [value]


def places(value: Nesting) -> list[tuple[str, Any]]:
    """Return each leaf with its path, such as ``['ids'][0]``."""
    if not isinstance(value, CONTAINERS):
        return [("", value)]
    return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(value)[0]]


def tensors(value: Nesting) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def moved(value: Nesting, device: torch.device, *, non_blocking: bool = False) -> Nesting:
    return mapped(
        lambda leaf: leaf.to(device, non_blocking=non_blocking) if isinstance(leaf, torch.Tensor) else leaf, value
    )


Collate = Callable[[list[Any]], Any]
Batch = tuple[Nesting, Nesting]


@dataclass(frozen=True, eq=False)
class Part:
    """One part of the data on one device: ``inputs`` (samples, …) and ``targets`` (samples, …).

    Inputs and targets are tensors or nestings of tensors; each batch keeps the nesting.

    Example: ``bssearch.Part(inputs=torch.zeros(100, 8), targets=torch.zeros(100))``
    """

    inputs: Nesting
    targets: Nesting

    has_rows: ClassVar[bool] = True  # samples can be gathered by row

    @staticmethod
    def of(samples: Any, *, collate: Collate | None = None) -> DatasetPart:
        """Make a part from samples: a map-style ``Dataset``, or another indexable object with a length.

        ``collate`` makes (inputs, targets), or only inputs, from a list of samples. The default is the workload's
        ``collate``, else PyTorch's ``default_collate``.
        """
        return DatasetPart(samples, collate)

    def __len__(self) -> int:
        return len(leaves(self.inputs)[0])

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return cast(torch.device, leaves(self.inputs)[0].device)

    @property
    def bytes(self) -> int:
        """The size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in [*leaves(self.inputs), *leaves(self.targets)])

    def to(self, device: torch.device) -> Part:
        """Return the part on a device."""
        return Part(moved(self.inputs, device), moved(self.targets, device))

    def gather(self, rows: torch.Tensor) -> Batch:
        """Return (inputs, targets) of ``rows`` (samples,), in the order of ``rows``."""
        return _cut(self.inputs, rows), _cut(self.targets, rows)

    def thinned(self, most: int) -> Part:
        """Return at most ``most`` evenly spaced samples."""
        rows = slice(None, None, -(-len(self) // most))
        return Part(_cut(self.inputs, rows), _cut(self.targets, rows))

    def chunks(self, size: int) -> Iterator[Batch]:
        """Yield (inputs, targets) of ``size`` samples in order; the last chunk may be smaller."""
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield _cut(self.inputs, rows), _cut(self.targets, rows)


class HostPart(Part):
    """A part that stays on the host."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def bytes(self) -> int:
        return 0

    def to(self, device: torch.device) -> HostPart:
        return self


class DatasetPart(HostPart):
    """A part that collates samples per batch; `chunks` moves batches to the device."""

    def __init__(self, samples: Any, collate: Collate | None = None, device: torch.device | None = None) -> None:
        self.samples = samples
        self.collate = collate
        self._chunks_go_to = device

    def _whole(self) -> NoReturn:
        raise WorkloadError(
            f"a part made from a {type(self.samples).__name__} has samples, not whole tensors of inputs and targets",
            hint="read the part in batches: for inputs, targets in part.chunks(256)",
        )

    inputs = targets = property(_whole)

    def __len__(self) -> int:
        return len(self.samples)

    def to(self, device: torch.device) -> DatasetPart:
        return DatasetPart(self.samples, self.collate, device)

    def thinned(self, most: int) -> DatasetPart:
        return DatasetPart(Subset(self.samples, range(0, len(self), -(-len(self) // most))), self.collate)

    def gather(self, rows: torch.Tensor) -> Batch:
        return self._collated(rows.tolist())

    def chunks(self, size: int) -> Iterator[Batch]:
        for start in range(0, len(self), size):
            batch = self._collated(range(start, min(start + size, len(self))))
            yield batch if self._chunks_go_to is None else moved(batch, self._chunks_go_to)

    def _collated(self, rows: Sequence[int]) -> Batch:
        # Like PyTorch's loader, fetch many samples at once if the Dataset can.
        many = getattr(self.samples, "__getitems__", None)
        samples = [self.samples[row] for row in rows] if many is None else many(list(rows))
        if self.collate is not None:
            return pair_of(self.collate(samples), "collate()")
        return pair_of(default_collate(samples), "default_collate()")


class BatchStream(HostPart):
    """The training part of ``train_batches``, with ``samples`` per epoch."""

    has_rows = False

    def __init__(self, train_batches: Callable[[int, int], Iterable[Any]], samples: int) -> None:
        self.train_batches = train_batches
        self.samples = samples

    def __len__(self) -> int:
        return self.samples


class TokenPart(HostPart):
    """A training part that counts tokens; ``lengths`` are the tokens of each sample."""

    has_rows = False

    def __init__(self, samples: DatasetPart, lengths: Sequence[int]) -> None:
        self.samples = samples
        self.lengths = lengths

    def __len__(self) -> int:
        return sum(self.lengths)

    def gather(self, rows: torch.Tensor) -> Batch:
        return self.samples.gather(rows)

    def thinned(self, most: int) -> DatasetPart:
        return self.samples.thinned(most)


@dataclass(frozen=True, slots=True)
class Data:
    """Training, validation and test data, as `Part` objects or arguments of `Part.of`.

    Search trials never read ``test``. ``train`` may be None if ``train_batches`` exists.

    Example: ``bssearch.Data(train=bssearch.Part(x, y), validation=bssearch.Part(x2, y2), test=bssearch.Part(x3, y3))``
    """

    train: Any
    validation: Any
    test: Any


def _cut(value: Nesting, rows: torch.Tensor | slice) -> Nesting:
    # a lone tensor takes the fast path, because every step cuts rows
    return mapped(lambda leaf: leaf[rows], value) if isinstance(value, CONTAINERS) else value[rows]


def pair_of(batch: Any, maker: str) -> Batch:
    """Return a batch as (inputs, targets); a mapping or tensor has no targets (None)."""
    if not isinstance(batch, tuple | list):
        return _as_dict(batch), None
    require(
        len(batch) == 2,
        f"{maker} gave a {type(batch).__name__} of length {len(batch)} as a batch; expected a pair (inputs, targets), "
        "or a mapping",
        error=WorkloadError,
    )
    return _as_dict(batch[0]), _as_dict(batch[1])


def _as_dict(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) and not isinstance(value, dict) else value


def stratified_order(labels: np.ndarray) -> np.ndarray:
    """Return rows sorted by label and shuffled within each label, in an order equal on every machine."""
    shuffled = np.random.RandomState(0).permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def evenly(rows: np.ndarray, count: int) -> np.ndarray:
    """Return ``count`` evenly spaced rows; if ``rows`` are sorted by label, the labels keep their shares."""
    return rows[np.arange(count) * len(rows) // count]


TRIED_SAMPLES = 8  # number of samples in a test of collate()


def check_data(data: object, workload: object = None, *, counts_tokens: bool = False) -> Data:
    """Return the data as three parts.

    ``train`` is a `TokenPart` if ``counts_tokens``, a `BatchStream` if ``train_batches`` exists.
    """
    train, *others = (_part(data, name, workload) for name in ("train", "validation", "test"))
    return Data(_token_part(train, workload) if counts_tokens else train, *others)


def _token_part(train: Part, workload: object) -> TokenPart:
    lengths = getattr(workload, "sample_tokens", None)
    needed = {
        "sample_tokens, the tokens of each training sample": lengths is not None,
        "a list or Dataset of samples as train": isinstance(train, DatasetPart),
        "loss() instead of training_step()": not hasattr(workload, "training_step"),
    }
    missing = [name for name, is_given in needed.items() if not is_given]
    require(
        not missing,
        f"training.batch_unit = tokens needs {', and '.join(missing)}",
        hint="add the missing parts to the workload, or set training: {batch_unit: samples}",
        error=WorkloadError,
    )
    found = [int(one) for one in cast(Iterable[Any], lengths)]
    least = min(found, default=0)
    require(
        len(found) == len(cast(DatasetPart, train).samples) and least >= 1,
        f"sample_tokens has {plural(len(found), 'number')} >= {least}; give {len(train)} numbers >= 1",
        error=WorkloadError,
    )
    return TokenPart(cast(DatasetPart, train), found)


def _part(data: object, name: str, workload: object) -> Part:
    given = getattr(data, name, None)
    if name == "train" and callable(getattr(workload, "train_batches", None)):
        return _stream(given, workload)
    if not isinstance(given, Part):
        _check_sequence(data, given, name)
        given = Part.of(given)
    if isinstance(given, DatasetPart):
        return _dataset_part(given, name, getattr(workload, "collate", None))
    _check_rows(given, name)
    return given


def _stream(given: object, workload: Any) -> BatchStream:
    samples = len(given) if hasattr(given, "__len__") else getattr(workload, "train_samples", None)
    if type(samples) is not int or samples < 1:
        raise WorkloadError(
            f"train_samples = {samples!r} must be an integer >= 1, the samples per epoch of train_batches()",
            hint="give the workload a member train_samples, or let load() return the training samples as train",
        )
    return BatchStream(workload.train_batches, samples)


def _check_sequence(data: object, given: object, name: str) -> None:
    returned = f"load() returned a {type(data).__name__} whose {name} is a {type(given).__name__}"
    require(
        not isinstance(given, DataLoader),
        f"{returned}, but bssearch chooses the batch size and the order",
        hint="return the loader's dataset, and use the loader's collate_fn as the workload's collate; "
        "if only the loader can make the training batches, write train_batches(batch_size, seed)",
        error=WorkloadError,
    )
    require(
        not isinstance(given, IterableDataset),
        f"{returned}, whose rows bssearch cannot choose",
        hint="let train_batches(batch_size, seed) make the training batches from the dataset; "
        "for validation and test, return a list of samples",
        error=WorkloadError,
    )
    no_samples = given is None or isinstance(given, tuple | Mapping | str | bytes | torch.Tensor)
    require(
        not no_samples and (hasattr(given, "__len__") and hasattr(given, "__getitem__")),
        f"{returned}; return bssearch.Data of three bssearch.Part, Datasets or lists of samples",
        error=WorkloadError,
    )


def _dataset_part(part: DatasetPart, name: str, collate: Any) -> DatasetPart:
    require(len(part), f"load() returned no samples as {name}; return at least one sample", error=WorkloadError)
    found = part if part.collate is not None or collate is None else DatasetPart(part.samples, collate)
    try:
        next(found.chunks(min(TRIED_SAMPLES, len(found))))
    except WorkloadError:
        raise
    except Exception as error:
        if found.collate is not None:
            raise
        raise WorkloadError(
            f"the first samples of {name} cannot be collated by torch's default_collate: {error}; "
            f"{name}[0] is {in_words(part.samples[0])}",
            hint="give the workload a method collate(samples) that makes (inputs, targets) from a list of samples, "
            "for example by padding rows of unequal length",
        ) from error
    return found


def _check_rows(part: Part, name: str) -> None:
    rows: set[int] = set()
    for field in ("inputs", "targets"):
        value = getattr(part, field)
        for place, leaf in places(value) or [("", None)]:
            if not (isinstance(leaf, torch.Tensor) and leaf.ndim and not leaf.is_nested):
                raise _refused(value, f"{name}.{field}", place, leaf)
            rows.add(len(leaf))
    require(
        len(rows) == 1 and rows != {0},
        f"load() returned {in_words(part.inputs)} as {name}.inputs and {in_words(part.targets)} as {name}.targets; all "
        "tensors must have equally many rows, at least 1",
        hint=_HINT,
        error=WorkloadError,
    )


_HINT = (
    "for rows of unequal length, return a list or Dataset of samples, and write a method collate(samples) that pads "
    "the rows; or return row numbers (torch.arange) as inputs, for loss() and evaluate() to look up"
)


def _refused(whole: object, field: str, place: str, leaf: object) -> WorkloadError:
    which = f"; {field}{place} is {kind_of(leaf)}" if place else ""
    return WorkloadError(
        f"load() returned {in_words(whole)} as {field}{which}; expected a tensor of shape (samples, …), "
        "or dicts, lists and tuples of such tensors",
        hint=_HINT,
    )


def in_words(value: object) -> str:
    """Describe a value: a mapping by its keys, a sequence by its first element and the first of another kind."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        fields = ", ".join(f"{name!r}: {kind_of(one)}" for name, one in itertools.islice(value.items(), 4))
        return f"a {kind} ({fields}{', …' if len(value) > 4 else ''})"
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value):
        first = kind_of(value[0])
        unlike = next((index for index, one in enumerate(value) if kind_of(one) != first), None)
        other = "" if unlike is None else f", [{unlike}] is {kind_of(value[unlike])}"
        return f"a {kind} of {len(value)} ([0] is {first}{other})"
    return kind_of(value)
