"""``bssearch check``, ``target`` and ``quick``: what a study will be like, before it runs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.arguments import (
    SetOption,
    SpecArgument,
    launched,
    spec_to_run,
    watched,
)
from bssearch.cli.output import Format, FormatOption, cell, console, duration, print_table, show_model
from bssearch.commands.launch import Launch
from bssearch.errors import UsageError
from bssearch.intervals import FLAT_RATIO
from bssearch.pages.words import plural

if TYPE_CHECKING:
    from bssearch.analysis.law.quick import QuickAnswer
    from bssearch.commands.check import Advice, Check, Run

BATCH_COLUMNS = ("batch_size", "ms/step", "evaluation_s", "left_out")
QUICK_COLUMNS = ("trial", "batch_size", "learning_rate", "steps", "train_seconds")
TARGET_COLUMNS = ("target", "runs_that_reach_it", "time_to_target_s", "of_the_limit")


@launched("data_dir", "allow_busy")
def check(
    spec: SpecArgument,
    launch: Launch,
    overrides: SetOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Try a study's workload for a few seconds: does it train, how long will it take, what is suspicious."""
    from bssearch.commands.check import check as try_out

    found = try_out(*spec_to_run(spec, overrides, launch))
    show_model(form, found, print_check, found.findings, columns=("code", "message"))


@launched("data_dir", "allow_busy")
def target(
    spec: SpecArgument,
    launch: Launch,
    runs: Annotated[int, typer.Option(min=1, help="How many seeds of the default to run to the limit.")] = 5,
    margin: Annotated[
        float | None,
        typer.Option(
            help="How much easier than the median best to aim, in the metric's units; by default 2 % of the way there."
        ),
    ] = None,
    overrides: SetOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Propose a target: run the default to its limit with several seeds, and show what each target would take."""
    from bssearch.commands.check import advise_target

    study, launch = spec_to_run(spec, overrides, launch)
    if margin is not None and not 0 <= margin < math.inf:
        raise UsageError(f"--margin = {margin:g} must be a finite number >= 0")
    screen = console(stderr=True)

    def tell(run: Run) -> None:
        screen.print(
            f"run {run.seed_index + 1} of {runs}: best {study.target.metric} {cell(run.best_metric)} "
            f"at {cell(run.best_at_s)} of {cell(run.train_seconds)} train seconds",
        )

    advice = advise_target(study, launch, runs=runs, margin=margin, on_run=tell)
    show_model(form, advice, print_advice, advice.targets)


@launched("db", "data_dir", "allow_busy")
def quick(
    spec: SpecArgument,
    launch: Launch,
    seconds: Annotated[float, typer.Option(help="About how long it may take in all.")] = 60.0,
    overrides: SetOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Say in a minute which batch size to train with, from a few runs and the noise of the gradient; no search."""
    from bssearch.commands.quick import quick as asked

    study, launch = spec_to_run(spec, overrides, launch)
    with watched(launch) as shown:
        found = asked(study, shown, seconds=seconds)
    show_model(form, found, print_quick, found.runs)


def print_check(found: Check) -> None:
    """Print a check for people."""
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
        f"untrained: {untrained or 'not told'}",
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
    """Print a proposal for people."""
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


def print_quick(found: QuickAnswer) -> None:
    """Print a quick answer for people."""
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
        f"{found.metric} {found.target:.4g} soonest; {gain}. The optimum lies between {low} and {high} (90 %); "
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
        "It speaks of the time to a target from scratch: not of what is best after a fixed number of epochs, nor of "
        "what a fine-tuning forgets."
    )
    out.print("next: bssearch run SPEC searches from there, tunes and confirms")


def _in_the_workload(found: Check) -> str:
    if found.train_samples is None:
        return "a program of your own"
    return (
        f"{found.parameters:,} parameters; {found.train_samples:,} training, {found.validation_samples:,} validation, "
        f"{found.test_samples:,} test samples"
    )
