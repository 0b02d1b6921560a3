"""The commands that make pages: ``report``, ``compare`` and ``serve``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.arguments import DatabasesOption, StudyArgument, study_to_read
from bssearch.cli.output import (
    Format,
    FormatOption,
    console,
    print_table,
    show,
)
from bssearch.errors import UsageError
from bssearch.files import check_file, check_folder, naming, replacing
from bssearch.pages.csv_rows import write_csv

if TYPE_CHECKING:
    from bssearch.commands.report import Comparison
    from bssearch.storage.repository import Store

TABLES = ("trials.csv", "batches.csv", "observations.csv")


def _path(text: str) -> Path:
    """Return a path that was given; raise `UsageError` where it is empty, which would stand for the folder at hand."""
    if not text:
        raise UsageError(
            "a path is empty", hint="--html and --svg take a file, --csv a folder; . is the folder at hand"
        )
    return Path(text)


def report(
    study: StudyArgument = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", parser=_path, metavar="FILE", help="Write the page: one file that needs no network."),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg", parser=_path, metavar="FILE", help="Write one picture, for a README: light or dark as the screen."
        ),
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option(
            "--csv", parser=_path, metavar="FOLDER", help="Write trials.csv, batches.csv and observations.csv."
        ),
    ] = None,
    db: DatabasesOption = None,
) -> None:
    """Show a study as a whole: a page with its figures and tables, one picture, or all its rows as CSV."""
    from bssearch.cli.answer import print_answer
    from bssearch.commands.report import picture_of, svg_of
    from bssearch.pages.page import render
    from bssearch.search.finding import answer

    for path in filter(None, (html, svg)):
        check_file(path)
    if tables is not None:
        check_folder(tables, TABLES)
    with study_to_read(db, study) as (store, name):
        pictures: list[tuple[Path | None, Callable[[], str]]] = [
            (html, lambda: render(picture_of(store, name))),
            (svg, lambda: svg_of(store, name)),
        ]
        for target, draw in pictures:
            if target is not None:
                drawn = draw()
                with replacing([target]) as (file,):
                    file.write(drawn)
                typer.echo(target)
        for path in [] if tables is None else _write_tables(store, name, tables):
            typer.echo(path)
        if html is None and svg is None and tables is None:
            print_answer(answer(store, name))
            typer.echo(f"bssearch report {name} --html report.html shows it with figures", err=True)


def compare(
    studies: Annotated[
        list[str], typer.Argument(metavar="STUDY STUDY…", help="The studies, the one to compare with first.")
    ],
    db: DatabasesOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show studies side by side, of one task on several devices, models or precisions."""
    from bssearch.commands import report as reporting
    from bssearch.commands.across.databases import found_study, open_databases

    if len(studies) < 2:
        raise UsageError(f"compare takes two studies or more, not only {studies[0]!r}")
    with open_databases(db) as stores:
        found = reporting.compare([found_study(stores, name) for name in studies])
    document = [one.model_dump(mode="json") for one in found]
    rows = [{**one, "warnings": [warning["code"] for warning in one["warnings"]]} for one in document]
    show(form, lambda: _print_comparison(found), lambda: document, lambda: rows)


def _print_comparison(found: Sequence[Comparison]) -> None:
    """Print studies side by side for people, with the caveats of each, and to stderr why one has no answer."""
    from bssearch.commands.report import COMPARED, compared_row

    several = len({one.database for one in found}) > 1
    rows = [{**compared_row(one), "database": one.database} for one in found]
    print_table(rows, [COMPARED[0], "database", *COMPARED[1:]] if several else COMPARED)
    for one in found:
        for warning in one.warnings:
            console().print(f"note on {one.study}: {warning.message}")
    for one in found:
        if one.optimal_batch_size is None:
            typer.echo(f"{one.study}: {one.note}", err=True)


def _write_tables(store: Store, name: str, folder: Path) -> list[Path]:
    """Write a study's trials, batch sizes and observations, or none of them."""
    from bssearch.commands.report import observations_of
    from bssearch.commands.transfer.exports import write_observations
    from bssearch.commands.trials import flat_table, trial_table
    from bssearch.search.finding import answer

    found, trials = answer(store, name), store.trials(name)
    made = not folder.exists()
    paths = [folder / table for table in TABLES]
    try:
        with naming(folder):
            folder.mkdir(exist_ok=True)
        with replacing(paths) as files:
            with naming(paths[0]):
                write_csv(files[0], *trial_table(trials))
            with naming(paths[1]):
                write_csv(files[1], *flat_table([row.model_dump(mode="json") for row in found.batches]))
            with naming(paths[2]):
                write_observations(files[2], observations_of(store, name, trials))
    except BaseException:
        if made:
            with suppress(OSError):
                folder.rmdir()
        raise
    return paths


def serve(
    db: DatabasesOption = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on, 0.0.0.0 for all; others than loopback ask for a token."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.", min=0, max=65535)] = 8765,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A further name that it is reached by; may be repeated.")
    ] = None,
    token: Annotated[
        bool | None,
        typer.Option("--token/--no-token", help="Ask for a token.", show_default="where other machines reach the host"),
    ] = None,
) -> None:
    """Serve pages to look at: the studies of databases, live while they run, and a calculator. Read-only."""
    from bssearch.web.server import serve as serve_pages

    serve_pages(
        db,
        host=host,
        port=port,
        names=allow_host or (),
        asks_token=token,
        tell=lambda line: typer.echo(line, err=True),
    )
