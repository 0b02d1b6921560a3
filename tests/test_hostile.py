"""Hostile input is refused in a sentence, never with a traceback."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bssearch import Launch, SpecError, UsageError, load_spec, run_study
from bssearch.exchange.importers.optuna_runs import import_optuna
from tests.factories import make_spec
from tests.hostile import (
    KINDS,
    LIBRARY_KINDS,
    Kind,
    OptunaDatabases,
    StoredRows,
    make_optuna_database,
    mutated,
    put,
    server_rows,
)
from tests.postgres import Postgres
from tests.search.law import LawExecutor

CASES = 100
"""Cases of each kind; ``tests/benchmarks/hostile_input.py`` tries ten thousand."""

LONGEST_S = 20.0
"""CPU seconds after which a case counts as hanging."""

LONGEST_WAIT_S = 120.0
"""Wall seconds after which a case counts as hanging, also on a loaded machine."""


def check(kind: Kind, seeds: range, folder: Path) -> None:
    for seed in seeds:
        began, computed = time.monotonic(), time.process_time()
        found = kind.fails(seed, folder)
        assert found is None, f"{kind.name}, seed {seed}: {type(found).__name__}: {found}"
        assert time.process_time() - computed < LONGEST_S, f"{kind.name}, seed {seed}"
        assert time.monotonic() - began < LONGEST_WAIT_S, f"{kind.name}, seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *LIBRARY_KINDS], ids=lambda kind: kind.name)
def test_changed_texts_are_taken_or_refused(kind: Kind, tmp_path: Path) -> None:
    check(kind, range(CASES), tmp_path)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredRows]:
    file = tmp_path_factory.mktemp("stored") / "study.db"
    spec = make_spec(budget={"trials": 10, "trial_train_seconds": 100.0}, confirm={"top": 2, "runs": 3})
    run_study(spec, Launch(db=f"sqlite:///{file}", make_executor=lambda *_: LawExecutor()))
    yield StoredRows(file, spec.name)


def test_changed_rows_are_read_or_named(rows: StoredRows, tmp_path: Path) -> None:
    check(Kind("rows", rows.attempt), range(5), tmp_path)


def test_changed_rows_of_a_server_are_read_or_named(rows: StoredRows, postgres: Postgres, tmp_path: Path) -> None:
    with server_rows(postgres, rows.database, rows.study) as found:
        check(Kind("rows", found.attempt), range(25), tmp_path)
        assert found.changed


@pytest.mark.parametrize("table", ["bss_trial", "bss_spec", "bss_finding", "bss_submission"])
def test_a_number_without_bound_on_a_server_is_named(
    rows: StoredRows, postgres: Postgres, tmp_path: Path, table: str
) -> None:
    columns = {"bss_trial": "parameters", "bss_spec": "spec", "bss_finding": "answer", "bss_submission": "values"}
    with server_rows(postgres, rows.database, rows.study) as found:
        found.try_one(tmp_path, table, columns[table], "'{\"a\": 1e999}'", one_row=True)
        assert found.changed


def test_a_binary_name_in_a_database_of_optuna_is_refused(tmp_path: Path) -> None:
    make_optuna_database(tmp_path / "optuna.db")
    put(tmp_path / "optuna.db", "trial_params", "param_name", "X'00ff'", one_row=True)
    with pytest.raises(UsageError, match="expected a string"):
        import_optuna(str(tmp_path / "optuna.db"), name="toy", metric="accuracy", target=0.9)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("reason", "repeat('x', 10000000)"),
        ("warnings", "repeat(chr(10) || 'w', 1000000)"),
        ("parameters", "(SELECT json_object_agg('p' || n, n) FROM generate_series(1, 100000) AS n)"),
        ("sampled", "json_build_object('p', repeat('x', 1000000))"),
    ],
)
def test_a_large_value_on_a_server_is_read_quickly(
    rows: StoredRows, postgres: Postgres, tmp_path: Path, column: str, value: str
) -> None:
    with server_rows(postgres, rows.database, rows.study) as found:
        found.try_one(tmp_path, "bss_trial", column, value, one_row=False)
        assert all(seconds < LONGEST_S for seconds in found.seconds)


def test_changed_databases_of_optuna_are_taken_or_refused(tmp_path: Path) -> None:
    make_optuna_database(tmp_path / "optuna.db")
    check(Kind("optuna databases", OptunaDatabases(tmp_path / "optuna.db").attempt), range(8), tmp_path)


def test_changed_templates_are_taken_or_refused(tmp_path: Path) -> None:
    check(next(kind for kind in KINDS if kind.name == "templates"), range(8), tmp_path)


def test_a_mutation_changes_a_text() -> None:
    text = "name: toy\n" * 20
    changed = {mutated(random.Random(seed), text) for seed in range(50)}
    assert len(changed) > 45
    assert len(changed - {text}) >= len(changed) - 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [" + "[" * 60 + "]" * 60 + "]", "more than 50 nested levels"),
        ("a: &a " + "[" * 30 + "]" * 30 + "\nb: " + "[" * 30 + "*a" + "]" * 30, "more than 50 nested levels"),
        (
            "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(
                f"{one}: &{one} [{', '.join([f'*{before}'] * 10)}]\n"
                for before, one in zip("abcde", "bcdef", strict=True)
            ),
            "more than 20,000 values",
        ),
        ("a: &a [*a]", "contains its own alias"),
        ("? [a, b]\n: 1", "a key must be a string"),
        ("a: !!int x", "'x' is not of type int"),
        ("a: !!python/object:os.system {}", "unknown tag"),
        ("a: 0x" + "f" * 20000, "has more than 1024 bits"),
        ("a: " + "9" * 5000, "is not of type int"),
        ('a: "\\ud800"', "is not valid Unicode"),
        ("schema_version: 1\nname: .nan", "name = nan must be a finite number"),
    ],
)
def test_a_hostile_spec_is_refused_with_its_bound(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    assert said in caught.value.message
    assert str(file) in caught.value.message


def test_a_file_that_is_too_large_for_a_spec_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text("a: 1\n" * 300_000)
    with pytest.raises(SpecError, match="has more than 1,048,576 bytes"):
        load_spec(file)
