"""The commands that keep studies: rename, archive, delete."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from bssearch.cli.arguments import DatabaseOption, NameArgument, existing_store
from bssearch.errors import CheckpointError, UsageError


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
        what = f"study {study} with {_count(trials, 'trial')} and {_count(observations, 'observation')}"
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


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
