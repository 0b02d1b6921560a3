"""``bssearch plan scale``: how many devices are worth it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.arguments import DatabaseOption
from bssearch.cli.output import Format, FormatOption, console, print_table, show

if TYPE_CHECKING:
    from bssearch.planning.scale import DeviceRange, ScalePlan

COLUMNS = ("devices", "batch", "accumulation_steps", "step_s", "communication_s", "throughput_efficiency", "speedup")
LAST_COLUMNS = ("efficiency", "time_to_target_s", "device_hours", "cost")


def scale(
    devices: Annotated[int, typer.Option(help="The most devices to plan for.")],
    batch: Annotated[int | None, typer.Option(help="Samples of a step over all devices, the same for all.")] = None,
    per_device_batch: Annotated[
        int | None, typer.Option(help="In its place: samples of each device, so that the batch grows with them.")
    ] = None,
    max_micro: Annotated[int | None, typer.Option(help="The most samples that a device runs at once.")] = None,
    alpha_s: Annotated[float | None, typer.Option(help="Seconds of a step, whatever its batch size.")] = None,
    beta_s: Annotated[float | None, typer.Option(help="Seconds of a step for each of its samples.")] = None,
    step_times: Annotated[
        Path | None, typer.Option(help="In their place: a CSV with batch_size and step_seconds.")
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Parameters of the model, whose gradients travel: 25000000, 25M.", metavar="N")
    ] = None,
    gradient_bytes: Annotated[float, typer.Option(help="Bytes of each gradient: 4 in fp32, 2 in bf16.")] = 4.0,
    bandwidth_gb_s: Annotated[float | None, typer.Option(help="What a device sends, in 10⁹ bytes a second.")] = None,
    latency_us: Annotated[float, typer.Option(help="Microseconds of one message.")] = 0.0,
    overlap: Annotated[float, typer.Option(help="Share of the communication behind computing, 0 to 1.")] = 0.0,
    b_crit: Annotated[float | None, typer.Option(help="Critical batch size in samples.")] = None,
    b_crit_low: Annotated[float | None, typer.Option(help="The lower end of its interval.")] = None,
    b_crit_high: Annotated[float | None, typer.Option(help="The upper end of its interval.")] = None,
    samples_to_target: Annotated[float | None, typer.Option(help="Samples that a training took.")] = None,
    at_batch: Annotated[
        int | None, typer.Option(help="The batch size of that training.", show_default="that of one device")
    ] = None,
    price_per_device_hour: Annotated[float | None, typer.Option(help="What an hour of a device costs.")] = None,
    study: Annotated[
        str | None, typer.Option(help="A stored study: its step times, B_crit and samples, where none are given.")
    ] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Say what 1 to N devices take to the target, what they cost, and from which number on more stop paying."""
    from bssearch.commands.plan.scale import plan_scale

    found = plan_scale(
        devices=devices,
        batch=batch,
        per_device_batch=per_device_batch,
        max_micro=max_micro,
        alpha_s=alpha_s,
        beta_s=beta_s,
        step_times=step_times,
        parameters=parameters,
        gradient_bytes=gradient_bytes,
        bandwidth_gb_s=bandwidth_gb_s,
        latency_us=latency_us,
        overlap=overlap,
        b_crit=b_crit,
        b_crit_low=b_crit_low,
        b_crit_high=b_crit_high,
        samples_to_target=samples_to_target,
        at_batch=at_batch,
        price_per_device_hour=price_per_device_hour,
        study=study,
        db=db,
    )
    show(form, lambda: print_scale(found), found.document, lambda: [asdict(row) for row in found.rows])


def print_scale(found: ScalePlan) -> None:
    """Print for people what each number of devices takes, and where more stop paying."""
    out = console()
    rows = [asdict(row) for row in found.rows_for_people()]
    print_table(rows, [*COLUMNS, *(name for name in LAST_COLUMNS if rows[0][name] is not None)])
    out.print(f"More devices pay up to {_in_words(found.pays_up_to)}: there each still does half of what one would.")
    if found.passes_b_crit.estimate is not None:
        out.print(
            f"The batch passes B_crit = {found.b_crit.estimate:.4g} at {_in_words(found.passes_b_crit)} devices; "
            "beyond it more than half of the samples are spent on nothing."
        )
    out.print(f"The least time has {found.fastest}.")
    for remark in found.remarks:
        out.print(f"note: {remark}")
    for claim in found.claims:
        out.print(f"note: {claim.message}")


def _in_words(devices: DeviceRange) -> str:
    low, high = ("–" if end is None else str(end) for end in (devices.low, devices.high))
    interval = "" if devices.low is None and devices.high is None else f" [{low}, {high}]"
    return f"{devices.estimate}{interval}"
