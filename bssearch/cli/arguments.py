"""Arguments and options shared by commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bssearch.commands.launch import HERE, OPTIONS, Launch
from bssearch.errors import BSSearchError, NotFoundError, UsageError, require, with_hint
from bssearch.registry import Option
from bssearch.settings import DATABASE_URL_VARIABLE

if TYPE_CHECKING:
    from bssearch.spec import StudySpec
    from bssearch.storage.repository import Store


Export = Literal["yaml", "args", "python"]  # formats of an exported configuration


def typed(option: Option, *flags: str, make: Any = typer.Option, shown: bool | str = True) -> Any:
    """Return a Typer option, or an argument if ``make`` is ``typer.Argument``, for an `Option`."""
    return make(
        *(flags or filter(None, [option.flag])),
        help=option.help + (f" ({', '.join(option.choices)})" if option.choices and not option.metavar else ""),
        min=option.min,
        metavar=option.metavar,
        envvar=option.variable,
        show_default=(shown if option.shown_default is None else option.shown_default) or False,
    )


def with_parameters(
    command: Callable[..., None], help_text: str | None, parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    command.__doc__ = help_text
    command.__annotations__ = {}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    )
    return command


def launched(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter ``launch`` with options for the fields ``names`` of `Launch`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def call(**given: Any) -> None:
            launch = Launch(**{name: given.pop(name) for name in names})
            command(**given, launch=launch)

        signature = inspect.signature(command, eval_str=True)
        *own, last = (one for one in signature.parameters.values() if one.name != "launch")
        return with_parameters(call, command.__doc__, [*own, *launch_options(*names), last])

    return decorate


def launch_options(*names: str) -> list[inspect.Parameter]:
    kinds = {"data_dir": Path | None, "allow_busy": bool, "allow_changed_workload": bool, "verbose": bool}
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[kinds.get(name, str | None), typed(OPTIONS[name], f"--{name.replace('_', '-')}")],
            default=getattr(HERE, name),
        )
        for name in names
    ]


DatabaseOption = Annotated[str | None, typed(OPTIONS["db"], "--db")]
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
    typer.Option("--workload", metavar="NAME", help="Filter by workload: name, file or class."),
]
DeviceFilter = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="Filter by part of the device's name.")
]
ObjectiveFilter = Annotated[str | None, typer.Option("--objective", metavar="NAME", help="Filter by objective.")]
PrecisionFilter = Annotated[
    str | None, typer.Option("--precision", metavar="NAME", help="Filter by precision, such as bf16.")
]
SpecArgument = Annotated[
    str, typer.Argument(metavar="SPEC", help="A .yaml or .toml file, or the name of a shipped or stored study.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a spec field; may be repeated."),
]
NameArgument = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study.")]
StudyArgument = Annotated[
    str | None, typer.Argument(metavar="STUDY", help="Name of the study (optional if there is only one study).")
]
StudyOrNumber = Annotated[
    str,
    typer.Argument(
        metavar="[STUDY] NUMBER", help="Number of the trial, after the study's name if there are several studies."
    ),
]
NumberArgument = Annotated[int | None, typer.Argument(hidden=True)]


def spec_to_run(spec: str, overrides: list[str] | None, launch: Launch) -> tuple[StudySpec, Launch]:
    """Return the spec of a file, shipped study or stored study, and ``launch`` with the spec's folder."""
    from bssearch.commands.opening import loaded, stored_spec
    from bssearch.spec import find_spec

    source: Path | dict[str, Any]
    try:
        source = find_spec(spec)
    except (NotFoundError, UsageError):  # a folder may have the study's name
        if not _is_stored(spec, launch.db):
            raise
        stored, launch = stored_spec(
            spec, launch, to_run=True, runs_code=launch.workload is None, connects=True, answered=False
        )
        source = stored.model_dump(mode="json")
    return loaded(source, launch, overrides or [])


def _is_stored(study: str, db: str | None) -> bool:
    try:
        with store_to_read(db) as store:
            store.studies.get(study)
    except BSSearchError as error:
        if db is not None and not isinstance(error, NotFoundError):
            from bssearch.cli.output import note

            note(f"cannot search stored studies: {with_hint(error)}")
        return False
    return True


def store_to_read(db: str | None) -> Store:
    from bssearch.storage.repository import open_store

    return open_store(db, write=False)


def existing_store(db: str | None) -> Store:
    from bssearch.storage.repository import check_writable, open_store

    check_writable(db)
    store_to_read(db).close()
    return open_store(db)


def study_to_read(db: Sequence[str] | None, given: str | None) -> AbstractContextManager[tuple[Store, str]]:
    from bssearch.commands.across.databases import study_in

    return study_in(db, given)


def study_name(db: str | None, given: str | None) -> str:
    if given is not None:
        return given
    with study_to_read([db] if db else None, None) as (_, name):
        return name


def study_and_number(first: str, second: int | None) -> tuple[str | None, int]:
    """Parse ``[STUDY] NUMBER``; the study is None if omitted. Raises `UsageError` for a missing or wrong number."""
    if second is not None:
        return first, second
    require(first.isdecimal(), f"{first!r} is not a trial number; write the study's name, then the number")
    return None, int(first)


def exclude(option: str, others: Mapping[str, object]) -> None:
    for name, value in others.items():
        require(value is None or value is False, f"give either {option} or {name}, not both")


def only_with(option: str, others: Mapping[str, object]) -> None:
    for name, value in others.items():
        require(value is None or value is False, f"{name} needs {option}; add {option} or omit {name}")


@contextmanager
def watched(launch: Launch) -> Iterator[Launch]:
    """Show the progress of a run on stderr, live on a terminal and as lines elsewhere."""
    from bssearch.cli.output import console
    from bssearch.commands.display import on_screen

    with on_screen(console(stderr=True), launch.verbose) as listener:
        yield replace(launch, listener=listener)
