"""The interface and the result of a probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bssearch.commands.launch import Launch
from bssearch.spec import StudySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """A probe's JSON document, rows, table ``columns``, and sentences."""

    document: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    table: Sequence[Mapping[str, Any]] = ()
    columns: Sequence[str] = ()
    sentences: Sequence[str] = ()


class Probe(Protocol):
    """A registered function that measures and stores.

    Its docstring is its help, its keyword-only parameters with `Option` its options.
    """

    def __call__(self, spec: StudySpec, launch: Launch) -> ProbeReport:
        """Measure, store and return the figures."""
