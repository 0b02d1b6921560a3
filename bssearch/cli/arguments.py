"""The arguments and options that several commands share, and what the names given there stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bssearch.errors import UsageError
from bssearch.settings import DATA_DIR_VARIABLE, DATABASE_URL_VARIABLE

if TYPE_CHECKING:
    from bssearch.search.listener import Listener
    from bssearch.spec import StudySpec
    from bssearch.storage.repository import Store


Export = Literal["yaml", "args", "python"]
"""What the winner's values are written as."""

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
DatabasesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--db",
        metavar="URL",
        show_default=f"{DATABASE_URL_VARIABLE}, else sqlite:///bssearch.db",
        help="Database of the studies; may be repeated.",
    ),
]
WorkloadFilter = Annotated[
    str | None,
    typer.Option("--workload", metavar="NAME", help="Only studies of this workload: its name, file or class."),
]
DeviceFilter = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="Only studies on a device with this in its name.")
]
ObjectiveFilter = Annotated[str | None, typer.Option("--objective", metavar="NAME", help="Only of this objective.")]
PrecisionFilter = Annotated[
    str | None, typer.Option("--precision", metavar="NAME", help="Only studies run in this precision, such as bf16.")
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
        help="The code to run; a file is looked up from this folder.",
    ),
]
SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help="A .yaml or .toml file, or a shipped study's name.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field; may be repeated.")
]
NameArgument = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study.")]
StudyArgument = Annotated[
    str | None, typer.Argument(metavar="STUDY", help="Name of the study; may be left out if there is only one.")
]
StudyOrNumber = Annotated[
    str, typer.Argument(metavar="[STUDY] NUMBER", help="The trial, after its study unless there is only one.")
]
NumberArgument = Annotated[int | None, typer.Argument(hidden=True)]


def spec_to_run(spec: str, overrides: list[str] | None) -> tuple[StudySpec, Path]:
    """Return a spec with its overridden fields, and the folder that its workload's file is relative to."""
    from bssearch.spec import find_spec, load_spec

    path = find_spec(spec)
    return load_spec(path, overrides or []), path.resolve().parent


def store_to_read(db: str | None) -> Store:
    """Return the store of a database that is only read."""
    from bssearch.storage.repository import open_store

    return open_store(db, write=False)


def existing_store(db: str | None) -> Store:
    """Return the store to write to; where there is none yet, raise instead of making one."""
    from bssearch.storage.repository import check_writable, open_store

    check_writable(db)
    store_to_read(db).close()
    return open_store(db)


def study_to_read(db: Sequence[str] | None, given: str | None) -> AbstractContextManager[tuple[Store, str]]:
    """Give the store of the database that holds a study, and the study's name; see `found_study`."""
    from bssearch.commands.across.databases import study_in

    return study_in(db, given)


def study_name(db: str | None, given: str | None) -> str:
    """Return the name of the study that is given, else of the only study of the database; see `found_study`."""
    if given is not None:
        return given
    with study_to_read([db] if db else None, None) as (_, name):
        return name


def study_and_number(first: str, second: int | None) -> tuple[str | None, int]:
    """Return the study and the trial of ``[STUDY] NUMBER``, None for a study that is left out."""
    if second is not None:
        return first, second
    if not first.isdecimal():
        raise UsageError(f"trial {first!r}: give the number of a trial, after the name of its study")
    return None, int(first)


def exclude(option: str, others: Mapping[str, object]) -> None:
    """Raise `UsageError` if one of the others is given too: a value other than None and False."""
    for name in _given(others):
        raise UsageError(f"{option} and {name} exclude each other: leave one out")


def require(option: str, others: Mapping[str, object]) -> None:
    """Raise `UsageError` if one of the others is given, which mean nothing without the option."""
    for name in _given(others):
        raise UsageError(f"{name} needs {option}")


def _given(options: Mapping[str, object]) -> list[str]:
    return [name for name, value in options.items() if value is not None and value is not False]


def watch() -> AbstractContextManager[Listener]:
    """Show a run on stderr while it goes on: live where that is a terminal."""
    from bssearch.cli.output import console
    from bssearch.commands.display import on_screen

    return on_screen(console(stderr=True))
