"""``bssearch study``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bssearch.cli.arguments import (
    DatabaseOption,
    DatabasesOption,
    DeviceFilter,
    NameArgument,
    ObjectiveFilter,
    PrecisionFilter,
    StudyArgument,
    WorkloadFilter,
    exclude,
    existing_store,
    launched,
    store_to_read,
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
)
from bssearch.commands.launch import Launch
from bssearch.errors import CheckpointError, require
from bssearch.records.text import plural

if TYPE_CHECKING:
    from bssearch.analysis.rules.audit import Audit, LearningRateSlope, RuleFinding
    from bssearch.analysis.rules.rule_book import Regret
    from bssearch.commands.quick import TrackRecord
    from bssearch.commands.report import Comparison
    from bssearch.commands.trials import Status

app = typer.Typer(help="List, show, confirm, audit, compare and tidy stored studies.", no_args_is_help=True)


@app.command("list")
def list_studies(
    db: DatabasesOption = None,
    form: FormatOption = Format.TABLE,
    everything: Annotated[bool, typer.Option("--all", help="Include archived studies.")] = False,
    workload: WorkloadFilter = None,
    device: DeviceFilter = None,
    target: Annotated[str | None, typer.Option(metavar="VALUE|METRIC=VALUE", help="Filter by target.")] = None,
    objective: ObjectiveFilter = None,
    precision: PrecisionFilter = None,
) -> None:
    """List the studies of one or more databases."""
    from bssearch.commands.across.answers import StudyFilter, study_rows
    from bssearch.commands.across.databases import open_databases

    asked = StudyFilter.of(workload=workload, device=device, target=target, objective=objective, precision=precision)
    with open_databases(db) as stores:
        rows = [
            row
            for store in stores
            for row in study_rows(store, filter(asked.matches, store.studies.summaries()), archived=everything)
        ]
        several = len(stores) > 1
    if form is Format.TABLE:
        rows = [{**row, "created_at": row["created_at"].replace("T", " ")[:16]} for row in rows]
    columns = (
        ["name", "target", "answer", "trials", "running"]
        if console().width < ROOMY
        else ["name", "workload", "target", "answer", "trials", "reached", "running", "created_by", "created_at"]
    )
    columns[1:1] = ["database"] if several else []
    columns[-3:-3] = ["device"] if device is not None else []
    print_rows(rows, [*columns, "archived_at"] if everything else columns, form)


# Basis of a time in words, unless bssearch measured the time itself.
BASES = {
    "steps_x_step_time": " (contended: steps × step time)",
    "wall": " (by the wall clock, evaluations included)",
    "reported": " (reported by the program or the log)",
}


MEANINGS = {
    "queued": "trains once a slot is free",
    "running": "trains now",
    "paused": "has a checkpoint; may resume",
    "reached": "reached the target",
    "pruned": "stopped early in favour of other trials",
    "capped": "stopped at a limit below budget.trial_train_seconds",
    "exhausted": "trained to the limit without reaching the target",
    "oom": "out of memory",
    "diverged": "the loss is not finite, or the metric stays at chance",
    "failed": "ended with an error",
    "lost": "the driver seems dead; bssearch may retry the trial",
    "cancelled": "stopped without a result",
}


@app.command("show")
def show_study(study: StudyArgument = None, db: DatabasesOption = None, form: FormatOption = Format.TABLE) -> None:
    """Show a study's budget, fastest trial, and trials by phase and state."""
    from bssearch.commands.trials import status as status_of

    with study_to_read(db, study) as (store, name):
        found = status_of(store, name)
    show(form, lambda: print_status(found), lambda: asdict(found), lambda: [asdict(found)])


def print_status(found: Status) -> None:
    one, fastest = ("run", "fastest") if found.is_imported else ("trial", "best single run")
    spent, budget, running = found.spent_trials, found.budget_trials, len(found.running)
    # Enqueued trials may exceed the budget.
    of = f"of {budget} search trials" if spent <= budget else f"search trials, more than the budget of {budget}"
    ended = "" if found.search_ended is None else f"; search ended ({found.search_ended})"
    of = f"imported run{'s' * (spent != 1)}" if found.is_imported else of
    say(f"{found.study}: {spent} {of}{f', {running} running' if running else ''}{ended}")
    if (best := found.fastest) is not None:
        seconds = f"{cell(best.time_to_target_s)} s{BASES.get(best.basis, '')}"
        say(f"{fastest}: {one} {best.trial}, batch {best.batch_size}, {seconds}")
    rows = [
        {"phase": phase, "state": state, "trials": count, "meaning": MEANINGS[state]}
        for phase, states in found.trials.items()
        for state, count in states.items()
    ]
    if not found.is_imported:
        print_table(rows, ("phase", "state", "trials", "meaning"))
        return
    counts = sum(map(Counter, found.trials.values()), Counter[str]())
    print_table([{"state": state, "runs": count} for state, count in counts.items()], ("state", "runs"))


TO_BUDGET_RUNS = 3  # default runs per configuration with --to-budget, the fewest with an interval


@app.command("confirm")
@launched("db", "workload", "data_dir", "allow_busy", "verbose")
def confirm(
    study: StudyArgument = None,
    *,
    launch: Launch,
    runs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs per finalist, at least the stored number. With --to-budget, the default is 3."),
    ] = None,
    max_runs: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum runs per finalist if the finalists are too close to distinguish."),
    ] = None,
    train_seconds: Annotated[
        float | None,
        typer.Option(help="Stop adding runs beyond --runs after this many train seconds of confirmation."),
    ] = None,
    to_budget: Annotated[
        bool,
        typer.Option(
            "--to-budget", help="Train each batch size's best configuration to the time limit, past the target."
        ),
    ] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Train the finalists again with fresh seeds, and print the answer."""
    if to_budget:
        exclude("--to-budget", {"--max-runs": max_runs, "--train-seconds": train_seconds})
    from bssearch.cli.answer import print_found
    from bssearch.commands.opening import stored_spec
    from bssearch.commands.run import confirm_study, with_confirmation

    spec, launch = stored_spec(
        study_name(launch.db, study), launch, to_run=True, runs_code=launch.workload is None, connects=True
    )
    if not to_budget:
        spec = with_confirmation(spec, runs=runs, max_runs=max_runs, train_seconds=train_seconds)
    with watched(launch) as shown:
        to_budget_runs = (runs or TO_BUDGET_RUNS) if to_budget else None
        answer = confirm_study(spec, shown, spares=runs is None, to_budget_runs=to_budget_runs)
    print_found(answer, form, db=launch.db)


SLOPE_NAMES = {0.0: "0 (none)", 0.5: "½ (√batch)", 1.0: "1 (linear)"}


@app.command("audit")
@launched("db", "workload", "data_dir", "allow_busy", "verbose")
def audit(
    study: StudyArgument = None,
    *,
    launch: Launch,
    train_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Start no audit run after this many train seconds of audit runs.",
            show_default="20 times the limit of a trial",
        ),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs per configuration of a rule.",
            show_default="confirm.runs; up to confirm.max_runs while undecided",
        ),
    ] = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="Judge only stored runs; start no run.")] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Compare rules of thumb with the tuned optimum."""
    from bssearch.commands.opening import stored_spec
    from bssearch.commands.run import audit_study

    name, runs_code = study_name(launch.db, study), launch.workload is None and not no_run
    spec, launch = stored_spec(name, launch, runs_code=runs_code, connects=not no_run)
    with watched(launch) as shown:
        found = audit_study(spec, shown, runs=runs, train_seconds=train_seconds, run=not no_run)
    show_model(form, found, print_audit, found.rules)


def print_audit(found: Audit) -> None:
    print_table([audit_row(one) for one in found.rules], ("rule", "batch", "gives", "regret", "verdict", "note"))
    say(
        slope_line(found.learning_rate_slope),
        f"The runs for this audit took {found.spent_train_seconds:.3g} train seconds.",
    )


def audit_row(one: RuleFinding) -> dict[str, Any]:
    return {
        "rule": one.rule.value,
        "batch": None if one.batch_size is None else str(one.batch_size),
        "gives": _gives(one),
        "regret": _interval(one.regret),
        "verdict": one.verdict.replace("_", " ").upper(),
        "note": one.reason,
    }


def slope_line(slope: LearningRateSlope | None) -> str:
    if slope is None:
        return (
            "The slope of the tuned learning rate over batch size is unknown; search the learning rate at three or "
            "more batch sizes."
        )
    excluded = " and ".join(SLOPE_NAMES[one] for one in slope.excludes)
    return f"Tuned learning rate ∝ batch^{slope.estimate:.2f} [{slope.low:.2f}, {slope.high:.2f}]: " + (
        f"this interval excludes {excluded}." if excluded else "0, ½ (√batch) and 1 (linear) are all possible."
    )


def _gives(one: RuleFinding) -> str | None:
    from bssearch.analysis.rules.rule_book import CHANGED_PARAMETER

    name = CHANGED_PARAMETER.get(one.rule)
    if name is None or one.configuration is None:
        return None
    value = one.configuration[name]
    return f"{name.replace('_', ' ')} {f'{value:.4g}' if isinstance(value, float) else value}"


def _interval(regret: Regret | None) -> str | None:
    if regret is None:
        return None
    value = f"{'≥ ' if regret.at_least else ''}{regret.value:.3g}"
    if regret.low is None and regret.high is None:
        return value
    low, high = ("–" if end is None else f"{end:.3g}" for end in (regret.low, regret.high))
    return f"{value} [{low}, {high}]"


@app.command("compare")
def compare(
    studies: Annotated[
        list[str], typer.Argument(metavar="STUDY STUDY…", help="Studies to compare; the first study is the reference.")
    ],
    db: DatabasesOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show studies of one task side by side."""
    from bssearch.commands import report as reporting
    from bssearch.commands.across.databases import found_study, open_databases

    require(len(studies) > 1, f"compare needs at least two studies, not only {studies[0]!r}; name another study")
    with open_databases(db) as stores:
        found = reporting.compare([found_study(stores, name) for name in studies])
    document = [one.model_dump(mode="json") for one in found]
    rows = [{**one, "warnings": [warning["code"] for warning in one["warnings"]]} for one in document]
    show(form, lambda: _print_comparison(found), lambda: document, lambda: rows)


def _print_comparison(found: Sequence[Comparison]) -> None:
    from bssearch.commands.report import COMPARED, compared_row

    several = len({one.database for one in found}) > 1
    rows = [{**compared_row(one), "database": one.database} for one in found]
    print_table(rows, [COMPARED[0], "database", *COMPARED[1:]] if several else COMPARED)
    say(*(f"note on {one.study}: {warning.message}" for one in found for warning in one.warnings))
    for one in found:
        if one.optimal_batch_size is None:
            typer.echo(f"{one.study}: {one.note}", err=True)


@app.command("rename")
def rename(
    old: Annotated[str, typer.Argument(metavar="OLD", help="Current name of the study.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="New name of the study.")],
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Rename a study."""
    with existing_store(db) as store:
        store.studies.rename(old, new)
    tell(
        form,
        f"study {old} is now {new}; to resume the study, write `name: {new}` in the spec",
        study=new,
        renamed_from=old,
    )


@app.command("archive")
def archive(
    study: NameArgument,
    db: DatabaseOption = None,
    undo: Annotated[bool, typer.Option("--undo", help="Restore the study.")] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Hide a study from lists (--all shows it), and refuse new trials."""
    with existing_store(db) as store:
        store.studies.archive(study, archived=not undo)
    tell(
        form,
        f"study {study} is restored" if undo else f"study {study} is archived; restore the study with --undo",
        study=study,
        archived=not undo,
    )


@app.command("delete")
def delete(
    study: NameArgument,
    db: DatabaseOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Delete a study for good, with its trials and observations."""
    from bssearch.search.pruners.checkpoints import Checkpoints

    with existing_store(db) as store:
        trials, observations = len(store.trials.of(study)), store.trials.observation_count(study)
        what = f"study {study} with {plural(trials, 'trial')} and {plural(observations, 'observation')}"
        if not yes:
            require(
                sys.stdin.isatty(),
                f"cannot confirm the deletion of {what} without a terminal",
                hint=f"run `bssearch study delete {study} --yes`, or hide the study with `bssearch study archive`",
            )
            typer.echo(f"bssearch will delete {what} from {store.masked_url} for good", err=True)
            typed = typer.prompt("type the study's name to continue", default="", show_default=False, err=True)
            require(
                typed == study,
                f"the typed name {typed!r} is not {study!r}, so bssearch keeps the study",
                hint=f"repeat the command and type {study}",
            )
        checkpoints = Checkpoints(store.studies.get(study))
        store.studies.delete(study)
        try:
            checkpoints.clear()
        except CheckpointError as error:
            typer.echo(f"checkpoints of paused trials may remain: {error}; delete the files", err=True)
    tell(form, f"deleted {what}", study=study, trials=trials, observations=observations)


@app.command("track-record")
def track_record(db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """Compare quick answers with the optima that searches found."""
    from bssearch.commands.quick import track_record as kept

    with store_to_read(db) as store:
        found = kept(store)
    show_model(form, found, print_track_record, found.studies)


def print_track_record(found: TrackRecord) -> None:
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
        print_table(rows, ("study", "said", "interval", "found", "flat_range", "holds", "time_ratio"))
        ratio = "" if found.median_time_ratio is None else f"; the median slowdown is {found.median_time_ratio:.3g}×"
        say(
            f"{found.held} of {len(rows)} quick answers have an interval that overlaps the batch sizes within 5 % of "
            f"the best{ratio}."
        )
    else:
        say("No study has both a quick answer and a confirmed search yet.")
    if found.waiting:
        say(f"Studies with a quick answer but no confirmed search: {', '.join(found.waiting)}.")
