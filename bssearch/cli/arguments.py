"""The arguments and options that several commands share, and what the names given there stand for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.errors import NotFoundError, UsageError
from bssearch.settings import DATA_DIR_VARIABLE, DATABASE_URL_VARIABLE

if TYPE_CHECKING:
    from bssearch.storage.repository import Store

DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        envvar=DATABASE_URL_VARIABLE,
        show_default="sqlite:///bssearch.db",
        help="Database of the studies.",
    ),
]
DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="FOLDER",
        envvar=DATA_DIR_VARIABLE,
        show_default=False,
        help="Where the shipped workloads look for their data.",
    ),
]
AllowBusyOption = Annotated[
    bool, typer.Option("--allow-busy", help="Go on although another program computes on the GPU.")
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="FILE.py:NAME",
        show_default="the stored one, where you have run it on this machine",
        help="The code to run.",
    ),
]
SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help="A .yaml or .toml file, or a shipped study's name.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field; may be repeated.")
]
NameArgument = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study.")]
StudyArgument = Annotated[
    str | None, typer.Argument(metavar="[STUDY]", help="Name of the study; may be left out where there is only one.")
]


def workload_folder(spec: Path) -> Path:
    """Return the folder that a spec's workload file is relative to: its own."""
    return spec.resolve().parent


def store_to_read(db: str | None) -> Store:
    """Return the store of a database that is only read."""
    from bssearch.storage.repository import open_store

    return open_store(db, write=False)


def existing_store(db: str | None) -> Store:
    """Return the store to write to; where there is none yet, raise instead of making one."""
    from bssearch.storage.repository import open_store

    store_to_read(db).close()
    return open_store(db)


def study_name(store: Store, given: str | None) -> str:
    """Return the study that is named, or the only one there is. Raises `NotFoundError` and `UsageError`."""
    if given is not None:
        return given
    found = store.studies()
    names: Sequence[str] = [one.name for one in found if one.archived_at is None]
    if not names:
        if found:
            raise NotFoundError("every study of the database is archived", hint="bssearch studies --all lists them")
        raise NotFoundError("the database holds no study yet", hint="bssearch run SPEC makes one")
    if len(names) > 1:
        raise UsageError(f"name the study: {', '.join(names)}")
    return names[0]
