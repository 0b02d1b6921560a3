"""The calculator's page: form, errors and results, which its script refreshes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any
from urllib.parse import urlencode

from bssearch.figures.html import Row, Table
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
from bssearch.planning.memory.numbers import plan_numbers
from bssearch.planning.memory.request import GIB, MemoryPlan, Term
from bssearch.planning.requests import options_of
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
from bssearch.web.calculator.fields import (
    FIELDS,
    FIELDSETS,
    GROUPS,
    LONGEST_VALUE,
    PRESETS,
    YES,
    Asking,
    DrawnFigure,
    Field,
    Fieldset,
    Refusal,
    ResultSection,
)
from bssearch.web.views import Answered, PageRequest, View

STYLES: dict[str, tuple[str, Dash]] = {
    "activations": (ACCENT, "solid"),
    "attention_scores": (THIRD, "dash"),
    "logits": (SECOND, "dot"),
}

DECADES = 10**4


def memory_figure(plan: MemoryPlan, sizes: Sequence[int], peaks: Sequence[int]) -> Chart:
    """Draw fixed and growing memory and the ``peaks`` in bytes at ``sizes``."""
    standing = sum(term.bytes for term in plan.terms if term.when == "always") / GIB
    series = [
        line("peak of a step", sizes, [peak / GIB for peak in peaks], INK, width=2.5),
        line("stays, whatever the batch", sizes, [standing] * len(sizes), MUTED, dash="dot"),
        *(_growing(term, sizes) for term in plan.terms if term.bytes_per_sample),
        *_fitting(plan),
    ]
    limits = [] if plan.memory_bytes is None else [plan.memory_bytes / GIB]
    values = [*extent(series), *limits]
    least = max(values) / DECADES
    return Chart(
        x=batch_axis(sizes, "micro-batch, samples"),
        y=value_axis("GiB", [max(value, least) for value in values], log=True),
        series=series,
        rules=[ReferenceLine(at=limit, name="memory of the device", colour=SECOND) for limit in limits],
    )


def line(
    name: str, x: Sequence[float], y: Sequence[float], colour: str, *, dash: Dash = "solid", width: float = 2
) -> Series:
    """A named line."""
    points = [Point(*one) for one in zip(x, y, strict=True)]
    return Series(name=name, points=points, colour=colour, width=width, dash=dash)


def mark(name: str, x: float, y: float, colour: str, symbol: Symbol, size: int = 11) -> Series:
    """A named point."""
    return Series(name=name, points=[Point(x, y)], colour=colour, symbol=symbol, size=size)


def _growing(term: Term, sizes: Sequence[int]) -> Series:
    colour, dash = STYLES.get(term.term, (MUTED, "dash"))
    values = [(term.bytes + term.bytes_per_sample * size) / GIB for size in sizes]
    return line(term.term.replace("_", " "), sizes, values, colour, dash=dash)


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


HIGHEST = 1e4


def trade_off_figure(found: TradeOff, max_micro: int | None) -> Chart:
    """Draw time and samples to the target, relative to their minima."""
    points = [one for one in found.points if max(one.relative_time, one.relative_samples) <= HIGHEST] or [found.fastest]
    sizes = [one.row.batch for one in points]
    times, samples = [one.relative_time for one in points], [one.relative_samples for one in points]
    series = [
        line("time to the target", sizes, times, ACCENT),
        line("samples to the target (cost)", sizes, samples, THIRD, dash="dash"),
        mark(f"least time: {found.fastest.row.batch:,}", found.fastest.row.batch, 1.0, SECOND, "star", 14),
        *_largest_at_once(found, sizes, max_micro),
    ]
    is_drawn = sizes[0] <= found.b_crit <= sizes[-1]
    return Chart(
        x=batch_axis(sizes),
        y=value_axis("times the least", [*times, *samples], log=True),
        series=series,
        rules=[ReferenceLine(at=found.b_crit, name="critical batch size", is_upright=True)] if is_drawn else [],
    )


def _largest_at_once(found: TradeOff, sizes: list[int], max_micro: int | None) -> Iterator[Series]:
    at_once = [one for one in found.points if one.row.batch in sizes and one.row.batch <= (max_micro or 0)]
    if at_once:
        last = at_once[-1]
        yield mark(f"largest that fits at once: {last.row.batch:,}", last.row.batch, last.relative_time, INK, "diamond")


LARGEST_DRAWN = 2**30

# Options that import code, read files or databases, or are set by the page.
NEVER_TAKEN = frozenset({"model", "model_settings", "input_shape", "table", "rule", "study", "step_times", "db"})

MEMORY = ResultSection(
    name="memory",
    title="Memory",
    text="The memory of a training step on each device, and the samples that fit at once. The largest size that fits "
    "may not be the best. Predicted: “bssearch probe memory” measures it.",
)
SPLIT = ResultSection(
    name="accumulation",
    title="The wanted batch, split",
    text="Micro-batch × accumulation steps × devices, exactly.",
)
RATES = ResultSection(
    name="rates",
    title="Learning rate at the wanted batch",
    text="The tuned configuration by each rule of thumb, with the conditions under which the rule holds and breaks. "
    "“bssearch run” measures the best rate.",
)
TRADE_OFF = ResultSection(
    name="trade-off",
    title="Batch size against speed",
    text="Predicted for one device, not measured: t(B) = (α + β·B)·S_min·(1 + B_crit/B), to the same quality at each "
    "batch size, given that the learning rate is tuned at each. “bssearch run” measures it.",
)
DEVICES = ResultSection(
    name="devices",
    title="Several devices",
    text="Time to the target on 1 to N devices, and the number from which more stop paying: each then does less than "
    "half the work of a single device.",
)


def results(typed: Mapping[str, str]) -> list[ResultSection]:
    """The result sections."""
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
        needed=("parameters",),
        set_by_page={"table": "on"},
    ).answered(of_memory)
    fits = next(iter(fitting), None)
    return [memory, _split(typed, fits), _rates(typed), _trade_off(typed, fits), _devices(typed, fits)]


def _memory_figures(asked: MemoryPlanRequest, plan: MemoryPlan) -> list[DrawnFigure]:
    if plan.activation_bytes_per_sample is None:
        return []
    around = plan.largest_micro_batch or plan.micro_batch or 16
    sizes = list(takewhile(lambda size: size <= min(4 * around, LARGEST_DRAWN), (2**power for power in range(64))))
    peaks = [
        plan_numbers(asked.model_copy(update={"micro_batch": size, "table": False})).peak_bytes or 0 for size in sizes
    ]
    drawn = DrawnFigure(
        name="memory",
        title="Memory against the micro-batch",
        text="Predicted. The dotted line is the device's memory.",
        figure=memory_figure(plan, sizes, peaks),
    )
    return [drawn]


def _micro(typed: Mapping[str, str], fitting: int | None) -> dict[str, str]:
    is_told = typed["max_micro"].strip()
    return {"max_micro": str(min(fitting, LARGEST_MICRO))} if fitting and not is_told else {}


def _split(typed: Mapping[str, str], fitting: int | None) -> ResultSection:
    is_told = typed["micro"].strip() or typed["max_micro"].strip()
    if fitting == 0 and not is_told:
        return replace(SPLIT, absent="Not calculated: not even one sample fits into the memory above.")
    unknown = "How many samples fit at once is not known here: the share of a device runs as one micro-batch."
    return Asking(
        part=SPLIT,
        command="accumulation",
        request=AccumulationRequest,
        typed=typed,
        options=list(options_of(AccumulationRequest)),
        needed=("batch",),
        set_by_page={} if is_told else _micro(typed, fitting),
    ).answered(
        lambda asked: {
            "shown": replace(
                shown_split(plan_accumulation(**asked.model_dump())), sentence="" if is_told or fitting else unknown
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
        best = {**asking.set_by_page, "batch": str(found.fastest.row.batch)}
        figure = DrawnFigure(
            name="trade-off",
            title="Time and samples to the target against batch size",
            text="Both over the least of all; the dotted line is B_crit.",
            figure=trade_off_figure(found, asked.max_micro),
        )
        return {
            "shown": Shown(sentence=_best(found, asked.max_micro), tables=[_points(found)]),
            "figures": [figure],
            "command": replace(asking, set_by_page=best).line,
        }

    return asking.answered(answer)


def _best(found: TradeOff, max_micro: int | None) -> str:
    fastest = found.fastest.row
    said = f"The least time has a batch of about {fastest.batch:,}"
    if fastest.accumulation_steps > 1:
        said += f", in {fastest.accumulation_steps} micro-batches of {fastest.micro_batch:,}"
    if found.optimum:
        said += f". If all samples run at once it is √(B_crit·α/β) = {in_words(found.optimum)}"
    return f"{said}." if max_micro is None else f"{said}. Up to {max_micro:,} samples run at once."


def _points(found: TradeOff) -> Table:
    names = ("batch", "micro_batch", "accumulation_steps", "step_s")
    rows = []
    for point in found.points:
        cells = [cell({"rows": [asdict(point.row)]}, f"rows.0.{name}") for name in names]
        shown = cells if point is found.fastest else [Cell(one.shown) for one in cells]
        relative = [Cell(point.relative_time), Cell(point.relative_samples)]
        rows.append(Row(cells=[*shown, *relative], marked=point is found.fastest))
    headings = ["batch", "micro-batch", "accumulation", "step, s", "time, relative", "samples, relative"]
    caption = "The same as numbers; the command prints the row in bold"
    return Table(caption=caption, headings=headings, rows=rows, folded=True)


RESULTS = "results"  # The part that the script replaces

LONGEST_ECHO = 200  # Characters of a long text shown again

MOST_NAMED = 5  # Maximum unknown fields listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Calculated:
    """A rendered page's content."""

    texts: Mapping[str, str]
    wrong: Mapping[str, str]  # the fields' errors
    errors: Sequence[Refusal]
    notes: Sequence[str]
    parts: Sequence[ResultSection]
    presets: Mapping[str, str]  # query strings with a named model
    summary: str  # for screen readers
    fieldsets: Sequence[Fieldset] = FIELDSETS

    def is_open(self, fieldset: Fieldset) -> bool:
        """True if a rare field has a value."""
        return any(self.texts[field.name] or field.name in self.wrong for field in fieldset.rare_fields)

    def is_checked(self, field: Field) -> bool:
        """True if a flag is set."""
        return self.texts[field.name].lower() in YES


def calculator_page(asked: PageRequest) -> Answered:
    """Show the calculator for a query."""
    template = "calculator_results.html" if asked.text("part") == RESULTS else "calculator.html"
    return View(template=template, values={"calculator": calculated(asked.query)})


def calculated(query: Mapping[str, str]) -> Calculated:
    """Page of a query; wrong or missing fields omit dependent parts. Never raises.

    A group without fields in the query gets its defaults.
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
    said = [f"{tile.name}: {tile.value.text}" for part in parts[:2] for tile in part.shown.tiles[:2]]
    wrong = [f"{len(errors)} {'entry is' if len(errors) == 1 else 'entries are'} wrong"] if errors else []
    return f"{'; '.join([*wrong, *said]) or 'Nothing could be calculated'}."


def _notes(names: Iterator[str]) -> Iterator[str]:
    unknown = []
    for name in names:
        if name.replace("-", "_") in NEVER_TAKEN:
            yield (
                f"“{name}” is not taken from a page, which imports no code and reads no file: use the command "
                "“bssearch plan” for it."
            )
        else:
            unknown.append(repr(name if len(name) <= LONGEST_VALUE else f"{name[:LONGEST_VALUE]}…"))
    if unknown:
        more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
        yield f"Left out, as the page has no such field: {', '.join(unknown[:MOST_NAMED])}{more}."
