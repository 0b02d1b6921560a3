"""How a study is launched: the one definition of the options that every verb which trains takes."""

# Without `from __future__ import annotations`: the command line reads the `Option` of each field.

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
    """The database of a study, the places of its workload and data, and the way its trials run.

    A workload file is looked up in ``folder``. ``workload`` replaces the spec's workload: a class, which is called with
    the spec's ``workload_settings``, an object, or the name of one. Code from a notebook or from the running script is
    trained in this process, one trial at a time, because no worker process can load it.

    A run is shown in a notebook; elsewhere with ``progress=True``; nowhere with False. With a ``listener`` only the
    listener is told. ``make_executor`` makes other executors than worker processes on this machine. ``pretended_gib``
    limits the device's memory for a measurement, to which the study is not bound. With a ``shift`` the study may have
    to make room for other studies.
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
"""The default: the database and the data that the environment names, files in this folder."""

OPTIONS = {one.name: note for one in fields(Launch) for note in get_args(one.type) if isinstance(note, Option)}
"""The options that a command line may offer, by field."""
