"""The commands that show studies, ``studies``, ``status``, ``best``, ``track-record``, and ``schema`` of their JSON."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.answer import print_found
from bssearch.cli.arguments import DatabaseOption, StudyArgument, store_to_read, study_name
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
from bssearch.cli.recommended import Export, exported, grave
from bssearch.errors import UsageError

if TYPE_CHECKING:
    from bssearch.commands.quick.track_record import TrackRecord
    from bssearch.commands.status import Status

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
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
    everything: Annotated[bool, typer.Option("--all", help="The archived ones, too.")] = False,
) -> None:
    """List the studies of a database."""
    with store_to_read(db) as store:
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
    from bssearch.commands.status import status as status_of

    with store_to_read(db) as store:
        found = status_of(store, study_name(store, study))
    show(form, lambda: print_status(found), found.document, lambda: [found.document()])


def print_status(found: Status) -> None:
    """Print for people how far a study is; of an imported one, what its runs came to: nothing was run here."""
    out = console()
    one, fastest = ("run", "fastest") if found.is_imported else ("trial", "fastest so far")
    spent, budget, running = found.spent_trials, found.budget_trials, len(found.running)
    # Enqueued trials run whatever the budget says.
    of = f"of {budget} search trials" if spent <= budget else f"search trials, more than the budget of {budget}"
    out.print(f"{found.study}: {spent} {'imported runs' if found.is_imported else of}", end="")
    out.print(f", {running} running" if running else "", end="")
    out.print("" if found.search_ended is None else f"; search ended ({found.search_ended})")
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
    counts: Counter[str] = Counter()
    for states in found.trials.values():
        counts.update(states)
    print_table([{"state": state, "runs": count} for state, count in counts.items()], ("state", "runs"))


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
    with store_to_read(db) as store:
        found = answer(store, study_name(store, study), target)
    if export is not None:
        write(exported(found, export))
        for caveat in grave(found):
            note(caveat)
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


def track_record(db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """Show how often the quick answers of a database held, once a search had found the optimum."""
    from bssearch.commands.quick.track_record import track_record as kept

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
