"""The commands that train: ``run``, ``confirm``, ``audit`` and ``rerun``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bssearch.cli.arguments import (
    NameArgument,
    SetOption,
    SpecArgument,
    launched,
    spec_to_run,
    watched,
)
from bssearch.cli.output import Format, FormatOption, cell, console, duration, print_table, show_model
from bssearch.commands.launch import Launch
from bssearch.errors import UsageError

if TYPE_CHECKING:
    from bssearch.analysis.rules.audit import Audit, LearningRateSlope, RuleFinding
    from bssearch.analysis.rules.regret import Regret
    from bssearch.commands.dry_run import DryRun
    from bssearch.commands.rerun import Ran, Rerun


@launched("db", "data_dir", "allow_changed_workload", "allow_busy")
def run(
    spec: SpecArgument,
    launch: Launch,
    overrides: SetOption = None,
    from_quick: Annotated[
        bool, typer.Option("--from-quick", help="Make the answer of bssearch quick first, where none is stored.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run and how long; run nothing.")] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Run a study to its end and print the answer; the same command again goes on where it stopped."""

    study, launch = spec_to_run(spec, overrides, launch)
    if dry_run:
        from bssearch.commands.dry_run import dry_run as planned

        plan = planned(study)
        show_model(form, plan, print_dry_run, [plan])
        return
    from bssearch.cli.answer import print_found
    from bssearch.commands.run import run_study

    with watched(launch) as shown:
        answer = run_study(study, shown, from_quick=from_quick)
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


TO_BUDGET_RUNS = 3
"""Runs of each configuration with --to-budget: the fewest that have an interval."""


@launched("db", "workload", "data_dir", "allow_busy")
def confirm(
    study: NameArgument,
    launch: Launch,
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
    form: FormatOption = Format.TABLE,
) -> None:
    """Run what is missing of a stored study's confirmation and print the answer; the same command again goes on.

    A workload file is looked up from this folder. What is asked here is stored with the study.
    """
    if to_budget and (max_runs is not None or train_seconds is not None):
        given = "--max-runs" if max_runs is not None else "--train-seconds"
        raise UsageError(f"--to-budget and {given} exclude each other: it makes --runs of each configuration")

    from bssearch.cli.answer import print_found
    from bssearch.commands.opening import stored_spec
    from bssearch.commands.run import confirm_study, with_confirmation

    spec = stored_spec(study, db=launch.db, to_run=True, runs_code=launch.workload is None, connects=True)
    if not to_budget:
        spec = with_confirmation(spec, runs=runs, max_runs=max_runs, train_seconds=train_seconds)
    with watched(launch) as shown:
        answer = confirm_study(spec, shown, to_budget_runs=(runs or TO_BUDGET_RUNS) if to_budget else None)
    print_found(answer, form)


AUDIT_COLUMNS = ("rule", "batch", "gives", "regret", "verdict", "note")
SLOPE_NAMES = {0.0: "0 (none)", 0.5: "½ (√batch)", 1.0: "1 (linear)"}


@launched("db", "workload", "data_dir", "allow_busy")
def audit(
    study: NameArgument,
    launch: Launch,
    train_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Start no more runs once those for the audit have trained for so long.",
            show_default="20 times the limit of a trial",
        ),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each configuration that a rule gives.", show_default="confirm.runs"),
    ] = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="Judge by what is stored; run nothing.")] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Hold rules of thumb against a study: run what each gives beside the tuned optimum, and say which held.

    Regret is the time to the target by the rule over that of the tuned optimum at the same batch size, with its 95 %
    interval. HELD: below 1.05. BROKE: above 1.10, or no run reached the target. The same command again goes on where it
    stopped; a workload file is looked up from this folder.
    """
    from bssearch.commands.audit import audit_study
    from bssearch.commands.opening import stored_spec

    spec = stored_spec(study, db=launch.db, runs_code=launch.workload is None and not no_run, connects=not no_run)
    with watched(launch) as shown:
        found = audit_study(spec, shown, runs=runs, train_seconds=train_seconds, run=not no_run)
    show_model(form, found, print_audit, found.rules)


def print_audit(found: Audit) -> None:
    """Print the rules as a table for people, and below it how the tuned learning rate follows the batch size."""
    print_table([audit_row(one) for one in found.rules], AUDIT_COLUMNS)
    out = console()
    out.print(slope_line(found.learning_rate_slope))
    out.print(f"The runs for this audit took {found.spent_train_seconds:.3g} train seconds.")


def audit_row(one: RuleFinding) -> dict[str, Any]:
    """Return a rule as a row for people."""
    return {
        "rule": one.rule.value,
        "batch": None if one.batch_size is None else str(one.batch_size),
        "gives": _gives(one),
        "regret": _interval(one.regret),
        "verdict": one.verdict.replace("_", " ").upper(),
        "note": one.reason,
    }


def slope_line(slope: LearningRateSlope | None) -> str:
    """Return how the tuned learning rate follows the batch size, as a sentence."""
    if slope is None:
        return "How the tuned learning rate follows the batch size is not known: it takes three tuned batch sizes."
    excluded = " and ".join(SLOPE_NAMES[one] for one in slope.excludes)
    return f"Tuned learning rate ∝ batch^{slope.estimate:.2f} [{slope.low:.2f}, {slope.high:.2f}]: " + (
        f"that excludes {excluded}." if excluded else "that excludes none of 0, ½ (√batch) and 1 (linear)."
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


RERUN_COLUMNS = ("run", "state", "all_steps", "steps_to_target", "time_to_target_s", "train_seconds", "final_metric")


@launched("db", "workload", "data_dir", "allow_busy")
def rerun(
    study: NameArgument,
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="The trial.")],
    launch: Launch,
    runs: Annotated[int, typer.Option(min=1, help="How often it is trained again.")] = 1,
    form: FormatOption = Format.TABLE,
) -> None:
    """Train a stored trial again as it was, store nothing, and say whether it comes out the same and what differs.

    A workload file is looked up from this folder. A trial that was stopped is run as far as it came.
    """
    from bssearch.commands.rerun import rerun as run_again

    with watched(launch) as shown:
        found = run_again(study, number, shown, runs=runs)
    show_model(form, found, print_rerun, found.runs)


def print_rerun(found: Rerun) -> None:
    """Print for people how a trial's reruns came out beside it."""
    out = console()
    rows = [_row("stored", found.then), *(_row(str(index), one) for index, one in enumerate(found.runs, start=1))]
    print_table(rows, RERUN_COLUMNS)
    for sentence in sentences(found):
        out.print(sentence)
    if found.differences:
        print_table([one.model_dump() for one in found.differences], ("name", "then", "now"))


def _row(name: str, ran: Ran) -> dict[str, object]:
    return {"run": name, "all_steps": ran.steps, **ran.model_dump(mode="json")}


def sentences(found: Rerun) -> list[str]:
    """Return whether the reruns of a trial came out the same, by how much they differ, and what may be the cause."""
    told = [_steps(found)]
    if found.time_ratio is not None:
        what = "the target" if found.steps_ratio is not None else "the last evaluation that both have"
        told.append(f"The train seconds until {what} are {cell(found.time_ratio)} times those stored.")
    nothing = "Nothing that is known of where it ran differs"
    why = (
        "kernels of a GPU may add in another order each time "
        "(`training.deterministic: true` has them not), and a workload may draw random numbers of its own."
    )
    alike = f"{nothing}: {why}" if found.identical is False else f"{nothing}."
    return [*told, "What differs now from then:" if found.differences else alike]


def _steps(found: Rerun) -> str:
    named = f"Trial {found.trial} of {found.study}, batch {found.batch_size}, seed {found.seed}"
    if found.identical:
        count = max(len(one.evaluations) for one in found.runs)
        return f"{named}: the same steps, bit for bit ({count} evaluations compared)."
    if found.identical is None:
        end = f"{found.then.state.value}, after {found.then.steps} steps"
        return (
            f"{named}: it ended as it did then ({end}), and neither has an evaluation: whether its steps are the same "
            "is not known (0 evaluations compared)."
        )
    first = [one.first_difference_step for one in found.runs if one.first_difference_step is not None]
    largest = [one.largest_difference for one in found.runs if one.largest_difference is not None]
    states = sorted({one.state.value for one in found.runs} - {found.then.state.value})
    differs = [
        (found.steps_ratio is not None, f"{cell(found.steps_ratio)} times the steps to the target"),
        (
            first,
            f"the metric differs from step {min(first, default=0)} on, by up to {cell(max(largest, default=0.0))}",
        ),
        (states, f"it ended {' and '.join(states)}, and was {found.then.state.value}"),
    ]
    parts = [*(part for holds, part in differs if holds), *([] if states else _ends(found))]
    return f"{named}: not the same: {'; '.join(parts) or 'it ended otherwise'}."


def _ends(found: Rerun) -> list[str]:
    """Return what else differs of runs that ended in the same state: evaluations, steps and reasons."""
    from bssearch.commands.rerun import ENDS_BY_ITSELF, FAILURES

    then = found.then
    fewest = min(found.runs, key=lambda one: len(one.evaluations))
    steps = sorted({one.steps for one in found.runs} - {then.steps})
    reasons = sorted({one.reason for one in found.runs} - {then.reason})
    differs = [
        (
            fewest.only_then or fewest.only_now,
            f"{len(fewest.evaluations)} evaluations are common to both, {fewest.only_then} are stored only and "
            f"{fewest.only_now} new only",
        ),
        (
            steps and then.state in ENDS_BY_ITSELF,
            f"it ended after {' and '.join(map(str, steps))} steps, and then after {then.steps}",
        ),
        (
            reasons and then.state in FAILURES,
            f"its reason is {' and '.join(map(repr, reasons))}, and was {then.reason!r}",
        ),
    ]
    return [part for holds, part in differs if holds]
