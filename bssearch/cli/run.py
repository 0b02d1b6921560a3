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
from bssearch.cli.output import Format, FormatOption, console, duration, show_model

if TYPE_CHECKING:
    from bssearch.commands.dry_run import DryRun


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
    from_quick: Annotated[
        bool, typer.Option("--from-quick", help="Make the answer of bssearch quick first, where none is stored.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run and how long; run nothing.")] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Run a study to its end and print the answer; the same command again goes on where it stopped."""
    from bssearch.spec import find_spec, load_spec

    path = find_spec(spec)
    study = load_spec(path, overrides or [])
    if dry_run:
        from bssearch.commands.dry_run import dry_run as planned

        plan = planned(study)
        show_model(form, plan, print_dry_run, [plan])
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
            from_quick=from_quick,
            listener=listener,
        )
    print_found(answer, form)


def print_dry_run(found: DryRun) -> None:
    """Print for people the trials of a study, their limits, and the longest it can take."""
    out = console()
    searched = ", ".join(found.searched) or "nothing"
    at_once = "one at once on each device" if found.slots == "auto" else f"{found.slots} at once"
    for line in (
        f"study {found.study}: {found.target} on workload {found.workload}",
        f"batch sizes: {', '.join(map(str, found.batch_sizes))}",
        f"searched at each: {searched}",
        f"search: {found.trials} trials of at most {found.trial_train_seconds:g} train seconds, {at_once}",
        f"confirmation: at most {found.finalists} configurations × {found.confirmation_runs} runs, one at a time",
        f"the longest it can take: {duration(found.longest_s)} "
        f"({duration(found.longest_search_s)} of search, {duration(found.longest_confirmation_s)} of confirmation) if "
        f"evaluation is within its {found.evaluation_share:.0%} of a trial; bssearch check measures it",
        "most trials end far sooner: at the target, or by the pruner",
    ):
        out.print(line)
