"""A study whose trials the caller's own code trains, in its own thread, and how far it is."""

import json
import os
import random
import signal
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import pytest
import torch

import bssearch
from bssearch import (
    InterruptedRunError,
    Launch,
    QuestionChangedError,
    SpecError,
    Trial,
    TrialStopped,
    UsageError,
    WorkloadError,
    open_store,
    run_study,
)
from bssearch.commands import opening
from bssearch.commands.opening import opened
from bssearch.commands.trials import status
from bssearch.exchange.trial_rows import ALWAYS_THERE, UNKNOWN_OF_IMPORTED, trial_row
from bssearch.executors.loops import trial_run
from bssearch.records import Lease, Phase, TrialRecord, TrialState, WorkloadDescription
from bssearch.search.driver import Listener
from bssearch.spec import IMPORTED, load_spec, spec_of
from bssearch.training.memory import SampledMemoryMeter
from tests.documents import OWN_TRAINING
from tests.factories import (
    SPEC as OPENED,
    make_environment,
    make_plan,
    make_spec,
    make_trial,
    not_none,
    store_study,
)
from tests.search.law import LawExecutor, url_in
from tests.waiting import Ear

SPEC: dict[str, Any] = {
    "name": "own",
    "target": {"metric": "accuracy", "value": 0.8},
    "space": {
        "batch_size": [8, 32],
        "learning_rate": {"low": 0.01, "high": 1.0},
        "model": {"hidden": [4, 8]},
    },
    "default": {"batch_size": 8, "learning_rate": 0.1, "model": {"hidden": 4}},
    "budget": {"trials": 3, "trial_train_seconds": 30.0},
    "confirm": {"top": 1, "runs": 1},
    "executor": {"device": "cpu"},
    "pruner": {"name": "none"},
}


def trials_of(folder: Path) -> list[TrialRecord]:
    with open_store(url_in(folder), write=False) as store:
        return store.trials.of("own")


def train(trial: Trial) -> None:
    """Reach the target after 160 samples."""
    size = trial.batch_size
    assert trial.learning_rate > 0
    for _ in trial.batches(range(50), evaluate=lambda: {"accuracy": min(0.99, trial.steps * size / 200)}):
        random.random()


@pytest.mark.slow
def test_an_objective_trains_the_trials_of_a_study(tmp_path: Path) -> None:
    threads, seen = set(), []

    def objective(trial: Trial) -> None:
        threads.add(threading.current_thread())
        seen.append(trial.parameters["hidden"])
        train(trial)

    answer = bssearch.Study(SPEC, objective, bssearch.Launch(db=url_in(tmp_path))).run()
    trials = trials_of(tmp_path)
    assert threads == {threading.main_thread()}
    assert set(seen) <= {4, 8}
    assert {trial.state for trial in trials} == {TrialState.REACHED}
    assert answer.optimal.parameters == {
        "learning_rate": answer.optimal.parameters["learning_rate"],
        "model.hidden": answer.optimal.parameters["model.hidden"],
    }
    assert bssearch.Study(SPEC, objective, bssearch.Launch(db=url_in(tmp_path))).run().optimal == answer.optimal
    assert len(trials_of(tmp_path)) == len(trials), "a study that has ended goes on with nothing"


@pytest.mark.slow
def test_a_loop_asks_and_tells(tmp_path: Path) -> None:
    study = bssearch.Study(SPEC, launch=bssearch.Launch(db=url_in(tmp_path)))
    with pytest.raises(UsageError, match="has not ended"):
        _ = study.answer
    while (trial := study.ask()) is not None:
        with pytest.raises(UsageError, match="ask"):
            study.ask()
        train(trial)
        study.tell(trial)
        with pytest.raises(UsageError, match="tell"):
            study.tell(trial)
    assert study.answer.optimal.batch_size in {8, 32}
    assert study.ask() is None


@pytest.mark.slow
def test_a_trial_whose_objective_raises_has_failed_and_the_study_goes_on(tmp_path: Path) -> None:
    failed: list[int] = []

    def objective(trial: Trial) -> None:
        train(trial) if failed or not is_search(trial) else fail(trial)

    def is_search(trial: Trial) -> bool:
        return "TrialRun" in type(trial._assignment).__name__

    def fail(trial: Trial) -> None:
        failed.append(1)
        raise RuntimeError("broken on purpose")

    bssearch.Study(SPEC, objective, bssearch.Launch(db=url_in(tmp_path))).run()
    trials = trials_of(tmp_path)
    assert [trial.number for trial in trials if trial.state is TrialState.FAILED] == [1]
    assert trials[0].outcome is not None and "broken on purpose" in trials[0].outcome.reason


def test_a_loop_that_cannot_be_looked_at_ends_the_study_before_anything_is_written(tmp_path: Path) -> None:
    def never_steps(trial: Trial) -> None:
        assert trial.batch_size

    with pytest.raises(WorkloadError, match="no step"):
        bssearch.Study(SPEC, never_steps, bssearch.Launch(db=url_in(tmp_path))).run()
    assert not (tmp_path / "study.db").exists()


@pytest.mark.slow
def test_the_first_interrupt_pauses_the_trial_and_a_study_of_the_same_objective_goes_on_with_it(tmp_path: Path) -> None:
    resumed_at, interrupts = [], ["first"]

    def objective(trial: Trial) -> None:
        size = trial.batch_size
        assert trial.learning_rate
        trial.state(model=torch.nn.Linear(2, 1))
        if trial.steps:
            resumed_at.append(trial.steps)
        for _ in trial.batches(range(50), evaluate=lambda: {"accuracy": min(0.99, trial.steps * size / 4000)}):
            if type(trial._assignment).__name__ == "TrialRun" and interrupts:
                if interrupts.pop() == "first":
                    os.kill(os.getpid(), signal.SIGINT)
                interrupts.append("waiting")
                time.sleep(0.01)  # the search looks five times a second

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(InterruptedRunError, match="all trials are stored"):
        bssearch.Study(SPEC, objective, bssearch.Launch(db=url_in(tmp_path))).run()
    assert signal.getsignal(signal.SIGINT) is handler
    (paused,) = trials_of(tmp_path)
    assert paused.state is TrialState.PAUSED and paused.outcome is not None
    interrupts.clear()
    bssearch.Study(SPEC, objective, bssearch.Launch(db=url_in(tmp_path))).run()
    assert resumed_at == [paused.outcome.steps]
    assert {trial.state for trial in trials_of(tmp_path)} == {TrialState.REACHED}


@pytest.mark.slow
def test_the_second_interrupt_ends_at_once_and_so_does_one_before_anything_has_begun(tmp_path: Path) -> None:
    def twice(trial: Trial) -> None:
        if type(trial._assignment).__name__ == "TrialRun":
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        train(trial)

    def at_first(trial: Trial) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        bssearch.Study(SPEC, at_first, bssearch.Launch(db=url_in(tmp_path))).run()
    assert not (tmp_path / "study.db").exists()
    with pytest.raises(InterruptedRunError, match="killed"):
        bssearch.Study(SPEC, twice, bssearch.Launch(db=url_in(tmp_path))).run()
    assert {trial.state for trial in trials_of(tmp_path)} == {TrialState.CANCELLED}


@pytest.mark.slow
def test_a_study_that_nobody_holds_any_more_leaves_its_trial_to_the_next_one(tmp_path: Path) -> None:
    def abandoned() -> None:
        study = bssearch.Study(SPEC, launch=bssearch.Launch(db=url_in(tmp_path)))
        while (trial := study.ask()) is not None:
            if type(trial._assignment).__name__ == "TrialRun":
                return
            train(trial)
            study.tell(trial)

    abandoned()
    (thread,) = [one for one in threading.enumerate() if one.name == "bssearch study own"]
    thread.join(20)
    assert not thread.is_alive()
    assert {trial.state for trial in trials_of(tmp_path)} == {TrialState.CANCELLED}
    assert bssearch.Study(SPEC, train, bssearch.Launch(db=url_in(tmp_path))).run().optimal.batch_size in {8, 32}


def test_a_study_that_is_closed_gives_out_no_trial_any_more(tmp_path: Path) -> None:
    study = bssearch.Study(SPEC, launch=bssearch.Launch(db=url_in(tmp_path)))
    trial = not_none(study.ask())
    train(trial)
    study.tell(trial)
    while not_none(study._search._executor)._pieces.empty():
        time.sleep(0.01)
    study.close()
    with pytest.raises(InterruptedRunError):
        study.ask()


@pytest.mark.slow
@pytest.mark.parametrize("raised", [KeyboardInterrupt, ValueError])
def test_a_trial_that_raises_gives_back_what_it_took_of_the_process(
    raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_run, "peak_memory_meter", lambda device: SampledMemoryMeter())
    failed: list[int] = []

    def objective(trial: Trial) -> None:
        if type(trial._assignment).__name__ == "TrialRun" and not failed:
            failed.append(1)
            raise raised("on purpose")
        train(trial)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with suppress(InterruptedRunError):
            bssearch.Study(SPEC, objective, bssearch.Launch(db=url_in(tmp_path))).run()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    time.sleep(0.1)
    assert not [one for one in threading.enumerate() if one.name == "peak-memory"]


@pytest.mark.slow
def test_a_loop_that_goes_on_after_its_end_is_stopped(tmp_path: Path) -> None:
    stopped: list[Trial] = []

    def goes_on(trial: Trial) -> None:
        assert trial.batch_size and trial.learning_rate
        try:
            while True:
                if trial.evaluation_due:
                    trial.report(accuracy=min(0.99, trial.steps * trial.batch_size / 200))
                trial.step()
        except TrialStopped:
            stopped.append(trial)
            raise

    bssearch.Study(SPEC, goes_on, bssearch.Launch(db=url_in(tmp_path))).run()
    assert len(stopped) > len(trials_of(tmp_path))


@pytest.mark.slow
def test_the_guides_function_trains_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (OWN_TRAINING / "function.py").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(compile(code, "guide", "exec"), namespace)
    assert namespace["answer"].optimal.batch_size in {16, 32, 64}
    assert namespace["answer"].optimal.parameters["model.hidden"] in {4, 16}


def test_what_is_no_objectives_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names the workload 'digits'"):
        bssearch.Study({**SPEC, "workload": "digits"})
    with pytest.raises(UsageError, match="needs an objective"):
        bssearch.Study(SPEC, launch=bssearch.Launch(db=url_in(tmp_path))).run()


def status_of(*trials: TrialRecord, **changes: Any) -> dict[str, Any]:
    spec, environment, lease = make_spec(**changes), make_environment(), Lease(owner="here/1/1.00/x", seconds=60.0)
    with TemporaryDirectory() as folder, open_store(url_in(Path(folder))) as store:
        store_study(store, spec, environment)
        for one in trials:
            plan = make_plan(configuration=one.configuration, phase=one.phase)
            started = not_none(store.trials.start(spec.name, plan, environment=environment, lease=lease))
            if one.outcome is not None:
                store.trials.finish(spec.name, started.number, one.outcome, steps_x_step_time_s=one.steps_x_step_time_s)
        return asdict(status(store, spec.name))


def test_missing_trials_and_confirmation_runs_are_not_spent_and_all_train_seconds_count() -> None:
    found = status_of(
        make_trial(1, seconds=2.0),
        make_trial(2, state=TrialState.CAPPED, seconds=3.0),
        make_trial(3, state=TrialState.LOST, seconds=4.0),
        make_trial(4, state=TrialState.RUNNING),
        make_trial(5, seconds=5.0, phase=Phase.CONFIRM),
        make_trial(6, state=TrialState.RUNNING, phase=Phase.CONFIRM),
    )
    assert (found["budget_trials"], found["spent_trials"], found["running"]) == (20, 3, [4, 6])
    assert found["train_seconds"] == 14.0
    assert found["trials"] == {
        "search": {"reached": 1, "capped": 1, "lost": 1, "running": 1},
        "confirm": {"reached": 1, "running": 1},
    }


def test_the_fastest_is_a_search_trial_that_reached() -> None:
    found = status_of(
        make_trial(1, seconds=2.0, batch_size=16),
        make_trial(2, seconds=1.5, batch_size=64),
        make_trial(3, seconds=0.5, state=TrialState.CAPPED),
        make_trial(4, seconds=1.0, phase=Phase.CONFIRM),
    )
    assert found["fastest"] == {"trial": 2, "batch_size": 64, "time_to_target_s": 1.5, "basis": "measured"}
    assert found["search_ended"] is None
    contended = make_trial(2, seconds=9.0, contended=True, product=1.2, batch_size=64)
    fastest = status_of(make_trial(1, seconds=2.0), contended)["fastest"]
    assert fastest == {"trial": 2, "batch_size": 64, "time_to_target_s": 1.2, "basis": "steps_x_step_time"}
    assert status_of(make_trial(1, state=TrialState.CAPPED))["fastest"] is None


def test_of_an_imported_study_all_runs_are_search_trials() -> None:
    runs = [make_trial(1, seconds=2.0, phase=Phase.CONFIRM), make_trial(2, seconds=1.0, phase=Phase.CONFIRM)]
    found = status_of(*runs, workload=IMPORTED)
    assert (found["spent_trials"], found["fastest"]["trial"]) == (2, 2)


def test_before_its_end_a_trial_has_the_fields_of_an_end_as_null() -> None:
    row = trial_row(make_trial(1, state=TrialState.RUNNING))
    assert [row[name] for name in ALWAYS_THERE] == [None] * len(ALWAYS_THERE)
    ended = trial_row(make_trial(1, seconds=2.0, steps=50, traceback="where it broke"))
    assert (ended["train_seconds"], ended["time_to_target_s"], ended["steps_to_target"]) == (2.0, 2.0, 50)
    assert (ended["state"], ended["phase"]) == ("reached", "search")
    assert "traceback" not in ended and "parameters" not in ended


@pytest.mark.parametrize(("sampled", "shown"), [(None, None), ({"dropout": 0.1}, {"dropout": 0.1})])
def test_the_coordinates_of_a_trial_are_there_where_it_was_sampled(sampled: Any, shown: Any) -> None:
    assert trial_row(make_trial(1, sampled=sampled))["sampled"] == shown


def test_what_no_table_of_runs_says_is_null_of_an_imported_run() -> None:
    here = make_trial(1, seconds=0.0)
    outcome = replace(not_none(here.outcome), samples=0, train_seconds=0.0, steps=7)
    imported, ours = (
        trial_row(replace(here, created_at=created, outcome=outcome))
        for created in (not_none(here.ended_at), here.created_at)
    )
    assert [imported[name] for name in UNKNOWN_OF_IMPORTED] == [None] * len(UNKNOWN_OF_IMPORTED)
    assert (imported["train_seconds"], imported.get("samples"), imported["steps"]) == (None, None, 7)
    assert (ours["train_seconds"], ours["samples"], ours["threads"]) == (0.0, 0, 1)


# Opening a study ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_new_study_says_where_its_default_lies_outside_the_space(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    budget = {"trials": 6, "trial_train_seconds": 100.0}
    said = []
    for size in (24, 32):
        default = {**OPENED["default"], "batch_size": size}
        spec = make_spec(name=f"of-{size}", default=default, budget=budget, confirm={"runs": 0})
        ear = Ear()
        for _ in range(2):
            run_study(spec, Launch(db=url, listener=ear, make_executor=lambda *_: LawExecutor()))
        said.append([note for note in ear.notes if "outside the search space" in note])
    assert [len(one) for one in said] == [1, 0], "once, as the study is made"
    assert "batch_size = 24 is not one of" in said[0][0]


def test_a_setting_that_is_no_longer_given_is_said_to_be_so(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    ear = Ear()
    for confirm, options in (({"runs": 2, "max_runs": 2}, {}), ({"runs": 2}, {"lag": 2})):
        spec = make_spec(confirm=confirm, pruner={"name": "race", "options": options})
        with opened(spec, Launch(db=url, listener=ear, make_executor=lambda *_: LawExecutor())):
            pass
    assert "confirm.max_runs was 2, and is now not given" in ear.notes
    assert "pruner.options.lag was not given, and is now 2" in ear.notes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workload": "task.py"}, "compile = default.*name a class of the file, as in task.py:MyTask"),
        ({"workload": "task.py:make_trainer"}, "(compile = default) needs a workload class, because your own program"),
    ],
)
def test_training_settings_of_a_program_are_named(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
        make_spec(**changes, training={"compile": "default"})


@pytest.mark.parametrize("field", ["executor.slots", "training.compile"])
def test_a_value_that_is_null_is_named(tmp_path: Path, field: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(json.dumps(OPENED))
    with pytest.raises(SpecError, match=rf"{field} = null: "):
        load_spec(path, [f"{field}=null"])


def test_a_run_has_the_slots_that_auto_came_to_and_the_study_keeps_the_word(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    spec = make_spec(executor={"slots": "auto"})
    with opened(spec, Launch(db=url, make_executor=lambda *_: LawExecutor(slots=3))) as study:
        assert study.spec.executor.slots == 3
        assert spec_of(study.store.studies.get(spec.name)).executor.slots == "auto"
        assert study.spec.question_hash == make_spec().question_hash


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({}, {"threads": 2}, ["executor.threads"]),
        ({"devices": 2}, {}, ["executor.devices"]),
        ({}, {"devices": [1, 2]}, []),
        ({}, {"slots": 2}, []),
    ],
)
def test_a_study_keeps_the_threads_and_devices_of_its_search(
    before: dict[str, Any], now: dict[str, Any], changed: list[str], tmp_path: Path
) -> None:
    with open_store(f"sqlite:///{tmp_path / 'study.db'}") as store:
        store_study(store, make_spec(executor=before))
        stored = store.studies.get(make_spec().name)
    refusal = pytest.raises(QuestionChangedError, match=changed[0]) if changed else nullcontext()
    with refusal:
        opening.check_question(make_spec(executor=now), stored)


@pytest.mark.parametrize("load", [0.0, 1000.0])
def test_a_script_that_takes_no_step_is_told_after_a_while(
    load: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Event()
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))

    class Hears(Listener):
        def note(self, message: str) -> None:
            if "train.py reported no evaluation" in message and "TrialCallback" in message:
                assert ("the machine is busy (load 1000" in message) is (load > 0)
                heard.set()

    class Slow(LawExecutor):
        def describe(self) -> WorkloadDescription:
            assert heard.wait(30), "nobody said what is waited for"
            return super().describe()

    (tmp_path / "train.py").write_text("import bssearch\n")
    monkeypatch.setattr(opening, "TOLD_AFTER_S", 0.01)
    launch = Launch(
        db=f"sqlite:///{tmp_path / 'one.db'}", folder=tmp_path, listener=Hears(), make_executor=lambda *_: Slow()
    )
    with opened(make_spec(workload="train.py"), launch) as study:
        assert study.spec.workload == "train.py"
