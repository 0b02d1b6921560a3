"""Opening a study: its place in the store, an executor for its trials, and its spec checked against its workload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bssearch.commands.agreement import (
    batch_normalisation_caveats,
    check_against_workload,
    check_parts,
    check_question,
    check_target,
    differences,
    refuse_changed_workload,
    with_all_that_is_asked,
    workload_has_changed,
)
from bssearch.commands.known_workloads import refuse_unknown, remember
from bssearch.errors import UsageError
from bssearch.executors.base import Executor, ExecutorSettings, make_executor
from bssearch.history import History
from bssearch.records import Environment, StudyRecord, WorkloadDescription
from bssearch.search.finding import answer
from bssearch.search.listener import Listener
from bssearch.settings import DATA_DIR_VARIABLE, user_name
from bssearch.spec import StudySpec, checked
from bssearch.spec.stored import spec_of
from bssearch.storage.repository import Store, open_store
from bssearch.storage.starting import archived

if TYPE_CHECKING:
    from bssearch.search.driver import Driver

ExecutorFactory = Callable[[StudySpec, Path], Executor]
"""Makes the executor of a spec; the workload's file is looked up in the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Where a study is stored, where its workload and data are looked up, and how its trials are run.

    ``db`` is a database URL (default: ``BSSEARCH_DB_URL``, else a file here). A workload file is looked up relative to
    ``folder``, the data of shipped workloads in ``data_dir`` (default: ``BSSEARCH_DATA_DIR``). With ``pretended_gib``
    the executor has a device of so many GiB of memory, which the study is not bound to. ``workload`` names the code in
    the place of the spec's. ``make_executor`` gives other executors than worker processes on this machine.
    """

    db: str | None = None
    folder: Path | str = "."
    data_dir: Path | str | None = None
    allow_changed_workload: bool = False
    allow_busy: bool = False
    pretended_gib: float | None = None
    workload: str | None = None
    listener: Listener | None = None
    make_executor: ExecutorFactory | None = None

    def executor(self, spec: StudySpec) -> Executor:
        """Return a new executor for a spec's trials."""
        make = self.make_executor or local(self.data_dir, self.allow_busy)
        if self.pretended_gib is not None:
            spec = with_memory_limit(spec, self.pretended_gib)
        if self.workload is not None:
            spec = spec.model_copy(update={"workload": self.workload})
        return make(spec, Path(self.folder))


@dataclass(frozen=True, slots=True)
class OpenStudy:
    """A stored study with the executor, the device and the listener of its runs."""

    spec: StudySpec
    store: Store
    executor: Executor
    environment: Environment
    listener: Listener

    def driver(self) -> Driver:
        """Return a driver of the study's trials."""
        from bssearch.search.driver import Driver

        return Driver(self.spec, self.store, self.executor, self.environment, self.listener)

    def history(self) -> History:
        """Return what is stored of the study now."""
        return History(
            self.spec, self.store.trials(self.spec.name), self.store.probes(self.spec.name, self.environment)
        )


@contextmanager
def opened(spec: StudySpec, launch: Launch) -> Iterator[OpenStudy]:
    """Give a spec's study, made in the store where it is new, with an executor; close both at the end.

    Nothing is written before the spec has been checked against the workload. Raises what `described` raises,
    `DatabaseError`, and `QuestionChangedError` where the stored study of that name asks another question.
    """
    listener, spec = launch.listener or Listener(), checked(spec)
    with _described(spec, launch) as (executor, found):
        check_target(spec, found)
        with open_store(launch.db, notify=listener.note) as store:
            spec = _open_study(spec, launch, store, found, listener)
            yield OpenStudy(spec, store, executor, found.environment, listener)


@contextmanager
def described(spec: StudySpec, launch: Launch) -> Iterator[tuple[Executor, WorkloadDescription]]:
    """Give an executor for a spec and the description of its workload; close the executor at the end.

    Raises `UsageError` for an imported study and for a pruner or sampler that cannot be loaded, `SpecError` where the
    spec asks for more than the workload has, `WorkloadError` and `LaunchError`.
    """
    with _described(checked(spec), launch) as found:
        yield found


@contextmanager
def _described(spec: StudySpec, launch: Launch) -> Iterator[tuple[Executor, WorkloadDescription]]:
    """Give what `described` does, for a spec that has been checked."""
    if spec.is_imported:
        raise UsageError(f"study {spec.name!r} was imported: it has no workload to run, only runs made elsewhere")
    check_parts(spec)
    executor = launch.executor(spec)
    try:
        found = executor.describe()
        check_against_workload(spec, found)
        yield executor, found
    finally:
        executor.close()


def stored_spec(study: str, *, db: str | None = None, to_run: bool = False, runs_code: bool = False) -> StudySpec:
    """Return the spec of a stored study of which there is an answer; ``to_run`` where more of it is to be run.

    Raises `NotFoundError`, `DatabaseError`, `TargetNotReachedError` where no trial reached the target, and, ``to_run``,
    `UsageError` where its runs were imported. With ``runs_code`` the workload that it names is to be run: `UsageError`
    where this user has not done so before (`bssearch.commands.known_workloads`).
    """
    with open_store(db, write=False) as store:
        record = store.study(study)
        spec = spec_of(record)
        if to_run and spec.is_imported:
            raise UsageError(
                f"the runs of study {study!r} were made elsewhere and imported: there is no workload to run",
                hint="make more of them where they were made, and import those too, under another name",
            )
        answer(store, study)
    if runs_code and not spec.is_imported:
        refuse_unknown(spec, record, Path())
    return spec


def with_memory_limit(spec: StudySpec, gib: float) -> StudySpec:
    """Return a spec whose executor pretends a device with so much memory."""
    limited = spec.executor.model_copy(update={"memory_limit_gib": gib})
    return spec.model_copy(update={"executor": limited})


def local(data_dir: Path | str | None, allow_busy: bool) -> ExecutorFactory:
    """Return what makes the executor that a spec names, on this machine."""

    def make(spec: StudySpec, folder: Path) -> Executor:
        default = spec.default_configuration.parameters
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
            own_parameters={name: default[name] for name in spec.space.own_domains},
            environment={} if data_dir is None else {DATA_DIR_VARIABLE: str(data_dir)},
        )
        return make_executor(spec.executor.name, settings)

    return make


def _open_study(
    spec: StudySpec, launch: Launch, store: Store, found: WorkloadDescription, listener: Listener
) -> StudySpec:
    """Make or join the study, bind it to the device unless that is pretended, and tell what has changed.

    Return the spec that it runs by from now on.
    """
    stored = store.find_study(spec.name)
    study = stored or _create_study(spec, store)
    if study.archived_at is not None:
        raise archived(spec.name)
    check_question(spec, study)
    if stored is not None:
        spec = with_all_that_is_asked(spec, stored, store)
    has_changed = workload_has_changed(study, found)
    if has_changed and not launch.allow_changed_workload:
        refuse_changed_workload(study, store)
    if launch.pretended_gib is None:
        store.bind_environment(spec.name, found.environment, again=has_changed)
        store.update_spec(spec.name, spec.model_dump(mode="json"))
    if launch.workload in {None, spec.workload}:
        remember(spec, study, Path(launch.folder))
    listener.opened(study, store.masked_url, continued=stored is not None)
    for note in differences(spec, study, found):
        listener.note(note)
    for _, sentence in batch_normalisation_caveats(spec, found):
        listener.note(sentence)
    return spec


def _create_study(spec: StudySpec, store: Store) -> StudyRecord:
    """Return the new study; where another driver made it in this moment, that one."""
    try:
        return store.create_study(spec.new_study(user_name()))
    except UsageError:
        return store.study(spec.name)
