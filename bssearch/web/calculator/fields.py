"""The calculator's form and its commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

from bssearch.errors import BSSearchError
from bssearch.figures.plans import Shown
from bssearch.figures.svg import Chart
from bssearch.planning.learning_rate import LearningRateRequest
from bssearch.planning.memory import MemoryPlanRequest
from bssearch.planning.requests import Request, RequestError, options_of, read, type_of
from bssearch.planning.scale import AccumulationRequest, ScaleRequest

Kind = Literal["whole", "number", "text", "choice", "yes_no", "flag"]
KINDS: Mapping[type, Kind] = {int: "whole", float: "number"}

# Options whose meaning differs from the same name in another request.
RENAMED = {
    (LearningRateRequest, "optimizer"): "lr_optimizer",
    (LearningRateRequest, "dropout"): "lr_dropout",
    (ScaleRequest, "devices"): "most_devices",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """An input of the form."""

    name: str
    label: str
    help: str
    kind: Kind
    unit: str
    default: str  # if the query names no field of its group
    empty: str
    choices: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Fieldset:
    """Options of a request; fieldsets of a ``group`` share their defaults."""

    name: str
    legend: str
    group: str
    request: type[Request]
    options: Mapping[str, str]
    rare: Sequence[str] = ()  # folded away
    text: str = ""

    @cached_property
    def fields(self) -> list[Field]:
        """Fields that are always visible."""
        return [_field(self.request, *one) for one in self.options.items()]

    @cached_property
    def rare_fields(self) -> list[Field]:
        """Fields that are folded away."""
        return [_field(self.request, name, "") for name in self.rare]


def field_name(request: type[Request], option: str) -> str:
    """Field name of a request's option."""
    return RENAMED.get((request, option), option)


def _field(request: type[Request], name: str, default: str) -> Field:
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
        request=MemoryPlanRequest,
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
        request=MemoryPlanRequest,
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
        "A study finds the critical batch size; “bssearch probe noise” estimates it.",
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

# Devlin et al. 2018, arXiv 1810.04805; Radford et al. 2019 (the small model); Dosovitskiy et al. 2020, arXiv
# 2010.11929; Dubey et al. 2024, arXiv 2407.21783; He et al. 2015, arXiv 1512.03385 (parameters only; convolution
# activations need more numbers).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnFigure:
    """A figure with name, title and description."""

    name: str
    title: str
    text: str
    figure: Chart


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A rejected value, its field if known, and a message with page labels."""

    field: str | None
    label: str
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultSection:
    """A result section."""

    name: str
    title: str
    text: str
    shown: Shown = field(default_factory=Shown)
    figures: Sequence[DrawnFigure] = ()
    command: str = ""  # prints the same numbers, or is empty
    absent: str = ""  # why the section is empty
    refusals: Sequence[Refusal] = ()


LONGEST_VALUE = 64  # Maximum characters of a value, far above any valid entry

YES, NO = frozenset({"on", "yes", "true", "1"}), frozenset({"no", "off", "false", "0"})

Asked = TypeVar("Asked", bound=Request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking(Generic[Asked]):
    """A command with its options' texts."""

    part: ResultSection
    command: str
    request: type[Asked]
    typed: Mapping[str, str]
    options: Sequence[str]  # options that have a field
    needed: Sequence[str]  # required for a plan
    set_by_page: Mapping[str, str] = field(default_factory=dict)  # values from the page

    @property
    def texts(self) -> dict[str, str]:
        """The given options' texts."""
        given = {option: self.typed[field_name(self.request, option)].strip() for option in self.options}
        return {**{option: text for option, text in given.items() if text}, **self.set_by_page}

    @property
    def line(self) -> str:
        """The command line as typed; empty if a text cannot be expressed."""
        words = [word for option, text in self.texts.items() for word in self._words(option, text)]
        return "" if self._unreadable() else shlex.join(["bssearch", "plan", self.command, *words])

    @property
    def missing(self) -> list[str]:
        """Required options that are missing."""
        return [option for option in self.needed if option not in self.texts]

    def answered(self, answer: Callable[[Asked], Mapping[str, Any]]) -> ResultSection:
        """Result section, empty if a field is missing or wrong."""
        part = replace(self.part, command=self.line)
        fill_in = " and ".join(f"“{self.field_of(option).label}”" for option in self.missing)
        absent = f"fill in {fill_in}" if fill_in else "see the errors above the results"
        without = replace(part, absent=f"Not calculated: {absent}.")
        try:
            if unreadable := self._unreadable():
                raise RequestError(unreadable)
            asked = read(self.request, self.texts, are_texts=True)
            if self.missing:
                return without
            found = replace(part, **answer(asked))
        except BSSearchError as error:
            return replace(without, refusals=list(self._refusals(error)))
        notes = [self.in_page_words(note) for note in found.shown.notes]
        return replace(found, shown=replace(found.shown, notes=notes))

    def field_of(self, option: str) -> Any:
        """Field of an option."""
        return FIELDS[field_name(self.request, option)]

    def in_page_words(self, message: str) -> str:
        """Replace option names in a message by page labels."""
        return self._pattern.sub(lambda match: f"“{self.field_of(_option(match)).label}”", message)

    def _refusals(self, error: BSSearchError) -> Iterator[Refusal]:
        problems: dict[str | None, str] = {} if self.missing else {None: error.message}
        if isinstance(error, RequestError):
            problems = {name: problem for name, problem in error.problems.items() if name not in self.missing}
        for option, message in problems.items():
            named = next((_option(match) for match in self._pattern.finditer(message)), None)
            about = None if (option or named) is None else self.field_of(option or named or "")
            yield Refusal(
                field=None if about is None else about.name,
                label=self.part.title if about is None else about.label,
                message=self.in_page_words(message),
                hint=None if error.hint is None else self.in_page_words(error.hint),
            )

    def _unreadable(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for option, text in self.texts.items():
            if len(text) > LONGEST_VALUE:
                found[option] = f"has {len(text):,} characters; at most {LONGEST_VALUE} are read"
            elif not text.isprintable():
                found[option] = "has characters that cannot be printed"
            elif type_of(self.request, option) is bool and text.lower() not in YES | NO:
                found[option] = f"{text!r} must be yes or no"
        return found

    def _words(self, option: str, text: str) -> list[str]:
        flag = f"--{option.replace('_', '-')}"
        if type_of(self.request, option) is bool:
            is_tri_state = self.request.model_fields[option].default is None
            negated = [flag.replace("--", "--no-")] if is_tri_state else []
            return negated if text.lower() in NO else [flag]
        return [f"{flag}={text}"] if text.startswith("-") else [flag, text]

    @property
    def _pattern(self) -> re.Pattern[str]:
        """Match ``--option``, ``option =`` and, for names that are not English words, the bare name."""
        names = "|".join(sorted(self.options, key=len, reverse=True))
        flags = names.replace("_", "-")
        words = "|".join(name for name in names.split("|") if "_" in name)
        return re.compile(rf"(?<![\w-])(?:--(?:{flags})(?![\w-])|(?:{names})(?= = )|(?:{words})(?!\w))")


def _option(match: re.Match[str]) -> str:
    return match[0].removeprefix("--").replace("-", "_")
