"""The parts about speed: several devices (`bssearch plan scale`), and batch size against time and samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bssearch.commands.plan.scale import plan_scale
from bssearch.errors import BSSearchError
from bssearch.pages.words import in_words
from bssearch.planning.scale import LARGEST_MICRO, DeviceRange, Hardware, Interval, ScalePlan
from bssearch.planning.trade_off import TradeOff, plan_trade_off
from bssearch.web.calculator.asking import Asked
from bssearch.web.calculator.parts import Cell, DrawnFigure, Heading, Part, Row, Table, Tile
from bssearch.web.calculator.trade_off_figure import trade_off_figure
from bssearch.web.calculator.typed import Typed

DEVICES = Heading(
    name="devices",
    title="Several devices",
    text="What 1 to N devices take to the target, and from which number on more stop paying: there each does less than "
    "half of what one alone would.",
)

TRADE_OFF = Heading(
    name="trade-off",
    title="Batch size against speed",
    text="Predicted for one device, not measured: t(B) = (α + β·B)·S_min·(1 + B_crit/B), to the same quality at each "
    "batch size, given that the learning rate is tuned at each. “bssearch run” measures it.",
)

SPEED_OPTIONS = {name: name for name in ("alpha_s", "beta_s", "b_crit", "b_crit_low", "b_crit_high")}

MORE_OPTIONS = {
    name: name
    for name in (
        "parameters",
        "gradient_bytes",
        "bandwidth_gb_s",
        "latency_us",
        "overlap",
        "samples_to_target",
        "at_batch",
        "price_per_device_hour",
        "max_micro",
    )
}

COLUMNS = {
    "devices": "devices",
    "batch": "batch",
    "accumulation_steps": "accumulation",
    "step_s": "step, s",
    "communication_s": "communication, s",
    "speedup": "speedup",
    "efficiency": "efficiency",
    "time_to_target_s": "to target, s",
    "device_hours": "device hours",
    "cost": "cost",
}


def _micro(typed: Typed, fitting: int | None) -> dict[str, int]:
    return {"max_micro": min(fitting, LARGEST_MICRO)} if fitting and "max_micro" not in typed.values else {}


def devices_part(typed: Typed, fitting: int | None) -> Part:
    """Return the part about several devices; ``fitting`` is the micro-batch that memory has room for, or None."""
    of_each = "per_device_batch" if typed.texts["per_device_batch"].strip() else "batch"
    asked = Asked(
        heading=DEVICES,
        command="scale",
        typed=typed,
        options={"devices": "most_devices", of_each: of_each, **SPEED_OPTIONS, **MORE_OPTIONS},
        needed=("most_devices", of_each, "alpha_s", "beta_s", "b_crit", *_needed_by_several(typed)),
        set_by_page=_micro(typed, fitting),
    )
    if (unready := asked.unready()) is not None:
        return unready
    try:
        plan = plan_scale(**asked.values)
    except BSSearchError as error:
        return asked.refused(error)
    return DEVICES.part(
        tiles=list(_tiles(plan)),
        tables=[_rows(plan)],
        notes=[asked.in_page_words(note) for note in plan.remarks] + [claim.message for claim in plan.claims],
        command=asked.line,
    )


def _needed_by_several(typed: Typed) -> tuple[str, ...]:
    """Return what the exchange of gradients needs, where there are several devices."""
    return ("parameters", "bandwidth_gb_s") if typed.values.get("most_devices", 1) > 1 else ()


def _tiles(plan: ScalePlan) -> Iterator[Tile]:
    yield Tile(
        "More devices pay up to",
        Cell.of("pays_up_to.estimate", plan.pays_up_to.estimate),
        _interval(plan.pays_up_to),
    )
    if plan.passes_b_crit.estimate is not None:
        yield Tile(
            "The batch passes B_crit at",
            Cell.of("passes_b_crit.estimate", plan.passes_b_crit.estimate),
            f"devices {_interval(plan.passes_b_crit)}".strip(),
        )
    yield Tile("The least time has", Cell.of("fastest", plan.fastest), f"of 1 to {plan.devices} devices")


def _interval(found: DeviceRange) -> str:
    return "" if found.low is None and found.high is None else f"[{in_words(found.low)}, {in_words(found.high)}]"


def _rows(plan: ScalePlan) -> Table:
    shown = [name for name in COLUMNS if getattr(plan.rows[0], name) is not None]
    places = {row.devices: at for at, row in enumerate(plan.rows)}
    rows = [
        Row(
            cells=[Cell.of(f"rows.{places[row.devices]}.{name}", getattr(row, name)) for name in shown],
            marked=row.devices == plan.pays_up_to.estimate,
        )
        for row in plan.rows_for_people()
    ]
    return Table(
        caption="By number of devices; in bold the last that pays",
        headings=[COLUMNS[name] for name in shown],
        rows=rows,
    )


def trade_off_part(typed: Typed, fitting: int | None) -> Part:
    """Return the part about batch size against time and samples, with its figure."""
    asked = Asked(
        heading=TRADE_OFF,
        command="scale",
        typed=typed,
        options={**SPEED_OPTIONS, "max_micro": "max_micro"},
        needed=("alpha_s", "beta_s", "b_crit"),
        set_by_page=_micro(typed, fitting),
    )
    if (unready := asked.unready()) is not None:
        return unready
    try:
        found = _trade_off(asked.values)
    except BSSearchError as error:
        return asked.refused(error)
    batch = found.fastest.row.batch
    figure = DrawnFigure(
        name="trade-off",
        title="Time and samples to the target against batch size",
        text="Both over the least of all; the dotted line is B_crit.",
        figure=trade_off_figure(found, asked.values.get("max_micro")),
    )
    return TRADE_OFF.part(
        sentence=_best(found, asked.values.get("max_micro")),
        tables=[_points(found)],
        figures=[figure],
        command=f"{asked.line} --devices 1 --batch {batch}" if asked.line else "",
    )


def _trade_off(given: dict[str, Any]) -> TradeOff:
    max_micro = given.pop("max_micro", None)
    hardware = Hardware(alpha_s=given["alpha_s"], beta_s=given["beta_s"])
    b_crit = Interval(estimate=given["b_crit"], low=given.get("b_crit_low"), high=given.get("b_crit_high"))
    return plan_trade_off(hardware, b_crit, max_micro=max_micro)


def _best(found: TradeOff, max_micro: int | None) -> str:
    fastest = found.fastest.row
    said = f"The least time has a batch of about {fastest.batch:,}"
    if fastest.accumulation_steps > 1:
        said += f", in {fastest.accumulation_steps} micro-batches of {fastest.micro_batch:,}"
    if found.optimum:
        said += f". Where all samples run at once it is √(B_crit·α/β) = {in_words(found.optimum)}"
    said += "."
    return said if max_micro is None else f"{said} Up to {max_micro:,} samples run at once."


def _points(found: TradeOff) -> Table:
    rows = []
    for point in found.points:
        key = "rows.0." if point is found.fastest else ""
        rows.append(
            Row(
                cells=[
                    Cell.of(key and f"{key}batch", point.row.batch),
                    Cell.of(key and f"{key}micro_batch", point.row.micro_batch),
                    Cell.of(key and f"{key}accumulation_steps", point.row.accumulation_steps),
                    Cell.of(key and f"{key}step_s", point.row.step_s),
                    Cell.of("", point.relative_time),
                    Cell.of("", point.relative_samples),
                ],
                marked=point is found.fastest,
            )
        )
    headings = ["batch", "micro-batch", "accumulation", "step, s", "time, relative", "samples, relative"]
    caption = "The same as numbers; the command prints the row in bold"
    return Table(caption=caption, headings=headings, rows=rows, folded=True)
