"""A small real study on the real boards, read back with their libraries."""

import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import bssearch as library
from bssearch import TargetNotReachedError, Trial, UsageError, open_store
from bssearch.exchange.boards import base
from bssearch.exchange.importers.logs import wandb_records
from bssearch.records import Observation, TrialRecord, TrialState
from tests.cli.conftest import run_by_law
from tests.cli.task import INLINE, UNCONFIRMED, bssearch, environment, printed, ran, space_of, write_task
from tests.factories import make_spec
from tests.search.law import LawExecutor
from tests.search.test_pausing_driver import Dies, SteppingLaw, die, study_spec
from tests.search.test_several_drivers import run_together

# Runs, read with the boards' own libraries without their warnings -----------------------------------------------------


def event_files(folder: Path) -> Any:
    """A whole run of TensorBoard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        run = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        run.Reload()
        return run


def hyperparameters(run: Any) -> dict[str, Any]:
    """Values of a run in TensorBoard's table of hyperparameters."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = run.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in found.items()}


def texts(run: Any) -> dict[str, str]:
    return {tag: run.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in run.Tags()["tensors"]}


def mlflow_client(folder: Path) -> Any:
    """MLflow's client for the store in a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


def mlflow_runs(folder: Path, study: str, kind: str = "trial") -> list[Any]:
    """A study's runs in MLflow."""
    client = mlflow_client(folder)
    experiment = client.get_experiment_by_name(f"bssearch/{study}")
    runs: list[Any] = client.search_runs([experiment.experiment_id], f"tags.`bssearch.kind` = '{kind}'")
    return sorted(runs, key=lambda run: int(run.data.tags.get("bssearch.trial", 0)))


def wandb_run(folder: Path, suffix: str) -> dict[str, Any]:
    """Configuration, history and summary of an offline run of W&B.

    A resumed run has another file, which W&B merges when it syncs.
    """
    files = sorted(folder.glob(f"wandb/offline-run-*-{suffix}/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert files
    found: dict[str, Any] = {"config": {}, "history": [], "summary": {}}
    for record in (record for file in files for record in wandb_records(file)):
        if record.HasField("run"):
            found["group"], found["id"] = record.run.run_group, record.run.run_id
            found["config"] |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
        elif record.HasField("history"):
            row = {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}
            found["history"].append(row)
        elif record.HasField("summary"):
            updates = {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in record.summary.update}
            found["summary"] |= updates
    return found


# Tests ----------------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "space": space_of(16, 32),
    "budget": {"trials": 4, "trial_train_seconds": 2.0},
    "workload_settings": {"fault": "", "step_seconds": 0.001},
    "executor": INLINE,
    "confirm": {"top": 1, "runs": 1},
}


@pytest.fixture(autouse=True)
def _boards_here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The boards write here, MLflow into a copy of its database, whose tables take seconds to make."""
    monkeypatch.chdir(tmp_path)
    set_boards(monkeypatch, tmp_path)
    shutil.copy(folder / "mlflow.db", tmp_path)


def set_boards(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let all boards write into a folder, without a deadline."""
    monkeypatch.setattr(base, "SILENT_SECONDS", 600.0)
    monkeypatch.setattr(base, "LAST_SECONDS", 600.0)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(folder))
    monkeypatch.setenv("BSSEARCH_TENSORBOARD_DIR", str(folder / "runs"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(folder / "waiting"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a study of worker processes, on all boards."""
    place = tmp_path_factory.mktemp("boards")
    settings = {"step_seconds": 0.001, "fault": "s3://ada:hush-hush@host/x"}
    changes = {"executor": {"device": "cpu"}, "workload_settings": settings, "log": ["tensorboard", "wandb"]}
    spec = write_task(place, **{**SMALL, **changes})
    with pytest.MonkeyPatch.context() as patch:
        set_boards(patch, place)
        patch.setenv("BSSEARCH_LOG", "mlflow, tensorboard")
        patch.setenv("BSSEARCH_DB_URL", f"sqlite:///{place}/bssearch.db")
        done = ran(place, "run", spec.name)
    assert [board for board in ("tensorboard:", "mlflow:", "wandb:") if board in done.stderr] == []
    return place


def stored(folder: Path, name: str = "task") -> tuple[list[TrialRecord], dict[int, list[Observation]]]:
    with open_store(f"sqlite:///{folder}/bssearch.db", write=False) as store:
        trials = store.trials.of(name)
        return trials, {
            number: list(curve) for number, curve in store.trials.curves(name, [t.number for t in trials]).items()
        }


def best(folder: Path) -> library.Answer:
    return library.best("task", db=f"sqlite:///{folder}/bssearch.db")


def test_tensorboard_has_a_run_per_trial_with_its_curve_in_steps_and_in_seconds(folder: Path) -> None:
    trials, curves = stored(folder)
    assert {path.name for path in (folder / "runs" / "task").glob("*/")} == {
        "summary",
        *(f"trial-{trial.number:04d}" for trial in trials),
    }
    for trial in trials:
        run, curve = event_files(folder / "runs" / "task" / f"trial-{trial.number:04d}"), curves[trial.number]
        by_step = run.Scalars("accuracy/by_step")
        assert [one.step for one in by_step] == [one.step for one in curve]
        assert [one.value for one in by_step] == pytest.approx([one.metric for one in curve])
        start = trial.created_at.timestamp()
        assert [one.wall_time - start for one in by_step] == pytest.approx(
            [one.train_seconds for one in curve], abs=1e-5
        )
        by_time = run.Scalars("accuracy/by_train_milliseconds")
        assert [one.step for one in by_time] == [round(1000 * one.train_seconds) for one in curve]
        assert hyperparameters(run)["batch_size"] == trial.configuration.batch_size
        assert trial.outcome is not None
        assert texts(run)["state/text_summary"].startswith(f"{trial.state}: {trial.outcome.reason}")
        if trial.state is TrialState.REACHED:
            (result,) = run.Scalars("result/time_to_target_s")
            assert result.value == pytest.approx(trial.outcome.time_to_target_s)


def test_tensorboard_has_the_answer_as_the_studys_summary(folder: Path) -> None:
    summary, answer = event_files(folder / "runs" / "task" / "summary"), best(folder)
    assert summary.Scalars("answer/optimal_batch_size")[-1].value == answer.optimal.batch_size
    assert f"| batch_size | {answer.optimal.batch_size} |" in texts(summary)["answer/text_summary"]
    assert "metric: accuracy" in texts(summary)["spec/text_summary"]


def test_mlflow_has_a_run_per_trial_and_one_for_the_answer(folder: Path) -> None:
    trials, curves = stored(folder)
    runs, client = mlflow_runs(folder, "task"), mlflow_client(folder)
    assert [int(run.data.tags["bssearch.trial"]) for run in runs] == [trial.number for trial in trials]
    ends = {TrialState.REACHED: "FINISHED", TrialState.CAPPED: "KILLED", TrialState.PRUNED: "KILLED"}
    for run, trial in zip(runs, trials, strict=True):
        assert (run.data.tags["bssearch.state"], run.info.status) == (trial.state, ends[trial.state])
        assert run.data.params["learning_rate"] == str(trial.configuration.learning_rate)
        curve, start = curves[trial.number], trial.created_at.timestamp()
        points = sorted(client.get_metric_history(run.info.run_id, "accuracy"), key=lambda one: one.step)
        assert [(one.step, one.value) for one in points] == [(one.step, one.metric) for one in curve]
        seconds = [one.timestamp / 1000 - start for one in points]
        assert seconds == pytest.approx([one.train_seconds for one in curve], abs=0.0011)
    (run,) = mlflow_runs(folder, "task", "answer")
    answer = best(folder)
    assert run.data.params["batch_size"] == str(answer.optimal.batch_size)
    assert run.info.status == "FINISHED"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["best.json"]
    place = Path(client.download_artifacts(run.info.run_id, "best.json", str(folder)))
    assert json.loads(place.read_text())["optimal"]["batch_size"] == answer.optimal.batch_size
    assert client.get_experiment(run.info.experiment_id).tags["bssearch.optimal_batch_size"] == str(
        answer.optimal.batch_size
    )


def test_wandb_has_a_run_per_trial_with_both_axes_and_the_answer(folder: Path) -> None:
    trials, curves = stored(folder)
    for trial in trials:
        run = wandb_run(folder, str(trial.number))
        assert (run["group"], run["config"]["batch_size"]) == ("task", trial.configuration.batch_size)
        rows, curve = [row for row in run["history"] if "accuracy" in row], curves[trial.number]
        assert [(row["_step"], row["accuracy"]) for row in rows] == [(one.step, one.metric) for one in curve]
        assert [row["train_seconds"] for row in rows] == [one.train_seconds for one in curve]
        assert run["summary"]["state"] == trial.state
    assert wandb_run(folder, "answer")["summary"]["optimal_batch_size"] == best(folder).optimal.batch_size


def test_a_study_continues_with_a_board(tmp_path: Path) -> None:
    spec = write_task(tmp_path, **SMALL, log=[])
    printed(tmp_path, "run", spec.name)
    printed(tmp_path, "run", spec.name, "--set", "log=[tensorboard]", "--set", "budget.trials=5")
    numbers = [trial.number for trial in stored(tmp_path)[0]]
    assert 0 < len(list((tmp_path / "runs" / "task").glob("trial-*"))) < len(numbers)
    assert (tmp_path / "runs" / "task" / f"trial-{numbers[-1]:04d}").is_dir()


def test_a_missing_server_ends_no_study_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ada:secret@127.0.0.1:9")
    done = ran(tmp_path, "run", write_task(tmp_path, **SMALL, log=["mlflow", "tensorboard"]).name)
    why, lost = (line for line in done.stderr.splitlines() if line.startswith("mlflow:"))
    assert "MlflowException" in why
    asked = re.fullmatch(r"mlflow: (\d+) of (\d+) .*", lost)
    assert asked is not None and asked[1] == asked[2]
    assert "secret" not in done.stderr
    assert (tmp_path / "runs" / "task" / "summary").is_dir()


def test_trials_that_another_driver_resumes_are_one_run_each(tmp_path: Path) -> None:
    spec = study_spec(budget={"trials": 8, "trial_train_seconds": 0.1}, log=["mlflow", "tensorboard"])
    url, doomed = f"sqlite:///{tmp_path}/bssearch.db", SteppingLaw(on_look=die)
    doomed.full = 0.1
    with pytest.raises(Dies):
        library.run_study(spec, library.Launch(db=url, make_executor=lambda *_: doomed))
    executor = SteppingLaw(done=doomed.done)
    executor.full = 0.1
    with pytest.raises(TargetNotReachedError):
        library.run_study(spec, library.Launch(db=url, make_executor=lambda *_: executor))
    trials, curves = stored(tmp_path, spec.name)
    runs = mlflow_runs(tmp_path, spec.name)
    assert executor.resumed
    assert [int(run.data.tags["bssearch.trial"]) for run in runs] == [trial.number for trial in trials]
    assert [run.data.tags["bssearch.state"] for run in runs] == [trial.state for trial in trials]
    assert "RUNNING" not in {run.info.status for run in runs}
    for trial in trials:
        run = event_files(tmp_path / "runs" / spec.name / f"trial-{trial.number:04d}")
        steps = [one.step for one in run.Scalars(f"{spec.target.metric}/by_step")] if curves[trial.number] else []
        assert steps == [one.step for one in curves[trial.number]]


def test_two_drivers_of_a_study_report_into_one_experiment_each_its_own_trials(tmp_path: Path) -> None:
    spec = make_spec(log=["mlflow"], budget={"trials": 10, "trial_train_seconds": 10.0}, confirm=UNCONFIRMED)
    executors: list[LawExecutor] = [LawExecutor(), LawExecutor()]
    run_together(spec, f"sqlite:///{tmp_path}/bssearch.db", executors)
    trials, _ = stored(tmp_path, spec.name)
    runs = mlflow_runs(tmp_path, spec.name)
    assert [int(run.data.tags["bssearch.trial"]) for run in runs] == [trial.number for trial in trials]


def test_another_study_of_the_same_name_has_other_runs(tmp_path: Path) -> None:
    budget = {"trials": 5, "trial_train_seconds": 10.0}
    spec = make_spec(log=["mlflow", "tensorboard"], budget=budget, confirm=UNCONFIRMED)
    for name in ("one", "two"):  # two databases
        library.run_study(
            spec, library.Launch(db=f"sqlite:///{tmp_path}/{name}.db", make_executor=lambda *_: LawExecutor())
        )
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert [folders[0], len(folders)] == [spec.name, 2]
    assert [run.data.tags["bssearch.trial"] for run in mlflow_runs(tmp_path, spec.name)].count("1") == 2


def test_a_study_in_a_notebook_reports(tmp_path: Path) -> None:
    def train(trial: Trial) -> None:
        assert trial.batch_size > 0 and trial.learning_rate > 0
        for _ in trial.batches(range(50), evaluate=lambda: {"accuracy": trial.steps / 10}):
            pass

    spec = {
        "name": "own",
        "target": {"metric": "accuracy", "value": 0.8},
        "space": {"batch_size": [8, 32], "learning_rate": {"low": 0.01, "high": 1.0}},
        "default": {"batch_size": 8, "learning_rate": 0.1},
        "budget": {"trials": 3, "trial_train_seconds": 30.0},
        "confirm": {"top": 1, "runs": 1},
        "executor": {"device": "cpu"},
        "log": ["tensorboard"],
    }
    library.Study(spec, train, library.Launch(db=f"sqlite:///{tmp_path}/bssearch.db")).run()
    trials, curves = stored(tmp_path, "own")
    for trial in trials:
        run = event_files(tmp_path / "runs" / "own" / f"trial-{trial.number:04d}")
        assert [one.step for one in run.Scalars("accuracy/by_step")] == [one.step for one in curves[trial.number]]


def test_no_database_url_and_no_password_reaches_a_board(folder: Path) -> None:
    written = [folder / "mlflow.db", *(folder / "runs").rglob("*.*"), *(folder / "wandb").rglob("*.wandb")]
    assert len(written) > 4
    for path in written:
        assert b"hush-hush" not in path.read_bytes(), path
        assert b"bssearch.db" not in path.read_bytes(), path


def test_quick_answers_and_probes_start_no_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("a board was started")

    monkeypatch.setattr("bssearch.commands.reporting.BoardProcess", refuse)
    run_by_law(monkeypatch)
    spec = write_task(tmp_path, log=["tensorboard"])
    printed(tmp_path, "probe", "step-time", spec.name)
    assert "a board was started" in bssearch("run", spec.name, cwd=tmp_path).stderr


OPEN = """
from bssearch.exchange.boards.mlflow import MLflow

input()
MLflow()
"""


@pytest.mark.parametrize("has_cache", [True, False])
def test_processes_that_open_a_new_mlflow_file_at_once_make_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cache: bool
) -> None:
    cache = tmp_path / "cache"
    if not has_cache:
        cache.touch()  # no folder: one process opens the file without the lock
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'new.db'}")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN],
            env=environment(),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2 if has_cache else 1)
    ]
    for one in processes:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    for one in processes:
        _, errors = one.communicate(timeout=300)
        assert one.returncode == 0, errors
