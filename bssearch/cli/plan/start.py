"""``bssearch plan start``: from a few questions to a study that runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bssearch.cli.output import Format, FormatOption, note, show, write

if TYPE_CHECKING:
    from bssearch.planning.start import Question
    from bssearch.planning.start_spec import StartPlan

UNKNOWN = "not known"


def start(
    memory_gib: Annotated[float | None, typer.Option(help="Memory of a device.", show_default="24")] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Parameters of the model: 25000000, 25M.", metavar="N", show_default="25000000")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.", show_default="bf16")] = None,
    optimizer: Annotated[str | None, typer.Option(help="As a spec names it.", show_default="adamw")] = None,
    priority: Annotated[str | None, typer.Option(help="speed, accuracy, cost or memory.", show_default="speed")] = None,
    from_: Annotated[
        str | None, typer.Option("--start", help="scratch or fine_tuning.", show_default="scratch")
    ] = None,
    devices: Annotated[int | None, typer.Option(help="Devices to train on in the end.", show_default="1")] = None,
    workload: Annotated[
        str | None, typer.Option(help="FILE.py:NAME, FILE.py, or a shipped one.", show_default="digits, a stand-in")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="Metric to reach.", show_default="accuracy")] = None,
    target: Annotated[float | None, typer.Option(help="Its value.", show_default="0.97")] = None,
    goal: Annotated[str | None, typer.Option(help="maximize or minimize.", show_default="maximize")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds that a training takes to it today.", show_default="2")
    ] = None,
    name: Annotated[str, typer.Option(help="The study's name.")] = "my-study",
    sample_mib: Annotated[
        float | None, typer.Option(help="MiB that a sample adds (bssearch plan memory).", show_default=UNKNOWN)
    ] = None,
    train_samples: Annotated[int | None, typer.Option(help="Training samples.", show_default=UNKNOWN)] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size in use today.", show_default="what is usual")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate in use today.", show_default="what is usual")
    ] = None,
    price_per_device_hour: Annotated[
        float | None, typer.Option(help="What an hour costs, with --priority cost.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the spec here, not to stdout.", metavar="FILE.yaml")] = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Ask nothing: what no option says is usual.")] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Write a study's spec from a few answers: memory, priority, scratch or fine-tuning, devices.

    On a terminal what no option says is asked. The spec runs as it is, with a stand-in workload unless you name yours.
    """
    from bssearch.planning.start_spec import plan_start

    given: dict[str, Any] = {
        "memory_gib": memory_gib,
        "parameters": parameters,
        "precision": precision,
        "optimizer": optimizer,
        "priority": priority,
        "start": from_,
        "devices": devices,
        "workload": workload,
        "metric": metric,
        "target": target,
        "goal": goal,
        "seconds": seconds,
        "sample_mib": sample_mib,
        "train_samples": train_samples,
        "batch": batch,
        "learning_rate": learning_rate,
        "price_per_device_hour": price_per_device_hour,
    }
    answers = {key: value for key, value in given.items() if value is not None}
    if not defaults and sys.stdin.isatty():
        answers |= ask(answers)
    found = plan_start(name=name, **answers)
    if out is not None:
        write_spec(found, out)
    if out is None or form is not Format.TABLE:
        rows = [{"field": field, "reason": reason} for field, reason in found.reasons.items()]
        show(form, lambda: write(found.yaml), found.document, lambda: rows)
    for claim in found.claims:
        note(claim.message)


def ask(answers: dict[str, Any]) -> dict[str, Any]:
    """Return the answers of a person to what is not answered yet; questions go to stderr."""
    from bssearch.planning.start import QUESTIONS

    return {one.name: _answer(one) for one in QUESTIONS if one.name not in answers}


def _answer(question: Question) -> Any:
    """Return the answer to a question, asked again while it is none of the choices."""
    if question.choices is None:
        return typer.prompt(question.text, default=question.default, err=True)
    text = f"{question.text} ({', '.join(question.choices)})"
    while (answer := typer.prompt(text, default=question.default, err=True)) not in question.choices:
        note(f"{answer!r} is none of {', '.join(question.choices)}")
    return answer


def write_spec(found: StartPlan, path: Path) -> None:
    """Write the spec to a new file; raise `UsageError` where it exists, is no YAML by name, or cannot be written."""
    from bssearch.errors import UsageError

    if path.suffix not in {".yaml", ".yml"}:
        raise UsageError(f"--out {path} must end in .yaml or .yml")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(found.yaml)
    except FileExistsError:
        raise UsageError(f"--out {path} exists: nothing is overwritten") from None
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {path}; next: bssearch check {path}", err=True)
