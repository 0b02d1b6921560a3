"""``bssearch import``, ``probe`` and ``export``: commands from the registry, loaded on use."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

import typer
from typer.core import TyperGroup

import bssearch
from bssearch import registry
from bssearch.cli.arguments import (
    DatabaseOption,
    SetOption,
    SpecArgument,
    launch_options,
    spec_to_run,
    store_to_read,
    study_name,
    typed,
    with_parameters,
)
from bssearch.cli.output import Format, FormatOption, console, note, print_named, print_table, show
from bssearch.commands.launch import Launch
from bssearch.errors import UsageError
from bssearch.records import TrialState
from bssearch.registry import Option

if TYPE_CHECKING:
    from bssearch.commands.probes import Probe
    from bssearch.exchange.importers.imported_run import Importer, Studies, WholeStudies


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
        """Function of an entry's command."""
        raise NotImplementedError


class _Importers(_Registered):
    kind = "importers"

    @staticmethod
    def command_of(entry: Importer) -> Callable[..., None]:
        def command(*, db: str | None, form: Format, **given: Any) -> None:
            from bssearch.exchange.importers.imported_run import WholeStudies

            gc.disable()  # rows make no cycles, and to look for some takes a tenth of the time
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
                for sentence in found.sentences:
                    console().print(sentence)

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
    with bssearch.open_store(db, notify=note) as store:
        store.transfer.import_finished(made.studies)
    for text in made.notes:
        note(text)
    rows = [
        {
            "study": finished.study.name,
            "runs": len(finished.trials),
            "reached": sum(trial.outcome.state is TrialState.REACHED for trial in finished.trials),
        }
        for finished in made.studies
    ]
    print_named(rows, ("study", "runs", "reached"), form)


def _join(made: WholeStudies, db: str | None, form: Format) -> None:
    if made.dry_run:
        bssearch.open_store(db, write=False).close()  # a missing file must not be created
    with bssearch.open_store(db, notify=note) as store:
        joined = store.transfer.join(made.copies, name=made.name, dry_run=made.dry_run)
    for text in made.notes:
        note(text)
    for one in joined:
        note(one.sentence)
    if made.dry_run:
        note("nothing was stored: --dry-run")
    print_named([one.document for one in joined], ("study", "is_new", "is_changed"), form)


importers = typer.Typer(cls=_Importers, help="Import studies, or runs made by other tools.", no_args_is_help=True)
probes = typer.Typer(
    cls=_Probes,
    help="Measure memory, step time or gradient noise; searches reuse the results.",
    no_args_is_help=True,
)


def export(
    studies: Annotated[
        list[str] | None,
        typer.Argument(metavar="STUDY...", help="Names of studies (optional if there is only one)."),
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
            show_default="STUDY with the kind's ending",
            help="Destination of one study: a file, or a database's URL.",
        ),
    ] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Write studies for other programs or another database."""
    exporter = registry.load("exporters", to)
    names = studies or [study_name(db, None)]
    if file is not None and len(names) > 1:
        raise UsageError(f"--file = {file} takes one study, but {len(names)} are given: {', '.join(names)}")
    with store_to_read(db) as store:
        made = [exporter(store, study, file) for study in names]
    print_named([{"written": line} for one in made for line in one.written], ["written"], form)
    for text in (text for one in made for text in one.notes):
        typer.echo(text, err=True)
