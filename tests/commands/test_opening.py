"""What is said as a study begins."""

import json
import os
from pathlib import Path
from threading import Event

import pytest

from bssearch.commands import opening
from bssearch.commands.launch import Launch
from bssearch.commands.opening import opened
from bssearch.commands.run import run_study
from bssearch.errors import SpecError
from bssearch.records import WorkloadDescription
from bssearch.search.driver import Listener
from bssearch.spec import load_spec
from bssearch.spec.reader import spec_of
from tests.factories import SPEC, make_spec
from tests.search.law import LawExecutor
from tests.waiting import Ear


@pytest.mark.slow
def test_a_new_study_says_where_its_default_lies_outside_the_space(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    budget = {"trials": 6, "trial_train_seconds": 100.0}
    said = []
    for size in (24, 32):
        default = {**SPEC["default"], "batch_size": size}
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
    assert "confirm.max_runs was 2, from now on it is not given" in ear.notes
    assert "pruner.options.lag was not given, from now on it is 2" in ear.notes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workload": "task.py"}, "compile = default.*a class in it is named, as in task.py:MyTask"),
        ({"workload": "task.py:make_trainer"}, "(compile = default); a program of your own computes its own"),
    ],
)
def test_training_settings_of_a_program_are_named(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
        make_spec(**changes, training={"compile": "default"})


@pytest.mark.parametrize("field", ["executor.slots", "training.compile"])
def test_a_value_that_is_null_is_named(tmp_path: Path, field: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(json.dumps(SPEC))
    with pytest.raises(SpecError, match=rf"{field} = null: "):
        load_spec(path, [f"{field}=null"])


def test_a_run_has_the_slots_that_auto_came_to_and_the_study_keeps_the_word(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    spec = make_spec(executor={"slots": "auto"})
    with opened(spec, Launch(db=url, make_executor=lambda *_: LawExecutor(slots=3))) as study:
        assert study.spec.executor.slots == 3
        assert spec_of(study.store.studies.get(spec.name)).executor.slots == "auto"
        assert study.spec.question_hash == make_spec().question_hash


@pytest.mark.parametrize("load", [0.0, 1000.0])
def test_a_script_that_takes_no_step_is_told_after_a_while(
    load: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Event()
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))

    class Hears(Listener):
        def note(self, message: str) -> None:
            if "still waiting for the first step and evaluation of train.py" in message and "TrialCallback" in message:
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
