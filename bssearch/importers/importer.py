"""What an importer is, and what it makes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

from bssearch.options import Option

if TYPE_CHECKING:
    from bssearch.storage.imports import FinishedStudy


@dataclass(frozen=True, slots=True)
class Studies:
    """The studies that runs make, and what a reader of them must know, each a sentence."""

    studies: tuple[FinishedStudy, ...]
    notes: tuple[str, ...]


StudyName = Annotated[str | None, Option("Name of the study.", shown_default="the file's")]
"""The option that every importer has."""


class Importer(Protocol):
    """Makes studies of a file: a function, registered in `bssearch.registry`.

    Its docstring is its help. Its parameters, annotated with `bssearch.options.Option`, are its argument, the file, and
    its options on the command line.
    """

    def __call__(self, file: Path, *, name: str | None = None) -> Studies:
        """Return the studies of a file, to be stored all or none. Raises `NotFoundError` and `UsageError`."""
