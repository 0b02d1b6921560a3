"""The commands ``import``, ``probe``, ``export`` and ``plan``, with plug-ins imported on first use."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

import typer
from typer.core import TyperGroup

import bssearch
from bssearch import registry
from bssearch.cli.arguments import (
    DatabaseOption,
    SetOption,
    SpecArgument,
    StudyArgument,
    launch_options,
    spec_to_run,
    store_to_read,
    study_name,
    typed,
    with_parameters,
)
from bssearch.cli.output import Format, FormatOption, console, note, print_named, print_table, say, show, write
from bssearch.cli.run import write_new
from bssearch.commands.launch import Launch
from bssearch.errors import BSSearchError, UsageError, require
from bssearch.files import Row
from bssearch.records import TrialState
from bssearch.registry import Option

if TYPE_CHECKING:
    from bssearch.analysis.shape import BeyondPlan, LargerPlan
    from bssearch.commands.probes import Probe
    from bssearch.exchange.importers.imported_run import Importer, Studies, WholeStudies
    from bssearch.figures.plans import Shown
    from bssearch.planning.requests import Plan, Request


_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


class _Registered(TyperGroup):
    kind: ClassVar[registry.Kind]

    def list_commands(self, ctx: Any) -> list[str]:
        return list(registry.names(self.kind))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if not registry.is_known(self.kind, cmd_name):
            return None
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        try:
            entry = registry.load(self.kind, cmd_name)
            summary, _, details = (inspect.getdoc(entry) or "").partition("\n\n")
            single.command(cmd_name, help=summary, epilog=" ".join(details.split()))(self.command_of(entry))
        except UsageError as error:
            # A broken package must not hide the other commands.
            single.command(cmd_name, context_settings=_ANYTHING)(_broken(str(error)))
        return typer.main.get_command(single)

    @staticmethod
    def command_of(entry: Any) -> Callable[..., None]:
        raise NotImplementedError


class _Importers(_Registered):
    kind = "importers"

    @staticmethod
    def command_of(entry: Importer) -> Callable[..., None]:
        def command(*, db: str | None, form: Format, **given: Any) -> None:
            from bssearch.exchange.importers.imported_run import WholeStudies

            gc.disable()  # rows make no reference cycles, and the search for cycles takes a tenth of the time
            try:
                made = entry(**given)
                if isinstance(made, WholeStudies):
                    _join(made, db, form)
                else:
                    _store(made, db, form)
            finally:
                gc.enable()

        return with_parameters(command, None, [*_parameters(entry), *_IMPORT_OPTIONS])


class _Probes(_Registered):
    kind = "probes"

    @staticmethod
    def command_of(entry: Probe) -> Callable[..., None]:
        def command(
            *,
            spec: str,
            overrides: list[str] | None,
            form: Format,
            **given: Any,
        ) -> None:
            from bssearch.commands.display import Lines

            launch = Launch(
                **{name: given.pop(name) for name in _LAUNCH}, listener=Lines(console(stderr=True), verbose=True)
            )
            found = entry(*spec_to_run(spec, overrides, launch), **given)

            def for_people() -> None:
                if found.columns:
                    print_table(found.table, found.columns)
                say(*found.sentences)

            show(form, for_people, lambda: found.document, lambda: found.rows)

        parameters = [
            _parameter("spec", SpecArgument),
            *_parameters(entry)[2:],
            *launch_options(*_LAUNCH),
            _parameter("overrides", SetOption, None),
            _FORM,
        ]
        return with_parameters(command, None, parameters)


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


_FORM = _parameter("form", FormatOption, Format.TABLE)
_IMPORT_OPTIONS = [_parameter("db", DatabaseOption, None), _FORM]
_LAUNCH = ("db", "data_dir", "allow_busy")


def _parameters(entry: Callable[..., Any]) -> list[inspect.Parameter]:
    return [
        one.replace(annotation=_annotation(one)) for one in inspect.signature(entry, eval_str=True).parameters.values()
    ]


def _annotation(parameter: inspect.Parameter) -> Any:
    kind, *notes = get_args(parameter.annotation) or (parameter.annotation,)
    option = next((note for note in notes if isinstance(note, Option)), None)
    if option is None:
        return parameter.annotation
    make = typer.Option if parameter.kind is inspect.Parameter.KEYWORD_ONLY else typer.Argument
    return Annotated[kind, typed(option, make=make)]


def _broken(message: str) -> Callable[..., None]:
    def command() -> None:
        raise UsageError(message)

    command.__doc__ = message
    return command


def _store(made: Studies, db: str | None, form: Format) -> None:
    told: list[str] = []
    if not made.dry_run:
        from bssearch.exchange.importers.imported_studies import answer_in_words, with_stored

        with bssearch.open_store(db, notify=note) as store:
            studies, replaced, told = with_stored(store, made.studies)
            store.transfer.import_finished(studies, replaced)
            told += [text for one in made.studies for text in answer_in_words(store, one.study.name)]
            _answer(store, [one.study.name for one in made.studies])
    rows = [
        {
            "study": finished.study.name,
            "runs": len(finished.trials),
            "reached": sum(trial.outcome.state is TrialState.REACHED for trial in finished.trials),
        }
        for finished in made.studies
    ]
    _print_imported(rows, ("study", "runs", "reached"), form, (*made.notes, *told), dry_run=made.dry_run)


def _print_imported(
    rows: Sequence[Row], columns: Sequence[str], form: Format, notes: Iterable[str], *, dry_run: bool
) -> None:
    for text in notes:
        note(text)
    if dry_run:
        note("with --dry-run, bssearch stored no study")
    print_named(rows, columns, form)


def _answer(store: bssearch.Store, studies: Sequence[str]) -> None:
    # Store the answers, for the lists of studies.
    from bssearch.search.finding import save_finding

    for name in studies:
        with suppress(BSSearchError):
            save_finding(store, name)


def _join(made: WholeStudies, db: str | None, form: Format) -> None:
    if made.dry_run:
        bssearch.open_store(db, write=False).close()  # a missing file must not be created
    with bssearch.open_store(db, notify=note) as store:
        joined = store.transfer.join(made.copies, name=made.name, dry_run=made.dry_run)
        _answer(store, [] if made.dry_run else [one.study for one in joined])
    told = (*made.notes, *(one.sentence for one in joined))
    columns = ("study", "is_new", "is_changed")
    _print_imported([one.document for one in joined], columns, form, told, dry_run=made.dry_run)


importers = typer.Typer(cls=_Importers, help="Import studies, or runs of other tools.", no_args_is_help=True)
probes = typer.Typer(
    cls=_Probes,
    help="Measure memory, step times, gradient noise or local critical batch sizes.",
    no_args_is_help=True,
)


def export(
    studies: Annotated[
        list[str] | None,
        typer.Argument(metavar="STUDY...", help="Names of studies (optional if there is only one study)."),
    ] = None,
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="KIND",
            help="Format, such as csv, curves or study; see `bssearch guide team`.",
        ),
    ],
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            metavar="FILE|URL",
            show_default="STUDY with the format's extension",
            help="Destination of one study: a file, or a database's URL.",
        ),
    ] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Write studies for other programs or another database."""
    exporter = registry.load("exporters", to)
    names = studies or [study_name(db, None)]
    require(
        file is None or len(names) <= 1,
        f"--file = {file} takes one study, not {len(names)}: {', '.join(names)}",
        hint="export one study, or omit --file",
    )
    with store_to_read(db) as store:
        made = [exporter(store, study, file) for study in names]
    print_named([{"written": line} for one in made for line in one.written], ["written"], form)
    for text in (text for one in made for text in one.notes):
        typer.echo(text, err=True)


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

    every = inspect.signature(run, eval_str=True).parameters.values()
    own = {one.name: one for one in every if one.kind is not inspect.Parameter.VAR_KEYWORD}
    return with_parameters(
        command, run.__doc__, [*own.values(), *(one for one in _options(resolve_name(request)) if one.name not in own)]
    )


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
    _show(form, bssearch.plan_memory(**given), "shown_memory", lambda plan: [asdict(one) for one in plan.terms])


def _learning_rate(*, form: FormatOption = Format.TABLE, **given: Any) -> None:
    """Scale a tuned configuration to another batch size by each rule."""
    _show(
        form,
        bssearch.plan_learning_rate(**given),
        "shown_rules",
        lambda plan: [{"rule": name, **asdict(one)} for name, one in plan.rules.items()],
    )


def _accumulation(*, form: FormatOption = Format.TABLE, **given: Any) -> None:
    """Split a batch exactly into micro-batches, accumulation steps and devices."""
    plan = bssearch.plan_accumulation(**given)
    _show(form, plan, "shown_split", lambda plan: [{name: getattr(plan, name) for name in SPLIT}])


def _scale(*, form: FormatOption = Format.TABLE, **given: Any) -> None:
    """Compare time and cost to the target on 1 to N devices."""
    _show(form, bssearch.plan_scale(**given), "shown_scale", lambda plan: [asdict(row) for row in plan.rows])


def _beyond(*, study: StudyArgument = None, form: FormatOption = Format.TABLE, **given: Any) -> None:
    """Predict the best batch size at a harder target from learning curves."""
    plan = bssearch.plan_beyond(study=study_name(given.get("db"), study), **given)
    _show(form, plan, "shown_beyond", lambda plan: [one.document() for one in plan.batches])


def _larger(
    *,
    studies: Annotated[list[str], typer.Argument(metavar="STUDY", help="Studies, or STUDY:PARAMETERS:SAMPLES.")],
    html: Annotated[Path | None, typer.Option(help="Write an HTML page to this file.", metavar="FILE.html")] = None,
    form: FormatOption = Format.TABLE,
    **given: Any,
) -> None:
    """Plan a run too large to search, from studies at several scales."""
    plan = bssearch.plan_larger(studies=studies, **given)
    if html is not None:
        write_new({html: resolve_name("bssearch.figures.plans:larger_page")(plan)})
    _show(form, plan, "shown_larger", lambda plan: [one.document() for one in plan.scales])


def _start(
    *,
    out: Annotated[
        Path | None, typer.Option(help="Write the spec to this file instead of stdout.", metavar="FILE.yaml")
    ] = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Use default values instead of asking.")] = False,
    form: FormatOption = Format.TABLE,
    **given: Any,
) -> None:
    """Write a runnable spec from the answers to a few questions."""
    plan = bssearch.plan_start(**given if defaults or not sys.stdin.isatty() else {**_asked(given), **given})
    if out is not None:
        require(out.suffix in {".yaml", ".yml"}, f"--out = {out} must end in .yaml or .yml")
        write_new({out: plan.yaml})
        typer.echo(f"wrote {out}; next: bssearch check {out}", err=True)
    if out is None or form is not Format.TABLE:
        rows = [{"field": field, "reason": reason} for field, reason in plan.reasons.items()]
        show(form, lambda: write(plan.yaml), plan.document, lambda: rows)
    for one in plan.notes:
        note(one.message)


# The request and the function of each command.
COMMANDS: dict[str, tuple[str, Callable[..., None]]] = {
    "memory": ("bssearch.planning.memory:MemoryPlanRequest", _memory),
    "lr": ("bssearch.planning.learning_rate:LearningRateRequest", _learning_rate),
    "accumulation": ("bssearch.planning.scale:AccumulationRequest", _accumulation),
    "scale": ("bssearch.planning.scale:ScaleRequest", _scale),
    "beyond": ("bssearch.commands.plan:BeyondRequest", _beyond),
    "larger": ("bssearch.commands.plan:LargerRequest", _larger),
    "start": ("bssearch.planning.start:StartRequest", _start),
}

plans = typer.Typer(
    cls=_Plans, help="Plan memory, learning rates, devices or studies without training.", no_args_is_help=True
)


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


def _show(form: Format, plan: Plan | BeyondPlan | LargerPlan, shown: str, rows: Callable[[Any], Sequence[Row]]) -> None:
    show(form, lambda: _print(resolve_name(f"bssearch.figures.plans:{shown}")(plan)), plan.document, lambda: rows(plan))


def _print(shown: Shown) -> None:
    say(*filter(None, [shown.sentence]))
    for one in shown.tables:
        rows = ([cell.shown for cell in row.cells] for row in one.rows)
        print_table([dict(zip(one.headings, row, strict=True)) for row in rows], one.headings)
    say(
        *(f"{tile.name}: {tile.value.text}{tile.note and f' ({tile.note})'}" for tile in shown.tiles),
        *(f"note: {text}" for text in shown.notes),
    )
