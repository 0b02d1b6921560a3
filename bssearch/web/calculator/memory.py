"""The part about memory: `bssearch plan memory`, of numbers alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import takewhile

from bssearch.commands.plan.memory import plan_memory
from bssearch.errors import BSSearchError
from bssearch.planning.memory.plan import MemoryPlan
from bssearch.web.calculator.asking import Asked
from bssearch.web.calculator.memory_figure import memory_figure
from bssearch.web.calculator.parts import Cell, DrawnFigure, Heading, Part, Row, Table, Tile
from bssearch.web.calculator.typed import Typed

MIB, GIB = 2**20, 2**30

HEADING = Heading(
    name="memory",
    title="Memory",
    text="What a training step needs on each device, and how many samples fit at once. It is what fits, not what is "
    "best, and it is predicted: “bssearch probe memory” measures it.",
)

OPTIONS = {
    name: name
    for name in (
        "parameters",
        "memory_gib",
        "device",
        "precision",
        "mixed",
        "optimizer",
        "checkpointing",
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "sequence",
        "vocabulary",
        "intermediate",
        "mlp",
        "fused_attention",
        "dropout",
        "stage",
        "devices",
        "micro_batch",
    )
}

WHEN = {"always": "always", "forward_backward": "forward and backward", "update": "update"}

LARGEST_DRAWN = 2**30
"""The largest micro-batch that is drawn: a choice."""


def memory_part(typed: Typed) -> tuple[Part, MemoryPlan | None]:
    """Return the part with its plan, None where it was refused."""
    asked = Asked(
        heading=HEADING,
        command="memory",
        typed=typed,
        options=OPTIONS,
        needed=("parameters",),
        fixed=("--table",),
    )
    if (unready := asked.unready()) is not None:
        return unready, None
    try:
        plan = plan_memory(**asked.values, table=True)
        figures = list(_figures(asked, plan))
    except BSSearchError as error:
        return asked.refused(error), None
    part = HEADING.part(
        tiles=list(_tiles(plan)),
        tables=[_terms(plan), _choices(plan)],
        figures=figures,
        notes=[asked.in_page_words(note) for note in plan.notes],
        command=asked.line,
    )
    return part, plan


def _tiles(plan: MemoryPlan) -> Iterator[Tile]:
    if plan.largest_micro_batch is not None:
        yield Tile("Safe micro-batch", Cell.of("safe_micro_batch", plan.safe_micro_batch), "leaves 20 % free")
        yield Tile(
            "Largest micro-batch", Cell.of("largest_micro_batch", plan.largest_micro_batch), "leaves nothing free"
        )
    yield Tile("Stays, whatever the batch", _gib("fixed_bytes", plan.fixed_bytes), f"{plan.parameters:,} parameters")
    if plan.activation_bytes_per_sample is not None:
        yield Tile("Each sample adds", _mib("activation_bytes_per_sample", plan.activation_bytes_per_sample))
    if plan.peak_bytes is not None:
        where = "" if plan.memory_bytes is None else f" of {_size(plan.memory_bytes, GIB)} GiB"
        yield Tile("Peak of a step", _gib("peak_bytes", plan.peak_bytes), f"at micro-batch {plan.micro_batch}{where}")
    if plan.activation_bytes_per_sample is None:
        yield Tile("Micro-batches that fit", Cell("not known"), "fill in the transformer's dimensions")
    elif plan.memory_bytes is None:
        yield Tile("Micro-batches that fit", Cell("not known"), "fill in the memory, or name a device")


def _terms(plan: MemoryPlan) -> Table:
    rows = [
        Row(
            cells=[
                Cell(term.term.replace("_", " ")),
                _gib(f"terms.{at}.bytes", term.bytes, unit=""),
                _mib(f"terms.{at}.bytes_per_sample", term.bytes_per_sample, unit=""),
                Cell(WHEN[term.when]),
                Cell(term.meaning),
            ]
        )
        for at, term in enumerate(plan.terms)
    ]
    return Table(caption="Term by term", headings=["term", "GiB", "MiB a sample", "lives", "what it is"], rows=rows)


def _choices(plan: MemoryPlan) -> Table:
    own = asdict(plan)
    same = ("precision", "mixed", "optimizer", "checkpointing")
    rows = [
        Row(
            cells=[
                Cell(choice.precision),
                Cell.of(f"table.{at}.mixed", choice.mixed),
                Cell(choice.optimizer),
                Cell("yes" if choice.checkpointing else "no"),
                _gib(f"table.{at}.fixed_bytes", choice.fixed_bytes, unit=""),
                _mib(f"table.{at}.activation_bytes_per_sample", choice.activation_bytes_per_sample, unit=""),
                Cell.of(f"table.{at}.largest_micro_batch", choice.largest_micro_batch),
                Cell.of(f"table.{at}.safe_micro_batch", choice.safe_micro_batch),
            ],
            marked=all(getattr(choice, name) == own[name] for name in same),
        )
        for at, choice in enumerate(plan.table)
    ]
    headings = ["precision", "mixed", "optimizer", "checkpointing", "GiB fixed", "MiB a sample", "largest", "safe"]
    return Table(caption="Other precisions, optimizers and checkpointing", headings=headings, rows=rows, folded=True)


def _figures(asked: Asked, plan: MemoryPlan) -> Iterator[DrawnFigure]:
    """Yield the figure of memory against the micro-batch, from a plan at each of them."""
    if plan.activation_bytes_per_sample is None:
        return
    around = plan.largest_micro_batch or plan.micro_batch or 16
    sizes = [*takewhile(lambda size: size <= min(4 * around, LARGEST_DRAWN), (2**power for power in range(64)))]
    peaks = [plan_memory(**{**asked.values, "micro_batch": size}).peak_bytes or 0 for size in sizes]
    yield DrawnFigure(
        name="memory",
        title="Memory against the micro-batch",
        text="Predicted. Where the peak crosses the dotted line the device's memory ends.",
        figure=memory_figure(plan, sizes, peaks),
    )


def _size(value: float, unit: int) -> str:
    return f"{value / unit:.4g}"


def _gib(key: str, value: int, unit: str = " GiB") -> Cell:
    return Cell.of(key, value, f"{_size(value, GIB)}{unit}")


def _mib(key: str, value: int | None, unit: str = " MiB") -> Cell:
    return Cell.of(key, value, None if value is None else f"{_size(value, MIB)}{unit}")


def fitting_micro_batch(plan: MemoryPlan | None) -> int | None:
    """Return the safe micro-batch, else the largest that fits; 0 where nothing fits, None where it is not known."""
    if plan is None or plan.safe_micro_batch is None:
        return None
    return plan.safe_micro_batch or plan.largest_micro_batch
