"""What an exporter returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote, as lines for programs, and what there is to say about it, for people."""

    written: Sequence[str]
    notes: Sequence[str] = ()
