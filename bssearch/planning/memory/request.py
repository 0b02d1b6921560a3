"""Memory plans by arithmetic, and the requests, terms and devices of all memory plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from bssearch.errors import LaunchError, UsageError, require
from bssearch.planning.memory.networks import ARCHITECTURES, Network, network
from bssearch.planning.memory.parameters import (
    BASE_BYTES,
    BY_NAME,
    FORMATS,
    MIXED,
    MLP_TENSORS,
    PRECISIONS,
    STATES,
    NumberFormat,
    ParameterBytes,
    SampleBytes,
    Transformer,
    layer_parameters,
    parameter_bytes,
    sample_bytes,
    trained_parameters,
)
from bssearch.planning.requests import CLAIMS, Count, Dimension, Parameters, Plan, Request
from bssearch.records.text import gib
from bssearch.registry import Option

# formats in the table; fp16 takes as much memory as bf16
IN_TABLE = tuple(one for one in FORMATS if one.precision != "fp16")

OPTIMIZERS = ("sgd", "momentum", "adamw", "adam8bit", "adafactor", "muon")  # optimizers in the table

GATHERED_LAYERS = 2  # whole layers at a time in ZeRO stage 3, to compute and to fetch

MOST_SHARDS = 1024  # most devices to propose


def plan_numbers(asked: MemoryPlanRequest) -> MemoryPlan:
    if asked.network and asked.parameters is None:
        asked = asked.model_copy(update={"parameters": asked.convolutional.parameters})
    fixed, sample = parameter_bytes(asked), _sample(asked)
    check_fits(asked, fixed.least, IN_TABLE)
    largest, safe = _fitting(asked)
    micro_batch = None if sample is None else (asked.micro_batch or safe or None)
    return MemoryPlan(
        basis="numbers",
        parameters=asked.parameters,
        trainable_parameters=trained_parameters(asked),
        **asked.in_plan(),
        weights_bytes=fixed.weights,
        gradients_bytes=fixed.gradients,
        optimizer_bytes=fixed.optimizer_state,
        master_weights_bytes=fixed.master_weights,
        fixed_bytes=fixed.fixed,
        activation_bytes_per_sample=None if sample is None else sample.total,
        largest_micro_batch=largest,
        safe_micro_batch=safe,
        micro_batch=micro_batch,
        peak_bytes=None if sample is None or micro_batch is None else _peak(fixed, asked, sample, micro_batch),
        terms=_terms(fixed, asked, sample),
        table=list(_table(asked)) if asked.table else [],
        notes=list(_notes(asked, fixed, sample, largest)),
    )


def check_fits(asked: MemoryPlanRequest, needed: int, formats: Sequence[NumberFormat]) -> None:
    if asked.room_bytes is None or needed <= asked.room_bytes:
        return
    mixed = "" if asked.form.mixed is None else f" ({asked.form.mixed})"
    cures = "; ".join(what_fits(asked, needed, asked.room_bytes, formats))
    raise LaunchError(
        f"{asked.parameters:,} parameters in {asked.precision}{mixed} with {asked.optimizer} take {gib(needed)} "
        f"without activations, but {asked.device or 'the given memory'} has {gib(asked.room_bytes)} free",
        hint=f"use options that fit: {cures}" if cures else "use a smaller model",
    )


def what_fits(asked: MemoryPlanRequest, needed: int, room: float, formats: Sequence[NumberFormat]) -> Iterator[str]:
    """Yield options that fit: a device with ``needed`` bytes free, and settings that take at most ``room`` bytes."""
    if (device := _smallest_with(needed, bf16=asked.precision == "bf16")) is not None:
        yield f"--device {device.name} ({gib((device.memory_bytes or 0) - device.taken_bytes)} beside the CUDA context)"
    has_no_bf16 = asked.kind is not None and asked.kind.lacks("bf16")
    usable = [one for one in formats if one != asked.form and not (has_no_bf16 and one.precision == "bf16")]
    if has_no_bf16:
        usable += [one for one in FORMATS if one.precision == "fp16" and one != asked.form]
    shards = [2**power for power in range(1, MOST_SHARDS.bit_length())]
    kinds: list[list[dict[str, Any]]] = [
        [{"precision": one.precision, "mixed": one.mixed} for one in usable],
        [{"optimizer": name} for name in OPTIMIZERS[::-1]],
        *([{"stage": stage, "devices": count} for count in shards] for stage in (1, 2, 3)),
    ]
    if asked.transformer is not None and not asked.lora_rank and not asked.trainable_parameters:
        kinds.append([{"lora_rank": 16}, {"lora_rank": 16, "base_precision": "int4"}])
    for changes in kinds:
        sizes = ((change, parameter_bytes(asked.model_copy(update=change)).least) for change in changes)
        fitting, size = next(((change, size) for change, size in sizes if size <= room), ({}, 0))
        if words := " ".join(
            f"--{name.replace('_', '-')} {value}" for name, value in fitting.items() if value is not None
        ):
            yield f"{words} ({gib(size)}{' each' if 'stage' in fitting else ''})"


def _sample(asked: MemoryPlanRequest) -> SampleBytes | None:
    if asked.network:
        kept = asked.convolutional.sample_bytes(asked.form.activation, checkpointing=asked.checkpointing)
        return SampleBytes(activations=kept, attention_scores=0, logits=0)
    model = asked.transformer
    return None if model is None else sample_bytes(model, asked.form, checkpointing=asked.checkpointing)


def _gathered(asked: MemoryPlanRequest) -> int:
    if asked.stage != 3 or (model := asked.transformer) is None:
        return 0
    return min(GATHERED_LAYERS, model.layers) * layer_parameters(model) * asked.form.weight


def _peak(fixed: ParameterBytes, asked: MemoryPlanRequest, sample: SampleBytes, micro_batch: int) -> int:
    # no gradients exist before a micro-batch's activations are complete
    beside = fixed.autocast_copies + _gathered(asked)
    forward = fixed.fixed - fixed.gradients + beside + micro_batch * sample.total
    return max(forward, fixed.fixed + beside, fixed.fixed + _foreach(fixed, asked)) + asked.overhead_bytes


def _foreach(fixed: ParameterBytes, asked: MemoryPlanRequest) -> int:
    # Only on GPUs does PyTorch update all tensors at once
    return fixed.foreach if asked.kind is None or asked.kind.is_cuda else 0


def _fitting(asked: MemoryPlanRequest) -> tuple[int | None, int | None]:
    fixed, sample = parameter_bytes(asked), _sample(asked)
    if sample is None:
        return None, None
    fixed_bytes, each = fixed.least + _gathered(asked), sample.total
    return asked.fitting(lambda room: max(0, (room - fixed_bytes) // each))


def _terms(fixed: ParameterBytes, asked: MemoryPlanRequest, sample: SampleBytes | None) -> list[Term]:
    each = sample or SampleBytes(activations=0, attention_scores=0, logits=0)
    return in_order(
        {
            "weights": (fixed.weights, 0),
            "gradients": (fixed.gradients, 0),
            "optimizer_state": (fixed.optimizer_state, 0),
            "master_weights": (fixed.master_weights, 0),
            "workspaces": (asked.overhead_bytes, 0),
            "autocast_copies": (fixed.autocast_copies, 0),
            "gathered_weights": (_gathered(asked), 0),
            "activations": (0, each.activations),
            "attention_scores": (0, each.attention_scores),
            "logits": (0, each.logits),
            "foreach_temporaries": (_foreach(fixed, asked), 0),
        }
    )


def _table(asked: MemoryPlanRequest) -> Iterator[MemoryOption]:
    for form, optimizer, checkpointing in product(IN_TABLE, OPTIMIZERS, (False, True)):
        other = asked.model_copy(
            update={
                "precision": form.precision,
                "mixed": form.mixed,
                "optimizer": optimizer,
                "checkpointing": checkpointing,
            }
        )
        sample, (largest, safe) = _sample(other), _fitting(other)
        yield MemoryOption(
            precision=form.precision,
            mixed=form.mixed,
            optimizer=optimizer,
            checkpointing=checkpointing,
            fixed_bytes=parameter_bytes(other).fixed,
            activation_bytes_per_sample=None if sample is None else sample.total,
            largest_micro_batch=largest,
            safe_micro_batch=safe,
        )


def _notes(
    asked: MemoryPlanRequest, fixed: ParameterBytes, sample: SampleBytes | None, largest: int | None
) -> Iterator[str]:
    if sample is not None:
        yield (
            "The largest and the safe micro-batch leave room to accumulate gradients beside all activations. "
            "Gradients do not grow with the batch."
        )
        if not asked.fused_attention and (asked.sequence or 0) >= 1024:
            yield (
                f"Attention's scores take {gib(sample.attention_scores)} per sample; use fused (flash) attention, and "
                "plan with --fused-attention."
            )
    if asked.trainable_parameters and sample is not None:
        yield "The plan assumes that all layers keep activations; frozen first layers keep fewer activations."
    if largest == 0:
        yield "No sample fits; use smaller samples, or options from a row of --table that fits a sample."
    foreach = _foreach(fixed, asked)
    if asked.room_bytes is not None and fixed.fixed + foreach > asked.room_bytes:
        yield (
            f"The update of all tensors at once needs another {gib(foreach)}, but only "
            f"{gib(asked.room_bytes - fixed.fixed)} is free; set foreach=False or fused=True in the optimizer."
        )
    yield from asked.notes()


GIB = 2**30

When = Literal["always", "forward_backward", "update"]

# meaning and lifetime of each term, in display order
MEANINGS: dict[str, tuple[str, When]] = {
    "weights": ("parameters in the forward pass, and buffers", "always"),
    "gradients": ("gradients of the trained parameters, independent of the batch size", "always"),
    "optimizer_state": ("optimizer state between steps", "always"),
    "master_weights": ("fp32 weights that the optimizer updates", "always"),
    "workspaces": ("cuBLAS, the context of a named device, and layouts of convolutions", "always"),
    "autocast_copies": ("16-bit copies of fp32 weights", "forward_backward"),
    "gathered_weights": ("whole weights of two layers, gathered from shards (ZeRO stage 3)", "forward_backward"),
    "inputs": ("inputs of the batch", "forward_backward"),
    "activations": ("tensors for the backward pass", "forward_backward"),
    "attention_scores": (
        "attention's scores after softmax and dropout, or one number per row with fused attention",
        "forward_backward",
    ),
    "activation_gradients": ("gradients of activations in the backward pass", "forward_backward"),
    "logits": ("log-probabilities, gradients of the logits and, if traced, the logits", "forward_backward"),
    "foreach_temporaries": ("temporary tensors of the update of all tensors at once", "update"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A part of a step's memory: ``bytes`` + ``bytes_per_sample`` × micro-batch."""

    term: str
    bytes: int
    bytes_per_sample: int
    when: When
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOption:
    """A row of `MemoryPlan.table`: the memory for a precision, optimizer and checkpointing."""

    precision: str
    mixed: str | None
    optimizer: str
    checkpointing: bool
    fixed_bytes: int  # weights, gradients, optimizer state, master weights
    activation_bytes_per_sample: int | None  # growth of the peak, with logits
    largest_micro_batch: int | None
    safe_micro_batch: int | None  # with headroom_bytes free


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan(MemoryOption, Plan):
    """The memory of a training step per device. Bytes and micro-batches are None if unknown."""

    basis: Literal["numbers", "trace"]
    model: str | None = None
    parameters: int
    trainable_parameters: int
    stage: int
    devices: int
    device: str | None
    memory_bytes: int | None
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    master_weights_bytes: int
    headroom_bytes: int | None
    micro_batch: int | None
    peak_bytes: int | None  # at micro_batch, by default the safe micro-batch
    terms: list[Term]
    table: list[MemoryOption]
    notes: list[str]


def in_order(terms: Mapping[str, tuple[float, float]]) -> list[Term]:
    sizes = {name: (round(size), round(slope)) for name, (size, slope) in terms.items()}
    return [
        Term(term=name, bytes=sizes[name][0], bytes_per_sample=sizes[name][1], when=when, meaning=meaning)
        for name, (meaning, when) in MEANINGS.items()
        if any(sizes.get(name, ()))
    ]


MIB = 2**20

CONTEXT_BYTES = 512 * MIB  # a CUDA context and kernels take about half a GiB per device


@dataclass(frozen=True, slots=True)
class MemoryDevice:
    """A kind of device. ``memory_bytes`` is None if unknown, and ``capability`` is None for devices without CUDA."""

    name: str
    memory_bytes: int | None
    capability: tuple[int, int] | None

    @property
    def is_cuda(self) -> bool:
        return self.capability is not None

    @property
    def has_flash(self) -> bool:
        """True if the device has flash attention and bf16 (compute capability ≥ 8.0)."""
        return self.capability is not None and self.capability >= (8, 0)

    def lacks(self, precision: str) -> bool:
        """Return True if a GPU has no tensor cores for ``precision``."""
        least = {"bf16": (8, 0), "fp8": (8, 9)}.get(precision)
        return least is not None and self.capability is not None and self.capability < least

    @property
    def workspace_bytes(self) -> int:
        """The bytes of cuBLAS's workspaces in the forward and backward threads; 0 without CUDA."""
        # 32 MiB each from Hopper (9.0) on, 8.1 MiB before (`CUBLAS_WORKSPACE_CONFIG` :4096:8 and :4096:2:16:8).
        if self.capability is None:
            return 0
        return 2 * (32 * MIB if self.capability >= (9, 0) else 8 * MIB + 128 * 1024)

    @property
    def taken_bytes(self) -> int:
        """The bytes in use before the first tensor, excluding the CUDA context if the memory is unknown."""
        return self.workspace_bytes + (CONTEXT_BYTES if self.memory_bytes is not None else 0)


# MiB of memory by ``nvidia-smi``, and compute capability
_MIB_AND_CAPABILITY: Mapping[str, tuple[int, tuple[int, int]]] = MappingProxyType(
    {
        "gtx-1080-ti": (11264, (6, 1)),
        "p100-16gb": (16384, (6, 0)),
        "v100-16gb": (16384, (7, 0)),
        "v100-32gb": (32768, (7, 0)),
        "t4": (15360, (7, 5)),
        "rtx-2080-ti": (11264, (7, 5)),
        "a100-40gb": (40960, (8, 0)),
        "a100-80gb": (81920, (8, 0)),
        "a10": (23028, (8, 6)),
        "a40": (46068, (8, 6)),
        "rtx-a6000": (49140, (8, 6)),
        "rtx-3060-12gb": (12288, (8, 6)),
        "rtx-3080-10gb": (10240, (8, 6)),
        "rtx-3090": (24576, (8, 6)),
        "l4": (23034, (8, 9)),
        "l40s": (46068, (8, 9)),
        "rtx-4060-8gb": (8188, (8, 9)),
        "rtx-4070": (12282, (8, 9)),
        "rtx-4080": (16376, (8, 9)),
        "rtx-4090": (24564, (8, 9)),
        "h100-80gb": (81559, (9, 0)),
        "h100-nvl": (95830, (9, 0)),
        "gh200-96gb": (97871, (9, 0)),
        "h200": (143771, (9, 0)),
        "b200": (183359, (10, 0)),
        "rtx-5090": (32607, (12, 0)),
    }
)

ALIASES: Mapping[str, str] = MappingProxyType(
    {"a100": "a100-80gb", "h100": "h100-80gb", "v100": "v100-16gb", "p100": "p100-16gb", "gh200": "gh200-96gb"}
)

# cuda is any GPU of compute capability ≥ 8.0, cpu a machine without a GPU
DEVICES: Mapping[str, MemoryDevice] = MappingProxyType(
    {
        "cuda": MemoryDevice("cuda", None, (8, 0)),
        "cpu": MemoryDevice("cpu", None, None),
        **{name: MemoryDevice(name, mib * MIB, capability) for name, (mib, capability) in _MIB_AND_CAPABILITY.items()},
    }
)


def _device_named(name: str) -> MemoryDevice:
    wanted = name.lower().replace(" ", "-").replace("_", "-").removeprefix("nvidia-")
    wanted = ALIASES.get(wanted, wanted)
    if wanted in DEVICES:
        return DEVICES[wanted]
    near = (
        [one for one in DEVICES if wanted and wanted in one]
        or get_close_matches(wanted, DEVICES, n=4, cutoff=0.4)
        or list(DEVICES)
    )
    raise UsageError(f"unknown device = {name!r}; choose from {', '.join(near)}")


def _smallest_with(memory_bytes: int, *, bf16: bool = False) -> MemoryDevice | None:
    # The smallest device with `memory_bytes` free, or None; `bf16` requires bf16
    known = [one for one in DEVICES.values() if one.has_flash or not bf16]
    fitting = [one for one in known if one.memory_bytes and one.memory_bytes - one.taken_bytes >= memory_bytes]
    return min(fitting, key=lambda one: one.memory_bytes or 0, default=None)


# The safe micro-batch leaves this share of memory free for unused blocks in the allocator's segments, larger inputs,
# evaluation, and the plan's error: at most 15 % for the benchmark's traced models and 25 % for numbers.
HEADROOM = 0.2

ARCHITECTURE = ("layers", "hidden", "heads", "sequence")  # all or none

BESIDE_ARCHITECTURE = ("vocabulary", "kv_heads", "intermediate", "mlp", "fused_attention", "dropout")


def _numbers(given: Any) -> Any:
    if not isinstance(given, str):
        return None if given is None else tuple(given)
    try:
        return tuple(int(one) for one in given.lower().replace(",", "x").split("x"))
    except ValueError:
        raise ValueError("must be whole numbers separated by x or a comma, such as 3x224x224") from None


Shape = Annotated[Sequence[Dimension], BeforeValidator(_numbers)]


def _settings(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    pairs = [one.partition("=") for one in given]
    if any(not key or not sign for key, sign, _ in pairs):
        raise ValueError("must have the form KEY=VALUE, such as width=64")
    found = {}
    for key, _, value in pairs:
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"must have YAML values, such as width=64; correct {key}={value}") from error
    return found


class MemoryPlanRequest(Request):
    """The input of `plan_memory`."""

    parameters: Annotated[
        Parameters,
        Option("Number of model parameters, such as 110000000, 1.1e8, 110M or 7B.", metavar="N"),
    ] = None
    precision: Annotated[str, Option("Precision of the forward pass; fp8 is only for weights.", choices=PRECISIONS)] = (
        "fp32"
    )
    mixed: Annotated[
        str | None,
        Option(
            "Mix of 16 bits and fp32: master (16-bit weights, fp32 master weights), autocast (PyTorch's) or pure.",
            label="Mixing with fp32",
            shown_default="master; autocast for a model",
            choices=MIXED,
        ),
    ] = None
    optimizer: Annotated[
        str, Option("Optimizer, for its state per parameter; sgd has no momentum.", choices=tuple(STATES))
    ] = "adamw"
    memory_gib: Annotated[
        Annotated[float, Field(gt=0, le=1e9)] | None,
        Option("Memory of a device for tensors.", label="Memory for tensors", unit="GiB", metavar="GIB"),
    ] = None
    device: Annotated[
        Annotated[str, AfterValidator(lambda name: _device_named(name).name)] | None,
        Option(
            "Device by name, such as a100-80gb; its workspaces and, without --memory-gib, its CUDA context count as "
            "used memory.",
            choices=tuple(DEVICES),
            metavar="NAME",
        ),
    ] = None
    layers: Annotated[Dimension | None, Option("Number of transformer layers, each with attention and MLP.")] = None
    hidden: Annotated[Dimension | None, Option("Hidden size of the transformer.", label="Hidden size")] = None
    heads: Annotated[Dimension | None, Option("Number of attention heads.", label="Attention heads")] = None
    kv_heads: Annotated[
        Dimension | None,
        Option(
            "Number of heads for keys and values.", label="Heads of keys and values", shown_default="as many as heads"
        ),
    ] = None
    sequence: Annotated[Dimension | None, Option("Tokens per sample.", unit="tokens")] = None
    vocabulary: Annotated[
        Dimension | None,
        Option("Size of the vocabulary, for logits and, with --input, for samples of tokens.", unit="tokens"),
    ] = None
    intermediate: Annotated[
        Dimension | None, Option("Width of the MLP.", label="Width of the MLP", shown_default="4 × hidden")
    ] = None
    mlp: Annotated[
        str | None,
        Option(
            "Kind of MLP; gelu_new is GPT-2's, swiglu is Llama's.",
            label="Kind of MLP",
            shown_default="gelu",
            choices=tuple(MLP_TENSORS),
        ),
    ] = None
    fused_attention: Annotated[
        bool | None, Option("Fused (flash) attention, which keeps no scores.", shown_default="no")
    ] = None
    dropout: Annotated[
        bool | None, Option("Dropout in each layer, whose mask takes one byte per element.", shown_default="yes")
    ] = None
    network: Annotated[
        str | None,
        Option("Name of a convolutional network, instead of parameters; needs --input.", choices=tuple(ARCHITECTURES)),
    ] = None
    stages: Annotated[
        Shape | None,
        Option("Blocks per stage of the network.", metavar="N,N,…", shown_default="the usual blocks, such as 3,4,6,3"),
    ] = None
    channels: Annotated[
        Shape | None,
        Option(
            "Channels per stage of the network.",
            metavar="N,N,…",
            shown_default="the usual channels, such as 64,128,256,512",
        ),
    ] = None
    trainable_parameters: Annotated[
        Parameters,
        Option("Number of trained parameters; all other parameters are frozen.", metavar="N", shown_default="all"),
    ] = None
    lora_rank: Annotated[
        Dimension | None,
        Option("Rank of LoRA adapters on all matrices of the blocks, with a frozen model.", label="LoRA rank"),
    ] = None
    base_precision: Annotated[
        str | None,
        Option("Precision of quantised frozen weights.", shown_default="as other weights", choices=tuple(BASE_BYTES)),
    ] = None
    offload_optimizer: Annotated[bool, Option("Keep optimizer state and master weights in the host's memory.")] = False
    checkpointing: Annotated[
        bool, Option("Keep each block's input, and recompute the other activations.", label="Activation checkpointing")
    ] = False
    stage: Annotated[
        Annotated[int, Field(ge=0, le=3)] | None,
        Option(
            "ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also weights (FSDP).",
            label="ZeRO stage",
            shown_default="0",
        ),
    ] = None
    devices: Annotated[
        Annotated[int, Field(ge=1, le=10**6)] | None, Option("Number of devices to shard over.", shown_default="1")
    ] = None
    micro_batch: Annotated[
        Count | None,
        Option(
            "Micro-batch whose memory peak the plan predicts.",
            label="Micro-batch of the peak",
            unit="samples",
            shown_default="the safe micro-batch",
        ),
    ] = None
    model: Annotated[
        str | None,
        Option(
            "Model to trace with random weights: FILE.py:NAME, package.module:NAME, transformers:CLASS or timm:NAME.",
            metavar="NAME",
        ),
    ] = None
    model_settings: Annotated[
        Annotated[Mapping[str, Any], BeforeValidator(_settings)] | None,
        Option(
            "Keyword argument of the model; repeat for several arguments.", flag="--model-setting", metavar="KEY=VALUE"
        ),
    ] = None
    input_shape: Annotated[
        Shape | None,
        Option("Shape of a sample, such as 3x224x224.", flag="--input", metavar="SHAPE"),
    ] = None
    table: Annotated[bool, Option("Include a table of other precisions, optimizers and checkpointing.")] = False
    folder: Path = Path()

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        memory, mixed = self.memory_gib, self.mixed
        there = (self.kind and self.kind.memory_bytes) or 0
        require(
            mixed is None or self.precision != "fp32",
            f"mixed = {mixed!r} contradicts precision = fp32; use precision = bf16 or fp16, or omit this option",
        )
        require(
            mixed in (None, "master") or self.precision != "fp8",
            f"mixed = {mixed!r} contradicts precision = fp8, which has fp32 master weights; omit this option",
        )
        require(
            not memory or not there or memory * GIB <= there,
            f"memory_gib = {memory} must be at most {gib(there)}, the memory of device = {self.device}",
        )
        require(
            not self.stage or self.devices is not None,
            f"stage = {self.stage} needs devices; give the number of devices",
        )
        if self.model is None:
            self._agrees_about_numbers()
        else:
            self._agrees_about_model()
        return self

    def _agrees_about_numbers(self) -> None:
        missing = [name for name in ARCHITECTURE if getattr(self, name) is None]
        lacking = f"a transformer's {', '.join(missing)}; give these dimensions, too"
        require(
            self.model_settings is None,
            f"model_settings = {self.settings} needs a model; give a model, or omit model_settings",
        )
        self._agrees_about_network()
        require(
            self.has("parameters") or self.network,
            "parameters is missing; give the number of parameters, a network or a model",
        )
        for name in (*ARCHITECTURE, *BESIDE_ARCHITECTURE, "micro_batch", "checkpointing"):
            is_any = self.network and name in ("micro_batch", "checkpointing")
            require(not missing or is_any or not self.has(name), f"{name} = {getattr(self, name)} needs {lacking}")
        if not missing:
            heads, hidden, kv_heads = self.heads or 1, self.hidden or 1, self.kv_heads or 1
            require(hidden % heads == 0, f"heads = {heads} must divide hidden = {hidden}")
            require(heads % kv_heads == 0, f"kv_heads = {kv_heads} must divide heads = {heads}")
        require(not self.lora_rank or not missing, f"lora_rank = {self.lora_rank} needs {lacking}")
        self._agrees_about_frozen_weights()

    def _agrees_about_network(self) -> None:
        if self.network is None:
            for name in ("input_shape", "stages", "channels"):
                require(
                    not self.has(name),
                    f"{name} = {getattr(self, name)} needs a network or a model; give network or model, or omit {name}",
                )
            return
        require(self.input_shape, f"network = {self.network} needs input_shape; give a shape, such as 3x224x224")
        for name in (*ARCHITECTURE, *BESIDE_ARCHITECTURE, "lora_rank"):
            require(
                not self.has(name), f"{name} = {getattr(self, name)} contradicts network = {self.network}; omit {name}"
            )
        network(self.network, self.input_shape or (), self.stages, self.channels)

    def _agrees_about_frozen_weights(self) -> None:
        rank, trained = self.lora_rank, self.trainable_parameters
        require(
            not rank or trained is None,
            f"lora_rank = {rank} contradicts trainable_parameters = {trained}; give only one of these options",
        )
        total = self.parameters or (self.convolutional.parameters if self.network else 0)
        require(
            not trained or trained <= total, f"trainable_parameters = {trained} must be at most parameters = {total}"
        )
        require(
            self.base_precision is None or rank or trained,
            f"base_precision = {self.base_precision} is for frozen weights; give lora_rank or trainable_parameters",
        )

    def _agrees_about_model(self) -> None:
        frozen = ("trainable_parameters", "lora_rank", "base_precision")
        for name in ("parameters", "network", *ARCHITECTURE[:3], *BESIDE_ARCHITECTURE[1:], *frozen):
            require(
                not self.has(name),
                f"{name} = {getattr(self, name)} contradicts model = {self.model}; omit {name}",
            )
        require(self.precision != "fp8", f"precision = fp8 contradicts model = {self.model}; use fp32, bf16 or fp16")
        require(
            not self.offload_optimizer,
            f"offload_optimizer = True contradicts model = {self.model}; omit offload_optimizer",
        )
        require(self.mixed != "master", f"mixed = master contradicts model = {self.model}; use autocast or pure")

    def has(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def name(self) -> str:
        return self.model or ""

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_settings or {})

    @property
    def kind(self) -> MemoryDevice | None:
        return None if self.device is None else DEVICES[self.device]

    @property
    def form(self) -> NumberFormat:
        usual = "master" if self.model is None or self.precision == "fp8" else "autocast"
        return BY_NAME[self.precision, None if self.precision == "fp32" else self.mixed or usual]

    @property
    def transformer(self) -> Transformer | None:
        names = (*ARCHITECTURE, *BESIDE_ARCHITECTURE, "lora_rank")
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        return Transformer(**known) if self.model is None and self.layers is not None else None

    @property
    def convolutional(self) -> Network:
        return network(self.network or "", self.input_shape or (), self.stages, self.channels)

    @property
    def memory_bytes(self) -> int | None:
        if self.memory_gib is not None:
            return round(self.memory_gib * GIB)
        return None if self.kind is None else self.kind.memory_bytes

    @property
    def overhead_bytes(self) -> int:
        """Bytes in use before the first tensor; 0 if ``device`` is None. ``memory_gib`` excludes the CUDA context."""
        if self.kind is None:
            return 0
        return self.kind.taken_bytes if self.memory_gib is None else self.kind.workspace_bytes

    @property
    def headroom_bytes(self) -> int | None:
        return None if self.memory_bytes is None else round(HEADROOM * self.memory_bytes)

    @property
    def room_bytes(self) -> int | None:
        """The most bytes that a step may take; None if the memory is unknown."""
        return None if self.memory_bytes is None else self.memory_bytes - self.overhead_bytes

    def share(self, size: float, from_stage: int) -> int:
        """Return the bytes per device, sharded if ``stage`` >= ``from_stage`` (Rajbhandari et al. 2020, § 5)."""
        return ceil(size / (self.devices or 1)) if (self.stage or 0) >= from_stage else ceil(size)

    def fitting(self, largest: Callable[[int], int]) -> tuple[int | None, int | None]:
        """Return the largest and the safe micro-batch, if known. ``largest(n)`` returns the most samples in n bytes."""
        if self.room_bytes is None or self.headroom_bytes is None:
            return None, None
        return largest(self.room_bytes), largest(self.room_bytes - self.headroom_bytes)

    def in_plan(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "precision": self.precision,
            "mixed": self.form.mixed,
            "optimizer": self.optimizer,
            "checkpointing": self.checkpointing,
            "stage": self.stage or 0,
            "devices": self.devices or 1,
            "device": self.device,
            "memory_bytes": self.memory_bytes,
            "headroom_bytes": self.headroom_bytes,
        }

    def notes(self) -> Iterator[str]:
        yield CLAIMS["gradients_not_of_batch"].message
        if self.memory_bytes is not None:
            yield CLAIMS["eighty_percent_feasible"].message
        if self.kind is not None and self.kind.lacks("bf16") and self.precision == "bf16":
            yield f"{self.device} has no bf16 (compute capability below 8.0); use fp16."
        if self.kind is not None and self.kind.lacks("fp8") and self.precision == "fp8":
            yield f"{self.device} has no fp8 (compute capability below 8.9) and widens weights to 16 bits."
        if (self.devices or 1) > 1 and not self.stage:
            yield f"Each of {self.devices} devices holds all weights and optimizer state; shard memory with --stage."
