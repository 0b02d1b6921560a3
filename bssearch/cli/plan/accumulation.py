"""``bssearch plan accumulation``: micro-batches × steps × devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bssearch.cli.output import Format, FormatOption, console, show

if TYPE_CHECKING:
    from bssearch.planning.accumulation import AccumulationPlan


def accumulation(
    batch: Annotated[int, typer.Option(help="Samples of an optimizer step, over all devices.")],
    micro: Annotated[int | None, typer.Option(help="Samples that run at once on a device.")] = None,
    max_micro: Annotated[
        int | None, typer.Option(help="In its place: the most that fit; the largest that divides is taken.")
    ] = None,
    devices: Annotated[int, typer.Option(help="Devices that share the batch.")] = 1,
    batch_norm_layers: Annotated[
        int | None, typer.Option(help="Batch normalisation layers of the model.", show_default="not known")
    ] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Split a batch into micro-batches, accumulation steps and devices, exactly, and say what that changes."""
    from bssearch.planning.accumulation import plan_accumulation

    found = plan_accumulation(
        batch=batch, micro=micro, max_micro=max_micro, devices=devices, batch_norm_layers=batch_norm_layers
    )
    split = ("micro_batch", "accumulation_steps", "devices", "batch")
    show(form, lambda: print_split(found), found.document, lambda: [{name: getattr(found, name) for name in split}])


def print_split(found: AccumulationPlan) -> None:
    """Print a split for people."""
    out = console()
    out.print(
        f"batch {found.batch} = micro-batches of {found.micro_batch} × {found.accumulation_steps} accumulation "
        f"steps × {found.devices} devices"
    )
    for remark in found.remarks:
        out.print(f"note: {remark.message}")
    for claim in found.claims:
        out.print(f"note: {claim.message}")
