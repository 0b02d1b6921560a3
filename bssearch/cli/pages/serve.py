"""``bssearch serve``: the pages, in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from bssearch.cli.arguments import DatabasesOption


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
