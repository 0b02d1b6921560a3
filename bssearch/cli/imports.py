"""``bssearch import``: runs that were made elsewhere become studies."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.output import DatabaseOption, Format, FormatOption, print_rows, write
from bssearch.records import Goal, TrialState

if TYPE_CHECKING:
    from bssearch.importers.studies import Studies


class RunsObjective(StrEnum):
    """What a study of imported runs can have the least of."""

    TIME_TO_TARGET = "time_to_target"
    SAMPLES_TO_TARGET = "samples_to_target"


app = typer.Typer(help="Make studies of runs that were made elsewhere.", no_args_is_help=True)

NameOption = Annotated[str | None, typer.Option("--name", help="Name of the study.", show_default="the file's")]


@app.command("runs")
def import_runs(
    file: Annotated[Path, typer.Argument(metavar="FILE.csv", help="A CSV file with one row a run.")],
    name: NameOption = None,
    metric: Annotated[str, typer.Option(help="What final_metric is.")] = "metric",
    target: Annotated[
        float | None,
        typer.Option(help="The value to reach.", show_default="the worst final_metric of a run that reached it"),
    ] = None,
    goal: Annotated[Goal, typer.Option(help="Which way the metric is better.")] = Goal.MAXIMIZE,
    objective: Annotated[
        RunsObjective, typer.Option(help="What the best batch size has the least of.")
    ] = RunsObjective.TIME_TO_TARGET,
    default_batch: Annotated[
        int | None, typer.Option(help="The batch size in use today, which others are compared with.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Precision of the runs, where their row does not say it.")
    ] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Make a study of a table of runs, or several where devices or precisions differ.

    Columns: batch_size, reached (true or false), and, where known, seed, steps and train_seconds (to the target, or all
    where it was missed), final_metric, device, precision, param.learning_rate, param.NAME. An empty cell is not known.
    """
    from dataclasses import replace

    from bssearch.importers.run_tables import read_runs
    from bssearch.importers.studies import find_target, make_studies

    table = read_runs(file)
    runs = [run if run.precision else replace(run, precision=precision) for run in table.runs]
    wanted, notes = find_target(runs, metric, target, goal)
    made = make_studies(
        runs, name=name or file.stem, target=wanted, objective=objective.value, default_batch=default_batch
    )
    _store(made, [*table.notes, *notes], db, form)


@app.command("rcp")
def import_rcp(
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="A file of MLPerf reference convergence points.")],
    name: NameOption = None,
    samples_per_epoch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Samples of an epoch, where the file counts epochs; 1 where its epochs are samples.",
            show_default="known of bert, resnet and retinanet",
        ),
    ] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Make a study of MLPerf's reference convergence points: the samples that each batch size took to the target."""
    from bssearch.importers.rcp import read_rcp
    from bssearch.importers.studies import make_studies

    found = read_rcp(file, samples_per_epoch=samples_per_epoch)
    made = make_studies(
        found.table.runs, name=name or file.stem, target=found.target, objective=RunsObjective.SAMPLES_TO_TARGET.value
    )
    _store(made, found.table.notes, db, form)


def _store(made: Studies, notes: Sequence[str], db: str | None, form: Format) -> None:
    """Store studies, all or none; print their names, and to stderr what must be known of them."""
    from bssearch.storage.repository import open_store

    def note(text: str) -> None:
        typer.echo(f"note: {text}", err=True)

    with open_store(db, notify=note) as store:
        store.import_studies(made.studies)
    for text in [*notes, *made.notes]:
        note(text)
    rows = [
        {
            "study": study.name,
            "runs": len(study.trials),
            "reached": sum(trial.outcome.state is TrialState.REACHED for trial in study.trials),
        }
        for study in made.studies
    ]
    if form is Format.TABLE:
        write("".join(f"{row['study']}\n" for row in rows))
    else:
        print_rows(rows, ("study", "runs", "reached"), form)
