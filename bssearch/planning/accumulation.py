"""The split of a wanted batch into micro-batches, accumulation steps and devices, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bssearch.errors import UsageError
from bssearch.planning.claims import MANY_STEPS, Claim, claims_about
from bssearch.planning.given import check_count
from bssearch.space import split_batch
from bssearch.space.batch_norm import TINY_BATCH, batch_norm_caveats

LARGEST_BATCH = 10**9
"""The largest batch that is split: a choice, above any that is trained with."""

LARGEST_MICRO = 10**6
"""The largest micro-batch: a choice; the sizes up to it are tried one by one."""


@dataclass(frozen=True, slots=True)
class Remark:
    """What must be known of a split: a ``code`` for programs, a sentence for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationPlan:
    """``batch`` = ``micro_batch`` × ``accumulation_steps`` × ``devices`` samples an optimizer step."""

    micro_batch: int
    accumulation_steps: int
    devices: int
    batch: int
    remarks: list[Remark]
    claims: list[Claim]

    def document(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        notes = [*map(asdict, self.remarks), *({"code": one.code, "message": one.message} for one in self.claims)]
        split = ("micro_batch", "accumulation_steps", "devices", "batch")
        return {**{name: getattr(self, name) for name in split}, "notes": notes}


def plan_accumulation(
    *,
    batch: int,
    micro: int | None = None,
    max_micro: int | None = None,
    devices: int = 1,
    batch_norm_layers: int | None = None,
) -> AccumulationPlan:
    """Return how a batch is made of micro-batches of ``micro`` samples on ``devices``, exactly.

    With ``max_micro`` in its place the micro-batch is the largest that divides the device's share and is no larger;
    with neither the share runs at once. Of ``batch_norm_layers`` None says that it is not known whether there are any.
    Raises `UsageError` for numbers that are not whole and above 0, for both of ``micro`` and ``max_micro``, and for a
    batch that cannot be split so, which names the nearest that can.
    """
    check_count("batch", batch, most=LARGEST_BATCH)
    check_count("devices", devices, most=LARGEST_BATCH)
    for name, value in (("micro", micro), ("max_micro", max_micro)):
        if value is not None:
            check_count(name, value, most=LARGEST_MICRO)
    if batch_norm_layers is not None:
        check_count("batch_norm_layers", batch_norm_layers, least=0)
    if micro is not None and max_micro is not None:
        raise UsageError(f"micro = {micro} and max_micro = {max_micro} contradict each other: give one of them")
    share = _share(batch, micro or 1, devices)
    size, steps = (micro, share // micro) if micro is not None else split_batch(share, max_micro)
    return AccumulationPlan(
        micro_batch=size,
        accumulation_steps=steps,
        devices=devices,
        batch=batch,
        remarks=list(_remarks(size, steps, devices, batch_norm_layers)),
        claims=[one for one in claims_about("accumulation") if steps > MANY_STEPS or one.code == "accumulation_cost"]
        if steps > 1
        else [],
    )


def _share(batch: int, micro: int, devices: int) -> int:
    """Return the samples of each device, which ``micro`` divides; raise `UsageError` where nothing can do that."""
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


def _remarks(micro: int, steps: int, devices: int, batch_norm_layers: int | None) -> Iterator[Remark]:
    """Yield what the split means for batch normalisation, for the device, and for losses of unequal weight."""
    if batch_norm_layers is None and (steps > 1 or devices > 1 or micro < TINY_BATCH):
        yield Remark(
            "batch_norm",
            f"a model with batch normalisation sees {micro} samples at a time, not the batch: another model than at "
            "once (13 % to 28 % different here), unless it has GroupNorm or ghost batches",
        )
    for code, message in batch_norm_caveats(
        batch_norm_layers or 0, micro, accumulates=steps > 1 or devices > 1, ghost_batch_size=None
    ):
        yield Remark(code, message)
    if micro < TINY_BATCH and steps > 1:
        yield Remark(
            "tiny_micro_batch",
            f"micro-batches of {micro} seldom fill a device: `bssearch probe step-time` says what a sample costs there",
        )
    if steps > 1 or devices > 1:
        yield Remark(
            "token_weighted_loss",
            "a loss averaged over tokens, or over anything else of which samples have unequal numbers, must be summed "
            "and divided by the number in the whole batch: the mean of the micro-batches' means is another loss "
            "(huggingface/transformers#34191: up to 10 %)",
        )
    if devices > 1 and steps > 1:
        yield Remark("no_sync", "gradients travel between devices only after the last micro-batch (DDP's no_sync)")
