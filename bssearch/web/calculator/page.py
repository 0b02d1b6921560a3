"""The calculator's page: form, errors, and results that a script refreshes."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import urlencode

from bssearch.errors import BSSearchError
from bssearch.figures.html import Row, Section, Table
from bssearch.figures.plans import Cell, Shown, cell, shown_memory, shown_rules, shown_scale, shown_split
from bssearch.figures.svg import (
    ACCENT,
    INK,
    MUTED,
    SECOND,
    THIRD,
    Chart,
    Dash,
    Point,
    ReferenceLine,
    Series,
    Symbol,
    batch_axis,
    extent,
    value_axis,
)
from bssearch.planning.learning_rate import LearningRateRequest, plan_rules
from bssearch.planning.memory import MemoryPlanRequest
from bssearch.planning.memory.request import GIB, MemoryPlan, Term, plan_numbers
from bssearch.planning.requests import Request, RequestError, options_of, read, type_of
from bssearch.planning.scale import (
    LARGEST_MICRO,
    AccumulationRequest,
    ScaleRequest,
    TradeOff,
    plan_accumulation,
    plan_devices,
    plan_trade_off,
)
from bssearch.records.text import in_words, visible
from bssearch.web.views import Answered, PageRequest, View

Kind = Literal["whole", "number", "text", "choice", "yes_no", "flag"]
KINDS: Mapping[type, Kind] = {int: "whole", float: "number"}

# Options with another meaning in another request
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
    default: str  # the value if the query has no field of the group
    empty: str
    choices: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Fieldset:
    """Inputs for the options of a request. All fieldsets of a ``group`` get default values together."""

    name: str
    legend: str
    group: str
    request: type[Request]
    options: Mapping[str, str]
    rare: Sequence[str] = ()  # folded
    text: str = ""

    @cached_property
    def fields(self) -> list[Field]:
        return [_field(self.request, *one) for one in self.options.items()]

    @cached_property
    def rare_fields(self) -> list[Field]:
        return [_field(self.request, name, "") for name in self.rare]


def field_name(request: type[Request], option: str) -> str:
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
        rare=(
            "mixed",
            "stage",
            "micro_batch",
            "trainable_parameters",
            "lora_rank",
            "base_precision",
            "offload_optimizer",
        ),
    ),
    Fieldset(
        name="transformer",
        legend="Transformer",
        group="model",
        text="The plan needs these values for activations and micro-batches. Leave the fields empty for other models.",
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
        name="network",
        legend="Convolutional network",
        group="model",
        text="Choose a network instead of a transformer. Leave the parameters empty to take the network's parameters.",
        request=MemoryPlanRequest,
        options={"network": "", "input_shape": ""},
        rare=("stages", "channels"),
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
        text="Enter a tuned configuration to scale to the wanted batch.",
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
        text="A step of m samples takes α + β·m seconds. “bssearch probe step-time” measures α and β on your device. "
        "“bssearch probe noise” estimates the critical batch size, and a study measures this size.",
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

_CONVOLUTIONAL = {"memory_gib": "24", "precision": "bf16", "input_shape": "3x224x224"}

# Devlin et al. 2018, arXiv 1810.04805; Radford et al. 2019 (the small model); Dosovitskiy et al. 2020, arXiv
# 2010.11929; Dubey et al. 2024, arXiv 2407.21783; Touvron et al. 2023, arXiv 2302.13971; networks: see
# `bssearch.planning.memory.networks`
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
    "Llama-like 7B, LoRA": {
        "parameters": "6.74B",
        "memory_gib": "24",
        "precision": "bf16",
        "optimizer": "adamw",
        "lora_rank": "16",
        "base_precision": "int4",
        "layers": "32",
        "hidden": "4096",
        "heads": "32",
        "sequence": "2048",
        "vocabulary": "32000",
        "intermediate": "11008",
        "mlp": "swiglu",
        "fused_attention": "yes",
        "dropout": "no",
    },
    "ResNet-18": {**_CONVOLUTIONAL, "network": "resnet18", "parameters": "11.7M", "optimizer": "momentum"},
    "ResNet-50": {**_CONVOLUTIONAL, "network": "resnet50", "parameters": "25.6M", "optimizer": "momentum"},
    "EfficientNet-B0": {**_CONVOLUTIONAL, "network": "efficientnet_b0", "parameters": "5.29M", "optimizer": "rmsprop"},
    "ConvNeXt-T": {**_CONVOLUTIONAL, "network": "convnext_tiny", "parameters": "28.6M", "optimizer": "adamw"},
    "U-Net": {
        **_CONVOLUTIONAL,
        "network": "unet",
        "parameters": "31.0M",
        "input_shape": "3x512x512",
        "optimizer": "momentum",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error in an entry, with a message that uses the page's labels."""

    field: str | None
    label: str
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultSection:
    """A plan's results on the page."""

    name: str
    title: str
    text: str
    shown: Shown = field(default_factory=Shown)
    figures: Sequence[Section] = ()
    command: str = ""  # the command that prints the same numbers
    absent: str = ""  # the reason for an empty section
    refusals: Sequence[Refusal] = ()


LONGEST_VALUE = 64  # most characters of a value, far above valid entries

YES, NO = frozenset({"on", "yes", "true", "1"}), frozenset({"no", "off", "false", "0"})

Asked = TypeVar("Asked", bound=Request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking(Generic[Asked]):
    """A ``bssearch plan`` command with the form's entries."""

    part: ResultSection
    command: str
    request: type[Asked]
    typed: Mapping[str, str]
    options: Sequence[str]  # options that have a field
    needed: Sequence[str]  # options required for a plan
    set_by_page: Mapping[str, str] = field(default_factory=dict)  # values that the page sets

    @property
    def texts(self) -> dict[str, str]:
        given = {option: self.typed[field_name(self.request, option)].strip() for option in self.options}
        return {**{option: text for option, text in given.items() if text}, **self.set_by_page}

    @property
    def line(self) -> str:
        """The command line for the entries, or "" if an entry is unreadable."""
        return (
            ""
            if self._unreadable()
            else shlex.join(
                [
                    "bssearch",
                    "plan",
                    self.command,
                    *[word for option, text in self.texts.items() for word in self._words(option, text)],
                ]
            )
        )

    @property
    def missing(self) -> list[str]:
        return [option for option in self.needed if option not in self.texts]

    def answered(self, answer: Callable[[Asked], Mapping[str, Any]]) -> ResultSection:
        part = replace(self.part, command=self.line)
        fill_in = " and ".join(f"“{self.field_of(option).label}”" for option in self.missing)
        absent = f"fill in {fill_in}" if fill_in else "see the errors above the results"
        without = replace(part, absent=f"No result; {absent}.")
        try:
            if unreadable := self._unreadable():
                raise RequestError(unreadable)
            asked = read(self.request, self.texts, are_texts=True)
            if self.missing:
                return without
            found = replace(part, **answer(asked))
        except BSSearchError as error:
            return replace(without, refusals=list(self._refusals(error)))
        return replace(
            found, shown=replace(found.shown, notes=[self._in_page_words(note) for note in found.shown.notes])
        )

    def field_of(self, option: str) -> Any:
        return FIELDS[field_name(self.request, option)]

    def _in_page_words(self, message: str) -> str:
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
                message=self._in_page_words(message),
                hint=None if error.hint is None else self._in_page_words(error.hint),
            )

    def _unreadable(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for option, text in self.texts.items():
            if len(text) > LONGEST_VALUE or not text.isprintable():
                found[option] = f"must be at most {LONGEST_VALUE} printable characters"
            elif type_of(self.request, option) is bool and text.lower() not in YES | NO:
                found[option] = f"{text!r} must be yes or no"
        return found

    def _words(self, option: str, text: str) -> list[str]:
        flag = options_of(self.request)[option].flag or f"--{option.replace('_', '-')}"
        if type_of(self.request, option) is bool:
            negated = [f"--no-{flag[2:]}"] if self.request.model_fields[option].default is None else []
            return negated if text.lower() in NO else [flag]
        return [f"{flag}={text}"] if text.startswith("-") else [flag, text]

    @property
    def _pattern(self) -> re.Pattern[str]:
        # Matches ``--option``, ``option =`` and bare names with an underscore
        names = "|".join(sorted(self.options, key=len, reverse=True))
        flags = names.replace("_", "-")
        words = "|".join(name for name in names.split("|") if "_" in name)
        return re.compile(rf"(?<![\w-])(?:--(?:{flags})(?![\w-])|(?:{names})(?= = )|(?:{words})(?!\w))")


def _option(match: re.Match[str]) -> str:
    return match[0].removeprefix("--").replace("-", "_")


STYLES: dict[str, tuple[str, Dash]] = {
    "activations": (ACCENT, "solid"),
    "attention_scores": (THIRD, "dash"),
    "logits": (SECOND, "dot"),
}

DECADES = 10**4  # the axis starts this factor below the highest value


def _memory_figure(plan: MemoryPlan, sizes: Sequence[int], peaks: Sequence[int]) -> Chart:
    fixed = sum(term.bytes for term in plan.terms if term.when == "always") / GIB
    series = [
        line("peak of a step", sizes, [peak / GIB for peak in peaks], INK, width=2.5),
        line("fixed at any batch", sizes, [fixed] * len(sizes), MUTED, dash="dot"),
        *(_growing(term, sizes) for term in plan.terms if term.bytes_per_sample),
        *_fitting(plan),
    ]
    limits = [] if plan.memory_bytes is None else [plan.memory_bytes / GIB]
    values = [*extent(series), *limits]
    return Chart(
        x=batch_axis(sizes, "micro-batch, samples"),
        y=value_axis("GiB", [max(value, max(values) / DECADES) for value in values], log=True),
        series=series,
        rules=[ReferenceLine(at=limit, name="memory of the device", colour=SECOND) for limit in limits],
    )


def line(
    name: str, x: Sequence[float], y: Sequence[float], colour: str, *, dash: Dash = "solid", width: float = 2
) -> Series:
    return Series(
        name=name, points=[Point(*one) for one in zip(x, y, strict=True)], colour=colour, width=width, dash=dash
    )


def mark(name: str, x: float, y: float, colour: str, symbol: Symbol, size: int = 11) -> Series:
    return Series(name=name, points=[Point(x, y)], colour=colour, symbol=symbol, size=size)


def _growing(term: Term, sizes: Sequence[int]) -> Series:
    colour, dash = STYLES.get(term.term, (MUTED, "dash"))
    return line(
        term.term.replace("_", " "),
        sizes,
        [(term.bytes + term.bytes_per_sample * size) / GIB for size in sizes],
        colour,
        dash=dash,
    )


def _fitting(plan: MemoryPlan) -> Iterator[Series]:
    if plan.memory_bytes is None or plan.headroom_bytes is None:
        return
    marks: list[tuple[str, int | None, float, Symbol]] = [
        ("largest that fits", plan.largest_micro_batch, plan.memory_bytes, "diamond"),
        ("safe", plan.safe_micro_batch, plan.memory_bytes - plan.headroom_bytes, "circle"),
    ]
    for name, size, height, symbol in marks:
        if size:
            yield mark(f"{name}: {size}", size, height / GIB, SECOND, symbol)


HIGHEST = 1e4  # multiples of the minimum; the chart leaves out higher points


def _trade_off_figure(found: TradeOff, max_micro: int | None) -> Chart:
    points = [one for one in found.points if max(one.relative_time, one.relative_samples) <= HIGHEST] or [found.fastest]
    sizes = [one.row.batch for one in points]
    times, samples = [one.relative_time for one in points], [one.relative_samples for one in points]
    is_drawn = sizes[0] <= found.b_crit <= sizes[-1]
    return Chart(
        x=batch_axis(sizes),
        y=value_axis("multiple of the minimum", [*times, *samples], log=True),
        series=[
            line("time to the target", sizes, times, ACCENT),
            line("samples to the target (cost)", sizes, samples, THIRD, dash="dash"),
            *_largest_at_once(found, sizes, max_micro),
            mark(f"least time: {found.fastest.row.batch:,}", found.fastest.row.batch, 1.0, SECOND, "star", 14),
        ],
        rules=[ReferenceLine(at=found.b_crit, name="critical batch size", is_upright=True)] if is_drawn else [],
    )


def _largest_at_once(found: TradeOff, sizes: list[int], max_micro: int | None) -> Iterator[Series]:
    at_once = [one for one in found.points if one.row.batch in sizes and one.row.batch <= (max_micro or 0)]
    if at_once:
        last = at_once[-1]
        yield mark(f"largest that fits at once: {last.row.batch:,}", last.row.batch, last.relative_time, INK, "diamond")


LARGEST_DRAWN = 2**30

# Options that import code, read files or databases, or come from the page
NEVER_TAKEN = frozenset({"model", "model_settings", "table", "rule", "study", "step_times", "db"})

MEMORY = ResultSection(
    name="memory",
    title="Memory",
    text="The figures predict the memory of a training step on each device, and the micro-batches that fit. The "
    "largest micro-batch may not be the best. “bssearch probe memory” measures the memory.",
)
SPLIT = ResultSection(
    name="accumulation",
    title="The wanted batch, split",
    text="Micro-batch × accumulation steps × devices equals the batch.",
)
RATES = ResultSection(
    name="rates",
    title="Learning rate at the wanted batch",
    text="Each rule of thumb scales the tuned configuration; the second table says when each rule holds or breaks. "
    "“bssearch run” measures the best learning rate.",
)
TRADE_OFF = ResultSection(
    name="trade-off",
    title="Batch size against speed",
    text="With a tuned learning rate at each batch size, one device should reach the target in t(B) = (α + β·B)·S_min·"
    "(1 + B_crit/B) (McCandlish et al. 2018). “bssearch run” measures the time.",
)
DEVICES = ResultSection(
    name="devices",
    title="Several devices",
    text="The table has the time to the target on 1 to N devices. More devices pay while the efficiency "
    "(speedup / devices) is at least 50 %.",
)


def results(typed: Mapping[str, str]) -> list[ResultSection]:
    fitting: list[int | None] = []

    def of_memory(asked: MemoryPlanRequest) -> dict[str, Any]:
        plan = plan_numbers(asked)
        fitting.append(plan.safe_micro_batch or plan.largest_micro_batch)
        return {"shown": shown_memory(plan), "figures": _memory_figures(asked, plan)}

    memory = Asking(
        part=MEMORY,
        command="memory",
        request=MemoryPlanRequest,
        typed=typed,
        options=[name for name in options_of(MemoryPlanRequest) if name not in NEVER_TAKEN],
        needed=() if typed["network"].strip() else ("parameters",),
        set_by_page={"table": "on"},
    ).answered(of_memory)
    fits = next(iter(fitting), None)
    return [memory, _split(typed, fits), _rates(typed), _trade_off(typed, fits), _devices(typed, fits)]


def _memory_figures(asked: MemoryPlanRequest, plan: MemoryPlan) -> list[Section]:
    if plan.activation_bytes_per_sample is None:
        return []
    around = plan.largest_micro_batch or plan.micro_batch or 16
    sizes = list(takewhile(lambda size: size <= min(4 * around, LARGEST_DRAWN), (2**power for power in range(64))))
    peaks = [
        plan_numbers(asked.model_copy(update={"micro_batch": size, "table": False})).peak_bytes or 0 for size in sizes
    ]
    return [
        Section(
            name="memory",
            title="Memory against the micro-batch",
            text="The chart shows the prediction and, if known, the device's memory.",
            charts={"memory": _memory_figure(plan, sizes, peaks)},
        )
    ]


def _micro(typed: Mapping[str, str], fitting: int | None) -> dict[str, str]:
    return {"max_micro": str(min(fitting, LARGEST_MICRO))} if fitting and not typed["max_micro"].strip() else {}


def _split(typed: Mapping[str, str], fitting: int | None) -> ResultSection:
    is_given = typed["micro"].strip() or typed["max_micro"].strip()
    if fitting == 0 and not is_given:
        return replace(
            SPLIT,
            absent="No result, because no sample fits into the memory above; enter more memory, or a micro-batch.",
        )
    unknown = "The largest micro-batch is unknown, so a device's share is one micro-batch."
    return Asking(
        part=SPLIT,
        command="accumulation",
        request=AccumulationRequest,
        typed=typed,
        options=list(options_of(AccumulationRequest)),
        needed=("batch",),
        set_by_page={} if is_given else _micro(typed, fitting),
    ).answered(
        lambda asked: {
            "shown": replace(
                shown_split(plan_accumulation(**asked.model_dump())), sentence="" if is_given or fitting else unknown
            )
        }
    )


def _rates(typed: Mapping[str, str]) -> ResultSection:
    return Asking(
        part=RATES,
        command="lr",
        request=LearningRateRequest,
        typed=typed,
        options=[name for name in options_of(LearningRateRequest) if name not in NEVER_TAKEN],
        needed=("batch", "from_batch", "learning_rate"),
    ).answered(lambda asked: {"shown": shown_rules(plan_rules(asked))})


def _devices(typed: Mapping[str, str], fitting: int | None) -> ResultSection:
    of_each, other = (
        ("per_device_batch", "batch") if typed["per_device_batch"].strip() else ("batch", "per_device_batch")
    )
    several = () if typed["most_devices"].strip() == "1" else ("parameters", "bandwidth_gb_s")
    return Asking(
        part=DEVICES,
        command="scale",
        request=ScaleRequest,
        typed=typed,
        options=[name for name in options_of(ScaleRequest) if name not in {*NEVER_TAKEN, other}],
        needed=("devices", of_each, "alpha_s", "beta_s", "b_crit", *several),
        set_by_page=_micro(typed, fitting),
    ).answered(lambda asked: {"shown": shown_scale(plan_devices(asked))})


def _trade_off(typed: Mapping[str, str], fitting: int | None) -> ResultSection:
    asking = Asking(
        part=TRADE_OFF,
        command="scale",
        request=ScaleRequest,
        typed=typed,
        options=("alpha_s", "beta_s", "b_crit", "b_crit_low", "b_crit_high", "max_micro"),
        needed=("alpha_s", "beta_s", "b_crit"),
        set_by_page={**_micro(typed, fitting), "devices": "1", "batch": "1"},
    )

    def answer(asked: ScaleRequest) -> dict[str, Any]:
        found = plan_trade_off(asked)
        figure = Section(
            name="trade-off",
            title="Time and samples to the target against batch size",
            text="Time and samples are relative to their minima. The dotted line, if any, is B_crit.",
            charts={"trade-off": _trade_off_figure(found, asked.max_micro)},
        )
        best = {**asking.set_by_page, "batch": str(found.fastest.row.batch)}
        return {
            "shown": Shown(sentence=_best(found, asked.max_micro), tables=[_points(found)]),
            "figures": [figure],
            "command": replace(asking, set_by_page=best).line,
        }

    return asking.answered(answer)


def _best(found: TradeOff, max_micro: int | None) -> str:
    fastest = found.fastest.row
    text = f"A batch of about {fastest.batch:,} takes the least time"
    if fastest.accumulation_steps > 1:
        text += f", in {fastest.accumulation_steps} micro-batches of {fastest.micro_batch:,}"
    if found.optimum:
        text += f". Without accumulation, the best batch is √(B_crit·α/β) = {in_words(found.optimum)}"
    return f"{text}." if max_micro is None else f"{text}. The largest micro-batch is {max_micro:,}."


def _points(found: TradeOff) -> Table:
    names = ("batch", "micro_batch", "accumulation_steps", "step_s")
    printed = {"rows": [asdict(found.fastest.row)]}
    return Table(
        caption="The chart's numbers; the command prints the bold row",
        headings=["batch", "micro-batch", "accumulation", "step, s", "time, relative", "samples, relative"],
        rows=[
            Row(
                cells=[
                    *(
                        cell(printed, f"rows.0.{name}") if point is found.fastest else Cell(getattr(point.row, name))
                        for name in names
                    ),
                    Cell(point.relative_time),
                    Cell(point.relative_samples),
                ],
                marked=point is found.fastest,
            )
            for point in found.points
        ],
        folded=True,
    )


RESULTS = "results"  # the part that the script replaces

LONGEST_ECHO = 200  # most characters of a repeated text

MOST_NAMED = 5  # most unknown fields in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Calculated:
    """The content of the calculator's page."""

    texts: Mapping[str, str]
    wrong: Mapping[str, str]  # the fields' errors
    errors: Sequence[Refusal]
    notes: Sequence[str]
    parts: Sequence[ResultSection]
    presets: Mapping[str, str]  # query strings with a named model
    summary: str  # for screen readers
    fieldsets: Sequence[Fieldset] = FIELDSETS

    def is_open(self, fieldset: Fieldset) -> bool:
        return any(self.texts[field.name] or field.name in self.wrong for field in fieldset.rare_fields)

    def is_checked(self, field: Field) -> bool:
        return self.texts[field.name].lower() in YES


def calculator_page(asked: PageRequest) -> Answered:
    return View(
        template="calculator_results.html" if asked.text("part") == RESULTS else "calculator.html",
        values={"calculator": calculated(asked.query)},
    )


def calculated(query: Mapping[str, str]) -> Calculated:
    """Return the results of a query without raising an error. A section stays empty if an entry is wrong or missing.

    A group without fields in the query gets default values.
    """
    named = {GROUPS[name] for name in query if name in FIELDS}
    typed = {
        name: str(query.get(name, "")) if GROUPS[name] in named else field.default for name, field in FIELDS.items()
    }
    parts = results(typed)
    refusals = {(one.field or one.message): one for part in reversed(parts) for one in reversed(part.refusals)}
    errors = list(refusals.values())[::-1]
    shown = {name: visible(text[:LONGEST_ECHO]) for name, text in typed.items()}
    others = {name: text for name, text in shown.items() if GROUPS[name] != "model" and text}
    return Calculated(
        texts=shown,
        wrong={one.field: one.message for one in errors if one.field is not None},
        errors=errors,
        notes=list(_notes(name for name in query if name not in FIELDS and name != "part")),
        parts=parts,
        presets={name: urlencode({**fields, **others}) for name, fields in PRESETS.items()},
        summary=_summary(parts, errors),
    )


def _summary(parts: Sequence[ResultSection], errors: Sequence[Refusal]) -> str:
    sentences = [f"{tile.name}: {tile.value.text}" for part in parts[:2] for tile in part.shown.tiles[:2]]
    wrong = [f"{len(errors)} {'entry is' if len(errors) == 1 else 'entries are'} wrong"] if errors else []
    return f"{'; '.join([*wrong, *sentences]) or 'No results'}."


def _notes(names: Iterator[str]) -> Iterator[str]:
    unknown = []
    for name in names:
        if name.replace("-", "_") in NEVER_TAKEN:
            yield f"The page ignored “{name}”, which only the command line accepts; use “bssearch plan”."
        else:
            unknown.append(repr(name if len(name) <= LONGEST_VALUE else f"{name[:LONGEST_VALUE]}…"))
    if unknown:
        more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
        yield f"The page ignored unknown fields: {', '.join(unknown[:MOST_NAMED])}{more}."
