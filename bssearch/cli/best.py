"""``bssearch best``: the answer of a study, of all studies that match, or for another device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.arguments import (
    DatabasesOption,
    Export,
    ObjectiveFilter,
    PrecisionFilter,
    StudyArgument,
    WorkloadFilter,
    exclude,
    require,
    study_to_read,
)
from bssearch.cli.output import Format, FormatOption, console, note, print_table, show_model, write
from bssearch.errors import UsageError

if TYPE_CHECKING:
    from bssearch.commands.across.answers import AcrossAnswer


def best(
    study: StudyArgument = None,
    db: DatabasesOption = None,
    form: FormatOption = Format.TABLE,
    details: Annotated[
        bool, typer.Option("--details", help="Print steps, step times, the law and notes, too.")
    ] = False,
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
    step_times: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Predict the answer for another device: CSV of its batch_size and step_seconds, or what `probe "
            "step-time --format json` printed there.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Across studies: only those on a device with this in its name. With --step-times: the device's name.",
            show_default="with --step-times, the file's",
        ),
    ] = None,
    workload: WorkloadFilter = None,
    objective: ObjectiveFilter = None,
    precision: PrecisionFilter = None,
) -> None:
    """Print the best batch size, its configuration, and how sure that is."""
    from bssearch.commands.across.matching import StudyFilter

    if export is not None:
        exclude(f"--export {export}", {f"--format {form}": form is not Format.TABLE})
    else:
        require("--export", {"--schedule": schedule})
    filters = {"workload": workload, "objective": objective, "precision": precision, "target": target}
    if step_times is not None:
        exclude("--step-times", {**{f"--{name}": value for name, value in filters.items()}, "--schedule": schedule})
    asked = StudyFilter.of(**filters, device=None if step_times else device)
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
    from bssearch.commands.answer import predict
    from bssearch.search.finding import answer

    with study_to_read(db, study) as (store, name):
        if asked.metric is not None and asked.metric != (metric := store.study(name).target.metric):
            raise UsageError(f"--target {asked.metric}: the target of study {name!r} is of {metric}")
        found = predict(store, name, step_times, device) if step_times else answer(store, name, asked.target)
        if schedule:
            from bssearch.commands.growing import scheduled_training

            scheduled = scheduled_training(store, name, found)
    if export is None:
        print_found(found, form, details=details)
        return
    write(exported_schedule(found, scheduled, export) if schedule else exported(found, export))
    for caveat in (*(scheduled.notes if schedule else ()), *grave(found)):
        note(caveat)
    if not schedule and found.batch_schedule is not None and found.batch_schedule.saves_time == "yes":
        note("a batch that grows saves time: --schedule exports it")


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
