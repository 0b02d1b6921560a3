"""Study files: reproducible bytes, complete or absent, and faults named with their line."""

import gzip
import hashlib
import json
import resource
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from bssearch import BSSearchError, DatabaseError, NotFoundError, SpecError, Store, UsageError, open_store
from bssearch.records import TrialState
from bssearch.storage.integrity import LAYOUTS, NAMES, OWN
from bssearch.storage.models import METADATA
from bssearch.storage.transfer import study_copy
from bssearch.storage.transfer.study_copy import read_study
from tests.schema import execute
from tests.storage.conftest import start
from tests.storage.transfer.copies import append, copies, everything, finish, make_states, make_study, rows

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
    "newer spec": (lambda lines: row(lines, "study")["spec"].update(new_field=1), "spec: unknown key"),
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
def source(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/source.db") as opened:
        make_study(opened)
        add_trial(opened)
        yield opened


@pytest.fixture
def other(url: str, store: Store) -> Iterator[Store]:
    """Another connection to the database, as of another process."""
    with open_store(url) as opened:
        yield opened


def add_trial(store: Store) -> None:
    number = start(store)
    append(store, number, (0.0, 0.1), (1.0, 0.9))
    finish(store, number)


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
    add_trial(source)
    late = copies(source)
    with meanwhile(store, "INSERT INTO bss_trial", lambda: other.transfer.join(late)) as second:
        (joined,) = store.transfer.join(early)
    (after,) = second[0].result()
    assert (joined.is_new, after.is_new, after.is_changed) == (True, False, True)
    assert rows(store) == rows(source)


@pytest.mark.slow
def test_a_driver_starts_its_trial_after_an_import_that_has_begun(source: Store, store: Store, other: Store) -> None:
    store.transfer.join(copies(source))
    add_trial(source)
    with meanwhile(store, "UPDATE bss_study SET revision", lambda: start(other, seed=5)) as started:
        store.transfer.join(copies(source))
    assert started[0].result() == 3
    assert [one.number for one in store.trials.of("toy")] == [1, 2, 3]
