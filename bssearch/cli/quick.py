"""``bssearch quick``: a batch size in a minute, unverified; ``track-record``: how often such answers held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.arguments import (
    AllowBusyOption,
    DatabaseOption,
    DataDirOption,
    SetOption,
    SpecArgument,
    store_to_read,
    workload_folder,
)
from bssearch.cli.output import Format, FormatOption, console, print_table, show_model

if TYPE_CHECKING:
    from bssearch.analysis.law.quick import QuickAnswer
    from bssearch.commands.track_record import TrackRecord

KEPT_COLUMNS = ("study", "said", "interval", "found", "flat_range", "holds", "time_ratio")
COLUMNS = ("trial", "batch_size", "learning_rate", "steps", "train_seconds")


def quick(
    spec: SpecArgument,
    seconds: Annotated[float, typer.Option(help="The time in which runs begin and gradients are measured.")] = 60.0,
    db: DatabaseOption = None,
    data_dir: DataDirOption = None,
    overrides: SetOption = None,
    allow_busy: AllowBusyOption = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Say in a minute which batch size to train with, from a few runs and the noise of the gradient; no search."""
    from bssearch.cli.live import watch
    from bssearch.commands.quick import quick as asked
    from bssearch.spec import find_spec, load_spec

    path = find_spec(spec)
    study = load_spec(path, overrides or [])
    with watch() as listener:
        found = asked(
            study,
            seconds=seconds,
            db=db,
            folder=workload_folder(path),
            data_dir=data_dir,
            allow_busy=allow_busy,
            listener=listener,
        )
    show_model(form, found, print_quick, found.runs)


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
        else f"expected {found.gain:.2g}× faster than your {found.default_batch_size}"
    )
    out.print(
        f"Unverified: batch {best.batch_size} (lr {best.learning_rate:.3g}{split}) is expected to reach "
        f"{found.metric} soonest; {gain}. The optimum lies between {low} and {high} (90 %); "
        f"{found.flat_range[0]} to {found.flat_range[1]} are expected to be within 5 %."
    )
    critical = found.b_crit
    noise = "not measured" if found.noise_scale is None else f"{found.noise_scale:.3g} samples"
    out.print(
        f"It rests on {_runs(len(found.runs))} to {found.metric} {found.target:.4g} in {found.seconds:.0f} s; critical "
        f"batch size {critical.estimate:.3g} [{critical.low:.3g}, {critical.high:.3g}], gradient noise scale {noise}."
    )
    print_table([one.model_dump() for one in found.runs], COLUMNS)
    for notice in found.warnings:
        out.print(f"note: {notice.message}")
    out.print("next: bssearch run SPEC searches from there  (the learning rate is the rule's: it is tuned there)")


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def track_record(db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """Show how often the quick answers of a database held, once a search had found the optimum."""
    from bssearch.commands.track_record import track_record as kept

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
