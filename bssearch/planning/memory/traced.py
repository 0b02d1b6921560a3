"""Plan memory from a training step, traced with fake tensors at two batch sizes."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from math import floor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from bssearch.errors import UsageError
from bssearch.planning.memory.models import ModelUnderPlan, NoBlocksError, build_model, checkpoint_blocks
from bssearch.planning.memory.parameters import BY_NAME, ParameterBytes, parameter_bytes
from bssearch.planning.memory.request import (
    OPTIMIZERS,
    MemoryOption,
    MemoryPlan,
    MemoryPlanRequest,
    Term,
    check_fits,
    in_order,
)
from bssearch.records import Configuration
from bssearch.records.text import gib
from bssearch.training.optimizers import build_optimizer

# Rounding of PyTorch's CUDA allocator (kMinBlockSize in c10/cuda/CUDACachingAllocator). max_memory_allocated also
# counts blocks; unused space in segments belongs to the headroom.
CUDA_BLOCK_BYTES = 512


@dataclass(slots=True)
class Allocation:
    """The lifetime of a tensor's storage. Each creation or release of a storage is an event."""

    start: int  # the event that created the storage
    size: int  # in bytes
    phase: str  # build, inputs, forward, backward or optimizer
    elements: int  # elements of the first tensor
    width: int  # last dimension of the first tensor
    end: int | None = None  # the event that released the storage, if any
    term: str | None = None


@dataclass(frozen=True, slots=True)
class StepLifetimes:
    """The storages of a traced step, which starts at event ``since``."""

    micro_batch_size: int
    since: int
    allocations: Sequence[Allocation]

    def accumulating(self) -> StepLifetimes:
        """Return the step with all gradients present, as from the second micro-batch on."""
        return replace(
            self,
            allocations=[
                replace(one, start=0, end=None) if one.term == "gradients" else one for one in self.allocations
            ],
        )

    def events_before_update(self) -> int | None:
        first = min(
            (one.start for one in self.allocations if one.phase == "optimizer" and one.start > self.since), default=None
        )
        return None if first is None else first - self.since

    def live_bytes(self) -> npt.NDArray[np.int64]:
        changes = np.zeros(max((one.end or one.start for one in self.allocations), default=0) + 2, dtype=np.int64)
        for one in self.allocations:
            changes[one.start] += one.size
            if one.end is not None:
                changes[one.end] -= one.size
        return np.cumsum(changes)[self.since :]

    def terms_at(self, event: int) -> dict[str, int]:
        found = Counter[str]()
        for one in self.allocations:
            if one.start <= event + self.since and (one.end is None or event + self.since < one.end):
                found[one.term or one.phase] += one.size
        return found

    def most_of(self, term: str) -> int:
        of_term = replace(self, allocations=[one for one in self.allocations if one.term == term])
        return int(of_term.live_bytes().max(initial=0))


class PeakByBatch:
    """The memory peak of a step by micro-batch size, from traces at two sizes.

    The live bytes at each event are linear in the micro-batch size. If the traces have different numbers of events, the
    peak itself counts as linear.
    """

    def __init__(self, small: StepLifetimes, large: StepLifetimes) -> None:
        self._small, self._large = small, large
        below, above = small.live_bytes(), large.live_bytes()
        if len(below) != len(above):
            below, above = below.max(keepdims=True), above.max(keepdims=True)
        self._per_sample = (above - below) / (large.micro_batch_size - small.micro_batch_size)
        self._fixed = below - small.micro_batch_size * self._per_sample

    def peak_bytes(self, micro_batch_size: int) -> int:
        return round(float((self._fixed + micro_batch_size * self._per_sample).max()))

    def bytes_per_sample(self, micro_batch_size: int) -> int:
        return self.peak_bytes(micro_batch_size + 1) - self.peak_bytes(micro_batch_size)

    def largest(self, memory_bytes: float) -> int:
        if (self._fixed > memory_bytes).any():
            return 0
        grows = self._per_sample > 0
        return floor(((memory_bytes - self._fixed[grows]) / self._per_sample[grows]).min()) if grows.any() else 0

    def terms(self, micro_batch_size: int) -> Mapping[str, tuple[float, float]]:
        """Return each term's fixed bytes and bytes per sample at the peak before the optimizer's update.

        If the traces differ in events, the peak is of the whole step.
        """
        if len(self._fixed) > 1:
            live = self._fixed + micro_batch_size * self._per_sample
            event = int(live[: self._small.events_before_update()].argmax())
            small, large = self._small.terms_at(event), self._large.terms_at(event)
        else:
            small, large = (one.terms_at(int(one.live_bytes().argmax())) for one in (self._small, self._large))
        return {name: self._line(small.get(name, 0), large.get(name, 0)) for name in dict.fromkeys([*small, *large])}

    def _line(self, small: int, large: int) -> tuple[float, float]:
        slope = (large - small) / (self._large.micro_batch_size - self._small.micro_batch_size)
        return small - slope * self._small.micro_batch_size, slope


# Without a CUDA build, PyTorch cannot differentiate fake CUDA tensors. Traces therefore use CPU tensors, with the
# device's attention kernel, fp32 operations of autocast, and dropout mask. All machines compute the same plan.

FLASH_HEAD_SIZE = 256  # the largest head of flash attention (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)

IN_FP32 = frozenset(
    {
        "pow",
        "prod",
        "sum",
        "cumsum",
        "cumprod",
        "exp",
        "expm1",
        "log",
        "log10",
        "log1p",
        "log2",
        "reciprocal",
        "rsqrt",
        "norm",
        "softplus",
        "softmax",
        "log_softmax",
        "layer_norm",
        "group_norm",
        "rms_norm",
        "cross_entropy",
        "nll_loss",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "kl_div",
        "cosine_similarity",
        "cosine_embedding_loss",
        "binary_cross_entropy_with_logits",
        "cdist",
        "renorm",
        "softmin",
        "__pow__",
        "__rpow__",
        "__rtruediv__",
    }
)
# Autocast runs these functions in fp32 on CUDA but in 16 bits on the CPU (PyTorch: "CUDA Ops that can autocast to
# float32")


class CudaKernels(TorchFunctionMode):
    """A mode that traces CUDA's kernels. ``has_flash`` is True from compute capability 8.0 on."""

    def __init__(self, *, has_flash: bool) -> None:
        super().__init__()
        self._has_flash = has_flash

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **named)
        if func is functional.dropout:
            return _dropout(*args, **named)
        if torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "") in IN_FP32:
            args, named = tree_map(_in_fp32, (args, named))
        return func(*args, **named)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        fits_flash = self._has_flash and query.dtype != torch.float32 and query.shape[-1] <= FLASH_HEAD_SIZE
        if fits_flash and attn_mask is None:
            return torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        if enable_gqa and query.shape[1] != key.shape[1]:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if attn_mask is not None:
            attn_mask = _added(attn_mask, query).expand(*query.shape[:-1], key.shape[-2])
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]


def _added(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(mask, dtype=query.dtype) if mask.dtype == torch.bool else mask.to(query.dtype)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _in_fp32(value: Any) -> Any:
    is_short = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_short else value


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_CONVOLUTIONS = {
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
    torch.ops.aten.cudnn_convolution.default,
    torch.ops.aten.mkldnn_convolution.default,
}

# A storage's term by phase, unless a more specific term is known
TERM_OF_PHASE = {
    "build": "weights",
    "inputs": "inputs",
    "forward": "activations",
    "backward": "activation_gradients",
    "optimizer": "foreach_temporaries",
}


def trace(
    model: ModelUnderPlan, asked: MemoryPlanRequest, optimizer: str | None, micro_batch_size: int, mode: FakeTensorMode
) -> StepLifetimes:
    """Trace a model's training step with fake tensors of ``mode``, after the first update of a traced ``optimizer``."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # the error is raised
    module, dtype = model.module, DTYPES[asked.precision] if asked.form.mixed == "autocast" else None
    recorder = _Recorder(CUDA_BLOCK_BYTES if _is_cuda(asked) else 1)
    with ExitStack() as stack:
        stack.enter_context(mode)
        if _is_cuda(asked):
            stack.enter_context(CudaKernels(has_flash=asked.kind is None or asked.kind.has_flash))
        stack.enter_context(recorder)
        for tensor in [*module.parameters(), *module.buffers()]:
            recorder.note(tensor, "weights")
        updater = _with_state(module, asked, optimizer, recorder)
        since = recorder.clock + 1
        recorder.phase = "inputs"
        batch = model.batch(micro_batch_size)
        recorder.phase = "forward"
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss, output = model.loss(module, batch)
        logits = None if output is None or output.ndim not in (2, 3) else (output.shape[-1], output.numel())
        del output
        recorder.phase = "backward"
        # with an edge instead of a tensor, the modes also apply to recomputed blocks
        torch.autograd.backward([torch.autograd.graph.get_gradient_edge(loss)], [torch.ones_like(loss)])
        del loss
        for parameter in module.parameters():
            if parameter.grad is not None:
                recorder.note(parameter.grad, "gradients")
        recorder.phase = "optimizer"
        if updater is not None:
            updater.step()
        del batch
    for parameter in module.parameters():
        parameter.grad = None
    return StepLifetimes(micro_batch_size, since, [_named(one, logits) for one in recorder.allocations])


def _is_cuda(asked: MemoryPlanRequest) -> bool:
    return asked.kind is None or asked.kind.is_cuda


def _named(one: Allocation, logits: tuple[int, int] | None) -> Allocation:
    # Names the allocation's term; allocations as large as the model's output are logits
    is_output = logits is not None and one.width == logits[0] and 2 * one.elements > logits[1]
    is_logits = is_output and one.phase in ("forward", "backward")
    one.term = one.term or ("logits" if is_logits else TERM_OF_PHASE[one.phase])
    return one


def _with_state(
    module: nn.Module, asked: MemoryPlanRequest, name: str | None, recorder: _Recorder
) -> torch.optim.Optimizer | None:
    if name not in _TRACED:
        return None
    recorder.phase = "optimizer"
    kind, options = _TRACED[name]
    optimizer = build_optimizer(
        module,
        Configuration(batch_size=1, learning_rate=1e-3, micro_batch_size=1, optimizer=kind, parameters=options),
    )
    for group in optimizer.param_groups:
        if _is_cuda(asked) and "foreach" in group:
            group["foreach"] = True  # PyTorch's default on CUDA
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for tensor in tree_iter([dict(state) for state in optimizer.state.values()]):
        if isinstance(tensor, torch.Tensor):
            recorder.note(tensor, "optimizer_state")
    return optimizer


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, block_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = 0
        self.phase = "build"
        self.allocations: list[Allocation] = []
        self._block_bytes = block_bytes
        self._live: dict[int, tuple[Allocation, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        term = "autocast_copies" if func is torch.ops.aten._to_copy.default and self._is_weight(args[0]) else None
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor, term)
        if func in _CONVOLUTIONS:
            self._note_workspace(args, result)
        return result

    def note(self, tensor: torch.Tensor, term: str | None = None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            made = self._made(storage.nbytes(), tensor)
            self._live[key] = (made, weakref.ref(storage, lambda _: self._freed(key, made)))
        if term is not None:
            self._live[key][0].term = term

    def _made(self, size: int, tensor: torch.Tensor) -> Allocation:
        self.clock += 1
        made = Allocation(
            self.clock,
            -(-size // self._block_bytes) * self._block_bytes,
            self.phase,
            tensor.numel(),
            tensor.shape[-1] if tensor.ndim else 1,
        )
        self.allocations.append(made)
        return made

    def _freed(self, key: int, made: Allocation) -> None:
        self.clock += 1
        made.end = self.clock
        del self._live[key]

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        known = self._live.get(tensor.untyped_storage()._cdata)
        return known is not None and known[0].term == "weights"

    def _note_workspace(self, args: tuple[Any, ...], result: Any) -> None:
        # Records a convolution's temporary copies, in blocked layouts for oneDNN and channels-last for cuDNN
        tensors = args[:2] if isinstance(result, tuple) else (args[0], result)
        made = self._made(sum(one.numel() * one.element_size() for one in tensors), tensors[0])
        made.term = "workspaces"
        self.clock += 1
        made.end = self.clock


SIZES = (2, 4)  # traced micro-batches; at 1, batch normalisation may fail, and broadcasts are invisible

IN_TABLE = (BY_NAME["fp32", None], BY_NAME["bf16", "autocast"], BY_NAME["bf16", "pure"])  # formats in the table

# Optimizers to trace; `parameters` gives the state of other optimizers
_TRACED = {
    "sgd": ("sgd", {"momentum": 0.0, "nesterov": False}),
    "momentum": ("sgd", {"momentum": 0.9}),
    "adafactor-factored": ("adafactor", {}),
    **{name: (name, {}) for name in ("adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "adagrad", "muon")},
    **{name: (name, {}) for name in ("lamb", "lars")},
}

# ZeRO shards a term from this stage on
_SHARDED_FROM = {
    "optimizer_state": 1,
    "foreach_temporaries": 1,
    "gradients": 2,
    "weights": 3,
    "autocast_copies": 3,
}


def plan_model(asked: MemoryPlanRequest) -> MemoryPlan:
    small, large, module = _traces(asked, asked.optimizer)
    asked = asked.model_copy(update={"parameters": sum(one.numel() for one in module.parameters())})
    untraced = parameter_bytes(asked)
    if asked.optimizer in _TRACED:
        untraced = replace(untraced, optimizer_state=0, foreach=0)
    curve, accumulated = PeakByBatch(small, large), PeakByBatch(small.accumulating(), large.accumulating())
    fixed = _fixed_terms(large, untraced)
    check_fits(asked, sum(fixed.values()), IN_TABLE)
    largest, safe = _fitting(accumulated, asked, untraced)
    micro_batch = asked.micro_batch or safe or SIZES[0]
    return MemoryPlan(
        basis="trace",
        parameters=asked.parameters,
        trainable_parameters=sum(one.numel() for one in module.parameters() if one.requires_grad),
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


def _traces(asked: MemoryPlanRequest, optimizer: str | None) -> tuple[StepLifetimes, StepLifetimes, nn.Module]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = build_model(asked, mode, DTYPES[asked.precision] if asked.form.mixed == "pure" else None)
    if asked.checkpointing:
        checkpoint_blocks(model.module, asked.name)
    try:
        small, large = (_sharded(trace(model, asked, optimizer, size, mode), asked) for size in SIZES)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"--model {asked.name} reads tensor values ({error.func}), so the memory depends on the data",
            hint="measure the memory with `bssearch probe memory SPEC`",
        ) from error
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or [""]
        raise UsageError(
            f"--model {asked.name} failed to train: {type(error).__name__}: {lines[0]}",
            hint="correct the model or --input, or plan with --parameters",
        ) from error
    return small, large, model.module


def _sharded(lifetimes: StepLifetimes, asked: MemoryPlanRequest) -> StepLifetimes:
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


def _fitting(curve: PeakByBatch, asked: MemoryPlanRequest, untraced: ParameterBytes) -> tuple[int | None, int | None]:
    return asked.fitting(lambda room: curve.largest(room - untraced.optimizer_state))


def _terms(
    curve: PeakByBatch,
    large: StepLifetimes,
    fixed: Mapping[str, int],
    micro_batch: int,
    untraced: ParameterBytes,
    asked: MemoryPlanRequest,
) -> list[Term]:
    made = {**curve.terms(micro_batch), **{name: (float(size), 0.0) for name, size in fixed.items()}}
    size, slope = made.get("workspaces", (0.0, 0.0))
    made["workspaces"] = (round(size) + asked.overhead_bytes, slope)
    made["foreach_temporaries"] = (large.most_of("foreach_temporaries") + untraced.foreach, 0.0)
    return in_order(made)


def _table(asked: MemoryPlanRequest) -> Iterator[MemoryOption]:
    for form, checkpointing in product(IN_TABLE, (False, True)):
        other = asked.model_copy(
            update={"precision": form.precision, "mixed": form.mixed, "checkpointing": checkpointing}
        )
        try:
            small, large, _ = _traces(other, None)
        except NoBlocksError:
            continue
        curve, accumulated = PeakByBatch(small, large), PeakByBatch(small.accumulating(), large.accumulating())
        for optimizer in OPTIMIZERS:
            state = parameter_bytes(other.model_copy(update={"optimizer": optimizer}))
            largest, safe = _fitting(accumulated, other, state)
            yield MemoryOption(
                precision=form.precision,
                mixed=form.mixed,
                optimizer=optimizer,
                checkpointing=checkpointing,
                fixed_bytes=sum(_fixed_terms(large, state).values()),
                activation_bytes_per_sample=curve.bytes_per_sample(largest or SIZES[1]),
                largest_micro_batch=largest,
                safe_micro_batch=safe,
            )


def _notes(module: nn.Module, asked: MemoryPlanRequest, gradients: int) -> Iterator[str]:
    yield (
        "The peak is for a step of one micro-batch. The largest and the safe micro-batch leave room for "
        f"{gib(gradients)} of accumulated gradients."
    )
    if asked.stage == 3:
        yield "The trace lacks the one or two layers that ZeRO stage 3 gathers at a time."
    if any(isinstance(one, nn.RNNBase) for one in module.modules()):
        yield "The trace lacks the workspaces of recurrent kernels; measure the memory with `bssearch probe memory`."
    yield from asked.notes()
    if asked.kind is not None and asked.kind.is_cuda:
        yield "The trace has a GPU's attention, autocast and dropout; workspaces of convolutions are estimates."
