"""The form of the calculator, made of the fields of requests: what stands in it at first, and what is rare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from bssearch.planning.accumulation import AccumulationRequest
from bssearch.planning.learning_rate import LearningRateRequest
from bssearch.planning.memory import MemoryRequest
from bssearch.planning.requests import Request, options_of, type_of
from bssearch.planning.scale import ScaleRequest

Kind = Literal["whole", "number", "text", "choice", "yes_no", "flag"]
KINDS: Mapping[type, Kind] = {int: "whole", float: "number"}

RENAMED = {
    (LearningRateRequest, "optimizer"): "lr_optimizer",
    (LearningRateRequest, "dropout"): "lr_dropout",
    (ScaleRequest, "devices"): "most_devices",
}
"""Options that mean something else than those of the same name in another request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One input. ``default`` is what stands there if the query names no field of its group."""

    name: str
    label: str
    help: str
    kind: Kind
    unit: str
    default: str
    empty: str
    choices: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Fieldset:
    """Options of a request with their defaults in the page; the ``rare`` ones are folded away.

    ``name`` is that of the fieldset in the page, ``legend`` what people read. Fieldsets of a ``group`` have defaults
    together.
    """

    name: str
    legend: str
    group: str
    request: type[Request]
    options: Mapping[str, str]
    rare: Sequence[str] = ()
    text: str = ""

    @cached_property
    def fields(self) -> list[Field]:
        """The fields that stand open."""
        return [_field(self.request, *one) for one in self.options.items()]

    @cached_property
    def rare_fields(self) -> list[Field]:
        """The fields that are folded away."""
        return [_field(self.request, name, "") for name in self.rare]


def field_name(request: type[Request], option: str) -> str:
    """Return the name of the field of a request's option."""
    return RENAMED.get((request, option), option)


def _field(request: type[Request], name: str, default: str) -> Field:
    """Return the field of a request's option."""
    option, of_model, plain = options_of(request)[name], request.model_fields[name].default, type_of(request, name)
    is_either = plain is bool and of_model is None
    usual = "" if of_model in (None, False) or request.model_fields[name].is_required() else str(of_model)
    return Field(
        name=field_name(request, name),
        label=option.label or name.replace("_", " ").capitalize(),
        help=option.help,
        kind="yes_no"
        if is_either
        else "flag"
        if plain is bool
        else "choice"
        if option.choices
        else KINDS.get(plain, "text"),
        unit=option.unit,
        default=default,
        empty=option.shown_default or usual,
        choices=("yes", "no") if is_either else option.choices,
    )


FIELDSETS = (
    Fieldset(
        name="model",
        legend="Model and device",
        group="model",
        request=MemoryRequest,
        options={
            "parameters": "110M",
            "memory_gib": "24",
            "device": "",
            "precision": "bf16",
            "optimizer": "adamw",
            "checkpointing": "",
        },
        rare=("mixed", "stage", "micro_batch"),
    ),
    Fieldset(
        name="transformer",
        legend="Transformer",
        group="model",
        text="For the activations, and with them the micro-batches that fit. Leave it empty for another kind of model.",
        request=MemoryRequest,
        options={
            "layers": "12",
            "hidden": "768",
            "heads": "12",
            "sequence": "512",
            "vocabulary": "30522",
            "fused_attention": "",
        },
        rare=("kv_heads", "intermediate", "mlp", "dropout"),
    ),
    Fieldset(
        name="batch-and-devices",
        legend="Batch and devices",
        group="batch",
        request=AccumulationRequest,
        options={"batch": "1024", "devices": "1"},
        rare=("max_micro", "micro", "batch_norm_layers"),
    ),
    Fieldset(
        name="tuned",
        legend="Tuned learning rate",
        group="rate",
        text="A configuration that is known to be good, which is carried over to the wanted batch.",
        request=LearningRateRequest,
        options={"from_batch": "256", "learning_rate": "1e-4", "optimizer": "adamw", "weight_decay": "0.01"},
        rare=(
            "warmup_epochs",
            "rate_rule",
            "dropout",
            "label_smoothing",
            "beta1",
            "beta2",
            "epsilon",
            "ema_decay",
        ),
    ),
    Fieldset(
        name="speed",
        legend="Speed and critical batch size",
        group="speed",
        text="A step of m samples takes α + β·m seconds: “bssearch probe step-time” measures both on your device. "
        "The critical batch size is what a study finds, and “bssearch probe noise” estimates.",
        request=ScaleRequest,
        options={
            "alpha_s": "0.02",
            "beta_s": "0.004",
            "b_crit": "800",
            "devices": "16",
            "per_device_batch": "64",
            "bandwidth_gb_s": "10",
        },
        rare=(
            "b_crit_low",
            "b_crit_high",
            "latency_us",
            "overlap",
            "gradient_bytes",
            "samples_to_target",
            "at_batch",
            "price_per_device_hour",
        ),
    ),
)

FIELDS = {field.name: field for one in FIELDSETS for field in (*one.fields, *one.rare_fields)}

GROUPS = {field.name: one.group for one in FIELDSETS for field in (*one.fields, *one.rare_fields)}

PRESETS: Mapping[str, Mapping[str, str]] = {
    "BERT-base": {
        "parameters": "110M",
        "memory_gib": "24",
        "precision": "bf16",
        "optimizer": "adamw",
        "layers": "12",
        "hidden": "768",
        "heads": "12",
        "sequence": "512",
        "vocabulary": "30522",
    },
    "GPT-2": {
        "parameters": "124M",
        "memory_gib": "24",
        "precision": "bf16",
        "optimizer": "adamw",
        "layers": "12",
        "hidden": "768",
        "heads": "12",
        "sequence": "1024",
        "vocabulary": "50257",
        "mlp": "gelu_new",
        "fused_attention": "yes",
    },
    "ViT-B/16": {
        "parameters": "86M",
        "memory_gib": "24",
        "precision": "bf16",
        "optimizer": "adamw",
        "layers": "12",
        "hidden": "768",
        "heads": "12",
        "sequence": "197",
        "fused_attention": "yes",
    },
    "Llama-like 8B": {
        "parameters": "8.03B",
        "device": "b200",
        "precision": "bf16",
        "optimizer": "adamw",
        "checkpointing": "on",
        "layers": "32",
        "hidden": "4096",
        "heads": "32",
        "kv_heads": "8",
        "sequence": "4096",
        "vocabulary": "128256",
        "intermediate": "14336",
        "mlp": "swiglu",
        "fused_attention": "yes",
        "dropout": "no",
    },
    "ResNet-50": {
        "parameters": "25.6M",
        "memory_gib": "24",
        "precision": "bf16",
        "optimizer": "momentum",
    },
}
"""Fields of named models: Devlin et al. 2018, arXiv 1810.04805; Radford et al. 2019 (the small model); Dosovitskiy et
al. 2020, arXiv 2010.11929; Dubey et al. 2024, arXiv 2407.21783; He et al. 2015, arXiv 1512.03385 (parameters alone: the
activations of convolutions follow from no few numbers)."""
