"""The commands that show trials: ``trials`` lists them, ``trial`` shows one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.arguments import DatabasesOption, StudyArgument, study_to_read
from bssearch.cli.output import Format, FormatOption, cell, console, print_rows, print_table, show, write
from bssearch.errors import NotFoundError, UsageError
from bssearch.pages.words import visible
from bssearch.records import Environment, Observation, Phase, TrialRecord, TrialState

if TYPE_CHECKING:
    from bssearch.commands.rerun import Reproduction
    from bssearch.storage.repository import Store

STAGE_COLUMNS = (
    "start_samples",
    "batch_size",
    "micro_batch_size",
    "learning_rate",
    "steps",
    "samples",
    "train_seconds",
)
LARGEST_NUMBER = 2**31 - 1
"""The largest trial number that every database's integer column holds."""

ROOMY = 120
"""Characters of a terminal's line from which on the last two columns are shown: a choice."""

TRIAL_COLUMNS = (
    "number",
    "phase",
    "state",
    "batch_size",
    "learning_rate",
    "train_seconds",
    "time_to_target_s",
    "steps_to_target",
    "final_metric",
    "reason",
)


def trials(
    study: StudyArgument = None,
    db: DatabasesOption = None,
    form: FormatOption = Format.TABLE,
    phase: Annotated[Phase | None, typer.Option(help="Only this phase.")] = None,
    state: Annotated[TrialState | None, typer.Option(help="Only this state.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Only this batch size.")] = None,
) -> None:
    """List the trials of a study."""
    from bssearch.commands.trials import matching_trials, trial_row

    with study_to_read(db, study) as (store, name):
        found = store.trials(name)
    kept = matching_trials(found, phase=phase, state=state, batch_size=batch_size)
    rows = [trial_row(trial) for trial in kept]
    if form is Format.TABLE:
        from bssearch.batch_schedule import sizes_in_words

        rows = [
            {**row, "batch_size": sizes_in_words(trial.configuration)} if trial.configuration.grows else row
            for trial, row in zip(kept, rows, strict=True)
        ]
    print_rows(rows, TRIAL_COLUMNS if console().width >= ROOMY else TRIAL_COLUMNS[:-2], form)


def trial(
    study_or_number: Annotated[str, typer.Argument(metavar="[STUDY] NUMBER", help="The trial, and its study.")],
    number: Annotated[int | None, typer.Argument(hidden=True)] = None,
    db: DatabasesOption = None,
    form: FormatOption = Format.TABLE,
    log: Annotated[bool, typer.Option("--log", help="Print only what the training code printed in it.")] = False,
    repro: Annotated[
        bool, typer.Option("--repro", help="Print only the command that runs it again, and to stderr what it takes.")
    ] = False,
) -> None:
    """Show one trial: its configuration, its curve, where it ran, and why it ended."""
    if log and repro:
        raise UsageError("--log and --repro contradict each other: each prints one thing alone")
    from bssearch.commands.trials import trial_document

    study = None if number is None else study_or_number
    if number is None:
        if not study_or_number.isdecimal():
            raise UsageError(f"trial {study_or_number!r}: it takes the number of a trial, after the name of its study")
        number = int(study_or_number)
    with study_to_read(db, study) as (store, name):
        if number > LARGEST_NUMBER:
            raise NotFoundError(f"study {name!r} has no trial {number}")
        found = store.trial(name, number)
        if log:
            _print_log(store, name, found)
            return
        if repro:
            from bssearch.commands.rerun import reproduction

            found_again = reproduction(store, name, number, names_database=bool(db))
            document = asdict(found_again)
            show(form, lambda: _print_reproduction(found_again), lambda: document, lambda: [document])
            return
        curve = store.observations(name, number)
        environment = store.environment_of(name, number)
        spec = store.spec_at(name, number)
    row = trial_document(found, curve, environment, spec) if form is not Format.TABLE else {}
    show(form, lambda: _print_trial(name, found, curve, environment), lambda: row, lambda: [row])


def _print_log(store: Store, study: str, found: TrialRecord) -> None:
    """Print the output of a trial's code, or to stderr why there is none."""
    printed = store.log(study, found.number)
    write(printed or "")
    if not printed:
        why = "printed nothing" if found.state.is_finished else "has not ended, and its log comes with its end"
        typer.echo(f"trial {found.number} of {study} {why}", err=True)


def _print_reproduction(found: Reproduction) -> None:
    """Print the command that runs a trial again, and to stderr, as comments, what must be the same."""
    for line in found.notes:
        typer.echo(f"# {visible(line)}", err=True)
    write(f"{found.command}\n")


def _print_trial(study: str, found: TrialRecord, curve: Sequence[Observation], environment: Environment | None) -> None:
    """Print a trial for people."""
    from bssearch.commands.trials import trial_row
    from bssearch.curves import sparkline

    out = console()
    outcome = found.outcome
    reason = f": {outcome.reason}" if outcome else ""
    one, how = ("run", "imported") if found.is_imported else ("trial", found.phase.value)
    out.print(f"{one} {found.number} of {study} ({how}) {found.state.value}{reason}")
    for key, value in trial_row(found).items():
        if key not in {"number", "phase", "state", "reason", "warnings"} and value is not None:
            out.print(f"  {key:22} {cell(value)}")
    if found.configuration.grows:
        _print_stages(found, curve)
    if environment is not None:
        known = {**asdict(environment), "libraries": ", ".join(environment.libraries) or None}
        where = ", ".join(f"{key} {cell(value)}" for key, value in known.items() if value is not None)
        out.print(f"  environment            {where}")
    for warning in outcome.warnings if outcome else ():
        out.print(f"  warning: {warning}")
    if curve:
        metrics = [one.metric for one in curve]
        out.print(f"  metric {cell(metrics[0])} {sparkline(metrics)} {cell(metrics[-1])}")
        out.print(f"  {len(curve)} evaluations over {cell(curve[-1].train_seconds)} train seconds")
    if outcome and outcome.traceback:
        out.print(outcome.traceback)


def _print_stages(found: TrialRecord, curve: Sequence[Observation]) -> None:
    """Print how a trial's batch was to grow, and what it ran of each stage."""
    from bssearch.batch_schedule import batch_schedule_of, run_stages

    schedule = batch_schedule_of(found.configuration)
    assert schedule is not None, "its batch grows"
    console().print(f"  batch {schedule.in_words}; learning rate {schedule.rate_rule.in_words}")
    stages = run_stages(found, curve)
    if stages:
        print_table([asdict(one) for one in stages], STAGE_COLUMNS)
