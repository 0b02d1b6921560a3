"""Open a study with its store and executor, and check its spec."""

import hashlib
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from threading import Timer
from typing import Any

from bssearch import registry
from bssearch.analysis.objectives import SamplesToTarget, objective_of
from bssearch.commands.display import watched
from bssearch.commands.launch import HERE, Launch
from bssearch.commands.pitfalls import about_batch_norm, pitfalls
from bssearch.commands.reporting import reported
from bssearch.errors import BSSearchError, QuestionChangedError, SpecError, UsageError, WorkloadError, require
from bssearch.exchange.boards.base import boards_of, check_boards
from bssearch.executors.base import Executor, ExecutorSettings, Program, make_executor
from bssearch.files import make_private_folder
from bssearch.records import MAKE_TRAINER, Configuration, Environment, StudyRecord, WorkloadDescription
from bssearch.records.text import plural
from bssearch.search.driver import Driver, Listener, Shift
from bssearch.search.finding import answer
from bssearch.search.history import History
from bssearch.search.pruners.base import make_pruner
from bssearch.search.pruners.checkpoints import check_checkpoint_place
from bssearch.search.samplers.base import make_sampler
from bssearch.settings import DATA_DIR_VARIABLE, in_parent_folder, state_folder, user_name
from bssearch.spec import StudySpec, changed_fields, checked, find_spec, load_spec, spec_of, split_batch
from bssearch.spec.model import COMMAND, GIVEN_IN_PYTHON, OBJECTIVE, OF_PROGRAMS
from bssearch.storage.repository import Store, check_writable, open_store
from bssearch.storage.trials import archived
from bssearch.workloads.base import SHIPPED, GivenWorkload, given_workload, lies_in_no_file, refuse_while_importing

TEXTS, FOLDER = "texts", "folder"


def remember(spec: StudySpec, study: StudyRecord, folder: Path) -> None:
    """Record the code, cluster and OptunaHub sampler of this user's run, unless bssearch ships all the code."""
    if spec.workload in SHIPPED and spec.executor.address is None and _hub_package(spec) is None:
        return
    file = _file(study)
    text = json.dumps(_identity(spec, folder), sort_keys=True) + "\n"
    with suppress(OSError):
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            make_private_folder(file.parent)
            file.write_text(text, encoding="utf-8")


def known_folder(spec: StudySpec, study: StudyRecord, folder: Path) -> Path:
    """Return the folder with a stored study's code: ``folder``, else the folder of this user's last run.

    Raises `UsageError` if no file in the folder has the workload, or if code or text parameters differ from the last
    run.
    """
    if spec.workload in SHIPPED:
        return folder
    refuse_where_in_no_file(spec)
    known, asked = _remembered(study), _identity(spec, folder)
    has_code = any((asked["sha256"], *asked.get("files", {}).values()))
    remembered = known.get(FOLDER)
    if not has_code and isinstance(remembered, str) and "\0" not in remembered:
        folder = Path(remembered)
        asked = _identity(spec, folder)
    path = PurePath(_location(spec))
    named = f"the stored study {study.name!r} names the workload {spec.workload!r}"
    require(
        path.suffix != ".py" or (folder / path).resolve().is_relative_to(folder.resolve()),
        f"{named}, a file outside the folder {folder.resolve()}; bssearch runs no code that only a database names",
        hint="name the right code with --workload PATH.py:ATTRIBUTE",
    )
    texts = known.get(TEXTS)
    is_same = {**known, TEXTS: None, FOLDER: None} == {**asked, TEXTS: None, FOLDER: None}
    require(
        is_same and isinstance(texts, list) and set(asked[TEXTS]).issubset(map(str, texts)),
        f"{named}, but bssearch has no record that you ran this version of the workload on this machine",
        hint=f"if you trust the workload, add --workload {shlex.quote(spec.workload)}{_what_runs(spec)}",
    )
    return folder


def refuse_unknown_sources(spec: StudySpec, study: StudyRecord) -> None:
    """Raise `UsageError` unless this user's last run of the study had this cluster and OptunaHub package."""
    # A cluster's or package's owner can run code on this machine.
    known, address, package = _remembered(study), spec.executor.address, _hub_package(spec)
    require(
        address is None or known.get("address") == address,
        f"the stored study {study.name!r} names the cluster executor.address = {address!r}, but bssearch has "
        "no record here that you ran this study on this cluster",
        hint="run `bssearch run` with your own spec and this address first",
    )
    require(
        package is None or known.get("sampler") == package,
        f"the stored study {study.name!r} names sampler = {package!r}, a download from OptunaHub, but bssearch has no "
        "record here that you ran this study with this package",
        hint="run `bssearch run` with your own spec and this sampler first",
    )


def _hub_package(spec: StudySpec) -> str | None:
    return spec.sampler.name if spec.sampler.name.startswith("optunahub:") else None


def refuse_where_in_no_file(spec: StudySpec) -> None:
    """Raise `UsageError` if the spec names no workload, or a workload that was passed in Python."""
    require(
        spec.workload != GIVEN_IN_PYTHON,
        f"workload: the spec of study {spec.name!r} names no workload",
        hint="write `workload: my_task.py:MyTask` in the spec, or call "
        "bssearch.run_study(spec, bssearch.Launch(workload=MyTask)) in Python",
    )
    require(
        spec.workload != OBJECTIVE and not lies_in_no_file(spec.workload),
        f"the workload {spec.workload!r} of study {spec.name!r} was passed in Python, so commands cannot "
        "import the workload",
        hint="pass the workload again in Python, as in bssearch.confirm_study(spec, bssearch.Launch(workload=MyTask)), "
        "or as the objective of bssearch.Study(spec, objective=train)",
    )


def _location(spec: StudySpec) -> str:
    return spec.workload.removesuffix(MAKE_TRAINER) if spec.is_program else spec.workload.rpartition(":")[0]


def _file(study: StudyRecord) -> Path:
    return state_folder() / "workloads" / f"{study.mark}.json"


def _remembered(study: StudyRecord) -> dict[str, Any]:
    try:
        known = json.loads(_file(study).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _identity(spec: StudySpec, folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {
        "workload": spec.workload,
        "workload_settings": spec.workload_settings,
        "executor": spec.executor.name,
        "sha256": _digest(folder / _location(spec)),
        TEXTS: sorted(_texts(spec)),  # texts of space and default, which a command puts into shell words
        FOLDER: str(folder.resolve()),
    }
    if spec.executor.address is not None:
        told["address"] = spec.executor.address
    if (package := _hub_package(spec)) is not None:
        told["sampler"] = package
    if spec.is_program:
        from bssearch.executors.programs.command import digest_of, files_of

        told |= {name: getattr(spec, name) for name in OF_PROGRAMS}
        told["files"] = {name: digest_of(file) for name, file in files_of(spec.command, folder).items()}
    return dict(json.loads(json.dumps(told)))


def _what_runs(spec: StudySpec) -> str:
    if not spec.command:
        return ""
    texts = ", ".join(map(repr, sorted(_texts(spec))))
    return f", which runs {shlex.join(spec.command)}{texts and f' with the text values {texts}'}"


def _texts(spec: StudySpec) -> set[str]:
    default, domains = spec.default_configuration.parameters, spec.space.own_domains
    values = [[default[name], *(one if isinstance(one, tuple) else [one])] for name, one in domains.items()]
    return {one for each in values for one in each if isinstance(one, str)}


def _digest(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.suffix and file.is_file() else None


GivenSpec = StudySpec | Mapping[str, Any] | str | Path


def loaded(spec: GivenSpec, launch: Launch, overrides: Sequence[str] = ()) -> tuple[StudySpec, Launch]:
    """Load a spec with ``overrides``, and replace the launch's default folder with the folder of the spec's file.

    A `StudySpec` ignores ``overrides``.
    """
    if isinstance(spec, StudySpec | Mapping):
        return spec if isinstance(spec, StudySpec) else load_spec(spec, overrides), launch
    path = find_spec(spec)
    if launch.folder == HERE.folder:
        launch = replace(launch, folder=path.resolve().parent)
    return load_spec(path, overrides), launch


# Parts of a spec outside its question; a resume reports changes of these parts.
MAY_CHANGE = ("budget", "sampler", "pruner", "confirm")


def check_parts(spec: StudySpec) -> None:
    """Raise `UsageError` if a board's library is missing, or a part of the spec does not load."""
    check_boards(boards_of(spec))
    makers: dict[str, Callable[[], object]] = {
        f"objective = {spec.objective!r}": lambda: objective_of(spec),
        f"sampler = {spec.sampler.name!r}": lambda: make_sampler(spec),
        f"pruner = {spec.pruner.name!r}": lambda: make_pruner(spec.pruner),
        f"executor = {spec.executor.name!r}": lambda: registry.load("executors", spec.executor.name),
    }
    for named, make in makers.items():
        try:
            make()
        except BSSearchError:
            raise
        except Exception as error:
            raise UsageError(
                f"{named} failed to load: {type(error).__name__}: {error}",
                hint="correct the options in the spec, or repair the package",
            ) from error


def check_against_workload(spec: StudySpec, found: WorkloadDescription) -> None:
    """Raise `SpecError` if the workload lacks the metric, or has fewer samples than a batch size."""
    target = spec.target
    require(
        target.metric in found.metrics,
        f"target.metric = {target.metric!r} is not a metric of the workload; choose from "
        f"{', '.join(sorted(found.metrics))}",
        error=SpecError,
    )
    for field, sizes in (("space.batch_size", spec.space.rungs), ("default.batch_size", [spec.default.batch_size])):
        require(
            found.train_samples is None or sizes[-1] <= found.train_samples,
            f"{field} = {sizes[-1]} must be <= {found.train_samples}, the samples of the training set",
            hint=f"choose at most {found.train_samples}",
            error=SpecError,
        )


def check_target(spec: StudySpec, found: WorkloadDescription) -> None:
    """Raise `SpecError` if the target is impossible or trivial, or if an untrained model's metric is not finite."""
    target = spec.target
    metric = found.metrics[target.metric]
    low, high = metric.low, metric.high
    if (low is not None and target.value < low) or (high is not None and target.value > high):
        bound = f"[{'-∞' if low is None else f'{low:g}'}, {'∞' if high is None else f'{high:g}'}]"
        raise SpecError(
            f"target.value = {target.value:g} must be in {bound}, the range of {target.metric}",
            hint="run `bssearch check --suggest-target` to find a target that the default reaches",
        )
    if target.metric not in found.model.initial_metrics:
        return  # A program may make its first evaluation after some steps.
    untrained = found.model.initial_metrics[target.metric]
    if untrained is not None and spec.record_target.is_met_by(untrained):
        raise SpecError(
            f"target.value = {target.value:g} (goal: {target.goal}) is met before the first step: "
            f"an untrained model has {target.metric} = {untrained:.4g}",
            hint="set a harder target (see `bssearch check --suggest-target`), or correct target.goal",
        )
    require(
        untrained is not None,
        f"the {target.metric} of an untrained model is not a finite number; trials with such a metric end as diverged",
        hint="choose another metric, or correct the workload's evaluation",
        error=SpecError,
    )


def check_question(spec: StudySpec, stored: StudyRecord) -> None:
    before = spec_of(stored)
    # Times with other threads, and steps on other devices, are not comparable.
    own, its = ({"threads": one.executor.threads, "devices": one.executor.world_size} for one in (before, spec))
    if differing := changed_fields(before.question, spec.question) | changed_fields(own, its, "executor"):
        listed = "; ".join(f"{field}: {old!r} → {new!r}" for field, (old, new) in differing.items())
        raise QuestionChangedError(
            f"study {spec.name!r} exists and asks another question: {listed}",
            changes=differing,
            hint="give the spec another name, or undo the change; budget, sampler, pruner, confirm, seed, log and "
            "executor.slots may change",
        )


def with_all_that_is_asked(spec: StudySpec, stored: StudyRecord, store: Store) -> StudySpec:
    """Set ``budget.least_trials`` so that a study that ended early uses all of a larger budget."""
    earlier = spec_of(stored)
    before, now = earlier.budget, spec.budget
    least = min(before.least_trials, now.trials)
    seconds_before, seconds = (one.wall_seconds or math.inf for one in (before, now))  # a wall limit is never 0
    if now.trials > before.trials or seconds > seconds_before:
        history = History(earlier, store.trials.of(spec.name))
        if 0 < history.spent < before.trials and history.time_share < 1:
            least = now.trials
    return spec.model_copy(update={"budget": now.model_copy(update={"least_trials": max(least, now.least_trials)})})


def refuse_changed_workload(study: StudyRecord, store: Store) -> None:
    """Raise `UsageError` unless every trial of the study is failed, lost or cancelled."""
    name = study.workload
    part = "source" if name == OBJECTIVE or lies_in_no_file(name) else "file"
    require(
        all(trial.state.is_missing for trial in store.trials.of(study.name)),
        f"the {part} of workload {name!r} has changed since the study {study.name!r} began, so new and stored trials "
        "would not be comparable",
        hint=f"give the spec another name, or run `bssearch study delete {study.name}`; if the "
        "change does not matter, use `run --allow-changed-workload` (in Python `allow_changed_workload=True`)",
    )


def differences(spec: StudySpec, study: StudyRecord, found: WorkloadDescription) -> Iterator[str]:
    now = spec.model_dump(mode="json")
    before = spec_of(study).model_dump(mode="json")
    for part in MAY_CHANGE:
        for field, (old, new) in changed_fields(before[part], now[part]).items():
            was, now_is = ("not given" if one is None else one for one in (old, new))
            yield f"{part}.{field} was {was}, and is now {now_is}"
    if study.environment is None:
        return
    for what, old, new in (
        ("the workload's file", study.environment.workload_revision, found.environment.workload_revision),
        ("Python", study.environment.python_version, found.environment.python_version),
        ("torch", study.environment.torch_version, found.environment.torch_version),
    ):
        if old != new:
            yield f"{what} has changed since the study began ({old} → {new}), so earlier trials may not be comparable"


INLINE = "inline"


def with_workload(spec: StudySpec, given: GivenWorkload) -> StudySpec:
    """Return the spec with the given workload; use the inline executor if only this process can load the workload."""
    executor = spec.executor.model_copy(update={"name": INLINE, "address": None})
    return spec.model_copy(
        update={
            "workload": given.name,
            "workload_settings": spec.workload_settings if given.settings is None else given.settings,
            "executor": spec.executor if given.in_process is None else executor,
        }
    )


def named(spec: StudySpec, given: GivenWorkload | None, launch: Launch, *, keeps_name: bool) -> StudySpec:
    """Return the spec with the given workload, or raise `UsageError` if the workload does not fit the spec.

    If ``keeps_name``, a spec that names a workload stays unchanged.
    """
    if given is None:
        if launch.make_executor is None:
            refuse_where_in_no_file(spec)
        return spec
    require(
        not spec.command or given.name == COMMAND,
        f"study {spec.name!r} trains with a command, which a workload cannot replace",
        hint=f"give --workload {COMMAND} to run the command, {shlex.join(spec.command)}",
    )
    keeps_name = keeps_name and spec.workload != GIVEN_IN_PYTHON
    said = spec.workload_settings
    require(
        given.settings is None or given.settings == said or (not said and not keeps_name),
        f"workload_settings = {said} of study {spec.name!r} differ from the settings of the workload: {given.settings}",
        hint="pass the workload's class, or an object with these workload_settings",
    )
    return spec if keeps_name else with_workload(spec, given)


TOLD_AFTER_S = 30.0  # seconds without an evaluation; imports are shorter


def _given(launch: Launch) -> GivenWorkload | None:
    return None if launch.workload is None else given_workload(launch.workload, Path(launch.folder))


def _executor(spec: StudySpec, launch: Launch, given: GivenWorkload | None) -> Executor:
    if launch.pretended_gib is not None:
        spec = spec.model_copy(
            update={"executor": spec.executor.model_copy(update={"memory_limit_gib": launch.pretended_gib})}
        )
    if given is not None:
        spec = with_workload(spec, given)
    if launch.make_executor is not None:
        return launch.make_executor(spec, Path(launch.folder))
    default = spec.default_configuration
    return make_executor(
        spec.executor.name,
        ExecutorSettings(
            workload=spec.workload,
            workload_settings=spec.workload_settings,
            folder=Path(launch.folder),
            slots=spec.executor.slots,
            threads=spec.executor.threads,
            device=spec.executor.device,
            devices=spec.executor.devices,
            hang_seconds=spec.executor.hang_seconds,
            training=spec.training,
            memory_limit_bytes=spec.executor.memory_limit_bytes,
            allow_busy=launch.allow_busy,
            own_parameters={name: default.parameters[name] for name in spec.space.own_domains},
            optimizers=tuple(dict.fromkeys([*(one.name for one in spec.space.optimizers), default.optimizer])),
            environment={} if launch.data_dir is None else {DATA_DIR_VARIABLE: str(launch.data_dir)},
            program=program_of(spec),
            given=given and given.in_process,
            address=spec.executor.address,
        ),
    )


@dataclass(frozen=True, slots=True)
class OpenStudy:
    """A stored study with its executor, device and listener."""

    spec: StudySpec
    store: Store
    executor: Executor
    environment: Environment
    listener: Listener
    train_samples: int | None = None  # samples of an epoch; None if unknown
    shift: Shift | None = None

    def driver(self) -> Driver:
        return Driver(self.spec, self.store, self.executor, self.environment, self.listener, shift=self.shift)

    def history(self) -> History:
        return History(
            self.spec,
            self.store.trials.of(self.spec.name),
            self.store.probes.by_batch_size(self.spec.name, self.environment),
        )


@contextmanager
def opened(spec: StudySpec, launch: Launch, *, keeps_name: bool = False, reports: bool = False) -> Iterator[OpenStudy]:
    """Create or open a spec's study with an executor; close both at the end.

    Deletes a new study if the workload fails before the first measurement.
    """
    given, asked = _given(launch), spec
    spec = named(checked(spec), given, launch, keeps_name=keeps_name)
    check_writable(launch.db)  # first, because the user's program may run for minutes before the description
    check_checkpoint_place()
    with (
        watched(launch.listener, launch.progress) as watcher,
        reported(spec, watcher, reports=reports) as (listener, reporter),
        _described(spec, launch, given, listener) as (executor, found),
    ):
        check_target(spec, found)
        refuse_batch_norm_by_device(spec, found)
        with open_store(launch.db, notify=listener.note) as store:
            spec, is_new = _open_study(spec, launch, store, found, listener)
            if spec.executor.slots == "auto":
                spec = spec.model_copy(update={"executor": spec.executor.model_copy(update={"slots": executor.slots})})
            if given is None or (given.in_process is None and given.name == spec.workload):
                remember(spec, store.studies.get(spec.name), Path(launch.folder))
            elif given.in_process is not None and asked.executor.name != INLINE:
                listener.note(
                    f"no other process can load {given.label}, so trials run in this process, one at a time; pass a "
                    "class from a file to protect this process from crashes and hangs"
                )
            with (
                _not_left_empty(store, spec.name) if is_new else nullcontext(),
                nullcontext() if reporter is None else reporter.reporting(store, spec, found.train_samples),
            ):
                yield OpenStudy(spec, store, executor, found.environment, listener, found.train_samples, launch.shift)


@contextmanager
def described(
    spec: StudySpec, launch: Launch, *, keeps_name: bool = False
) -> Iterator[tuple[Executor, WorkloadDescription]]:
    given = _given(launch)
    spec = named(checked(spec), given, launch, keeps_name=keeps_name)
    with _described(spec, launch, given, launch.listener or Listener()) as found:
        yield found


@contextmanager
def _described(
    spec: StudySpec, launch: Launch, given: GivenWorkload | None, listener: Listener
) -> Iterator[tuple[Executor, WorkloadDescription]]:
    refuse_while_importing()
    _refuse_imported(spec)
    require(
        len(spec.scales) < 2,
        f"the spec of study {spec.name!r} has {len(spec.scales)} scales, each with its own study",
        hint=f"run `bssearch run SPEC`, then name a study, such as {spec.name}.1",
    )
    check_parts(spec)
    executor = _executor(spec, launch, given)
    try:
        loading = nullcontext() if launch.shift is None else launch.shift.loading(executor.kill)
        with _telling_of_a_wait(spec, listener), loading:
            found = executor.describe()
        check_against_workload(spec, found)
        yield executor, found
    finally:
        executor.close()


@contextmanager
def _telling_of_a_wait(spec: StudySpec, listener: Listener) -> Iterator[None]:
    def tell() -> None:
        load, cpus = os.getloadavg()[0], os.cpu_count() or 1
        busy = f"the machine is busy (load {load:.0f} on {cpus} CPUs), so wait, or " if load > cpus else ""
        listener.note(
            f"{spec.workload} reported no evaluation in {TOLD_AFTER_S:g} s; {busy}check that the loop calls "
            "trial.batches(loader, evaluate=...), or that the Trainer has callbacks=[TrialCallback(trial)]"
        )

    timer = Timer(TOLD_AFTER_S, tell)
    timer.daemon = True
    if spec.is_program and not spec.command:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def stored_spec(
    study: str,
    launch: Launch = HERE,
    *,
    to_run: bool = False,
    runs_code: bool = False,
    connects: bool = False,
    answered: bool = True,
) -> tuple[StudySpec, Launch]:
    """Return the spec of a stored study, and the launch.

    ``to_run`` refuses imported studies. ``runs_code`` sets the launch's folder to the code's folder, and refuses code
    that differs from this user's last run. ``connects`` refuses a cluster or OptunaHub package that differs from the
    last run. ``answered`` raises `TargetNotReachedError` if the study has no answer.
    """
    with open_store(launch.db, write=False) as store:
        record = store.studies.get(study)
        spec = spec_of(record)
        if answered and not (to_run and spec.is_imported):
            answer(store, study)
    if to_run:
        _refuse_imported(spec)
    if connects and not spec.is_imported:
        refuse_unknown_sources(spec, record)
    if runs_code and not spec.is_imported:
        launch = replace(launch, folder=known_folder(spec, record, Path(launch.folder)))
    return spec, launch


def _refuse_imported(spec: StudySpec) -> None:
    require(
        not spec.is_imported,
        f"study {spec.name!r} was imported from another program and has no workload",
        hint=f"write a spec with `bssearch export {spec.name} --to spec`, or import more runs",
    )


def program_of(spec: StudySpec) -> Program | None:
    if not spec.is_program:
        return None
    return Program(
        script=None if spec.command else spec.workload,
        command=spec.command,
        report=spec.report,
        arguments=spec.arguments,
        default=_configuration_to_describe(spec),
        metric=spec.target.metric,
        names=spec.set_parameters,
        searched=spec.searched,
        needs_samples=spec.objective == SamplesToTarget.name,
        counts_tokens=spec.training.counts_tokens,
    )


def _configuration_to_describe(spec: StudySpec) -> Configuration:
    # In micro-batches if any batch size accumulates, because an average of weights may wrongly follow micro-batches.
    default = spec.default_configuration
    _, most = split_batch(spec.batch_sizes[-1] // default.world_size, spec.space.max_micro_batch_size)
    is_split = most == 1 or default.accumulation_steps > 1 or default.micro_batch_size % 2
    return default if is_split else default.in_micro_batches(default.micro_batch_size // 2)


def refuse_batch_norm_by_device(spec: StudySpec, found: WorkloadDescription) -> None:
    """Raise `UsageError` if batch normalisation makes the steps to the target depend on the number of devices."""
    layers, devices, training = found.model.batch_norm_layers, spec.executor.devices, spec.training
    require(
        devices == (1,) or layers == 0 or training.sync_batch_norm or training.ghost_batch_size is not None,
        f"executor.devices = {devices[-1]} may change the steps to the target, because the model has "
        f"{plural(layers, 'batch normalisation layer')} over the samples of one device",
        hint="set training.sync_batch_norm = true, or a fixed training.ghost_batch_size",
    )


def _open_study(
    spec: StudySpec, launch: Launch, store: Store, found: WorkloadDescription, listener: Listener
) -> tuple[StudySpec, bool]:
    stored = store.studies.find(spec.name)
    study = stored or _create_study(spec, store)
    if study.archived_at is not None:
        raise archived(spec.name)
    check_question(spec, study)
    if stored is not None:
        spec = with_all_that_is_asked(spec, stored, store)
    before = study.environment
    has_changed = before is not None and before.workload_revision != found.environment.workload_revision
    if has_changed and not launch.allow_changed_workload:
        refuse_changed_workload(study, store)
    if launch.pretended_gib is None:
        store.studies.bind(spec.name, found.environment, again=has_changed)
        preset = {} if spec.preset is None else {"preset": spec.preset}
        store.studies.update_spec(spec.name, spec.model_dump(mode="json") | preset)
    listener.opened(study, store.masked_url, continued=stored is not None)
    outside = "; ".join(spec.space.outside(spec.default_configuration)) if stored is None else ""
    for note in (
        outside
        and f"the default configuration is outside the search space: {outside}; correct the default or the space",
        *differences(spec, study, found),
        *(sentence for _, sentence in (pitfalls if stored is None else about_batch_norm)(spec, found)),
        found.notice,
        in_parent_folder(store.masked_url) if stored is None else "",
    ):
        if note:
            listener.note(note)
    return spec, stored is None


@contextmanager
def _not_left_empty(store: Store, name: str) -> Iterator[None]:
    try:
        yield
    except WorkloadError:
        with suppress(BSSearchError):
            if not store.trials.of(name) and not store.probes.by_batch_size(name):
                store.studies.delete(name)
        raise


def _create_study(spec: StudySpec, store: Store) -> StudyRecord:
    try:
        return store.studies.create(spec.new_study(user_name()))
    except UsageError:  # another process has created the study meanwhile
        return store.studies.get(spec.name)
