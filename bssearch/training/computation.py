"""Precision, compilation, activation checkpointing and ghost batch norms."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import the compiler at once
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bssearch.errors import LaunchError, WorkloadError, require
from bssearch.records import WITH_CUDA_GRAPHS, ParameterValue
from bssearch.spec.parts import TrainingSpec
from bssearch.training.contention import CorePace
from bssearch.training.course import first_line
from bssearch.workloads.base import Workload
from bssearch.workloads.data import mapped

if TYPE_CHECKING:
    from bssearch.training.ranks import Ranks

NO_PARAMETERS: Mapping[str, ParameterValue] = MappingProxyType({})


class Computation:
    """A study's training settings on one device.

    Construction sets PyTorch's process-wide switches for tf32, cuDNN benchmarking and deterministic algorithms.
    """

    def __init__(self, device: torch.device, settings: TrainingSpec | None = None) -> None:
        self.device = device
        self.settings = settings = settings or TrainingSpec()
        self.precision = resolve_precision(settings.precision, device)
        self.fused = device.type == "cuda" if settings.fused is None else settings.fused
        self.compiles = settings.compile != "none"
        self.warnings: list[str] = []
        self.given_up: str | None = None
        self.ranks: Ranks | None = None
        self.core = CorePace() if device.type == "cpu" else None
        self._model: nn.Module | None = None
        self._places: dict[str, torch.Tensor] = {}
        if settings.compile == "reduce-overhead" and device.type != "cuda":
            self.warn(
                f"compile = 'reduce-overhead' acts like 'default' on {device}, which has no CUDA graphs; set compile: "
                "default"
            )
        allow_tf32(self.precision == "tf32")
        torch.backends.cudnn.benchmark = not settings.deterministic
        if torch.are_deterministic_algorithms_enabled() != settings.deterministic:  # the setter loads the compiler
            torch.use_deterministic_algorithms(settings.deterministic)
        # Otherwise deterministic algorithms would fill every new tensor; no code here reads uninitialised tensors.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def build_model(
        self, workload: Workload, dropout: float, own: Mapping[str, ParameterValue] = NO_PARAMETERS
    ) -> nn.Module:
        """Build a model in training mode on the device. Seed the random generators first.

        With CUDA graphs the previous model becomes unusable. If ``torch.compile`` fails, the model stays uncompiled.
        """
        settings = self.settings
        model: nn.Module = cast(Any, workload).build_model(dropout=dropout, **own)
        ghosts = settings.ghost_batch_size
        if ghosts is not None and not convert_batch_norms(model, GhostNorm, ghost_batch_size=ghosts):
            self.warn(
                f"ghost_batch_size = {ghosts} has no effect: the model has no batch normalisation; omit the option"
            )
        if settings.sync_batch_norm and self.ranks is not None:
            convert_batch_norms(model, SharedNorm, ranks=self.ranks)
        if settings.activation_checkpointing:
            checkpoint_activations(workload, model)
        if self.compiles:
            try:
                compile_in_place(model, settings.compile)
            except Exception as error:
                self.fallback(error)
        model = model.to(self.device).train()
        for parameter in model.parameters():
            parameter.data = self.inputs(parameter.data)
        if self.replays_graphs:
            share_storage(model, self._places)
            self._model = model
        return model

    def training(self) -> AbstractContextManager[object]:
        if self.replays_graphs:
            # Copy the accumulated gradients out of the CUDA graphs' memory, then free this memory.
            for parameter in () if self._model is None else self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return autocast(self.precision, self.device)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        # Inputs of evaluations and of training have different shapes.
        with self.uncompiled(), autocast(self.precision, self.device):
            yield

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Compute in fp32 within the block, uncompiled and without benchmarked kernels."""
        tries_kernels = torch.backends.cudnn.benchmark
        allow_tf32(False)
        torch.backends.cudnn.benchmark = False
        try:
            with self.uncompiled():
                yield
        finally:
            torch.backends.cudnn.benchmark = tries_kernels
            allow_tf32(self.precision == "tf32")

    def uncompiled(self) -> AbstractContextManager[object]:
        return torch.compiler.set_stance("force_eager") if self.compiles else nullcontext()

    def inputs(self, inputs: Any) -> Any:
        return mapped(_channels_last, inputs) if self.settings.channels_last else inputs

    def new_scaler(self) -> torch.amp.GradScaler | None:
        return torch.amp.GradScaler(self.device.type) if self.precision == "fp16" else None

    def warn(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def fallback(self, error: Exception) -> None:
        """Give up compilation. Earlier models become unusable."""
        self.given_up = (
            f"compile = {self.settings.compile!r} failed, so steps run uncompiled: {first_line(error)}; correct the "
            "model, or set compile: none"
        )
        self.warn(self.given_up)
        self.compiles = False
        self._model = None
        self._places.clear()
        torch.compiler.reset()

    @property
    def other_devices(self) -> list[torch.device]:
        size = 1 if self.ranks is None or self.device.type != "cuda" else self.ranks.size
        return [torch.device("cuda", index) for index in range(1, size)]

    @property
    def replays_graphs(self) -> bool:
        return self.compiles and self.settings.compile in WITH_CUDA_GRAPHS and self.device.type == "cuda"


def _channels_last(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.ndim == 4 and leaf.is_floating_point():
        return leaf.contiguous(memory_format=torch.channels_last)
    return leaf


BACKEND = "inductor"

# Beyond this number of graphs PyTorch silently runs a function uncompiled; PyTorch's default of 8 is smaller than a
# ladder of batch sizes.
GRAPHS_PER_FUNCTION = 4096


def compile_in_place(model: nn.Module, mode: str) -> None:
    """Compile a model's forward pass into one graph per input shape, without renaming parameters."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = GRAPHS_PER_FUNCTION
    dynamo.accumulated_recompile_limit = GRAPHS_PER_FUNCTION
    kind: Any = type(model)
    compiled = _compiled_class(kind, BACKEND, mode)
    for module in model.modules():
        if type(module) is nn.Dropout and 0 < module.p < 1:
            module.__class__ = TracedDropout
            module.register_buffer("keep", torch.tensor(1 - module.p), persistent=False)
    model.__class__ = compiled


def share_storage(model: nn.Module, places: dict[str, torch.Tensor]) -> None:
    """Move a model into the previous model's memory, whose addresses CUDA graphs recorded."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        place = places.setdefault(name, tensor.detach())
        if place.data_ptr() != tensor.data_ptr():
            place.copy_(tensor.detach())
            tensor.data = place


class TracedDropout(nn.Dropout):
    """Dropout with the probability in a tensor, so that one graph serves all probabilities.

    ``keep`` is 1 − probability, shape ().
    """

    keep: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return input
        return torch.where(torch.rand_like(input, dtype=torch.float32) < self.keep, input / self.keep, 0.0)


@functools.cache
def _compiled_class(kind: Any, backend: str, mode: str) -> Any:
    # One class per kind of model, because PyTorch caches graphs by class; ``torch.nn`` containers need their own frame.

    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        return kind.forward(self, *arguments, **named)

    compiled = torch.compile(forward, backend=backend, mode=mode, dynamic=False)
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": compiled})


AMPERE = (8, 0)  # the first compute capability with tf32 and bf16

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def available_precisions(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return "fp32", "bf16"
    if torch.cuda.get_device_capability(device) < AMPERE:
        return "fp32", "fp16"
    return "fp32", "tf32", "bf16", "fp16"


def resolve_precision(wanted: str, device: torch.device) -> str:
    """Resolve ``auto`` to bf16 on capable CUDA devices, else to fp32."""
    available = available_precisions(device)
    if wanted == "auto":
        return "bf16" if device.type == "cuda" and "bf16" in available else "fp32"
    if wanted not in available:
        raise LaunchError(
            f"precision = {wanted!r} is not available on {device}; choose from {', '.join(available)}",
            hint="use a CUDA device for fp16; for tf32, or bf16 on CUDA, use compute capability 8.0 or higher",
        )
    return wanted


def autocast(precision: str, device: torch.device, *, keep_casts: bool = True) -> AbstractContextManager[object]:
    """Return the autocast context of a forward pass and loss.

    ``keep_casts`` reuses cast weights, so the weights must not change inside the context.
    """
    dtype = _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=keep_casts)


def allow_tf32(allowed: bool) -> None:
    # Use PyTorch's older switches, because the compiler refuses a mixture of old and new switches.
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def checkpoint_activations(workload: Workload, model: nn.Module) -> None:
    """Recompute activations of ``checkpointed_modules(model)`` in backward passes."""
    checkpointed_modules: Any = getattr(workload, "checkpointed_modules", None)
    require(
        checkpointed_modules is not None,
        "activation_checkpointing = true needs a workload that has checkpointed_modules(model); "
        f"{type(workload).__name__} has no such method",
        hint="write the method, or set training: {activation_checkpointing: false}",
        error=WorkloadError,
    )
    modules: list[Any] = list(checkpointed_modules(model))
    require(modules, "checkpointed_modules(model) returned no module; return at least one module", error=WorkloadError)
    checkpoint_modules(modules)


def checkpoint_modules(modules: Iterable[Any]) -> None:
    for module in modules:
        module.__class__ = _checkpointed_class(module.__class__)


@functools.cache
def _checkpointed_class(kind: Any) -> Any:
    # One class per kind of module, because PyTorch caches compiled graphs by class.

    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            # A compiled graph changes buffers once even if computed twice; contexts have no effect inside a graph.
            contexts: dict[str, Any] = {}
            if not torch.compiler.is_compiling():
                contexts["context_fn"] = lambda: (nullcontext(), buffers_kept(self))  # of the first and second run
            return checkpoint(kind.forward, self, *arguments, use_reentrant=False, **contexts, **named)
        return kind.forward(self, *arguments, **named)

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": forward})


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore a model's buffers after the block, even if the block replaced the buffers."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                setattr(module, name, buffer)


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

Running = tuple[torch.Tensor | None, torch.Tensor | None]


def convert_batch_norms(model: nn.Module, mixin: type, **attributes: Any) -> int:
    norms: list[Any] = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
    for norm in norms:
        norm.__class__ = _mixed_class(mixin, norm.__class__)
        vars(norm).update(attributes)
    return len(norms)


@functools.cache
def _mixed_class(mixin: type, kind: type) -> type:
    return type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {})


class GhostNorm:
    """A batch norm mixin that normalises each ``ghost_batch_size`` consecutive samples separately.

    Each group uses its own mean and biased variance (Hoffer et al. 2017, arXiv 1705.08741). Remaining samples form a
    smaller group. A single remaining sample joins the last group. Running statistics follow the groups' average mean
    and average unbiased variance.
    """

    ghost_batch_size: int

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        samples, channels = input.shape[:2]
        if not self.training or samples <= self.ghost_batch_size:
            return super().forward(input)  # type: ignore[misc, no-any-return]
        self._check_input_dim(input)
        groups, rest = divmod(samples, self.ghost_batch_size)
        if rest == 1:
            groups, rest = groups - 1, self.ghost_batch_size + 1
        pieces = [(input[: samples - rest], groups, self._running(groups))] if groups else []
        if rest:
            pieces.append((input[samples - rest :], 1, self._running(1)))
        momentum = _count_batch(self)
        outputs = [self._normalise(*piece, momentum) for piece in pieces]
        if self.track_running_stats:
            means, variances = zip(*(running for _, _, running in pieces), strict=True)
            self.running_mean.copy_(torch.cat(means).view(-1, channels).mean(0))
            self.running_var.copy_(torch.cat(variances).view(-1, channels).mean(0))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _running(self: Any, groups: int) -> Running:
        means, variances = self.running_mean, self.running_var
        return (means.repeat(groups), variances.repeat(groups)) if self.track_running_stats else (None, None)

    def _normalise(self: Any, input: torch.Tensor, groups: int, running: Running, momentum: float) -> torch.Tensor:
        channels, rest = input.shape[1], input.shape[2:]
        side_by_side = input.reshape(groups, -1, channels, *rest).transpose(0, 1).flatten(1, 2)
        scale, shift = (self.weight.repeat(groups), self.bias.repeat(groups)) if self.affine else (None, None)
        output = functional.batch_norm(side_by_side, *running, scale, shift, True, momentum, self.eps)
        return output.reshape(-1, groups, channels, *rest).transpose(0, 1).flatten(0, 1)


def _count_batch(norm: Any) -> Any:
    if not norm.track_running_stats:
        return 0.0
    norm.num_batches_tracked.add_(1)
    return 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum


class SharedNorm:
    """A batch norm mixin that normalises with the statistics of all ranks' micro-batches."""

    ranks: Ranks

    @_disable_dynamo
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.ranks.are_together:
            return super().forward(input)  # type: ignore[misc, no-any-return]
        self._check_input_dim(input)
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dimensions, shape = [0, *range(2, values.ndim)], [1, -1, *[1] * (values.ndim - 2)]
        count = values.new_full((1,), values.numel() / values.shape[1])
        sums = self.ranks.differentiable_sum(torch.cat([values.sum(dimensions), count]))
        samples, mean = sums[-1], sums[:-1] / sums[-1]
        centred = values - mean.view(shape)
        variance = self.ranks.differentiable_sum(centred.square().sum(dimensions)) / samples
        momentum = _count_batch(self)
        if self.track_running_stats:
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_((variance * samples / (samples - 1)).to(self.running_var.dtype), momentum)
        output: torch.Tensor = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)
