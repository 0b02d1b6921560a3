"""Imports of a study's copy into a database with another copy, and forged exports."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bssearch import OtherDeviceError, Store, UsageError, open_store
from bssearch.records import TrialState
from bssearch.storage.integrity import Kind
from bssearch.storage.transfer.study_copy import Joined, read_study
from tests.factories import make_environment, make_probe, make_spec
from tests.hostile_transfers import Transfers
from tests.postgres import Postgres
from tests.storage.conftest import enqueue, start, start_queued
from tests.storage.transfer.copies import (
    OTHER,
    PAUSED,
    REACHED,
    append,
    copies,
    everything,
    finish,
    interrupted_at,
    make_states,
    make_study,
    rows,
)

ENVIRONMENT = make_environment()
DRIVER_GONE = -1.0
"""Seconds of an expired lease."""


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Store]:
    """Another database with a study of one ended trial."""
    with open_store(f"sqlite:///{tmp_path}/source.db") as opened:
        make_study(opened)
        run(opened)
        yield opened


def run(store: Store, outcome: object = REACHED, metric: float = 0.1, seed: int = 0) -> None:
    """Run a trial to its end."""
    number = start(store, seed=seed)
    append(store, number, (0.0, metric), (1.0, 0.9))
    finish(store, number, outcome)  # type: ignore[arg-type]


def join(source: Store, target: Store, name: str | None = None, *, dry_run: bool = False) -> Joined:
    (joined,) = target.transfer.join(source.transfer.read(["toy"], "the source"), name=name, dry_run=dry_run)
    return joined


def refused(source: Store, target: Store, name: str | None = None) -> UsageError:
    """The error of a refused import."""
    before = everything(target)
    with pytest.raises(UsageError) as caught:
        join(source, target, name)
    assert everything(target) == before
    return caught.value


def trials_in(store: Store) -> dict[int, TrialState]:
    return {one.number: one.state for one in store.trials.of("toy")}


def test_a_study_is_identified_by_its_creator_its_time_and_its_question(source: Store, store: Store) -> None:
    assert join(source, store, "mine").is_new
    run(source)
    again = join(source, store)
    assert (again.study, again.is_new, again.is_changed) == ("mine", False, True)
    assert again.counts == {
        "trials_new": 1,
        "trials_changed": 0,
        "trials_known": 1,
        "observations_new": 2,
        "observations_changed": 0,
        "observations_known": 2,
        "measurements_new": 0,
        "measurements_changed": 0,
        "measurements_known": 0,
    }
    assert [one.number for one in store.trials.of("mine")] == [1, 2]
    assert store.studies.get("mine").spec["name"] == "mine"
    assert store.studies.get("mine").mark == source.studies.get("toy").mark


def test_another_study_of_the_name_is_refused_and_may_have_another_name(source: Store, store: Store) -> None:
    make_study(store)
    assert "another study 'toy'" in refused(source, store).message
    assert "'a b'" in refused(source, store, "a b").message
    source.studies.create(make_spec(name="other").new_study("someone"))
    assert [one.study for one in store.transfer.join(copies(source), name="theirs")] == ["theirs", "other"]


def gone(store: Store, number: int) -> None:
    """Start a queued trial; its driver dies."""
    start_queued(store, number, "driver")
    append(store, number, (0.0, 0.2), (1.0, 0.3), (2.0, 0.4))
    store.trials.save_log("toy", number, "what the worker wrote here")
    store.leases.heartbeat("toy", "driver", DRIVER_GONE)


def lost(store: Store, number: int) -> None:
    gone(store, number)
    store.leases.mark_lost("toy", is_alive=lambda owner: False)


def paused(store: Store, number: int) -> None:
    start_queued(store, number, "driver")
    append(store, number, (0.0, 0.2))
    finish(store, number, PAUSED)


@pytest.mark.parametrize("here", [lambda store, number: None, paused, lost, gone])
def test_a_trial_that_ended_elsewhere_replaces_an_unfinished_one(
    source: Store, store: Store, here: Callable[[Store, int], object]
) -> None:
    enqueue(source)
    join(source, store)
    here(store, 2)
    seen = store.trials.changes("toy", 0).revision
    start_queued(source, 2, "another")
    append(source, 2, (0.0, 0.1))
    finish(source, 2)
    source.trials.save_log("toy", 2, "what the worker wrote there")
    joined = join(source, store)
    assert (joined.counts["trials_changed"], joined.counts["observations_changed"]) == (1, 1)
    assert rows(store) == rows(source)
    replaced = store.trials.get("toy", 2)
    assert (replaced.lease_owner, replaced.lease_expires_at) == (None, None)
    assert store.trials.changes("toy", seen).is_rewritten
    assert not join(source, store).is_changed


@pytest.mark.parametrize("there", [lambda store, number: None, paused, lost])
def test_a_trial_unfinished_elsewhere_stays_unchanged_here(
    source: Store, store: Store, there: Callable[[Store, int], object]
) -> None:
    enqueue(source)
    join(source, store)
    there(source, 2)
    assert not join(source, store).is_changed
    assert trials_in(store)[2] is TrialState.QUEUED


def test_a_trial_that_runs_here_is_skipped_and_named(source: Store, store: Store) -> None:
    enqueue(source)
    join(source, store)
    start_queued(store, 2, "driver")
    run(source)
    start_queued(source, 2, "another")
    finish(source, 2)
    joined = join(source, store)
    assert (list(joined.skipped), joined.counts["trials_new"]) == ([2], 1)
    assert trials_in(store) == {1: TrialState.REACHED, 2: TrialState.RUNNING, 3: TrialState.REACHED}
    append(store, 2, (0.0, 0.2))
    finish(store, 2)
    assert "trial 2" in refused(source, store).message


CONTRADICTIONS: dict[str, tuple[Callable[[Store], object], Callable[[Store], object], str]] = {
    "ended otherwise": (run, lambda there: run(there, replace(REACHED, train_seconds=9.0)), "trial 2: "),
    "asked otherwise": (
        lambda here: run(here, PAUSED, seed=1),
        lambda there: run(there, seed=2),
        "seed = 1 here, and 2",
    ),
    "runs here, asked otherwise": (start, lambda there: run(there, seed=2), "trial 2: seed = 0 here, and 2"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_study_that_went_on_in_both_places_is_refused_in_both_orders(source: Store, store: Store, name: str) -> None:
    here, there, said = CONTRADICTIONS[name]
    join(source, store)
    here(store)
    there(source)
    assert said in refused(source, store).message
    if trials_in(store)[2] is not TrialState.RUNNING:
        assert "trial 2: " in refused(store, source).message


@pytest.fixture
def joined(source: Store, store: Store) -> None:
    """The source's study, imported."""
    join(source, store)


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_other_evaluations_of_a_trial_that_has_ended_in_both_are_refused(
    source: Store, store: Store, elsewhere: bool
) -> None:
    """Also if only one database has a further evaluation."""
    append(source if elsewhere else store, 1, (3.0, 0.95), first=5)
    assert "trial 1: evaluation at step 50" in refused(source, store).message


def test_a_study_bound_to_two_kinds_of_device_is_refused(tmp_path: Path, store: Store) -> None:
    with open_store(f"sqlite:///{tmp_path}/a.db") as source, open_store(f"sqlite:///{tmp_path}/b.db") as other:
        source.studies.create(make_spec().new_study("someone"))
        for there in (store, other):
            join(source, there)
        source.studies.bind("toy", make_environment(device_name="A"))
        other.studies.bind("toy", make_environment(device_name="B"))
        assert join(source, store).is_changed
        assert store.studies.get("toy").environment == make_environment(device_name="A")
        assert isinstance(refused(other, store), OtherDeviceError)
        source.studies.bind("toy", make_environment(device_name="A", host="other"), again=True)
        assert not join(source, store).is_changed


def test_an_import_adds_missing_measurements_and_keeps_the_others(source: Store, store: Store) -> None:
    source.probes.add_step_time("toy", ENVIRONMENT, make_probe(8, eval_every_steps=5), 1)
    join(source, store)
    store.probes.add_step_time("toy", ENVIRONMENT, make_probe(16, eval_every_steps=7), 2)
    source.probes.add_step_time("toy", ENVIRONMENT, make_probe(16, eval_every_steps=9), 2)
    source.probes.add_step_time("toy", ENVIRONMENT, make_probe(16, eval_every_steps=9), 3)
    source.probes.add_step_time("toy", OTHER, make_probe(16, eval_every_steps=9), 3)
    source.studies.keep_spec("toy", {"name": "toy", "slots": 2})
    seen = store.trials.changes("toy", 0).revision
    assert join(source, store).counts["measurements_new"] == 3
    assert store.trials.changes("toy", seen).has_new_probes
    assert sorted({key: row["eval_every_steps"] for key, row in rows(store)[Kind.PROBE].items()}.values()) == [5, 7, 9]
    assert len(rows(store)[Kind.VISIT]) == 4
    assert len(rows(store)[Kind.SPEC]) == 1


@pytest.mark.usefixtures("joined")
def test_spec_and_archive_stay_as_they_are_here(source: Store, store: Store) -> None:
    store.studies.archive("toy")
    for there, slots in ((source, 4), (store, 2)):
        there.studies.update_spec("toy", make_spec(executor={"slots": slots}).model_dump(mode="json"))
    assert not join(source, store).is_changed
    assert store.studies.get("toy").archived_at is not None
    assert store.studies.get("toy").spec["executor"]["slots"] == 2  # type: ignore[index]


@pytest.mark.usefixtures("joined")
def test_drivers_see_imported_trials(source: Store, store: Store) -> None:
    seen = store.trials.changes("toy", 0)
    assert [one.number for one in seen.trials] == [1]
    run(source)
    join(source, store)
    since = store.trials.changes("toy", seen.revision)
    assert ([one.number for one in since.trials], since.has_new_probes, since.is_rewritten) == ([2], False, False)


@pytest.mark.usefixtures("joined")
def test_a_stored_answer_counts_until_the_study_changes(source: Store, store: Store) -> None:
    stored = {"made_by": 1, "answer": {"batch": 64}}
    store.findings.save("toy", store.findings.stamp("toy"), stored)
    source.findings.save("toy", source.findings.stamp("toy"), {**stored, "quick": {"runs": [1]}, "search_end": None})
    join(source, store)
    assert store.findings.current("toy") is None
    assert store.findings.last("toy") == {"made_by": 0, "answer": None, "quick": {"runs": [1]}, "search_end": None}
    kept = {**stored, "quick": {"runs": [2]}, "search_end": None}
    store.findings.save("toy", store.findings.stamp("toy"), kept)
    assert not join(source, store).is_changed
    assert store.findings.current("toy") == kept
    run(source)
    join(source, store)
    assert (store.findings.current("toy"), store.findings.last("toy")) == (None, kept)


def test_a_dry_run_stores_nothing(source: Store, store: Store) -> None:
    before = everything(store)
    assert join(source, store, dry_run=True).is_new
    assert everything(store) == before


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_states(tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("order", [(10, 20, -1), (-1, 10, 20), (20, -1, 10, 20), (0, 17, 6, -1)])
def test_states_of_a_study_in_any_order_make_its_last_trials(
    states: list[Path], store: Store, order: list[int]
) -> None:
    for state in order:
        with open_store(f"sqlite:///{states[state]}", write=False) as source:
            store.transfer.join(copies(source))
            assert not any(one.is_changed for one in store.transfer.join(copies(source)))
    with open_store(f"sqlite:///{states[-1]}", write=False) as source:
        last, found = rows(source), rows(store)
    assert [found[kind] for kind in Kind if "trial" in kind] == [last[kind] for kind in Kind if "trial" in kind]
    assert found[Kind.OBSERVATION] == last[Kind.OBSERVATION]


def test_an_interrupted_import_leaves_no_rows(states: list[Path], store: Store) -> None:
    with open_store(f"sqlite:///{states[12]}", write=False) as source:
        store.transfer.join(copies(source))
    with open_store(f"sqlite:///{states[-1]}", write=False) as source:
        incoming = copies(source)
    before = everything(store)
    for statement in range(60):
        done: list[Joined] = []
        with interrupted_at(store, statement):
            done = store.transfer.join(incoming)
        if done:
            break
        assert everything(store) == before
    assert statement > 20 and done


KILLED = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import event
from bssearch.storage.repository import open_store
from bssearch.storage.transfer.study_copy import read_study

with open_store(sys.argv[1]) as store:
    def kill(connection, cursor, statement, *_):
        if statement.startswith("INSERT INTO bss_log"):
            os.kill(os.getpid(), signal.SIGKILL)
    event.listen(store._engine, "after_cursor_execute", kill)
    store.transfer.join([read_study(Path(sys.argv[2]))])
"""


@pytest.mark.slow
def test_a_killed_import_leaves_no_rows(states: list[Path], store: Store, url: str, tmp_path: Path) -> None:
    with open_store(f"sqlite:///{states[-1]}", write=False) as source:
        source.transfer.write("toy", tmp_path / "toy.gz")
    before = everything(store)
    killed = subprocess.run([sys.executable, "-c", KILLED, url, tmp_path / "toy.gz"], env={**os.environ}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert everything(store) == before
    assert store.transfer.join([read_study(tmp_path / "toy.gz")])[0].is_new


def test_through_files_and_both_databases_the_bytes_are_the_same(
    states: list[Path], postgres: Postgres, tmp_path: Path
) -> None:
    files = [tmp_path / f"{number}.gz" for number in range(3)]
    urls = [f"sqlite:///{states[-1]}", postgres.cleared_database(), f"sqlite:///{tmp_path}/last.db"]
    for number, url in enumerate(urls):
        with open_store(url) as store:
            if number:
                store.transfer.join([read_study(files[number - 1])])
            store.transfer.write("toy", files[number])
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()


CASES = 100
"""``tests/benchmarks/hostile_input.py`` tries ten thousand."""


@pytest.mark.slow
def test_changed_files_and_databases(tmp_path: Path) -> None:
    transfers = Transfers(tmp_path)
    wrong = {case: said for case in range(CASES) if (said := transfers.fails(case)) is not None}
    transfers.close()
    assert not wrong
    assert sum(transfers.outcomes.values()) == CASES
    assert sum(count for name, count in transfers.outcomes.items() if name.endswith("taken")) > CASES / 50
