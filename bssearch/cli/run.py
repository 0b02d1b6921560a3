"""``bssearch run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.arguments import (
    SetOption,
    SpecArgument,
    exclude,
    launched,
    require,
    spec_to_run,
    watched,
)
from bssearch.cli.output import Format, FormatOption, console, duration, print_table, show_model
from bssearch.commands.launch import Launch
from bssearch.records.intervals import FLAT_RATIO
from bssearch.records.text import plural

if TYPE_CHECKING:
    from bssearch.analysis.law.quick import QuickAnswer
    from bssearch.commands.check import DryRun

QUICK_COLUMNS = ("trial", "batch_size", "learning_rate", "steps", "train_seconds")


@launched("db", "data_dir", "allow_changed_workload", "allow_busy")
def run(
    spec: SpecArgument,
    launch: Launch,
    overrides: SetOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Print an unverified answer from a few runs and gradient noise.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(help="With --quick: approximate total time in seconds.", show_default="60")
    ] = None,
    from_quick: Annotated[
        bool, typer.Option("--from-quick", help="Start from the quick answer; make one if necessary.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the trials and their longest time; run nothing.")
    ] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Run or resume a study, and print the best batch size."""
    if quick:
        others = {"--from-quick": from_quick, "--allow-changed-workload": launch.allow_changed_workload}
        exclude("--quick", {"--dry-run": dry_run, **others})
    else:
        require("--quick", {"--seconds": seconds})
    study, launch = spec_to_run(spec, overrides, launch)
    if dry_run:
        from bssearch.commands.check import dry_run as planned

        plan = planned(study)
        show_model(form, plan, print_dry_run, [plan])
        return
    if quick:
        from bssearch.commands.quick import SECONDS
        from bssearch.commands.quick import quick as asked

        with watched(launch) as shown:
            found = asked(study, shown, seconds=SECONDS if seconds is None else seconds)
        show_model(form, found, print_quick, found.runs)
        return
    from bssearch.cli.answer import print_found
    from bssearch.commands.run import run_study

    with watched(launch) as shown:
        answer = run_study(study, shown, from_quick=from_quick)
    print_found(answer, form)


def print_dry_run(found: DryRun) -> None:
    """Print a dry run."""
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


def print_quick(found: QuickAnswer) -> None:
    """Print a quick answer."""
    out = console()
    best, low, high = found.optimal, *found.interval
    split = (
        "" if best.accumulation_steps == 1 else f", {best.accumulation_steps} micro-batches of {best.micro_batch_size}"
    )
    gain = (
        "it is your default's"
        if best.batch_size == found.default_batch_size
        else f"your {found.default_batch_size} is expected to be as fast within {FLAT_RATIO - 1:.0%}"
        if found.gain < FLAT_RATIO
        else f"expected {found.gain:.2g}× faster than your {found.default_batch_size}"
    )
    out.print(
        f"Unverified: batch {best.batch_size} (lr {best.learning_rate:.3g}{split}) is expected to reach "
        f"{found.metric} {found.target:.4g} soonest; {gain}. The optimum is between {low} and {high} (90 %); "
        f"{found.flat_range[0]} to {found.flat_range[1]} are expected to be within 5 %."
    )
    critical = found.b_crit
    noise = "not measured" if found.noise_scale is None else f"{found.noise_scale:.3g} samples"
    out.print(
        f"It rests on {plural(len(found.runs), 'run')} in {found.seconds:.0f} s; critical "
        f"batch size {critical.estimate:.3g} [{critical.low:.3g}, {critical.high:.3g}], gradient noise scale {noise}."
    )
    print_table([one.model_dump() for one in found.runs], QUICK_COLUMNS)
    rates = f"{found.learning_rate_range[0]:.2g} and {found.learning_rate_range[1]:.2g}"
    out.print(
        f"The learning rate by the rule took {found.learning_rate_gain:.2g}× as long there as "
        f"{best.learning_rate:.3g} does in one run: retuned between {rates}, another batch size may be best."
        if found.learning_rate_gain > 1
        else f"The learning rate is the default's, carried by the rule: retune it between {rates}."
    )
    for notice in found.warnings:
        out.print(f"note: {notice.message}")
    out.print(
        "This answer is about the time to a target from scratch, not about a fixed number of epochs or forgetting in "
        "a fine-tuning."
    )
    out.print("next: bssearch run SPEC searches from there, tunes and confirms")
