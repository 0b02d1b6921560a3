"""``bssearch plan``: a command per request of `bssearch.planning`, imported on use."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import bssearch
from bssearch.cli.arguments import DatabaseOption, typed, with_parameters
from bssearch.cli.output import Format, FormatOption, console, note, print_table, show, write
from bssearch.errors import UsageError

if TYPE_CHECKING:
    from bssearch.figures.plans import Shown
    from bssearch.planning.requests import Plan, Request

SPLIT = ("micro_batch", "accumulation_steps", "devices", "batch")


class _Plans(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(cmd_name)(_command(*COMMANDS[cmd_name]))
        return typer.main.get_command(single)


def _command(request: str, run: Callable[..., None]) -> Callable[..., None]:
    def command(**given: Any) -> None:
        run(**{name: value for name, value in given.items() if value is not None})

    own = inspect.signature(run, eval_str=True).parameters.values()
    options = [*_options(resolve_name(request)), *(one for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD)]
    return with_parameters(command, run.__doc__, options)


def _options(model: type[Request]) -> Iterator[inspect.Parameter]:
    from bssearch.planning.requests import options_of, type_of

    for name, option in options_of(model).items():
        field, flag = model.model_fields[name], option.flag or f"--{name.replace('_', '-')}"
        is_required, kind = field.is_required(), type_of(model, name)
        if kind is bool and field.default is None:
            flag = f"{flag}/{flag.replace('--', '--no-')}"
        shown = "" if is_required or field.default in (None, False) else str(field.default)
        annotation: Any = Annotated[kind if is_required else kind | None, typed(option, flag, shown=shown)]
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=DatabaseOption if name == "db" else annotation,
            default=inspect.Parameter.empty if is_required else None,
        )


def _memory(*, form: FormatOption = Format.TABLE, **given: Any) -> None:
    """Estimate the memory of a training step and the micro-batches that fit."""
    plan = bssearch.plan_memory(**given)
    _show(form, plan, "shown_memory", [asdict(one) for one in plan.terms])


def _learning_rate(*, form: FormatOption = Format.TABLE, **given: Any) -> None:
    """Carry a tuned configuration to another batch size by each rule."""
    plan = bssearch.plan_learning_rate(**given)
    _show(form, plan, "shown_rules", [{"rule": name, **asdict(one)} for name, one in plan.rules.items()])


def _accumulation(*, form: FormatOption = Format.TABLE, **given: Any) -> None:
    """Split a batch exactly into micro-batches, accumulation steps and devices."""
    plan = bssearch.plan_accumulation(**given)
    _show(form, plan, "shown_split", [{name: getattr(plan, name) for name in SPLIT}])


def _scale(*, form: FormatOption = Format.TABLE, **given: Any) -> None:
    """Compare time and cost to the target on 1 to N devices."""
    plan = bssearch.plan_scale(**given)
    _show(form, plan, "shown_scale", [asdict(row) for row in plan.rows])


def _start(
    *,
    out: Annotated[
        Path | None, typer.Option(help="Write the spec to this file instead of stdout.", metavar="FILE.yaml")
    ] = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Use default values instead of asking.")] = False,
    form: FormatOption = Format.TABLE,
    **given: Any,
) -> None:
    """Write a spec that runs as it is, from a few answers."""
    answers = given if defaults or not sys.stdin.isatty() else {**_asked(given), **given}
    plan = bssearch.plan_start(**answers)
    if out is not None:
        _write_spec(plan.yaml, out)
    if out is None or form is not Format.TABLE:
        rows = [{"field": field, "reason": reason} for field, reason in plan.reasons.items()]
        show(form, lambda: write(plan.yaml), plan.document, lambda: rows)
    for one in plan.notes:
        note(one.message)


# The request and the function of each command.
COMMANDS = {
    "memory": ("bssearch.planning.memory:MemoryPlanRequest", _memory),
    "lr": ("bssearch.planning.learning_rate:LearningRateRequest", _learning_rate),
    "accumulation": ("bssearch.planning.scale:AccumulationRequest", _accumulation),
    "scale": ("bssearch.planning.scale:ScaleRequest", _scale),
    "start": ("bssearch.planning.start:StartRequest", _start),
}

app = typer.Typer(cls=_Plans, help="Plan by arithmetic and traces, before any training.", no_args_is_help=True)


def _asked(given: Mapping[str, Any]) -> dict[str, Any]:
    from bssearch.planning.requests import options_of
    from bssearch.planning.start import QUESTIONS, StartRequest

    answers: dict[str, Any] = {}
    for name in QUESTIONS:
        if name not in given:
            text, choices = options_of(StartRequest)[name].help.rstrip("."), options_of(StartRequest)[name].choices
            text += f" ({', '.join(choices)})" if choices else ""
            default = StartRequest.model_fields[name].default
            while (answer := typer.prompt(text, default=default, err=True)) not in (choices or [answer]):
                note(f"unknown answer {answer!r}; choose from {', '.join(choices)}")
            answers[name] = answer
    return answers


def _write_spec(text: str, path: Path) -> None:
    if path.suffix not in {".yaml", ".yml"}:
        raise UsageError(f"--out {path} must end in .yaml or .yml")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"--out {path} exists: nothing is overwritten") from None
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {path}; next: bssearch check {path}", err=True)


def _show(form: Format, plan: Plan, shown: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a plan; ``shown`` makes its view, imported for people only."""
    show(form, lambda: _print(resolve_name(f"bssearch.figures.plans:{shown}")(plan)), plan.document, lambda: rows)


def _print(shown: Shown) -> None:
    screen = console()
    if shown.sentence:
        screen.print(shown.sentence)
    for one in shown.tables:
        rows = ([cell.shown for cell in row.cells] for row in one.rows)
        print_table([dict(zip(one.headings, row, strict=True)) for row in rows], one.headings)
    for tile in shown.tiles:
        screen.print(f"{tile.name}: {tile.value.text}{tile.note and f' ({tile.note})'}")
    for text in shown.notes:
        screen.print(f"note: {text}")
