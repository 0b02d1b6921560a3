"""The ``bssearch`` command. Commands import what they need when they run, so that ``--help`` is quick."""

from __future__ import annotations

import atexit
import gc
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bssearch.cli import (
    check,
    db,
    end_interrupted,
    guide,
    init,
    keep,
    plan,
    query,
    queue,
    registered,
    report,
    run,
)
from bssearch.cli.output import end_of_pipe
from bssearch.cli.transfer import export
from bssearch.errors import BSSearchError, UsageError
from bssearch.pages.words import visible, without_passwords

_ClickError: Any = typer.BadParameter.__mro__[2]
"""What Typer raises for words that it does not understand; it has no public name for it."""

COLLECT_AFTER = 200_000
"""New objects after which garbage is looked for: a choice. Imports make as many, nearly all to stay, and to go through
these every 700, as Python would, takes a fifth of the CPU seconds of a short command."""


class _Commands(TyperGroup):
    """All commands; what Typer says and does of its own accord is put right here."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Ctrl-C ends it with a line; a wrong option is told without pydantic's prefix and passwords."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # Typer would exit without a word
            end_interrupted()
        except _ClickError as error:
            error.message = without_passwords(error.message.replace("Value error, ", ""))
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is meant; of an option that is given twice Typer would take the last in silence."""
        name, command, rest = super().resolve_command(ctx, args)
        _refuse_repeated(ctx, command, list(rest))
        return name, command, rest


def _refuse_repeated(ctx: Any, command: Any, words: list[str]) -> None:
    """Raise `UsageError` for an option that is given twice and has one value."""
    if isinstance(command, TyperGroup):
        inner = command.get_command(ctx, words[0]) if words else None
        if inner is not None:
            _refuse_repeated(ctx, inner, words[1:])
        return
    try:
        _, _, given = command.make_parser(type(ctx)(command, parent=ctx)).parse_args(args=words)
    except _ClickError:
        return  # told by the command itself
    for option in given:
        takes_one = option.param_type_name == "option" and not (option.multiple or option.is_flag or option.count)
        if takes_one and given.count(option) > 1:
            raise UsageError(f"{option.opts[0]} is given {given.count(option)} times, and has one value")


app = typer.Typer(
    name="bssearch",
    cls=_Commands,
    help="Find the batch size that reaches your target soonest: optimal, not maximal.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done · 1 unexpected · 2 usage or invalid spec · 3 not found · 4 database · "
    "5 no trial reached the target · 6 device, memory or launch · 130 interrupted",
)
app.command("init")(init.init)
app.command("check")(check.check)
app.command("target")(check.target)
app.command("quick")(check.quick)
app.command("track-record")(query.track_record)
app.command("run")(run.run)
app.command("confirm")(run.confirm)
app.command("enqueue")(keep.enqueue)
app.command("submit")(queue.submit)
app.command("queue")(queue.queue)
app.command("cancel")(queue.cancel)
app.command("pause")(queue.pause)
app.command("resume")(queue.resume)
app.command("worker")(queue.worker)
app.command("status")(query.status)
app.command("studies")(query.studies)
app.command("trials")(query.trials)
app.command("trial")(query.trial)
app.command("rerun")(run.rerun)
app.command("best")(query.best)
app.command("report")(report.report)
app.command("compare")(report.compare)
app.command("serve")(report.serve)
app.command("price")(query.price)
app.command("audit")(run.audit)
app.command("export")(export.export)
app.command("rename")(keep.rename)
app.command("archive")(keep.archive)
app.command("delete")(keep.delete)
app.command("schema")(query.schema)
app.command("guide")(guide.guide)
app.add_typer(registered.probes, name="probe")
app.add_typer(registered.importers, name="import")
app.add_typer(plan.app, name="plan")
app.add_typer(db.app, name="db")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"bssearch {version('bssearch')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; errors that bssearch raises on purpose become a message and their exit code."""
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    atexit.register(gc.freeze)  # the end of the process need not go through them either
    try:
        app()
    except BSSearchError as error:
        sys.stderr.write(without_passwords(visible(f"error: {error}\n")))
        if error.hint:
            sys.stderr.write(without_passwords(f"hint: {visible(error.hint)}\n"))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        end_interrupted()
    except BrokenPipeError:
        end_of_pipe()


if __name__ == "__main__":
    main()
