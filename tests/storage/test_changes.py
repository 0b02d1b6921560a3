"""Changes for readers, outdated answers, and imports of finished studies."""

import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from sqlalchemy import Connection, event, text

from bssearch import Store, UsageError, open_store
from bssearch.exchange.importers.imported_run import LARGEST, ImportedRun, make_configuration
from bssearch.exchange.importers.imported_studies import make_studies
from bssearch.exchange.importers.runs import LARGEST_SEED
from bssearch.records import Configuration, MemoryUse, NewStudy, Phase, Target, TrialOutcome, TrialRecord, TrialState
from bssearch.storage.connection.engine import ConnectionLostError
from bssearch.storage.studies import FinishedStudy, FinishedTrial
from tests.factories import make_curve, make_environment, make_probe, not_none
from tests.storage.conftest import (
    CANCELLED,
    OUTCOME,
    add_study,
    begun,
    enqueue,
    resume,
    start,
    start_after,
    start_queued,
)

PAUSED = replace(CANCELLED, state=TrialState.PAUSED)
WRITERS = 3
TRIALS = 8


def _append(store: Store, number: int) -> None:
    store.trials.append_observations("toy", [(number, one) for one in make_curve((0.0, 0.1), (1.0, 0.5))])


def _finish(store: Store, number: int) -> None:
    store.trials.finish("toy", number, OUTCOME, steps_x_step_time_s=None)


CHANGES: dict[str, tuple[Callable[[Store], object], list[int]]] = {
    "start": (start, [4]),
    "enqueue": (enqueue, [4]),
    "start queued": (lambda store: start_queued(store, 2, "me"), [2]),
    "resume": (lambda store: resume(store, 3), [3]),
    "append to one that has ended": (lambda store: _append(store, 3), [3]),
    "finish": (lambda store: _finish(store, 1), [1]),
    "settle": (lambda store: store.trials.settle_paused("toy"), [3]),
    "mark lost": (lambda store: store.leases.mark_lost("toy", is_alive=lambda owner: False), [1]),
}
NO_CHANGES: dict[str, Callable[[Store], object]] = {
    "a start that came too late": lambda store: start_after(store, 2, "me"),
    "a trial that waits no more": lambda store: start_queued(store, 1, "me"),
    "nothing to settle": lambda store: store.trials.settle_paused("toy", []),
    "nobody lost": lambda store: store.leases.mark_lost("toy", is_alive=lambda owner: True),
    "a heartbeat": lambda store: store.leases.heartbeat("toy", "driver", 60.0),
    "observations of one that runs": lambda store: _append(store, 1),
    "no observations": lambda store: store.trials.append_observations("toy", []),
}


@pytest.fixture
def three(store: Store) -> Store:
    """A store with a running, a queued and a paused trial, and another study."""
    add_study(store, "other")
    begun(store)
    enqueue(store)
    start(store)
    store.trials.finish("toy", 3, PAUSED, steps_x_step_time_s=None)
    return store


@pytest.mark.usefixtures("toy")
def test_a_new_study_has_no_changes(store: Store) -> None:
    found = store.trials.changes("toy", 0)
    assert (found.revision, found.is_rewritten, found.has_new_probes, found.trials) == (0, False, False, [])


def test_all_trials_are_read_from_revision_0(three: Store) -> None:
    found = three.trials.changes("toy", 0)
    assert found.trials == three.trials.of("toy")
    assert not found.is_rewritten


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_brings_the_trials_that_it_changed_and_no_others(three: Store, what: str) -> None:
    change, numbers = CHANGES[what]
    before = three.trials.changes("toy", 0).revision
    change(three)
    found = three.trials.changes("toy", before)
    assert found.revision > before
    assert [trial.number for trial in found.trials] == numbers
    assert found.trials == [trial for trial in three.trials.of("toy") if trial.number in numbers]
    assert not found.is_rewritten and not found.has_new_probes
    assert three.trials.changes("toy", found.revision).trials == []
    assert three.trials.changes("other", 0).revision == 0


@pytest.mark.parametrize("what", NO_CHANGES)
def test_changes_outside_trials_keep_the_revision(three: Store, what: str) -> None:
    before = three.trials.changes("toy", 0).revision
    NO_CHANGES[what](three)
    assert three.trials.changes("toy", before).revision == before


def test_a_reader_is_told_of_new_probes(three: Store) -> None:
    environment = make_environment()
    calls: list[Callable[[], object]] = [
        lambda: three.probes.add_step_time("toy", environment, make_probe(8)),
        lambda: three.probes.save_memory(
            "toy", environment, MemoryUse(micro_batch_size=8, fits=True, peak_memory_bytes=None)
        ),
    ]
    for call in calls:
        before = three.trials.changes("toy", 0).revision
        call()
        found = three.trials.changes("toy", before)
        assert (found.has_new_probes, found.trials) == (True, [])
        assert not three.trials.changes("toy", found.revision).has_new_probes
    seen = three.trials.changes("toy", 0).revision
    three.probes.add_step_time("toy", environment, make_probe(8), 1)  # known already
    assert three.trials.changes("toy", seen).revision == seen


def test_after_a_deletion_a_reader_gets_all_rows(three: Store) -> None:
    before = three.trials.changes("toy", 0).revision

    def delete(connection: Connection, study_id: int) -> None:
        connection.execute(text("DELETE FROM bss_trial WHERE study_id = :id AND number = 2"), {"id": study_id})
        rewritten = "UPDATE bss_study SET revision = revision + 1, rewritten_at_revision = revision + 1 WHERE id = :id"
        connection.execute(text(rewritten), {"id": study_id})

    three.on_study("toy", delete)
    found = three.trials.changes("toy", before)
    assert found.is_rewritten
    assert [trial.number for trial in found.trials] == [1, 3]
    assert not three.trials.changes("toy", found.revision).is_rewritten


@pytest.mark.usefixtures("toy")
def test_the_revision_of_a_deleted_study_is_read_again(store: Store) -> None:
    for number in (start(store), start(store)):
        store.trials.finish("toy", number, OUTCOME, steps_x_step_time_s=None)
    before = store.trials.changes("toy", 0).revision
    store.studies.delete("toy")
    begun(store)
    found = store.trials.changes("toy", before)
    assert found.is_rewritten
    assert [trial.number for trial in found.trials] == [1]


def test_without_changes_one_row_is_read(three: Store) -> None:
    seen = three.trials.changes("toy", 0).revision
    statements: list[str] = []
    event.listen(three._engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    three.trials.changes("toy", seen)
    assert sum("SELECT" in one for one in statements) == 1
    assert not any("bss_trial" in one for one in statements)


def _write(url: str, owner: str, together: threading.Barrier) -> None:
    """Start, pause, resume and end several trials, as a driver does."""
    with open_store(url) as store:
        together.wait()
        for index in range(TRIALS):
            number = start(store, lease_owner=owner)
            if index % 2:
                store.trials.finish("toy", number, PAUSED, steps_x_step_time_s=None)
                resume(store, number, owner)
            _append(store, number)
            _finish(store, number)


def _without_lease(trials: list[TrialRecord]) -> list[TrialRecord]:
    return [replace(trial, lease_expires_at=None) for trial in trials]


@pytest.mark.usefixtures("toy")
def test_a_reader_beside_several_writers_misses_no_change(store: Store, url: str) -> None:
    together = threading.Barrier(WRITERS + 1, timeout=30)
    writers = [threading.Thread(target=_write, args=(url, f"driver-{n}", together)) for n in range(WRITERS)]
    for writer in writers:
        writer.start()
    known: dict[int, TrialRecord] = {}
    curves: dict[int, int] = {}
    seen = 0
    together.wait()
    is_last = False
    while not is_last:
        is_last = not any(writer.is_alive() for writer in writers)
        found = store.trials.changes("toy", seen)
        assert found.revision >= seen and not found.is_rewritten
        seen = found.revision
        known |= {trial.number: trial for trial in found.trials}
        curves |= {
            n: len(curve) for n, curve in store.trials.curves("toy", [one.number for one in found.trials]).items()
        }
    stored = store.trials.of("toy")
    assert len(stored) == WRITERS * TRIALS
    assert _without_lease([known[number] for number in sorted(known)]) == _without_lease(stored)
    assert set(curves.values()) == {2}
    assert seen == WRITERS * TRIALS * 2 + WRITERS * (TRIALS // 2) * 2  # one revision a change, none given twice


@pytest.mark.usefixtures("toy")
@pytest.mark.slow
def test_no_revision_is_seen_before_a_smaller_one(store: Store, url: str) -> None:
    """An uncommitted writer blocks the next writer's counter."""
    first, second = start(store), start(store)
    before = store.trials.changes("toy", 0).revision
    raised, go_on = threading.Event(), threading.Event()

    def pause(connection: Connection, *given: object) -> None:
        if connection.get_execution_options().get("bss_writes"):
            raised.set()
            go_on.wait(10)

    with open_store(url) as slow, open_store(url) as fast:
        event.listen(slow._engine, "commit", pause)
        one = threading.Thread(target=lambda: _finish(slow, first))
        two = threading.Thread(target=lambda: _finish(fast, second))
        one.start()
        raised.wait(10)
        two.start()
        two.join(0.5)
        assert two.is_alive()
        assert store.trials.changes("toy", before).trials == []
        go_on.set()
        one.join()
        two.join()
    assert [trial.number for trial in store.trials.changes("toy", before).trials] == [first, second]
    assert [trial.number for trial in store.trials.changes("toy", before + 1).trials] == [second]


# Stored answers -------------------------------------------------------------------------------------------------------


FOUND = {"made_by": 1, "answer": {"batch": 64, "text": "≥ 0.9", "nothing": None}}


def save(store: Store) -> None:
    store.findings.save("toy", store.findings.stamp("toy"), FOUND)


@pytest.mark.usefixtures("toy")
def test_a_stored_finding_is_read_unchanged_and_the_newest_counts(store: Store) -> None:
    assert store.findings.current("toy") is None
    save(store)
    assert store.findings.current("toy") == FOUND
    store.findings.save("toy", store.findings.stamp("toy"), {"made_by": 2})
    assert store.findings.current("toy") == {"made_by": 2}


MAKES_OLD: dict[str, Callable[[Store], object]] = {
    "a trial starts": lambda store: start(store),
    "a trial ends": lambda store: store.trials.finish("toy", 1, OUTCOME, steps_x_step_time_s=None),
    "a step time": lambda store: store.probes.add_step_time("toy", make_environment(), make_probe(8)),
    "another visit": lambda store: store.probes.add_step_time(
        "toy", make_environment(), make_probe(16, step_seconds=9.0), 2
    ),
    "the spec": lambda store: store.studies.update_spec("toy", {"workload": "digits", "confirm": {"runs": 5}}),
}


@pytest.mark.usefixtures("begun_toy")
@pytest.mark.parametrize("change", MAKES_OLD)
def test_a_finding_counts_only_until_something_changes(store: Store, change: str) -> None:
    store.probes.add_step_time("toy", make_environment(), make_probe(16))
    save(store)
    MAKES_OLD[change](store)
    assert store.findings.current("toy") is None


@pytest.mark.usefixtures("begun_toy")
def test_another_trial_instead_is_noticed_too(store: Store) -> None:
    """Also if the number of trials in each state stays equal."""
    stamp = store.findings.stamp("toy")
    store.trials.finish("toy", 1, OUTCOME, steps_x_step_time_s=None)
    start(store)
    assert store.trials.get("toy", 2).state is TrialState.RUNNING
    assert store.findings.stamp("toy") != stamp


@pytest.mark.usefixtures("toy")
def test_a_renamed_or_recreated_study_has_no_finding(store: Store) -> None:
    save(store)
    store.studies.rename("toy", "other")
    assert store.findings.current("other") is None
    store.findings.save("other", store.findings.stamp("other"), FOUND)
    store.studies.delete("other")
    add_study(store, "other")
    assert store.findings.current("other") is None


@pytest.mark.usefixtures("toy")
def test_the_versions_of_torch_come_in_the_order_of_the_trials(store: Store) -> None:
    add_study(store, "other")
    start(store, "other", environment=make_environment(torch_version="1.0"))
    assert store.trials.torch_versions("toy") == []
    for version in ("2.13", "2.11", "2.13"):
        start(store, environment=make_environment(torch_version=version))
    assert store.trials.torch_versions("toy") == ["2.13", "2.11"]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("is_news", [False, True])
def test_drivers_see_a_new_finding(store: Store, is_news: bool) -> None:
    seen = store.trials.changes("toy", 0).revision
    store.findings.save("toy", store.findings.stamp("toy"), {"found": is_news}, is_news=is_news)
    assert store.trials.changes("toy", seen).has_new_probes is is_news


# By an index ----------------------------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[Store], object]] = {
    "start": lambda store: start_after(store, 3, "me"),
    "start too late": lambda store: start_after(store, 1, "me"),
    "start queued": lambda store: start_queued(store, 2, "me"),
    "resume": lambda store: resume(store, 3),
    "enqueue": enqueue,
    "append": lambda store: store.trials.append_observations("toy", [(1, one) for one in make_curve((0.0, 0.1))]),
    "finish": lambda store: store.trials.finish("toy", 1, OUTCOME, steps_x_step_time_s=None),
    "settle": lambda store: store.trials.settle_paused("toy", [3]),
    "heartbeat": lambda store: store.leases.heartbeat("toy", "driver", 60.0),
    "claim": lambda store: store.leases.claim(
        "toy", "probe", owner="me", lease_seconds=60.0, is_alive=lambda owner: None
    ),
    "mark lost": lambda store: store.leases.mark_lost("toy", is_alive=lambda owner: False),
    "curve": lambda store: store.trials.curves("toy", [1]),
    "evaluations": lambda store: store.trials.evaluations("toy", [1]),
    "changes": lambda store: store.trials.changes("toy", 1),
}
TABLES = ("bss_trial", "bss_observation")


@pytest.mark.parametrize("what", CALLS)
def test_no_table_is_walked_through(sqlite_url: str, what: str) -> None:
    with open_store(sqlite_url) as store:
        begun(store)
        enqueue(store)
        start(store)
        store.trials.finish("toy", 3, PAUSED, steps_x_step_time_s=None)
        ran: list[tuple[str, Any]] = []
        event.listen(store._engine, "before_cursor_execute", lambda *given: ran.append((given[2], given[3])))
        CALLS[what](store)
        asked = [one for one in ran if one[0].startswith(("SELECT", "UPDATE", "DELETE"))]
        with store.reading() as connection:
            plans = [
                (statement, row[3])
                for statement, parameters in asked
                for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            ]
    assert plans
    for statement, step in plans:
        walks = any(step.startswith(f"SCAN {table}") for table in TABLES)
        whole_study = step.endswith("(study_id=?)") and "bss_trial" in step and "max(" not in statement
        assert not walks and not whole_study, (step, statement)


# Imports --------------------------------------------------------------------------------------------------------------


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
                configuration=CONFIGURATION,
                sampled=None,
                uncapped=True,
                phase=Phase.CONFIRM,
                seed=seed,
                train_seconds_limit=3.0,
                outcome=outcome,
            )
            for seed, outcome in enumerate(outcomes or (OUTCOME, MISSED))
        ],
    }
    return FinishedStudy(**{**values, **changes})


def lose_first(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, is_committed: bool, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Lose the connection of the store's first transaction, before or after its commit."""
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
    return FinishedTrial(**trial.kept, outcome=not_none(trial.outcome))


def test_a_study_is_stored_with_its_trials_its_environment_and_the_time(store: Store) -> None:
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
    changes = store.trials.changes("imported", 0)
    assert (changes.revision > 0, changes.trials) == (True, trials)
    assert [as_imported(trial) for trial in trials] == study.trials
    for trial in trials:
        assert trial.created_at == trial.ended_at == found.created_at
        assert (trial.sampled, trial.retry_of, trial.lease_owner, trial.uncapped) == (None, None, None, True)
    assert store.trials.environments("imported")[2] == study.environment
    assert [(one.trials, one.reached, one.running) for one in store.studies.summaries()] == [(2, 1, 0)]


def test_a_taken_or_invalid_name_stores_no_study(store: Store) -> None:
    add_study(store, "taken")
    for name, said in (("taken", "study 'taken' already exists"), ("a b", "invalid study name")):
        with pytest.raises(UsageError, match=said):
            store.transfer.import_finished([make_study("first"), make_study(name)])
        assert [study.name for study in store.studies.summaries()] == ["taken"]
    with pytest.raises(UsageError, match="study 'first' already exists"):
        store.transfer.import_finished([make_study("first"), make_study("first")])
    assert [study.name for study in store.studies.summaries()] == ["taken"]


def test_a_failed_import_leaves_no_environment_behind(store: Store) -> None:
    add_study(store, "taken")
    with pytest.raises(UsageError, match="study 'taken' already exists"):
        store.transfer.import_finished([make_study("first"), make_study("second"), make_study("taken")])
    other = make_environment(device_name="H100")
    store.transfer.import_finished([make_study("other", environment=other), make_study("first")])
    assert store.studies.get("first").environment == make_study().environment
    assert store.studies.get("other").environment == other


def test_an_import_that_was_committed_unnoticed_is_not_made_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_first(store, monkeypatch, is_committed=True)
    store.transfer.import_finished([make_study("first"), make_study("second", environment=make_environment())])
    assert [(one.name, one.trials) for one in store.studies.summaries()] == [("first", 2), ("second", 2)]


def test_a_second_try_finds_a_name_taken_by_another_writer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def take_name() -> None:
        assert store.studies.summaries() == []
        store.transfer.import_finished([make_study("first", OUTCOME)])

    lose_first(store, monkeypatch, is_committed=False, meanwhile=take_name)
    with pytest.raises(UsageError, match="study 'first' already exists"):
        store.transfer.import_finished([make_study("first")])
    assert len(store.trials.of("first")) == 1


@pytest.mark.slow
def test_a_process_killed_in_a_transaction_leaves_no_rows(store: Store, url: str) -> None:
    code = f"""
import os, signal
from bssearch.storage import studies as stored
from bssearch.storage.repository import open_store
from tests.storage.test_changes import make_study

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
    """A batch in one micro-batch."""
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
def test_an_imported_study_is_read_unchanged(store: Store, runs: list[ImportedRun]) -> None:
    made = make_studies(runs, name=f"s{uuid.uuid4().hex}", target=Target(metric="accuracy", value=0.9)).studies
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
