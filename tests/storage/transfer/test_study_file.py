"""The file of a whole study: the same bytes each time, all or nothing, and every fault of it is named with its line."""

from __future__ import annotations

import gzip
import hashlib
import json
import resource
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bssearch.errors import BSSearchError, NotFoundError, SpecError, UsageError
from bssearch.records import TrialState
from bssearch.storage.models import Base
from bssearch.storage.repository import open_store
from bssearch.storage.transfer import study_file
from bssearch.storage.transfer.layout import LAYOUTS, OWN, REFERENCES, Kind
from bssearch.storage.transfer.transfers import read_study
from tests.storage.conftest import start
from tests.storage.transfer.copies import append, everything, finish, make_states, make_study, rows

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a study that has something of everything."""
    return make_states(tmp_path_factory.mktemp("states"))[-1]


@pytest.fixture
def file(last: Path, tmp_path: Path) -> Path:
    path = tmp_path / "toy.gz"
    with open_store(f"sqlite:///{last}", write=False) as store:
        store.write_study("toy", path)
    return path


def lines_of(file: Path) -> Lines:
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]


def rewrite(file: Path, lines: Lines) -> None:
    """Write lines with the counts and the digest that they then have."""
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
    """A new table or column comes along by itself, or must be named here as one that stays."""
    travelling = {layout.table.name for layout in LAYOUTS.values()}
    staying = {"bss_claim", "bss_submission", "bss_worker"}
    assert {table.name for table in Base.metadata.sorted_tables} - travelling == staying
    for layout in LAYOUTS.values():
        names = {REFERENCES.get(column.name, column.name) for column in layout.table.columns}
        assert names - set(layout.fields) <= OWN


def test_the_same_study_makes_the_same_bytes_from_any_database(file: Path, last: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.gz"
    with open_store(f"sqlite:///{last}", write=False) as store:
        store.write_study("toy", again)
    assert again.read_bytes() == file.read_bytes()
    incoming = read_study(file)
    with open_store(f"sqlite:///{tmp_path}/other.db") as store, open_store(f"sqlite:///{last}") as source:
        start(store_with_another(store), "other")  # so that no id is what it was
        store.join_studies(incoming)
        store.write_study("toy", again)
        assert rows(store) == rows(source)
        assert [one.outcome for one in store.trials("toy")] == [one.outcome for one in source.trials("toy")]
    assert again.read_bytes() == file.read_bytes()
    incoming.close()


def store_with_another(store: Any) -> Any:
    make_study(store)
    store.rename_study("toy", "other")
    return store


def test_a_trial_that_runs_is_left_out_and_follows_once_it_has_ended(tmp_path: Path) -> None:
    early, late = tmp_path / "early.gz", tmp_path / "late.gz"
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("source", "target")]
    with open_store(urls[0]) as source, open_store(urls[1]) as target:
        make_study(source)
        start(source)
        append(source, 1, (0.0, 0.1))
        start(source)
        finish(source, 2)
        assert source.write_study("toy", early) == [1]
        append(source, 1, (2.0, 0.9), first=1)
        finish(source, 1)
        assert source.write_study("toy", late) == []
        for path, numbers in ((early, [2]), (late, [1, 2]), (early, [1, 2])):
            incoming = read_study(path)
            target.join_studies(incoming)
            incoming.close()
            assert [one.number for one in target.trials("toy")] == numbers
        assert len(target.observations("toy", 1)) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: lines[0]["header"].update(version=2), "was written by a newer bssearch"),
        (lambda lines: lines[0]["header"].update(schema="9999"), "was written by a newer bssearch"),
        (lambda lines: lines[0]["header"].update(format="x"), "line 1: it is no file of"),
        (lambda lines: lines[0]["header"].update(study="x"), "line 1: study = 'x' is not its row's"),
        (lambda lines: row(lines, "trial").update(batch_size="x"), "trial 1: batch_size = 'x' must be a whole number"),
        (lambda lines: row(lines, "trial").update(batch_size=True), "batch_size = True must be a whole number"),
        (lambda lines: row(lines, "trial").update(batch_size=10**30), "batch_size = 1000000"),
        (lambda lines: row(lines, "trial").update(batch_size=0), "trial 1 breaks the rule 'batch_size_positive'"),
        (lambda lines: row(lines, "trial").update(learning_rate=1e305), "learning_rate = 1e+305 must be 0 or between"),
        (lambda lines: row(lines, "trial").update(state="done"), "trial 1: state = 'done' must be one of queued"),
        (lambda lines: row(lines, "trial").update(state="running"), "trial 1 breaks the rule"),
        (lambda lines: row(lines, "trial").update(ended_at="then"), "trial 1: ended_at = 'then' must be a moment"),
        (lambda lines: row(lines, "trial").update(parameters={"a": []}), "trial 1: parameters = {'a': []} must hold"),
        (lambda lines: row(lines, "trial").update(environment="x"), "environment = 'x' is not there"),
        (lambda lines: row(lines, "trial").update(retry_of=99), "trial 1: what it refers to is not there before it"),
        (lambda lines: row(lines, "trial").update(number=2**62), "must have a number from 1 to"),
        (lambda lines: row(lines, "trial").update(surplus=1), "'surplus' is no column"),
        (lambda lines: row(lines, "trial").pop("seed"), "trial 1: seed is missing"),
        (lambda lines: row(lines, "trial", 1).update(number=1), "trial 1 is there twice"),
        (lambda lines: row(lines, "observation").update(trial=99), "what it refers to is not there before it"),
        (lambda lines: row(lines, "observation").update(metric=None), "metric = nothing must be there"),
        (lambda lines: row(lines, "study").update(spec_hash="x"), "spec_hash = 'x' is not its spec's"),
        (lambda lines: row(lines, "study")["spec"].update(name="x"), "the spec of study 'toy' is that of 'x'"),
        (lambda lines: row(lines, "environment").update(host="x"), "line 2: environment: digest = "),
        (lambda lines: row(lines, "spec").update(digest="x"), "spec: digest = 'x' is not that of its row"),
        (lambda lines: lines.insert(4, lines.pop(-2)), "a row of kind"),
        (lambda lines: lines.insert(2, {"x": {}}), "'x' is no kind of row"),
        (lambda lines: lines.insert(2, {"trial": []}), "must be an object"),
    ],
)
def test_a_row_that_no_study_has_is_named_with_its_line(
    file: Path, change: Callable[[Lines], object], said: str
) -> None:
    lines = lines_of(file)
    change(lines)
    rewrite(file, lines)
    assert said in refused(file)


def row(lines: Lines, kind: str, index: int = 0) -> dict[str, Any]:
    return [one[kind] for one in lines if kind in one][index]  # type: ignore[no-any-return]


def test_a_spec_that_this_version_cannot_read_is_a_spec_error(file: Path) -> None:
    lines = lines_of(file)
    row(lines, "study")["spec"]["new_field"] = 1
    rewrite(file, lines)
    assert "the spec of study 'toy' cannot be read: spec: unknown key" in refused(file, SpecError)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "9" * 400])
def test_no_number_without_bound_is_read(file: Path, value: str) -> None:
    text = gzip.decompress(file.read_bytes()).decode()
    file.write_bytes(gzip.compress(text.replace('"metric":0.1', f'"metric":{value}', 1).encode()))
    assert "it is no line of JSON" in refused(file)


def test_a_file_of_an_earlier_schema_may_lack_columns_that_have_a_default(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = lines_of(file)
    lines[0]["header"]["schema"] = "0010"
    for one in lines:
        if "trial" in one:
            del one["trial"]["further_test_metrics"], one["trial"]["warnings"]
        if "probe" in one:
            del one["probe"]["contended"]
    rewrite(file, lines)
    incoming = read_study(file)
    with open_store(f"sqlite:///{tmp_path}/target.db") as store:
        store.join_studies(incoming)
        outcome = store.trial("toy", 1).outcome
        assert outcome is not None and outcome.state is TrialState.REACHED
        assert outcome.warnings == () and outcome.further_test_metrics is None
    incoming.close()
    del row(lines, "trial")["seed"]
    rewrite(file, lines)
    assert "seed is missing" in refused(file)


def test_what_was_cut_off_or_changed_is_recognised(file: Path) -> None:
    content = file.read_bytes()
    text = gzip.decompress(content)
    for broken, said in (
        (content[: len(content) // 2], "the compressed file was cut off"),
        (content[:50] + b"x" + content[51:], "damaged"),
        (b"", "cut off"),
        (b"trial,seed\n1,0\n", "it is not compressed with gzip"),
        (content + b"x", "damaged"),
        (gzip.compress(text[: text.rindex(b'{"end"')]), "it ends without its last line"),
        (gzip.compress(text[:-1]), "the line has no end"),
        (gzip.compress(text.replace(b'"metric":0.1', b'"metric":0.2', 1)), "their SHA-256 is another one"),
        (gzip.compress(text + b"{}\n"), "something follows"),
        (gzip.compress(text.replace(b'"log":1,', b'"log":0,', 1)), "more rows of kind log"),
        (gzip.compress(text.replace(b'"log":1,', b'"log":2,', 1)), "not as many"),
        (gzip.compress(text.replace(b'"trial":4,', b'"trial":1' + b"0" * 20 + b",", 1)), "counts.trial"),
    ):
        file.write_bytes(broken)
        assert said in refused(file)


def test_a_file_that_is_not_there_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere.gz", NotFoundError)
    refused(tmp_path)


@pytest.mark.slow
def test_a_line_is_read_up_to_a_bound_only(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte of one line, in a megabyte of gzip."""
    with gzip.open(file, "wb", compresslevel=1) as bomb:
        for _ in range(256):
            bomb.write(b" " * 2**22)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert f"the line has more than {study_file.LONGEST_LINE:,} bytes" in refused(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 2**10


def test_what_cannot_be_written_leaves_the_file_that_was_there(
    file: Path, last: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = file.read_bytes()
    layout = LAYOUTS[Kind.VISIT]
    copy = tmp_path / "copy.db"
    shutil.copy(last, copy)
    with sqlite3.connect(copy) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute(f"UPDATE {layout.table.name} SET steps_timed = 'many'")
    connection.close()
    with open_store(f"sqlite:///{copy}", write=False) as store:
        with pytest.raises(BSSearchError, match=r"the study 'toy' cannot be used: visit .*steps_timed = 'many'"):
            store.write_study("toy", file)
        before = everything(store)
    assert file.read_bytes() == content
    assert before and [one.name for one in tmp_path.iterdir() if one.name.startswith(".bssearch")] == []


def test_a_file_of_a_schema_without_host_bound_shares_is_read_as_telling_none(file: Path, tmp_path: Path) -> None:
    lines = lines_of(file)
    lines[0]["header"]["schema"] = "0013"
    for one in lines:
        for kind in ("trial", "probe", "visit"):
            if kind in one:
                del one[kind]["host_bound_share"]
    rewrite(file, lines)
    incoming = read_study(file)
    with open_store(f"sqlite:///{tmp_path}/target.db") as store:
        store.join_studies(incoming)
        told = [one.outcome.host_bound_share for one in store.trials("toy") if one.outcome]
        told += [one.host_bound_share for one in store.visits("toy")]
        told += [one.host_bound_share for one in store.step_times("toy")]
        assert len(told) > 3 and set(told) == {None}
    incoming.close()
