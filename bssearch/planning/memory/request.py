"""What a plan of memory is asked for, checked: numbers that are positive, names that are known, flags that agree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

from bssearch.errors import UsageError
from bssearch.planning.claims import BY_CODE
from bssearch.planning.given import shown
from bssearch.planning.memory.devices import Device, device_named
from bssearch.planning.memory.parameters import STATES, Format, Sharding, format_of
from bssearch.planning.memory.plan import GIB, Memory
from bssearch.planning.memory.transformer import Transformer

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}

ARCHITECTURE = ("layers", "hidden", "heads", "sequence")
"""What makes a transformer: all of it or none."""

BESIDE_ARCHITECTURE = ("vocabulary", "kv_heads", "intermediate", "mlp", "fused_attention", "dropout")

MOST_DEVICES = 10**6
LARGEST = 10**18
"""The most of anything that is counted here: far above what there is, and exact in what follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A checked request, but for the model that may be traced."""

    form: Format
    optimizer: str
    sharding: Sharding
    device: Device | None
    memory: Memory
    checkpointing: bool
    micro_batch: int | None
    table: bool

    def in_plan(self) -> dict[str, Any]:
        """Return what a plan repeats of the request."""
        return {
            "precision": self.form.precision,
            "mixed": self.form.mixed_with_fp32,
            "optimizer": self.optimizer,
            "checkpointing": self.checkpointing,
            "stage": self.sharding.stage,
            "devices": self.sharding.devices,
            "device": None if self.device is None else self.device.name,
            "memory_bytes": self.memory.total,
            "headroom_bytes": self.memory.headroom,
        }

    def notes(self) -> Iterator[str]:
        """Yield what the device and the sharding mean for what is asked, and what is often said wrongly of it."""
        yield BY_CODE["gradients_not_of_batch"].message
        if self.memory.total is not None:
            yield BY_CODE["eighty_percent_feasible"].message
        if self.device is not None and self.device.lacks("bf16") and self.form.precision == "bf16":
            yield f"{self.device.name} computes no bf16 (compute capability below 8.0): take fp16."
        if self.device is not None and self.device.lacks("fp8") and self.form.precision == "fp8":
            yield f"{self.device.name} computes no fp8 (compute capability below 8.9): weights are widened to 16 bits."
        if self.sharding.devices > 1 and not self.sharding.stage:
            yield f"Without --stage each of the {self.sharding.devices} devices holds all of it: nothing is sharded."


def parameter_count(given: str | float) -> int:
    """Return a number of parameters: 110000000, 1.1e8, 110M or 7B. Raises `UsageError` for what is none above 0."""
    try:
        match = re.fullmatch(r"\s*([-+]?[\d_.]+(?:e[-+]?\d+)?)\s*([kmbt]?)\s*", str(given).lower())
        value = Decimal(match[1]) * _FACTORS[match[2]] if match else Decimal(float(given))
    except (TypeError, ValueError, ArithmeticError):
        raise UsageError(f"--parameters {shown(given)} must be a number, as 110000000, 1.1e8, 110M or 7B") from None
    if not value.is_finite() or not 0 < value <= LARGEST or value != int(value):
        raise UsageError(f"--parameters {given} must be a whole number from 1 to {LARGEST:.0e}")
    return int(value)


def positive(name: str, value: float | None, most: float = LARGEST) -> None:
    """Raise `UsageError` unless a number is missing, or above 0 and at most ``most``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value <= most):
        raise UsageError(f"{_option(name)} {shown(value)} must be above 0 and at most {most:g}")


def count(name: str, value: int | None, most: float = LARGEST) -> None:
    """Raise `UsageError` unless a number is missing, or whole, above 0 and at most ``most``."""
    positive(name, value, most)
    if value is not None and not isinstance(value, int):
        raise UsageError(f"{_option(name)} {shown(value)} must be above 0 and at most {most:g}, and whole")


def checked(
    *,
    precision: str,
    mixed: str | None,
    default_mixed: str,
    optimizer: str,
    device: str | None,
    memory_gib: float | None,
    checkpointing: bool,
    stage: int | None,
    devices: int | None,
    micro_batch: int | None,
    table: bool,
) -> Asked:
    """Return a request; raise `UsageError` naming the flag, its value and what it must be."""
    if optimizer not in STATES:
        near = get_close_matches(optimizer, STATES, n=4, cutoff=0.5) or list(STATES)
        raise UsageError(f"--optimizer {optimizer!r} is not known; there are {', '.join(near)}")
    positive("memory_gib", memory_gib, 1e9)
    count("micro_batch", micro_batch)
    found = None if device is None else device_named(device)
    memory_bytes = None if memory_gib is None else round(memory_gib * GIB)
    if found is not None and found.memory_bytes and memory_bytes and memory_bytes > found.memory_bytes:
        raise UsageError(
            f"--memory-gib {memory_gib:g} contradicts --device {found.name}, which has "
            f"{found.memory_bytes / GIB:.4g} GiB"
        )
    return Asked(
        form=format_of(precision, mixed, default_mixed),
        optimizer=optimizer,
        sharding=_sharding(stage, devices),
        device=found,
        memory=Memory.of(found, memory_bytes),
        checkpointing=checkpointing,
        micro_batch=micro_batch,
        table=table,
    )


def _sharding(stage: int | None, devices: int | None) -> Sharding:
    count("devices", devices, MOST_DEVICES)
    if stage is not None and stage not in (0, 1, 2, 3):
        raise UsageError(f"--stage {shown(stage)} must be 0, 1, 2 or 3")
    if stage and devices is None:
        raise UsageError(f"--stage {stage} needs --devices, the number it shards over")
    return Sharding(stage or 0, devices or 1)


def transformer(given: Mapping[str, Any]) -> Transformer | None:
    """Return the transformer that is described, None where nothing is; raise `UsageError` where a dimension lacks."""
    for name in (*ARCHITECTURE, "vocabulary", "kv_heads", "intermediate"):
        count(name, given.get(name), 10**9)
    there = [name for name in ARCHITECTURE if given.get(name) is not None]
    besides = [name for name in BESIDE_ARCHITECTURE if given.get(name) is not None]
    if not there:
        if besides:
            raise UsageError(f"{_option(besides[0])} needs {', '.join(map(_option, ARCHITECTURE))}")
        return None
    missing = [name for name in ARCHITECTURE if given.get(name) is None]
    if missing:
        raise UsageError(
            f"{_option(there[0])} needs {', '.join(map(_option, missing))} too: a transformer's dimensions"
        )
    return Transformer(**{name: given[name] for name in (*there, *besides)})


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
