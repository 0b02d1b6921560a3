"""The fields of the calculator: what may be asked for, with its unit, its help and what stands there at first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bssearch.planning.memory.devices import DEVICES
from bssearch.planning.memory.parameters import MIXED, PRECISIONS, STATES
from bssearch.planning.memory.transformer import MLP_TENSORS
from bssearch.scaling import LearningRateRule
from bssearch.space import OPTIMIZERS

Kind = Literal["whole", "number", "text", "choice", "yes_no", "flag"]
Choices = Sequence[tuple[str, str]]

YES_NO: Choices = (("yes", "yes"), ("no", "no"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One input. ``default`` is what stands there where the query names no field of its group."""

    name: str
    label: str
    help: str
    kind: Kind = "whole"
    unit: str = ""
    default: str = ""
    empty: str = ""
    choices: Choices = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fieldset:
    """Fields that belong together; the ``rare`` ones are folded away. Fieldsets of a ``group`` have defaults together.

    ``name`` is that of the fieldset in the page, ``legend`` what people read.
    """

    name: str
    legend: str
    group: str
    text: str = ""
    fields: Sequence[Field]
    rare: Sequence[Field] = ()

    def all(self) -> Iterator[Field]:
        """Yield all fields of the set."""
        yield from self.fields
        yield from self.rare


def _names(names: Sequence[str]) -> Choices:
    return tuple((name, name) for name in names)


def _device(name: str) -> tuple[str, str]:
    size = DEVICES[name].memory_bytes
    return name, name if size is None else f"{name} ({size / 2**30:.3g} GiB)"


_MODEL = Fieldset(
    name="model",
    legend="Model and device",
    group="model",
    fields=(
        Field(
            name="parameters",
            label="Parameters",
            kind="text",
            default="110M",
            help="How many numbers the model learns, as 110000000, 1.1e8, 110M or 7B.",
        ),
        Field(
            name="memory_gib",
            label="Memory for tensors",
            unit="GiB",
            kind="number",
            default="24",
            help="Of one device. Empty: all that the named device has.",
        ),
        Field(
            name="device",
            label="Device",
            kind="choice",
            empty="not named",
            choices=tuple(map(_device, DEVICES)),
            help="By name: its CUDA context and workspaces are taken off.",
        ),
        Field(
            name="precision",
            label="Precision",
            kind="choice",
            default="bf16",
            empty="fp32",
            choices=_names(PRECISIONS),
            help="What the forward pass computes in; fp8 is that of the weights.",
        ),
        Field(
            name="optimizer",
            label="Optimizer",
            kind="choice",
            default="adamw",
            empty="adamw",
            choices=_names(tuple(STATES)),
            help="What it keeps of each parameter; “sgd” is without momentum.",
        ),
        Field(
            name="checkpointing",
            label="Activation checkpointing",
            kind="flag",
            help="Keep each layer's input alone, and compute the rest again.",
        ),
    ),
    rare=(
        Field(
            name="mixed",
            label="Mixing with fp32",
            kind="choice",
            empty="master",
            choices=_names(MIXED),
            help="master: 16-bit weights and fp32 master weights; autocast: PyTorch's; pure: 16 bits alone.",
        ),
        Field(
            name="stage",
            label="ZeRO stage",
            empty="none",
            choices=(
                ("0", "0: nothing"),
                ("1", "1: optimizer state"),
                ("2", "2: gradients too"),
                ("3", "3: weights too (FSDP)"),
            ),
            help="What the devices share out among them.",
        ),
        Field(
            name="micro_batch",
            label="Micro-batch of the peak",
            unit="samples",
            help="At which the peak is told. Empty: the safe one.",
        ),
    ),
)

_TRANSFORMER = Fieldset(
    name="transformer",
    legend="Transformer",
    group="model",
    text="For the activations, and with them the micro-batches that fit. Leave it empty for another kind of model.",
    fields=(
        Field(name="layers", label="Layers", default="12", help="Blocks of attention and MLP."),
        Field(name="hidden", label="Hidden size", default="768", help="Width of the residual stream."),
        Field(name="heads", label="Attention heads", default="12", help="They divide the hidden size."),
        Field(name="sequence", label="Sequence", unit="tokens", default="512", help="Tokens of one sample."),
        Field(name="vocabulary", label="Vocabulary", unit="tokens", default="30522", help="For the logits."),
        Field(
            name="fused_attention",
            label="Fused attention",
            kind="yes_no",
            empty="no",
            choices=YES_NO,
            help="Flash attention keeps no scores.",
        ),
    ),
    rare=(
        Field(
            name="kv_heads",
            label="Heads of keys and values",
            empty="as many",
            help="Fewer with grouped-query attention.",
        ),
        Field(name="intermediate", label="Width of the MLP", help="Empty: 4 × the hidden size."),
        Field(
            name="mlp",
            label="Kind of MLP",
            kind="choice",
            empty="gelu",
            choices=_names(tuple(MLP_TENSORS)),
            help="gelu_new is GPT-2's, swiglu is Llama's.",
        ),
        Field(
            name="dropout",
            label="Dropout in each layer",
            kind="yes_no",
            empty="yes",
            choices=YES_NO,
            help="It keeps a mask of a byte a number.",
        ),
    ),
)

_BATCH = Fieldset(
    name="batch-and-devices",
    legend="Batch and devices",
    group="batch",
    fields=(
        Field(
            name="batch",
            label="Wanted batch",
            unit="samples",
            default="1024",
            help="Samples of an optimizer step, over all devices.",
        ),
        Field(name="devices", label="Devices", default="1", help="They share the batch, and what ZeRO shards."),
    ),
    rare=(
        Field(
            name="max_micro",
            label="Largest micro-batch",
            unit="samples",
            help="The most that a device runs at once. Empty: the safe one of the memory above.",
        ),
        Field(
            name="micro",
            label="Exact micro-batch",
            unit="samples",
            help="In its place: exactly so many at once.",
        ),
        Field(
            name="batch_norm_layers",
            label="Batch normalisation layers",
            empty="not known",
            help="They see micro-batches, not the batch.",
        ),
    ),
)

_RATE = Fieldset(
    name="tuned",
    legend="Tuned learning rate",
    group="rate",
    text="A configuration that is known to be good, which is carried over to the wanted batch.",
    fields=(
        Field(
            name="from_batch",
            label="Tuned at batch",
            unit="samples",
            default="256",
            help="The batch size at which the learning rate was tuned.",
        ),
        Field(name="learning_rate", label="Learning rate", kind="number", default="1e-4", help="The best one there."),
        Field(
            name="lr_optimizer",
            label="Optimizer of the training",
            kind="choice",
            default="adamw",
            empty="sgd",
            choices=_names(tuple(OPTIMIZERS)),
            help="As a study names it; “sgd” has momentum.",
        ),
        Field(name="weight_decay", label="Weight decay", kind="number", default="0.01", help="0 for none."),
    ),
    rare=(
        Field(name="warmup_epochs", label="Warmup", unit="epochs", kind="number", help="Epochs of warmup there."),
        Field(
            name="rate_rule",
            label="Learning rate under other rules",
            kind="choice",
            empty="as usual with the optimizer",
            choices=_names(tuple(LearningRateRule)),
            help="For rules about something else, as weight decay.",
        ),
        Field(name="lr_dropout", label="Dropout", kind="number", help="The share that is dropped, from 0 to below 1."),
        Field(name="label_smoothing", label="Label smoothing", kind="number", help="From 0 to below 1."),
        Field(name="beta1", label="β₁", kind="number", help="Empty: the optimizer's."),
        Field(name="beta2", label="β₂", kind="number", help="Empty: the optimizer's."),
        Field(name="epsilon", label="ε", kind="number", help="Empty: the optimizer's."),
        Field(name="ema_decay", label="Decay of averaged weights", kind="number", help="From 0 to below 1."),
    ),
)

_SPEED = Fieldset(
    name="speed",
    legend="Speed and critical batch size",
    group="speed",
    text="A step of m samples takes α + β·m seconds: “bssearch probe step-time” measures both on your device. "
    "The critical batch size is what a study finds, and “bssearch probe noise” estimates.",
    fields=(
        Field(
            name="alpha_s",
            label="α, seconds of any step",
            unit="s",
            kind="number",
            default="0.02",
            help="What a step takes whatever its batch size.",
        ),
        Field(
            name="beta_s",
            label="β, seconds of a sample",
            unit="s",
            kind="number",
            default="0.004",
            help="What each sample of a step adds.",
        ),
        Field(
            name="b_crit",
            label="Critical batch size",
            unit="samples",
            kind="number",
            default="800",
            help="B_crit: there half of the samples are spent on nothing.",
        ),
        Field(
            name="most_devices",
            label="Devices to plan for",
            default="16",
            help="At most, from 1 on: where do more stop paying?",
        ),
        Field(
            name="per_device_batch",
            label="Batch of each device",
            unit="samples",
            default="64",
            help="So that the batch grows with them. Empty: the wanted batch, on any number.",
        ),
        Field(
            name="bandwidth_gb_s",
            label="Bandwidth",
            unit="GB/s",
            kind="number",
            default="10",
            help="What a device sends of its gradients, in 10⁹ bytes a second.",
        ),
    ),
    rare=(
        Field(
            name="b_crit_low",
            label="Critical batch size, low end",
            unit="samples",
            kind="number",
            help="Of its interval.",
        ),
        Field(
            name="b_crit_high",
            label="Critical batch size, high end",
            unit="samples",
            kind="number",
            help="Of its interval.",
        ),
        Field(name="latency_us", label="Latency", unit="µs", kind="number", help="Of one message between devices."),
        Field(
            name="overlap",
            label="Overlap",
            kind="number",
            help="The share of the communication that is hidden behind computing, 0 to 1.",
        ),
        Field(
            name="gradient_bytes",
            label="Bytes of a gradient",
            unit="B",
            kind="number",
            empty="4",
            help="4 in fp32, 2 in bf16.",
        ),
        Field(
            name="samples_to_target",
            label="Samples to the target",
            unit="samples",
            kind="number",
            help="That a training took. Empty: times are relative.",
        ),
        Field(name="at_batch", label="Counted at batch", unit="samples", help="The batch size of that training."),
        Field(
            name="price_per_device_hour",
            label="Price of a device",
            unit="an hour",
            kind="number",
            help="In your currency; with it costs are told.",
        ),
    ),
)

FIELDSETS: Sequence[Fieldset] = (_MODEL, _TRANSFORMER, _BATCH, _RATE, _SPEED)

FIELDS = {field.name: field for fieldset in FIELDSETS for field in fieldset.all()}

GROUPS = {field.name: fieldset.group for fieldset in FIELDSETS for field in fieldset.all()}
