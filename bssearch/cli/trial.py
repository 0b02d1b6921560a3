"""``bssearch trial``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

import bssearch
from bssearch.cli.arguments import (
    DatabaseOption,
    DatabasesOption,
    NumberArgument,
    StudyArgument,
    StudyOrNumber,
    exclude,
    existing_store,
    launched,
    study_and_number,
    study_name,
    study_to_read,
    watched,
)
from bssearch.cli.output import (
    ROOMY,
    Format,
    FormatOption,
    cell,
    console,
    print_rows,
    print_table,
    say,
    show,
    show_model,
    tell,
    write,
)
from bssearch.commands.launch import Launch
from bssearch.errors import require
from bssearch.records import BATCH_STAGES, Environment, Observation, ParameterValue, Phase, TrialRecord, TrialState
from bssearch.records.text import plural, visible

if TYPE_CHECKING:
    from bssearch.commands.rerun import Ran, Reproduction, Rerun
    from bssearch.storage.repository import Store

app = typer.Typer(help="List, show, add or rerun trials.", no_args_is_help=True)

STAGE_COLUMNS = (
    "start_samples",
    "batch_size",
    "micro_batch_size",
    "learning_rate",
    "steps",
    "samples",
    "train_seconds",
)


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


@app.command("list")
def list_trials(
    study: StudyArgument = None,
    db: DatabasesOption = None,
    form: FormatOption = Format.TABLE,
    phase: Annotated[Phase | None, typer.Option(help="Filter by phase.")] = None,
    state: Annotated[TrialState | None, typer.Option(help="Filter by state.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Filter by batch size.")] = None,
) -> None:
    """List the trials of a study."""
    with study_to_read(db, study) as (store, name):
        if form is Format.TABLE:
            rows = store.trials.brief(name, TRIAL_COLUMNS, phase=phase, state=state, batch_size=batch_size)
        else:
            from bssearch.exchange.trial_rows import matching_trials, trial_rows

            found = store.trials.of(name)
            kept = matching_trials(found, phase=phase, state=state, batch_size=batch_size)
            rows = trial_rows(store, name, found, kept)
    columns = TRIAL_COLUMNS if console().width >= ROOMY else TRIAL_COLUMNS[:-2]
    print_rows(rows, columns, form)


@app.command("show")
def show_trial(
    study_or_number: StudyOrNumber,
    number: NumberArgument = None,
    db: DatabasesOption = None,
    form: FormatOption = Format.TABLE,
    log: Annotated[bool, typer.Option("--log", help="Print only the output of the training code.")] = False,
    repro: Annotated[
        bool, typer.Option("--repro", help="Print only the command that repeats the trial; notes go to stderr.")
    ] = False,
) -> None:
    """Show a trial's configuration, learning curve, environment and outcome."""
    if log:
        exclude("--log", {"--repro": repro})
    from bssearch.exchange.trial_rows import trial_document

    study, number = study_and_number(study_or_number, number)
    with study_to_read(db, study) as (store, name):
        found = store.trials.get(name, number)
        if log:
            _print_log(store, name, found)
            return
        if repro:
            from bssearch.commands.rerun import reproduction

            again = reproduction(store, name, number, names_database=bool(db))
            show(form, lambda: _print_reproduction(again), lambda: asdict(again), lambda: [asdict(again)])
            return
        curve = store.trials.observations(name, number)
        environment = store.trials.environments(name).get(number)
        spec = store.trials.spec(name, number)
    row = trial_document(found, curve, environment, spec) if form is not Format.TABLE else {}
    show(form, lambda: _print_trial(name, found, curve, environment), lambda: row, lambda: [row])


def _print_log(store: Store, study: str, found: TrialRecord) -> None:
    printed = store.trials.log(study, found.number)
    write(printed or "")
    if not printed:
        why = "has no log" if found.state.is_finished else f"is {found.state}; read the log after the trial's end"
        typer.echo(f"trial {found.number} of {study} {why}", err=True)


def _print_reproduction(found: Reproduction) -> None:
    for line in found.notes:
        typer.echo(f"# {visible(line)}", err=True)
    write(f"{found.command}\n")


def _print_trial(study: str, found: TrialRecord, curve: Sequence[Observation], environment: Environment | None) -> None:
    from bssearch.exchange.trial_rows import trial_row
    from bssearch.records import sparkline

    outcome = found.outcome
    reason = f": {outcome.reason}" if outcome else ""
    one, how = ("run", "imported") if found.is_imported else ("trial", found.phase.value)
    say(
        f"{one} {found.number} of {study} ({how}) {found.state.value}{reason}",
        *(
            f"  {key:22} {cell(value)}"
            for key, value in trial_row(found).items()
            if key not in {"number", "phase", "state", "reason", "warnings"} and value is not None
        ),
    )
    if found.configuration.grows:
        _print_stages(found, curve)
    if environment is not None:
        known = {**asdict(environment), "libraries": ", ".join(environment.libraries) or None}
        where = ", ".join(f"{key} {cell(value)}" for key, value in known.items() if value is not None)
        say(f"  environment            {where}")
    say(*(f"  warning: {warning}" for warning in (outcome.warnings if outcome else ())))
    if curve:
        metrics = [one.metric for one in curve]
        say(
            f"  metric {cell(metrics[0])} {sparkline(metrics)} {cell(metrics[-1])}",
            f"  {plural(len(curve), 'evaluation')} over {cell(curve[-1].train_seconds)} train seconds",
        )
    if outcome and outcome.traceback:
        say(outcome.traceback)


def _print_stages(found: TrialRecord, curve: Sequence[Observation]) -> None:
    from bssearch.records import growing_schedule, run_stages

    schedule = growing_schedule(found.configuration)
    say(f"  batch {schedule.in_words}; learning rate {schedule.rate_rule.in_words}")
    if stages := run_stages(found, curve):
        print_table([asdict(one) for one in stages], STAGE_COLUMNS)


@app.command("add")
def add(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STUDY] KEY=VALUE...",
            help="Values that differ from the study's default. STUDY is optional if the database has only one study.",
        ),
    ] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Queue your own configuration as the next trial."""
    from bssearch.analysis.shape import parameters_of

    values = words or []
    named = values[:1] if "=" not in "".join(values[:1]) else []
    study = study_name(db, named[0] if named else None)
    with existing_store(db) as store:
        number, configuration = bssearch.enqueue(store, study, dict(_parse(value) for value in values[len(named) :]))
    parameters = {"batch_size": configuration.batch_size, **parameters_of(configuration)}
    told = ", ".join(f"{name} {cell(value)}" for name, value in parameters.items())
    tell(form, f"trial {number} of {study} is queued: {told}", study=study, number=number, **parameters)


def _parse(text: str) -> tuple[str, ParameterValue]:
    from bssearch.spec import parse_value

    name, separator, value = text.partition("=")
    require(separator and name and value, f"{text!r} must have the form KEY=VALUE, such as batch_size=64")
    # YAML reads 4000:32 as a number in base 60.
    return name, value if name == BATCH_STAGES else parse_value(value, text)


RERUN_COLUMNS = ("run", "state", "all_steps", "steps_to_target", "time_to_target_s", "train_seconds", "final_metric")


@app.command("rerun")
@launched("db", "workload", "data_dir", "allow_busy", "verbose")
def rerun(
    study_or_number: StudyOrNumber,
    number: NumberArgument = None,
    *,
    launch: Launch,
    runs: Annotated[int, typer.Option(min=1, help="Number of reruns.")] = 1,
    form: FormatOption = Format.TABLE,
) -> None:
    """Rerun a stored trial without storing the rerun, and compare the results."""
    study, number = study_and_number(study_or_number, number)
    with watched(launch) as shown:
        found = bssearch.rerun(study_name(launch.db, study), number, shown, runs=runs)
    show_model(form, found, print_rerun, found.runs)


def print_rerun(found: Rerun) -> None:
    print_table(
        [_row("stored", found.then), *(_row(str(index), one) for index, one in enumerate(found.runs, start=1))],
        RERUN_COLUMNS,
    )
    say(*sentences(found))
    if found.differences:
        print_table([one.model_dump() for one in found.differences], ("name", "then", "now"))


def _row(name: str, ran: Ran) -> dict[str, object]:
    return {"run": name, "all_steps": ran.steps, **ran.model_dump(mode="json")}


def sentences(found: Rerun) -> Iterator[str]:
    yield _steps(found)
    if found.time_ratio is not None:
        end = "the target" if found.steps_ratio is not None else "the last common evaluation"
        yield f"Until {end}, {_typical(found)} took {cell(found.time_ratio)} times the stored train seconds."
    yield (
        "Differences from the stored environment:"
        if found.differences
        else "No difference from the stored environment is known."
    )
    if not found.differences and found.identical is False:
        yield (
            "GPU kernels may sum in a different order unless `training.deterministic` is true. "
            "A workload may draw random numbers that ignore the seed."
        )


def _typical(found: Rerun) -> str:
    return "the rerun" if len(found.runs) == 1 else "the median rerun"


def _steps(found: Rerun) -> str:
    named = f"Trial {found.trial} of {found.study}, batch {found.batch_size}, seed {found.seed}"
    subject, has = ("the rerun", "has") if len(found.runs) == 1 else ("the reruns", "have")
    if found.identical:
        count = max(len(one.evaluations) for one in found.runs)
        return f"{named}: {subject} {has} the same metrics, bit for bit ({plural(count, 'evaluation')} compared)."
    if found.identical is None:
        end = f"{found.then.state.value}, after {found.then.steps} steps"
        return f"{named}: {subject} had the same end ({end}), but the runs have no evaluations to compare."
    first = [one.first_difference_step for one in found.runs if one.first_difference_step is not None]
    largest = [one.largest_difference for one in found.runs if one.largest_difference is not None]
    states = sorted({one.state.value for one in found.runs} - {found.then.state.value})
    differs = [
        (
            found.steps_ratio is not None,
            f"{_typical(found)} took {cell(found.steps_ratio)} times the steps to the target",
        ),
        (
            first,
            f"the metric differs from step {min(first, default=0)} on, by up to {cell(max(largest, default=0.0))}",
        ),
        (states, f"the rerun ended as {' and '.join(states)} instead of {found.then.state.value}"),
    ]
    parts = [*(part for holds, part in differs if holds), *([] if states else _ends(found))]
    return f"{named}: the rerun differs: {'; '.join(parts) or 'the outcomes differ'}."


def _ends(found: Rerun) -> list[str]:
    from bssearch.commands.rerun import ENDS_BY_ITSELF, FAILURES

    then = found.then
    fewest = min(found.runs, key=lambda one: len(one.evaluations))
    steps = sorted({one.steps for one in found.runs} - {then.steps})
    reasons = sorted({one.reason for one in found.runs} - {then.reason})
    differs = [
        (
            fewest.only_then or fewest.only_now,
            f"{len(fewest.evaluations)} evaluations are in both trainings, {fewest.only_then} only in the stored "
            f"trial, {fewest.only_now} only in the rerun",
        ),
        (
            steps and then.state in ENDS_BY_ITSELF,
            f"the rerun ended after {' and '.join(map(str, steps))} steps instead of {then.steps}",
        ),
        (
            reasons and then.state in FAILURES,
            f"the rerun's reason is {' and '.join(map(repr, reasons))} instead of {then.reason!r}",
        ),
    ]
    return [part for holds, part in differs if holds]
