"""Checks of the data from ``load``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from bssearch.errors import WorkloadError
from bssearch.workloads.data import BatchStream, Data, DatasetPart, Part, places

PARTS = ("train", "validation", "test")

TRIED_SAMPLES = 8  # samples that are collated as a test


def check_data(data: object, workload: object = None) -> Data:
    """The data as three parts; with ``train_batches``, train is a `BatchStream`.

    Raises `WorkloadError` for an unknown form, unequal rows, or samples that are missing or do not collate.
    """
    found = [_part(data, name, workload) for name in PARTS]
    same = isinstance(data, Data) and all(getattr(data, name) is one for name, one in zip(PARTS, found, strict=True))
    return data if same and isinstance(data, Data) else Data(*found)


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
            f"train_samples = {samples!r} must be an integer >= 1: train_batches() does not tell the samples per epoch",
            hint="give the workload a member train_samples, or let load() return the training samples as train",
        )
    return BatchStream(workload.train_batches, samples)


def _check_sequence(data: object, given: object, name: str) -> None:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    returned = f"load() returned a {type(data).__name__} whose {name} is a {type(given).__name__}"
    if isinstance(given, DataLoader):
        raise WorkloadError(
            f"{returned}; bssearch chooses the batch size and the order itself",
            hint="give the loader's dataset, and its collate_fn as the workload's collate; "
            "if the loader itself must make the training batches, write train_batches(batch_size, seed)",
        )
    if isinstance(given, IterableDataset):
        raise WorkloadError(
            f"{returned}, which has no rows to choose from",
            hint="let train_batches(batch_size, seed) make the batches of train from it; "
            "for validation and test give a list of samples",
        )
    no_samples = given is None or isinstance(given, tuple | Mapping | str | bytes | torch.Tensor)
    if no_samples or not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
        raise WorkloadError(
            f"{returned}; it must return bssearch.Data of three bssearch.Part, Datasets or lists of samples"
        )


def _dataset_part(part: DatasetPart, name: str, collate: Any) -> DatasetPart:
    if not len(part):
        raise WorkloadError(f"load() returned no samples as {name}; there must be at least one")
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
            hint="give the workload a method collate(samples), which makes (inputs, targets) of a list of samples, "
            "such as one that pads rows of unequal length",
        ) from error
    return found


def _check_rows(part: Part, name: str) -> None:
    rows: dict[str, int] = {}
    for field in ("inputs", "targets"):
        value = getattr(part, field)
        found = places(value)
        if not found:
            raise _refused(value, f"{name}.{field}", "")
        for place, leaf in found:
            _check_tensor(leaf, value, f"{name}.{field}", place)
            rows[f"{field}{place}"] = len(leaf)
    if len(set(rows.values())) > 1 or not rows["inputs" + places(part.inputs)[0][0]]:
        counts = ", ".join(f"{count} {place}" for place, count in rows.items())
        described = "".join(
            f"; {name}.{field} is {in_words(getattr(part, field))}"
            for field in ("inputs", "targets")
            if len(places(getattr(part, field))) > 1
        )
        raise WorkloadError(
            f"load() returned {counts} as {name}; there must be as many of each, and at least one{described}",
            hint=_HINT,
        )


def _check_tensor(leaf: object, whole: object, field: str, place: str) -> None:
    import torch

    if not (isinstance(leaf, torch.Tensor) and leaf.ndim and not leaf.is_nested):
        raise _refused(whole, field, place, leaf)


_HINT = (
    "a sample is a row of each tensor; for rows of unequal length give the samples themselves, a list or a Dataset, "
    "and a method collate(samples) that pads them; or let inputs be row numbers (torch.arange) that loss() and "
    "evaluate() look up"
)


def _refused(whole: object, field: str, place: str, leaf: object = None) -> WorkloadError:
    which = f"; {field}{place} is {kind_of(leaf)}" if place else ""
    return WorkloadError(
        f"load() returned {in_words(whole)} as {field}{which}; it must be a tensor of shape (samples, …), "
        "or dicts, lists and tuples of such tensors",
        hint=_HINT,
    )


def in_words(value: object) -> str:
    """Describe a non-tensor: its keys, or an unlike element."""
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


def kind_of(value: object) -> str:
    """A value's type, and its shape if any."""
    shape = None if getattr(value, "is_nested", False) else getattr(value, "shape", None)
    nested = "nested " if getattr(value, "is_nested", False) else ""
    return f"a {nested}{type(value).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")
