"""What a CUDA device computes otherwise than the CPU, imposed on a step that is traced with tensors of the CPU.

A build of PyTorch without CUDA cannot differentiate fake tensors of a CUDA device. So the tensors of a trace are the
CPU's, and the choices that decide over memory are the device's: the kernel of attention, the operations that autocast
leaves in fp32, and the mask of dropout. On every machine the same plan comes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

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
