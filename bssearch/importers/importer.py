"""What an importer is, and what it makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

from bssearch.options import Option

if TYPE_CHECKING:
    from bssearch.storage.transfer.finished import FinishedStudy
    from bssearch.storage.transfer.study_copy import Copy


@dataclass(frozen=True, slots=True)
class Studies:
    """The studies that runs make, and what a reader of them must know, each a sentence."""

    studies: tuple[FinishedStudy, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WholeStudies:
    """Whole studies that bssearch stored elsewhere; ``name`` is for the first if it is new here.

    ``notes`` are sentences for the reader. With ``dry_run`` nothing is to be stored.
    """

    copies: Sequence[Copy]
    notes: Sequence[str]
    name: str | None
    dry_run: bool


StudyName = Annotated[str | None, Option("Name of the study.", shown_default="the file's")]
"""The option of every importer that makes studies."""


class Importer(Protocol):
    """Makes studies of a file: a function, registered in `bssearch.registry`.

    Its docstring is its help. Its parameters, annotated with `bssearch.options.Option`, are its argument, the file, and
    its options on the command line. Only the importer of whole studies takes several files.
    """

    def __call__(self, file: Path, *, name: str | None = None) -> Studies | WholeStudies:
        """Return the studies of a file, to be stored all or none. Raises `NotFoundError` and `UsageError`."""
