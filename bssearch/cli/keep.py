"""The commands that change what is stored: ``enqueue``, ``rename``, ``archive``, ``delete``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from bssearch.cli.arguments import DatabaseOption, NameArgument, existing_store
from bssearch.cli.output import cell
from bssearch.errors import CheckpointError, UsageError
from bssearch.pages.words import plural
from bssearch.records import BATCH_STAGES, ParameterValue


def enqueue(
    study: Annotated[str, typer.Argument(help="Name of the study.")],
    values: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="What differs from the study's default.")
    ] = None,
    db: DatabaseOption = None,
) -> None:
    """Queue a configuration of your own; whoever runs the study next, or now, tries it first, to the full limit."""
    from bssearch.analysis.shape import parameters_of
    from bssearch.commands.enqueue import enqueue as put

    with existing_store(db) as store:
        number, configuration = put(store, study, dict(_parse(value) for value in values or []))
    parameters = ", ".join(f"{name} {cell(value)}" for name, value in parameters_of(configuration).items())
    typer.echo(f"trial {number} of {study} is queued: batch_size {configuration.batch_size}, {parameters}")


def _parse(text: str) -> tuple[str, ParameterValue]:
    from bssearch.spec.reader import parse_value

    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise UsageError(f"{text!r}: it takes the form KEY=VALUE, such as batch_size=64")
    # YAML takes 4000:32 for a number to the base of 60.
    return name, value if name == BATCH_STAGES else parse_value(value, text)


def rename(
    old: Annotated[str, typer.Argument(metavar="OLD", help="The study's name.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The name it gets.")],
    db: DatabaseOption = None,
) -> None:
    """Give a study another name."""
    with existing_store(db) as store:
        store.rename_study(old, new)
    typer.echo(f"study {old} is now {new}; to go on with it, its spec must say name: {new}")


def archive(
    study: NameArgument,
    db: DatabaseOption = None,
    undo: Annotated[bool, typer.Option("--undo", help="Bring it back.")] = False,
) -> None:
    """Put a study away: it is kept, but listed by `studies --all` only, and takes no more trials."""
    with existing_store(db) as store:
        store.archive_study(study, archived=not undo)
    typer.echo(f"study {study} is back" if undo else f"study {study} is archived; --undo brings it back")


def delete(
    study: NameArgument,
    db: DatabaseOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a study for good, with all its trials and observations."""
    from bssearch.pruners.checkpoints import Checkpoints

    with existing_store(db) as store:
        trials, observations = len(store.trials(study)), store.observation_count(study)
        what = f"study {study} with {plural(trials, 'trial')} and {plural(observations, 'observation')}"
        if not yes:
            if not sys.stdin.isatty():
                raise UsageError(
                    f"{what} would be deleted for good; nobody can be asked, as there is no terminal",
                    hint=f"bssearch delete {study} --yes, or bssearch archive {study}",
                )
            typer.echo(f"this deletes {what} from {store.masked_url}, for good")
            if typer.prompt("the study's name, to go on", default="", show_default=False) != study:
                raise UsageError("that is not its name: nothing was deleted")
        waiting = Checkpoints(store.study(study))
        store.delete_study(study)
        try:
            waiting.clear()
        except CheckpointError as error:
            typer.echo(f"what waited of it may be left: {error}", err=True)
    typer.echo(f"deleted {what}")
