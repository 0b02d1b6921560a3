"""The importer interface, and the importer of whole studies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

from bssearch.errors import NotFoundError
from bssearch.registry import Option

if TYPE_CHECKING:
    from bssearch.storage.transfer.finished import FinishedStudy
    from bssearch.storage.transfer.study_copy import Copy


@dataclass(frozen=True, slots=True)
class Studies:
    """Imported studies, and notes."""

    studies: tuple[FinishedStudy, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WholeStudies:
    """Whole studies; ``name`` is for the first if new. ``dry_run`` stores nothing."""

    copies: Sequence[Copy]
    notes: Sequence[str]
    name: str | None
    dry_run: bool


# The option of importers that make studies.
StudyName = Annotated[str | None, Option("Name of the study.", shown_default="the file's")]


class Importer(Protocol):
    """A registered function that makes studies of a file.

    Its docstring is its help, its parameters annotated with `Option` its file and options.
    """

    def __call__(self, file: Path, *, name: str | None = None) -> Studies | WholeStudies:
        """Return studies, to be stored all or none; raise `NotFoundError` or `UsageError`."""


def import_study(
    file: Annotated[
        list[str],
        Option("Files of `bssearch export STUDY --to study`, and databases, which are only read.", metavar="FILE|URL…"),
    ],
    *,
    name: Annotated[
        str | None,
        Option("Name of the first study if it is new here.", shown_default="its own", flag="--as"),
    ] = None,
    studies: Annotated[
        list[str] | None,
        Option("Import only this study; may be repeated.", metavar="NAME", shown_default="all", flag="--study"),
    ] = None,
    dry_run: Annotated[bool, Option("Print the imports without storing them.", flag="--dry-run")] = False,
) -> WholeStudies:
    """Import whole studies, or their new parts if they are stored already.

    Either all are imported or none. Importing the same file again changes nothing. A study that continued in both
    places is refused.
    """
    from bssearch.spec.reader import check_study_name
    from bssearch.storage.transfer.study_file import read_study

    if name is not None:
        check_study_name(name)
    copies: list[Copy] = []
    notes: list[str] = []
    for source in file:
        copies += _of_database(source, studies, notes) if "://" in source else [read_study(Path(source))]
    if studies:
        copies = [copy for copy in copies if copy.name in studies]
        for missing in {*studies} - {copy.name for copy in copies}:
            raise NotFoundError(f"no study {missing!r} in {', '.join(map(_shown, file))}")
    notes += [
        f"study {copy.name} of {copy.source}: skipped {len(copy.running)} running trials; import again after they end"
        for copy in copies
        if copy.running
    ]
    return WholeStudies(copies, notes, name, dry_run)


def _of_database(url: str, names: Collection[str] | None, notes: list[str]) -> list[Copy]:
    from bssearch.storage.connection.urls import parse_url, sqlite_file
    from bssearch.storage.repository import open_store

    file = sqlite_file(parse_url(url))
    if file is not None and not file.exists():
        raise NotFoundError(f"no file {_shown(url)}")
    with open_store(url, write=False) as store:
        there = {one.name: one for one in store.studies.summaries()}
        if names:
            return store.transfer.read([name for name in there if name in names], _shown(url))
        archived = sorted(name for name, one in there.items() if one.archived_at is not None)
        notes += [f"{_shown(url)}: skipped archived study {name}; --study {name} imports it" for name in archived]
        return store.transfer.read(None, _shown(url))


def _shown(source: str) -> str:
    from bssearch.storage.connection.urls import masked, parse_url

    return masked(parse_url(source)) if "://" in source else source
