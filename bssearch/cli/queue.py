"""``bssearch queue``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import bssearch
from bssearch.cli.arguments import (
    DatabaseOption,
    NameArgument,
    existing_store,
    launched,
    store_to_read,
)
from bssearch.cli.output import Format, FormatOption, duration, print_table, say, show_model, tell
from bssearch.commands.launch import TURN_SECONDS, Launch
from bssearch.errors import UsageError, require, required
from bssearch.records.text import visible

if TYPE_CHECKING:
    from bssearch.commands.queue.submissions import AskedStudy, QueueListing
    from bssearch.storage.repository import Store

COLUMNS = (
    "position",
    "study",
    "state",
    "owner",
    "priority",
    "served",
    "trials",
    "reached",
    "running",
    "worker",
)
TagsOption = Annotated[
    list[str] | None, typer.Option("--tag", "--tags", metavar="TAG", help="Tag, such as gpu:h200; may be repeated.")
]


app = typer.Typer(help="Queue studies, and serve the queue on nodes.", no_args_is_help=True)


@app.command("submit")
def submit(
    template: Annotated[
        str, typer.Argument(metavar="TEMPLATE", help="A worker's template, or a .yaml file that names a template.")
    ],
    values: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Values for the template.")] = None,
    name: Annotated[
        str | None, typer.Option(metavar="STUDY", help="Name of the study.", show_default="the name in the file")
    ] = None,
    priority: Annotated[float, typer.Option(help="Workers serve studies of higher priority first.")] = 1.0,
    owner: Annotated[str | None, typer.Option(help="Owner of the study.", show_default="you")] = None,
    tags: TagsOption = None,
    not_before: Annotated[
        str | None,
        typer.Option(metavar="MOMENT", help="Earliest start, such as 2026-12-01T08:00+00:00.", show_default=False),
    ] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Queue a study with a worker's template and your values."""
    from bssearch.spec.templates import check_template_name

    asked = _asked(template, values or [])
    check_template_name(asked.template)
    study = required(name or asked.name, "the study needs a name", hint="name the study with --name STUDY")
    moment = None if not_before is None else _moment(not_before)
    with existing_store(db) as store:
        found = bssearch.submit_study(
            store,
            asked.template,
            asked.values,
            name=study,
            owner=owner,
            priority=priority,
            tags=tags or (),
            not_before=moment,
        )
    done = f"study {found.name} is queued for {found.owner} with template {found.template}; see `bssearch queue list`"
    tell(form, done, study=found.name, owner=found.owner, template=found.template)


def _asked(template: str, values: list[str]) -> AskedStudy:
    from bssearch.commands.queue.submissions import AskedStudy, asked_in_file, checked_value
    from bssearch.spec import parse_value

    path = Path(template)
    of_file = asked_in_file(path) if path.suffix in {".yaml", ".yml"} else AskedStudy(template, {})
    given = {}
    for text in values:
        key, separator, value = text.partition("=")
        require(separator and key and value, f"{text!r} must have the form KEY=VALUE, such as budget.trials=40")
        require(key not in given, f"{text!r}: {key} appears twice; give each key once")
        given[key] = checked_value(key, parse_value(value, text), "on the command line")
    return AskedStudy(of_file.template, {**of_file.values, **given}, of_file.name)


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{text!r} is not a date and time", hint="write a date and time such as 2026-12-01T08:00+00:00"
        ) from None


@app.command("list")
def list_queue(
    everything: Annotated[bool, typer.Option("--all", help="Include finished studies and former workers.")] = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """List the queued studies, the next study first, and the workers."""
    with store_to_read(db) as store:
        found = bssearch.queued_studies(store, everything=everything)
    show_model(form, found, print_queue, found.submissions, COLUMNS)


def print_queue(found: QueueListing) -> None:
    if found.submissions:
        print_table(
            [
                {
                    **row.model_dump(mode="json"),
                    "served": duration(row.served_seconds),
                    "worker": ", ".join(row.workers) or None,
                }
                for row in found.submissions
            ],
            COLUMNS,
        )
        now = datetime.now(UTC)
        for one in found.submissions:
            if one.reason:
                say(f"{one.study}: {one.reason}")
            elif one.not_before is not None and one.not_before > now:
                say(f"study {one.study} starts at {one.not_before:%Y-%m-%d %H:%M} UTC or later")
    else:
        say("the queue is empty")
    if not found.workers:
        say("no worker is running; start a worker on a node with `bssearch queue worker --templates FILE`")
        return
    print_table(
        [
            {
                "worker": worker.host if worker.is_here else f"{worker.host} (gone)",
                "device": worker.device,
                "tags": ", ".join(worker.tags) or None,
                "slots": worker.slots,
                "serving": worker.serving,
                "templates": ", ".join(worker.templates),
            }
            for worker in found.workers
        ],
        ("worker", "device", "tags", "slots", "serving", "templates"),
    )


@app.command("pause")
def pause(study: NameArgument, db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """Pause a queued study and its running trials."""
    _change(bssearch.pause_study, study, db, form, "paused")


@app.command("resume")
def resume(study: NameArgument, db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """Put a paused, cancelled or failed study back in the queue."""
    _change(bssearch.resume_study, study, db, form, "waiting")


@app.command("cancel")
def cancel(study: NameArgument, db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """Cancel a queued study and stop its running trials."""
    _change(bssearch.cancel_study, study, db, form, "cancelled")


def _change(change: Callable[[Store, str], object], study: str, db: str | None, form: Format, state: str) -> None:
    with existing_store(db) as store:
        change(store, study)
    tell(form, f"study {study} is {state}", study=study, state=state)


@app.command("worker")
@launched("allow_busy", "data_dir", "db")
def worker(
    templates: Annotated[
        Path, typer.Option("--templates", metavar="FILE", help="File of the templates that this worker accepts.")
    ],
    launch: Launch,
    tags: TagsOption = None,
    slots: Annotated[
        str | None, typer.Option(metavar="N|auto", help="Number of concurrent trials.", show_default="each spec's")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device: auto, cpu, cuda or cuda:N.", show_default="each spec's")
    ] = None,
    turn_seconds: Annotated[
        float, typer.Option(help="Seconds until a study yields to an earlier study in the queue.")
    ] = TURN_SECONDS,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="Stop when the queue is empty.")] = False,
) -> None:
    """Serve the queue on this node until SIGTERM or Ctrl-C."""
    bssearch.run_worker(
        templates,
        launch,
        bssearch.Serving(
            tags=tuple(dict.fromkeys(tags or ())),
            slots=_slots(slots),
            device=device,
            turn_seconds=turn_seconds,
            until_empty=until_empty,
        ),
        tell=_tell,
    )


def _slots(text: str | None) -> int | Literal["auto"] | None:
    if text is None or text == "auto":
        return "auto" if text else None
    require(re.fullmatch(r"[1-9]\d{0,3}", text), f"--slots {text} must be from 1 to 9999, or auto")
    return int(text)


def _tell(line: str) -> None:
    sys.stdout.write(f"{datetime.now():%H:%M:%S} {visible(' '.join(line.split()))}\n")
    sys.stdout.flush()
