"""Trade-offs between batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bssearch.analysis.answer import Answer, Batch, FrontPoint
from bssearch.analysis.optimum import Candidate
from bssearch.analysis.shape import Notice
from bssearch.records import MemoryBasis
from bssearch.records.intervals import FLAT_RATIO
from bssearch.records.text import memory, noise_scale, number

NOTHING = "–"


def front(batches: Sequence[Batch], price_per_device_hour: float | None, *, confirmed: bool) -> list[FrontPoint]:
    """Time and cost of every batch size that reached the target; ``confirmed``: compares only confirmed ones."""

    def cost(row: Batch) -> float:
        assert row.time_to_target_s is not None and row.samples_to_target is not None, "it has reached"
        if price_per_device_hour is None:
            return row.samples_to_target
        return row.time_to_target_s.median * price_per_device_hour / 3600

    found = [
        (row.batch_size, row.time_to_target_s.median, cost(row), row.confirmed or not confirmed)
        for row in batches
        if row.time_to_target_s is not None and row.samples_to_target is not None
    ]

    compared = [(time, paid) for _, time, paid, is_compared in found if is_compared]
    return [
        FrontPoint(
            batch_size=size,
            time_to_target_s=time,
            cost=paid,
            on_front=is_compared and not any(t <= time and c <= paid and (t < time or c < paid) for t, c in compared),
        )
        for size, time, paid, is_compared in found
    ]


class _Resource(NamedTuple):
    least: str
    amount: Callable[[Batch], float | None]
    unit: str


# By objective
RESOURCES: Mapping[str, _Resource] = {
    "time_to_target": _Resource(
        "the least time", lambda row: None if row.time_to_target_s is None else row.time_to_target_s.median, " s"
    ),
    "samples_to_target": _Resource("the fewest samples", lambda row: row.samples_to_target, ""),
    "energy_to_target": _Resource("the least energy", lambda row: row.energy_joules, " J"),
}


def about_trade_offs(batches: Sequence[Batch], optimal: Candidate, *, confirmed: bool) -> list[Notice]:
    """Notice of batch sizes that take over 5 % less of another resource."""
    if not optimal.objective.stops_at_target:
        return []
    compared = {row.batch_size: row for row in batches if row.confirmed or not confirmed}
    best = compared.get(optimal.configuration.batch_size)
    if best is None:
        return []
    own = {"cost_to_target": "time_to_target"}.get(optimal.objective.name, optimal.objective.name)
    noun = optimal.objective.noun
    parts = list(_cheaper(best, list(compared.values()), own, noun))
    if not parts:
        return []
    among = " among the confirmed batch sizes," if confirmed else ""
    message = f"batch {best.batch_size} is recommended for its {noun} only:{among} {'; '.join(parts)}"
    return [Notice(code="trade_off", message=message)]


def _cheaper(best: Batch, rows: Sequence[Batch], own: str, noun: str) -> Iterator[str]:
    objective = RESOURCES.get(own)
    for name, resource in RESOURCES.items():
        mine = resource.amount(best)
        known = [(amount, row) for row in rows if (amount := resource.amount(row)) is not None]
        if name == own or mine is None or not known:
            continue
        least, row = min(known, key=lambda one: one[0])
        if mine <= FLAT_RATIO * least or (objective and _takes_less(objective, row, best)):
            continue
        figures = f"{number(least)} against {number(mine)}{resource.unit}"
        yield f"batch {row.batch_size} takes {resource.least}, {figures}{_in_exchange(best, row, own, noun)}"


def _takes_less(resource: _Resource, row: Batch, best: Batch) -> bool:
    others, mine = resource.amount(row), resource.amount(best)
    return others is not None and mine is not None and others < mine


def _in_exchange(best: Batch, row: Batch, own: str, noun: str) -> str:
    resource = RESOURCES.get(own)
    mine, others = (None, None) if resource is None else (resource.amount(best), resource.amount(row))
    if not mine or others is None:
        return ""
    return f", at {number(others / mine)} times the {noun}"


def trade_off_rows(answer: Answer) -> tuple[list[str], list[list[str]]]:
    """Headings and rows, without empty columns; empty if only time and samples are known."""
    rows = _shown(answer)
    known = {
        heading: cells for heading, shown in _columns(answer).items() if any(cells := [shown(row) for row in rows])
    }
    if not known.keys() - {"time", "samples"}:
        return [], []
    lines = zip(*known.values(), strict=True)
    return ["batch", *known], [
        [str(row.batch_size), *(one or NOTHING for one in line)] for row, line in zip(rows, lines, strict=True)
    ]


def _shown(answer: Answer) -> list[Batch]:
    return [row for row in answer.batches if row.best is not None]


def _columns(answer: Answer) -> dict[str, Callable[[Batch], str]]:
    parts = {row.generalisation.part for row in _shown(answer) if row.generalisation is not None}

    def metric(part: str) -> Callable[[Batch], str]:
        return lambda row: (
            row.generalisation.in_words if row.generalisation is not None and row.generalisation.part == part else ""
        )

    return {
        "time": lambda row: "" if row.time_to_target_s is None else f"{number(row.time_to_target_s.median)} s",
        "samples": lambda row: "" if row.samples_to_target is None else number(row.samples_to_target),
        "energy": lambda row: "" if row.energy_joules is None else f"{number(row.energy_joules)} J",
        "peak memory": lambda row: "" if row.peak_memory_bytes is None else memory(row.peak_memory_bytes),
        **{f"{part} {answer.target.metric}": metric(part) for part in sorted(parts)},
        "noise scale": lambda row: (
            ""
            if row.noise_scale is None
            else noise_scale(row.noise_scale.scale, row.noise_scale.low, row.noise_scale.high)
        ),
    }


def about_columns(answer: Answer) -> list[str]:
    """Sentences that explain columns of `trade_off_rows`."""
    rows = _shown(answer)
    bases = {row.peak_memory_basis for row in rows if row.peak_memory_basis is not None}
    parts = {row.generalisation.part for row in rows if row.generalisation is not None}
    on_device = MemoryBasis.DEVICE in bases
    how = " (sampled; a short peak may be missed)" if MemoryBasis.RESIDENT_SAMPLED in bases else ""
    said = [
        (on_device, "Peak memory: the most that tensors occupied on the device."),
        (
            bases and not on_device,
            f"Peak memory: growth of the process’s resident memory over the trial{how}.",
        ),
        (
            "test" in parts,
            "Test metric: at the end of a run, on samples used neither to train nor to stop it; ± is over seeds.",
        ),
        (
            "validation" in parts,
            "Validation metric: the best of a run, on the samples that stop it at the target; ± is over seeds.",
        ),
        (
            any(row.noise_scale is not None for row in rows),
            "Noise scale: of the gradient near the target, in samples, over all trials of the batch size.",
        ),
    ]
    return [sentence for holds, sentence in said if holds]
