"""Memory plans from numbers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from bssearch.errors import LaunchError
from bssearch.planning.memory.parameters import (
    FORMATS,
    NumberFormat,
    ParameterBytes,
    SampleBytes,
    layer_parameters,
    parameter_bytes,
    sample_bytes,
)
from bssearch.planning.memory.request import (
    MemoryOption,
    MemoryPlan,
    MemoryPlanRequest,
    Term,
    gib,
    in_order,
    smallest_with,
)

IN_TABLE = tuple(one for one in FORMATS if one.precision != "fp16")  # in the table; fp16 takes as much as bf16

OPTIMIZERS = ("sgd", "momentum", "adamw", "adam8bit", "adafactor", "muon")  # in the table

GATHERED_LAYERS = 2  # whole layers at a time in ZeRO stage 3: one computing, one being fetched

MOST_SHARDS = 1024  # most devices to propose


def plan_numbers(asked: MemoryPlanRequest) -> MemoryPlan:
    """Plan for given parameters; raise `LaunchError` if they alone do not fit."""
    fixed, sample = parameter_bytes(asked), _sample(asked)
    check_fits(asked, fixed.least, IN_TABLE)
    largest, safe = _fitting(asked)
    micro_batch = None if sample is None else (asked.micro_batch or safe or None)
    return MemoryPlan(
        basis="numbers",
        parameters=asked.parameters,
        **asked.in_plan(),
        weights_bytes=fixed.weights,
        gradients_bytes=fixed.gradients,
        optimizer_bytes=fixed.optimizer_state,
        master_weights_bytes=fixed.master_weights,
        fixed_bytes=fixed.fixed,
        activation_bytes_per_sample=None if sample is None else sample.total,
        largest_micro_batch=largest,
        safe_micro_batch=safe,
        micro_batch=micro_batch,
        peak_bytes=None if sample is None or micro_batch is None else _peak(fixed, asked, sample, micro_batch),
        terms=_terms(fixed, asked, sample),
        table=list(_table(asked)) if asked.table else [],
        notes=list(_notes(asked, fixed, sample, largest)),
    )


def check_fits(asked: MemoryPlanRequest, needed: int, formats: Sequence[NumberFormat]) -> None:
    """Raise `LaunchError` if the bytes do not fit; the hint names smaller options."""
    if asked.room_bytes is None or needed <= asked.room_bytes:
        return
    there = asked.device or "the memory given"
    mixed = "" if asked.form.mixed is None else f" ({asked.form.mixed})"
    cures = "; ".join(what_fits(asked, needed, asked.room_bytes, formats))
    raise LaunchError(
        f"{asked.parameters:,} parameters in {asked.precision}{mixed} with {asked.optimizer} take {gib(needed)} before "
        f"any activation; {there} has {gib(asked.memory_bytes or 0)}",
        hint=f"what fits: {cures or 'no option does; use a smaller model'}",
    )


def what_fits(asked: MemoryPlanRequest, needed: int, room: float, formats: Sequence[NumberFormat]) -> Iterator[str]:
    """Yield the options with which the parameters fit."""
    if (device := smallest_with(needed, bf16=asked.precision == "bf16")) is not None:
        yield f"--device {device.name} ({gib((device.memory_bytes or 0) - device.taken_bytes)} beside its context)"
    has_no_bf16 = asked.kind is not None and asked.kind.lacks("bf16")
    usable = [one for one in formats if one != asked.form and not (has_no_bf16 and one.precision == "bf16")]
    if has_no_bf16:
        usable += [one for one in FORMATS if one.precision == "fp16" and one != asked.form]
    shards = [2**power for power in range(1, MOST_SHARDS.bit_length())]
    kinds: list[list[dict[str, Any]]] = [
        [{"precision": one.precision, "mixed": one.mixed} for one in usable],
        [{"optimizer": name} for name in OPTIMIZERS[::-1]],
        *([{"stage": stage, "devices": count} for count in shards] for stage in (1, 2, 3)),
    ]
    for changes in kinds:
        sizes = ((change, parameter_bytes(asked.model_copy(update=change)).least) for change in changes)
        fitting, size = next(((change, size) for change, size in sizes if size <= room), ({}, 0))
        words = " ".join(f"--{name} {value}" for name, value in fitting.items() if value is not None)
        if words:
            yield f"{words} ({gib(size)}{' each' if 'stage' in fitting else ''})"


def _sample(asked: MemoryPlanRequest) -> SampleBytes | None:
    model = asked.transformer
    return None if model is None else sample_bytes(model, asked.form, checkpointing=asked.checkpointing)


def _gathered(asked: MemoryPlanRequest) -> int:
    model = asked.transformer
    if (asked.stage or 0) < 3 or model is None:
        return 0
    return min(GATHERED_LAYERS, model.layers) * layer_parameters(model) * asked.form.weight


def _peak(fixed: ParameterBytes, asked: MemoryPlanRequest, sample: SampleBytes, micro_batch: int) -> int:
    # once a micro-batch's activations are complete, there are no gradients yet
    beside = fixed.autocast_copies + _gathered(asked)
    forward = fixed.fixed - fixed.gradients + beside + micro_batch * sample.total
    update = fixed.fixed + _foreach(fixed, asked)
    return max(forward, fixed.fixed + beside, update) + asked.overhead_bytes


def _foreach(fixed: ParameterBytes, asked: MemoryPlanRequest) -> int:
    # PyTorch updates all tensors at once on GPUs only
    return fixed.foreach if asked.kind is None or asked.kind.is_cuda else 0


def _fitting(asked: MemoryPlanRequest) -> tuple[int | None, int | None]:
    fixed, sample = parameter_bytes(asked), _sample(asked)
    if sample is None:
        return None, None
    standing, each = fixed.fixed + fixed.autocast_copies + _gathered(asked), sample.total
    return asked.fitting(lambda room: max(0, (room - standing) // each))


def _terms(fixed: ParameterBytes, asked: MemoryPlanRequest, sample: SampleBytes | None) -> list[Term]:
    each = sample or SampleBytes(activations=0, attention_scores=0, logits=0)
    return in_order(
        {
            "weights": (fixed.weights, 0),
            "gradients": (fixed.gradients, 0),
            "optimizer_state": (fixed.optimizer_state, 0),
            "master_weights": (fixed.master_weights, 0),
            "workspaces": (asked.overhead_bytes, 0),
            "autocast_copies": (fixed.autocast_copies, 0),
            "gathered_weights": (_gathered(asked), 0),
            "activations": (0, each.activations),
            "attention_scores": (0, each.attention_scores),
            "logits": (0, each.logits),
            "foreach_temporaries": (_foreach(fixed, asked), 0),
        }
    )


def _table(asked: MemoryPlanRequest) -> Iterator[MemoryOption]:
    for form, optimizer, checkpointing in product(IN_TABLE, OPTIMIZERS, (False, True)):
        other = asked.model_copy(
            update={
                "precision": form.precision,
                "mixed": form.mixed,
                "optimizer": optimizer,
                "checkpointing": checkpointing,
            }
        )
        sample, (largest, safe) = _sample(other), _fitting(other)
        yield MemoryOption(
            precision=form.precision,
            mixed=form.mixed,
            optimizer=optimizer,
            checkpointing=checkpointing,
            fixed_bytes=parameter_bytes(other).fixed,
            activation_bytes_per_sample=None if sample is None else sample.total,
            largest_micro_batch=largest,
            safe_micro_batch=safe,
        )


def _notes(
    asked: MemoryPlanRequest, fixed: ParameterBytes, sample: SampleBytes | None, largest: int | None
) -> Iterator[str]:
    if sample is not None:
        yield (
            "Largest and safe micro-batch leave room for gradients beside all activations, as accumulation needs; "
            "gradients do not grow with the batch."
        )
        if not asked.fused_attention and (asked.sequence or 0) >= 1024:
            yield (
                f"Attention's scores are {gib(sample.attention_scores)} of each sample: fused (flash) attention does "
                "not keep them (--fused-attention)."
            )
    if largest == 0:
        yield "Not even one sample fits: try --checkpointing, a shorter --sequence, or a row of the table that does."
    if asked.room_bytes is not None and fixed.fixed + fixed.foreach > asked.room_bytes:
        yield (
            f"The update of all tensors at once needs {gib(fixed.foreach)} more, which is not there: give the "
            "optimizer foreach=False or fused=True."
        )
    yield from asked.notes()
