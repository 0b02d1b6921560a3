"""One run that was made elsewhere, and its configuration with what is not known of it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bssearch.errors import NotFoundError, UsageError
from bssearch.records import Configuration, ParameterValue, TrialState
from bssearch.space import TRAINING_PARAMETERS
from bssearch.space.domains import LIMITS

LARGEST = 2**31 - 1
"""The largest whole number that every database's integer column holds."""

MOST_BYTES = 2**26
"""Bytes of a file of runs at most: a choice."""


def read_text(path: Path) -> str:
    """Return a file's text; raise `NotFoundError` where it is not there, `UsageError` where it is no UTF-8 text."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"no file {str(path)!r}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path} has more than {MOST_BYTES:,} bytes", hint="import it as several files")
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line} is not UTF-8 text: byte 0x{data[error.start]:02x}") from None


def integer(text: str, label: str, origin: str, *, low: int, high: int = LARGEST) -> int:
    """Return an integer, also one written as ``120.0``; raise `UsageError` where it is none or out of its bounds."""
    value = number(text)
    try:
        found = int(text) if "_" not in text else None
    except ValueError:
        found = int(value) if value.is_integer() else None
    if found is None or not low <= found <= high:
        raise UsageError(f"{label} = {text!r} must be an integer in [{low}, {high}] ({origin})")
    return found


def parameter_value(text: str, label: str, origin: str) -> ParameterValue:
    """Return what a text stands for: a boolean (true, false), a number, or itself; infinities and NaN are refused."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    value = number(text)
    if math.isnan(value) and text.lower().lstrip("+-") != "nan":
        return text
    if not math.isfinite(value):
        raise UsageError(
            f"{label} = {text!r} must be a finite number or a text ({origin})", hint="leave unknown cells empty"
        )
    try:
        return int(text)
    except ValueError:
        return value


def csv_rows(text: str, source: str, *, skipinitialspace: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not blank, with the line on which it begins; raise `UsageError` for what is no CSV."""
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=skipinitialspace, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise UsageError(f"{source}:{line} is not valid CSV: {error}") from None
        if cells is None:
            return
        if cells:
            yield line, cells


def number(text: str) -> float:
    """Return the number that a text is, NaN where it is none; digits grouped by underscores are none."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


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
