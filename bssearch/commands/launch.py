"""Launch options of every command that trains, and defaults that Python and the command line share."""

# No `from __future__ import annotations`: the command line reads the `Option` of each field.

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from bssearch.registry import Option
from bssearch.settings import DATA_DIR_VARIABLE, DATABASE_URL_VARIABLE

if TYPE_CHECKING:
    from bssearch.executors.base import Executor
    from bssearch.search.driver import Listener, Shift
    from bssearch.spec import StudySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The database, the locations of the workload and data, and the way trials run.

    ``workload``, a class, an object or a name, replaces the spec's workload. A class receives ``workload_settings``.
    Code from a notebook or the running script trains in this process, one trial at a time.

    Example: ``bssearch.run_study("study.yaml", bssearch.Launch(db="sqlite:///runs.db", verbose=True))``
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
    folder: Path | str = "."  # folder of workload files
    data_dir: Annotated[
        Path | str | None,
        Option(
            "Folder with the data of the shipped workloads.",
            metavar="FOLDER",
            variable=DATA_DIR_VARIABLE,
            shown_default="",
        ),
    ] = None
    allow_changed_workload: Annotated[bool, Option("Continue even if the workload's file has changed.")] = False
    allow_busy: Annotated[bool, Option("Continue even if another program computes on the GPU.")] = False
    workload: Annotated[
        Any,
        Option(
            "The code to run; a relative path starts in the current folder.",
            metavar="FILE.py:NAME",
            shown_default="the stored workload, if you ran it on this machine",
        ),
    ] = None
    verbose: Annotated[bool, Option("Print a line for each trial that ends.")] = False
    listener: "Listener | None" = None  # a listener instead of the display of progress
    progress: bool | None = None  # True shows progress; None shows progress only in a notebook
    make_executor: "Callable[[StudySpec, Path], Executor] | None" = None
    pretended_gib: float | None = None  # limit of device memory that the study does not store
    shift: "Shift | None" = None  # yields to other studies


HERE = Launch()

QUICK_SECONDS = 60.0  # seconds for a quick answer
TARGET_RUNS = 5  # runs of the default for `check --suggest-target`
TURN_SECONDS = 300.0  # seconds until a queued study yields to a higher priority; much longer than loading a workload

OPTIONS = {one.name: note for one in fields(Launch) for note in get_args(one.type) if isinstance(note, Option)}
