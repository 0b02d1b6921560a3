"""A study from Python: run it, ask it for the best batch size, read its trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bssearch.analysis.answer import Answer
from bssearch.commands.check import Check, about_batch_normalisation, check_study
from bssearch.errors import QuestionChangedError, SpecError, UsageError
from bssearch.executors.base import Executor, ExecutorSettings, make_executor
from bssearch.records import Environment, StudyRecord, WorkloadDescription, outcome_fields
from bssearch.search.finding import answer
from bssearch.search.listener import Listener
from bssearch.settings import DATA_DIR_VARIABLE, user_name
from bssearch.spec import StudySpec
from bssearch.spec.model import IMPORTED, changes
from bssearch.storage.repository import Store, open_store
from bssearch.storage.starting import archived

if TYPE_CHECKING:
    import pandas as pd

    from bssearch.commands.target import Advice, Run

ExecutorFactory = Callable[[StudySpec, Path], Executor]


def run_study(
    spec: StudySpec,
    *,
    db: str | None = None,
    folder: Path | str = ".",
    data_dir: Path | str | None = None,
    allow_changed_workload: bool = False,
    allow_busy: bool = False,
    listener: Listener | None = None,
    make_executor: ExecutorFactory | None = None,
) -> Answer:
    """Run a study to its end, or on from where it stopped, and return the answer.

    ``db`` is a database URL (default: ``BSSEARCH_DB_URL``, else a file here); a workload file is looked up relative to
    ``folder``, and ``data_dir`` is where the shipped workloads look for their data (default: ``BSSEARCH_DATA_DIR``).
    Several processes, on several machines, may run one study at once. A study whose workload's file has changed since
    its first run is refused unless ``allow_changed_workload``: trials of two codes do not compare; a GPU that another
    program computes on unless ``allow_busy``. Nothing is written before the spec has been checked against the workload.
    Raises `SpecError`, `WorkloadError`, `DatabaseError`, `LaunchError`, `InterruptedRunError`, and
    `TargetNotReachedError` where no trial reached the target.
    """
    from bssearch.search.driver import Driver

    with opened(
        spec,
        db=db,
        folder=folder,
        data_dir=data_dir,
        allow_changed_workload=allow_changed_workload,
        allow_busy=allow_busy,
        listener=listener,
        make_executor=make_executor,
    ) as study:
        Driver(spec, study.store, study.executor, study.environment, study.listener).run()
        return answer(study.store, spec.name)


def check(
    spec: StudySpec,
    *,
    folder: Path | str = ".",
    data_dir: Path | str | None = None,
    allow_busy: bool = False,
    make_executor: ExecutorFactory | None = None,
) -> Check:
    """Try a study's workload for a few seconds and return what its spec leads to; nothing is stored.

    Raises what `run_study` raises before its first trial.
    """
    with described(spec, folder, make_executor or local(data_dir, allow_busy)) as (executor, found):
        check_target(spec, found)
        return check_study(spec, executor, found)


def advise_target(
    spec: StudySpec,
    *,
    runs: int = 5,
    margin: float | None = None,
    on_run: Callable[[Run], None] = lambda run: None,
    folder: Path | str = ".",
    data_dir: Path | str | None = None,
    allow_busy: bool = False,
    make_executor: ExecutorFactory | None = None,
) -> Advice:
    """Run the default configuration to its limit with several seeds and propose a target; nothing is stored.

    The spec's own target may be anything. ``on_run`` gets each run as it ends. See `bssearch.commands.target.advise`.
    """
    from bssearch.commands.target import advise

    with described(spec, folder, make_executor or local(data_dir, allow_busy)) as (executor, _):
        return advise(spec, executor, runs=runs, margin=margin, on_run=on_run)


@dataclass(frozen=True)
class OpenStudy:
    """A study that is stored, and what it takes to run something of it."""

    store: Store
    executor: Executor
    environment: Environment
    listener: Listener


@contextmanager
def opened(
    spec: StudySpec,
    *,
    db: str | None = None,
    folder: Path | str = ".",
    data_dir: Path | str | None = None,
    allow_changed_workload: bool = False,
    allow_busy: bool = False,
    pretended_gib: float | None = None,
    listener: Listener | None = None,
    make_executor: ExecutorFactory | None = None,
) -> Iterator[OpenStudy]:
    """Give a study of the store, made where it is new, with an executor for it; see `run_study`.

    With ``pretended_gib`` the executor has a device of so much memory, which the study is not bound to.
    """
    listener = listener or Listener()
    launched = spec if pretended_gib is None else with_memory_limit(spec, pretended_gib)
    with described(launched, folder, make_executor or local(data_dir, allow_busy)) as (executor, found):
        check_target(spec, found)
        with open_store(db, notify=listener.note) as store:
            _open_study(spec, store, found, listener, allow_changed_workload, bind=pretended_gib is None)
            yield OpenStudy(store, executor, found.environment, listener)


@contextmanager
def described(
    spec: StudySpec, folder: Path | str, make_executor: ExecutorFactory
) -> Iterator[tuple[Executor, WorkloadDescription]]:
    """Give an executor for a spec, closed at the end, and what its workload is, checked against the spec."""
    if spec.workload == IMPORTED:
        raise UsageError(f"study {spec.name!r} was imported: it has no workload to run, only runs made elsewhere")
    executor = make_executor(spec, Path(folder))
    try:
        found = executor.describe()
        check_against_workload(spec, found)
        yield executor, found
    finally:
        executor.close()


def best(study: str, *, db: str | None = None, target: float | None = None) -> Answer:
    """Return what a study's trials say, for another target at or easier than its own too.

    Raises `NotFoundError`, `DatabaseError`, `TargetNotReachedError`, and `UsageError` for a harder target.
    """
    with open_store(db, write=False) as store:
        return answer(store, study, target)


def trials_frame(study: str, *, db: str | None = None) -> pd.DataFrame:
    """Return a study's trials as a data frame, one row a trial, configuration and outcome side by side."""
    import pandas as pd

    rows = []
    with open_store(db, write=False) as store:
        for trial in store.trials(study):
            row = {"number": trial.number, "phase": trial.phase.value, "seed": trial.seed, "uncapped": trial.uncapped}
            configuration = asdict(trial.configuration)
            outcome = outcome_fields(trial.outcome) if trial.outcome else {}
            row |= {**configuration, **configuration.pop("parameters"), **outcome, "state": trial.state.value}
            row.pop("parameters", None)
            rows.append(row)
    return pd.DataFrame(rows)


def with_memory_limit(spec: StudySpec, gib: float) -> StudySpec:
    """Return a spec whose executor pretends a device with so much memory."""
    limited = spec.executor.model_copy(update={"memory_limit_gib": gib})
    return spec.model_copy(update={"executor": limited})


def local(data_dir: Path | str | None, allow_busy: bool) -> ExecutorFactory:
    """Return what makes the executor that a spec names, on this machine."""

    def make(spec: StudySpec, folder: Path) -> Executor:
        settings = ExecutorSettings(
            workload=spec.workload,
            workload_settings=spec.workload_settings,
            folder=folder,
            slots=spec.executor.slots,
            threads=spec.executor.threads,
            device=spec.executor.device,
            hang_seconds=spec.executor.hang_seconds,
            training=spec.training.record,
            memory_limit_bytes=spec.executor.memory_limit_bytes,
            allow_busy=allow_busy,
            environment={} if data_dir is None else {DATA_DIR_VARIABLE: str(data_dir)},
        )
        return make_executor(spec.executor.name, settings)

    return make


def check_against_workload(spec: StudySpec, found: WorkloadDescription) -> None:
    """Raise `SpecError` where the spec asks what the workload cannot give."""
    target = spec.target
    if target.metric not in found.metrics:
        raise SpecError(f"target.metric = {target.metric!r}: the workload measures {', '.join(sorted(found.metrics))}")
    for field, sizes in (("space.batch_size", spec.space.rungs), ("default.batch_size", [spec.default.batch_size])):
        if sizes[-1] > found.train_samples:
            raise SpecError(
                f"{field} = {sizes[-1]}: larger than the training set of {found.train_samples} samples",
                hint=f"the largest batch size possible is {found.train_samples}",
            )


def check_target(spec: StudySpec, found: WorkloadDescription) -> None:
    """Raise `SpecError` where the target is no value of its metric, or takes no training."""
    target = spec.target
    metric = found.metrics[target.metric]
    low, high = metric.low, metric.high
    if (low is not None and target.value < low) or (high is not None and target.value > high):
        bound = f"[{'-∞' if low is None else f'{low:g}'}, {'∞' if high is None else f'{high:g}'}]"
        raise SpecError(f"target.value = {target.value:g}: {target.metric} lies in {bound}")
    untrained = found.model.initial_metrics.get(target.metric)
    if untrained is not None and spec.record_target.is_met_by(untrained):
        raise SpecError(
            f"target.value = {target.value:g} (goal: {target.goal}) is met before the first step: "
            f"an untrained model has {target.metric} = {untrained:.4g}",
            hint="ask for a harder target (`bssearch target` proposes one); is it the right goal?",
        )
    if untrained is None:
        raise SpecError(
            f"target.metric = {target.metric!r}: of an untrained model it is not a finite number, and a trial ends "
            "where it is not"
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


def _open_study(
    spec: StudySpec,
    store: Store,
    found: WorkloadDescription,
    listener: Listener,
    allow_changed_workload: bool,
    *,
    bind: bool,
) -> None:
    stored = store.find_study(spec.name)
    study = stored or _create_study(spec, store)
    if study.archived_at is not None:
        raise archived(spec.name)
    check_question(spec, study)
    changed = _has_changed(study, found)
    if changed and not allow_changed_workload:
        _refuse_changed_workload(study, store)
    if bind:
        store.bind_environment(spec.name, found.environment, again=changed)
        store.update_spec(spec.name, spec.model_dump(mode="json"))
    listener.opened(study, store.masked_url, continued=stored is not None)
    for note in _differences(spec, study, found):
        listener.note(note)
    for _, message in about_batch_normalisation(spec, found):
        listener.note(message)


def _has_changed(study: StudyRecord, found: WorkloadDescription) -> bool:
    before = study.environment
    return before is not None and before.workload_revision != found.environment.workload_revision


def _refuse_changed_workload(study: StudyRecord, store: Store) -> None:
    """Raise `UsageError` where trials of another code are stored that say something."""
    if all(trial.state.is_missing for trial in store.trials(study.name)):
        return
    raise UsageError(
        f"the file of workload {study.spec['workload']!r} has changed since the study {study.name!r} began: what it "
        "trains now does not compare with the trials that are stored",
        hint=f"give the spec another name, or `bssearch delete {study.name}`; "
        "`run --allow-changed-workload` where the change does not matter",
    )


def _differences(spec: StudySpec, study: StudyRecord, found: WorkloadDescription) -> Iterator[str]:
    """Yield what is not as it was when the study was last run, though it may go on."""
    now = spec.model_dump(mode="json")
    for part in ("budget", "sampler", "pruner", "confirm"):
        before: Any = study.spec[part]
        for field, (old, new) in changes(before, now[part]).items():
            if field in before:  # what this version has brought had no value
                yield f"{part}.{field} was {old}, from now on it is {new}"
    if study.environment is None:
        return
    for what, old, new in (
        ("the workload's file", study.environment.workload_revision, found.environment.workload_revision),
        ("Python", study.environment.python_version, found.environment.python_version),
        ("torch", study.environment.torch_version, found.environment.torch_version),
    ):
        if old != new:
            yield f"{what} has changed since the study began ({old} → {new}): are its earlier trials still comparable?"


def _create_study(spec: StudySpec, store: Store) -> StudyRecord:
    """Return the new study; where another driver made it in this moment, that one."""
    try:
        return store.create_study(
            spec.name,
            spec=spec.model_dump(mode="json"),
            spec_hash=spec.question_hash,
            objective=spec.objective,
            target=spec.record_target,
            created_by=user_name(),
        )
    except UsageError:
        return store.study(spec.name)
