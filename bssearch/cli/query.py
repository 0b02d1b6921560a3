"""The commands that ask a database: status, studies, trials, trial, best, schema."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bssearch.cli.answer import print_found
from bssearch.cli.export import Export, exported, grave
from bssearch.cli.output import (
    DatabaseOption,
    Format,
    FormatOption,
    StudyArgument,
    cell,
    console,
    print_json,
    print_rows,
    print_table,
    write,
)
from bssearch.errors import NotFoundError, UsageError
from bssearch.records import Phase, TrialRecord, TrialState, outcome_fields

if TYPE_CHECKING:
    from bssearch.storage.repository import Store

ROOMY = 120
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


class Schema(StrEnum):
    """What a JSON Schema can be printed of."""

    SPEC = "spec"
    BEST = "best"


def studies(
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
    everything: Annotated[bool, typer.Option("--all", help="The archived ones, too.")] = False,
) -> None:
    """List the studies of a database."""
    with _store(db) as store:
        rows = [
            {
                "name": one.name,
                "workload": one.workload,
                "target": one.target,
                "objective": one.objective,
                "trials": one.trials,
                "reached": one.reached,
                "running": one.running,
                "created_by": one.created_by,
                "created_at": one.created_at.isoformat(timespec="seconds"),
                "archived_at": one.archived_at and one.archived_at.isoformat(timespec="seconds"),
            }
            for one in store.studies()
            if everything or one.archived_at is None
        ]
    columns = ["name", "workload", "target", "trials", "reached", "running", "created_by", "created_at"]
    print_rows(rows, [*columns, "archived_at"] if everything else columns, form)


def status(study: StudyArgument = None, db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """Show how far a study is: trials by phase and state, the budget, the fastest trial so far."""
    from bssearch.analysis.objectives.seconds import seconds_to_target
    from bssearch.analysis.optimum import fastest
    from bssearch.spec import StudySpec
    from bssearch.spec.model import IMPORTED

    with _store(db) as store:
        name = study_name(store, study)
        spec = StudySpec.model_validate(store.study(name).spec)
        found = store.trials(name)
    is_imported = spec.workload == IMPORTED
    searched = [trial for trial in found if is_imported or trial.phase is Phase.SEARCH]
    running = [trial.number for trial in found if trial.state is TrialState.RUNNING]
    best_trial = fastest(searched)
    counts: dict[str, dict[str, int]] = {}
    for trial in found:
        by_state = counts.setdefault(trial.phase.value, {})
        by_state[trial.state.value] = by_state.get(trial.state.value, 0) + 1
    spent, budget = sum(not trial.state.is_missing for trial in searched), spec.budget.trials
    summary = {
        "study": name,
        "budget_trials": budget,
        "spent_trials": spent,
        "running": running,
        "train_seconds": sum(trial.outcome.train_seconds for trial in found if trial.outcome),
        "fastest": None
        if best_trial is None
        else {
            "trial": best_trial.number,
            "batch_size": best_trial.configuration.batch_size,
            "time_to_target_s": seconds_to_target(best_trial),
        },
        "trials": counts,
    }
    if form is not Format.TABLE:
        print_json(summary) if form is Format.JSON else print_rows([summary], list(summary), form)
        return
    out = console()
    # Enqueued trials run whatever the budget says.
    of = f"of {budget} search trials" if spent <= budget else f"search trials, more than the budget of {budget}"
    out.print(f"{name}: {spent} {'imported runs' if is_imported else of}", end="")
    out.print(f", {len(running)} running" if running else "")
    if best_trial is not None:
        seconds = cell(seconds_to_target(best_trial))
        out.print(
            f"fastest so far: trial {best_trial.number}, batch {best_trial.configuration.batch_size}, {seconds} s"
        )
    rows = [
        {"phase": phase, "state": state, "trials": count}
        for phase, states in counts.items()
        for state, count in states.items()
    ]
    print_table(rows, ("phase", "state", "trials"))


def trials(
    study: StudyArgument = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
    phase: Annotated[Phase | None, typer.Option(help="Only this phase.")] = None,
    state: Annotated[TrialState | None, typer.Option(help="Only this state.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Only this batch size.")] = None,
) -> None:
    """List the trials of a study."""
    with _store(db) as store:
        found = store.trials(study_name(store, study))
    rows = [
        trial_row(trial)
        for trial in found
        if (phase is None or trial.phase is phase)
        and (state is None or trial.state is state)
        and (batch_size is None or trial.configuration.batch_size == batch_size)
    ]
    print_rows(rows, TRIAL_COLUMNS if console().width >= ROOMY else TRIAL_COLUMNS[:-2], form)


def trial(
    study_or_number: Annotated[str, typer.Argument(metavar="[STUDY] NUMBER", help="The trial, and its study.")],
    number: Annotated[int | None, typer.Argument(hidden=True)] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
    log: Annotated[bool, typer.Option("--log", help="Print only what the training code printed in it.")] = False,
) -> None:
    """Show one trial: its configuration, its curve, and why it ended."""
    from dataclasses import asdict

    from bssearch.curves import sparkline

    study = None if number is None else study_or_number
    if number is None:
        if not study_or_number.isdecimal():
            raise UsageError(f"trial {study_or_number!r}: it takes the number of a trial, after the name of its study")
        number = int(study_or_number)
    with _store(db) as store:
        name = study_name(store, study)
        if number >= 2**31:
            raise NotFoundError(f"study {name!r} has no trial {number}")
        found = store.trial(name, number)
        if log:
            printed = store.log(name, number)
            write(printed or "")
            if not printed:
                why = "printed nothing" if found.state.is_finished else "has not ended, and its log comes with its end"
                typer.echo(f"trial {number} of {name} {why}", err=True)
            return
        curve = store.observations(name, number)
        environment = store.environment_of(name, number)
    if form is not Format.TABLE:
        row = {
            **trial_row(found),
            "traceback": found.outcome.traceback if found.outcome else None,
            "environment": None if environment is None else asdict(environment),
            "observations": [
                {"step": one.step, "train_seconds": one.train_seconds, "metric": one.metric, "loss": one.loss}
                for one in curve
            ],
        }
        print_json(row) if form is Format.JSON else print_rows([row], list(row), form)
        return
    out = console()
    outcome = found.outcome
    reason = f": {outcome.reason}" if outcome else ""
    out.print(f"trial {number} of {name} ({found.phase.value}) {found.state.value}{reason}")
    for key, value in trial_row(found).items():
        if key not in {"number", "phase", "state", "reason", "warnings"} and value is not None:
            out.print(f"  {key:22} {cell(value)}")
    if environment is not None:
        where = ", ".join(f"{key} {cell(value)}" for key, value in asdict(environment).items() if value is not None)
        out.print(f"  environment            {where}")
    for warning in outcome.warnings if outcome else ():
        out.print(f"  warning: {warning}")
    if curve:
        metrics = [one.metric for one in curve]
        out.print(f"  metric {cell(metrics[0])} {sparkline(metrics)} {cell(metrics[-1])}")
        out.print(f"  {len(curve)} evaluations over {cell(curve[-1].train_seconds)} train seconds")
    if outcome and outcome.traceback:
        out.print(outcome.traceback)


def best(
    study: StudyArgument = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
    export: Annotated[Export | None, typer.Option(help="Print only what to train with, for a program to read.")] = None,
    target: Annotated[
        float | None, typer.Option(help="Answer for a target easier than the study's, from the stored curves.")
    ] = None,
) -> None:
    """Say which batch size is optimal, with which configuration, and how sure that is."""
    from bssearch.search.finding import answer

    if export is not None and form is not Format.TABLE:
        raise UsageError(f"--export {export} and --format {form} exclude each other: leave one out")
    with _store(db) as store:
        found = answer(store, study_name(store, study), target)
    if export is not None:
        write(exported(found, export))
        for caveat in grave(found):
            typer.echo(f"note: {caveat}", err=True)
    else:
        print_found(found, form)


def schema(
    of: Annotated[Schema, typer.Argument(help="spec: what a study file holds; best: what best prints.")],
) -> None:
    """Print a JSON Schema."""
    if of is Schema.SPEC:
        from bssearch.spec import StudySpec

        print_json(StudySpec.model_json_schema())
    else:
        from bssearch.analysis.answer import Answer

        print_json(Answer.model_json_schema(mode="serialization"))


UNKNOWN_AS_ZERO = frozenset({"steps", "samples", "train_seconds"})
"""What an imported run has as 0 where its table does not say it."""

UNKNOWN_OF_IMPORTED = (
    "uncapped",
    "train_seconds_limit",
    "eval_every_steps",
    "threads",
    "evaluation_seconds",
    "warmup_seconds",
    "other_seconds",
    "wall_seconds",
    "contended",
)
"""What nobody knows of a run that was made elsewhere."""


def trial_row(record: TrialRecord) -> dict[str, Any]:
    """Return a trial as a flat row: the contract of ``trials --format json``, and more."""
    from dataclasses import asdict

    outcome = outcome_fields(record.outcome) if record.outcome else {}
    outcome.pop("traceback", None)
    outcome.pop("state", None)
    configuration = asdict(record.configuration)
    if record.is_imported:
        outcome = {name: value for name, value in outcome.items() if value or name not in UNKNOWN_AS_ZERO}
    empty = dict.fromkeys(("train_seconds", "time_to_target_s", "steps_to_target", "final_metric", "reason"))
    return {
        "number": record.number,
        "state": record.state.value,
        "phase": record.phase.value,
        **{name: value for name, value in configuration.items() if name != "parameters"},
        **configuration["parameters"],
        "seed": record.seed,
        "uncapped": record.uncapped,
        "retry_of": record.retry_of,
        "sampled": None if record.sampled is None else dict(record.sampled),
        "train_seconds_limit": record.train_seconds_limit,
        "eval_every_steps": record.eval_every_steps,
        "threads": record.threads,
        **empty,
        **outcome,
        "steps_x_step_time_s": record.steps_x_step_time_s,
        **(dict.fromkeys(UNKNOWN_OF_IMPORTED) if record.is_imported else {}),
    }


def _store(db: str | None) -> Store:
    from bssearch.storage.repository import open_store

    return open_store(db, write=False)


def study_name(store: Store, given: str | None) -> str:
    """Return the study that is named, or the only one there is. Raises `NotFoundError` and `UsageError`."""
    if given is not None:
        return given
    found = store.studies()
    names: Sequence[str] = [one.name for one in found if one.archived_at is None]
    if not names:
        if found:
            raise NotFoundError("every study of the database is archived", hint="bssearch studies --all lists them")
        raise NotFoundError("the database holds no study yet", hint="bssearch run SPEC makes one")
    if len(names) > 1:
        raise UsageError(f"name the study: {', '.join(names)}")
    return names[0]
