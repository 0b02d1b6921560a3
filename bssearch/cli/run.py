"""``bssearch init``, ``run`` and ``check``."""

from __future__ import annotations

import importlib.util
import keyword
import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import bssearch
from bssearch.cli.arguments import (
    SetOption,
    SpecArgument,
    exclude,
    launched,
    only_with,
    spec_to_run,
    store_to_read,
    watched,
)
from bssearch.cli.output import Format, FormatOption, cell, console, duration, print_table, say, show_model
from bssearch.commands.launch import QUICK_SECONDS, TARGET_RUNS, Launch
from bssearch.errors import BSSearchError, UsageError, require
from bssearch.records import FLAT_RATIO
from bssearch.records.text import percent, plural

if TYPE_CHECKING:
    from bssearch.analysis.law.quick import QuickAnswer
    from bssearch.commands.check import Advice, Check, DefaultRun, DryRun
    from bssearch.spec import StudySpec


TEMPLATES = Path(__file__).resolve().parents[1] / "workloads" / "templates"
LONGEST_NAME = 100


Kind = Literal["image", "text", "tabular"]  # kinds of data


def init(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name of the study: letters, digits, dashes and underscores, with a letter first."
        ),
    ],
    kind: Annotated[Kind, typer.Option(help="Kind of your data.")] = "image",
) -> None:
    """Write a runnable spec and workload."""
    files = filled_in(name, kind)
    check_free(name)
    write_new(files)
    for path in files:
        typer.echo(f"wrote {path}")
    typer.echo(
        f"next: bssearch check {name}.yaml\n"
        f"      bssearch run {name}.yaml\n"
        "then replace the lines marked YOURS in both files"
    )


def filled_in(name: str, kind: Kind) -> dict[Path, str]:
    """Return a template's spec and workload by path, with all names changed to ``name``."""
    class_name = class_name_of(name)
    spec = (TEMPLATES / f"{kind}.yaml").read_text(encoding="utf-8")
    workload = (TEMPLATES / f"{kind}.py").read_text(encoding="utf-8")
    own = kind.capitalize()
    return {
        # Quoted, because YAML reads a bare yes, on or null as another type.
        Path(f"{name}.yaml"): spec.replace(f"name: {kind}\n", f'name: "{name}"\n').replace(
            f"{kind}.py:{own}", f"{name}.py:{class_name}"
        ),
        Path(f"{name}.py"): workload.replace(f"class {own}:", f"class {class_name}:"),
    }


def class_name_of(name: str) -> str:
    """Return ``name`` in CamelCase. Raises `UsageError` for an invalid name."""
    require(
        re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) and len(name) <= LONGEST_NAME,
        f"NAME = {name!r} must have at most {LONGEST_NAME} letters, digits, dashes and underscores, and begin with a "
        "letter",
    )
    class_name = "".join(part[:1].upper() + part[1:] for part in re.split("[-_]+", name))
    require(
        not keyword.iskeyword(class_name),
        f"NAME = {name!r}: {class_name} is not a valid class name",
        hint=f"run `bssearch init my-{name}`",
    )
    return class_name


def check_free(name: str) -> None:
    """Raise `UsageError` if NAME.py would hide an importable module."""
    module = importlib.util.find_spec(name)
    require(
        module is None or module.origin is None,
        f"NAME = {name!r} is an importable module, and {name}.py would hide the module",
        hint=f"run `bssearch init my-{name}`",
    )


def write_new(files: Mapping[Path, str]) -> None:
    """Write all files. Raises `UsageError` and writes no file if a file exists or cannot be written."""
    there = [str(path) for path in files if os.path.lexists(path)]
    require(not there, f"{' and '.join(there)} exist{'s' * (len(there) == 1)}; choose another name")
    written: list[Path] = []
    try:
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except BaseException as error:
        for path in written:
            path.unlink()
        if isinstance(error, OSError):
            raise UsageError(
                f"{Path.cwd() / (error.filename or '')} cannot be written: {error.strerror}",
                hint="choose a writable folder with free disk space",
            ) from error
        raise


@launched("db", "data_dir", "allow_changed_workload", "allow_busy", "verbose")
def run(
    spec: SpecArgument,
    launch: Launch,
    overrides: SetOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Print an unverified answer from a few runs and gradient noise.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(help="With --quick: approximate total time in seconds.", show_default=f"{QUICK_SECONDS:g}"),
    ] = None,
    from_quick: Annotated[
        bool, typer.Option("--from-quick", help="Start from the quick answer; make a quick answer if necessary.")
    ] = False,
    from_study: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STUDY",
            help="Start with STUDY's best configuration and the further runs that STUDY's answer needs.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan with the expected and longest time, but run no trial.")
    ] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Run or resume a study, and print the best batch size."""
    if quick:
        others = {"--dry-run": dry_run, "--from-quick": from_quick, "--from": from_study}
        exclude("--quick", {**others, "--allow-changed-workload": launch.allow_changed_workload})
    else:
        only_with("--quick", {"--seconds": seconds})
    study, launch = spec_to_run(spec, overrides, launch)
    if dry_run:
        from bssearch.commands.check import dry_run as planned

        plan = planned(study)
        show_model(form, plan, print_dry_run, [plan])
        return
    study = asked_about_max_runs(study, launch.db)
    if quick:
        from bssearch.commands.quick import quick as asked

        with watched(launch) as shown:
            found = asked(study, shown, seconds=QUICK_SECONDS if seconds is None else seconds)
        show_model(form, found, print_quick, found.runs)
        return
    from bssearch.cli.answer import print_found

    with watched(launch) as shown:
        answer = bssearch.run_study(study, shown, from_quick=from_quick, from_study=from_study)
    print_found(answer, form, db=launch.db)


def asked_about_max_runs(study: StudySpec, db: str | None) -> StudySpec:
    """Return the spec, with the stored ``confirm.max_runs`` if the user keeps the value."""
    if study.confirm.max_runs is not None or not study.confirm.runs or not sys.stdin.isatty():
        return study
    from bssearch.spec import spec_of

    with suppress(BSSearchError), store_to_read(db) as store:
        stored = spec_of(store.studies.get(study.name)).confirm.max_runs
        if stored is not None and not typer.confirm(
            f"study {study.name} has confirm.max_runs = {stored}, but the spec omits confirm.max_runs. Undecided batch "
            f"sizes would get only {plural(study.confirm.runs, 'run')} each. Remove confirm.max_runs from the study?",
            err=True,
        ):
            kept = study.confirm.model_copy(update={"max_runs": max(stored, study.confirm.runs)})
            return study.model_copy(update={"confirm": kept})
    return study


def print_dry_run(found: DryRun) -> None:
    slots = found.slots
    at_once = "one in each slot" if slots == "auto" else "one at a time" if slots == 1 else f"up to {slots} at once"
    say(
        f"study {found.study}: {found.target} on workload {found.workload}"
        + (f", the largest of {found.studies} scales; each scale has a study" if found.studies > 1 else ""),
        f"batch sizes: {', '.join(map(str, found.batch_sizes))}",
        f"searched at each batch size: {', '.join(found.searched) or 'no parameter'}",
        f"search: at most {found.trials} trials of at most {found.trial_train_seconds:g} train seconds, {at_once}",
        f"confirmation: at most {found.finalists} configurations × {found.confirmation_runs} runs",
        f"expected time: {duration(found.expected_s)}, guessed from budget.trial_train_seconds",
        f"longest time: {duration(found.longest_search_s + found.longest_confirmation_s)} "
        f"({duration(found.longest_search_s)} of search, {duration(found.longest_confirmation_s)} of later runs), if "
        "all trials and runs use budget.trial_train_seconds",
        f"assumption: evaluation takes {percent(found.evaluation_share)} of a trial; `bssearch check` measures the "
        "share",
    )


def print_quick(found: QuickAnswer) -> None:
    best, default, (low, high) = found.optimal, found.default_batch_size, found.interval
    split = (
        "" if best.accumulation_steps == 1 else f", {best.accumulation_steps} micro-batches of {best.micro_batch_size}"
    )
    gain = (
        "This batch size is your default"
        if best.batch_size == default
        else f"Your default of {default} should take at most {percent(FLAT_RATIO - 1)} longer"
        if found.gain < FLAT_RATIO
        else f"Batch {best.batch_size} should be {found.gain:.2g}× faster than your default of {default}"
    )
    critical = found.b_crit
    noise = "not measured" if found.noise_scale is None else f"{found.noise_scale:.3g} samples"
    say(
        f"Unverified: batch {best.batch_size} (lr {best.learning_rate:.3g}{split}) should reach {found.metric} "
        f"{found.target:.4g} soonest. {gain}. The 90 % interval of the optimum is {low} to {high}. Batch sizes "
        f"{found.flat_range[0]} to {found.flat_range[1]} should be within 5 % of the best time.\n"
        f"Evidence: {plural(len(found.runs), 'run')} in {found.seconds:.0f} s, critical batch size "
        f"{critical.estimate:.3g} [{critical.low:.3g}, {critical.high:.3g}], gradient noise scale {noise}."
    )
    print_table(
        [one.model_dump() for one in found.runs], ("trial", "batch_size", "learning_rate", "steps", "train_seconds")
    )
    rates = f"{found.learning_rate_range[0]:.2g} and {found.learning_rate_range[1]:.2g}"
    say(
        f"In one run at this batch size, training took {found.learning_rate_gain:.2g}× as long with the learning rate "
        f"of the scaling rule as with learning rate {best.learning_rate:.3g}. With learning rates between {rates}, "
        "another batch size may be best."
        if found.learning_rate_gain > 1
        else f"A scaling rule derives this learning rate from the default; retune the learning rate between {rates}.",
        *(f"note: {notice.message}" for notice in found.warnings),
        "This answer is about the time to a target from scratch, not about fixed epochs or forgetting after "
        "fine-tuning.",
        "next: run `bssearch run SPEC` to search from this answer, tune and confirm",
    )


@launched("db", "data_dir", "allow_busy")
def check(
    spec: SpecArgument,
    launch: Launch,
    suggest_target: Annotated[
        bool,
        typer.Option("--suggest-target", help="Propose a target from runs of the default with several seeds."),
    ] = False,
    runs: Annotated[
        int | None, typer.Option(min=1, help="With --suggest-target: number of seeds.", show_default=f"{TARGET_RUNS}")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            help="With --suggest-target: distance from the median best metric, in the metric's units.",
            show_default="distance of the worst run, but 2 % to 48 % of the improvement over an untrained model",
        ),
    ] = None,
    walk: Annotated[
        bool,
        typer.Option(
            "--walk",
            help="Explain in six steps, with measurements, how to choose a batch size.",
        ),
    ] = False,
    overrides: SetOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Try a study's workload for a few seconds before a run."""
    exclude("--suggest-target", {"--walk": suggest_target and walk})
    if not suggest_target:
        only_with("--suggest-target", {"--runs": runs, "--margin": margin})
    study, launch = spec_to_run(spec, overrides, launch)
    if not suggest_target:
        found = bssearch.check(study, launch, walk=walk)
        show_model(form, found, print_check, found.findings, columns=("code", "message"))
        return
    require(margin is None or 0 <= margin < math.inf, f"--margin = {margin} must be a finite number >= 0")
    runs = runs or TARGET_RUNS
    screen = console(stderr=True)

    def tell(run: DefaultRun) -> None:
        screen.print(
            f"run {run.seed_index + 1} of {runs}: best {study.target.metric} {cell(run.best_metric)} "
            f"at {cell(run.best_at_s)} of {cell(run.train_seconds)} train seconds",
        )

    advice = bssearch.advise_target(study, launch, runs=runs, margin=margin, on_run=tell)
    show_model(form, advice, print_advice, advice.targets)


def print_check(found: Check) -> None:
    untrained = ", ".join(f"{name} {cell(value)}" for name, value in found.untrained.items())
    trial = found.trial
    reached = (
        f"reached the target in {cell(trial.time_to_target_s)} s"
        if trial.time_to_target_s is not None
        else f"target not reached yet, best metric {cell(trial.best_metric)} ({trial.reason})"
    )
    likely = (
        ""
        if found.likely_study_s is None or not trial.time_to_target_s
        else f", or about {duration(found.likely_study_s)} "
        f"({found.likely_study_s / trial.time_to_target_s:,.0f} × the default's time to the target) if no trial beats "
        "the default"
    )
    say(
        f"study {found.study}, {found.target}, on {found.device}: {_in_the_workload(found)}",
        f"before training: {untrained or 'not reported'}",
        f"the default (batch {trial.batch_size}), tried for up to {trial.limit_s:g} train seconds: "
        f"{plural(trial.steps, 'step')}, {plural(trial.evaluations, 'evaluation')}, {reached}",
        f"a trial takes at most {duration(found.longest_trial_s)} of training and evaluation; "
        f"the {'study takes' if found.studies == 1 else f'{found.studies} studies of all scales take'} "
        f"at most {duration(found.longest_study_s)}{likely}",
    )
    print_table(
        [
            {
                "batch_size": one.batch_size,
                "ms/step": "out of memory" if one.step_seconds is None else round(1000 * one.step_seconds, 2),
                "evaluation_s": one.evaluation_seconds,
                "left_out": f"{'about ' * (found.batch_unit == 'tokens')}{percent(one.dropped_share, 1)}",
            }
            for one in found.batches
        ],
        ("batch_size", "ms/step", "evaluation_s", "left_out"),
    )
    for number, step in enumerate(found.walk or (), start=1):
        figures = ", ".join(f"{name} {cell(value)}" for name, value in step.figures.items())
        say(f"{number}. {step.question} {step.decision}{figures and f' ({figures})'}")
    say(
        *(f"note: {remark.message}" for remark in found.notes),
        *([f"suspicious: {finding.message}" for finding in found.findings] or ["no findings"]),
    )


def print_advice(advice: Advice) -> None:
    rows = [
        {
            "target": f"{row.target!r} ← proposed" if row.target == advice.proposed else f"{row.target:.5g}",
            "runs_that_reach_it": f"{row.reached} of {len(advice.runs)}",
            "time_to_target_s": row.time_to_target_s,
            "of_the_limit": None if row.share_of_limit is None else percent(row.share_of_limit),
        }
        for row in advice.targets
    ]
    say(
        f"proposed target: {advice.metric} {advice.proposed!r}, which is {advice.margin:.2g} easier than "
        f"{advice.median_best:.5g}, the median best value of {plural(len(advice.runs), 'run')} of the default",
    )
    print_table(rows, ("target", "runs_that_reach_it", "time_to_target_s", "of_the_limit"))
    say(
        *(f"note: {note}" for note in advice.notes),
        f"next: add --set target.value={advice.proposed!r}, or write the target into the spec",
    )


def _in_the_workload(found: Check) -> str:
    if found.train_samples is None:
        return "your own program"
    return (
        f"{found.parameters:,} parameters; {found.train_samples:,} training {found.batch_unit}; "
        f"{found.validation_samples:,} validation and {found.test_samples:,} test samples"
    )
