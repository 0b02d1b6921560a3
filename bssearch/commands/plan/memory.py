"""``plan memory``: what a training step needs, of numbers alone or of a model that is traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bssearch.errors import UsageError
from bssearch.planning.memory.numbers import plan_numbers
from bssearch.planning.memory.plan import MemoryPlan
from bssearch.planning.memory.request import ARCHITECTURE, checked, count, parameter_count, transformer


def plan_memory(
    *,
    parameters: str | float | None = None,
    precision: str = "fp32",
    mixed: str | None = None,
    optimizer: str = "adamw",
    memory_gib: float | None = None,
    device: str | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    sequence: int | None = None,
    vocabulary: int | None = None,
    intermediate: int | None = None,
    mlp: str | None = None,
    fused_attention: bool | None = None,
    dropout: bool | None = None,
    checkpointing: bool = False,
    stage: int | None = None,
    devices: int | None = None,
    micro_batch: int | None = None,
    model: str | None = None,
    model_settings: Mapping[str, Any] | None = None,
    input_shape: Sequence[int] | None = None,
    table: bool = False,
    folder: Path = Path(),
) -> MemoryPlan:
    """Return what a training step needs on each device, term by term, and the micro-batches that fit.

    Either ``parameters``, with the dimensions of a transformer where its activations are asked for, or a ``model``:
    ``package.module:attribute`` or ``path/file.py:attribute``, ``transformers:Class`` or ``timm:name``, built with
    ``model_settings`` and random weights and traced with fake tensors on inputs of ``input_shape`` (of tokens below
    ``vocabulary``, where that is given). `bssearch.planning.memory.parameters` says what ``precision`` and ``mixed``
    mean; ``mixed`` is by default ``master`` for numbers and ``autocast`` for a model. ``stage`` is ZeRO's, over so
    many ``devices``. ``table`` adds other precisions, optimizers and checkpointing.

    Raises `UsageError` for what is no such number, name or combination, and `LaunchError` where the parameters do not
    fit, with what would.
    """
    asked = checked(
        precision=precision,
        mixed=mixed,
        default_mixed="master" if model is None else "autocast",
        optimizer=optimizer,
        device=device,
        memory_gib=memory_gib,
        checkpointing=checkpointing,
        stage=stage,
        devices=devices,
        micro_batch=micro_batch,
        table=table,
    )
    given = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "sequence": sequence,
        "kv_heads": kv_heads,
        "vocabulary": vocabulary,
        "intermediate": intermediate,
        "mlp": mlp,
        "fused_attention": fused_attention,
        "dropout": dropout,
    }
    if model is None:
        _refuse("--model", {"--input": input_shape, "--model-setting": model_settings or None})
        if parameters is None:
            raise UsageError("say what to plan for: --parameters N, or --model NAME")
        described = transformer(given)
        if described is None and micro_batch is not None:
            raise UsageError(f"--micro-batch {micro_batch} needs {', '.join(map(_option, ARCHITECTURE))}, or --model")
        if described is None and checkpointing:
            raise UsageError(f"--checkpointing needs {', '.join(map(_option, ARCHITECTURE))}, or --model")
        return plan_numbers(parameter_count(parameters), asked, described)
    told = {name: value for name, value in given.items() if name not in ("sequence", "vocabulary")}
    _contradict("--model", {"--parameters": parameters, **{_option(name): value for name, value in told.items()}})
    count("sequence", sequence, 10**9)
    count("vocabulary", vocabulary, 10**9)
    for side in input_shape or ():
        count("input", side, 10**9)
    from bssearch.planning.memory.models import ModelRequest
    from bssearch.planning.memory.traced import plan_model

    request = ModelRequest(
        name=model,
        settings=model_settings or {},
        input_shape=None if input_shape is None else tuple(input_shape),
        vocabulary=vocabulary,
        sequence=sequence,
        folder=folder,
    )
    return plan_model(request, asked)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse(needed: str, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} needs {needed}")


def _contradict(first: str, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} contradicts {first}: the model says it itself")
