"""Print results as tables, JSON or CSV on stdout."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from bssearch.files import Row, write_csv
from bssearch.records.text import shortened, visible

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console


class Format(StrEnum):
    """Output formats."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    JSONL = "jsonl"


FormatOption = Annotated[
    Format, typer.Option("--format", "-f", help="Output format: table for people, the other formats for programs.")
]
Shown = TypeVar("Shown", bound="BaseModel")
ROOMY = 120  # terminal width from which lists show all columns

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

LONGEST_CELL = 1_000  # most characters of a cell; the other formats have longer texts

LONG_TABLE = 200  # rows; longer tables go without rich, which needs about 0.3 ms for each cell

WIDE = 200  # line width without a terminal, wider than every table


def console(*, stderr: bool = False) -> Console:
    """Return a Rich console that prints text literally and respects NO_COLOR."""
    from rich.console import Console

    class QuietOnBrokenPipe(Console):
        def on_broken_pipe(self) -> None:
            if not stderr:
                end_of_pipe()
            # Without a reader of the progress, the study continues.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(visible(one) if isinstance(one, str) else one for one in objects), **options)

    plain = partial(QuietOnBrokenPipe, stderr=stderr, highlight=False, markup=False, emoji=False)
    screen = plain()
    return screen if screen.is_terminal or "COLUMNS" in os.environ else plain(width=WIDE)


def say(*lines: str) -> None:
    screen = console()
    for line in lines:
        screen.print(line)


def end_of_pipe() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def note(text: str) -> None:
    typer.echo(f"note: {' '.join(visible(text).split())}", err=True)


def write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        end_of_pipe()


def print_rows(rows: Sequence[Row], columns: Sequence[str], form: Format) -> None:
    match form:
        case Format.TABLE if rows:
            print_table(rows, columns)
        case Format.TABLE:
            write("nothing to list\n")
        case Format.JSON:
            print_json(list(rows))
        case Format.JSONL:
            write("".join(json.dumps(row, allow_nan=False, default=str) + "\n" for row in rows))
        case Format.CSV:
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
    """Print a result as text, JSON or rows. ``columns`` is the header of an empty CSV."""
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
    show(
        form,
        lambda: for_people(found),
        lambda: found.model_dump(mode="json"),
        lambda: [row.model_dump(mode="json") for row in rows],
        columns,
    )


def tell(form: Format, sentence: str, **values: object) -> None:
    show(form, lambda: typer.echo(sentence), lambda: values, lambda: [values])


def print_named(rows: Sequence[Row], columns: Sequence[str], form: Format) -> None:
    if form is Format.TABLE:
        write("".join(f"{row[columns[0]]}\n" for row in rows))
    else:
        print_rows(rows, columns, form)


def print_json(value: object) -> None:
    write(json.dumps(value, indent=2, allow_nan=False, default=str) + "\n")


def print_table(rows: Sequence[Row], columns: Sequence[str]) -> None:
    from rich import box
    from rich.table import Table

    numeric = [all(isinstance(row.get(column), int | float | None) for row in rows) for column in columns]
    headings = [HEADINGS.get(column, column.replace("_", " ")) for column in columns]
    cells = [[cell(row.get(column)) for column in columns] for row in rows]
    screen = console()
    if len(rows) > LONG_TABLE and (lines := _one_line_rows([headings, *cells], numeric, screen.width)):
        write("\n" + "".join(f"{line}\n" for line in lines) + "\n")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, is_numeric in zip(headings, numeric, strict=True):
        table.add_column(heading, justify="right" if is_numeric else "left", no_wrap=is_numeric)
    for row_cells in cells:
        table.add_row(*row_cells)
    screen.print(table)


def _one_line_rows(rows: Sequence[Sequence[str]], numeric: Sequence[bool], width: int) -> list[str]:
    from rich.cells import cell_len

    lengths = [[cell_len(text) for text in row] for row in rows]
    widths = [max(column) for column in zip(*lengths, strict=True)]
    if sum(widths) + 2 * len(widths) > width or any("\n" in text for row in rows for text in row):
        return []
    lines = []
    for row, known in zip(rows, lengths, strict=True):
        gaps = [" " * (most - length) for most, length in zip(widths, known, strict=True)]
        texts = [gap + text if right else text + gap for text, gap, right in zip(row, gaps, numeric, strict=True)]
        lines.append(" " + "  ".join(texts).rstrip())
    return [lines[0], " " + "─" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return visible(shortened(str(value), LONGEST_CELL))
