"""A stored configuration trains only if the running user's spec allows it.

Each test writes a forged row into the database. Without the check in `bssearch.spec.admission` the forged text would
reach the executor.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bssearch import (
    InterruptedRunError,
    Launch,
    TargetNotReachedError,
    UsageError,
    audit_study,
    confirm_study,
    enqueue,
    open_store,
    rerun,
    run_study,
)
from bssearch.analysis.answer import Answer
from bssearch.records import REFUSED, Phase, TrialRecord, TrialState
from bssearch.spec import PrunerSpec, StudySpec, problem_with
from bssearch.storage.transfer.study_copy import read_study
from tests.factories import SPEC, make_spec
from tests.schema import execute
from tests.search.law import LawExecutor, url_in
from tests.search.test_pausing_driver import Dies, SteppingLaw, die, study_spec

FORGED = "r$(id > PWNED)"
MODEL: dict[str, Any] = {
    "space": {**SPEC["space"], "model": {"activation": ["relu", "gelu"]}},
    "default": {**SPEC["default"], "model": {"activation": "relu"}},
}


def spec_with(trials: int, confirm: Mapping[str, int] | None = None) -> StudySpec:
    return make_spec(**MODEL, budget={"trials": trials, "trial_train_seconds": 100.0}, confirm=confirm or {"runs": 0})


def run(spec: StudySpec, folder: Path, executor: LawExecutor) -> Answer:
    return run_study(spec, Launch(db=url_in(folder), make_executor=lambda *_: executor))


def trials_in(folder: Path, name: str = "toy") -> dict[int, TrialRecord]:
    with open_store(url_in(folder), write=False) as store:
        return {trial.number: trial for trial in store.trials.of(name)}


def forge(folder: Path, number: int, *, activation: str = FORGED, **columns: object) -> None:
    """Change a stored trial, as anyone with write access can."""
    names = ["parameters = json_set(parameters, '$.\"model.activation\"', ?)", *(f"{name} = ?" for name in columns)]
    statement = f"UPDATE bss_trial SET {', '.join(names)} WHERE number = ? RETURNING number"
    assert execute(folder / "study.db", statement, (activation, *columns.values(), number)) == [(number,)]


def given(executor: LawExecutor) -> set[object]:
    """Every activation that reached the executor."""
    asked = [request.plan.configuration for request in executor.requests] + executor.splits_timed
    return {one.parameters["model.activation"] for one in asked}


def assert_refused(trial: TrialRecord) -> None:
    assert trial.state is TrialState.FAILED and trial.is_refused
    assert trial.outcome is not None and trial.outcome.reason.startswith(REFUSED)
    assert f"model.activation = {FORGED!r} must be" in trial.outcome.reason
    assert trial.outcome.steps == 0


def test_a_queued_trial_is_refused_and_the_others_run(tmp_path: Path) -> None:
    run(spec_with(5), tmp_path, LawExecutor())
    with open_store(url_in(tmp_path)) as store:
        forged, _ = enqueue(store, "toy", {"model.activation": "gelu"})
        honest, _ = enqueue(store, "toy", {"dropout": 0.44})
    forge(tmp_path, forged)
    executor = LawExecutor()
    run(spec_with(9), tmp_path, executor)
    trials = trials_in(tmp_path)
    assert_refused(trials[forged])
    assert trials[honest].state is TrialState.REACHED
    assert given(executor) <= {"relu", "gelu"}


def test_an_imported_queued_trial_is_refused(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    mine.mkdir()
    run(spec_with(5), theirs, LawExecutor())
    with open_store(url_in(theirs)) as store:
        number, _ = enqueue(store, "toy", {"model.activation": "gelu"})
    forge(theirs, number)
    with open_store(url_in(theirs), write=False) as store:
        store.transfer.write("toy", tmp_path / "study.jsonl.gz")
    with open_store(url_in(mine)) as store:
        store.transfer.join([read_study(tmp_path / "study.jsonl.gz")])
    executor = LawExecutor()
    run(spec_with(9), mine, executor)
    assert_refused(trials_in(mine)[number])
    assert executor.requests and given(executor) <= {"relu", "gelu"}


def test_many_refused_trials_neither_end_the_study_nor_give_up_their_batch_size(tmp_path: Path) -> None:
    run(spec_with(5), tmp_path, LawExecutor())
    with open_store(url_in(tmp_path)) as store:
        forged = [enqueue(store, "toy", {"batch_size": 16, "dropout": 0.01 * at})[0] for at in range(12)]
    for number in forged:
        forge(tmp_path, number)
    executor = LawExecutor()
    answer = run(spec_with(30), tmp_path, executor)
    trials = trials_in(tmp_path)
    for number in forged:
        assert_refused(trials[number])
    assert 16 in {request.plan.configuration.batch_size for request in executor.requests}
    assert answer.optimal.batch_size in {16, 32}


@pytest.fixture
def stepping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudySpec:
    """Spec of a study with paused and resumed trials and its own checkpoint folder."""
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    return study_spec(**MODEL, budget={"trials": 12, "trial_train_seconds": 0.1})


def step(spec: StudySpec, folder: Path, executor: SteppingLaw) -> SteppingLaw:
    """Run a study that spends its budget without a hit."""
    executor.full = spec.budget.trial_train_seconds
    with pytest.raises((Dies, InterruptedRunError, TargetNotReachedError)):
        run(spec, folder, executor)
    return executor


def test_a_refused_paused_trial_does_not_stop_the_others(tmp_path: Path, stepping: StudySpec) -> None:
    done = step(stepping, tmp_path, SteppingLaw(on_look=die)).done
    forged, *others = [one.number for one in trials_in(tmp_path).values() if one.state is TrialState.PAUSED]
    forge(tmp_path, forged)
    executor = step(stepping, tmp_path, SteppingLaw(done=done))
    assert_refused(trials_in(tmp_path)[forged])
    assert forged not in executor.resumed and {*others} <= {*executor.resumed}
    assert given(executor) <= {"relu", "gelu"}


def test_the_retry_of_a_forged_trial_is_refused_once(
    tmp_path: Path, stepping: StudySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepping = stepping.model_copy(update={"pruner": PrunerSpec(name="cap")})  # so that the default is uncapped
    step(stepping, tmp_path, SteppingLaw(interrupts_when=lambda law: law.done.get(1) == 1))
    forge(tmp_path, 1)
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / "elsewhere"))
    executor = step(stepping, tmp_path, SteppingLaw())
    (again,) = [trial for trial in trials_in(tmp_path).values() if trial.retry_of == 1]
    assert_refused(again)
    assert executor.requests and given(executor) <= {"relu", "gelu"}


@pytest.fixture
def with_forged_best(tmp_path: Path) -> int:
    """Number of a forged trial that looks faster than all others."""
    run(spec_with(12), tmp_path, LawExecutor())
    reached = [one for one in trials_in(tmp_path).values() if one.state is TrialState.REACHED]
    number = max(one.number for one in reached)
    forge(tmp_path, number, time_to_target_s=0.001, steps_to_target=1, steps_x_step_time_s=0.001)
    return number


def test_the_confirmation_of_a_forged_trial_is_refused_and_another_configuration_is_the_answer(
    tmp_path: Path, with_forged_best: int
) -> None:
    executor = LawExecutor()
    answer = run(spec_with(12, {"runs": 3}), tmp_path, executor)
    confirming = [one for one in trials_in(tmp_path).values() if one.phase is Phase.CONFIRM]
    forged = [one for one in confirming if one.configuration.parameters["model.activation"] == FORGED]
    assert len(forged) == 1
    assert_refused(forged[0])
    assert with_forged_best not in answer.optimal.trial_numbers
    assert {*answer.optimal.trial_numbers} <= {one.number for one in confirming}
    assert len(executor.requests) == len(confirming) - 1 and given(executor) <= {"relu", "gelu"}


def test_audit_and_runs_to_the_whole_budget_refuse_a_forged_trial(tmp_path: Path, with_forged_best: int) -> None:
    spec = spec_with(12, {"runs": 3})
    run(spec, tmp_path, LawExecutor())
    for number, trial in trials_in(tmp_path).items():
        if trial.phase is Phase.CONFIRM and not trial.is_refused:
            forge(tmp_path, number)
            break
    executor = LawExecutor()
    audit_study(spec, Launch(db=url_in(tmp_path), make_executor=lambda *_: executor), runs=3)
    confirm_study(spec, Launch(db=url_in(tmp_path), make_executor=lambda *_: executor), to_budget_runs=2)
    assert executor.requests and given(executor) <= {"relu", "gelu"}


def test_a_rerun_of_a_forged_trial_is_refused_before_the_start(tmp_path: Path) -> None:
    run(spec_with(5), tmp_path, LawExecutor())
    forge(tmp_path, 2)

    def no_executor(*_: object) -> LawExecutor:
        raise AssertionError("nothing is started")

    with pytest.raises(UsageError, match=r"cannot rerun trial 2 .*: model\.activation"):
        rerun("toy", 2, Launch(db=url_in(tmp_path), make_executor=no_executor))


def test_a_value_that_is_null_is_within_all_limits() -> None:
    spec = make_spec()
    default = spec.default_configuration
    unset = replace(
        default, learning_rate=0.9 * default.learning_rate, parameters={**default.parameters, "momentum": None}
    )
    assert problem_with(spec, unset, in_bounds=False) is None
    low = replace(unset, parameters={**default.parameters, "momentum": -1.0})
    assert problem_with(spec, low, in_bounds=False) == "momentum = -1 must be in [0, 1)"
