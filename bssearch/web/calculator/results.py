"""The parts of the page, each the answer of a plan to what is filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import takewhile
from typing import Any

from bssearch.pages.plans import Cell, Row, Shown, Table, cell, shown_memory, shown_rules, shown_scale, shown_split
from bssearch.pages.words import in_words
from bssearch.planning.accumulation import AccumulationRequest, plan_accumulation
from bssearch.planning.learning_rate import LearningRateRequest, plan_rules
from bssearch.planning.memory import MemoryPlan, MemoryRequest
from bssearch.planning.memory.numbers import changed, plan_numbers
from bssearch.planning.requests import options_of
from bssearch.planning.scale import LARGEST_MICRO, ScaleRequest, plan_devices
from bssearch.planning.trade_off import TradeOff, plan_trade_off
from bssearch.web.calculator.asking import Asking, DrawnFigure, Part
from bssearch.web.calculator.memory_figure import memory_figure, trade_off_figure

LARGEST_DRAWN = 2**30
"""The largest micro-batch that is drawn."""

NEVER_TAKEN = frozenset({"model", "model_settings", "input_shape", "table", "rule", "study", "step_times", "db"})
"""Options that import code, or read files and databases, or that the page gives itself."""

MEMORY = Part(
    name="memory",
    title="Memory",
    text="What a training step needs on each device, and how many samples fit at once. It is what fits, not what is "
    "best, and it is predicted: “bssearch probe memory” measures it.",
)
SPLIT = Part(
    name="accumulation",
    title="The wanted batch, split",
    text="Micro-batch × accumulation steps × devices, exactly.",
)
RATES = Part(
    name="rates",
    title="Learning rate at the wanted batch",
    text="What each rule of thumb makes of the tuned configuration. Rules are only sometimes right: beside each stands "
    "when it holds and when it breaks. “bssearch run” measures the best rate.",
)
TRADE_OFF = Part(
    name="trade-off",
    title="Batch size against speed",
    text="Predicted for one device, not measured: t(B) = (α + β·B)·S_min·(1 + B_crit/B), to the same quality at each "
    "batch size, given that the learning rate is tuned at each. “bssearch run” measures it.",
)
DEVICES = Part(
    name="devices",
    title="Several devices",
    text="What 1 to N devices take to the target, and from which number on more stop paying: there each does less than "
    "half of what one alone would.",
)


def results(typed: Mapping[str, str]) -> list[Part]:
    """Return the parts of the page from the texts of its fields."""
    fitting: list[int | None] = []

    def of_memory(asked: MemoryRequest) -> dict[str, Any]:
        plan = plan_numbers(asked)
        fitting.append(plan.safe_micro_batch or plan.largest_micro_batch)
        return {"shown": shown_memory(plan), "figures": _memory_figures(asked, plan)}

    memory = Asking(
        part=MEMORY,
        command="memory",
        request=MemoryRequest,
        typed=typed,
        options=[name for name in options_of(MemoryRequest) if name not in NEVER_TAKEN],
        needed=("parameters",),
        set_by_page={"table": "on"},
    ).answered(of_memory)
    fits = next(iter(fitting), None)
    return [memory, _split(typed, fits), _rates(typed), _trade_off(typed, fits), _devices(typed, fits)]


def _memory_figures(asked: MemoryRequest, plan: MemoryPlan) -> list[DrawnFigure]:
    """Return the figure of memory against the micro-batch, from a plan at each of them."""
    if plan.activation_bytes_per_sample is None:
        return []
    around = plan.largest_micro_batch or plan.micro_batch or 16
    sizes = list(takewhile(lambda size: size <= min(4 * around, LARGEST_DRAWN), (2**power for power in range(64))))
    peaks = [plan_numbers(changed(asked, micro_batch=size, table=False)).peak_bytes or 0 for size in sizes]
    drawn = DrawnFigure(
        name="memory",
        title="Memory against the micro-batch",
        text="Predicted. Where the peak crosses the dotted line the device's memory ends.",
        figure=memory_figure(plan, sizes, peaks),
    )
    return [drawn]


def _micro(typed: Mapping[str, str], fitting: int | None) -> dict[str, str]:
    """Return the micro-batch that memory has room for, unless the page is told another."""
    is_told = typed["max_micro"].strip()
    return {"max_micro": str(min(fitting, LARGEST_MICRO))} if fitting and not is_told else {}


def _split(typed: Mapping[str, str], fitting: int | None) -> Part:
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


def _rates(typed: Mapping[str, str]) -> Part:
    return Asking(
        part=RATES,
        command="lr",
        request=LearningRateRequest,
        typed=typed,
        options=[name for name in options_of(LearningRateRequest) if name not in NEVER_TAKEN],
        needed=("batch", "from_batch", "learning_rate"),
    ).answered(lambda asked: {"shown": shown_rules(plan_rules(asked))})


def _devices(typed: Mapping[str, str], fitting: int | None) -> Part:
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


def _trade_off(typed: Mapping[str, str], fitting: int | None) -> Part:
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
    """Return the points; the command prints the fastest alone."""
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
