"""``bssearch report`` and ``serve``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.arguments import DatabasesOption, StudyArgument, study_to_read
from bssearch.cli.output import Format, FormatOption, print_named
from bssearch.errors import UsageError
from bssearch.files import check_file, check_folder, naming, replacing, write_csv

if TYPE_CHECKING:
    from bssearch.storage.repository import Store

TABLES = ("trials.csv", "batches.csv", "observations.csv")


def _path(text: str) -> Path:
    # An empty path would mean the current folder.
    if not text:
        raise UsageError(
            "the path is empty", hint="--html and --svg take a file, --csv a folder; . is the current folder"
        )
    return Path(text)


def report(
    study: StudyArgument = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", parser=_path, metavar="FILE", help="Write one HTML file that needs no network."),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg", parser=_path, metavar="FILE", help="Write one chart for a README, light or dark as the screen."
        ),
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option(
            "--csv", parser=_path, metavar="FOLDER", help="Write trials.csv, batches.csv and observations.csv."
        ),
    ] = None,
    db: DatabasesOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Write a study as a page, a picture or CSV tables."""
    from bssearch.cli.answer import print_found
    from bssearch.commands.report import picture_of, svg_of
    from bssearch.figures.page import render
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
        written: list[Path] = []
        for target, draw in pictures:
            if target is not None:
                drawn = draw()
                with replacing([target]) as (file,):
                    file.write(drawn)
                written.append(target)
        written += [] if tables is None else _write_tables(store, name, tables)
        if written:
            print_named([{"file": str(path)} for path in written], ["file"], form)
        else:
            print_found(answer(store, name), form)
            typer.echo(f"bssearch report {name} --html report.html shows it with figures", err=True)


def _write_tables(store: Store, name: str, folder: Path) -> list[Path]:
    from bssearch.exchange.exporters.exports import write_observations
    from bssearch.exchange.trial_rows import flat_table, observations_of, trial_table
    from bssearch.search.finding import answer

    found, trials = answer(store, name), store.trials.of(name)
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
        typer.Option(help="Address to listen on (0.0.0.0: all); beyond loopback a token is required."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on (0: any free port).", min=0, max=65535)] = 8765,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another host name of this server; may be repeated.")
    ] = None,
    token: Annotated[
        bool | None,
        typer.Option(
            "--token/--no-token", help="Require a token.", show_default="if other machines can reach the host"
        ),
    ] = None,
) -> None:
    """Show live studies and a calculator in a browser."""
    try:
        from bssearch.web.server import serve as serve_pages
    except ImportError as error:
        raise UsageError(
            f"bssearch serve needs {error.name}, which is not installed", hint="pip install 'bssearch[serve]'"
        ) from None
    serve_pages(
        db,
        host=host,
        port=port,
        names=allow_host or (),
        asks_token=token,
        tell=lambda line: typer.echo(line, err=True),
    )
