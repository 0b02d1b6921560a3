"""``bssearch confirm``: more confirmation runs for a stored study, or its finalists trained to their full budget."""

from __future__ import annotations

from typing import Annotated

import typer

from bssearch.cli.answer import print_found
from bssearch.cli.arguments import AllowBusyOption, DatabaseOption, DataDirOption, NameArgument, WorkloadOption
from bssearch.cli.output import Format, FormatOption
from bssearch.errors import UsageError

TO_BUDGET_RUNS = 3
"""Runs of each configuration with --to-budget: the fewest that have an interval."""


def confirm(
    study: NameArgument,
    runs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs of every finalist, no fewer than stored; with --to-budget 3 where it is left out."
        ),
    ] = None,
    max_runs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of those not told apart, at most, until the recommendation is settled."),
    ] = None,
    train_seconds: Annotated[
        float | None,
        typer.Option(help="Start none of the runs beyond --runs once all confirmation has trained for so long."),
    ] = None,
    to_budget: Annotated[
        bool,
        typer.Option(
            "--to-budget", help="Train the best of each batch size to the full limit: do larger ones end worse?"
        ),
    ] = False,
    db: DatabaseOption = None,
    workload: WorkloadOption = None,
    data_dir: DataDirOption = None,
    allow_busy: AllowBusyOption = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Run what is missing of a stored study's confirmation and print the answer; the same command again goes on.

    A workload file is looked up from this folder. What is asked here is stored with the study.
    """
    if to_budget and (max_runs is not None or train_seconds is not None):
        given = "--max-runs" if max_runs is not None else "--train-seconds"
        raise UsageError(f"--to-budget and {given} exclude each other: it makes --runs of each configuration")

    from bssearch.cli.live import watch
    from bssearch.commands.confirm import confirm_study, with_confirmation
    from bssearch.commands.opening import stored_spec

    spec = stored_spec(study, db=db, to_run=True, runs_code=workload is None, connects=True)
    if not to_budget:
        spec = with_confirmation(spec, runs=runs, max_runs=max_runs, train_seconds=train_seconds)
    with watch() as listener:
        answer = confirm_study(
            spec,
            to_budget_runs=(runs or TO_BUDGET_RUNS) if to_budget else None,
            db=db,
            data_dir=data_dir,
            allow_busy=allow_busy,
            workload=workload,
            listener=listener,
        )
    print_found(answer, form)
