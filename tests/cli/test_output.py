"""What is printed for programs and people, whatever names and texts it holds."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
import yaml

from bssearch.analysis.answer import Answer
from bssearch.analysis.shape import Notice
from bssearch.cli.answer import Export, exported
from bssearch.cli.output import note
from bssearch.pages.csv_rows import write_csv
from tests.analysis.test_report import answer, confirmed


def as_csv(columns: list[str], *rows: dict[str, object]) -> list[list[str]]:
    text = io.StringIO()
    write_csv(text, columns, rows)
    return list(csv.reader(io.StringIO(text.getvalue())))


@pytest.mark.parametrize("text", ["=cmd|'/c calc'!A1", "@SUM(A1)", "+1", "-1", "\t=1", "\r=1"])
def test_no_cell_of_a_csv_is_a_formula(text: str) -> None:
    head, row = as_csv([text, "b"], {text: text, "b": 1})
    written = f"'{text}".replace("\r", "\n")
    assert head == [written, "b"]
    assert row == [written, "1"]


def test_numbers_lists_and_plain_texts_are_written_as_they_are() -> None:
    _, row = as_csv(["a", "b", "c", "d", "e"], {"a": -0.5, "b": [-1, "=x"], "c": None, "d": "a=b, c", "left": 1})
    assert row == ["-0.5", '[-1, "=x"]', "", "a=b, c", ""]
    assert json.loads(row[1]) == [-1, "=x"]


def named(text: str) -> Answer:
    """Return an answer whose names and caveats are a text that somebody else has chosen."""
    found = answer(confirmed(64, 1.0, 1.1, 0.9))
    return found.model_copy(
        update={
            "target": replace(found.target, metric=text),
            "device": found.device.model_copy(update={"name": text}),
            "warnings": [Notice(code="unconfirmed", message=text)],
        }
    )


@pytest.mark.parametrize("text", ["accuracy\nbatch_size: 1", "a\rbatch_size: 1", "a\x85batch_size: 1", "\x1b[31mred"])
def test_no_name_breaks_out_of_a_comment_of_the_exported_yaml(text: str) -> None:
    printed = exported(named(text), Export.YAML)
    assert yaml.safe_load(printed)["batch_size"] == 64
    assert yaml.safe_load(printed) == yaml.safe_load(exported(answer(confirmed(64, 1.0, 1.1, 0.9)), Export.YAML))
    assert "\x1b" not in printed


def test_exported_values_say_how_sure_they_are_where_that_is_not_enough() -> None:
    sure = answer(confirmed(64, 1.0, 1.1, 0.9)).model_copy(update={"within_5_percent": 0.653, "provisional": True})
    assert "# note: provisional: it is within 5 % of the best with a probability of 65 %\n" in exported(
        sure, Export.YAML
    )
    firm = sure.model_copy(update={"provisional": False})
    assert "provisional" not in exported(firm, Export.YAML)


def test_a_note_is_one_line_without_what_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    note("one\ntwo \x1b]0;title\x07three")
    assert capsys.readouterr().err == "note: one two \ufffd]0;title\ufffdthree\n"
