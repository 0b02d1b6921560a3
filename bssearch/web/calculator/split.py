"""The part about accumulation: `bssearch plan accumulation`."""

from __future__ import annotations

from bssearch.errors import BSSearchError
from bssearch.planning.accumulation import LARGEST_MICRO, AccumulationPlan, plan_accumulation
from bssearch.web.calculator.asking import Asked
from bssearch.web.calculator.parts import Cell, Heading, Part, Tile
from bssearch.web.calculator.typed import Typed

HEADING = Heading(
    name="accumulation",
    title="The wanted batch, split",
    text="Micro-batch × accumulation steps × devices, exactly.",
)

OPTIONS = {name: name for name in ("batch", "micro", "max_micro", "devices", "batch_norm_layers")}


def split_part(typed: Typed, fitting: int | None) -> Part:
    """Return the part; ``fitting`` is the micro-batch that memory has room for, 0 for none, None where not known."""
    own = "max_micro" in typed.values or "micro" in typed.values
    asked = Asked(
        heading=HEADING,
        command="accumulation",
        typed=typed,
        options=OPTIONS,
        needed=("batch",),
        set_by_page={"max_micro": min(fitting, LARGEST_MICRO)} if fitting and not own else {},
    )
    if (unready := asked.unready()) is not None:
        return unready
    if fitting == 0 and not own:
        return HEADING.part(absent="Not calculated: not even one sample fits into the memory above.")
    try:
        plan = plan_accumulation(**asked.values)
    except BSSearchError as error:
        return asked.refused(error)
    return HEADING.part(
        sentence="" if own or fitting else NOT_KNOWN,
        tiles=_tiles(plan),
        notes=[*(one.message for one in plan.remarks), *(claim.message for claim in plan.claims)],
        command=asked.line,
    )


NOT_KNOWN = "How many samples fit at once is not known here: the share of a device runs as one micro-batch."


def _tiles(plan: AccumulationPlan) -> list[Tile]:
    return [
        Tile("Micro-batch", Cell.of("micro_batch", plan.micro_batch), "samples at once"),
        Tile("Accumulation steps", Cell.of("accumulation_steps", plan.accumulation_steps)),
        Tile("Devices", Cell.of("devices", plan.devices)),
        Tile("Batch", Cell.of("batch", plan.batch), "samples of an optimizer step"),
    ]
