"""The ``bssearch`` command, with ``guide`` and ``schema``."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from bssearch.cli import db, end_interrupted, queue, registered, report, run, study, trial
from bssearch.cli.output import console, print_json, write
from bssearch.errors import NotFoundError, problem_in_words, require
from bssearch.records.text import without_passwords

GUIDE = Path(__file__).resolve().parents[1] / "guide"


def guide(
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="Topic to print; omit TOPIC to list the topics.")
    ] = None,
    form: Annotated[
        Literal["page", "text"],
        typer.Option("--format", "-f", help="page: formatted for a terminal; text: plain Markdown."),
    ] = "page",
) -> None:
    """Print a topic of the guide, or list the topics."""
    text = contents() if topic is None else topic_file(topic).read_text(encoding="utf-8")
    screen = console()
    if form == "page" and screen.is_terminal:
        from rich.markdown import Markdown

        screen.print(Markdown(text))
    else:
        write(text)


def topics() -> dict[str, Path]:
    return {path.stem: path for path in sorted(GUIDE.glob("*.md"))}


def topic_file(topic: str) -> Path:
    from difflib import get_close_matches

    there = topics()
    if topic not in there:
        near = [f"`bssearch guide {one}`" for one in get_close_matches(topic, there) or there]
        raise NotFoundError(f"the guide has no topic {topic!r}", hint=f"run {' or '.join(near)}")
    return there[topic]


def contents() -> str:
    lines = [f"- `bssearch guide {name}`: {_first_paragraph(path)}" for name, path in topics().items()]
    return "\n".join(["# The guide", "", *lines, ""])


def _first_paragraph(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").split("\n\n")[1].split())


def schema(
    of: Annotated[
        Literal["spec", "best"], typer.Argument(metavar="spec|best", help="spec: a study file; best: an answer.")
    ],
) -> None:
    """Print the JSON Schema of a study file or of an answer."""
    if of == "spec":
        from bssearch.spec.reader import file_schema

        print_json(file_schema())
    else:
        from bssearch.analysis.answer import Answer

        print_json(Answer.model_json_schema(mode="serialization"))


# Typer's base class of usage errors, which has no public name.
_ClickError: Any = typer.BadParameter.__mro__[2]

WELCOME = """\
bssearch finds the batch size that reaches your target soonest.

  bssearch run digits       search a shipped study in minutes on a CPU
  bssearch init my-task     create your own study from a template
  bssearch best             print the best batch size found

All commands: bssearch --help. Guide: bssearch guide."""

# The commands by heading of ``--help``.
PANELS: dict[str, dict[str, Any]] = {
    "Start": {
        "init": run.init,
        "check": run.check,
        "run": run.run,
        "best": report.best,
        "report": report.report,
        "serve": report.serve,
    },
    "Studies": {"study": study.app},
    "Trials": {"trial": trial.app},
    "Measure": {"probe": registered.probes, "plan": registered.plans},
    "Share": {"import": registered.importers, "export": registered.export, "queue": queue.app, "db": db.app},
    "Help": {"guide": guide, "schema": schema},
}


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [name for commands in PANELS.values() for name in commands]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # Typer would exit silently
            end_interrupted()
        except _ClickError as error:
            message = error.message.replace("Value error, ", "")
            if hasattr(error.__cause__, "errors"):  # pydantic's messages have no value
                problem = error.__cause__.errors()[0]
                words = problem_in_words(problem)
                message = f"{problem['input']!r:.60} {words}" if words.startswith("must ") else message
            error.message = without_passwords(message)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # Refuse repeated options, because Typer would take the last value.
        name, command, rest = super().resolve_command(ctx, args)
        _refuse_words(ctx, command, list(rest))
        return name, command, rest


def _refuse_words(ctx: Any, command: Any, words: list[str]) -> None:
    if isinstance(command, TyperGroup):
        if not words or words[0].startswith("-"):
            return
        inner = command.get_command(ctx, words[0])
        known = ", ".join(command.list_commands(ctx))
        require(inner is not None, f"unknown command {words[0]!r}; choose from {known}")
        _refuse_words(ctx, inner, words[1:])
        return
    try:
        _, _, given = command.make_parser(type(ctx)(command, parent=ctx)).parse_args(args=words)
    except _ClickError:
        return  # the command itself reports the error
    for option in given:
        takes_one = option.param_type_name == "option" and not (option.multiple or option.is_flag or option.count)
        times = given.count(option)
        require(not takes_one or times == 1, f"{option.opts[0]} takes one value, not {times}; give the option once")


app = typer.Typer(
    name="bssearch",
    cls=_Commands,
    help="Find the batch size that reaches your target soonest. Try `bssearch run digits`.",
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done · 1 unexpected · 2 usage or invalid spec · 3 not found · 4 database · "
    "5 no trial reached the target · 6 device, memory or launch · 130 interrupted",
)
for panel, commands in PANELS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(command)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"bssearch {version('bssearch')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(WELCOME)
