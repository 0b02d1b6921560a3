"""What a reader that follows a study's changes comes to know, on every database, while others write."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from sqlalchemy import Connection, event, text

from bssearch.records import MemoryUse, TrialRecord, TrialState
from bssearch.storage.repository import Store, open_store
from bssearch.storage.revisions import mark_rewritten
from bssearch.storage.transfer.finished import FinishedStudy, FinishedTrial
from tests.factories import make_curve, make_environment, make_plan, make_probe, make_spec
from tests.storage.conftest import CANCELLED, OUTCOME, add_study, enqueue, resume, start, start_after, start_queued

PAUSED = replace(CANCELLED, state=TrialState.PAUSED)
WRITERS = 3
TRIALS = 8


def _append(store: Store, number: int) -> None:
    store.append_observations("toy", [(number, one) for one in make_curve((0.0, 0.1), (1.0, 0.5))])


def _finish(store: Store, number: int) -> None:
    store.finish_trial("toy", number, OUTCOME, steps_x_step_time_s=None)


CHANGES: dict[str, tuple[Callable[[Store], object], list[int]]] = {
    "start": (start, [4]),
    "enqueue": (enqueue, [4]),
    "start queued": (lambda store: start_queued(store, 2, "me"), [2]),
    "resume": (lambda store: resume(store, 3), [3]),
    "append to one that has ended": (lambda store: _append(store, 3), [3]),
    "finish": (lambda store: _finish(store, 1), [1]),
    "settle": (lambda store: store.settle_paused("toy"), [3]),
    "mark lost": (lambda store: store.mark_lost("toy", is_alive=lambda owner: False), [1]),
}
NO_CHANGES: dict[str, Callable[[Store], object]] = {
    "a start that came too late": lambda store: start_after(store, 2, "me"),
    "a trial that waits no more": lambda store: start_queued(store, 1, "me"),
    "nothing to settle": lambda store: store.settle_paused("toy", []),
    "nobody lost": lambda store: store.mark_lost("toy", is_alive=lambda owner: True),
    "a heartbeat": lambda store: store.heartbeat("toy", "driver", 60.0),
    "observations of one that runs": lambda store: _append(store, 1),
    "no observations": lambda store: store.append_observations("toy", []),
}


@pytest.fixture
def three(store: Store) -> Store:
    """A store with a study of a running, a queued and a paused trial, beside another study."""
    add_study(store, "other")
    add_study(store)
    start(store)
    enqueue(store)
    start(store)
    store.finish_trial("toy", 3, PAUSED, steps_x_step_time_s=None)
    return store


def test_a_new_study_has_no_changes(store: Store) -> None:
    add_study(store)
    found = store.changes("toy", 0)
    assert (found.revision, found.is_rewritten, found.has_new_probes, found.trials) == (0, False, False, [])


def test_all_trials_are_read_from_revision_0(three: Store) -> None:
    found = three.changes("toy", 0)
    assert found.trials == three.trials("toy")
    assert not found.is_rewritten


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_brings_the_trials_that_it_changed_and_no_others(three: Store, what: str) -> None:
    change, numbers = CHANGES[what]
    before = three.changes("toy", 0).revision
    change(three)
    found = three.changes("toy", before)
    assert found.revision > before
    assert [trial.number for trial in found.trials] == numbers
    assert found.trials == [trial for trial in three.trials("toy") if trial.number in numbers]
    assert not found.is_rewritten and not found.has_new_probes
    assert three.changes("toy", found.revision).trials == []
    assert three.changes("other", 0).revision == 0


@pytest.mark.parametrize("what", NO_CHANGES)
def test_what_changes_no_trial_leaves_the_revision(three: Store, what: str) -> None:
    before = three.changes("toy", 0).revision
    NO_CHANGES[what](three)
    assert three.changes("toy", before).revision == before


def test_a_reader_is_told_of_new_probes(three: Store) -> None:
    environment = make_environment()
    calls: list[Callable[[], object]] = [
        lambda: three.save_probe("toy", environment, make_probe(8)),
        lambda: three.save_memory("toy", environment, MemoryUse(micro_batch_size=8, fits=True, peak_memory_bytes=None)),
    ]
    for call in calls:
        before = three.changes("toy", 0).revision
        call()
        found = three.changes("toy", before)
        assert (found.has_new_probes, found.trials) == (True, [])
        assert not three.changes("toy", found.revision).has_new_probes
    seen = three.changes("toy", 0).revision
    three.save_probe("toy", environment, make_probe(8), 1)  # known already
    assert three.changes("toy", seen).revision == seen


def test_an_imported_study_is_read_from_revision_0(store: Store) -> None:
    plan = make_plan()
    trial = FinishedTrial(
        configuration=plan.configuration, phase=plan.phase, seed=0, train_seconds_limit=1.0, outcome=OUTCOME
    )
    store.import_studies(
        [
            FinishedStudy(
                study=replace(make_spec().new_study("someone"), name="imported"),
                environment=make_environment(),
                trials=[trial, trial],
            )
        ]
    )
    found = store.changes("imported", 0)
    assert found.revision > 0
    assert [one.number for one in found.trials] == [1, 2]


def test_after_rows_were_deleted_a_reader_gets_all_there_are(three: Store) -> None:
    before = three.changes("toy", 0).revision

    def delete(connection: Connection, study_id: int) -> None:
        connection.execute(text("DELETE FROM bss_trial WHERE study_id = :id AND number = 2"), {"id": study_id})
        mark_rewritten(connection, study_id)

    three._on_study("toy", delete)
    found = three.changes("toy", before)
    assert found.is_rewritten
    assert [trial.number for trial in found.trials] == [1, 3]
    assert not three.changes("toy", found.revision).is_rewritten


def test_a_revision_of_a_study_that_was_deleted_is_read_anew(store: Store) -> None:
    add_study(store)
    for number in (start(store), start(store)):
        store.finish_trial("toy", number, OUTCOME, steps_x_step_time_s=None)
    before = store.changes("toy", 0).revision
    store.delete_study("toy")
    add_study(store)
    start(store)
    found = store.changes("toy", before)
    assert found.is_rewritten
    assert [trial.number for trial in found.trials] == [1]


def test_where_nothing_has_changed_one_row_is_read(three: Store) -> None:
    seen = three.changes("toy", 0).revision
    statements: list[str] = []
    event.listen(three._engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    three.changes("toy", seen)
    assert sum("SELECT" in one for one in statements) == 1
    assert not any("bss_trial" in one for one in statements)


def _write(url: str, owner: str, together: threading.Barrier) -> None:
    """Do what a driver does to several trials, as fast as it goes."""
    with open_store(url) as store:
        together.wait()
        for index in range(TRIALS):
            number = start(store, lease_owner=owner)
            if index % 2:
                store.finish_trial("toy", number, PAUSED, steps_x_step_time_s=None)
                resume(store, number, owner)
            _append(store, number)
            _finish(store, number)


def _without_lease(trials: list[TrialRecord]) -> list[TrialRecord]:
    return [replace(trial, lease_expires_at=None) for trial in trials]


def test_a_reader_beside_several_writers_misses_nothing(store: Store, url: str) -> None:
    add_study(store)
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
        found = store.changes("toy", seen)
        assert found.revision >= seen and not found.is_rewritten
        seen = found.revision
        known |= {trial.number: trial for trial in found.trials}
        curves |= {n: len(curve) for n, curve in store.curves("toy", [one.number for one in found.trials]).items()}
    stored = store.trials("toy")
    assert len(stored) == WRITERS * TRIALS
    assert _without_lease([known[number] for number in sorted(known)]) == _without_lease(stored)
    assert set(curves.values()) == {2}
    assert seen == WRITERS * TRIALS * 2 + WRITERS * (TRIALS // 2) * 2  # one revision a change, none given twice


@pytest.mark.slow
def test_no_revision_is_seen_before_a_smaller_one(store: Store, url: str) -> None:
    """A writer that has raised the counter and not yet committed keeps the next one from raising it."""
    add_study(store)
    first, second = start(store), start(store)
    before = store.changes("toy", 0).revision
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
        assert store.changes("toy", before).trials == []
        go_on.set()
        one.join()
        two.join()
    assert [trial.number for trial in store.changes("toy", before).trials] == [first, second]
    assert [trial.number for trial in store.changes("toy", before + 1).trials] == [second]
