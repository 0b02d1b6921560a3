"""``run``: a study is run to its end, or on from where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bssearch.commands.display.answer import Answer
from bssearch.commands.opening import ExecutorFactory, Launch, opened
from bssearch.search.finding import answer
from bssearch.search.listener import Listener
from bssearch.spec import StudySpec


def run_study(
    spec: StudySpec,
    *,
    workload: Any = None,
    db: str | None = None,
    folder: Path | str = ".",
    data_dir: Path | str | None = None,
    allow_changed_workload: bool = False,
    allow_busy: bool = False,
    listener: Listener | None = None,
    progress: bool | None = None,
    make_executor: ExecutorFactory | None = None,
) -> Answer:
    """Run a study to its end, or on from where it stopped, and return the answer.

    ``workload`` is what to train: a class, which is called with the spec's ``workload_settings``, an object, or the
    name of one. The study then names it in the place of the spec's. One that no worker process can load, as it was
    defined in a notebook or in the script that runs, is trained in this process, one trial at a time.
    ``db`` is a database URL (default: ``BSSEARCH_DB_URL``, else a file here); a workload file is looked up relative to
    ``folder``, and ``data_dir`` is where the shipped workloads look for their data (default: ``BSSEARCH_DATA_DIR``).
    A run is shown while it goes on in a notebook, elsewhere with ``progress=True``, with False nowhere; where a
    ``listener`` is given, only that is told.
    Several processes, on several machines, may run one study at once. A study whose workload's file has changed since
    its first run is refused unless ``allow_changed_workload``: trials of two codes do not compare; a GPU that another
    program computes on unless ``allow_busy``. Nothing is written before the spec has been checked against the workload.
    Raises `SpecError`, `WorkloadError`, `DatabaseError`, `LaunchError`, `InterruptedRunError`, and
    `TargetNotReachedError` where no trial reached the target.
    """
    launch = Launch(
        db=db,
        workload=workload,
        folder=folder,
        data_dir=data_dir,
        allow_changed_workload=allow_changed_workload,
        allow_busy=allow_busy,
        listener=listener,
        progress=progress,
        make_executor=make_executor,
    )
    with opened(spec, launch) as study:
        study.driver().run()
        return Answer.of(answer(study.store, spec.name))
