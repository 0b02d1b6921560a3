"""Launch options, defined once for every command that trains."""

# No `from __future__ import annotations`: the command line reads the `Option` of each field.

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from bssearch.registry import Option
from bssearch.settings import DATA_DIR_VARIABLE, DATABASE_URL_VARIABLE

if TYPE_CHECKING:
    from bssearch.executors.base import Executor
    from bssearch.search.listener import Listener
    from bssearch.search.shift import Shift
    from bssearch.spec import StudySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The database, the places of workload and data, and the way trials run.

    A workload file is looked up in ``folder``. ``workload`` replaces the spec's: a class (called with the spec's
    ``workload_settings``), an object, or a name. Code from a notebook or the running script is trained in this process,
    one trial at a time, because no worker process can load it.

    ``progress``: True shows the run, None only in a notebook, False never; a ``listener`` replaces the display.
    ``pretended_gib`` limits device memory for a measurement without binding the study to it. With a ``shift`` the study
    may yield to other studies.
    """

    db: Annotated[
        str | None,
        Option(
            "Database of the studies.",
            metavar="URL",
            variable=DATABASE_URL_VARIABLE,
            shown_default="sqlite:///bssearch.db",
        ),
    ] = None
    folder: Path | str = "."
    data_dir: Annotated[
        Path | str | None,
        Option(
            "Where the shipped workloads look for their data.",
            metavar="FOLDER",
            variable=DATA_DIR_VARIABLE,
            shown_default="",
        ),
    ] = None
    allow_changed_workload: Annotated[bool, Option("Continue although the workload's file has changed.")] = False
    allow_busy: Annotated[bool, Option("Continue although another program computes on the GPU.")] = False
    workload: Annotated[
        Any,
        Option(
            "The code to run; a file is looked up from this folder.",
            metavar="FILE.py:NAME",
            shown_default="the stored one, where you have run it on this machine",
        ),
    ] = None
    listener: "Listener | None" = None
    progress: bool | None = None
    make_executor: "Callable[[StudySpec, Path], Executor] | None" = None
    pretended_gib: float | None = None
    shift: "Shift | None" = None


HERE = Launch()

OPTIONS = {one.name: note for one in fields(Launch) for note in get_args(one.type) if isinstance(note, Option)}
