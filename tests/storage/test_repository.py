"""The contract of the store: every kind of database keeps it."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sqlite3
import time
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, text

from bssearch.errors import DatabaseError, NotFoundError, UsageError
from bssearch.records import (
    Configuration,
    Goal,
    Observation,
    Phase,
    StudyRecord,
    Target,
    TrialOutcome,
    TrialState,
)
from bssearch.storage.models import TrialRow
from bssearch.storage.repository import Store, open_store
from tests.factories import make_curve, make_environment, make_probe
from tests.storage.conftest import add_study, start

OUTCOME = TrialOutcome(
    state=TrialState.REACHED,
    reason="reached accuracy 0.9",
    steps=123,
    samples=2**40,
    train_seconds=1.25,
    evaluation_seconds=0.5,
    warmup_seconds=0.25,
    other_seconds=0.125,
    wall_seconds=2.125,
    time_to_target_s=1.2345678901234567,
    steps_to_target=118,
    last_miss_step=115,
    last_miss_seconds=1.2,
    first_hit_step=120,
    first_hit_seconds=1.25,
    final_metric=0.91,
    best_metric=0.92,
    test_metric=0.9,
    peak_memory_bytes=2**38,
    dropped_samples_per_epoch=5,
    contended=True,
    traceback="Traceback …",
)
CANCELLED = TrialOutcome(state=TrialState.CANCELLED, reason="stopped")


class TestStudies:
    def test_a_study_comes_back_as_it_was_stored(self, store: Store) -> None:
        created = add_study(store, target=Target(metric="loss", value=-0.5, goal=Goal.MINIMIZE))
        assert store.study("toy") == store.find_study("toy") == created
        assert created.environment is None
        assert created.spec == {"workload": "digits", "space": {"dropout": [0.0, None]}}
        assert created.created_at.tzinfo is UTC
        assert abs(created.created_at - datetime.now(UTC)) < timedelta(minutes=1)

    def test_a_name_is_taken_once(self, store: Store) -> None:
        add_study(store)
        with pytest.raises(UsageError, match="'toy' already"):
            add_study(store)

    def test_an_unknown_study_is_answered_with_names_like_it(self, store: Store) -> None:
        add_study(store, "digits-cpu")
        assert store.find_study("digit-cpu") is None
        with pytest.raises(NotFoundError, match="no study 'digit-cpu'") as caught:
            store.study("digit-cpu")
        assert "'digits-cpu'" in str(caught.value.hint)
        assert "bssearch studies" in str(caught.value.hint)
        with pytest.raises(NotFoundError):
            store.trials("digit-cpu")

    def test_a_spec_is_replaced(self, store: Store) -> None:
        add_study(store)
        store.update_spec("toy", {"workload": "digits", "budget": {"trials": 7}})
        assert store.study("toy").spec["budget"] == {"trials": 7}

    def test_the_summaries_count_trials_in_one_query(self, store: Store) -> None:
        add_study(store, "first")
        add_study(store, "second", target=Target(metric="loss", value=1.5, goal=Goal.MINIMIZE))
        for _ in range(3):
            start(store, "first")
        store.finish_trial("first", 1, OUTCOME, steps_x_step_time_s=None)
        store.finish_trial("first", 2, CANCELLED, steps_x_step_time_s=None)
        statements: list[str] = []

        def note(connection: Connection, cursor: object, statement: str, *rest: object) -> None:
            statements.append(statement)

        event.listen(store._engine, "before_cursor_execute", note)
        first, second = store.studies()
        assert (first.name, first.trials, first.reached, first.running) == ("first", 3, 1, 1)
        assert (second.name, second.trials, second.reached, second.running) == ("second", 0, 0, 0)
        assert (first.workload, first.target, second.target) == ("digits", "accuracy ≥ 0.9", "loss ≤ 1.5")
        assert (first.objective, first.created_by) == ("time_to_target", "someone")
        assert sum("SELECT" in one for one in statements) == 1

    def test_the_first_environment_binds_and_another_device_is_refused(self, store: Store) -> None:
        add_study(store)
        first = make_environment(host="a", torch_version="1")
        store.bind_environment("toy", first)
        store.bind_environment("toy", make_environment(host="b", torch_version="2"))
        assert store.study("toy").environment == first
        with pytest.raises(UsageError) as caught:
            store.bind_environment("toy", make_environment(device_name="Other GPU"))
        assert "Test CPU" in str(caught.value)
        assert "Other GPU" in str(caught.value)
        assert "another name" in str(caught.value.hint)
        assert store.study("toy").environment == first

    def test_names_are_remembered_but_not_those_of_a_transaction_that_failed(self, store: Store) -> None:
        add_study(store)
        environment = make_environment(host="new")
        with pytest.raises(DatabaseError):
            start(store, environment=environment, train_seconds_limit=-1.0)
        assert start(store, environment=environment) == 1
        assert start(store, environment=environment) == 2


class TestTrials:
    def test_a_trial_comes_back_as_it_was_started_and_as_it_ended(self, store: Store) -> None:
        add_study(store)
        configuration = Configuration(
            batch_size=96,
            learning_rate=0.0123456789,
            micro_batch_size=48,
            accumulation_steps=2,
            world_size=1,
            warmup_epochs=0.5,
            weight_decay=5e-4,
            dropout=0.1,
            label_smoothing=0.05,
            optimizer="adamw",
            parameters={"beta1": 0.9, "clip_norm": None, "nesterov": True, "schedule": "cosine", "n": 2**60},
        )
        first = start(store)
        number = start(
            store,
            configuration=configuration,
            sampled={"batch_size": 96, "lr": 0.5},
            phase=Phase.CONFIRM,
            evidence=True,
            seed=2**62,
            train_seconds_limit=2.5,
            eval_every_steps=7,
            threads=2,
            retry_of=first,
            lease_owner="host/1",
        )
        trial = store.trial("toy", number)
        assert (first, number) == (1, 2)
        assert (trial.number, trial.state, trial.phase, trial.evidence) == (2, TrialState.RUNNING, Phase.CONFIRM, True)
        assert trial.configuration == configuration
        assert trial.configuration.key == configuration.key
        assert trial.sampled == {"batch_size": 96, "lr": 0.5}
        assert (trial.seed, trial.train_seconds_limit, trial.eval_every_steps) == (2**62, 2.5, 7)
        assert (trial.threads, trial.retry_of, trial.lease_owner) == (2, 1, "host/1")
        assert trial.outcome is None
        assert trial.ended_at is None
        assert trial.lease_expires_at is not None
        assert trial.lease_expires_at - trial.created_at == timedelta(seconds=60)
        assert store.trial("toy", first).sampled is None

        store.finish_trial("toy", number, OUTCOME, steps_x_step_time_s=1.5)
        ended = store.trial("toy", number)
        assert ended.outcome == OUTCOME
        assert ended.ended_at is not None
        assert ended.ended_at >= trial.created_at
        assert ended == dataclasses.replace(
            trial,
            state=TrialState.REACHED,
            outcome=OUTCOME,
            ended_at=ended.ended_at,
            lease_expires_at=None,
            steps_x_step_time_s=1.5,
        )

    def test_trials_are_listed_by_number_phase_and_state(self, store: Store) -> None:
        add_study(store)
        add_study(store, "other")
        start(store, "other")
        for phase in (Phase.SEARCH, Phase.CONFIRM, Phase.SEARCH):
            start(store, phase=phase)
        store.finish_trial("toy", 3, CANCELLED, steps_x_step_time_s=None)
        assert [trial.number for trial in store.trials("toy")] == [1, 2, 3]
        assert [trial.number for trial in store.trials("toy", phase=Phase.SEARCH)] == [1, 3]
        assert [trial.number for trial in store.trials("toy", states=[TrialState.RUNNING])] == [1, 2]
        assert store.trials("toy", phase=Phase.CONFIRM, states={TrialState.CANCELLED}) == []

    def test_an_unknown_trial_is_answered_with_the_numbers_there_are(self, store: Store) -> None:
        add_study(store)
        with pytest.raises(NotFoundError, match="none yet"):
            store.trial("toy", 1)
        start(store)
        start(store)
        for call in (store.trial, store.observations):
            with pytest.raises(NotFoundError, match=r"no trial 9: its trials are 1 to 2"):
                call("toy", 9)

    def test_only_a_running_trial_can_be_finished(self, store: Store) -> None:
        add_study(store)
        number = start(store)
        store.finish_trial("toy", number, OUTCOME, steps_x_step_time_s=None)
        with pytest.raises(DatabaseError, match=r"trial 1 of 'toy' cannot end as cancelled.* reached"):
            store.finish_trial("toy", number, CANCELLED, steps_x_step_time_s=None)
        assert store.trial("toy", number).outcome == OUTCOME
        with pytest.raises(NotFoundError):
            store.finish_trial("toy", 5, CANCELLED, steps_x_step_time_s=None)
        with pytest.raises(ValueError, match="running"):
            store.finish_trial(
                "toy", start(store), TrialOutcome(state=TrialState.RUNNING, reason=""), steps_x_step_time_s=None
            )

    def test_only_a_trial_that_reached_the_target_has_a_time_to_it(self, store: Store) -> None:
        add_study(store)
        number = start(store)
        wrong = TrialOutcome(state=TrialState.CAPPED, reason="", time_to_target_s=1.0)
        with pytest.raises(DatabaseError, match="time_to_target_s_when_reached"):
            store.finish_trial("toy", number, wrong, steps_x_step_time_s=None)
        assert store.trial("toy", number).state is TrialState.RUNNING

    def test_a_retry_is_of_a_trial_that_is_there(self, store: Store) -> None:
        add_study(store)
        with pytest.raises(DatabaseError):
            start(store, retry_of=7)
        assert store.trials("toy") == []

    def test_what_is_not_a_number_is_refused(self, store: Store) -> None:
        add_study(store)
        number = start(store)
        nan = dataclasses.replace(CANCELLED, final_metric=float("nan"))
        with pytest.raises(DatabaseError, match="not a finite number"):
            store.finish_trial("toy", number, nan, steps_x_step_time_s=None)
        with pytest.raises(DatabaseError, match="not a finite number"):
            start(store, sampled={"lr": float("inf")})
        assert len(store.trials("toy")) == 1

    def test_four_thousand_trials_are_read_in_seconds(self, store: Store) -> None:
        add_study(store)
        start(store, sampled={"lr": 0.1})
        store.finish_trial("toy", 1, OUTCOME, steps_x_step_time_s=1.0)
        names = [column.name for column in TrialRow.__table__.columns if column.name != "id"]
        with store._writing() as connection:
            values = ", ".join("n.i" if name == "number" else name for name in names)
            connection.execute(
                text(
                    "WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < 4000) "
                    f"INSERT INTO bss_trial ({', '.join(names)}) SELECT {values} FROM bss_trial, n WHERE number = 1"
                )
            )
        began = time.perf_counter()
        trials = store.trials("toy")
        assert time.perf_counter() - began < 3
        assert len(trials) == 4000
        assert trials[-1].outcome == OUTCOME


class TestObservations:
    def test_observations_come_back_by_trial_and_step(self, store: Store) -> None:
        add_study(store)
        for _ in range(3):
            start(store)
        first, second = make_curve((0.0, 0.1), (1.0, 0.5), (2.0, 0.9)), make_curve((0.0, 0.2))
        lossy = [dataclasses.replace(one, loss=0.1 * index) for index, one in enumerate(first)]
        store.append_observations("toy", [(1, lossy[1]), (2, second[0]), (1, lossy[0])])
        store.append_observations("toy", [(1, lossy[2])])
        store.append_observations("toy", [])
        assert store.observations("toy", 1) == lossy
        assert store.curves("toy", [1, 2, 3]) == {1: lossy, 2: second, 3: []}
        assert store.curves("toy", []) == {}
        assert store.observation_count("toy") == 4

    def test_a_step_twice_is_an_error_and_stores_nothing_of_the_batch(self, store: Store) -> None:
        add_study(store)
        start(store)
        start(store)
        one, two = make_curve((0.0, 0.1), (1.0, 0.5))
        store.append_observations("toy", [(1, one)])
        other = dataclasses.replace(one, metric=0.7)
        with pytest.raises(DatabaseError, match="trial 1 of 'toy' already has an observation at step 0"):
            store.append_observations("toy", [(2, one), (1, two), (1, other)])
        with pytest.raises(DatabaseError, match="trial 2 of 'toy' already has an observation at step 10"):
            store.append_observations("toy", [(2, two), (2, two)])
        assert store.curves("toy", [1, 2]) == {1: [one], 2: []}

    def test_a_value_out_of_bounds_is_named(self, store: Store) -> None:
        add_study(store)
        start(store)
        wrong = Observation(step=-1, samples=0, train_seconds=0.0, metric=0.0, loss=None, learning_rate=0.1)
        with pytest.raises(DatabaseError, match="step_not_negative"):
            store.append_observations("toy", [(1, wrong)])

    def test_observations_of_an_unknown_trial_are_refused(self, store: Store) -> None:
        add_study(store)
        with pytest.raises(NotFoundError):
            store.append_observations("toy", [(1, one) for one in make_curve((0.0, 0.1))])


class TestLeases:
    def test_a_trial_is_lost_when_its_lease_is_over_or_its_owner_dead(self, store: Store) -> None:
        add_study(store)
        start(store, lease_owner="alive")
        start(store, lease_owner="dead")
        start(store, lease_owner="late", lease_seconds=-5.0)
        start(store, lease_owner="dead")
        store.finish_trial("toy", 4, OUTCOME, steps_x_step_time_s=None)
        assert store.mark_lost("toy", is_alive={"dead": False}.get) == [2, 3]
        one, dead, late, ended = store.trials("toy")
        assert [one.state, dead.state, late.state, ended.state] == ["running", "lost", "lost", "reached"]
        assert dead.outcome == TrialOutcome(state=TrialState.LOST, reason="its driver dead is gone")
        assert late.outcome is not None
        assert late.outcome.reason.startswith("its lease ended at ")
        assert late.ended_at is not None
        assert store.mark_lost("toy", is_alive=lambda owner: True) == []

    def test_a_heartbeat_keeps_the_leases_of_its_owner_alone(self, store: Store) -> None:
        add_study(store)
        start(store, lease_owner="a", lease_seconds=-5.0)
        start(store, lease_owner="b", lease_seconds=-5.0)
        start(store, lease_owner="a", lease_seconds=-5.0)
        store.finish_trial("toy", 3, OUTCOME, steps_x_step_time_s=None)
        store.heartbeat("toy", "a", 60.0)
        assert store.trial("toy", 3).lease_expires_at is None
        assert store.mark_lost("toy", is_alive=lambda owner: True) == []
        assert store.mark_lost("toy", is_alive=lambda owner: None) == [2]

    def test_a_lost_trial_cannot_be_finished_by_its_driver(self, store: Store) -> None:
        add_study(store)
        start(store)
        store.mark_lost("toy", is_alive=lambda owner: False)
        with pytest.raises(DatabaseError, match="is not running but lost"):
            store.finish_trial("toy", 1, OUTCOME, steps_x_step_time_s=None)


class TestProbes:
    def test_the_last_probe_of_a_batch_size_counts(self, store: Store) -> None:
        add_study(store)
        add_study(store, "other")
        environment = make_environment()
        small = make_probe(8, peak_memory_bytes=2**36)
        huge = make_probe(4096, step_seconds=None, evaluation_seconds=None, eval_every_steps=None, out_of_memory=True)
        for probe in (make_probe(8, step_seconds=9.0), huge, small):
            store.save_probe("toy", environment, probe)
        assert store.probes("toy") == {8: small, 4096: huge}
        assert store.probes("other") == {}
        later = make_probe(8, step_seconds=3.0)
        store.save_probe("toy", make_environment(driver_version="2"), later)
        assert store.probes("toy")[8] == later


def _start_many(url: str, count: int, numbers: multiprocessing.Queue[list[int]]) -> None:
    with open_store(url) as store:
        if store.find_study("toy") is None:
            with suppress(UsageError):
                add_study(store)
        found = []
        for _ in range(count):
            number = start(store)
            store.append_observations("toy", [(number, one) for one in make_curve((0.0, 0.1), (1.0, 0.5))])
            store.finish_trial("toy", number, OUTCOME, steps_x_step_time_s=None)
            found.append(number)
    numbers.put(found)


def test_four_processes_that_open_a_new_database_at_once_get_numbers_of_their_own(url: str) -> None:
    context = multiprocessing.get_context("spawn")
    numbers: multiprocessing.Queue[list[int]] = context.Queue()
    processes = [context.Process(target=_start_many, args=(url, 15, numbers)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [number for _ in processes for number in numbers.get(timeout=60)]
    for process in processes:
        process.join()
    numbers.close()
    numbers.join_thread()
    assert sorted(found) == list(range(1, 61))
    with open_store(url, write=False) as store:
        assert [trial.number for trial in store.trials("toy")] == list(range(1, 61))
        assert store.observation_count("toy") == 120


def test_a_store_opened_for_reading_writes_nothing(url: str) -> None:
    with open_store(url) as store:
        add_study(store)
    with open_store(url, write=False) as store:
        assert isinstance(store.study("toy"), StudyRecord)
        with pytest.raises(DatabaseError, match="opened for reading"):
            add_study(store, "other")


def test_a_reader_sees_what_a_writer_commits(url: str) -> None:
    with open_store(url) as writer, open_store(url, write=False) as reader:
        add_study(writer)
        start(writer)
        assert len(reader.trials("toy")) == 1
        start(writer)
        assert len(reader.trials("toy")) == 2


def test_the_url_comes_from_the_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSSEARCH_DB_URL", f"sqlite:///{path}")
    with open_store() as store:
        add_study(store)
    assert path.exists()


def test_deleting_a_study_deletes_what_belongs_to_it(store: Store) -> None:
    add_study(store)
    start(store)
    start(store, retry_of=1)
    store.append_observations("toy", [(1, one) for one in make_curve((0.0, 0.1))])
    store.save_probe("toy", make_environment(), make_probe(8))
    with store._writing() as connection:
        connection.execute(text("DELETE FROM bss_study"))
        for table in ("bss_trial", "bss_observation", "bss_probe"):
            assert connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one() == 0
        assert connection.execute(text("SELECT count(*) FROM bss_environment")).scalar_one() == 1


def test_times_are_stored_as_utc_text_that_sorts(store: Store, path: Path) -> None:
    add_study(store)
    number = start(store)
    store.finish_trial("toy", number, OUTCOME, steps_x_step_time_s=None)
    query = "SELECT t.created_at, t.ended_at, s.spec FROM bss_trial t JOIN bss_study s ON s.id = t.study_id"
    with closing(sqlite3.connect(path)) as connection:
        created, ended, spec = connection.execute(query).fetchone()
    assert abs(datetime.fromisoformat(created + "+00:00") - datetime.now(UTC)) < timedelta(minutes=1)
    assert len(created) == len(ended) == len("2026-01-01 00:00:00.000000")
    assert json.loads(spec)["workload"] == "digits"
