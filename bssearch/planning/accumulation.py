"""Splits of a batch into micro-batches, accumulation steps and devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from bssearch.errors import UsageError
from bssearch.planning.requests import LARGEST_COUNT, MANY_STEPS, Note, Plan, Request, notes_on, planned, require
from bssearch.registry import Option
from bssearch.spec.space import split_batch
from bssearch.spec.space.micro_batches import TINY_BATCH, batch_norm_caveats

Batch = Annotated[int, Field(ge=1, le=10**9)]
Micro = Annotated[int, Field(ge=1, le=10**6)]  # the sizes up to it are tried one by one


class AccumulationRequest(Request):
    """A batch and its devices."""

    batch: Annotated[
        Batch, Option("Samples of an optimizer step, over all devices.", label="Wanted batch", unit="samples")
    ]
    micro: Annotated[
        Micro | None, Option("Samples that run at once on a device.", label="Exact micro-batch", unit="samples")
    ] = None
    max_micro: Annotated[
        Micro | None,
        Option(
            "Instead: the most samples that fit on a device; the largest that divides is taken.",
            label="Largest micro-batch",
            unit="samples",
        ),
    ] = None
    devices: Annotated[Batch, Option("Devices that share the batch.")] = 1
    batch_norm_layers: Annotated[
        Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None,
        Option("Batch normalisation layers of the model: they see micro-batches.", shown_default="not known"),
    ] = None

    @model_validator(mode="after")
    def _has_one_micro_batch(self) -> Self:
        require(
            self.micro is None or self.max_micro is None,
            f"micro = {self.micro} and max_micro = {self.max_micro} contradict each other; give only one",
        )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationPlan(Plan):
    """``batch`` = ``micro_batch`` × ``accumulation_steps`` × ``devices`` samples per step."""

    micro_batch: int
    accumulation_steps: int
    devices: int
    batch: int
    notes: list[Note]


@planned(AccumulationRequest)
def plan_accumulation(asked: AccumulationRequest) -> AccumulationPlan:
    """Return the exact split of a batch into micro-batches on ``devices``.

    Without ``micro``, the largest divisor of a device's share up to ``max_micro``. Raises `UsageError` naming the
    nearest batches if no split exists.
    """
    share = _share(asked.batch, asked.micro or 1, asked.devices)
    size = asked.micro or split_batch(share, asked.max_micro)[0]
    return AccumulationPlan(
        micro_batch=size,
        accumulation_steps=share // size,
        devices=asked.devices,
        batch=asked.batch,
        notes=list(_notes(size, share // size, asked)),
    )


def _share(batch: int, micro: int, devices: int) -> int:
    unit = micro * devices
    if batch % unit == 0:
        return batch // devices
    below, above = batch // unit * unit, -(-batch // unit) * unit
    near = " and ".join(f"{size} ({size // unit} step{'s' * (size > unit)})" for size in (below, above) if size)
    count, hint = f"{devices} device{'s' * (devices > 1)}", None
    if batch % devices == 0:
        whole = split_batch(batch // devices, micro)[0]
        hint = f"the largest micro-batch up to {micro} that splits {batch} on {count} exactly is {whole}"
    raise UsageError(
        f"batch = {batch} cannot be split exactly into micro-batches of {micro} on {count}: "
        f"it must be a multiple of {unit}; the nearest are {near}",
        hint=hint,
    )


def _notes(micro: int, steps: int, asked: AccumulationRequest) -> Iterator[Note]:
    is_split = steps > 1 or asked.devices > 1
    if asked.batch_norm_layers is None and (is_split or micro < TINY_BATCH):
        yield Note(
            "batch_norm",
            f"a model with batch normalisation sees {micro} samples at a time, not the batch: another model than at "
            "once (13 % to 28 % different here), unless it has GroupNorm or ghost batches",
        )
    for caveat in batch_norm_caveats(asked.batch_norm_layers or 0, micro, accumulates=is_split, ghost_batch_size=None):
        yield Note(*caveat)
    if micro < TINY_BATCH and steps > 1:
        yield Note(
            "tiny_micro_batch",
            f"micro-batches of {micro} seldom fill a device; time them with `bssearch probe step-time`",
        )
    if is_split:
        yield Note(
            "token_weighted_loss",
            "if samples have unequal numbers of tokens, sum the loss over the whole batch and divide by its tokens: "
            "the mean of the micro-batches' means differs (huggingface/transformers#34191: up to 10 %)",
        )
    if asked.devices > 1 and steps > 1:
        yield Note("no_sync", "gradients travel between devices only after the last micro-batch (DDP's no_sync)")
    yield from notes_on({"accumulation_not_stale": steps > MANY_STEPS, "accumulation_cost": steps > 1})
