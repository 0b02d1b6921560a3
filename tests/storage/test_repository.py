"""The store's contract on every database: studies, trials, rows and fields."""

import dataclasses
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection, Update, event, text, update

from bssearch import BSSearchError, DatabaseError, NotFoundError, Store, UsageError, open_store
from bssearch.commands.across.databases import open_databases
from bssearch.records import (
    Configuration,
    Environment,
    Goal,
    Lease,
    Phase,
    StudyRecord,
    Target,
    TrialOutcome,
    TrialRecord,
    TrialState,
)
from bssearch.records.text import LONGEST_TEXT
from bssearch.storage.models import (
    MOST_SENTENCES,
    PREFIXES,
    STUDY_ROWS,
    TRIAL_ROWS,
    column_types,
    from_columns,
    to_columns,
)
from bssearch.storage.trials import start_trial
from tests.factories import make_curve, make_environment, make_plan, make_probe, make_trial, not_none
from tests.schema import execute
from tests.storage.conftest import (
    CANCELLED,
    OUTCOME,
    add_study,
    begun,
    enqueue,
    start,
    start_after,
    start_queued,
    store_in,
)

# Studies --------------------------------------------------------------------------------------------------------------


def test_a_stored_study_is_read_unchanged(store: Store) -> None:
    created = add_study(store, target=Target(metric="loss", value=-0.5, goal=Goal.MINIMIZE))
    assert store.studies.get("toy") == store.studies.find("toy") == created
    assert created.environment is None
    assert created.spec == {"workload": "digits", "space": {"dropout": [0.0, None]}}
    assert created.created_at.tzinfo is UTC
    assert abs(created.created_at - datetime.now(UTC)) < timedelta(minutes=1)


@pytest.mark.usefixtures("toy")
def test_a_name_is_taken_once(store: Store) -> None:
    with pytest.raises(UsageError, match="'toy' already"):
        add_study(store)


def test_an_unknown_study_is_answered_with_names_like_it(store: Store) -> None:
    add_study(store, "digits-cpu")
    assert store.studies.find("digit-cpu") is None
    with pytest.raises(NotFoundError, match="no study 'digit-cpu'") as caught:
        store.studies.get("digit-cpu")
    assert "'digits-cpu'" in str(caught.value.hint)
    with pytest.raises(NotFoundError):
        store.trials.of("digit-cpu")


def test_the_summaries_count_trials_in_one_query(store: Store) -> None:
    add_study(store, "first")
    add_study(store, "second", target=Target(metric="loss", value=1.5, goal=Goal.MINIMIZE))
    for _ in range(3):
        start(store, "first")
    store.trials.finish("first", 1, OUTCOME, steps_x_step_time_s=None)
    store.trials.finish("first", 2, CANCELLED, steps_x_step_time_s=None)
    statements: list[str] = []

    def note(connection: Connection, cursor: object, statement: str, *rest: object) -> None:
        statements.append(statement)

    event.listen(store._engine, "before_cursor_execute", note)
    first, second = store.studies.summaries()
    assert (first.name, first.trials, first.reached, first.running) == ("first", 3, 1, 1)
    assert (second.name, second.trials, second.reached, second.running) == ("second", 0, 0, 0)
    assert (first.workload, first.target.in_words, second.target.in_words) == (
        "digits",
        "accuracy ≥ 0.9",
        "loss ≤ 1.5",
    )
    assert (first.objective, first.created_by) == ("time_to_target", "someone")
    assert sum("SELECT" in one for one in statements) == 1


@pytest.mark.usefixtures("toy")
def test_the_first_environment_binds_and_another_device_is_refused(store: Store) -> None:
    first = make_environment(host="a", torch_version="1")
    store.studies.bind("toy", first)
    store.studies.bind("toy", make_environment(host="b", torch_version="2"))
    assert store.studies.get("toy").environment == first
    with pytest.raises(UsageError, match="Test CPU") as caught:
        store.studies.bind("toy", make_environment(device_name="Other GPU"))
    assert "Other GPU" in str(caught.value)
    assert store.studies.get("toy").environment == first


@pytest.mark.usefixtures("toy")
def test_names_are_remembered_but_not_those_of_a_transaction_that_failed(store: Store) -> None:
    environment = make_environment(host="new")
    with pytest.raises(DatabaseError):
        start(store, environment=environment, train_seconds_limit=-1.0)
    assert start(store, environment=environment) == 1
    assert start(store, environment=environment) == 2


# Trials ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("toy")
def test_a_stored_trial_is_read_unchanged_at_start_and_end(store: Store) -> None:
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
        uncapped=True,
        seed=2**62,
        train_seconds_limit=2.5,
        eval_every_steps=7,
        threads=2,
        retry_of=first,
        lease_owner="host/1",
    )
    trial = store.trials.get("toy", number)
    assert (first, number) == (1, 2)
    assert (trial.number, trial.state, trial.phase, trial.uncapped) == (2, TrialState.RUNNING, Phase.CONFIRM, True)
    assert (trial.configuration, trial.configuration.key) == (configuration, configuration.key)
    assert trial.sampled == {"batch_size": 96, "lr": 0.5}
    assert (trial.seed, trial.train_seconds_limit, trial.eval_every_steps) == (2**62, 2.5, 7)
    assert (trial.threads, trial.retry_of, trial.lease_owner) == (2, 1, "host/1")
    assert (trial.outcome, trial.ended_at) == (None, None)
    assert not_none(trial.lease_expires_at) - trial.created_at == timedelta(seconds=60)
    assert store.trials.get("toy", first).sampled is None

    store.trials.finish("toy", number, OUTCOME, steps_x_step_time_s=1.5)
    ended = store.trials.get("toy", number)
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


@pytest.mark.usefixtures("toy")
def test_trials_are_listed_by_number_phase_and_state(store: Store) -> None:
    add_study(store, "other")
    start(store, "other")
    for phase in (Phase.SEARCH, Phase.CONFIRM, Phase.SEARCH):
        start(store, phase=phase)
    store.trials.finish("toy", 3, CANCELLED, steps_x_step_time_s=None)
    assert [trial.number for trial in store.trials.of("toy")] == [1, 2, 3]
    assert [trial.number for trial in store.trials.of("toy", phase=Phase.SEARCH)] == [1, 3]
    assert [trial.number for trial in store.trials.of("toy", states=[TrialState.RUNNING])] == [1, 2]
    assert store.trials.of("toy", phase=Phase.CONFIRM, states={TrialState.CANCELLED}) == []


@pytest.mark.usefixtures("toy")
def test_the_counts_and_the_fast_trials_are_those_of_all_trials(store: Store) -> None:
    for seconds, contended, phase in (
        *((3.0, False, Phase.SEARCH), (2.0, False, Phase.SEARCH), (2.0, False, Phase.SEARCH)),
        *((9.0, True, Phase.SEARCH), (1.0, False, Phase.CONFIRM), (None, False, Phase.SEARCH)),
    ):
        outcome = dataclasses.replace(OUTCOME, time_to_target_s=seconds, contended=contended, train_seconds=2.5)
        store.trials.finish("toy", start(store, phase=phase), outcome, steps_x_step_time_s=None)
    start(store)
    assert [trial.number for trial in store.trials.fast("toy")] == [5, 4]
    assert [trial.number for trial in store.trials.fast("toy", Phase.SEARCH)] == [2, 4]
    assert store.trials.counts("toy") == [
        (Phase.SEARCH, TrialState.REACHED, 5, 12.5),
        (Phase.CONFIRM, TrialState.REACHED, 1, 2.5),
        (Phase.SEARCH, TrialState.RUNNING, 1, 0.0),
    ]


@pytest.mark.usefixtures("toy")
def test_an_unknown_trial_is_refused_with_the_known_numbers(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no trials yet"):
        store.trials.get("toy", 1)
    start(store)
    start(store)
    for call in (store.trials.get, store.trials.observations):
        with pytest.raises(NotFoundError, match=r"no trial 9: the trials are 1 to 2"):
            call("toy", 9)


@pytest.mark.usefixtures("toy")
def test_only_a_running_trial_can_be_finished(store: Store) -> None:
    number = start(store)
    store.trials.finish("toy", number, OUTCOME, steps_x_step_time_s=None)
    with pytest.raises(DatabaseError, match=r"trial 1 of 'toy' cannot end as cancelled.* reached"):
        store.trials.finish("toy", number, CANCELLED, steps_x_step_time_s=None)
    assert store.trials.get("toy", number).outcome == OUTCOME
    with pytest.raises(NotFoundError):
        store.trials.finish("toy", 5, CANCELLED, steps_x_step_time_s=None)
    with pytest.raises(ValueError, match="running"):
        store.trials.finish(
            "toy", start(store), TrialOutcome(state=TrialState.RUNNING, reason=""), steps_x_step_time_s=None
        )


@pytest.mark.usefixtures("toy")
def test_only_a_trial_that_reached_the_target_has_a_time_to_it(store: Store) -> None:
    number = start(store)
    wrong = TrialOutcome(state=TrialState.CAPPED, reason="", time_to_target_s=1.0)
    with pytest.raises(DatabaseError, match="time_to_target_s_when_reached"):
        store.trials.finish("toy", number, wrong, steps_x_step_time_s=None)
    assert store.trials.get("toy", number).state is TrialState.RUNNING


@pytest.mark.usefixtures("toy")
def test_a_retry_is_of_a_trial_that_is_there(store: Store) -> None:
    with pytest.raises(DatabaseError):
        start(store, retry_of=7)
    assert store.trials.of("toy") == []


@pytest.mark.usefixtures("toy")
def test_a_value_that_is_not_a_number_is_refused(store: Store) -> None:
    number = start(store)
    nan = dataclasses.replace(CANCELLED, final_metric=float("nan"))
    with pytest.raises(DatabaseError, match="not a finite number"):
        store.trials.finish("toy", number, nan, steps_x_step_time_s=None)
    with pytest.raises(DatabaseError, match="not finite"):
        start(store, sampled={"lr": float("inf")})
    assert len(store.trials.of("toy")) == 1


@pytest.mark.usefixtures("toy")
def test_a_study_is_at_rest_since_its_last_trial_began_or_ended(store: Store) -> None:
    long_ago = {"study": 5, "began": 3, "ended": 1}
    moments = {name: store.time() - timedelta(hours=hours) for name, hours in long_ago.items()}

    def hours_at_rest(statement: Update) -> int:
        with store.writing() as connection:
            connection.execute(statement)
        return int(store.trials.seconds_at_rest("toy") / 3600)

    assert hours_at_rest(update(STUDY_ROWS).values(created_at=moments["study"])) == 5
    start(store)
    assert hours_at_rest(update(TRIAL_ROWS).values(created_at=moments["began"])) == 3
    store.trials.finish("toy", 1, OUTCOME, steps_x_step_time_s=None)
    assert hours_at_rest(update(TRIAL_ROWS).values(ended_at=moments["ended"])) == 1


@pytest.mark.usefixtures("toy")
def test_a_trial_starts_only_if_the_caller_has_seen_the_newest_one(store: Store) -> None:
    add_study(store, "other")
    start(store, "other")
    assert start_after(store, 0, "a") == 1
    assert start_after(store, 0, "b") is None
    assert start_after(store, 1, "b") == 2
    enqueue(store)
    assert start_after(store, 2, "a") is None
    assert start_after(store, 3, "a") == 4
    assert [trial.lease_owner for trial in store.trials.of("toy")] == ["a", "b", None, "a"]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("after", [None, 0])
def test_a_start_that_is_tried_again_finds_the_trial_of_the_first_try(store: Store, after: int | None) -> None:
    def numbers(plan_id: str) -> list[int | None]:
        plan, lease, environment = make_plan(after=after), Lease(owner="a", seconds=9), make_environment()
        tries = [start_trial(store, "toy", plan, plan_id, lease=lease, environment=environment) for _ in range(2)]
        return [None if trial is None else trial.number for trial in tries]

    assert numbers("one") == [1, 1]
    assert numbers("another") == ([2, 2] if after is None else [None, None])
    store.trials.finish("toy", 1, CANCELLED, steps_x_step_time_s=None)
    assert numbers("one") == [None, None]
    assert len(store.trials.of("toy")) == (2 if after is None else 1)


@pytest.mark.usefixtures("toy")
def test_an_end_with_characters_that_no_database_stores_may_be_repeated(store: Store) -> None:
    start(store)
    outcome = dataclasses.replace(OUTCOME, traceback="a\0b\ud800" * 10_000, warnings=("two\nlines", " ", "\0"))
    for _ in range(2):
        assert store.trials.finish("toy", 1, outcome, steps_x_step_time_s=1.5).outcome == outcome


@pytest.mark.usefixtures("toy")
def test_an_end_may_be_repeated_but_not_changed(store: Store) -> None:
    start(store)
    for _ in range(2):
        store.trials.finish("toy", 1, OUTCOME, steps_x_step_time_s=1.5)
    with pytest.raises(DatabaseError, match="not running but reached"):
        store.trials.finish("toy", 1, dataclasses.replace(OUTCOME, steps=124), steps_x_step_time_s=1.5)


@pytest.mark.usefixtures("toy")
def test_a_queued_trial_starts_once(store: Store) -> None:
    number = enqueue(store)
    queued = store.trials.get("toy", number)
    assert (queued.state, queued.phase, queued.uncapped) == (TrialState.QUEUED, Phase.SEARCH, True)
    assert (queued.lease_owner, queued.lease_expires_at, queued.outcome) == (None, None, None)
    assert (queued.sampled, queued.seed, queued.train_seconds_limit, queued.threads) == ({"lr": 0.1}, 7, 5.0, 2)
    assert store.leases.mark_lost("toy", is_alive=lambda owner: False) == []

    assert start_queued(store, number, "a", train_seconds_limit=3.0, eval_every_steps=4, threads=1)
    running = store.trials.get("toy", number)
    assert (running.state, running.lease_owner) == (TrialState.RUNNING, "a")
    assert (running.train_seconds_limit, running.eval_every_steps, running.threads) == (3.0, 4, 1)
    assert running.configuration == queued.configuration
    assert not start_queued(store, number, "b")
    store.trials.finish("toy", number, OUTCOME, steps_x_step_time_s=None)
    assert not start_queued(store, number, "a")


@pytest.mark.usefixtures("toy")
def test_brief_rows_hold_what_the_records_hold(store: Store) -> None:
    grows = {"batch_schedule": "milestones", "batch_stages": "512:64", "batch_rate_rule": "sqrt"}
    growing = Configuration(batch_size=16, micro_batch_size=16, learning_rate=0.1, parameters=grows)
    start(store)
    store.trials.finish("toy", 1, OUTCOME, steps_x_step_time_s=None)
    start(store, configuration=growing)
    enqueue(store)
    unknown = Configuration(batch_size=16, micro_batch_size=16, learning_rate=1.0, parameters={"learning_rate": None})
    start(store, configuration=unknown)
    names = ("number", "state", "train_seconds", "steps_to_target", "reason", "learning_rate")
    rows = [[row[name] for name in (*names, "batch_size")] for row in store.trials.brief("toy", names)]
    assert rows == [
        [1, TrialState.REACHED, 1.25, 118, "reached accuracy 0.9", 0.1, 32],
        [2, TrialState.RUNNING, None, None, None, 0.1, "16 → 64"],
        [3, TrialState.QUEUED, None, None, None, 0.1, 32],
        [4, TrialState.RUNNING, None, None, None, None, 16],
    ]
    assert [row["number"] for row in store.trials.brief("toy", names, state=TrialState.QUEUED)] == [3]
    assert [row["number"] for row in store.trials.brief("toy", names, batch_size=16, phase=Phase.SEARCH)] == [2, 4]


@pytest.mark.usefixtures("toy")
def test_tokens_are_kept_and_never_negative(store: Store) -> None:
    start(store)
    with pytest.raises(DatabaseError, match="tokens_not_negative"):
        store.trials.finish("toy", 1, dataclasses.replace(OUTCOME, tokens=-1), steps_x_step_time_s=None)
    store.trials.finish("toy", 1, dataclasses.replace(OUTCOME, tokens=2**40), steps_x_step_time_s=None)
    assert not_none(store.trials.get("toy", 1).outcome).tokens == 2**40


@pytest.mark.usefixtures("toy")
def test_a_log_is_kept_whatever_the_worker_wrote(store: Store) -> None:
    start(store)
    assert store.trials.log("toy", 1) is None
    store.trials.save_log("toy", 1, "first")
    store.trials.save_log("toy", 1, "NUL \0, a lone surrogate \udcff, and é\n")
    assert store.trials.log("toy", 1) == "NUL \N{REPLACEMENT CHARACTER}, a lone surrogate ?, and é\n"
    calls: list[Callable[[], object]] = [
        lambda: store.trials.log("toy", 2),
        lambda: store.trials.save_log("toy", 2, ""),
    ]
    for call in calls:
        with pytest.raises(NotFoundError, match="no trial 2"):
            call()


# Stores ---------------------------------------------------------------------------------------------------------------


def test_a_store_opened_for_reading_refuses_writes(url: str) -> None:
    store_in(url)
    with open_store(url, write=False) as store:
        assert isinstance(store.studies.get("toy"), StudyRecord)
        with pytest.raises(DatabaseError, match="opened read-only"):
            add_study(store, "other")


def test_a_connection_in_use_closes_when_it_is_returned_to_a_closed_store(url: str) -> None:
    store = open_store(url)
    with store.reading() as connection:
        in_use = connection.connection.driver_connection
        store.close()
        assert connection.execute(text("SELECT 1")).scalar_one() == 1
    with pytest.raises(Exception, match="closed"):
        not_none(in_use).execute("SELECT 1")


def test_a_reader_sees_what_a_writer_commits(url: str) -> None:
    with open_store(url) as writer, open_store(url, write=False) as reader:
        begun(writer)
        assert len(reader.trials.of("toy")) == 1
        start(writer)
        assert len(reader.trials.of("toy")) == 2


def test_the_url_comes_from_the_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSSEARCH_DB_URL", f"sqlite:///{path}")
    store_in()
    assert path.exists()


def test_times_are_stored_as_utc_text_that_sorts(sqlite_url: str, path: Path) -> None:
    with open_store(sqlite_url) as store:
        store.trials.finish("toy", begun(store), OUTCOME, steps_x_step_time_s=None)
    query = "SELECT t.created_at, t.ended_at, s.spec FROM bss_trial t JOIN bss_study s ON s.id = t.study_id"
    [(created, ended, spec)] = execute(path, query)
    assert abs(datetime.fromisoformat(created + "+00:00") - datetime.now(UTC)) < timedelta(minutes=1)
    assert len(created) == len(ended) == len("2026-01-01 00:00:00.000000")
    assert json.loads(spec)["workload"] == "digits"


# Renaming, archiving and deleting -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("toy")
def test_a_study_is_renamed_with_all_it_has(store: Store) -> None:
    store.trials.finish("toy", start(store), OUTCOME, steps_x_step_time_s=None)
    store.studies.rename("toy", "new.name-1")
    assert store.studies.find("toy") is None
    assert store.studies.get("new.name-1").spec["name"] == "new.name-1"
    assert [trial.number for trial in store.trials.of("new.name-1")] == [1]
    store.studies.rename("new.name-1", "new.name-1")
    assert add_study(store).name == "toy"


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 101, "a/b"])
def test_a_name_must_be_one_that_a_spec_could_have(store: Store, name: str) -> None:
    with pytest.raises(UsageError, match="invalid study name"):
        store.studies.rename("toy", name)


@pytest.mark.usefixtures("toy")
def test_a_taken_name_and_an_unknown_study_are_refused(store: Store) -> None:
    add_study(store, "other")
    with pytest.raises(UsageError, match="study 'other' already exists"):
        store.studies.rename("toy", "other")
    calls: list[Callable[[], object]] = [
        lambda: store.studies.rename("nix", "new"),
        lambda: store.studies.delete("nix"),
    ]
    for call in calls:
        with pytest.raises(NotFoundError):
            call()


@pytest.mark.usefixtures("toy")
def test_a_study_that_a_driver_runs_is_neither_renamed_nor_archived_nor_deleted(store: Store) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.studies.rename("toy", "new"),
        lambda: store.studies.archive("toy"),
        lambda: store.studies.delete("toy"),
    ]
    store.leases.claim("toy", "time steps", owner="node-1/4711", lease_seconds=60.0, is_alive=lambda owner: None)
    for call in calls:
        with pytest.raises(UsageError, match=r"node-1/4711 holds the claim .time steps"):
            call()
    start(store, lease_owner="node-1/4711")
    for call in calls:
        with pytest.raises(UsageError, match=r"node-1/4711 runs trial 1"):
            call()
    store.leases.heartbeat("toy", "node-1/4711", -5.0)
    store.studies.rename("toy", "new")
    store.studies.delete("new")
    assert store.studies.summaries() == []


@pytest.mark.usefixtures("toy")
def test_an_archived_study_keeps_its_moment_and_comes_back(store: Store) -> None:
    assert store.studies.summaries()[0].archived_at is None
    store.studies.archive("toy")
    archived_at = not_none(store.studies.get("toy").archived_at)
    assert abs(archived_at - datetime.now(UTC)) < timedelta(minutes=1)
    store.studies.archive("toy")
    assert store.studies.summaries()[0].archived_at == archived_at
    store.studies.archive("toy", archived=False)
    assert store.studies.get("toy").archived_at is None


def test_deleting_a_study_deletes_only_its_own_rows(store: Store) -> None:
    for name in ("toy", "other"):
        add_study(store, name)
        store.trials.finish(name, start(store, name), CANCELLED, steps_x_step_time_s=None)
        store.trials.finish(name, start(store, name, retry_of=1), CANCELLED, steps_x_step_time_s=None)
        store.trials.append_observations(name, [(1, one) for one in make_curve((0.0, 0.1))])
        store.trials.save_log(name, 1, "text")
        store.probes.add_step_time(name, make_environment(), make_probe(8))
        assert store.leases.claim(name, "probe", owner="a", lease_seconds=-5.0, is_alive=lambda owner: None)
    store.studies.delete("toy")
    assert [study.name for study in store.studies.summaries()] == ["other"]
    with store.reading() as connection:
        for table, rows in {"trial": 2, "observation": 1, "log": 1, "probe": 1, "claim": 1}.items():
            assert connection.execute(text(f"SELECT count(*) FROM bss_{table}")).scalar_one() == rows, table


def test_a_deleted_study_is_not_taken_for_the_next_of_its_name(store: Store, url: str) -> None:
    with open_store(url) as other:
        begun(store, lease_seconds=-5.0)
        other.studies.delete("toy")
        with pytest.raises(NotFoundError):
            start(store)
        add_study(other)
        assert start(store) == 1


@pytest.mark.usefixtures("toy")
def test_an_archived_study_takes_no_more_trials(store: Store) -> None:
    store.studies.archive("toy")
    calls: list[Callable[[], object]] = [lambda: start(store), lambda: enqueue(store)]
    for call in calls:
        with pytest.raises(UsageError, match="'toy' is archived and accepts no new trials"):
            call()
    store.studies.archive("toy", archived=False)
    assert start(store) == 1


# Records in columns ---------------------------------------------------------------------------------------------------


def test_a_finished_trial_comes_back_from_its_columns() -> None:
    trial = make_trial(3, sampled={"lr": 0.5, "momentum": None}, peak_memory_bytes=2**40, traceback="…")
    columns = to_columns(trial)
    assert set(columns) == set(column_types(TrialRecord))
    assert from_columns(TrialRecord, columns) == trial


def test_an_inner_record_can_be_absent() -> None:
    trial = make_trial(3, state=TrialState.RUNNING)
    columns = to_columns(trial)
    assert columns["state"] is TrialState.RUNNING
    assert "reason" not in columns
    assert from_columns(TrialRecord, columns, absent="outcome") == trial


def test_no_two_fields_of_a_trial_share_a_column_but_the_state() -> None:
    names = [field.name for field in dataclasses.fields(TrialRecord) if field.name not in {"configuration", "outcome"}]
    inner = [name for nested in PREFIXES if nested is TrialOutcome for name in column_types(nested)]
    assert set(names) & set(inner) == {"state"}


def test_an_environment_of_a_joined_row_has_its_prefix() -> None:
    environment = make_environment()
    columns = {f"environment_{name}": value for name, value in to_columns(environment).items()}
    assert from_columns(Environment, columns, prefix="environment_") == environment


# Integrity ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two studies, each with an ended and a running trial."""
    path = tmp_path / "study.db"
    with open_store(f"sqlite:///{path}") as store:
        for name in ("toy", "other"):
            add_study(store, name)
            for _ in range(2):
                start(store, name)
            store.trials.append_observations(name, [(1, one) for one in make_curve((0.0, 0.1), (1.5, 0.4))])
            store.trials.finish(name, 1, OUTCOME, steps_x_step_time_s=None)
    return path


TOY = "study_id = (SELECT id FROM bss_study WHERE name = 'toy')"


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (f"UPDATE bss_trial SET state = 'finished' WHERE {TOY}", "trial 1: state = 'finished'"),
        (f"UPDATE bss_trial SET steps = 'many' WHERE {TOY} AND number = 2", "trial 2: steps = 'many'"),
        (f"UPDATE bss_trial SET final_metric = 9e999 WHERE {TOY} AND number = 1", "trial 1: final_metric = inf"),
        (f"UPDATE bss_trial SET created_at = 'then' WHERE {TOY} AND number = 1", "trial 1: created_at = 'then'"),
        (f"UPDATE bss_trial SET parameters = '[1]' WHERE {TOY} AND number = 1", "trial 1: parameters = '[1]'"),
        (f"UPDATE bss_trial SET parameters = '{{' WHERE {TOY} AND number = 1", "trial 1: parameters = '{'"),
        (f"UPDATE bss_trial SET parameters = '{{\"x\":1e999}}' WHERE {TOY} AND number = 1", "trial 1: parameters = "),
        (
            f'UPDATE bss_trial SET parameters = \'{{"x":"\\ud800"}}\' WHERE {TOY} AND number = 1',
            "trial 1: parameters = ",
        ),
        (
            f"UPDATE bss_trial SET parameters = '{{\"x\":{'9' * 5000}}}' WHERE {TOY} AND number = 1",
            "trial 1: parameters = ",
        ),
        (f"UPDATE bss_trial SET learning_rate = 5e-324 WHERE {TOY} AND number = 1", "trial 1: learning_rate = 5e-324"),
        (
            f"UPDATE bss_trial SET created_at = '0001-01-01 00:00:00' WHERE {TOY} AND number = 1",
            "trial 1: created_at = ",
        ),
        (f"UPDATE bss_trial SET uncapped = 7 WHERE {TOY} AND number = 1", "trial 1: uncapped = 7"),
        (f"UPDATE bss_trial SET optimizer = x'00' WHERE {TOY} AND number = 1", "trial 1: optimizer = b'\\x00'"),
        (
            f"UPDATE bss_trial SET batch_size = -1 WHERE {TOY} AND number = 1",
            "trial 1: the row breaks the rule batch_size > 0",
        ),
        ("UPDATE bss_study SET target_goal = 'up' WHERE name = 'toy'", "study 'toy': target_goal = 'up'"),
        (
            "UPDATE bss_observation SET metric = 'good' WHERE trial_id = (SELECT min(id) FROM bss_trial)",
            "observation (trial 1, step 0): metric = 'good'",
        ),
        ("UPDATE bss_environment SET host = x'07'", "environment (digest '"),
        (
            f"UPDATE bss_trial SET created_at = 1700000000 WHERE {TOY} AND number = 1",
            "trial 1: created_at = 1700000000",
        ),
        ("UPDATE bss_study SET created_at = '1700000000' WHERE name = 'toy'", "study 'toy': created_at = 1700000000"),
    ],
)
def test_the_first_faulty_row_is_named(file: Path, statement: str, said: str) -> None:
    execute(file, statement)
    with pytest.raises(DatabaseError) as caught, open_store(f"sqlite:///{file}", write=False) as store:
        store.studies.get("toy")
        store.trials.of("toy")
        store.trials.curves("toy", [1])
        raise ZeroDivisionError("what would come of it")
    assert str(caught.value).startswith(f"study 'toy' has an invalid row: {said}")


def test_a_command_on_several_databases_names_the_row_too(file: Path) -> None:
    execute(file, "UPDATE bss_study SET spec = '1' WHERE name = 'toy'")
    with pytest.raises(DatabaseError, match="study 'toy': spec = "), open_databases([f"sqlite:///{file}"]) as stores:
        stores[0].studies.summaries()


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("sampled", "1", "sampled = 1: a number; expected an object"),
        ("sampled", "'[1]'", "sampled = '[1]': a list; expected an object"),
        ("parameters", "'\"x\"'", "parameters = '\"x\"': a string; expected an object"),
        ("further_test_metrics", "'{\"a\": [1]}'", "'a' is a list; expected a boolean, number, string or null"),
        ("parameters", "(SELECT json_group_object('p' || value, 1) FROM many)", "100,000 keys; expected at most 1,000"),
        (
            "parameters",
            "json_object('p', printf('%.*c', 1000000, 'x'))",
            "'p' has 1,000,000 characters; expected at most ",
        ),
    ],
)
def test_an_object_of_another_kind_or_beyond_the_bounds_is_named_when_it_is_read(
    file: Path, column: str, value: str, said: str
) -> None:
    many = "WITH RECURSIVE many(value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM many WHERE value < 100000)"
    execute(file, f"{many} UPDATE bss_trial SET {column} = {value} WHERE {TOY} AND number = 1")
    with pytest.raises(DatabaseError) as caught, open_store(f"sqlite:///{file}", write=False) as store:
        store.trials.of("toy")
    assert f"study 'toy' has an invalid row: trial 1: {column} = " in caught.value.message
    assert said in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(("deep", "wide", "said"), [(60, 1, "50 levels"), (1, 250_000, "200,000 values")])
def test_a_spec_that_is_too_deep_or_too_wide_is_named(file: Path, deep: int, wide: int, said: str) -> None:
    inside = f"[{','.join('1' * wide)}]"
    execute(file, "UPDATE bss_study SET spec = ? WHERE name = 'toy'", ['{"a":' * deep + inside + "}" * deep])
    with (
        pytest.raises(DatabaseError, match=f"study 'toy': spec = .*: more than {said}"),
        open_store(f"sqlite:///{file}", write=False) as store,
    ):
        store.studies.get("toy")


@pytest.mark.parametrize("column", ["reason", "traceback", "warnings", "started_by"])
def test_a_long_text_is_cut_when_it_is_read_and_when_it_is_stored(file: Path, column: str) -> None:
    execute(file, f"UPDATE bss_trial SET {column} = printf('%.*c', 1000000, 'x') WHERE {TOY} AND number = 1")
    with open_store(f"sqlite:///{file}") as store:
        found = store.trials.get("toy", 1)
        store.trials.save_log("toy", 1, "x" * 10**6)
        outcome = not_none(found.outcome)
        warning = next(iter(outcome.warnings), "")
        texts = {"reason": outcome.reason, "traceback": outcome.traceback, "started_by": found.started_by}
        text = {**texts, "warnings": warning}[column] or ""
        assert len(text) == LONGEST_TEXT and "(1,000,000 characters)" in text
    assert execute(file, "SELECT length(text) FROM bss_log") == [(LONGEST_TEXT,)]


def test_of_many_warnings_the_first_are_read(file: Path) -> None:
    execute(file, f"UPDATE bss_trial SET warnings = ? WHERE {TOY} AND number = 1", ["w\n" * 5000])
    with open_store(f"sqlite:///{file}", write=False) as store:
        outcome = store.trials.get("toy", 1).outcome
    assert outcome is not None and len(outcome.warnings) == MOST_SENTENCES
    assert outcome.warnings[-1] == "… (5,000 sentences)"


def test_a_value_that_could_not_be_read_again_is_not_stored(url: str) -> None:
    with open_store(url) as store, pytest.raises(DatabaseError, match="1,001 keys; expected at most 1,000"):
        add_study(store)
        values = {f"p{number}": number for number in range(1001)}
        configuration = Configuration(batch_size=8, micro_batch_size=8, learning_rate=0.1, parameters=values)
        store.trials.enqueue("toy", make_plan(configuration=configuration))


def test_no_program_stores_a_trial_as_its_own_retry(file: Path) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="retry_of_earlier"), closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE bss_trial SET retry_of = number")


def test_other_studies_are_read_as_ever(file: Path) -> None:
    execute(file, f"UPDATE bss_trial SET state = 'finished' WHERE {TOY}")
    with open_store(f"sqlite:///{file}", write=False) as store:
        assert len(store.trials.of("other")) == 2
    with pytest.raises(ZeroDivisionError), open_store(f"sqlite:///{file}", write=False) as store:
        store.trials.of("other")
        raise ZeroDivisionError("a fault of our own")


def test_with_valid_rows_an_error_keeps_its_message(file: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_store(f"sqlite:///{file}") as store:
        store.trials.of("toy")
        raise ZeroDivisionError("a fault of our own")
    with pytest.raises(BSSearchError, match="no study"), open_store(f"sqlite:///{file}") as store:
        store.trials.of("nowhere")


def test_a_file_of_ours_has_no_fault_on_any_database(url: str) -> None:
    from bssearch.storage.integrity import first_fault

    with open_store(url) as store:
        begun(store)
        store.trials.append_observations("toy", [(1, one) for one in make_curve((0.0, 0.1), (1.5, 0.4))])
        store.trials.finish("toy", 1, OUTCOME, steps_x_step_time_s=None)
        store.findings.save("toy", "stamp", {"answer": None})
        with store.reading() as connection:
            assert first_fault(connection, store.study_id(connection, "toy")) is None


def test_a_parameter_with_several_values_is_named_if_it_matters(file: Path) -> None:
    execute(file, f"UPDATE bss_trial SET parameters = '{{\"x\":[1]}}' WHERE {TOY} AND number = 1")
    with (
        pytest.raises(DatabaseError, match=r"trial 1: parameters = '{\"x\":\[1\]}'"),
        open_store(f"sqlite:///{file}", write=False) as store,
    ):
        assert store.trials.of("toy")
        raise ValueError("an answer is made of single values")
