"""``bssearch check``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.arguments import (
    SetOption,
    SpecArgument,
    launched,
    require,
    spec_to_run,
)
from bssearch.cli.output import Format, FormatOption, cell, console, duration, print_table, show_model
from bssearch.commands.launch import Launch
from bssearch.errors import UsageError

if TYPE_CHECKING:
    from bssearch.commands.check import Advice, Check, DefaultRun

SEEDS = 5  # default runs of --suggest-target

BATCH_COLUMNS = ("batch_size", "ms/step", "evaluation_s", "left_out")
TARGET_COLUMNS = ("target", "runs_that_reach_it", "time_to_target_s", "of_the_limit")


@launched("data_dir", "allow_busy")
def check(
    spec: SpecArgument,
    launch: Launch,
    suggest_target: Annotated[
        bool,
        typer.Option("--suggest-target", help="Propose a target from runs of the default with several seeds."),
    ] = False,
    runs: Annotated[
        int | None, typer.Option(min=1, help="With --suggest-target: number of seeds.", show_default="5")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            help="With --suggest-target: distance from the median best, in the metric's units.",
            show_default="2 % of the way there",
        ),
    ] = None,
    overrides: SetOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Try a study's workload for a few seconds before you run it."""
    from bssearch.commands.check import advise_target
    from bssearch.commands.check import check as try_out

    if not suggest_target:
        require("--suggest-target", {"--runs": runs, "--margin": margin})
    study, launch = spec_to_run(spec, overrides, launch)
    if not suggest_target:
        found = try_out(study, launch)
        show_model(form, found, print_check, found.findings, columns=("code", "message"))
        return
    if margin is not None and not 0 <= margin < math.inf:
        raise UsageError(f"--margin = {margin:g} must be a finite number >= 0")
    runs = runs or SEEDS
    screen = console(stderr=True)

    def tell(run: DefaultRun) -> None:
        screen.print(
            f"run {run.seed_index + 1} of {runs}: best {study.target.metric} {cell(run.best_metric)} "
            f"at {cell(run.best_at_s)} of {cell(run.train_seconds)} train seconds",
        )

    advice = advise_target(study, launch, runs=runs, margin=margin, on_run=tell)
    show_model(form, advice, print_advice, advice.targets)


def print_check(found: Check) -> None:
    """Print a check."""
    out = console()
    untrained = ", ".join(f"{name} {cell(value)}" for name, value in found.untrained.items())
    trial = found.trial
    reached = (
        f"reached the target in {cell(trial.time_to_target_s)} s"
        if trial.time_to_target_s is not None
        else f"not there yet, best {cell(trial.best_metric)} ({trial.reason})"
    )
    likely = (
        "" if found.likely_study_s is None else f"; if the default is hard to beat, {duration(found.likely_study_s)}"
    )
    for line in (
        f"study {found.study}, {found.target}, on {found.device}: {_in_the_workload(found)}",
        f"untrained: {untrained or 'not reported'}",
        f"the default (batch {trial.batch_size}), tried for up to {trial.limit_s:g} train seconds: "
        f"{trial.steps} steps, {trial.evaluations} evaluations, {reached}",
        f"a trial takes at most {duration(found.longest_trial_s)} of training and evaluation, the study "
        f"{duration(found.longest_study_s)}{likely}",
    ):
        out.print(line)
    rows = [
        {
            "batch_size": one.batch_size,
            "ms/step": "out of memory" if one.step_seconds is None else round(1000 * one.step_seconds, 2),
            "evaluation_s": one.evaluation_seconds,
            "left_out": f"{one.dropped_share:.1%}",
        }
        for one in found.batches
    ]
    print_table(rows, BATCH_COLUMNS)
    for remark in found.notes:
        out.print(f"note: {remark.message}")
    for finding in found.findings:
        out.print(f"suspicious: {finding.message}")
    if not found.findings:
        out.print("nothing suspicious")


def print_advice(advice: Advice) -> None:
    """Print a proposed target."""
    out = console()
    rows = [
        {
            "target": f"{row.target!r} ← proposed" if row.target == advice.proposed else f"{row.target:.5g}",
            "runs_that_reach_it": f"{row.reached} of {len(advice.runs)}",
            "time_to_target_s": row.time_to_target_s,
            "of_the_limit": None if row.share_of_limit is None else f"{row.share_of_limit:.0%}",
        }
        for row in advice.targets
    ]
    out.print(
        f"proposed target: {advice.metric} {advice.proposed!r}: the median best of {len(advice.runs)} runs of the "
        f"default, {advice.median_best:.5g}, and a margin of {advice.margin:.2g} on the easier side",
    )
    print_table(rows, TARGET_COLUMNS)
    for note in advice.notes:
        out.print(f"note: {note}")
    out.print(f"--set target.value={advice.proposed!r}, or write it into the spec")


def _in_the_workload(found: Check) -> str:
    if found.train_samples is None:
        return "a program of your own"
    return (
        f"{found.parameters:,} parameters; {found.train_samples:,} training, {found.validation_samples:,} validation, "
        f"{found.test_samples:,} test samples"
    )
