"""The commands that show studies and their trials, and the JSON schemas of specs and answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.arguments import (
    DatabaseOption,
    DatabasesOption,
    DeviceFilter,
    Export,
    ObjectiveFilter,
    PrecisionFilter,
    StudyArgument,
    WorkloadFilter,
    store_to_read,
    study_to_read,
)
from bssearch.cli.output import (
    Format,
    FormatOption,
    cell,
    console,
    note,
    print_json,
    print_rows,
    print_table,
    show,
    show_model,
    write,
)
from bssearch.errors import NotFoundError, UsageError
from bssearch.pages.words import visible
from bssearch.records import Environment, Observation, Phase, TrialRecord, TrialState

if TYPE_CHECKING:
    from bssearch.commands.across.answers import AcrossAnswer
    from bssearch.commands.quick import TrackRecord
    from bssearch.commands.rerun import Reproduction
    from bssearch.commands.trials import Status
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


MOST_TOLD = 3
"""Disagreements that people are told at most: a choice; JSON has all of them."""


def _print_answers(found: AcrossAnswer) -> None:
    """Print for people what each study has found, and in a sentence whether they agree."""
    from bssearch.commands.across.answers import ANSWERED, answered_row, in_words

    out = console()
    print_table([answered_row(one) for one in found.answers], ANSWERED)
    for sentence in in_words(found.agreement):
        out.print(sentence, style="bold")
    told = found.agreement.disagreements
    for disagreement in told[:MOST_TOLD]:
        out.print(disagreement.message)
    if len(told) > MOST_TOLD:
        out.print(f"{len(told) - MOST_TOLD} more pairs do not agree: --format json has them.")
    for one in found.answers:
        if one.copy_of is not None:
            out.print(f"note on {one.study} in {one.database}: it is a copy of {one.copy_of}, and does not count again")
        if one.note is not None:
            out.print(f"note on {one.study}: {one.note}")


KEPT_COLUMNS = ("study", "said", "interval", "found", "flat_range", "holds", "time_ratio")


class Schema(StrEnum):
    """What a JSON Schema can be printed of."""

    SPEC = "spec"
    BEST = "best"


BASES = {
    "steps_x_step_time": " (steps × step time: others disturbed it)",
    "wall": " (by the wall clock, evaluations included)",
    "reported": " (as the program reports)",
}
"""Whose seconds a time is, where bssearch did not measure it."""


def studies(
    db: DatabasesOption = None,
    form: FormatOption = Format.TABLE,
    everything: Annotated[bool, typer.Option("--all", help="The archived ones, too.")] = False,
    workload: WorkloadFilter = None,
    device: DeviceFilter = None,
    target: Annotated[
        str | None, typer.Option(metavar="VALUE|METRIC=VALUE", help="Only studies with this target.")
    ] = None,
    objective: ObjectiveFilter = None,
    precision: PrecisionFilter = None,
) -> None:
    """List the studies of one database or several."""
    from bssearch.commands.across.databases import open_databases
    from bssearch.commands.across.matching import StudyFilter, study_rows

    asked = StudyFilter.of(workload=workload, device=device, target=target, objective=objective, precision=precision)
    with open_databases(db) as stores:
        rows = [row for store in stores for row in study_rows(store, asked, archived=everything)]
        several = len(stores) > 1
    columns = ["name", "workload", "target", "trials", "reached", "running", "created_by", "created_at"]
    columns[1:1] = ["database"] if several else []
    columns[-5:-5] = ["device"] if device is not None else []
    print_rows(rows, [*columns, "archived_at"] if everything else columns, form)


def status(study: StudyArgument = None, db: DatabasesOption = None, form: FormatOption = Format.TABLE) -> None:
    """Show how far a study is: trials by phase and state, the budget, the fastest trial so far."""
    from bssearch.commands.trials import status as status_of

    with study_to_read(db, study) as (store, name):
        found = status_of(store, name)
    show(form, lambda: print_status(found), found.document, lambda: [found.document()])


def print_status(found: Status) -> None:
    """Print for people how far a study is; of an imported one, what its runs came to: nothing was run here."""
    out = console()
    one, fastest = ("run", "fastest") if found.is_imported else ("trial", "fastest so far")
    spent, budget, running = found.spent_trials, found.budget_trials, len(found.running)
    # Enqueued trials run whatever the budget says.
    of = f"of {budget} search trials" if spent <= budget else f"search trials, more than the budget of {budget}"
    ended = "" if found.search_ended is None else f"; search ended ({found.search_ended})"
    of = "imported runs" if found.is_imported else of
    out.print(f"{found.study}: {spent} {of}{f', {running} running' if running else ''}{ended}")
    if found.fastest is not None:
        best = found.fastest
        basis = BASES.get(best.basis, "")
        out.print(f"{fastest}: {one} {best.trial}, batch {best.batch_size}, {cell(best.time_to_target_s)} s{basis}")
    rows = [
        {"phase": phase, "state": state, "trials": count}
        for phase, states in found.trials.items()
        for state, count in states.items()
    ]
    if not found.is_imported:
        print_table(rows, ("phase", "state", "trials"))
        return
    counts = sum(map(Counter, found.trials.values()), Counter[str]())
    print_table([{"state": state, "runs": count} for state, count in counts.items()], ("state", "runs"))


def best(
    study: StudyArgument = None,
    db: DatabasesOption = None,
    form: FormatOption = Format.TABLE,
    export: Annotated[Export | None, typer.Option(help="Print only what to train with, for a program to read.")] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="With --export: the best batch that grows; as python, a training loop.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="VALUE|METRIC=VALUE",
            help="Of a study: answer for a target easier than its own, from the stored curves. "
            "Across studies: only those with this target.",
        ),
    ] = None,
    workload: WorkloadFilter = None,
    device: DeviceFilter = None,
    objective: ObjectiveFilter = None,
    precision: PrecisionFilter = None,
) -> None:
    """Say which batch size is optimal, with which configuration, and how sure that is.

    With --workload, --device, --objective, --precision or --target METRIC=VALUE and no study: what all studies that
    match have found, and whether they agree.
    """
    from bssearch.commands.across.matching import StudyFilter

    if export is not None and form is not Format.TABLE:
        raise UsageError(f"--export {export} and --format {form} exclude each other: leave one out")
    if schedule and export is None:
        raise UsageError("--schedule says what --export writes", hint="add --export yaml, args or python")
    asked = StudyFilter.of(workload=workload, device=device, target=target, objective=objective, precision=precision)
    about_many = asked.conditions.keys() - {"target"}
    if study is not None and about_many:
        raise UsageError(f"{study!r} is one study: {asked.in_words} says which of many", hint="leave one of both out")
    if about_many or (study is None and asked.metric is not None):
        if export is not None:
            raise UsageError("--export writes what one study has found", hint="name it: bssearch best STUDY --export …")
        from bssearch.commands.across.answers import ANSWERED, answers_in
        from bssearch.commands.across.databases import open_databases

        with open_databases(db) as stores:
            every = answers_in(stores, asked)
        show_model(form, every, _print_answers, every.answers, ANSWERED)
        return
    from bssearch.cli.answer import exported, exported_schedule, grave, print_found
    from bssearch.search.finding import answer

    with study_to_read(db, study) as (store, name):
        if asked.metric is not None and asked.metric != (metric := store.study(name).target.metric):
            raise UsageError(f"--target {asked.metric}: the target of study {name!r} is of {metric}")
        found = answer(store, name, asked.target)
        if schedule:
            from bssearch.commands.growing import scheduled_training

            scheduled = scheduled_training(store, name, found)
    if export is None:
        print_found(found, form)
        return
    write(exported_schedule(found, scheduled, export) if schedule else exported(found, export))
    for caveat in (*(scheduled.notes if schedule else ()), *grave(found)):
        note(caveat)
    if not schedule and found.batch_schedule is not None and found.batch_schedule.saves_time == "yes":
        note("a batch that grows saves time: --schedule exports it")


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


def track_record(db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """Show how often the quick answers of a database held, once a search had found the optimum."""
    from bssearch.commands.quick import track_record as kept

    with store_to_read(db) as store:
        found = kept(store)
    show_model(form, found, print_track_record, found.studies)


def print_track_record(found: TrackRecord) -> None:
    """Print a track record for people."""
    out = console()
    rows = [
        {
            "study": one.study,
            "said": one.batch_size,
            "interval": "{} to {}".format(*one.interval),
            "found": one.found_batch_size,
            "flat_range": "{} to {}".format(*one.found_flat_range),
            "holds": "yes" if one.holds else "no",
            "time_ratio": one.time_ratio,
        }
        for one in found.studies
    ]
    if rows:
        print_table(rows, KEPT_COLUMNS)
        ratio = "" if found.median_time_ratio is None else f"; the median time ratio is {found.median_time_ratio:.3g}"
        out.print(f"{found.held} of {len(rows)} quick answers held{ratio}.")
    else:
        out.print("No quick answer has been held against a search yet.")
    if found.waiting:
        out.print(f"Without a confirmed search: {', '.join(found.waiting)}.")


def price(
    study: Annotated[str, typer.Argument(help="The study's name.")],
    step_times: Annotated[
        Path,
        typer.Option(help="CSV with batch_size and step_seconds, or what `probe step-time --format json` printed."),
    ],
    device: Annotated[str | None, typer.Option(help="The other device's name; default: the file's.")] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Predict the optimal batch size on another device: the study's steps × that device's step times."""
    from bssearch.cli.answer import print_found
    from bssearch.commands.answer import predict

    with store_to_read(db) as store:
        print_found(predict(store, study, step_times, device), form)
