"""``bssearch rerun``: a stored trial trained again, and whether it comes out the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.arguments import AllowBusyOption, DatabaseOption, DataDirOption, NameArgument, WorkloadOption
from bssearch.cli.output import Format, FormatOption, cell, console, print_table, show_model

if TYPE_CHECKING:
    from bssearch.commands.rerun import Ran, Rerun

COLUMNS = ("run", "state", "all_steps", "steps_to_target", "time_to_target_s", "train_seconds", "final_metric")


def rerun(
    study: NameArgument,
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="The trial.")],
    runs: Annotated[int, typer.Option(min=1, help="How often it is trained again.")] = 1,
    db: DatabaseOption = None,
    workload: WorkloadOption = None,
    data_dir: DataDirOption = None,
    allow_busy: AllowBusyOption = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Train a stored trial again as it was, store nothing, and say whether it comes out the same and what differs.

    A workload file is looked up from this folder. A trial that was stopped is run as far as it came.
    """
    from bssearch.cli.live import watch
    from bssearch.commands.rerun import rerun as run_again

    with watch() as listener:
        found = run_again(
            study,
            number,
            runs=runs,
            db=db,
            data_dir=data_dir,
            allow_busy=allow_busy,
            workload=workload,
            listener=listener,
        )
    show_model(form, found, print_rerun, found.runs)


def print_rerun(found: Rerun) -> None:
    """Print for people how a trial's reruns came out beside it."""
    out = console()
    rows = [_row("stored", found.then), *(_row(str(index), one) for index, one in enumerate(found.runs, start=1))]
    print_table(rows, COLUMNS)
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
    if found.differences:
        told.append("What differs now from then:")
    elif found.identical is not False:
        told.append("Nothing that is known of where it ran differs.")
    else:
        told.append(
            "Nothing that is known of where it ran differs: kernels of a GPU may add in another order each time "
            "(`training.deterministic: true` has them not), and a workload may draw random numbers of its own."
        )
    return told


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
    parts = []
    if found.steps_ratio is not None:
        parts.append(f"{cell(found.steps_ratio)} times the steps to the target")
    first = [one.first_difference_step for one in found.runs if one.first_difference_step is not None]
    largest = [one.largest_difference for one in found.runs if one.largest_difference is not None]
    if first:
        parts.append(f"the metric differs from step {min(first)} on, by up to {cell(max(largest))}")
    states = sorted({one.state.value for one in found.runs} - {found.then.state.value})
    if states:
        parts.append(f"it ended {' and '.join(states)}, and was {found.then.state.value}")
    parts += _ends(found) if not states else []
    return f"{named}: not the same: {'; '.join(parts) or 'it ended otherwise'}."


def _ends(found: Rerun) -> list[str]:
    """Return what else differs of runs that ended in the same state: evaluations, steps and reasons."""
    from bssearch.commands.rerun import ENDS_BY_ITSELF, FAILURES

    parts = []
    fewest = min(found.runs, key=lambda one: len(one.evaluations))
    if fewest.only_then or fewest.only_now:
        parts.append(
            f"{len(fewest.evaluations)} evaluations are common to both, {fewest.only_then} are stored only and "
            f"{fewest.only_now} new only"
        )
    steps = sorted({one.steps for one in found.runs} - {found.then.steps})
    if steps and found.then.state in ENDS_BY_ITSELF:
        parts.append(f"it ended after {' and '.join(map(str, steps))} steps, and then after {found.then.steps}")
    reasons = sorted({one.reason for one in found.runs} - {found.then.reason})
    if reasons and found.then.state in FAILURES:
        parts.append(f"its reason is {' and '.join(map(repr, reasons))}, and was {found.then.reason!r}")
    return parts
