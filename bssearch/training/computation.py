"""How steps are computed on a device: what a study's training settings come to there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from bssearch.records import WITH_CUDA_GRAPHS, ParameterValue, TrainingSettings
from bssearch.training.activation_checkpointing import checkpoint_activations
from bssearch.training.compilation import compile_in_place, share_storage
from bssearch.training.core_pace import CorePace
from bssearch.training.ghost_norm import convert_batch_norms
from bssearch.training.precision import allow_tf32, autocast, resolve_precision
from bssearch.workloads.base import Workload
from bssearch.workloads.nested import mapped

NO_PARAMETERS: Mapping[str, ParameterValue] = MappingProxyType({})


class Computation:
    """The training settings of a study, resolved for one device; a worker keeps it for all its trials.

    ``precision`` and ``fused`` are what the settings come to; ``compiles`` says whether models are compiled, which
    `fallback` ends (``given_up`` says so then); ``warnings`` are sentences that hold for every trial from now on;
    ``core`` has the pace of the core where steps are computed on one, None on a GPU. Making one sets the process's
    switches: tf32, cuDNN's choice of kernels by trial, deterministic algorithms.

    Raises `LaunchError` for a precision that the device lacks.
    """

    def __init__(self, device: torch.device, settings: TrainingSettings | None = None) -> None:
        self.device = device
        self.settings = settings = settings or TrainingSettings()
        self.precision = resolve_precision(settings.precision, device)
        self.fused = device.type == "cuda" if settings.fused is None else settings.fused
        self.compiles = settings.compile != "none"
        self.warnings: list[str] = []
        self.given_up: str | None = None
        self.core = CorePace() if device.type == "cpu" else None
        self._model: nn.Module | None = None
        self._places: dict[str, torch.Tensor] = {}
        if settings.compile == "reduce-overhead" and device.type != "cuda":
            self.warn(f"compile = 'reduce-overhead' is no more than 'default' on {device}, which has no CUDA graphs")
        allow_tf32(self.precision == "tf32")
        torch.backends.cudnn.benchmark = not settings.deterministic
        if torch.are_deterministic_algorithms_enabled() != settings.deterministic:  # to set it loads the compiler
            torch.use_deterministic_algorithms(settings.deterministic)
        # With deterministic algorithms PyTorch would fill every new tensor first, which nothing here reads.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def build_model(
        self, workload: Workload, dropout: float, own: Mapping[str, ParameterValue] = NO_PARAMETERS
    ) -> nn.Module:
        """Return a freshly initialised model in training mode on the device; the caller has set the seed.

        ``own`` are the user's own parameters of the model, by their bare names.
        With CUDA graphs (see `replays_graphs`) it takes over the memory of the model built before it, which must not
        be used any more. If ``torch.compile`` raises, compiling is given up and the model is returned uncompiled.
        """
        settings = self.settings
        build: Any = workload.build_model
        model: nn.Module = build(dropout=dropout, **own)
        if settings.ghost_batch_size is not None and not convert_batch_norms(model, settings.ghost_batch_size):
            self.warn(
                f"ghost_batch_size = {settings.ghost_batch_size} changes nothing: the model has no batch normalisation"
            )
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
        """Return what to put around the forward pass and the loss of each micro-batch in training."""
        if self.replays_graphs:
            self._begin_micro_batch()
        return autocast(self.precision, self.device)

    @property
    def compile_mode(self) -> str:
        """Return the mode of ``torch.compile`` in which models run here, ``none`` if they run eagerly."""
        return self.settings.compile if self.compiles else "none"

    def whole_step(self) -> AbstractContextManager[object]:
        """Return what to put around a training step of the workload's own, in which weights change."""
        return autocast(self.precision, self.device, keep_casts=False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate in the precision of the training, but never compiled: evaluation has shapes of its own."""
        with self.uncompiled(), autocast(self.precision, self.device):
            yield

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Compute in fp32 and uncompiled, whatever the settings say, and without trying out kernels for new shapes."""
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
        """Return what lets compiled models run uncompiled inside, in training too."""
        return torch.compiler.set_stance("force_eager") if self.compiles else nullcontext()

    @contextmanager
    def without_compiling(self) -> Iterator[None]:
        """Build models uncompiled inside, as if ``compile`` were ``none``."""
        compiles, self.compiles = self.compiles, False
        try:
            yield
        finally:
            self.compiles = compiles

    def inputs(self, inputs: Any) -> Any:
        """Return inputs as the model takes them: images (4 dimensions, floating) channels-last where that is asked."""
        return mapped(_channels_last, inputs) if self.settings.channels_last else inputs

    def new_scaler(self) -> torch.amp.GradScaler | None:
        """Return a trial's loss scaler in fp16, None in precisions that need none."""
        return torch.amp.GradScaler(self.device.type) if self.precision == "fp16" else None

    def warn(self, sentence: str) -> None:
        """Add a sentence to the warnings, once."""
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def fallback(self, error: Exception) -> None:
        """Give up compiling from now on, for the reason that the error gives; models built before are of no use."""
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        self.given_up = f"compile = {self.settings.compile!r} failed and was given up, steps run uncompiled: {reason}"
        self.warn(self.given_up)
        self.compiles = False
        self._model = None
        self._places.clear()
        torch.compiler.reset()

    @property
    def replays_graphs(self) -> bool:
        """Return whether models run as CUDA graphs."""
        return self.compiles and self.settings.compile in WITH_CUDA_GRAPHS and self.device.type == "cuda"

    def _begin_micro_batch(self) -> None:
        """Let the CUDA graphs' memory be used again, and take out what accumulation still needs of it.

        The gradients of the micro-batches before lie in that memory; there are none at the first one of a step.
        """
        if self._model is not None:
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def _channels_last(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.ndim == 4 and leaf.is_floating_point():
        return leaf.contiguous(memory_format=torch.channels_last)
    return leaf
