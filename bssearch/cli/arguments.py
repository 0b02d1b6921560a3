"""Arguments and options shared by commands."""

from __future__ import annotations

import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import typer

from bssearch.commands.launch import HERE, OPTIONS, Launch
from bssearch.errors import UsageError
from bssearch.files import Row, write_csv
from bssearch.records.text import shortened, visible
from bssearch.registry import Option
from bssearch.settings import DATABASE_URL_VARIABLE

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from bssearch.spec import StudySpec
    from bssearch.storage.repository import Store


class Format(StrEnum):
    """How data is printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    JSONL = "jsonl"


FormatOption = Annotated[
    Format, typer.Option("--format", "-f", help="Output format: table for people, the other formats for programs.")
]
Shown = TypeVar("Shown", bound="BaseModel")
# Short headings of columns in tables.
HEADINGS = {
    "number": "#",
    "batch_size": "batch",
    "learning_rate": "lr",
    "train_seconds": "trained s",
    "time_to_target_s": "to target s",
    "steps_to_target": "steps",
    "final_metric": "metric",
}

LONGEST_CELL = 1_000  # characters; longer texts are in the other formats

WIDE = 200  # line width without a terminal, wider than every table


def console(*, stderr: bool = False) -> Console:
    """Return a rich console that prints text literally and respects NO_COLOR."""
    from rich.console import Console

    class QuietOnBrokenPipe(Console):
        def on_broken_pipe(self) -> None:
            if not stderr:
                end_of_pipe()
            # Nobody reads the progress; the study continues.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(visible(one) if isinstance(one, str) else one for one in objects), **options)

    plain = partial(QuietOnBrokenPipe, stderr=stderr, highlight=False, markup=False, emoji=False)
    screen = plain()
    return screen if screen.is_terminal else plain(width=WIDE)


def end_of_pipe() -> NoReturn:
    """Exit quietly when the reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def note(text: str) -> None:
    """Print a one-line note on stderr."""
    typer.echo(f"note: {' '.join(visible(text).split())}", err=True)


def write(text: str) -> None:
    """Write data to stdout."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        end_of_pipe()


def print_rows(rows: Sequence[Row], columns: Sequence[str], form: Format) -> None:
    """Print rows: a table of ``columns``, or all keys for programs."""
    if form is Format.TABLE:
        print_table(rows, columns)
    elif form is Format.JSON:
        print_json(list(rows))
    elif form is Format.JSONL:
        write("".join(json.dumps(row, allow_nan=False, default=str) + "\n" for row in rows))
    else:
        names = list(dict.fromkeys(key for row in rows for key in row)) or list(columns)
        text = io.StringIO()
        write_csv(text, names, rows)
        write(text.getvalue())


def show(
    form: Format,
    for_people: Callable[[], None],
    document: Callable[[], object],
    rows: Callable[[], Sequence[Row]],
    columns: Sequence[str] = (),
) -> None:
    """Print a result as a screen, JSON or rows; ``columns`` head an empty CSV."""
    if form is Format.TABLE:
        for_people()
    elif form is Format.JSON:
        print_json(document())
    else:
        print_rows(rows(), columns, form)


def show_model(
    form: Format,
    found: Shown,
    for_people: Callable[[Shown], None],
    rows: Sequence[BaseModel],
    columns: Sequence[str] = (),
) -> None:
    """Print a model as a screen, JSON or ``rows``."""
    show(
        form,
        lambda: for_people(found),
        lambda: found.model_dump(mode="json"),
        lambda: [row.model_dump(mode="json") for row in rows],
        columns,
    )


def tell(form: Format, sentence: str, **values: object) -> None:
    """Print a command's result: a sentence, or its values for programs."""
    show(form, lambda: typer.echo(sentence), lambda: values, lambda: [values])


def print_named(rows: Sequence[Row], columns: Sequence[str], form: Format) -> None:
    """Print rows: the first column for people, all keys for programs."""
    if form is Format.TABLE:
        write("".join(f"{row[columns[0]]}\n" for row in rows))
    else:
        print_rows(rows, columns, form)


def print_json(value: object) -> None:
    """Print a JSON value, indented."""
    write(json.dumps(value, indent=2, allow_nan=False, default=str) + "\n")


def print_table(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Print rows as a table."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        numeric = all(isinstance(row.get(column), int | float | None) for row in rows)
        table.add_column(
            HEADINGS.get(column, column.replace("_", " ")), justify="right" if numeric else "left", no_wrap=numeric
        )
    for row in rows:
        table.add_row(*(cell(row.get(column)) for column in columns))
    console().print(table)


def duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def cell(value: Any) -> str:
    """Return a value as a table cell."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return visible(shortened(str(value), LONGEST_CELL))


Export = Literal["yaml", "args", "python"]  # formats of an exported configuration


def typed(option: Option, *flags: str, make: Any = typer.Option, shown: bool | str = True) -> Any:
    """Return a Typer option, or argument by ``make``; ``shown`` is the default in its help."""
    listed = f" ({', '.join(option.choices)})" if option.choices and not option.metavar else ""
    return make(
        *(flags or filter(None, [option.flag])),
        help=option.help + listed,
        min=option.min,
        metavar=option.metavar,
        envvar=option.variable,
        show_default=(shown if option.shown_default is None else option.shown_default) or False,
    )


def with_parameters(
    command: Callable[..., None], help_text: str | None, parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """Return a command with the help and parameters for Typer."""
    command.__doc__ = help_text
    command.__annotations__ = {}
    keyword_only = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    command.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return command


def launched(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's ``launch`` by these options of `Launch`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def call(**given: Any) -> None:
            launch = Launch(**{name: given.pop(name) for name in names})
            command(**given, launch=launch)

        signature = inspect.signature(command, eval_str=True)
        *own, last = (one for one in signature.parameters.values() if one.name != "launch")
        return with_parameters(call, command.__doc__, [*own, *launch_options(*names), last])

    return decorate


def launch_options(*names: str) -> list[inspect.Parameter]:
    """Return options of `Launch` as Typer parameters."""
    kinds = {"data_dir": Path | None, "allow_busy": bool, "allow_changed_workload": bool}
    made = {name: typed(OPTIONS[name], f"--{name.replace('_', '-')}") for name in names}
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[kinds.get(name, str | None), option],
            default=getattr(HERE, name),
        )
        for name, option in made.items()
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
SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help="A .yaml or .toml file, or a shipped study's name.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field; may be repeated.")
]
NameArgument = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study.")]
StudyArgument = Annotated[
    str | None, typer.Argument(metavar="STUDY", help="Name of the study (optional if there is only one).")
]
StudyOrNumber = Annotated[
    str,
    typer.Argument(
        metavar="[STUDY] NUMBER", help="Number of the trial, after the study's name if there are several studies."
    ),
]
NumberArgument = Annotated[int | None, typer.Argument(hidden=True)]


def spec_to_run(spec: str, overrides: list[str] | None, launch: Launch) -> tuple[StudySpec, Launch]:
    """Return a spec with overrides, and a launch in its file's folder."""
    from bssearch.spec import find_spec, load_spec

    path = find_spec(spec)
    return load_spec(path, overrides or []), replace(launch, folder=path.resolve().parent)


def store_to_read(db: str | None) -> Store:
    """Open a database for reading."""
    from bssearch.storage.repository import open_store

    return open_store(db, write=False)


def existing_store(db: str | None) -> Store:
    """Open an existing database for writing."""
    from bssearch.storage.repository import check_writable, open_store

    check_writable(db)
    store_to_read(db).close()
    return open_store(db)


def study_to_read(db: Sequence[str] | None, given: str | None) -> AbstractContextManager[tuple[Store, str]]:
    """Give a study's store and name; see `found_study`."""
    from bssearch.commands.across.databases import study_in

    return study_in(db, given)


def study_name(db: str | None, given: str | None) -> str:
    """Return the given study's name, or the only one's; see `found_study`."""
    if given is not None:
        return given
    with study_to_read([db] if db else None, None) as (_, name):
        return name


def study_and_number(first: str, second: int | None) -> tuple[str | None, int]:
    """Parse ``[STUDY] NUMBER``; the study may be None."""
    if second is not None:
        return first, second
    if not first.isdecimal():
        raise UsageError(f"{first!r} is not the number of a trial; give it after the name of its study")
    return None, int(first)


def exclude(option: str, others: Mapping[str, object]) -> None:
    """Raise `UsageError` if another option is given (neither None nor False)."""
    for name in _given(others):
        raise UsageError(f"{option} and {name} exclude each other: leave one out")


def require(option: str, others: Mapping[str, object]) -> None:
    """Raise `UsageError` if options are given that need this one."""
    for name in _given(others):
        raise UsageError(f"{name} needs {option}")


def _given(options: Mapping[str, object]) -> list[str]:
    return [name for name, value in options.items() if value is not None and value is not False]


@contextmanager
def watched(launch: Launch) -> Iterator[Launch]:
    """Show a run on stderr: live on a terminal, else line by line."""
    from bssearch.cli.arguments import console
    from bssearch.commands.display import on_screen

    with on_screen(console(stderr=True)) as listener:
        yield replace(launch, listener=listener)
