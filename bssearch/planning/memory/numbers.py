"""A plan of memory from numbers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from bssearch.errors import LaunchError
from bssearch.planning.memory.devices import smallest_with
from bssearch.planning.memory.parameters import Format, ParameterBytes, Sharding, parameter_bytes
from bssearch.planning.memory.plan import Choice, MemoryPlan, Term, gib, in_order
from bssearch.planning.memory.request import Asked
from bssearch.planning.memory.transformer import SampleBytes, Transformer, layer_parameters, sample_bytes

FORMATS = (
    Format("fp32", "master"),
    Format("bf16", "master"),
    Format("bf16", "autocast"),
    Format("bf16", "pure"),
    Format("fp8", "master"),
)
"""The precisions of the table; fp16 takes as much as bf16."""

OPTIMIZERS = ("sgd", "momentum", "adamw", "adam8bit", "adafactor", "muon")
"""The optimizers of the table."""

GATHERED_LAYERS = 2
"""Layers whose weights stand whole at a time under ZeRO stage 3: the one that computes and the one that is fetched."""

MOST_SHARDS = 1024
"""The most devices that are proposed: a choice."""


def plan_numbers(parameters: int, asked: Asked, model: Transformer | None) -> MemoryPlan:
    """Return the plan of so many parameters, and of a transformer's activations where it is described.

    Raises `LaunchError` where the parameters alone do not fit, with what would.
    """
    fixed = _fixed(parameters, asked.form, asked.optimizer, asked.sharding, model)
    if asked.memory.largest is not None and fixed.least > asked.memory.largest:
        raise does_not_fit(parameters, fixed.least, asked, model)
    sample = None if model is None else sample_bytes(model, asked.form, checkpointing=asked.checkpointing)
    beside = _beside(fixed, asked, model)
    largest, safe = _fitting(asked, fixed.fixed + beside, sample)
    micro_batch = None if sample is None else (asked.micro_batch or safe or None)
    return MemoryPlan(
        basis="numbers",
        parameters=parameters,
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
        peak_bytes=None if sample is None or micro_batch is None else _peak(fixed, beside, asked, sample, micro_batch),
        terms=_terms(fixed, asked, model, sample),
        table=tuple(_table(parameters, asked, model)) if asked.table else (),
        notes=tuple(_notes(asked, fixed, model, sample, largest)),
    )


def _fixed(
    parameters: int, form: Format, optimizer: str, sharding: Sharding, model: Transformer | None
) -> ParameterBytes:
    hidden, vocabulary = (None, None) if model is None else (model.hidden, model.vocabulary)
    return parameter_bytes(parameters, form, optimizer, sharding, hidden=hidden, vocabulary=vocabulary)


def _gathered(form: Format, asked: Asked, model: Transformer | None) -> int:
    if asked.sharding.stage < 3 or model is None:
        return 0
    return min(GATHERED_LAYERS, model.layers) * layer_parameters(model) * form.weight_bytes


def _beside(fixed: ParameterBytes, asked: Asked, model: Transformer | None) -> int:
    """Return the bytes that stand beside the activations without growing with the batch."""
    return fixed.autocast_copies + _gathered(asked.form, asked, model)


def _peak(fixed: ParameterBytes, beside: int, asked: Asked, sample: SampleBytes, micro_batch: int) -> int:
    """Return the peak of a step of one micro-batch: there are no gradients yet where its activations are complete."""
    forward = fixed.fixed - fixed.gradients + beside + micro_batch * sample.total
    on_cpu = asked.device is not None and not asked.device.is_cuda
    update = fixed.fixed + (0 if on_cpu else fixed.foreach)
    return max(forward, fixed.fixed + beside, update) + asked.memory.overhead


def _fitting(asked: Asked, standing: int, sample: SampleBytes | None) -> tuple[int | None, int | None]:
    """Return the largest and the safe micro-batch beside what stands; None where either is not known."""
    if sample is None or asked.memory.largest is None or asked.memory.safe is None:
        return None, None
    return (
        max(0, (asked.memory.largest - standing) // sample.total),
        max(0, (asked.memory.safe - standing) // sample.total),
    )


def _terms(
    fixed: ParameterBytes, asked: Asked, model: Transformer | None, sample: SampleBytes | None
) -> tuple[Term, ...]:
    per_sample = SampleBytes(activations=0, attention_scores=0, logits=0) if sample is None else sample
    on_cpu = asked.device is not None and not asked.device.is_cuda
    made = [
        Term.of("weights", fixed.weights),
        Term.of("gradients", fixed.gradients),
        Term.of("optimizer_state", fixed.optimizer_state),
        Term.of("master_weights", fixed.master_weights),
        Term.of("workspaces", asked.memory.overhead),
        Term.of("autocast_copies", fixed.autocast_copies),
        Term.of("gathered_weights", _gathered(asked.form, asked, model)),
        Term.of("activations", 0, per_sample.activations),
        Term.of("attention_scores", 0, per_sample.attention_scores),
        Term.of("logits", 0, per_sample.logits),
        Term.of("foreach_temporaries", 0 if on_cpu else fixed.foreach),
    ]
    return in_order({one.term: one for one in made})


def _table(parameters: int, asked: Asked, model: Transformer | None) -> Iterator[Choice]:
    for form, optimizer, checkpointing in product(FORMATS, OPTIMIZERS, (False, True)):
        fixed = _fixed(parameters, form, optimizer, asked.sharding, model)
        sample = None if model is None else sample_bytes(model, form, checkpointing=checkpointing)
        other = replace(asked, form=form)
        largest, safe = _fitting(other, fixed.fixed + _beside(fixed, other, model), sample)
        yield Choice(
            precision=form.precision,
            mixed=form.mixed_with_fp32,
            optimizer=optimizer,
            checkpointing=checkpointing,
            fixed_bytes=fixed.fixed,
            activation_bytes_per_sample=None if sample is None else sample.total,
            largest_micro_batch=largest,
            safe_micro_batch=safe,
        )


def _notes(
    asked: Asked, fixed: ParameterBytes, model: Transformer | None, sample: SampleBytes | None, largest: int | None
) -> Iterator[str]:
    if sample is not None:
        yield (
            "Largest and safe micro-batch leave room for gradients beside all activations, as accumulation needs; "
            "gradients do not grow with the batch."
        )
    if model is not None and sample is not None and not model.fused_attention and model.sequence >= 1024:
        yield (
            f"Attention's scores are {gib(sample.attention_scores)} of each sample: fused (flash) attention does not "
            "keep them (--fused-attention)."
        )
    if largest == 0:
        yield "Not even one sample fits: try --checkpointing, a shorter --sequence, or a row of the table that does."
    if asked.memory.largest is not None and fixed.fixed + fixed.foreach > asked.memory.largest:
        yield (
            f"The update of all tensors at once needs {gib(fixed.foreach)} more, which is not there: give the "
            "optimizer foreach=False or fused=True."
        )
    yield from asked.notes()


def does_not_fit(
    parameters: int,
    needed: int,
    asked: Asked,
    model: Transformer | None = None,
    formats: Sequence[Format] = FORMATS,
) -> LaunchError:
    """Return the error for parameters that take more than there is, with the choices that take less."""
    room, there = asked.memory.largest or 0, asked.memory.total or 0
    where = "the memory given" if asked.device is None else asked.device.name
    mixed = "" if asked.form.mixed_with_fp32 is None else f" ({asked.form.mixed})"
    cures = (
        "; ".join(_cures(parameters, needed, room, asked, model, formats)) or "nothing here does: take a smaller model"
    )
    return LaunchError(
        f"{parameters:,} parameters in {asked.form.precision}{mixed} with {asked.optimizer} take {gib(needed)} before "
        f"any activation; {where} has {gib(there)}",
        hint=f"what fits: {cures}",
    )


def _cures(
    parameters: int, needed: int, room: int, asked: Asked, model: Transformer | None, formats: Sequence[Format]
) -> Iterator[str]:
    if (device := smallest_with(needed, bf16=asked.form.precision == "bf16")) is not None:
        yield f"--device {device.name} ({gib((device.memory_bytes or 0) - device.taken_bytes)} beside its context)"
    has_no_bf16 = asked.device is not None and asked.device.lacks("bf16")
    for one in formats:
        form = replace(one, precision="fp16") if has_no_bf16 and one.precision == "bf16" else one
        size = _fixed(parameters, form, asked.optimizer, asked.sharding, model).least
        if size <= room and form != asked.form:
            mixed = "" if form.mixed_with_fp32 is None else f" --mixed {form.mixed}"
            yield f"--precision {form.precision}{mixed} ({gib(size)})"
            break
    for optimizer in OPTIMIZERS[::-1]:
        size = _fixed(parameters, asked.form, optimizer, asked.sharding, model).least
        if size <= room:
            yield f"--optimizer {optimizer} ({gib(size)})"
            break
    for stage in (1, 2, 3):
        devices = 2
        while devices <= MOST_SHARDS:
            size = _fixed(parameters, asked.form, asked.optimizer, Sharding(stage, devices), model).least
            if size <= room:
                yield f"--stage {stage} --devices {devices} ({gib(size)} each)"
                break
            devices *= 2
