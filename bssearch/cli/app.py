"""The ``bssearch`` command. Commands import what they need when they run, so that ``--help`` is quick."""

from __future__ import annotations

import atexit
import gc
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bssearch.cli import (
    audit,
    check,
    confirm,
    db,
    end_interrupted,
    enqueue,
    export,
    guide,
    init,
    keep,
    price,
    query,
    registered,
    report,
    run,
    simulate,
    trials,
)
from bssearch.cli.output import end_of_pipe
from bssearch.errors import BSSearchError
from bssearch.pages.words import visible

COLLECT_AFTER = 200_000
"""New objects after which garbage is looked for: a choice. Imports make as many, nearly all to stay, and to go through
these every 700, as Python would, takes a fifth of the CPU seconds of a short command."""


class _Commands(TyperGroup):
    """All commands; what Typer says and does of its own accord is put right here."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Ctrl-C ends it with a line, and a wrong option is told without pydantic's prefix."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # Typer would exit without a word
            end_interrupted()
        except typer.BadParameter as error:
            error.message = error.message.replace("Value error, ", "")
            raise


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
app.command("confirm")(confirm.confirm)
app.command("enqueue")(enqueue.enqueue)
app.command("status")(query.status)
app.command("studies")(query.studies)
app.command("trials")(trials.trials)
app.command("trial")(trials.trial)
app.command("best")(query.best)
app.command("report")(report.report)
app.command("compare")(report.compare)
app.command("price")(price.price)
app.command("audit")(audit.audit)
app.command("export")(export.export)
app.command("simulate")(simulate.simulate)
app.command("rename")(keep.rename)
app.command("archive")(keep.archive)
app.command("delete")(keep.delete)
app.command("schema")(query.schema)
app.command("guide")(guide.guide)
app.add_typer(registered.probes, name="probe")
app.add_typer(registered.importers, name="import")
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
        sys.stderr.write(visible(f"error: {error}\n"))
        if error.hint:
            sys.stderr.write(f"hint: {visible(error.hint)}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        end_interrupted()
    except BrokenPipeError:
        end_of_pipe()


if __name__ == "__main__":
    main()
