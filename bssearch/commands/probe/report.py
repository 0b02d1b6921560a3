"""What a probe hands to whoever prints it, and what a probe is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bssearch.commands.launch import Launch
from bssearch.spec import StudySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """A probe's figures: a JSON document and rows for programs, a table with ``columns`` and sentences for people."""

    document: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    table: Sequence[Mapping[str, Any]] = ()
    columns: Sequence[str] = ()
    sentences: Sequence[str] = ()


class Probe(Protocol):
    """Measures something of a spec's study and stores it: a function, registered in `bssearch.registry`.

    Its docstring is its help. Its further parameters, keyword-only and annotated with `bssearch.registry.Option`, are
    its options on the command line.
    """

    def __call__(self, spec: StudySpec, launch: Launch) -> ProbeReport:
        """Open the study, measure, store, and return the figures."""
