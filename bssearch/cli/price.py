"""``bssearch price``: a finished study for another device, from its step times alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bssearch.cli.answer import print_found
from bssearch.cli.arguments import DatabaseOption, store_to_read
from bssearch.cli.output import Format, FormatOption


def price(
    study: Annotated[str, typer.Argument(help="The study's name.")],
    step_times: Annotated[
        Path,
        typer.Option(help="CSV with batch_size and step_seconds, or what `probe step-time --format json` printed."),
    ],
    device: Annotated[str | None, typer.Option(help="The other device's name; default: the file's.")] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Predict the optimal batch size on another device: the study's steps × that device's step times."""
    from bssearch.commands.predict import predict

    with store_to_read(db) as store:
        print_found(predict(store, study, step_times, device), form)
