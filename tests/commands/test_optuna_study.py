import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import optuna
import optuna.cli
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState as OptunaState

import bssearch
from bssearch import DatabaseError, StudySpec, UsageError, open_store
from bssearch.exchange import optuna_study
from bssearch.exchange.optuna_study import OptunaStudy, optuna_database, phases_of, quiet, write_study
from bssearch.records import Configuration, Phase, StudyRecord, TrialRecord, TrialState
from tests.cli.conftest import run_by_law
from tests.cli.task import bssearch as command, write_task
from tests.factories import EPOCH, make_environment, make_spec, make_trial, not_none
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
    assert trial.state is expected
    assert trial.value == (2.5 if state is TrialState.REACHED else None)
    assert trial.user_attrs["state"] == state.value
    assert trial.user_attrs["number"] == 7
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
    assert study.direction is optuna.study.StudyDirection.MAXIMIZE
    assert study.metric_names == ["accuracy"]
    assert [trial.value for trial in study.trials] == [0.7, 0.92, None]
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE", "PRUNED"]
    assert study.best_trial.user_attrs["number"] == 2
    loss = {"metric": "loss", "value": 0.5, "goal": "minimize"}
    down = as_optuna(*trials, objective="metric_in_budget", target=loss)
    assert down.direction is optuna.study.StudyDirection.MINIMIZE


def test_a_figure_that_was_not_measured_is_not_made_up() -> None:
    (trial,) = as_optuna(make_trial(1), objective="energy_to_target").trials
    assert (trial.state, trial.value) == (OptunaState.FAIL, None)
    assert trial.user_attrs["state"] == "reached"
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
    assert ours.user_attrs == made.user_attributes
    assert ours.best_trial == theirs.best_trial


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
    def fails(*_: object) -> Iterator[dict[str, Any]]:
        raise failure

    monkeypatch.setattr(optuna_study, "_attribute", fails)
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


def test_a_bare_path_is_a_sqlite_file() -> None:
    assert str(optuna_database("folder/x.db")) == "sqlite:///folder/x.db"
    assert str(optuna_database("/tmp/x.db")) == "sqlite:////tmp/x.db"


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
