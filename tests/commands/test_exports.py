"""Exports: to Optuna, to tables, and as a loop that grows its batches."""

import csv
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.error import URLError
from urllib.request import urlopen

import optuna
import optuna.cli
import pandas as pd
import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState as OptunaState

import bssearch
from bssearch import DatabaseError, NotFoundError, Store, StudySpec, UsageError, open_store
from bssearch.analysis.answer import BatchScheduleAnswer, StageAnswer
from bssearch.commands.best import ScheduledTraining, schedule_values, training_loop
from bssearch.exchange import optuna_study
from bssearch.exchange.exporters import exports
from bssearch.exchange.exporters.exports import column_type, export_csv, export_parquet, export_table, typed_frame
from bssearch.exchange.optuna_study import OptunaStudy, optuna_database, phases_of, quiet, write_study
from bssearch.records import (
    Configuration,
    LearningRateRule,
    Lease,
    ParameterValue,
    Phase,
    StudyRecord,
    TrialOutcome,
    TrialRecord,
    TrialState,
    batch_schedule_of,
)
from bssearch.training.batches import Growth
from bssearch.training.schedule import schedule_of
from tests.cli.conftest import run_by_law
from tests.cli.task import bssearch as command, write_task
from tests.factories import EPOCH, make_curve, make_environment, make_plan, make_spec, make_trial, not_none
from tests.postgres import Postgres
from tests.schema import execute

CURVE = {0: 0.1, 10: 0.5, 20: 0.8}


def record(spec: StudySpec) -> StudyRecord:
    return StudyRecord(
        name=spec.name,
        spec=spec.model_dump(mode="json"),
        spec_hash="abc",
        objective=spec.objective,
        target=spec.record_target,
        created_by="someone",
        created_at=EPOCH,
        environment=make_environment(),
    )


def as_optuna(*trials: TrialRecord, curve: dict[int, float] = CURVE, **changes: Any) -> optuna.Study:
    """Return the Optuna study of some trials, all with one curve."""
    made = OptunaStudy.of(record(make_spec(**changes)), trials, {trial.number: curve for trial in trials})
    with quiet():
        study = optuna.create_study(study_name=made.name, directions=made.directions)
        study.set_metric_names(list(made.metric_names))
    study.add_trials(made.trials)
    return study


@pytest.mark.parametrize(
    ("given", "phases"),
    [
        ("search", {Phase.SEARCH}),
        (Phase.CONFIRM, {Phase.CONFIRM}),
        (["search", Phase.AUDIT], {Phase.SEARCH, Phase.AUDIT}),
        ((), set()),
    ],
)
def test_phases_are_one_or_several(given: Any, phases: set[Phase]) -> None:
    assert phases_of(given) == phases


@pytest.mark.parametrize(("given", "named"), [("serach", "'serach'"), (["search", "x"], "'x'"), ([3], "3")])
def test_a_phase_that_there_is_not_is_named_with_those_that_there_are(given: Any, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        phases_of(given)
    assert named in caught.value.message and "search, confirm" in caught.value.message


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (TrialState.REACHED, OptunaState.COMPLETE),
        (TrialState.PRUNED, OptunaState.PRUNED),
        (TrialState.CAPPED, OptunaState.PRUNED),
        (TrialState.EXHAUSTED, OptunaState.PRUNED),
        (TrialState.PAUSED, OptunaState.PRUNED),
        (TrialState.DIVERGED, OptunaState.PRUNED),
        (TrialState.RUNNING, OptunaState.RUNNING),
        (TrialState.QUEUED, OptunaState.WAITING),
        (TrialState.OOM, OptunaState.FAIL),
        (TrialState.FAILED, OptunaState.FAIL),
        (TrialState.LOST, OptunaState.FAIL),
        (TrialState.CANCELLED, OptunaState.FAIL),
    ],
)
def test_only_a_trial_that_reached_its_target_has_a_value(state: TrialState, expected: OptunaState) -> None:
    (trial,) = as_optuna(make_trial(7, state=state, seconds=2.5)).trials
    assert (trial.state, trial.value) == (expected, 2.5 if state is TrialState.REACHED else None)
    assert (trial.user_attrs["state"], trial.user_attrs["number"]) == (state.value, 7)
    assert trial.user_attrs.get("reason") == ("as the test has it" if state.is_finished else None)


def test_a_trial_is_told_as_it_was_measured() -> None:
    study = as_optuna(make_trial(3, batch_size=16, learning_rate=0.2, seconds=2.0, steps=40, seed=5, contended=True))
    (trial,) = study.trials
    assert trial.intermediate_values == CURVE
    assert trial.params == {"batch_size": 16, "learning_rate": 0.2, "weight_decay": 0.0, "dropout": 0.0}
    assert trial.duration == timedelta(seconds=5)
    assert not_none(trial.datetime_start).astimezone(EPOCH.tzinfo) == EPOCH + timedelta(seconds=30)
    expected = {
        "phase": "search",
        "seed": 5,
        "batch_size": 16,
        "micro_batch_size": 16,
        "steps_to_target": 40,
        "train_seconds": 2.0,
        "time_to_target_s": 2.0,
        "contended": True,
    }
    assert {name: trial.user_attrs[name] for name in expected} == expected
    assert study.direction is optuna.study.StudyDirection.MINIMIZE
    assert study.metric_names == ["time_to_target_s"]


def test_a_trial_outside_the_space_widens_the_distribution_of_all() -> None:
    first, second = as_optuna(
        make_trial(1),
        make_trial(
            2,
            configuration=Configuration(
                batch_size=200,
                micro_batch_size=50,
                accumulation_steps=4,
                learning_rate=5.0,
                weight_decay=0.5,
                dropout=0.9,
                label_smoothing=0.1,
            ),
        ),
    ).trials
    assert first.distributions == second.distributions
    assert first.distributions["batch_size"] == IntDistribution(8, 200, log=True)
    assert first.distributions["weight_decay"] == CategoricalDistribution((0.0, 1e-4, 1e-3, 0.5))
    assert first.distributions["dropout"] == FloatDistribution(0.0, 0.9)
    assert first.distributions["label_smoothing"] == CategoricalDistribution((0.0, 0.1))
    assert second.params["learning_rate"] == 5.0
    for trial in (first, second):
        assert all(one._contains(one.to_internal_repr(trial.params[name])) for name, one in trial.distributions.items())


def test_choices_of_numbers_are_in_order_and_those_equal_up_to_rounding_are_one() -> None:
    space = {
        "batch_size": [16, 32],
        "learning_rate": 0.1,
        "weight_decay": [1e-3, 0.0, 1e-4],
        "optimizer": [{"name": "sgd"}, {"name": "adamw"}],
    }
    default = {"batch_size": 32, "learning_rate": 0.1, "weight_decay": 0.0, "optimizer": {"name": "sgd"}}
    rounded = replace(make_spec(space=space, default=default).default_configuration, weight_decay=1e-4 * (1 + 1e-12))
    first, second = as_optuna(
        make_trial(1, configuration=rounded),
        make_trial(2, configuration=replace(rounded, weight_decay=1e-4 * 1.01)),
        space=space,
        default=default,
    ).trials
    assert first.params["weight_decay"] == 1e-4
    assert second.params["weight_decay"] == 1e-4 * 1.01
    found = first.distributions["weight_decay"]
    assert isinstance(found, CategoricalDistribution)
    assert found.choices == (0.0, 1e-4, 1e-4 * 1.01, 1e-3)
    assert first.distributions["optimizer"] == CategoricalDistribution(("sgd", "adamw")), "not by the alphabet"


def test_what_another_optimizer_has_is_left_out() -> None:
    space = {
        "batch_size": [16, 32],
        "learning_rate": [0.1, 0.2],
        "optimizer": [{"name": "sgd", "momentum": [0.8, 0.9]}, {"name": "adamw", "beta2": {"low": 0.9, "high": 0.99}}],
    }
    default = {"batch_size": 32, "learning_rate": 0.1, "optimizer": {"name": "sgd", "momentum": 0.9}}
    spec = make_spec(space=space, default=default)
    sampled = {"reference_learning_rate": 0.1, "sgd.momentum": 0.8, "adamw.beta2": 0.95}
    sgd = spec.space.decode(16, {**sampled, "optimizer": "sgd"})
    adamw = spec.space.decode(16, {**sampled, "optimizer": "adamw"})
    trials = make_trial(1, configuration=sgd), make_trial(2, configuration=adamw)
    first, second = (trial.params for trial in as_optuna(*trials, space=space, default=default).trials)
    assert (first["optimizer"], first["sgd.momentum"], "adamw.beta2" in first) == ("sgd", 0.8, False)
    assert (second["optimizer"], second["adamw.beta2"], "sgd.momentum" in second) == ("adamw", 0.95, False)


def test_under_metric_in_budget_the_value_is_the_metric() -> None:
    trials = [
        make_trial(1, state=TrialState.EXHAUSTED, best_metric=0.7),
        make_trial(2, state=TrialState.REACHED, seconds=10.0, best_metric=0.92),
        make_trial(3, state=TrialState.PRUNED, best_metric=0.6),
    ]
    study = as_optuna(*trials, objective="metric_in_budget")
    assert (study.direction, study.metric_names) == (optuna.study.StudyDirection.MAXIMIZE, ["accuracy"])
    assert [trial.value for trial in study.trials] == [0.7, 0.92, None]
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE", "PRUNED"]
    assert study.best_trial.user_attrs["number"] == 2
    loss = {"metric": "loss", "value": 0.5, "goal": "minimize"}
    down = as_optuna(*trials, objective="metric_in_budget", target=loss)
    assert down.direction is optuna.study.StudyDirection.MINIMIZE


def test_a_figure_that_was_not_measured_is_not_made_up() -> None:
    (trial,) = as_optuna(make_trial(1), objective="energy_to_target").trials
    assert (trial.state, trial.value, trial.user_attrs["state"]) == (OptunaState.FAIL, None, "reached")
    assert "was not measured" in trial.user_attrs["reason"]


def many() -> list[TrialRecord]:
    states = [TrialState.REACHED] * 3 + [TrialState.PRUNED, TrialState.DIVERGED, TrialState.FAILED, TrialState.RUNNING]
    trials = []
    for number in range(1, 22):
        trial = make_trial(
            number,
            batch_size=2 ** (3 + number % 5),
            learning_rate=0.02 * number,
            state=states[number % 7],
            seconds=1 + number % 6,
        )
        configuration = replace(trial.configuration, dropout=0.02 * number, weight_decay=(0.0, 1e-4, 1e-3)[number % 3])
        trials.append(replace(trial, configuration=configuration))
    return trials


def test_optuna_ranks_the_parameters_and_counts_the_trials_that_reached_the_target() -> None:
    trials = many()
    study = as_optuna(*trials)
    assert {"batch_size", "learning_rate"} <= set(optuna.importance.get_param_importances(study))
    assert sorted(trial.value or 0.0 for trial in study.get_trials(states=[OptunaState.COMPLETE])) == sorted(
        trial.outcome.time_to_target_s or 0.0
        for trial in trials
        if trial.state is TrialState.REACHED and trial.outcome is not None
    )


# Export to Optuna -----------------------------------------------------------------------------------------------------


def toy() -> OptunaStudy:
    trials = many()
    return OptunaStudy.of(record(make_spec()), trials, {trial.number: CURVE for trial in trials})


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'optuna.db'}"
    postgres: Postgres = request.getfixturevalue("postgres")
    return postgres.create_database(schema=False).replace("postgresql:", "postgresql+psycopg:")


OPENED: list[optuna.storages.RDBStorage] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close what a test has read with Optuna, which leaves its connections to the garbage collector."""
    yield
    while OPENED:
        storage = OPENED.pop()
        storage.remove_session()
        storage.engine.dispose()


def opened(url: str) -> optuna.storages.RDBStorage:
    OPENED.append(optuna.storages.RDBStorage(url))
    return OPENED[-1]


def loaded(url: str, name: str = "toy") -> optuna.Study:
    return optuna.load_study(study_name=name, storage=opened(url))


def studies_in(url: str) -> list[str]:
    return optuna.get_all_study_names(opened(url))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[optuna.Study]:
    """The study as Optuna itself writes it."""
    made = toy()
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path_factory.mktemp('theirs') / 'optuna.db'}")
    with quiet():
        study = optuna.create_study(study_name="toy", storage=storage)
        study.set_metric_names(list(made.metric_names))
    study.add_trials(made.trials)
    yield study
    storage.remove_session()
    storage.engine.dispose()


def test_what_is_written_is_what_optuna_itself_would_write(url: str, theirs: optuna.Study) -> None:
    made = toy()
    write_study(made, optuna_database(url))
    ours = loaded(url)
    assert ours.trials == theirs.trials
    assert (ours.direction, ours.metric_names) == (theirs.direction, theirs.metric_names)
    assert (ours.user_attrs, ours.best_trial) == (made.user_attributes, theirs.best_trial)


@pytest.mark.slow
def test_a_database_takes_several_studies_but_no_name_twice(url: str) -> None:
    write_study(toy(), optuna_database(url))
    write_study(OptunaStudy.of(record(make_spec(name="other")), many(), {}), optuna_database(url))
    before = loaded(url).trials
    with pytest.raises(UsageError, match=r"already has an Optuna study 'toy'"):
        write_study(toy(), optuna_database(url))
    assert sorted(studies_in(url)) == ["other", "toy"]
    assert loaded(url).trials == before
    assert len(loaded(url, "other").trials) == len(before)


@pytest.mark.parametrize(
    ("url", "failure"),
    [("sqlite", KeyboardInterrupt), ("postgresql", OSError("no space left"))],
    indirect=["url"],
)
def test_nothing_is_left_of_a_study_that_was_not_written_to_its_end(
    url: str, failure: BaseException | type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optuna_study, "_attribute", Mock(side_effect=failure))
    with pytest.raises((KeyboardInterrupt, DatabaseError)):
        write_study(toy(), optuna_database(url))
    if url.startswith("sqlite"):
        assert not Path(url.removeprefix("sqlite:///")).exists()
    else:
        assert studies_in(url) == []
    monkeypatch.undo()
    write_study(toy(), optuna_database(url))
    assert len(loaded(url).trials) == len(many())


def test_a_database_of_our_own_is_refused(tmp_path: Path, postgres: Postgres) -> None:
    file = tmp_path / "bssearch.db"
    open_store(f"sqlite:///{file}").close()
    for url in (f"sqlite:///{file}", postgres.create_database()):
        with pytest.raises(UsageError, match="is a bssearch database"):
            write_study(toy(), optuna_database(url))


def test_another_programs_tables_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    execute(file, "CREATE TABLE alembic_version (version_num TEXT)")
    with pytest.raises(UsageError, match="another program's table 'alembic_version'"):
        write_study(toy(), optuna_database(f"sqlite:///{file}"))


def test_a_file_that_is_no_database_is_named_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("no database " * 100)
    with pytest.raises(DatabaseError, match=r"notes\.txt: file is not a database"):
        write_study(toy(), optuna_database(str(file)))
    assert file.read_text().startswith("no database")
    with pytest.raises(DatabaseError, match="there is no folder"):
        write_study(toy(), optuna_database(str(tmp_path / "no" / "folder.db")))
    with pytest.raises(DatabaseError, match="cannot write to"):
        write_study(toy(), optuna_database(str(tmp_path)))


def test_a_password_is_never_shown() -> None:
    secret = "hunter2"
    url = f"postgresql://me:{secret}@127.0.0.1:1/nowhere?connect_timeout=2"
    with pytest.raises(DatabaseError, match=r"me:\*\*\*@127\.0\.0\.1") as caught:
        write_study(toy(), optuna_database(url))
    assert secret not in f"{caught.value} {caught.value.hint}"
    with pytest.raises(UsageError) as refused:
        optuna_database(f"mysql://me:{secret}@host/db")
    assert secret not in f"{refused.value} {refused.value.hint}"


@pytest.mark.parametrize("path", ["folder/x.db", "/tmp/x.db"])
def test_a_bare_path_is_a_sqlite_file(path: str) -> None:
    assert str(optuna_database(path)) == f"sqlite:///{path}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study that was run from the command line, and its export."""
    place = tmp_path_factory.mktemp("optuna")
    with pytest.MonkeyPatch.context() as patch:
        run_by_law(patch)
        done = command("run", write_task(place).name, "--set", "budget.trials=6", cwd=place)
    assert done.returncode == 0, done.stderr
    exported = command("export", "task", "--to", "optuna", "--file", "sqlite:///task.optuna.db", cwd=place)
    assert (exported.returncode, exported.stdout) == (0, "sqlite:///task.optuna.db\n"), exported.stderr
    return place


def stored_trials(folder: Path, *options: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(command("trial", "list", "task", "--format", "json", cwd=folder).stdout)
    return [trial for trial in listed if trial["phase"] == "search"]


def test_the_study_in_memory_is_the_exported_one(folder: Path) -> None:
    url = f"sqlite:///{folder / 'bssearch.db'}"
    study = bssearch.load_optuna_study("task", db=url)
    assert [trial.params for trial in study.trials] == [
        trial.params for trial in loaded(f"sqlite:///{folder / 'task.optuna.db'}", "task").trials
    ]
    assert all(trial.intermediate_values for trial in study.trials)
    everything = bssearch.load_optuna_study("task", db=url, phases=["search", "confirm"])
    phases = [trial.user_attrs["phase"] for trial in everything.trials]
    assert phases.count("search") == len(study.trials)
    assert phases.count("confirm") >= 3
    with pytest.raises(bssearch.NotFoundError, match="nobody"):
        bssearch.load_optuna_study("nobody", db=url)


def test_a_second_export_and_what_cannot_be_exported_are_refused(folder: Path) -> None:
    again = command("export", "task", "--to", "optuna", "--file", "task.optuna.db", cwd=folder)
    assert (again.returncode, again.stdout) == (2, "")
    assert "task.optuna.db already has an Optuna study 'task'" in again.stderr
    assert command("export", "task", "--to", "optuna", "--file", "bssearch.db", cwd=folder).returncode == 2
    unknown = command("export", "task", "--to", "tea", cwd=folder)
    assert unknown.returncode == 2
    assert "curves, optuna" in unknown.stderr
    assert command("export", "nobody", "--to", "optuna", cwd=folder).returncode == 3
    assert not (folder / "nobody.optuna.db").exists()


def test_a_study_without_trials_is_not_exported(tmp_path: Path) -> None:
    spec = make_spec()
    with open_store(f"sqlite:///{tmp_path / 'bssearch.db'}") as store:
        store.studies.create(spec.new_study("someone"))
        with pytest.raises(UsageError, match="study 'toy' has no search trials"):
            optuna_study.export_to_optuna(store, "toy", str(tmp_path / "optuna.db"))
        assert len(bssearch.load_optuna_study("toy", store=store).trials) == 0
    assert not (tmp_path / "optuna.db").exists()


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_optunas_own_command_reads_an_export(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--storage", "sqlite:///task.optuna.db", "--study-name", "task", "--format", "json"]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["optuna", "trials", *options])
    monkeypatch.setattr(optuna.cli, "RDBStorage", opened)
    assert optuna.cli.main() == 0
    listed = json.loads(capsys.readouterr().out)
    assert [trial["number"] for trial in listed] == list(range(len(stored_trials(folder))))
    assert {trial["state"] for trial in listed} <= {"COMPLETE", "PRUNED"}
    assert listed[0]["params"]["batch_size"] == 32


@contextmanager
def dashboard(folder: Path) -> Iterator[str]:
    """Run optuna-dashboard over the export in a folder; give its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [Path(sys.executable).with_name("optuna-dashboard"), "sqlite:///task.optuna.db", "--port", str(port)],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def asked(address: str) -> Any:
    """Return the JSON at an address, as soon as somebody answers there."""
    until = time.monotonic() + 60
    while True:
        try:
            with urlopen(address, timeout=10) as answer:
                return json.load(answer)
        except (URLError, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


@pytest.mark.slow
def test_the_dashboard_shows_an_export(folder: Path) -> None:
    with dashboard(folder) as address:
        (summary,) = asked(f"{address}/api/studies")["study_summaries"]
        assert summary["study_name"] == "task"
        shown = asked(f"{address}/api/studies/{summary['study_id']}")
    stored = stored_trials(folder)
    assert shown["directions"] == ["minimize"]
    assert [trial["number"] for trial in shown["trials"]] == list(range(len(stored)))
    for ours, theirs in zip(stored, shown["trials"], strict=True):
        assert theirs["state"] == ("Complete" if ours["state"] == "reached" else "Pruned")
        values = {one["name"]: one["param_external_value"] for one in theirs["params"]}
        assert int(values["batch_size"]) == ours["batch_size"]
        assert theirs["intermediate_values"]


# Tables ---------------------------------------------------------------------------------------------------------------


FORMULA = "=HYPERLINK(A1)"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A study with a trial that reached its target, one that failed elsewhere, one that runs, and one that waits."""
    monkeypatch.chdir(tmp_path)
    with open_store("sqlite:///bssearch.db") as opened:
        opened.studies.create(make_spec().new_study("someone"))
        parameters: dict[str, ParameterValue] = {"momentum": 0.9, "note": FORMULA}
        configuration = Configuration(batch_size=32, micro_batch_size=32, learning_rate=0.1, parameters=parameters)
        start(opened, 0, "cpu-1", configuration=configuration, sampled={"learning_rate": 0.1})
        opened.trials.append_observations("toy", [(1, one) for one in make_curve((0.0, 0.1), (1.5, 0.9))])
        opened.trials.finish(
            "toy",
            1,
            TrialOutcome(
                state=TrialState.REACHED,
                reason=FORMULA,
                time_to_target_s=1.5,
                steps_to_target=10,
                warnings=("slow", "hot"),
            ),
            steps_x_step_time_s=1.25,
        )
        start(opened, 1, "cpu-2", seed=2**62)
        failed = TrialOutcome(state=TrialState.FAILED, reason="broke", traceback="Traceback: here")
        opened.trials.finish("toy", 2, failed, steps_x_step_time_s=None)
        start(opened, 2, "cpu-1")
        opened.trials.enqueue("toy", make_plan())
        yield opened


def start(store: Store, after: int, device: str, **changes: Any) -> None:
    environment = make_environment(device_name=device)
    lease = Lease(owner="me", seconds=60.0)
    assert (
        store.trials.start("toy", make_plan(after=after, **changes), environment=environment, lease=lease) is not None
    )


def test_csv_has_a_row_for_each_trial_with_where_it_ran_and_no_formula(store: Store) -> None:
    assert export_csv(store, "toy").written == ["toy.csv", "toy.observations.csv"]
    with Path("toy.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["number"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["state"] for row in rows] == ["reached", "failed", "running", "queued"]
    assert [row["environment.device_name"] for row in rows] == ["cpu-1", "cpu-2", "cpu-1", ""]
    first = rows[0]
    assert (first["study"], first["time_to_target_s"], first["steps_x_step_time_s"]) == ("toy", "1.5", "1.25")
    assert (first["reason"], first["note"]) == (f"'{FORMULA}", f"'{FORMULA}")
    assert json.loads(first["warnings"]) == ["slow", "hot"]
    assert datetime.fromisoformat(first["ended_at"]).tzinfo is not None
    assert rows[1]["traceback"] == "Traceback: here" and rows[2]["ended_at"] == ""
    observed = pd.read_csv("toy.observations.csv")
    assert list(observed["trial"]) == [1, 1] and list(observed["metric"]) == [0.1, 0.9]
    assert list(observed["train_seconds"]) == [0.0, 1.5]


def test_pandas_columns_have_the_types_of_their_fields(store: Store) -> None:
    frame = typed_frame(*export_table(store, "toy"))
    kinds = {column: str(kind) for column, kind in frame.dtypes.items()}
    for column, kind in {
        "number": "Int64",
        "batch_size": "Int64",
        "steps_to_target": "Int64",
        "retry_of": "Int64",  # of no trial here
        "seed": "Int64",
        "peak_memory_bytes": "Int64",
        "environment.device_memory_bytes": "Int64",
        "learning_rate": "float64",
        "momentum": "float64",
        "test_metric": "float64",
        "noise_scale": "float64",
        "contended": "boolean",
        "uncapped": "boolean",
        "created_at": "datetime64[us, UTC]",
        "ended_at": "datetime64[us, UTC]",
        "state": "string",
        "warnings": "string",
        "environment.cuda_version": "string",
    }.items():
        assert kinds[column] == kind, column
    assert frame["seed"].tolist()[1] == 2**62  # which a float would round
    assert frame["steps_to_target"].isna().tolist() == [False, True, True, True]
    assert frame["reason"][0] == FORMULA
    assert frame["created_at"][0].to_pydatetime() == store.trials.get("toy", 1).created_at
    assert json.loads(frame["warnings"][0]) == ["slow", "hot"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2, None], "Int64"),
        ([1, 0.5], "float64"),
        ([2**63, 1], "float64"),
        ([int(sys.float_info.max), -int(sys.float_info.max)], "float64"),
        ([10**400], "string"),
        ([-(10**400), 0.5, None], "string"),
        ([True, None], "boolean"),
        ([True, 1], "string"),
        ([1, "1"], "string"),
        ([None], "string"),
        ([datetime(2026, 1, 1, tzinfo=UTC)], "datetime64[us, UTC]"),
    ],
)
def test_a_column_of_the_users_own_has_the_type_of_its_values(values: list[Any], kind: str) -> None:
    assert column_type("mine", values) == kind
    assert str(typed_frame(["mine"], [{"mine": one} for one in values])["mine"].dtype) == kind


def test_without_pyarrow_the_extra_is_named_and_nothing_is_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match="pyarrow") as caught:
        export_parquet(store, "toy")
    assert caught.value.hint == "pip install 'bssearch[parquet]'"
    assert not list(Path().glob("*.parquet"))


def test_parquet_writes_the_typed_frames_both_or_none(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of our own stands for pyarrow's: what it is given is what a file would have."""
    written: list[tuple[pd.DataFrame, dict[str, Any]]] = []

    def to_parquet(frame: pd.DataFrame, file: Any, **options: Any) -> None:
        file.write(b"parquet")
        written.append((frame, options))
        if len(written) > 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(exports, "require_parquet", lambda: None)
    monkeypatch.setattr(pd.DataFrame, "to_parquet", to_parquet)
    assert export_parquet(store, "toy", "out.parquet").written == ["out.parquet", "out.observations.parquet"]
    (trials, options), (observed, _) = written
    assert options == {"engine": "pyarrow", "index": False}
    assert trials["number"].tolist() == [1, 2, 3, 4]
    assert observed["trial"].dtype == "Int64" and observed["metric"].tolist() == [0.1, 0.9]
    with pytest.raises(UsageError, match="No space left"):
        export_parquet(store, "toy", "again.parquet")
    assert not list(Path().glob("*again*"))


def test_parquet_files_are_read_back_with_their_types(store: Store) -> None:
    pytest.importorskip("pyarrow")
    export_parquet(store, "toy")
    trials, observed = pd.read_parquet("toy.parquet"), pd.read_parquet("toy.observations.parquet")
    wanted = typed_frame(*export_table(store, "toy"))
    assert trials["seed"].tolist() == wanted["seed"].tolist() and str(trials["seed"].dtype) == "Int64"
    assert trials["retry_of"].isna().all() and str(trials["retry_of"].dtype) == "Int64"
    assert str(trials["created_at"].dt.tz) == "UTC"
    assert trials["reason"].tolist()[0] == FORMULA
    assert observed["train_seconds"].tolist() == [0.0, 1.5]


def test_what_cannot_be_exported_is_named(store: Store) -> None:
    with pytest.raises(NotFoundError, match="nobody"):
        export_csv(store, "nobody")
    with pytest.raises(UsageError, match="no folder"):
        export_csv(store, "toy", "nowhere/toy.csv")
    Path("taken.observations.csv").mkdir()
    with pytest.raises(UsageError, match=r"taken\.observations\.csv"):
        export_csv(store, "toy", "taken.csv")
    assert not Path("taken.csv").exists()


# A loop that grows ----------------------------------------------------------------------------------------------------


SAMPLES = 100
STAGES = ((0, 10, 10), (55, 20, 5), (200, 40, 40))


def schedule(*stages: tuple[int, int, int], **parameters: Any) -> BatchScheduleAnswer:
    return BatchScheduleAnswer(
        name="milestones",
        stages=[
            StageAnswer(
                start_samples=start,
                batch_size=size,
                micro_batch_size=micro,
                learning_rate=0.1 * size / 10,
                steps=None,
                seconds=None,
            )
            for start, size, micro in stages
        ],
        rate_rule=LearningRateRule.LINEAR,
        noise_share=None,
        parameters={"learning_rate": 0.1, "warmup_epochs": 0.0, "schedule": "constant", **parameters},
        time_to_target=1.0,
        low=None,
        high=None,
        runs=1,
        reached=1,
        ratio=None,
        saves_time="not_run",
        reason="as the test has it",
        trials=1,
        trial_numbers=[1],
    )


def module_of(*stages: tuple[int, int, int], comments: tuple[str, ...] = (), **parameters: Any) -> dict[str, Any]:
    """Return the names of the module that is written for a schedule."""
    found = schedule(*stages, **parameters)
    shown = [{**one.model_dump(), "accumulation_steps": one.batch_size // one.micro_batch_size} for one in found.stages]
    text = training_loop(ScheduledTraining(schedule_values(found), shown, ()), comments)
    names: dict[str, Any] = {}
    exec(compile(text, "loop.py", "exec"), names)
    return names


class Seen:
    """An optimizer that remembers the learning rate of each step, and the samples behind its gradient."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
        self.param_groups = self.optimizer.param_groups
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.model = model

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.rates.append(self.param_groups[0]["lr"])
        self.norms.append(
            math.hypot(*(float(one.grad.norm()) for one in self.model.parameters() if one.grad is not None))
        )
        self.optimizer.step()


def trained(names: dict[str, Any], until: int, targets: float = 0.0) -> tuple[Seen, list[list[int]], torch.nn.Linear]:
    """Train a line until so many samples; return what was seen: rates, the rows of each step, and the line."""
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1, dtype=torch.float64)
    inputs = torch.arange(SAMPLES, dtype=torch.float64)[:, None] / SAMPLES
    steps: list[list[int]] = []
    rows: list[int] = []
    seen = Seen(model)

    def loss(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        rows.extend(round(float(one) * SAMPLES) for one in wanted)
        return ((outputs - wanted - targets) ** 2).mean()

    def has_ended(_: torch.nn.Module, samples: int) -> bool:
        if rows:
            steps.append([*rows])
            rows.clear()
        return samples >= until

    names["train"](model, seen, inputs, inputs.clone(), loss, has_ended)
    return seen, steps, model


def grown(warmup_epochs: float = 0.0, **decay: Any) -> Configuration:
    """The configuration of the trials."""
    schedule = {"batch_schedule": "milestones", "batch_stages": "55:20/5 200:40", "batch_rate_rule": "linear"}
    return Configuration(
        batch_size=10,
        micro_batch_size=10,
        learning_rate=0.1,
        warmup_epochs=warmup_epochs,
        parameters={**decay, **schedule},
    )


def test_steps_have_the_sizes_of_the_trials_and_an_epoch_has_each_sample_once() -> None:
    _, steps, _ = trained(module_of(*STAGES), until=500)
    growth, place, epoch = Growth(grown(), SAMPLES), 0, list[int]()
    for rows in steps:
        assert len(rows) == growth.stage.batch_size
        if growth.epoch > place:
            place, epoch = growth.epoch, []
        epoch += rows
        assert len(set(epoch)) == len(epoch)
        growth.stepped()
    assert len(steps) == 6 + 7 + 8, "six of 10 to 60, seven of 20 to 200, eight of 40"


DECAYS: list[dict[str, Any]] = [
    {"schedule": "constant"},
    {"schedule": "linear", "horizon_samples": 430},
    {"schedule": "cosine", "horizon_samples": 430},
    {"schedule": "warmup_stable_decay", "horizon_samples": 430, "decay_share": 0.4},
    {"schedule": "one_cycle", "horizon_samples": 430},
]


@pytest.mark.parametrize("warmup_epochs", [0.0, 0.73])
@pytest.mark.parametrize("decay", DECAYS, ids=[str(one["schedule"]) for one in DECAYS])
def test_the_learning_rate_is_that_of_the_trials(decay: dict[str, Any], warmup_epochs: float) -> None:
    names = module_of(*STAGES, warmup_epochs=warmup_epochs, **decay)
    configuration = grown(warmup_epochs, **decay)
    growth, expected = Growth(configuration, SAMPLES), list[float]()
    factors = schedule_of(configuration, SAMPLES)
    while growth.samples < 600 and not factors.is_over(growth.position):
        expected.append(0.1 * growth.rate_factor * factors.factor(growth.position))
        growth.stepped()
    seen, _, _ = trained(names, until=600)
    assert seen.rates == pytest.approx(expected)
    assert ("math" in names) is (decay["schedule"] not in {"constant", "linear"})


def test_micro_batches_make_no_difference_but_for_memory() -> None:
    split = trained(module_of((0, 10, 2), (55, 20, 5)), until=300)[2]
    whole = trained(module_of((0, 10, 10), (55, 20, 20)), until=300)[2]
    for one, other in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_are_clipped_where_the_trials_clipped_them() -> None:
    free, _, _ = trained(module_of(*STAGES), until=60, targets=5.0)
    clipped, _, _ = trained(module_of(*STAGES, clip_norm=0.5), until=60, targets=5.0)
    assert max(free.norms) > 0.5
    assert max(clipped.norms) == pytest.approx(0.5, rel=1e-4)


def test_too_few_samples_for_the_largest_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="100 samples are fewer than the largest batch, 120"):
        trained(module_of((0, 10, 10), (55, 120, 120)), until=300)


def test_what_users_named_stays_a_value_and_a_comment() -> None:
    evil = "'@STAGES@\n}; raise SystemExit #"
    names = module_of(*STAGES, comments=("@CLIP@",), **{f"loss.{evil}": evil})
    assert names["CONFIGURATION"][f"loss.{evil}"] == evil
    assert names["STAGES"] == [(0, 10, 10, 0.1), (55, 20, 5, 0.2), (200, 40, 40, 0.4)]


def test_the_values_are_a_configuration_with_the_schedule() -> None:
    values = schedule_values(schedule((0, 10, 5), (55, 20, 5), (200, 40, 40)))
    assert values["batch_stages"] == "55:20/5 200:40"
    assert (values["micro_batch_size"], values["accumulation_steps"]) == (5, 2)
    names = ("batch_schedule", "batch_stages", "batch_rate_rule")
    found = batch_schedule_of(
        Configuration(
            batch_size=10, micro_batch_size=5, learning_rate=0.1, parameters={name: values[name] for name in names}
        )
    )
    assert found is not None
    assert [(one.start_samples, one.batch_size, one.micro_batch_size) for one in found.stages] == [
        (0, 10, 5),
        (55, 20, 5),
        (200, 40, 40),
    ]
