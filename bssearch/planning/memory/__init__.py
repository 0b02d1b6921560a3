"""The memory of a training step: of numbers alone (`numbers`), or of a model traced with fake tensors (`traced`).

`traced`, `trace`, `kernels` and `models` import torch; the others do not.
"""

from __future__ import annotations

from bssearch.planning.memory.numbers import plan_numbers
from bssearch.planning.memory.plan import MemoryPlan
from bssearch.planning.memory.request import MemoryRequest
from bssearch.planning.requests import planned

__all__ = ["MemoryPlan", "MemoryRequest", "plan_memory"]


@planned(MemoryRequest)
def plan_memory(asked: MemoryRequest) -> MemoryPlan:
    """Return what a training step needs on each device, term by term, and the micro-batches that fit.

    Either ``parameters``, with the dimensions of a transformer if its activations are asked for, or a ``model``:
    ``package.module:attribute`` or ``path/file.py:attribute``, ``transformers:Class`` or ``timm:name``, built with
    ``model_settings`` and random weights and traced with fake tensors on inputs of ``input_shape`` (of tokens below
    ``vocabulary``, if that is given). ``stage`` is ZeRO's, over so many ``devices``. ``table`` adds other precisions,
    optimizers and checkpointing.

    Raises `UsageError` for wrong numbers, names or combinations, and `LaunchError` if the parameters do not fit, with
    what would.
    """
    if asked.model is None:
        return plan_numbers(asked)
    from bssearch.planning.memory.traced import plan_model

    return plan_model(asked)
