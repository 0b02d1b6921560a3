"""Study files: reproducible bytes, complete or absent, and faults named with their line; studies that are joined."""

import gzip
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from bssearch import (
    BSSearchError,
    DatabaseError,
    NotFoundError,
    OtherDeviceError,
    SpecError,
    Store,
    UsageError,
    open_store,
)
from bssearch.records import TrialState
from bssearch.storage.integrity import LAYOUTS, NAMES, OWN, Kind
from bssearch.storage.models import METADATA
from bssearch.storage.transfer import study_copy
from bssearch.storage.transfer.study_copy import Joined, read_study
from tests.factories import make_environment, make_probe, make_spec
from tests.hostile_transfers import Transfers
from tests.postgres import Postgres
from tests.schema import execute
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

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a study that has rows of every kind."""
    return make_states(tmp_path_factory.mktemp("states"))[-1]


@pytest.fixture
def file(last: Path, tmp_path: Path) -> Path:
    path = tmp_path / "toy.gz"
    with open_store(f"sqlite:///{last}", write=False) as store:
        store.transfer.write("toy", path)
    return path


def lines_of(file: Path) -> Lines:
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]


def rewrite(file: Path, lines: Lines) -> None:
    """Write lines with their counts and digest."""
    body = lines[1:-1]
    counts = {kind.value: sum(kind.value in one for one in body) for kind in LAYOUTS}
    lines[0]["header"]["counts"] = counts
    data = b"".join(json.dumps(one).encode() + b"\n" for one in lines[:-1])
    end = {"end": {"counts": counts, "sha256": hashlib.sha256(data).hexdigest()}}
    file.write_bytes(gzip.compress(data + json.dumps(end).encode() + b"\n"))


def refused(file: Path, error: type[BSSearchError] = UsageError) -> str:
    with pytest.raises(error) as caught:
        read_study(file)
    assert str(file) in caught.value.message
    return caught.value.message


def test_every_table_and_column_travels_or_is_a_databases_own() -> None:
    """A new table or column is exported automatically, or must be listed here as excluded."""
    travelling = {layout.table.name for layout in LAYOUTS.values()}
    staying = {"bss_claim", "bss_submission", "bss_worker"}
    assert {table.name for table in METADATA.sorted_tables} - travelling == staying
    for layout in LAYOUTS.values():
        names = {NAMES.get(column.name, column.name) for column in layout.table.columns}
        assert names - set(layout.exported.model_fields) <= OWN


def test_the_same_study_makes_the_same_bytes_from_any_database(file: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.gz"
    with open_store(f"sqlite:///{tmp_path}/other.db") as store:
        make_study(store)
        store.studies.rename("toy", "other")
        start(store, "other")  # so that every id is different
        store.transfer.join([read_study(file)])
        store.transfer.write("toy", again)
    assert again.read_bytes() == file.read_bytes()


def test_a_trial_that_runs_is_left_out_and_follows_once_it_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "toy.gz"
    with open_store(f"sqlite:///{tmp_path}/source.db") as source, open_store(f"sqlite:///{tmp_path}/b.db") as target:
        make_study(source)
        start(source)
        append(source, 1, (0.0, 0.1))
        start(source)
        finish(source, 2)
        for running, numbers in (([1], [2]), ([], [1, 2])):
            assert source.transfer.write("toy", path) == running
            target.transfer.join([read_study(path)])
            assert [one.number for one in target.trials.of("toy")] == numbers
            if running:
                finish(source, 1)
        assert len(target.trials.observations("toy", 1)) == 1


TRIAL: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"batch_size": "x"}, "trial 1: batch_size = 'x'"),
    "flag": ({"batch_size": True}, "batch_size = True"),
    "huge": ({"batch_size": 10**30}, "batch_size = 1000000"),
    "float": ({"learning_rate": 1e305}, "learning_rate = 1e+305"),
    "state": ({"state": "done"}, "trial 1: state = 'done'"),
    "moment": ({"ended_at": "then"}, "trial 1: ended_at = 'then'"),
    "no time zone": ({"ended_at": "2026-01-01T00:00:00"}, "trial 1: ended_at = "),
    "year": ({"ended_at": "9999-12-31T23:59:59+00:00"}, "trial 1: ended_at = "),
    "deep": ({"parameters": {"a": []}}, "trial 1: parameters = {'a': []}"),
    "environment": ({"environment": "x"}, "trial 1: environment = 'x'"),
    "retry": ({"retry_of": 99}, "trial 1: retry_of = 99"),
    "its own retry": ({"retry_of": 1}, "trial 1: retry_of = 1"),
    "a long reason": ({"reason": "x" * 10**6}, "trial 1: reason = 'xxx"),
    "a million warnings": ({"warnings": ["x"] * 10**6}, "trial 1: warnings = "),
    "a hundred thousand parameters": ({"parameters": {f"p{n}": n for n in range(10**5)}}, "trial 1: parameters = "),
    "a long parameter": ({"parameters": {"p": "x" * 10**6}}, "trial 1: parameters = "),
    "number": ({"number": 2**40}, "number = 1099511627776"),
    "surplus": ({"surplus": 1}, "surplus = 1"),
}
CHANGES: dict[str, tuple[Callable[[Lines], object], str]] = {
    "version": (lambda lines: lines[0]["header"].update(version=2), "line 1: "),
    "schema": (lambda lines: lines[0]["header"].update(schema="9999"), "'9999'"),
    "format": (lambda lines: lines[0]["header"].update(format="x"), "line 1: "),
    "missing": (lambda lines: row(lines, "trial").pop("seed"), "trial 1: seed = "),
    "twice": (lambda lines: row(lines, "trial", 1).update(number=1), "trial 1 occurs twice"),
    "no such trial": (lambda lines: row(lines, "observation").update(trial=99), "trial = 99"),
    "null": (lambda lines: row(lines, "observation").update(metric=None), "metric = null"),
    "environment digest": (lambda lines: row(lines, "environment").update(host="x"), "line 2: environment (digest "),
    "spec digest": (lambda lines: row(lines, "spec").update(digest="x"), "spec (digest 'x')"),
    "order": (lambda lines: lines.insert(-1, lines.pop(1)), "environment = "),
    "kind": (lambda lines: lines.insert(2, {"x": {}}), "line 3: unknown kind of row 'x'"),
    "list": (lambda lines: lines.insert(4, {"trial": []}), "line 5: trial "),
    "deep answer": (lambda lines: row(lines, "finding")["answer"]["quick"].update(a=nested(60)), "finding: answer = "),
    "wide answer": (lambda lines: row(lines, "finding")["answer"]["quick"].update(a=[0] * 10**6), "finding: answer = "),
}


def nested(levels: int) -> dict[str, Any]:
    return {} if levels == 0 else {"a": nested(levels - 1)}


@pytest.mark.parametrize("name", TRIAL)
def test_a_value_that_no_trial_has_is_named(file: Path, name: str) -> None:
    values, said = TRIAL[name]
    lines = lines_of(file)
    row(lines, "trial").update(values)
    rewrite(file, lines)
    assert said in refused(file)


@pytest.mark.parametrize("name", CHANGES)
def test_a_row_that_no_study_has_is_named_with_its_line(file: Path, name: str) -> None:
    change, said = CHANGES[name]
    lines = lines_of(file)
    change(lines)
    rewrite(file, lines)
    assert said in refused(file)


JOINED: dict[str, tuple[Callable[[Lines], object], str]] = {
    "rule": (lambda lines: row(lines, "trial").update(batch_size=0), "a row cannot be stored: "),
    "running": (lambda lines: row(lines, "trial", 1).update(state="running"), "a row cannot be stored: "),
    "question": (lambda lines: row(lines, "study").update(spec_hash="x"), "spec_hash = 'x'"),
    "name": (lambda lines: row(lines, "study")["spec"].update(name="x"), "'x'"),
    "newer spec": (lambda lines: row(lines, "study")["spec"].update(new_field=1), "new_field: unknown key"),
}


@pytest.mark.parametrize("name", JOINED)
def test_an_invalid_row_is_named_and_no_row_is_stored(file: Path, store: Store, name: str) -> None:
    change, said = JOINED[name]
    lines = lines_of(file)
    change(lines)
    rewrite(file, lines)
    before = everything(store)
    with pytest.raises(SpecError if "spec: " in said else UsageError) as caught:
        store.transfer.join([read_study(file)])
    assert str(file) in caught.value.message and said in caught.value.message
    assert everything(store) == before


def row(lines: Lines, kind: str, index: int = 0) -> dict[str, Any]:
    return [one[kind] for one in lines if kind in one][index]  # type: ignore[no-any-return]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "9" * 400])
def test_no_number_without_bound_is_read(file: Path, value: str) -> None:
    text = gzip.decompress(file.read_bytes()).decode()
    file.write_bytes(gzip.compress(text.replace('"metric":0.1', f'"metric":{value}', 1).encode()))
    assert "JSON" in refused(file)


def test_a_file_of_an_earlier_schema_may_lack_columns_that_have_a_default(file: Path, tmp_path: Path) -> None:
    lines = lines_of(file)
    lines[0]["header"]["schema"] = "0010"
    for one in lines:
        ((kind, values),) = one.items()
        for name in (
            "further_test_metrics",
            "warnings",
            "host_bound_share",
            *(["contended"] if kind == "probe" else []),
        ):
            values.pop(name, None)
    rewrite(file, lines)
    with open_store(f"sqlite:///{tmp_path}/target.db") as store:
        store.transfer.join([read_study(file)])
        outcome = store.trials.get("toy", 1).outcome
        assert outcome is not None and outcome.state is TrialState.REACHED
        assert (outcome.warnings, outcome.further_test_metrics, outcome.host_bound_share) == ((), None, None)
        assert {one.contended for one in store.probes.step_times("toy")} == {False}


def test_a_file_that_was_cut_off_or_changed_is_refused(file: Path) -> None:
    content = file.read_bytes()
    text = gzip.decompress(content)
    end = text.rindex(b'{"end"')
    for broken in (
        content[: len(content) // 2],
        content[:50] + b"x" + content[51:],
        b"",
        b"trial,seed\n1,0\n",
        content + b"x",
        gzip.compress(text[:end]),
        gzip.compress(text[:-2]),
        gzip.compress(text.replace(b'"metric":0.1', b'"metric":0.2', 1)),
        gzip.compress(text + b"{}\n"),
        gzip.compress(text + text[end:]),
        gzip.compress(text.replace(b'"log":1,', b'"log":0,', 1)),
    ):
        file.write_bytes(broken)
        refused(file)


def test_a_file_that_is_not_there_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere.gz", NotFoundError)
    refused(tmp_path)


@pytest.mark.slow
def test_a_gigabyte_in_a_megabyte_of_gzip_is_not_unpacked(file: Path) -> None:
    with gzip.open(file, "wb", compresslevel=1) as bomb:
        for _ in range(256):
            bomb.write(b" " * 2**22)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert f"{study_copy.LONGEST_LINE:,}" in refused(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 2**10


def test_a_file_has_a_largest_size(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(gzip.decompress(file.read_bytes()))
    monkeypatch.setattr(study_copy, "MOST_BYTES", size)
    read_study(file)
    monkeypatch.setattr(study_copy, "MOST_BYTES", size - 1)
    assert f"{size - 1:,}" in refused(file)


def test_a_failed_export_leaves_the_old_file(file: Path, last: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    copy = tmp_path / "copy.db"
    shutil.copy(last, copy)
    execute(copy, "UPDATE bss_visit SET steps_timed = 'many'")
    with (
        open_store(f"sqlite:///{copy}", write=False) as store,
        pytest.raises(DatabaseError, match=r"'toy'.* has an invalid row: visit .*steps_timed = 'many'"),
    ):
        store.transfer.write("toy", file)
    assert file.read_bytes() == content
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".bssearch")] == []


HEAD_START_S = 0.5
"""Head start of the other writer; it passes in full if that writer is locked out."""


@pytest.fixture
def other(url: str, store: Store) -> Iterator[Store]:
    """Another connection to the database, as of another process."""
    with open_store(url) as opened:
        yield opened


@contextmanager
def meanwhile(store: Store, beginning: str, work: Callable[[], Any]) -> Iterator[list[Future[Any]]]:
    """Start work in another thread before a store's first statement that starts with ``beginning``."""
    begun: list[Future[Any]] = []

    def begin(*arguments: object) -> None:
        if not begun and str(arguments[2]).startswith(beginning):
            begun.append(pool.submit(work))
            wait(begun, timeout=HEAD_START_S)

    with ThreadPoolExecutor(1) as pool:
        event.listen(store._engine, "before_cursor_execute", begin)
        try:
            yield begun
        finally:
            event.remove(store._engine, "before_cursor_execute", begin)


@pytest.mark.slow
def test_two_imports_of_a_new_study_make_one_study(source: Store, store: Store, other: Store) -> None:
    """The second import finds the study and adds the new rows."""
    early = copies(source)
    run(source)
    late = copies(source)
    with meanwhile(store, "INSERT INTO bss_trial", lambda: other.transfer.join(late)) as second:
        (joined,) = store.transfer.join(early)
    (after,) = second[0].result()
    assert (joined.is_new, after.is_new, after.is_changed) == (True, False, True)
    assert rows(store) == rows(source)


@pytest.mark.slow
def test_a_driver_starts_its_trial_after_an_import_that_has_begun(source: Store, store: Store, other: Store) -> None:
    store.transfer.join(copies(source))
    run(source)
    with meanwhile(store, "UPDATE bss_study SET revision", lambda: start(other, seed=5)) as started:
        store.transfer.join(copies(source))
    assert started[0].result() == 3
    assert [one.number for one in store.trials.of("toy")] == [1, 2, 3]


# Joining studies ------------------------------------------------------------------------------------------------------


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


def refused_join(source: Store, target: Store, name: str | None = None) -> UsageError:
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
    assert "another study 'toy'" in refused_join(source, store).message
    assert "'a b'" in refused_join(source, store, "a b").message
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
    assert "trial 2" in refused_join(source, store).message


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
    assert said in refused_join(source, store).message
    if trials_in(store)[2] is not TrialState.RUNNING:
        assert "trial 2: " in refused_join(store, source).message


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
    assert "trial 1: evaluation at step 50" in refused_join(source, store).message


def test_a_study_bound_to_two_kinds_of_device_is_refused(tmp_path: Path, store: Store) -> None:
    with open_store(f"sqlite:///{tmp_path}/a.db") as source, open_store(f"sqlite:///{tmp_path}/b.db") as other:
        source.studies.create(make_spec().new_study("someone"))
        for there in (store, other):
            join(source, there)
        source.studies.bind("toy", make_environment(device_name="A"))
        other.studies.bind("toy", make_environment(device_name="B"))
        assert join(source, store).is_changed
        assert store.studies.get("toy").environment == make_environment(device_name="A")
        assert isinstance(refused_join(other, store), OtherDeviceError)
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
