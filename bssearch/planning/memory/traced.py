"""A plan of memory from a model's own training step, traced with fake tensors at two batch sizes.

Fake tensors have shapes and no values (``torch._subclasses.FakeTensorMode``). Autograd runs over them as over real
ones, so what the backward pass keeps is not guessed, and is freed when it would be.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from bssearch.planning.memory.models import NoBlocksError, build_model, checkpoint_blocks
from bssearch.planning.memory.numbers import OPTIMIZERS, check_fits
from bssearch.planning.memory.parameters import BY_NAME, ParameterBytes, parameter_bytes
from bssearch.planning.memory.plan import Choice, MemoryPlan, Term, gib, in_order
from bssearch.planning.memory.request import MemoryRequest
from bssearch.records import Configuration
from bssearch.training.optimizers import build_optimizer

CUDA_BLOCK_BYTES = 512
"""What PyTorch's allocator on CUDA rounds each block up to (``kMinBlockSize`` in c10/cuda/CUDACachingAllocator).

It asks the device for segments: of 2 MiB for blocks up to 1 MiB, of 20 MiB for those below 10 MiB, and of whole 2 MiB
above. ``torch.cuda.max_memory_allocated`` counts blocks, as here; what lies unused in segments is the headroom's."""


@dataclass(slots=True)
class Allocation:
    """One storage of ``size`` bytes that lives from event ``start`` until event ``end``, None where it is never freed.

    Events are counted: each storage that is made and each that is freed is one. ``phase`` is that of its making:
    build, inputs, forward, backward or optimizer. ``elements`` and ``width`` are the number of elements and the last
    dimension of its first tensor. ``term`` says what it is, where that is known.
    """

    start: int
    size: int
    phase: str
    elements: int
    width: int
    end: int | None = None
    term: str | None = None


@dataclass(frozen=True, slots=True)
class StepLifetimes:
    """The storages of a traced training step; the step begins at event ``since``."""

    micro_batch_size: int
    since: int
    allocations: Sequence[Allocation]

    def accumulating(self) -> StepLifetimes:
        """Return the step with all gradients there from its beginning, as from the second micro-batch on."""
        return replace(
            self,
            allocations=[
                replace(one, start=0, end=None) if one.term == "gradients" else one for one in self.allocations
            ],
        )

    def events_before_update(self) -> int | None:
        """Return how many events of the step come before the optimizer's; None where it makes nothing."""
        updates = (one.start for one in self.allocations if one.phase == "optimizer" and one.start > self.since)
        first = min(updates, default=None)
        return None if first is None else first - self.since

    def live_bytes(self) -> npt.NDArray[np.int64]:
        """Return the bytes that live at each event of the step."""
        last = max((one.end or one.start for one in self.allocations), default=0)
        changes = np.zeros(last + 2, dtype=np.int64)
        for one in self.allocations:
            changes[one.start] += one.size
            if one.end is not None:
                changes[one.end] -= one.size
        return np.cumsum(changes)[self.since :]

    def terms_at(self, event: int) -> dict[str, int]:
        """Return the bytes of each term that live at an event of the step, counted from its beginning."""
        found: dict[str, int] = {}
        for one in self.allocations:
            if one.start <= event + self.since and (one.end is None or event + self.since < one.end):
                name = one.term or one.phase
                found[name] = found.get(name, 0) + one.size
        return found

    def most_of(self, term: str) -> int:
        """Return the most bytes of one term that live at once during the step."""
        of_term = [one for one in self.allocations if one.term == term]
        return int(StepLifetimes(self.micro_batch_size, self.since, of_term).live_bytes().max(initial=0))


class PeakByBatch:
    """The peak of a step as a function of the micro-batch size, from traces of two sizes.

    At every event the live bytes are a line in the batch size, so that their peak is the highest of these lines: the
    optimizer's step where batches are small, the end of the forward pass where they are large. Where the two traces do
    not have the same events (a kernel was chosen by the batch size) the peak itself is taken as a line.
    """

    def __init__(self, small: StepLifetimes, large: StepLifetimes) -> None:
        self._small, self._large = small, large
        below, above = small.live_bytes(), large.live_bytes()
        if len(below) != len(above):
            below, above = below.max(keepdims=True), above.max(keepdims=True)
        self._per_sample = (above - below) / (large.micro_batch_size - small.micro_batch_size)
        self._fixed = below - small.micro_batch_size * self._per_sample

    def peak_bytes(self, micro_batch_size: int) -> int:
        """Return the peak at a micro-batch size."""
        return round(float((self._fixed + micro_batch_size * self._per_sample).max()))

    def bytes_per_sample(self, micro_batch_size: int) -> int:
        """Return by how many bytes the peak grows with one more sample."""
        return self.peak_bytes(micro_batch_size + 1) - self.peak_bytes(micro_batch_size)

    def largest(self, memory_bytes: float) -> int:
        """Return the largest micro-batch size whose peak is within so many bytes; 0 where not even one sample is."""
        if (self._fixed > memory_bytes).any():
            return 0
        grows = self._per_sample > 0
        return floor(((memory_bytes - self._fixed[grows]) / self._per_sample[grows]).min()) if grows.any() else 0

    def terms(self, micro_batch_size: int) -> Mapping[str, tuple[float, float]]:
        """Return what lives at the peak of the forward and backward pass, by term: fixed bytes, and bytes a sample."""
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


# What a CUDA device computes otherwise than the CPU, imposed on a step that is traced with tensors of the CPU.
#
# A build of PyTorch without CUDA cannot differentiate fake tensors of a CUDA device. So the tensors of a trace are the
# CPU's, and the choices that decide over memory are the device's: the kernel of attention, the operations that autocast
# leaves in fp32, and the mask of dropout. On every machine the same plan comes out.

FLASH_HEAD_SIZE = 256
"""The largest head that flash attention takes (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""

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
"""What autocast computes in fp32 on CUDA, and in 16 bits on the CPU (PyTorch's documentation, "CUDA Ops that can
autocast to float32")."""


class CudaKernels(TorchFunctionMode):
    """Choose as a CUDA device would; ``has_flash`` where it is of compute capability 8.0 or more."""

    def __init__(self, *, has_flash: bool) -> None:
        super().__init__()
        self._has_flash = has_flash

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch, or what stands for it on the device."""
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
        """Return attention by flash attention (16 bits, no mask), else by the memory-efficient kernel."""
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        fits_flash = self._has_flash and query.dtype != torch.float32 and query.shape[-1] <= FLASH_HEAD_SIZE
        if fits_flash and attn_mask is None:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        if enable_gqa and query.shape[1] != key.shape[1]:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if attn_mask is not None:
            attn_mask = _added(attn_mask, query).expand(*query.shape[:-1], key.shape[-2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def _added(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return a mask as what is added to the scores, in their precision."""
    return torch.zeros_like(mask, dtype=query.dtype) if mask.dtype == torch.bool else mask.to(query.dtype)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Return dropout as CUDA's kernel does it, with a mask of a byte an element."""
    if not training or p == 0:
        return input
    kept: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return kept


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

TERM_OF_PHASE = {
    "build": "weights",
    "inputs": "inputs",
    "forward": "activations",
    "backward": "activation_gradients",
    "optimizer": "foreach_temporaries",
}
"""What a storage is that nothing else is known of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is traced: ``batch(size)`` makes a batch, ``loss(model, batch)`` the loss and the model's output.

    ``optimizer`` makes one of a model, or is None where no step is taken. ``autocast`` is bf16, fp16 or None.
    ``is_cuda`` and ``has_flash`` say what the device is.
    """

    model: nn.Module
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor | None]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None
    autocast: str | None = None
    is_cuda: bool = True
    has_flash: bool = True


def trace(step: Step, micro_batch_size: int, mode: FakeTensorMode) -> StepLifetimes:
    """Return the lifetimes of all storages of one training step, after the optimizer has made its state.

    The model's tensors must be those of ``mode``. Its gradients are None when the step begins, as `zero_grad` leaves
    them. The model's errors go through.
    """
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # the error itself goes through
    model = step.model
    recorder = _Recorder(CUDA_BLOCK_BYTES if step.is_cuda else 1)
    with ExitStack() as stack:
        stack.enter_context(mode)
        if step.is_cuda:
            stack.enter_context(CudaKernels(has_flash=step.has_flash))
        stack.enter_context(recorder)
        for tensor in [*model.parameters(), *model.buffers()]:
            recorder.note(tensor, "weights")
        optimizer = _with_state(step, recorder)
        since = recorder.clock + 1
        recorder.phase = "inputs"
        batch = step.batch(micro_batch_size)
        recorder.phase = "forward"
        with torch.autocast("cpu", dtype=DTYPES.get(step.autocast or ""), enabled=step.autocast is not None):
            loss, output = step.loss(model, batch)
        logits = None if output is None or output.ndim not in (2, 3) else (output.shape[-1], output.numel())
        del output
        recorder.phase = "backward"
        # Of an edge the modes stay in force inside, where blocks are computed again; of a tensor they would not.
        torch.autograd.backward([torch.autograd.graph.get_gradient_edge(loss)], [torch.ones_like(loss)])
        del loss
        for parameter in model.parameters():
            if parameter.grad is not None:
                recorder.note(parameter.grad, "gradients")
        recorder.phase = "optimizer"
        if optimizer is not None:
            optimizer.step()
        del batch
    for parameter in model.parameters():
        parameter.grad = None
    return StepLifetimes(micro_batch_size, since, [_named(one, logits) for one in recorder.allocations])


def _named(one: Allocation, logits: tuple[int, int] | None) -> Allocation:
    """Return an allocation with its term; what has the size of the model's output is of its logits."""
    if one.term is None and one.phase in ("forward", "backward") and logits is not None:
        width, elements = logits
        if one.width == width and 2 * one.elements > elements:
            one.term = "logits"
    one.term = one.term or TERM_OF_PHASE[one.phase]
    return one


def _with_state(step: Step, recorder: _Recorder) -> torch.optim.Optimizer | None:
    """Return the optimizer after a step on zero gradients, which makes its state."""
    if step.optimizer is None:
        return None
    recorder.phase = "optimizer"
    optimizer = step.optimizer(step.model)
    for group in optimizer.param_groups:
        if step.is_cuda and "foreach" in group:
            group["foreach"] = True  # PyTorch's own choice there
    for parameter in step.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for tensor in tree_iter([dict(state) for state in optimizer.state.values()]):
        if isinstance(tensor, torch.Tensor):
            recorder.note(tensor, "optimizer_state")
    return optimizer


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each storage that an operation makes, and when it is freed."""

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
        """Run an operation, and note what it returns."""
        result = func(*args, **(kwargs or {}))
        term = "autocast_copies" if func is torch.ops.aten._to_copy.default and self._is_weight(args[0]) else None
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor, term)
        if func in _CONVOLUTIONS:
            self._note_workspace(args, result)
        return result

    def note(self, tensor: torch.Tensor, term: str | None = None) -> None:
        """Note the storage of a tensor, unless it lives already; ``term`` says what it is."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is None:
            made = self._made(storage.nbytes(), tensor)
            self._live[key] = (made, weakref.ref(storage, lambda _: self._freed(key, made)))
            known = self._live[key]
        if term is not None:
            known[0].term = term

    def _made(self, size: int, tensor: torch.Tensor) -> Allocation:
        self.clock += 1
        width = tensor.shape[-1] if tensor.ndim else 1
        whole = -(-size // self._block_bytes) * self._block_bytes
        made = Allocation(self.clock, whole, self.phase, tensor.numel(), width)
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
        """Note what a convolution needs while it runs: its input and its output in the layout of its kernel.

        oneDNN on the CPU computes in blocked layouts, cuDNN's kernels for tensor cores in channels-last.
        """
        tensors = args[:2] if isinstance(result, tuple) else (args[0], result)
        made = self._made(sum(one.numel() * one.element_size() for one in tensors), tensors[0])
        made.term = "workspaces"
        self.clock += 1
        made.end = self.clock


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
    asked = asked.model_copy(update={"parameters": sum(one.numel() for one in module.parameters())})
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
        other = asked.model_copy(
            update={"precision": form.precision, "mixed": form.mixed, "checkpointing": checkpointing}
        )
        try:
            small, large, _ = _traces(other, None)
        except NoBlocksError:
            continue
        curve, accumulated = PeakByBatch(small, large), _accumulated(small, large)
        for optimizer in OPTIMIZERS:
            state = parameter_bytes(other.model_copy(update={"optimizer": optimizer}))
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
