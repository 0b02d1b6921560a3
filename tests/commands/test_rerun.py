"""What a rerun asks an executor for, where it ends, and what it leaves behind when it is interrupted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bssearch import InterruptedRunError, Launch, Store, StudySpec, UsageError, open_store
from bssearch.cli.trial import sentences
from bssearch.commands.rerun import Rerun, reproduction, rerun
from bssearch.records import (
    Lease,
    Observation,
    Phase,
    TrialOutcome,
    TrialRequest,
    TrialState,
)
from tests.executors.fake import DESCRIPTION, FakeExecutor, Play
from tests.factories import SPEC as RAW, make_environment, make_plan, make_spec, not_none
from tests.postgres import Postgres
from tests.search.law import interrupt

HERE = make_environment()
QUESTION: dict[str, Any] = {
    "target": {"metric": "score", "value": 0.9},
    "space": {**RAW["space"], "batch_size": [16, 32, 64]},
}
SPEC = make_spec(**QUESTION, budget={"trials": 20, "trial_train_seconds": 10.0}, executor={"slots": 4})
PLAN = make_plan(configuration=SPEC.default_configuration, seed=7, eval_every_steps=10, train_seconds_limit=4.0)


def curve(pace: float = 0.01, seconds: float = 0.01, to_step: int = 1000) -> list[Observation]:
    """Return evaluations every 10 steps, whose metric grows by ``pace`` a step."""
    return [
        Observation(
            step=step,
            samples=32 * step,
            train_seconds=seconds * step,
            metric=pace * step,
            loss=None,
            learning_rate=0.1,
        )
        for step in range(0, to_step + 1, 10)
    ]


class Runs:
    """A database with one trial, and an executor that plays a curve when it is run again."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'study.db'}"
        self.specs: list[StudySpec] = []
        self.executor = FakeExecutor(lambda request: iter(curve()))
        with open_store(self.url) as store:
            store.studies.create(SPEC.new_study("tester"))

    def store(self, outcome: TrialOutcome, seen: list[Observation], **changes: Any) -> None:
        """Store a trial that ended so."""
        with open_store(self.url) as store:
            lease = Lease(owner="d", seconds=60.0, spec=store.studies.keep_spec("toy", SPEC.model_dump(mode="json")))
            trial = not_none(store.trials.start("toy", replace(PLAN, **changes), environment=HERE, lease=lease))
            store.trials.append_observations("toy", [(trial.number, one) for one in seen])
            store.trials.finish("toy", trial.number, outcome, steps_x_step_time_s=None)

    def again(self, play: Play | None = None, **options: Any) -> Rerun:
        """Run the trial again, with an executor that plays so."""
        if play is not None:
            self.executor = FakeExecutor(play)

        def make(spec: StudySpec, folder: Path) -> FakeExecutor:
            self.specs.append(spec)
            return self.executor

        return rerun("toy", 1, Launch(db=self.url, make_executor=make), **options)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def ended(state: TrialState, **figures: Any) -> TrialOutcome:
    return TrialOutcome(state=state, reason="as the test has it", **figures)


REACHED = ended(TrialState.REACHED, steps=90, steps_to_target=90, time_to_target_s=0.9)


def test_it_is_trained_as_it_was_but_for_the_incumbents_limit_and_by_the_spec_of_its_start(runs: Runs) -> None:
    runs.store(REACHED, curve(to_step=90), threads=1)
    later = make_spec(
        **QUESTION,
        budget={"trials": 99, "trial_train_seconds": 33.0},
        executor={"slots": 8, "hang_seconds": 7.0},
    )
    with open_store(runs.url) as store:
        store.studies.update_spec("toy", later.model_dump(mode="json"))
    found = runs.again(runs=3)
    request = runs.executor.requests[0]
    assert runs.executor.requests == 3 * [request]
    plan = replace(PLAN, train_seconds_limit=10.0, limit_state=TrialState.CAPPED)
    assert request == TrialRequest(number=1, plan=plan, target=SPEC.record_target)
    [spec] = runs.specs
    assert (spec.executor.slots, spec.executor.hang_seconds, spec.budget.trial_train_seconds) == (1, 300.0, 10.0)
    assert (found.identical, found.steps_ratio) == (True, 1.0)
    assert found.time_ratio == pytest.approx(1.0)
    assert found.differences == []


@pytest.mark.parametrize("state", [TrialState.PRUNED, TrialState.PAUSED, TrialState.CAPPED, TrialState.CANCELLED])
def test_a_trial_that_was_stopped_is_run_as_far_as_it_came(runs: Runs, state: TrialState) -> None:
    runs.store(ended(state, steps=43, train_seconds=0.43), curve(to_step=40))
    found = runs.again(lambda request: iter(curve(seconds=0.02)))
    [run] = found.runs
    assert (run.state, run.steps, [one.step for one in run.evaluations]) == (state, 40, [0, 10, 20, 30, 40])
    assert (found.identical, found.steps_ratio) == (True, None)
    assert found.time_ratio == pytest.approx(2.0)


def test_a_metric_that_differs_in_its_last_bit_is_not_identical(runs: Runs) -> None:
    runs.store(ended(TrialState.PRUNED, steps=40), curve(to_step=40))
    [run] = runs.again(lambda request: iter(curve(pace=0.01 + 1e-15))).runs
    assert not run.identical
    assert run.first_difference_step == 10 and 0 < (run.largest_difference or 0) < 1e-12


def test_a_slower_trial_has_the_ratios_of_its_steps_and_seconds(runs: Runs) -> None:
    runs.store(REACHED, curve(to_step=90))
    found = runs.again(lambda request: iter(curve(pace=0.005, seconds=0.02)))
    assert not found.identical
    assert found.steps_ratio == pytest.approx(2.0)
    assert found.time_ratio == pytest.approx(4.0)


DIVERGED = ended(TrialState.DIVERGED, steps=43)
FAULTS = (TrialState.FAILED, TrialState.OOM, TrialState.DIVERGED)


@pytest.mark.parametrize(
    ("stored", "seen", "again", "identical", "said"),
    [
        (DIVERGED, 40, [*curve(to_step=40), DIVERGED], True, "bit for bit (5 evaluations compared)"),
        *((ended(one), None, [ended(one)], None, "no evaluations to compare") for one in FAULTS),
        (ended(TrialState.FAILED), None, [ended(TrialState.OOM)], False, ""),
        (ended(TrialState.OOM), None, curve(), False, ""),
        (DIVERGED, 40, [replace(DIVERGED, steps=3)], False, "ended after 3 steps instead of 43"),
        (DIVERGED, 40, [*curve(to_step=40), replace(DIVERGED, steps=44)], False, "after 44 steps"),
        (
            DIVERGED,
            40,
            [*curve(to_step=20), DIVERGED],
            False,
            "3 evaluations are in both trainings, 2 only in the stored trial",
        ),
        (DIVERGED, 20, [*curve(to_step=40), DIVERGED], False, "2 only in the rerun"),
        (DIVERGED, 40, [*curve(to_step=40), replace(DIVERGED, reason="the loss")], False, "reason is 'the loss'"),
        (ended(TrialState.FAILED), None, [replace(ended(TrialState.FAILED), reason="no file")], False, "'no file'"),
        (
            ended(TrialState.OOM),
            None,
            [replace(ended(TrialState.OOM), reason="1 GiB is free")],
            None,
            "no evaluations to compare",
        ),
        (ended(TrialState.EXHAUSTED, steps=43), 20, curve(to_step=10), False, "2 evaluations are in both trainings"),
        (ended(TrialState.EXHAUSTED, steps=43), 20, curve(to_step=20), True, "bit for bit (3 evaluations compared)"),
        (ended(TrialState.EXHAUSTED, steps=43), 20, [*curve(to_step=20), DIVERGED], True, "bit for bit"),
    ],
)
def test_runs_are_identical_where_all_that_one_of_both_has_agrees(
    runs: Runs,
    stored: TrialOutcome,
    seen: int | None,
    again: list[Observation | TrialOutcome],
    identical: bool | None,
    said: str,
) -> None:
    runs.store(stored, [] if seen is None else curve(to_step=seen))
    found = runs.again(lambda request: iter(again))
    assert found.identical is found.runs[0].identical is identical
    assert said in next(sentences(found))


def test_one_run_of_several_that_differs_decides(runs: Runs) -> None:
    runs.store(REACHED, curve(to_step=90))
    paces = iter([0.01, 0.02, 0.01])
    found = runs.again(lambda request: iter(curve(pace=next(paces))), runs=3)
    assert [one.identical for one in found.runs] == [True, False, True] and found.identical is False


def test_a_trial_to_its_budget_trains_past_its_target(runs: Runs) -> None:
    runs.store(REACHED, curve(to_step=400), phase=Phase.TO_BUDGET, train_seconds_limit=10.0)
    assert runs.again().identical
    [request] = runs.executor.requests
    assert (request.plan.stop_at_target, request.plan.limit_state, request.plan.is_tested) == (
        False,
        TrialState.EXHAUSTED,
        True,
    )


@pytest.mark.parametrize("state", [TrialState.LOST, TrialState.CANCELLED])
def test_a_trial_that_ended_before_its_first_evaluation_shows_nothing_to_compare(runs: Runs, state: TrialState) -> None:
    runs.store(ended(state), [])
    with pytest.raises(UsageError, match="the trial ended before its first evaluation"):
        runs.again()


def test_a_trial_that_runs_and_fewer_than_one_run_are_refused(runs: Runs) -> None:
    with open_store(runs.url) as store:
        store.trials.start("toy", PLAN, environment=HERE, lease=Lease(owner="d", seconds=60.0))
    for count, said in ((1, "the trial still runs"), (0, "runs = 0 must be >= 1")):
        with pytest.raises(UsageError, match=said):
            runs.again(runs=count)


def test_ctrl_c_ends_it_and_nothing_is_stored(runs: Runs) -> None:
    runs.store(REACHED, curve(to_step=90))
    with pytest.raises(InterruptedRunError, match="drops the results"):
        runs.again(interrupt)
    with open_store(runs.url, write=False) as store:
        assert [trial.number for trial in store.trials.of("toy")] == [1]


def test_another_gpu_of_the_same_kind_is_a_difference(runs: Runs) -> None:
    runs.store(ended(TrialState.PRUNED, steps=40, device="cuda:0", device_uuid="GPU-1"), curve(to_step=40))

    here = replace(DESCRIPTION, environment=make_environment(git_revision="0123456789ab"))
    runs.executor = FakeExecutor(lambda request: iter(curve()), description=here)
    assert [(one.name, one.then, one.now) for one in runs.again().differences] == [("device_uuid", "GPU-1", None)]


def test_a_password_is_in_no_printed_command(runs: Runs, postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.store(REACHED, curve(to_step=90))
    with open_store(runs.url, write=False) as store:
        named = reproduction(store, "toy", 1, names_database=True)
        assert named.command == f"bssearch trial rerun toy 1 --db {runs.url}"
        assert reproduction(store, "toy", 1).command == "bssearch trial rerun toy 1"
        monkeypatch.setattr(Store, "has_secret", True)
        secret = reproduction(store, "toy", 1, names_database=True)
        assert secret.command == "bssearch trial rerun toy 1"
        assert f"set BSSEARCH_DB_URL to {store.masked_url}, with the secret instead of ***" in secret.notes
        monkeypatch.undo()
        assert not store.has_secret
    with open_store(postgres.cleared_database().replace("postgres@", "postgres:secret@")) as store:
        assert store.has_secret and "secret" not in store.masked_url
