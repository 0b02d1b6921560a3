"""``bssearch enqueue``: one's own configuration as the next trial of a study."""

from __future__ import annotations

from typing import Annotated

import typer

from bssearch.cli.arguments import DatabaseOption, existing_store
from bssearch.cli.output import cell
from bssearch.errors import UsageError
from bssearch.records import ParameterValue


def enqueue(
    study: Annotated[str, typer.Argument(help="Name of the study.")],
    values: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="What differs from the study's default.")
    ] = None,
    db: DatabaseOption = None,
) -> None:
    """Queue a configuration of your own; whoever runs the study next, or now, tries it first, to the full limit."""
    from bssearch.analysis.answer import parameters_of
    from bssearch.commands.enqueue import enqueue as put

    with existing_store(db) as store:
        number, configuration = put(store, study, dict(_parse(value) for value in values or []))
    parameters = ", ".join(f"{name} {cell(value)}" for name, value in parameters_of(configuration).items())
    typer.echo(f"trial {number} of {study} is queued: batch_size {configuration.batch_size}, {parameters}")


def _parse(text: str) -> tuple[str, ParameterValue]:
    from bssearch.records import BATCH_STAGES
    from bssearch.spec.reader import parse_value

    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise UsageError(f"{text!r}: it takes the form KEY=VALUE, such as batch_size=64")
    # YAML takes 4000:32 for a number to the base of 60.
    return name, value if name == BATCH_STAGES else parse_value(value, text)
