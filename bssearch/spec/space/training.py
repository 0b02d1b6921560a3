"""How a study's steps are computed: the same for all its trials, probes and slots."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bssearch.spec.space.domains import StrictModel


class TrainingSpec(StrictModel):
    """How the steps are computed.

    ``precision: auto`` is bf16 on a CUDA device that has it, else fp32. ``compile`` is a mode of ``torch.compile``.
    ``fused`` optimizers: null uses them on CUDA only. ``data`` keeps the training part on the ``device`` or on the
    ``host``, streamed by ``loader_workers`` processes; ``auto`` keeps it on the device if it fits. Batch normalisation
    takes its statistics over ``ghost_batch_size`` samples, null for the whole micro-batch. ``measure_noise`` measures
    the gradient noise scale beside the training.
    """

    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = "none"
    channels_last: bool = False
    fused: bool | None = None
    activation_checkpointing: bool = False
    deterministic: bool = False
    ghost_batch_size: int | None = Field(default=None, ge=2)
    data: Literal["auto", "device", "host"] = "auto"
    loader_workers: int = Field(default=2, ge=0, le=256)
    measure_noise: bool = True
