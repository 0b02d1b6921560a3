"""A plan of memory from a model's own training step, traced at two batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from bssearch.errors import UsageError
from bssearch.planning.memory.lifetimes import PeakByBatch, StepLifetimes
from bssearch.planning.memory.models import ModelRequest, NoBlocksError, build_model, checkpoint_blocks
from bssearch.planning.memory.numbers import OPTIMIZERS, does_not_fit
from bssearch.planning.memory.parameters import Format, ParameterBytes, Sharding, parameter_bytes
from bssearch.planning.memory.plan import Choice, MemoryPlan, Term, gib, in_order
from bssearch.planning.memory.request import Asked
from bssearch.planning.memory.trace import Step, trace
from bssearch.records import Configuration
from bssearch.training.optimizers import build_optimizer

SIZES = (2, 4)
"""The micro-batch sizes that are traced: a choice. At 1 batch normalisation may refuse, and broadcasts look alike."""

FORMATS = (Format("fp32", "autocast"), Format("bf16", "autocast"), Format("bf16", "pure"))
"""The precisions of the table."""

_TRACED = {
    "sgd": ("sgd", {"momentum": 0.0, "nesterov": False}),
    "momentum": ("sgd", {"momentum": 0.9}),
    "adafactor-factored": ("adafactor", {}),
    **{name: (name, {}) for name in ("adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "adagrad", "muon")},
    **{name: (name, {}) for name in ("lamb", "lars")},
}
"""The optimizers whose step is traced; of others the state is taken from `parameters`."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def plan_model(request: ModelRequest, asked: Asked) -> MemoryPlan:
    """Return the plan of a model's training step.

    Raises `LaunchError` where it does not fit before any activation, the errors of `build_model`, and `UsageError`
    where the model's step cannot be traced.
    """
    if asked.form.precision == "fp8":
        raise UsageError("--precision fp8 is not traced: with --model it is fp32, bf16 or fp16")
    if asked.form.mixed_with_fp32 == "master":
        raise UsageError("--mixed master is not traced: with --model it is autocast or pure")
    small, large, module = _traces(request, asked, asked.optimizer)
    parameters = sum(one.numel() for one in module.parameters())
    untraced = _untraced(parameters, asked, asked.optimizer)
    curve, accumulated = PeakByBatch(small, large), _accumulated(small, large)
    fixed = _fixed_terms(large, untraced)
    needed = sum(fixed.values())
    if asked.memory.largest is not None and needed > asked.memory.largest:
        raise does_not_fit(parameters, needed, asked, formats=FORMATS)
    largest, safe = _fitting(accumulated, asked, untraced)
    micro_batch = asked.micro_batch or safe or SIZES[0]
    per_sample = curve.bytes_per_sample(largest or micro_batch)
    return MemoryPlan(
        basis="trace",
        model=request.name,
        parameters=parameters,
        **asked.in_plan(),
        weights_bytes=fixed["weights"],
        gradients_bytes=fixed["gradients"],
        optimizer_bytes=fixed["optimizer_state"],
        master_weights_bytes=0,
        fixed_bytes=needed,
        activation_bytes_per_sample=per_sample,
        largest_micro_batch=largest,
        safe_micro_batch=safe,
        micro_batch=micro_batch,
        peak_bytes=curve.peak_bytes(micro_batch) + untraced.optimizer_state + asked.memory.overhead,
        terms=_terms(accumulated, large, fixed, micro_batch, untraced, asked),
        table=tuple(_table(request, asked)) if asked.table else (),
        notes=tuple(_notes(module, asked, fixed["gradients"])),
    )


def _traces(
    request: ModelRequest, asked: Asked, optimizer: str | None
) -> tuple[StepLifetimes, StepLifetimes, nn.Module]:
    """Return the traces of a step at both sizes, sharded as asked, and the model."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    short = asked.form.precision != "fp32"
    dtype = _DTYPES[asked.form.precision] if short and asked.form.mixed == "pure" else None
    model = build_model(request, mode, dtype)
    if asked.checkpointing:
        checkpoint_blocks(model.module, request.name)
    step = Step(
        model=model.module,
        batch=model.batch,
        loss=model.loss,
        optimizer=_optimizer(optimizer),
        autocast=asked.form.precision if short and dtype is None else None,
        is_cuda=asked.device is None or asked.device.is_cuda,
        has_flash=asked.device is None or asked.device.has_flash,
    )
    small, large = (_sharded(_traced(step, size, mode, request), asked.sharding) for size in SIZES)
    return small, large, model.module


def _traced(step: Step, size: int, mode: FakeTensorMode, request: ModelRequest) -> StepLifetimes:
    try:
        return trace(step, size, mode)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"--model {request.name} looks at values as it computes ({error.func}): what it needs depends on the data",
            hint="bssearch probe memory SPEC measures it",
        ) from error
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or [""]
        raise UsageError(f"--model {request.name} does not train: {type(error).__name__}: {lines[0]}") from error


def _optimizer(name: str | None) -> Callable[[nn.Module], torch.optim.Optimizer] | None:
    """Return what makes an optimizer of a model; None of one that is not traced."""
    if name is None or name not in _TRACED:
        return None
    kind, options = _TRACED[name]
    configuration = Configuration(
        batch_size=1, learning_rate=1e-3, micro_batch_size=1, optimizer=kind, parameters=options
    )
    return lambda model: build_optimizer(model, configuration)


def _untraced(parameters: int, asked: Asked, optimizer: str) -> ParameterBytes:
    """Return the bytes of an optimizer that is not traced; nothing of one that is."""
    known = parameter_bytes(parameters, asked.form, optimizer, asked.sharding)
    return replace(known, optimizer_state=0, foreach=0) if optimizer in _TRACED else known


def _sharded(lifetimes: StepLifetimes, sharding: Sharding) -> StepLifetimes:
    """Return a trace as one of several devices sees it."""
    if sharding.stage:
        stages = {
            "optimizer_state": 1,
            "foreach_temporaries": 1,
            "gradients": 2,
            "weights": 3,
            "autocast_copies": 3,
        }
        for one in lifetimes.allocations:
            one.size = sharding.share(one.size, stages.get(one.term or "", 4))
    return lifetimes


def _fixed_terms(lifetimes: StepLifetimes, untraced: ParameterBytes) -> dict[str, int]:
    found = dict.fromkeys(("weights", "gradients", "optimizer_state"), 0)
    for one in lifetimes.allocations:
        if one.term in found:
            found[one.term] += one.size
    found["optimizer_state"] += untraced.optimizer_state
    return found


def _accumulated(small: StepLifetimes, large: StepLifetimes) -> PeakByBatch:
    """Return the peak of a step that accumulates: its gradients live beside all activations."""
    return PeakByBatch(small.accumulating(), large.accumulating())


def _fitting(curve: PeakByBatch, asked: Asked, untraced: ParameterBytes) -> tuple[int | None, int | None]:
    """Return the largest and the safe micro-batch by the peak of a step that accumulates."""
    if asked.memory.largest is None or asked.memory.safe is None:
        return None, None
    state = untraced.optimizer_state
    return curve.largest(asked.memory.largest - state), curve.largest(asked.memory.safe - state)


def _terms(
    curve: PeakByBatch,
    large: StepLifetimes,
    fixed: Mapping[str, int],
    micro_batch: int,
    untraced: ParameterBytes,
    asked: Asked,
) -> tuple[Term, ...]:
    """Return what is as large as the model, what the passes have at their peak, and what the update needs besides."""
    made = {name: Term.of(name, size, slope) for name, (size, slope) in curve.terms(micro_batch).items()}
    made |= {name: Term.of(name, size) for name, size in fixed.items()}
    workspaces = made.get("workspaces", Term.of("workspaces", 0))
    made["workspaces"] = replace(workspaces, bytes=workspaces.bytes + asked.memory.overhead)
    made["foreach_temporaries"] = Term.of(
        "foreach_temporaries", large.most_of("foreach_temporaries") + untraced.foreach
    )
    return in_order(made)


def _table(request: ModelRequest, asked: Asked) -> Iterator[Choice]:
    for form, checkpointing in product(FORMATS, (False, True)):
        other = replace(asked, form=form, checkpointing=checkpointing)
        try:
            small, large, module = _traces(request, other, None)
        except NoBlocksError:
            continue
        curve, accumulated = PeakByBatch(small, large), _accumulated(small, large)
        parameters = sum(one.numel() for one in module.parameters())
        for optimizer in OPTIMIZERS:
            state = parameter_bytes(parameters, form, optimizer, asked.sharding)
            terms = _fixed_terms(large, state)
            largest, safe = _fitting(accumulated, other, state)
            yield Choice(
                precision=form.precision,
                mixed=form.mixed_with_fp32,
                optimizer=optimizer,
                checkpointing=checkpointing,
                fixed_bytes=sum(terms.values()),
                activation_bytes_per_sample=curve.bytes_per_sample(largest or SIZES[1]),
                largest_micro_batch=largest,
                safe_micro_batch=safe,
            )


def _notes(module: nn.Module, asked: Asked, gradients: int) -> Iterator[str]:
    yield (
        "The peak is that of a step of one micro-batch. Largest and safe micro-batch leave room for the gradients "
        f"beside all activations, as accumulation needs: {gib(gradients)}, whatever the batch size."
    )
    if asked.sharding.stage == 3:
        yield "The layers whose shards stage 3 gathers, one or two at a time, are not in the trace."
    if any(isinstance(one, nn.RNNBase) for one in module.modules()):
        yield "Recurrent kernels keep workspaces that no trace sees: bssearch probe memory measures them."
    yield from asked.notes()
    if asked.device is not None and asked.device.is_cuda:
        yield "Attention, autocast and dropout are as a GPU has them; workspaces of convolutions are estimates."
