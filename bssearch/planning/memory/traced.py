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
from bssearch.planning.memory.models import NoBlocksError, build_model, checkpoint_blocks
from bssearch.planning.memory.numbers import OPTIMIZERS, changed, check_fits
from bssearch.planning.memory.parameters import BY_NAME, ParameterBytes, parameter_bytes
from bssearch.planning.memory.plan import Choice, MemoryPlan, Term, gib, in_order
from bssearch.planning.memory.request import MemoryRequest
from bssearch.planning.memory.trace import DTYPES, Step, trace
from bssearch.records import Configuration
from bssearch.training.optimizers import build_optimizer

SIZES = (2, 4)
"""The micro-batch sizes that are traced. At 1 batch normalisation may refuse, and broadcasts look alike."""

IN_TABLE = (BY_NAME["fp32", None], BY_NAME["bf16", "autocast"], BY_NAME["bf16", "pure"])
"""The precisions of the table."""

_TRACED = {
    "sgd": ("sgd", {"momentum": 0.0, "nesterov": False}),
    "momentum": ("sgd", {"momentum": 0.9}),
    "adafactor-factored": ("adafactor", {}),
    **{name: (name, {}) for name in ("adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "adagrad", "muon")},
    **{name: (name, {}) for name in ("lamb", "lars")},
}
"""The optimizers whose step is traced; of others the state is taken from `parameters`."""

_SHARDED_FROM = {
    "optimizer_state": 1,
    "foreach_temporaries": 1,
    "gradients": 2,
    "weights": 3,
    "autocast_copies": 3,
}
"""ZeRO's stage from which on a term is sharded."""


def plan_model(asked: MemoryRequest) -> MemoryPlan:
    """Return the plan of a model's training step.

    Raises `LaunchError` if it does not fit before any activation, the errors of `build_model`, and `UsageError` if the
    model's step cannot be traced.
    """
    small, large, module = _traces(asked, asked.optimizer)
    asked = changed(asked, parameters=sum(one.numel() for one in module.parameters()))
    untraced = _untraced(asked)
    curve, accumulated = PeakByBatch(small, large), _accumulated(small, large)
    fixed = _fixed_terms(large, untraced)
    check_fits(asked, sum(fixed.values()), IN_TABLE)
    largest, safe = _fitting(accumulated, asked, untraced)
    micro_batch = asked.micro_batch or safe or SIZES[0]
    return MemoryPlan(
        basis="trace",
        parameters=asked.parameters,
        **asked.in_plan(),
        weights_bytes=fixed["weights"],
        gradients_bytes=fixed["gradients"],
        optimizer_bytes=fixed["optimizer_state"],
        master_weights_bytes=0,
        fixed_bytes=sum(fixed.values()),
        activation_bytes_per_sample=curve.bytes_per_sample(largest or micro_batch),
        largest_micro_batch=largest,
        safe_micro_batch=safe,
        micro_batch=micro_batch,
        peak_bytes=curve.peak_bytes(micro_batch) + untraced.optimizer_state + asked.overhead_bytes,
        terms=_terms(accumulated, large, fixed, micro_batch, untraced, asked),
        table=list(_table(asked)) if asked.table else [],
        notes=list(_notes(module, asked, fixed["gradients"])),
    )


def _traces(asked: MemoryRequest, optimizer: str | None) -> tuple[StepLifetimes, StepLifetimes, nn.Module]:
    """Return the traces of a step at both sizes, sharded as asked, and the model."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = build_model(asked, mode, DTYPES[asked.precision] if asked.form.mixed == "pure" else None)
    if asked.checkpointing:
        checkpoint_blocks(model.module, asked.name)
    step = Step(
        model=model.module,
        batch=model.batch,
        loss=model.loss,
        optimizer=_optimizer(optimizer),
        autocast=asked.precision if asked.form.mixed == "autocast" else None,
        is_cuda=asked.kind is None or asked.kind.is_cuda,
        has_flash=asked.kind is None or asked.kind.has_flash,
    )
    small, large = (_sharded(_traced(step, size, mode, asked), asked) for size in SIZES)
    return small, large, model.module


def _traced(step: Step, size: int, mode: FakeTensorMode, asked: MemoryRequest) -> StepLifetimes:
    try:
        return trace(step, size, mode)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"--model {asked.name} looks at values as it computes ({error.func}): what it needs depends on the data",
            hint="bssearch probe memory SPEC measures it",
        ) from error
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or [""]
        raise UsageError(f"--model {asked.name} does not train: {type(error).__name__}: {lines[0]}") from error


def _optimizer(name: str | None) -> Callable[[nn.Module], torch.optim.Optimizer] | None:
    """Return what makes an optimizer of a model; None of one that is not traced."""
    if name is None or name not in _TRACED:
        return None
    kind, options = _TRACED[name]
    configuration = Configuration(
        batch_size=1, learning_rate=1e-3, micro_batch_size=1, optimizer=kind, parameters=options
    )
    return lambda model: build_optimizer(model, configuration)


def _untraced(asked: MemoryRequest) -> ParameterBytes:
    """Return the bytes of an optimizer that is not traced; nothing of one that is."""
    known = parameter_bytes(asked)
    return replace(known, optimizer_state=0, foreach=0) if asked.optimizer in _TRACED else known


def _sharded(lifetimes: StepLifetimes, asked: MemoryRequest) -> StepLifetimes:
    """Return a trace as one of several devices sees it."""
    for one in lifetimes.allocations:
        if one.term in _SHARDED_FROM:
            one.size = asked.share(one.size, _SHARDED_FROM[one.term])
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


def _fitting(curve: PeakByBatch, asked: MemoryRequest, untraced: ParameterBytes) -> tuple[int | None, int | None]:
    """Return the largest and the safe micro-batch by the peak of a step that accumulates."""
    return asked.fitting(lambda room: curve.largest(room - untraced.optimizer_state))


def _terms(
    curve: PeakByBatch,
    large: StepLifetimes,
    fixed: Mapping[str, int],
    micro_batch: int,
    untraced: ParameterBytes,
    asked: MemoryRequest,
) -> list[Term]:
    """Return what is as large as the model, what the passes have at their peak, and what the update needs besides."""
    made = {**curve.terms(micro_batch), **{name: (float(size), 0.0) for name, size in fixed.items()}}
    size, slope = made.get("workspaces", (0.0, 0.0))
    made["workspaces"] = (round(size) + asked.overhead_bytes, slope)
    made["foreach_temporaries"] = (large.most_of("foreach_temporaries") + untraced.foreach, 0.0)
    return in_order(made)


def _table(asked: MemoryRequest) -> Iterator[Choice]:
    for form, checkpointing in product(IN_TABLE, (False, True)):
        other = changed(asked, precision=form.precision, mixed=form.mixed, checkpointing=checkpointing)
        try:
            small, large, _ = _traces(other, None)
        except NoBlocksError:
            continue
        curve, accumulated = PeakByBatch(small, large), _accumulated(small, large)
        for optimizer in OPTIMIZERS:
            state = parameter_bytes(changed(other, optimizer=optimizer))
            largest, safe = _fitting(accumulated, other, state)
            yield Choice(
                precision=form.precision,
                mixed=form.mixed,
                optimizer=optimizer,
                checkpointing=checkpointing,
                fixed_bytes=sum(_fixed_terms(large, state).values()),
                activation_bytes_per_sample=curve.bytes_per_sample(largest or SIZES[1]),
                largest_micro_batch=largest,
                safe_micro_batch=safe,
            )


def _notes(module: nn.Module, asked: MemoryRequest, gradients: int) -> Iterator[str]:
    yield (
        "The peak is that of a step of one micro-batch. Largest and safe micro-batch leave room for the gradients "
        f"beside all activations, as accumulation needs: {gib(gradients)}, whatever the batch size."
    )
    if asked.stage == 3:
        yield "The layers whose shards stage 3 gathers, one or two at a time, are not in the trace."
    if any(isinstance(one, nn.RNNBase) for one in module.modules()):
        yield "Recurrent kernels keep workspaces that no trace sees: bssearch probe memory measures them."
    yield from asked.notes()
    if asked.kind is not None and asked.kind.is_cuda:
        yield "Attention, autocast and dropout are as a GPU has them; workspaces of convolutions are estimates."
