"""``bssearch plan memory``: will it fit, and how many samples at a time."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bssearch.cli.output import Format, FormatOption, console, print_table, show

if TYPE_CHECKING:
    from bssearch.planning.memory.plan import MemoryPlan

_TERMS = ("term", "gib", "mib_a_sample", "when", "meaning")
_CHOICES = ("precision", "mixed", "optimizer", "checkpointing", "fixed_gib", "mib_a_sample", "largest", "safe")
MIB, GIB = 2**20, 2**30


def memory(
    parameters: Annotated[
        str | None, typer.Option(help="Number of parameters: 110000000, 1.1e8, 110M.", metavar="N")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp8 (weights).")] = "fp32",
    mixed: Annotated[
        str | None,
        typer.Option(
            help="How 16 bits mix with fp32: master (16-bit weights, fp32 master weights), autocast (PyTorch's) or "
            "pure.",
            show_default="master; autocast with --model",
        ),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="sgd, momentum, adam, adamw, adam8bit, adafactor, muon, … (adafactor: half of Adam).")
    ] = "adamw",
    memory_gib: Annotated[float | None, typer.Option(help="Memory of a device for tensors.", metavar="GIB")] = None,
    device: Annotated[str | None, typer.Option(help="A device by name, as a100-80gb or rtx-4090; cuda; cpu.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of a transformer.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Its hidden size.")] = None,
    heads: Annotated[int | None, typer.Option(help="Its attention heads.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Its heads of keys and values.", show_default="as --heads")
    ] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sample.")] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Size of the vocabulary: for logits; with --input, the sample is of tokens.")
    ] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of the MLP.", show_default="4 × hidden")] = None,
    mlp: Annotated[
        str | None, typer.Option(help="gelu, relu, gelu_new (GPT-2's, written out) or swiglu.", show_default="gelu")
    ] = None,
    fused_attention: Annotated[
        bool | None,
        typer.Option("--fused-attention/--no-fused-attention", help="Flash attention.", show_default="not fused"),
    ] = None,
    dropout: Annotated[
        bool | None, typer.Option("--dropout/--no-dropout", help="Dropout in each layer.", show_default="dropout")
    ] = None,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Compute each block twice.")] = False,
    stage: Annotated[int | None, typer.Option(help="ZeRO's stage, 0 to 3; FSDP is 3.")] = None,
    devices: Annotated[int | None, typer.Option(help="Devices that the stage shards over.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Predict the peak of this micro-batch.", show_default="the safe one")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Trace a model: FILE.py:NAME, package.module:NAME, transformers:CLASS or timm:NAME. Random weights, "
            "no network.",
            metavar="NAME",
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--model-setting", metavar="KEY=VALUE", help="What the model is built with; may be repeated."),
    ] = None,
    input_shape: Annotated[
        str | None, typer.Option("--input", metavar="SHAPE", help="Shape of one sample, as 3x224x224.")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Other precisions, optimizers, checkpointing too.")] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Say what a training step needs, term by term, and the micro-batches that fit; nothing is trained."""
    from bssearch.commands.plan.memory import plan_memory

    plan = plan_memory(
        parameters=parameters,
        precision=precision,
        mixed=mixed,
        optimizer=optimizer,
        memory_gib=memory_gib,
        device=device,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        sequence=sequence,
        vocabulary=vocabulary,
        intermediate=intermediate,
        mlp=mlp,
        fused_attention=fused_attention,
        dropout=dropout,
        checkpointing=checkpointing,
        stage=stage,
        devices=devices,
        micro_batch=micro_batch,
        model=model,
        model_settings=_settings(setting or []),
        input_shape=None if input_shape is None else _shape(input_shape),
        table=table,
    )
    show(form, lambda: _print(plan), plan.document, lambda: [asdict(one) for one in plan.terms])


def _settings(given: list[str]) -> dict[str, Any]:
    """Return the values of KEY=VALUE, read as YAML."""
    import yaml

    from bssearch.errors import UsageError

    found: dict[str, Any] = {}
    for one in given:
        key, separator, value = one.partition("=")
        if not separator or not key:
            raise UsageError(f"--model-setting {one!r} must be KEY=VALUE")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"--model-setting {one!r} is no value: {str(error).splitlines()[0]}") from error
    return found


def _shape(given: str) -> list[int]:
    from bssearch.errors import UsageError

    try:
        return [int(one) for one in given.lower().replace(",", "x").split("x")]
    except ValueError:
        raise UsageError(f"--input {given!r} must be whole numbers with x between, as 3x224x224") from None


def _print(plan: MemoryPlan) -> None:
    """Print a plan for people: its terms, the micro-batches, the table, the notes."""
    screen = console()
    print_table(
        [{**asdict(one), "gib": one.bytes / GIB, "mib_a_sample": one.bytes_per_sample / MIB} for one in plan.terms],
        _TERMS,
    )
    screen.print(_sentence(plan))
    if plan.table:
        rows = [
            {
                **asdict(one),
                "checkpointing": "yes" if one.checkpointing else "no",
                "fixed_gib": one.fixed_bytes / GIB,
                "mib_a_sample": _or_none(one.activation_bytes_per_sample, MIB),
                "largest": one.largest_micro_batch,
                "safe": one.safe_micro_batch,
            }
            for one in plan.table
        ]
        print_table(rows, _CHOICES)
    for note in plan.notes:
        screen.print(f"note: {note}")


def _or_none(value: int | None, unit: int) -> float | None:
    return None if value is None else value / unit


def _sentence(plan: MemoryPlan) -> str:
    said = f"{plan.parameters:,} parameters: {plan.fixed_bytes / GIB:.3g} GiB before any activation."
    if plan.activation_bytes_per_sample is not None:
        said += f" Each sample adds {plan.activation_bytes_per_sample / MIB:.4g} MiB."
    if plan.peak_bytes is not None:
        said += f" The peak of a step at micro-batch {plan.micro_batch} is {plan.peak_bytes / GIB:.3g} GiB."
    if plan.largest_micro_batch is not None and plan.memory_bytes is not None and plan.headroom_bytes is not None:
        memory, free = f"{plan.memory_bytes / GIB:.3g} GiB", f"{plan.headroom_bytes / GIB:.3g} GiB free"
        if not plan.largest_micro_batch:
            return f"{said} Not even one sample fits in {memory}."
        said += (
            f" Of {memory} the largest micro-batch that fits is {plan.largest_micro_batch}; "
            f"{plan.safe_micro_batch or 'none'} leaves {free}. That is what fits, not what is best."
        )
    return said
