"""A study from Python: run it, ask it for the best batch size, read its trials."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bssearch.analysis.report import Answer, build_answer
from bssearch.errors import QuestionChangedError, SpecError
from bssearch.executors.base import Executor
from bssearch.records import StudyRecord, WorkloadDescription
from bssearch.search.listener import Listener
from bssearch.spec import StudySpec
from bssearch.spec.model import changes
from bssearch.storage.repository import Store, open_store

if TYPE_CHECKING:
    import pandas as pd

ExecutorFactory = Callable[[StudySpec, Path], Executor]


def run_study(
    spec: StudySpec,
    *,
    db: str | None = None,
    folder: Path | str = ".",
    listener: Listener | None = None,
    make_executor: ExecutorFactory | None = None,
) -> Answer:
    """Run a study to its end, or on from where it stopped, and return the answer.

    ``db`` is a database URL (default: ``BSSEARCH_DB_URL``, else a file here); a workload file is looked up relative to
    ``folder``. Nothing is written before the spec has been checked against the workload. Raises `SpecError`,
    `WorkloadError`, `DatabaseError`, `LaunchError`, `InterruptedRunError`, and `TargetNotReachedError` where no trial
    reached the target.
    """
    from bssearch.search.driver import Driver

    listener = listener or Listener()
    executor = (make_executor or local_executor)(spec, Path(folder))
    try:
        description = executor.describe()
        check_against_workload(spec, description)
        with open_store(db) as store:
            _open_study(spec, store, description, listener)
            Driver(spec, store, executor, description.environment, listener).run()
            return answer(store, spec.name)
    finally:
        executor.close()


def best(study: str, *, db: str | None = None) -> Answer:
    """Return what a study's trials say; raises `NotFoundError`, `DatabaseError` or `TargetNotReachedError`."""
    with open_store(db, write=False) as store:
        return answer(store, study)


def trials_frame(study: str, *, db: str | None = None) -> pd.DataFrame:
    """Return a study's trials as a data frame, one row a trial, configuration and outcome side by side."""
    import pandas as pd

    rows = []
    with open_store(db, write=False) as store:
        for trial in store.trials(study):
            row = {"number": trial.number, "phase": trial.phase.value, "seed": trial.seed, "evidence": trial.evidence}
            configuration = asdict(trial.configuration)
            outcome = asdict(trial.outcome) if trial.outcome else {}
            row |= {**configuration, **configuration.pop("parameters"), **outcome, "state": trial.state.value}
            row.pop("parameters", None)
            rows.append(row)
    return pd.DataFrame(rows)


def local_executor(spec: StudySpec, folder: Path) -> Executor:
    """Return the executor that runs trials in worker processes on this machine."""
    from bssearch.executors.local import LocalExecutor

    return LocalExecutor(
        spec.workload,
        spec.workload_settings,
        folder,
        slots=spec.executor.slots,
        threads=spec.executor.threads,
        device=spec.executor.device,
        hang_seconds=spec.executor.hang_seconds,
    )


def check_against_workload(spec: StudySpec, found: WorkloadDescription) -> None:
    """Raise `SpecError` where the spec asks what the workload cannot give."""
    target = spec.target
    if target.metric not in found.metrics:
        raise SpecError(f"target.metric = {target.metric!r}: the workload measures {', '.join(sorted(found.metrics))}")
    metric = found.metrics[target.metric]
    low, high = metric.low, metric.high
    if (low is not None and target.value < low) or (high is not None and target.value > high):
        bound = f"[{'-∞' if low is None else f'{low:g}'}, {'∞' if high is None else f'{high:g}'}]"
        raise SpecError(f"target.value = {target.value:g}: {target.metric} lies in {bound}")
    for field, sizes in (("space.batch_size", spec.space.rungs), ("default.batch_size", [spec.default.batch_size])):
        if sizes[-1] > found.train_samples:
            raise SpecError(
                f"{field} = {sizes[-1]}: larger than the training set of {found.train_samples} samples",
                hint=f"the largest batch size possible is {found.train_samples}",
            )


def check_question(spec: StudySpec, stored: StudyRecord) -> None:
    """Raise `QuestionChangedError` where a spec asks another question than the stored study of its name."""
    before = StudySpec.model_validate(stored.spec)
    differing = changes(before.question, spec.question)
    threads = before.executor.threads, spec.executor.threads
    if threads[0] != threads[1]:  # seconds on another number of threads do not compare
        differing["executor.threads"] = threads
    if differing:
        listed = "; ".join(f"{field}: {old!r} → {new!r}" for field, (old, new) in differing.items())
        raise QuestionChangedError(
            f"study {spec.name!r} exists and asks another question: {listed}",
            changes=differing,
            hint="give the spec another name, or undo the change; budget, sampler, pruner, confirm, seed and "
            "slots may change",
        )


def _open_study(spec: StudySpec, store: Store, found: WorkloadDescription, listener: Listener) -> None:
    stored = store.find_study(spec.name)
    if stored is not None:
        check_question(spec, stored)
    study = stored or store.create_study(
        spec.name,
        spec=spec.model_dump(mode="json"),
        spec_hash=spec.question_hash,
        objective=spec.objective,
        target=spec.record_target,
        created_by=_user(),
    )
    store.bind_environment(spec.name, found.environment)
    store.update_spec(spec.name, spec.model_dump(mode="json"))
    listener.opened(study, store.masked_url, continued=stored is not None)


def answer(store: Store, name: str) -> Answer:
    """Return the answer of a study in an open store."""
    study = store.study(name)
    return build_answer(study, StudySpec.model_validate(study.spec), store.trials(name), store.probes(name))


def _user() -> str:
    """Return the user's name, or number where the machine has no name for it."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return str(os.getuid())
