"""Studies that come with all their trials, on every database: whole, or not at all."""

import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from sqlalchemy import Connection

from bssearch.errors import UsageError
from bssearch.exchange.importers.imported_run import LARGEST, ImportedRun, make_configuration
from bssearch.exchange.importers.imported_studies import make_studies
from bssearch.exchange.importers.runs import LARGEST_SEED
from bssearch.records import Configuration, NewStudy, Phase, Target, TrialOutcome, TrialRecord, TrialState
from bssearch.storage.connection.engine import ConnectionLostError
from bssearch.storage.repository import Store, open_store
from bssearch.storage.studies import FinishedStudy, FinishedTrial
from tests.factories import make_environment, not_none
from tests.storage.conftest import OUTCOME, add_study, start

MISSED = TrialOutcome(state=TrialState.EXHAUSTED, reason="ended", steps=7, last_miss_step=7)
CONFIGURATION = Configuration(
    batch_size=32, micro_batch_size=16, accumulation_steps=2, learning_rate=0.1, parameters={"learning_rate": None}
)


def make_study(name: str = "imported", *outcomes: TrialOutcome, **changes: Any) -> FinishedStudy:
    values: dict[str, Any] = {
        "study": NewStudy(
            name=name,
            spec={"workload": "imported", "name": name},
            spec_hash="abc",
            objective="samples_to_target",
            target=Target(metric="accuracy", value=0.9),
            created_by="someone",
        ),
        "environment": make_environment(device_name="A100", device_type="unknown"),
        "trials": [
            FinishedTrial(
                configuration=CONFIGURATION, phase=Phase.CONFIRM, seed=seed, train_seconds_limit=3.0, outcome=outcome
            )
            for seed, outcome in enumerate(outcomes or (OUTCOME, MISSED))
        ],
    }
    return FinishedStudy(**{**values, **changes})


def lose_first(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, is_committed: bool, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Lose the connection of the store's first transaction, after its commit or before."""
    writing = store.writing
    transactions: list[int] = []

    @contextmanager
    def loses_first() -> Iterator[Connection]:
        transactions.append(len(transactions))
        is_first = transactions == [0]
        with suppress(_NotCommittedError), writing() as connection:
            yield connection
            if is_first and not is_committed:
                raise _NotCommittedError
        if is_first:
            meanwhile()
            raise ConnectionLostError("the server is away")

    monkeypatch.setattr(store, "writing", loses_first)


class _NotCommittedError(Exception):
    pass


def as_imported(trial: TrialRecord) -> FinishedTrial:
    return FinishedTrial(
        configuration=trial.configuration,
        phase=trial.phase,
        seed=trial.seed,
        train_seconds_limit=trial.train_seconds_limit,
        outcome=not_none(trial.outcome),
    )


class TestImports:
    def test_a_study_is_stored_with_its_trials_its_environment_and_the_time(self, store: Store) -> None:
        study = make_study()
        store.transfer.import_finished([study])
        found = store.studies.get("imported")
        assert (found.spec, found.objective, found.target) == (
            study.study.spec,
            "samples_to_target",
            study.study.target,
        )
        assert found.environment == study.environment
        trials = store.trials.of("imported")
        assert [trial.number for trial in trials] == [1, 2]
        assert [as_imported(trial) for trial in trials] == study.trials
        for trial in trials:
            assert trial.created_at == trial.ended_at == found.created_at
            assert (trial.sampled, trial.retry_of, trial.lease_owner, trial.uncapped) == (None, None, None, True)
        assert store.trials.environment("imported", 2) == study.environment
        assert [(one.trials, one.reached, one.running) for one in store.studies.summaries()] == [(2, 1, 0)]

    def test_a_name_that_is_taken_or_ill_formed_stores_nothing(self, store: Store) -> None:
        add_study(store, "taken")
        for name, said in (("taken", "study 'taken' already exists"), ("a b", "invalid study name")):
            with pytest.raises(UsageError, match=said):
                store.transfer.import_finished([make_study("first"), make_study(name)])
            assert [study.name for study in store.studies.summaries()] == ["taken"]
        with pytest.raises(UsageError, match="study 'first' already exists"):
            store.transfer.import_finished([make_study("first"), make_study("first")])
        assert [study.name for study in store.studies.summaries()] == ["taken"]

    def test_a_trial_that_has_not_ended_stores_nothing(self, store: Store) -> None:
        running = replace(OUTCOME, state=TrialState.RUNNING)
        with pytest.raises(ValueError, match="running is not a final state"):
            store.transfer.import_finished([make_study("first"), make_study("second", OUTCOME, running)])
        assert store.studies.summaries() == []

    def test_an_import_that_was_committed_unnoticed_is_not_made_again(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lose_first(store, monkeypatch, is_committed=True)
        store.transfer.import_finished([make_study("first"), make_study("second", environment=make_environment())])
        assert [(one.name, one.trials) for one in store.studies.summaries()] == [("first", 2), ("second", 2)]

    def test_a_second_try_finds_a_name_that_another_took_meanwhile(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def take_name() -> None:
            assert store.studies.summaries() == []
            store.transfer.import_finished([make_study("first", OUTCOME)])

        lose_first(store, monkeypatch, is_committed=False, meanwhile=take_name)
        with pytest.raises(UsageError, match="study 'first' already exists"):
            store.transfer.import_finished([make_study("first")])
        assert len(store.trials.of("first")) == 1

    @pytest.mark.slow
    def test_a_process_that_is_killed_in_the_middle_leaves_nothing(self, store: Store, url: str) -> None:
        code = f"""
import os, signal
from bssearch.storage import studies as stored
from bssearch.storage.repository import open_store
from tests.storage.test_imports import make_study

def die(study, number, time, record=stored._record):
    if study.seed == 1 and studies[1].trials[1] is study:
        os.kill(os.getpid(), signal.SIGKILL)
    return record(study, number, time)

stored._record, stored.CHUNK = die, 1
studies = [make_study("first"), make_study("second")]
open_store({url!r}).transfer.import_finished(studies)
"""
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        with open_store(url) as other:
            assert other.studies.summaries() == []
            other.transfer.import_finished([make_study("first")])


POSITIVE = st.floats(min_value=1e-9, max_value=1e9)


def whole(size: int) -> dict[str, int]:
    """Return a batch that is not split."""
    return {"batch_size": size, "micro_batch_size": size}


PARAMETERS = st.dictionaries(
    st.sampled_from(["learning_rate", "weight_decay", "optimizer", "momentum", "ü"]),
    st.none() | POSITIVE | st.integers(1, 2**60),
)
RUNS = st.builds(
    ImportedRun,
    origin=st.sampled_from(["runs.csv:2", "folder/runs.csv:3"]),
    configuration=st.builds(make_configuration, st.integers(1, LARGEST).map(whole), PARAMETERS, st.just("")),
    seed=st.none() | st.integers(0, 3) | st.just(LARGEST_SEED),
    reached=st.booleans(),
    steps=st.none() | st.integers(1, LARGEST),
    train_seconds=st.none() | POSITIVE,
    final_metric=st.none()
    | st.floats(allow_nan=False, allow_infinity=False).map(lambda metric: metric + 0.0),  # not -0
    device=st.sampled_from([None, "NVIDIA A100", "nvidia-a100", "ü"]),
    precision=st.sampled_from([None, "bf16"]),
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=st.lists(RUNS, min_size=1, max_size=8))
def test_what_is_imported_comes_back_unchanged(store: Store, runs: list[ImportedRun]) -> None:
    name = f"s{uuid.uuid4().hex}"
    made = make_studies(runs, name=name, target=Target(metric="accuracy", value=0.9)).studies
    store.transfer.import_finished(made)
    for study in made:
        stored = store.trials.of(study.study.name)
        assert tuple(map(as_imported, stored)) == study.trials
        assert store.studies.get(study.study.name).spec == study.study.spec
        assert store.studies.get(study.study.name).environment == study.environment
        seeds = [(trial.configuration.key, trial.seed) for trial in stored]
        assert len(set(seeds)) == len(seeds)
    back = [trial for study in made for trial in store.trials.of(study.study.name)]
    assert sorted(map(figures_of_run, runs)) == sorted(map(figures_of_trial, back))


def figures_of_run(run: ImportedRun) -> str:
    to_target = (run.train_seconds, run.steps) if run.reached else (None, None)
    missed_at = (None, None) if run.reached else (run.train_seconds, run.steps)
    return repr((asdict(run.configuration), run.reached, to_target, missed_at, run.final_metric))


def figures_of_trial(trial: TrialRecord) -> str:
    outcome = not_none(trial.outcome)
    to_target = (outcome.time_to_target_s, outcome.steps_to_target)
    missed_at = (outcome.last_miss_seconds, outcome.last_miss_step)
    reached = trial.state is TrialState.REACHED
    return repr((asdict(trial.configuration), reached, to_target, missed_at, outcome.final_metric))


@pytest.mark.usefixtures("toy")
def test_a_trial_that_ends_in_the_moment_of_its_start_is_no_imported_one(store: Store) -> None:
    for _ in range(30):
        store.trials.finish("toy", start(store), OUTCOME, steps_x_step_time_s=None)
    assert not any(trial.is_imported for trial in store.trials.of("toy"))
