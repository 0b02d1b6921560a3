"""Rows that something else has written: the first is named, and other studies are read as ever."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from bssearch.commands.across.answers import open_databases
from bssearch.errors import BSSearchError, DatabaseError
from bssearch.records import Configuration
from bssearch.records.text import LONGEST_TEXT
from bssearch.storage.models import MOST_SENTENCES
from bssearch.storage.repository import open_store
from tests.factories import make_curve, make_plan
from tests.schema import execute
from tests.storage.conftest import OUTCOME, add_study, begun, start


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two studies, each with a trial that has ended and one that runs."""
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
        (f"UPDATE bss_trial SET batch_size = -1 WHERE {TOY} AND number = 1", "trial 1: not batch_size > 0"),
        ("UPDATE bss_study SET target_goal = 'up' WHERE name = 'toy'", "study toy: target_goal = 'up'"),
        (
            "UPDATE bss_observation SET metric = 'good' WHERE trial_id = (SELECT min(id) FROM bss_trial)",
            "an evaluation of trial 1: metric = 'good'",
        ),
        ("UPDATE bss_environment SET host = x'07'", "environment 1: host = b'\\x07'"),
    ],
)
def test_the_first_row_that_bssearch_cannot_have_stored_is_named(file: Path, statement: str, said: str) -> None:
    execute(file, statement)
    with pytest.raises(DatabaseError) as caught, open_store(f"sqlite:///{file}", write=False) as store:
        store.studies.get("toy")
        store.trials.of("toy")
        store.trials.curves("toy", [1])
        raise ZeroDivisionError("what would come of it")
    assert str(caught.value).startswith(f"study 'toy' has an invalid row: {said}")
    assert "other studies" in str(caught.value.hint)


def test_a_command_on_several_databases_names_the_row_too(file: Path) -> None:
    execute(file, "UPDATE bss_study SET spec = '1' WHERE name = 'toy'")
    with pytest.raises(DatabaseError, match="study toy: spec = "), open_databases([f"sqlite:///{file}"]) as stores:
        stores[0].studies.all()


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("sampled", "1", "sampled = 1: a number; expected an object"),
        ("sampled", "'[1]'", "sampled = '[1]': a list; expected an object"),
        ("parameters", "'\"x\"'", "parameters = '\"x\"': a text; expected an object"),
        ("further_test_metrics", "'{\"a\": [1]}'", "'a' is a list; expected a boolean, number, text or null"),
        ("parameters", "(SELECT json_group_object('p' || value, 1) FROM many)", "100,000 keys; at most 1,000"),
        ("parameters", "json_object('p', printf('%.*c', 1000000, 'x'))", "'p' has 1,000,000 characters; at most "),
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
        pytest.raises(DatabaseError, match=f"study toy: spec = .*: more than {said}"),
        open_store(f"sqlite:///{file}", write=False) as store,
    ):
        store.studies.get("toy")


@pytest.mark.parametrize("column", ["reason", "traceback", "warnings", "started_by"])
def test_a_long_text_is_cut_when_it_is_read_and_when_it_is_stored(file: Path, column: str) -> None:
    execute(file, f"UPDATE bss_trial SET {column} = printf('%.*c', 1000000, 'x') WHERE {TOY} AND number = 1")
    with open_store(f"sqlite:///{file}") as store:
        found = store.trials.get("toy", 1)
        store.trials.save_log("toy", 1, "x" * 10**6)
        outcome = found.outcome
        assert outcome is not None
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
    with open_store(url) as store, pytest.raises(DatabaseError, match="1,001 keys; at most 1,000"):
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


def test_where_all_rows_are_ours_an_error_is_what_it_is(file: Path) -> None:
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


def test_a_parameter_that_is_no_single_value_is_named_where_it_does_harm(file: Path) -> None:
    execute(file, f"UPDATE bss_trial SET parameters = '{{\"x\":[1]}}' WHERE {TOY} AND number = 1")
    with (
        pytest.raises(DatabaseError, match=r"trial 1: parameters = '{\"x\":\[1\]}'"),
        open_store(f"sqlite:///{file}", write=False) as store,
    ):
        assert store.trials.of("toy")
        raise ValueError("an answer is made of single values")
