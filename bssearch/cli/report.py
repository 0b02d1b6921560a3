"""``bssearch best``, ``report`` and ``serve``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.arguments import (
    DatabasesOption,
    Export,
    ObjectiveFilter,
    PrecisionFilter,
    StudyArgument,
    WorkloadFilter,
    exclude,
    only_with,
    study_to_read,
)
from bssearch.cli.output import Format, FormatOption, console, note, print_named, print_table, say, show_model, write
from bssearch.errors import UsageError, require
from bssearch.files import check_file, check_folder, naming, replacing, write_csv

if TYPE_CHECKING:
    from bssearch.analysis.answer import Answer
    from bssearch.commands.across.answers import AcrossAnswer
    from bssearch.storage.repository import Store


def best(
    study: StudyArgument = None,
    db: DatabasesOption = None,
    form: FormatOption = Format.TABLE,
    details: Annotated[
        bool, typer.Option("--details", help="Also print steps, step times, the fitted law and notes.")
    ] = False,
    export: Annotated[Export | None, typer.Option(help="Print only the configuration, in this format.")] = None,
    schedule: Annotated[
        bool,
        typer.Option("--schedule", help="With --export, print the best batch schedule (python: a training loop)."),
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="VALUE|METRIC=VALUE",
            help="With one study, answer for this target; bssearch predicts harder targets. Across studies, filter by "
            "target.",
        ),
    ] = None,
    step_times: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Predict for another device from a CSV of batch_size and step_seconds, or JSON of `probe step-time`.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Across studies, filter by part of the device's name. With --step-times, name the device.",
            show_default="with --step-times, the file's name",
        ),
    ] = None,
    workload: WorkloadFilter = None,
    objective: ObjectiveFilter = None,
    precision: PrecisionFilter = None,
) -> None:
    """Print the best batch size, the configuration and the certainty."""
    from bssearch.commands.across.answers import ANSWERED, StudyFilter, answers_in
    from bssearch.commands.across.databases import open_databases

    if export is not None:
        exclude(f"--export {export}", {f"--format {form}": form is not Format.TABLE})
    else:
        only_with("--export", {"--schedule": schedule})
    filters = {"workload": workload, "objective": objective, "precision": precision, "target": target}
    if step_times is not None:
        exclude("--step-times", {**{f"--{name}": value for name, value in filters.items()}, "--schedule": schedule})
    asked = StudyFilter.of(**filters, device=None if step_times else device)
    about_many = asked.conditions.keys() - {"target"}
    named = f"{asked.in_words} filters studies, but {study!r} is a single study"
    require(study is None or not about_many, named, hint="give a filter or a study, not both")
    if about_many or (study is None and asked.metric is not None):
        require(export is None, "--export needs one study", hint="name the study: bssearch best STUDY --export …")
        with open_databases(db) as stores:
            every = answers_in(stores, asked)
        show_model(form, every, _print_answers, every.answers, ANSWERED)
        return
    from bssearch.cli.answer import print_found
    from bssearch.commands.best import answer_at, predict

    with study_to_read(db, study) as (store, name):
        if asked.metric is not None and asked.metric != (metric := store.studies.get(name).target.metric):
            raise UsageError(
                f"--target {asked.metric}: the target metric of study {name!r} is {metric}; write {metric}=VALUE"
            )
        found = predict(store, name, step_times, device) if step_times else answer_at(store, name, asked.target)
        if export is not None:
            text, caveats = _exported(store, name, found, export, schedule=schedule)
    if export is None:
        print_found(found, form, details=details, db=store.masked_url if db else None)
        return
    write(text)
    for caveat in caveats:
        note(caveat)
    if not schedule and found.batch_schedule is not None and found.batch_schedule.saves_time == "yes":
        note("a growing batch saves time; export the schedule with --schedule")


def _exported(store: Store, name: str, found: Answer, form: Export, *, schedule: bool) -> tuple[str, list[str]]:
    from bssearch.cli.answer import exported, exported_schedule, grave
    from bssearch.commands.best import for_export, scheduled_training
    from bssearch.spec import spec_of

    spec = spec_of(store.studies.get(name))
    if not schedule:
        return exported(found, form, for_export(found.optimal.values, spec)), grave(found)
    scheduled = scheduled_training(store, name, found).for_export(spec)
    return exported_schedule(found, scheduled, form), [*scheduled.notes, *grave(found)]


MOST_TOLD = 3  # most disagreements to print; JSON has all


def _print_answers(found: AcrossAnswer) -> None:
    from bssearch.commands.across.answers import ANSWERED, answered_row, in_words

    out = console()
    print_table([answered_row(one) for one in found.answers], ANSWERED)
    for sentence in in_words(found.agreement):
        out.print(sentence, style="bold")
    told = found.agreement.disagreements
    say(*(disagreement.message for disagreement in told[:MOST_TOLD]))
    if len(told) > MOST_TOLD:
        say(f"{len(told)} pairs of studies do not agree; print all pairs with --format json.")
    for one in found.answers:
        if one.copy_of is not None:
            place = f"{one.study} in {one.database}"
            say(f"note on {place}: not compared, because the study is a copy of {one.copy_of}")
        if one.note is not None:
            say(f"note on {one.study}: {one.note}")


TABLES = ("trials.csv", "batches.csv", "observations.csv")


def _path(text: str) -> Path:
    # An empty path would mean the current folder.
    require(text, "the path is empty", hint="give --html and --svg a file, and --csv a folder, such as .")
    return Path(text)


def report(
    study: StudyArgument = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", parser=_path, metavar="FILE", help="Write one HTML file that needs no network."),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg",
            parser=_path,
            metavar="FILE",
            help="Write one chart, in the reader's light or dark theme.",
        ),
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option(
            "--csv", parser=_path, metavar="FOLDER", help="Write trials.csv, batches.csv and observations.csv."
        ),
    ] = None,
    db: DatabasesOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Write a study's page, chart or tables, or print the answer."""
    from bssearch.cli.answer import print_found
    from bssearch.commands.report import picture_of, svg_of
    from bssearch.figures.html import html_page
    from bssearch.figures.page import page_of
    from bssearch.search.finding import answer

    for path in filter(None, (html, svg)):
        check_file(path)
    if tables is not None:
        check_folder(tables, TABLES)
    with study_to_read(db, study) as (store, name):
        pictures: list[tuple[Path | None, Callable[[], str]]] = [
            (html, lambda: html_page(page_of(picture_of(store, name)))),
            (svg, lambda: svg_of(store, name)),
        ]
        written: list[Path] = []
        for target, draw in pictures:
            if target is not None:
                drawn = draw()
                with replacing([target]) as (file,):
                    file.write(drawn)
                written.append(target)
        written += [] if tables is None else _write_tables(store, name, tables)
        if written:
            print_named([{"file": str(path)} for path in written], ["file"], form)
        else:
            print_found(answer(store, name), form)
            typer.echo(f"for a page with figures, run bssearch report {name} --html report.html", err=True)


def _write_tables(store: Store, name: str, folder: Path) -> list[Path]:
    from bssearch.exchange.exporters.exports import OBSERVED, observed_rows
    from bssearch.exchange.trial_rows import flat_table, trial_table
    from bssearch.search.finding import answer

    found, trials = answer(store, name), store.trials.of(name)
    made = not folder.exists()
    paths = [folder / table for table in TABLES]
    try:
        with naming(folder):
            folder.mkdir(exist_ok=True)
        with replacing(paths) as files:
            with naming(paths[0]):
                write_csv(files[0], *trial_table(trials))
            with naming(paths[1]):
                write_csv(files[1], *flat_table([row.model_dump(mode="json") for row in found.batches]))
            with naming(paths[2]):
                write_csv(files[2], OBSERVED, observed_rows(store, name))
    except BaseException:
        if made:
            with suppress(OSError):
                folder.rmdir()
        raise
    return paths


def serve(
    db: DatabasesOption = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on (0.0.0.0: all addresses); addresses beyond loopback require a token."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on (0: any free port).", min=0, max=65535)] = 8765,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another host name of this server; may be repeated.")
    ] = None,
    token: Annotated[
        bool | None,
        typer.Option(
            "--token/--no-token", help="Require a token.", show_default="if other machines can reach the host"
        ),
    ] = None,
) -> None:
    """Show live studies and a calculator in a browser."""
    try:
        from bssearch.web.app import serve as serve_pages
    except ImportError as error:
        raise UsageError(
            f"bssearch serve needs {error.name}, which cannot be imported", hint="run `pip install 'bssearch[serve]'`"
        ) from None
    serve_pages(
        db,
        host=host,
        port=port,
        names=allow_host or (),
        asks_token=token,
        tell=lambda line: typer.echo(line, err=True),
    )
