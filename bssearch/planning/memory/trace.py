"""A training step of a model with fake tensors: nothing is computed, and every storage is seen with its lifetime.

Fake tensors have shapes and no values (``torch._subclasses.FakeTensorMode``). Autograd runs over them as over real
ones, so that what the backward pass keeps is not guessed, and is freed when it would be.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from bssearch.planning.memory.lifetimes import CUDA_BLOCK_BYTES, Allocation, StepLifetimes

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
        _note_gradients(model, recorder)
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


def _note_gradients(model: nn.Module, recorder: _Recorder) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            recorder.note(parameter.grad, "gradients")


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
