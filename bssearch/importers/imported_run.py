"""One run that was made elsewhere, and its configuration with what is not known of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bssearch.errors import UsageError
from bssearch.importers.cells import integer
from bssearch.records import Configuration, ParameterValue, TrialState
from bssearch.space import TRAINING_PARAMETERS
from bssearch.space.domains import LIMITS

TYPED = ("learning_rate", *TRAINING_PARAMETERS, "optimizer")
"""The parameters for which a configuration has a field that cannot be empty."""

SPLIT = ("micro_batch_size", "accumulation_steps", "world_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run; None is what its table does not say.

    ``steps`` and ``train_seconds`` are those to the target, or all that it ran where it missed the target;
    ``last_miss_step`` is that of the evaluation before the one at which it reached the target; ``missed``
    is how it ended where it did not. Of the configuration, what is not known has a placeholder in its field and None
    under its own name in ``parameters``. ``origin`` says where the run stands, such as ``runs.csv:12``.
    """

    origin: str
    configuration: Configuration
    seed: int | None = None
    reached: bool = True
    missed: TrialState = TrialState.EXHAUSTED
    steps: int | None = None
    last_miss_step: int | None = None
    train_seconds: float | None = None
    final_metric: float | None = None
    device: str | None = None
    precision: str | None = None


@dataclass(frozen=True, slots=True)
class RunTable:
    """The runs of a table in its order, and what a reader of them must know, each a sentence."""

    runs: tuple[Run, ...]
    notes: tuple[str, ...]


def make_configuration(
    batch_size: int, values: Mapping[str, ParameterValue], origin: str, label: Callable[[str], str] = str
) -> Configuration:
    """Return the configuration of a run from its parameters by name, None where a value is not known.

    `TYPED` ones that are not known get a placeholder, and None under their own name in ``parameters``. The split into
    micro-batches is taken where its factors give the batch size. ``label`` names a parameter as its file does. Raises
    `UsageError` for a value outside what its parameter can be.
    """
    given = {name: value for name, value in values.items() if value is not None}
    typed: dict[str, Any] = {"learning_rate": 1.0, **dict.fromkeys(TRAINING_PARAMETERS, 0.0), "optimizer": "unknown"}
    for name in (one for one in TYPED if one in given):
        value = given[name]
        typed[name] = str(value) if name == "optimizer" else _within_limits(name, value, label(name), origin)
    parts = {name: integer(str(given[name]), label(name), origin, low=1) for name in SPLIT if name in given}
    micro_batch_size, accumulation_steps, world_size = _split(batch_size, parts)
    own = {name: value for name, value in values.items() if name not in (*TYPED, *SPLIT, "batch_size")}
    return Configuration(
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        accumulation_steps=accumulation_steps,
        world_size=world_size,
        parameters={**own, **{name: None for name in TYPED if name not in given}},
        **typed,
    )


def _within_limits(name: str, value: ParameterValue, label: str, origin: str) -> float:
    low, high, rule = LIMITS.get(name, (1e-100, 1e100, "must be > 0 (1e-100 to 1e100)"))
    if isinstance(value, str | bool | None) or not (low <= value <= high and math.isfinite(value)):
        number = "" if isinstance(value, int | float) and not isinstance(value, bool) else "a number and "
        raise UsageError(f"{label} = {value!r} {rule.replace('must be ', f'must be {number}')} ({origin})")
    return float(value)


def _split(batch_size: int, parts: Mapping[str, int]) -> tuple[int, int, int]:
    """Return the factors of `SPLIT` of which some are given; where they do not give the batch size, one micro-batch."""
    world, micro = parts.get("world_size", 1), parts.get("micro_batch_size")
    accumulation = parts.get("accumulation_steps", 1 if micro is None else max(1, batch_size // (micro * world)))
    micro = micro or max(1, batch_size // (accumulation * world))
    if micro * accumulation * world != batch_size:
        accumulation, world = 1, world if batch_size % world == 0 else 1
        micro = batch_size // world
    return micro, accumulation, world
