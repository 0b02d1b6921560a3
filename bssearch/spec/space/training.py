"""How steps are computed, equal for all trials and probes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bssearch.spec.space.domains import StrictModel


class TrainingSpec(StrictModel):
    """How the steps are computed.

    ``precision: auto`` is bf16 if the CUDA device has it, else fp32. ``compile`` is a mode of ``torch.compile``.
    ``fused``: null means CUDA only. ``data`` is kept on the ``device`` (``auto``: if it fits) or streamed from the
    ``host`` by ``loader_workers``. Batch normalisation uses ``ghost_batch_size`` samples (null: micro-batch).
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
