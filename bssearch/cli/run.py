"""``bssearch run``: launch a study, or go on with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.arguments import (
    AllowBusyOption,
    DatabaseOption,
    DataDirOption,
    SetOption,
    SpecArgument,
    workload_folder,
)
from bssearch.cli.output import Format, FormatOption, console, duration

if TYPE_CHECKING:
    from bssearch.spec import StudySpec


def run(
    spec: SpecArgument,
    db: DatabaseOption = None,
    data_dir: DataDirOption = None,
    overrides: SetOption = None,
    allow_changed_workload: Annotated[
        bool,
        typer.Option("--allow-changed-workload", help="Go on although the workload's file is not what it was."),
    ] = False,
    allow_busy: AllowBusyOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run and how long; run nothing.")] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Run a study to its end and print the answer; the same command again goes on where it stopped."""
    from bssearch.spec import find_spec, load_spec

    path = find_spec(spec)
    study = load_spec(path, overrides or [])
    if dry_run:
        print_plan(study)
        return
    from bssearch.cli.answer import print_found
    from bssearch.cli.live import watch
    from bssearch.commands.run import run_study

    with watch() as listener:
        answer = run_study(
            study,
            db=db,
            folder=workload_folder(path),
            data_dir=data_dir,
            allow_changed_workload=allow_changed_workload,
            allow_busy=allow_busy,
            listener=listener,
        )
    print_found(answer, form)


def print_plan(study: StudySpec) -> None:
    """Print the trials of a study, their limits, and the longest it can take."""
    from bssearch.commands.estimates import longest_seconds, most_finalists
    from bssearch.probes.cadence import EVALUATION_SHARE

    out = console()
    limit, trials = study.budget.trial_train_seconds, study.budget.trials
    search, confirmation = longest_seconds(study)
    sizes = ", ".join(str(size) for size in study.batch_sizes)
    searched = ", ".join(dimension.name for dimension in study.space.dimensions()) or "nothing"
    for line in (
        f"study {study.name}: {study.target.metric} {study.target.value:g} on workload {study.workload}",
        f"batch sizes: {sizes}",
        f"searched at each: {searched}",
        f"search: {trials} trials of at most {limit:g} train seconds, {study.executor.slots} at once",
        f"confirmation: at most {most_finalists(study)} configurations × {study.confirm.runs} runs, one at a time",
        f"the longest it can take: {duration(search + confirmation)} "
        f"({duration(search)} of search, {duration(confirmation)} of confirmation) if evaluation is within its "
        f"{EVALUATION_SHARE:.0%} of a trial; bssearch check measures it",
        "most trials end far sooner: at the target, or by the pruner",
    ):
        out.print(line)
