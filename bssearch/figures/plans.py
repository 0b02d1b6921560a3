"""Plans as key figures, tables and notes."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import itemgetter
from typing import Any

from bssearch.analysis.shape import BeyondPlan, LargerPlan
from bssearch.figures.html import PageContent, Row, Section, Table, Tile, html_page
from bssearch.figures.svg import MUTED, SECOND, Chart, Point, Series, extent, value_axis
from bssearch.planning.learning_rate import LearningRatePlan
from bssearch.planning.memory import MemoryPlan
from bssearch.planning.memory.request import GIB, MIB
from bssearch.planning.scale import AccumulationPlan, ScalePlan
from bssearch.records.text import in_words, number, span

# Units of displayed sizes
UNITS = {
    "fixed_bytes": ("GiB", GIB),
    "peak_bytes": ("GiB", GIB),
    "activation_bytes_per_sample": ("MiB", MIB),
    "bytes": ("GiB", GIB),
    "bytes_per_sample": ("MiB", MIB),
}

TERMS = {"term": "term", "bytes": "GiB", "bytes_per_sample": "MiB a sample", "when": "lives", "meaning": "meaning"}
CHOICE = ("precision", "mixed", "optimizer", "checkpointing")
CHOICES = {
    **{name: name for name in CHOICE},
    "fixed_bytes": "GiB fixed",
    "activation_bytes_per_sample": "MiB a sample",
    "largest_micro_batch": "largest",
    "safe_micro_batch": "safe",
}
MORE_OF_RULE = {
    "weight_decay": "weight decay",
    "beta1": "β₁",
    "beta2": "β₂",
    "epsilon": "ε",
    "ema_decay": "EMA decay",
    "dropout": "dropout",
    "label_smoothing": "label smoothing",
}
DEVICES = {
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


@dataclass(frozen=True, slots=True)
class Cell:
    """A displayed value, with the path in the plan's JSON, such as ``terms.0.bytes``, and the JSON value."""

    shown: Any
    key: str = ""
    value: str = ""
    unit: str = ""

    @property
    def text(self) -> str:
        return f"{in_words(self.shown)}{self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A displayed plan, with a `Cell` for each value."""

    sentence: str = ""
    tiles: Sequence[Tile] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


def cell(document: Any, key: str) -> Cell:
    """Return the cell of a value at the path ``key`` in a plan's JSON."""
    value = reduce(lambda inner, step: inner[step if isinstance(inner, dict) else int(step)], key.split("."), document)
    shown = ("yes" if value else "no") if isinstance(value, bool) else value
    _, size = UNITS.get(key.rpartition(".")[2], ("", 0))
    if isinstance(shown, str) and not key.endswith(".study"):
        shown = shown.replace("_", " ")
    return Cell(value / size if size and value is not None else shown, key, json.dumps(value))


def table(
    document: Any,
    place: str,
    columns: Mapping[str, str],
    *,
    caption: str,
    marked: Callable[[Any], bool] = lambda _: False,
    is_shown: Callable[[Any], bool] = lambda _: True,
    folded: bool = False,
) -> Table:
    """Return a table of the rows at a path in a plan's JSON. The column ``""`` has the rows' names."""
    entries = document[place]
    return Table(
        caption=caption,
        headings=list(columns.values()),
        rows=[
            Row(
                cells=[
                    cell(document, f"{place}.{name}.{column}") if column else Cell(str(name).replace("_", " "))
                    for column in columns
                ],
                marked=marked(entry),
            )
            for name, entry in list(entries.items() if isinstance(entries, dict) else enumerate(entries))
            if is_shown(entry)
        ],
        folded=folded,
    )


def shown_memory(plan: MemoryPlan) -> Shown:
    document = plan.document()
    own = [document[name] for name in CHOICE]
    tiles = {
        "safe_micro_batch": ("Safe micro-batch", "with 20 % free"),
        "largest_micro_batch": ("Largest micro-batch", "without free memory"),
        "fixed_bytes": ("Independent of the batch", f"{plan.parameters:,} parameters"),
        "activation_bytes_per_sample": ("Each sample adds", ""),
        "peak_bytes": ("Peak of a step", f"at micro-batch {plan.micro_batch}"),
    }
    lacking = (
        "give the memory or a device"
        if plan.activation_bytes_per_sample
        else "give a network or a transformer's dimensions"
    )
    return Shown(
        tiles=[
            *([Tile("Micro-batches that fit", Cell("unknown"), lacking)] if plan.largest_micro_batch is None else []),
            *(
                Tile(name, _tile(document, key), note)
                for key, (name, note) in tiles.items()
                if document[key] is not None
            ),
        ],
        tables=[
            table(document, "terms", TERMS, caption="Term by term"),
            *(
                [
                    table(
                        document,
                        "table",
                        CHOICES,
                        caption="Other precisions, optimizers and checkpointing",
                        marked=lambda row: [row[name] for name in CHOICE] == own,
                        folded=True,
                    )
                ]
                if plan.table
                else []
            ),
        ],
        notes=plan.notes,
    )


def _tile(document: Any, key: str) -> Cell:
    found = cell(document, key)
    return replace(found, shown=found.shown or "none", unit=f" {UNITS[key][0]}" if key in UNITS else "")


def shown_split(plan: AccumulationPlan) -> Shown:
    tiles = {
        "micro_batch": ("Micro-batch", "samples per pass"),
        "accumulation_steps": ("Accumulation steps", ""),
        "devices": ("Devices", ""),
        "batch": ("Batch", "samples per optimizer step"),
    }
    return Shown(
        tiles=[Tile(name, cell(plan.document(), key), note) for key, (name, note) in tiles.items()],
        notes=[one.message for one in plan.notes],
    )


def shown_rules(plan: LearningRatePlan) -> Shown:
    document, rules = plan.document(), plan.rules.items()
    more = {name: words for name, words in MORE_OF_RULE.items() if _is_set(name, document["rules"].values())}
    document["audits"] = [{"rule": name, **audit} for name, one in document["rules"].items() for audit in one["audits"]]
    audits = {name: name.replace("_", " ") for name in ("rule", "study", "batch_size", "verdict", "regret")}
    return Shown(
        sentence=f"From batch {plan.from_batch} to {plan.batch}, the ratio κ is {plan.ratio:.4g}; the optimizer is "
        f"{plan.optimizer}.",
        tables=[
            table(
                document,
                "rules",
                {"": "rule", "learning_rate": "learning rate", "warmup_epochs": "warmup epochs", **more},
                caption="By rule; a rule without objections is bold",
                marked=lambda row: not row["caveats"],
            ),
            table(
                document,
                "rules",
                {"": "rule", "holds": "holds", "breaks": "breaks", "source": "source"},
                caption="When each rule holds or breaks",
                folded=True,
            ),
            *([table(document, "audits", audits, caption="Verdicts of audits")] if document["audits"] else []),
        ],
        notes=[
            *(f"{name}: {caveat}" for name, one in rules for caveat in one.caveats),
            *(one.message for one in plan.notes),
        ],
    )


def _is_set(name: str, rules: Iterable[Mapping[str, Any]]) -> bool:
    # True if a rule sets the parameter, also for a β of 0, but not for a dropout of 0
    return any(one[name] is not None if name in ("beta1", "beta2", "epsilon") else one[name] for one in rules)


def shown_scale(plan: ScalePlan) -> Shown:
    document, shown = plan.document(), {row.devices for row in plan.rows_for_people()}
    tiles = {
        "pays_up_to": "Largest number of devices that pay",
        "passes_b_crit": "Fewest devices for a batch above B_crit",
    }
    return Shown(
        tiles=[
            *(
                Tile(title, cell(document, f"{name}.estimate"), _interval(document[name]))
                for name, title in tiles.items()
                if document[name]["estimate"] is not None
            ),
            Tile("Devices with the least time", cell(document, "fastest"), f"of 1 to {plan.devices}"),
        ],
        tables=[
            table(
                document,
                "rows",
                {name: words for name, words in DEVICES.items() if document["rows"][0][name] is not None},
                caption="Times by number of devices; the last number that pays is bold",
                marked=lambda row: bool(row["devices"] == plan.pays_up_to.estimate),
                is_shown=lambda row: row["devices"] in shown,
            )
        ],
        notes=[one.message for one in plan.notes],
    )


def shown_beyond(plan: BeyondPlan) -> Shown:
    document = plan.document()
    at = f"{plan.measured.metric} {in_words(plan.metric.value)}"
    tiles = [
        Tile(
            f"Best batch size at {at}, predicted",
            cell(document, "optimal_batch_size"),
            f"{plan.measured_batch_size} at {plan.measured.in_words}; {span(plan.optimum_interval)} (90 %)",
        ),
        Tile("Within 5 % of the best", Cell(span(plan.flat_range)), ""),
        Tile(
            "Critical batch size",
            cell(document, "b_crit.estimate"),
            f"{_interval(document['b_crit'])}; {in_words(plan.b_crit_measured)} at {plan.measured.in_words}",
        ),
        Tile("Samples", cell(document, "samples.value"), _interval(document["samples"])),
    ]
    if plan.metric.low is not None:
        tiles.append(Tile(plan.measured.metric, cell(document, "metric.value"), _interval(document["metric"])))
    return Shown(
        tiles=tiles,
        tables=[
            table(
                document,
                "batches",
                {
                    "batch_size": "batch",
                    "steps.value": "steps",
                    "time_to_target_s.value": "to target, s",
                    "time_to_target_s.low": "90 % from",
                    "time_to_target_s.high": "to",
                },
                caption="Prediction by batch size; the best size is bold",
                marked=lambda row: bool(row["batch_size"] == plan.optimal_batch_size),
            ),
            table(
                document,
                "levels",
                {"metric": plan.measured.metric, "b_crit": "B_crit", "s_min": "S_min"},
                caption="Measured along the curves",
            ),
        ],
        notes=[one.message for one in plan.notes],
    )


def shown_larger(plan: LargerPlan) -> Shown:
    document = plan.document()
    shown = {
        "learning_rate": "Learning rate",
        **{f"schedule.{name}": name.replace("_", " ").capitalize() for name in plan.schedule},
        "weight_decay": "Weight decay",
        "beta2": "β₂",
        "beta2_half_life_samples": "Half-life of β₂, samples",
        "timescale": "AdamW timescale",
    }
    out, intervals = plan.left_out, {"b_crit": "Critical batch size", "steps": "Steps", "time_s": "Seconds"}
    return Shown(
        tiles=[
            Tile(
                "Batch size, predicted",
                cell(document, "batch_size"),
                "" if plan.flat_range is None else f"{span(plan.flat_range)} within 5 %",
            ),
            *(
                Tile(title, cell(document, f"{name}.value"), _interval(document[name]))
                for name, title in intervals.items()
                if document[name] is not None
            ),
            *(Tile(title, one, "") for name, title in shown.items() if (one := cell(document, name)).shown is not None),
            Tile(
                f"Critical batch size of {out.study}, predicted from the other studies",
                cell(document, "left_out.b_crit.value"),
                f"{_interval(document['left_out']['b_crit'])}; measured {in_words(out.b_crit_measured)}, "
                f"steps predicted / measured {in_words(out.steps_ratio)}",
            ),
            Tile("Critical batch size ∝ samples^p, p", cell(document, "power.value"), _interval(document["power"])),
        ],
        tables=[
            table(
                document,
                "scales",
                {
                    "study": "study",
                    "parameters": "parameters",
                    "samples": "samples",
                    "b_crit": "B_crit",
                    "b_crit_by_law.value": "by the law",
                    "b_crit_by_law.low": "90 % from",
                    "b_crit_by_law.high": "to",
                    "timescale": "AdamW timescale",
                },
                caption="Studies of the law",
            ),
            table(
                document,
                "checks",
                {"samples": "after samples", "b_crit.value": "B_crit", "b_crit.low": "90 % from", "b_crit.high": "to"},
                caption="Critical batch sizes to check during the run",
            ),
        ],
        notes=[one.message for one in plan.notes],
    )


def larger_page(plan: LargerPlan) -> str:
    shown = shown_larger(plan)
    sections = [
        Section(
            name=name,
            title=one.caption,
            text="",
            charts=charts,
            table=replace(one, rows=[Row([cell.text for cell in row.cells], row.marked) for row in one.rows]),
        )
        for name, charts, one in zip(("scales", "checks"), ({"law": _law_chart(plan)}, {}), shown.tables, strict=True)
    ]
    return html_page(
        PageContent(
            title="A run too large to search",
            kicker=" · ".join(one.study for one in plan.scales),
            heading=f"Train with batch {plan.batch_size}, predicted",
            headline=f"The run has {number(plan.parameters)} parameters and {number(plan.samples)} samples.",
            tiles=[replace(one, value=one.value.text) for one in shown.tiles],
            warnings=shown.notes,
            sections=sections,
        )
    )


def _law_chart(plan: LargerPlan) -> Chart:
    predicted = [
        *((one.samples, one.b_crit_by_law) for one in plan.scales),
        *((one.samples, one.b_crit) for one in plan.checks),
        (plan.samples, plan.b_crit),
    ]
    line = [
        Point(at, found.value, low=found.low, high=found.high) for at, found in sorted(predicted, key=itemgetter(0))
    ]
    out, last = plan.left_out.b_crit, plan.scales[-1].samples
    series = [
        Series(name="the law, 90 %", points=line, width=2, symbol="circle", is_hollow=True, colour=MUTED),
        Series(
            name="largest scale, predicted from the other scales",
            points=[Point(last, out.value, low=out.low, high=out.high)],
            symbol="square",
            colour=SECOND,
        ),
        Series(
            name="measured", points=[Point(one.samples, one.b_crit, one.study) for one in plan.scales], symbol="circle"
        ),
        Series(name="this run, predicted", points=[line[-1]], symbol="star"),
    ]
    return Chart(
        x=value_axis("samples", [one.x for one in line], log=True),
        y=value_axis("critical batch size", extent(series), log=True),
        series=series,
    )


def _interval(found: Mapping[str, Any]) -> str:
    low, high = found["low"], found["high"]
    return "" if low is None and high is None else f"[{in_words(low)}, {in_words(high)}]"
