"""``bssearch audit``: which rules of thumb held on this workload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bssearch.cli.arguments import AllowBusyOption, DatabaseOption, DataDirOption, NameArgument, WorkloadOption
from bssearch.cli.output import Format, FormatOption, console, print_table, show_model

if TYPE_CHECKING:
    from bssearch.analysis.rules.audit import Audit, LearningRateSlope, RuleFinding
    from bssearch.analysis.rules.regret import Regret

COLUMNS = ("rule", "batch", "gives", "regret", "verdict", "note")
SLOPE_NAMES = {0.0: "0 (none)", 0.5: "½ (√batch)", 1.0: "1 (linear)"}


def audit(
    study: NameArgument,
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
    db: DatabaseOption = None,
    workload: WorkloadOption = None,
    data_dir: DataDirOption = None,
    allow_busy: AllowBusyOption = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Hold rules of thumb against a study: run what each gives beside the tuned optimum, and say which held.

    Regret is the time to the target by the rule over that of the tuned optimum at the same batch size, with its 95 %
    interval. HELD: below 1.05. BROKE: above 1.10, or no run reached the target. The same command again goes on where it
    stopped; a workload file is looked up from this folder.
    """
    from bssearch.cli.live import watch
    from bssearch.commands.audit import audit_study
    from bssearch.commands.opening import stored_spec

    spec = stored_spec(study, db=db, runs_code=workload is None and not no_run, connects=not no_run)
    with watch() as listener:
        found = audit_study(
            spec,
            runs=runs,
            train_seconds=train_seconds,
            run=not no_run,
            db=db,
            data_dir=data_dir,
            allow_busy=allow_busy,
            workload=workload,
            listener=listener,
        )
    show_model(form, found, print_audit, found.rules)


def print_audit(found: Audit) -> None:
    """Print the rules as a table for people, and below it how the tuned learning rate follows the batch size."""
    print_table([audit_row(one) for one in found.rules], COLUMNS)
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
