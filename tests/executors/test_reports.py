"""What a program prints, read as reports: whole lines, in pieces, and all that is none."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Mapping

import pytest

from bssearch.errors import UsageError
from bssearch.executors.programs.reports import LONGEST_LINE, LONGEST_LOG_LINE, LONGEST_NAME, Report, ReportReader

LOG = {"step": r"step (\d+)", "accuracy": r"acc=(\S+)", "seconds": r"after ([0-9.]+) s"}


def read(*chunks: bytes, expressions: Mapping[str, str] | None = None) -> list[Report]:
    reader = ReportReader(expressions or {})
    return [report for chunk in chunks for report in reader.feed(chunk)]


def test_a_json_line_is_a_report_and_other_lines_are_none() -> None:
    said = b'{"step": 100, "accuracy": 0.91, "seconds": 3.2, "loss": "0.4", "note": "x", "best": true, "l": [1]}\n'
    assert read(b"epoch 1\n", b"  " + said, b'{"step": "first"}\n[1]\n{"step": 5\n"step"\n{"accuracy": 1}\n') == [
        Report(100, {"accuracy": 0.91, "loss": 0.4}, 3.2)
    ]


def test_lines_come_in_any_pieces_and_end_with_any_end() -> None:
    said = b'{"step": 1, "a": 1}\n{"step": 2, "a": 2}\r\n{"step": 3, "a": 3}\r50%\r{"step": 4, "a": 4}\n{"step": 5}'
    whole = read(said)
    assert [report.step for report in whole] == [1, 2, 3, 4], "the last line has no end yet"
    assert read(*(bytes([one]) for one in said)) == whole


def test_what_several_expressions_find_is_one_report_when_the_step_comes() -> None:
    lines = b"acc=0.5\nacc=0.6 after 1.5 s\nnothing\nloss=1 step 10\nstep 20 acc=nan\nacc=none step 30\n"
    first, second, third = read(lines, expressions=LOG)
    assert first == Report(10, {"accuracy": 0.6}, 1.5)
    assert second.step == 20 and math.isnan(second.values["accuracy"])
    assert third == Report(30, {})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ('"step": -1', "step -1: a step is a whole number from 0 to"),
        ('"step": 1.5', "step 1.5: a step is"),
        ('"step": 1e300', "step 1e+300: a step is"),
        ('"step": NaN', "step nan: a step is"),
        ('"step": ' + "9" * 4000, "step inf: a step is"),
        ('"step": 1, "seconds": -0.5', "-0.5 seconds: they must be from 0 to"),
        ('"step": 1, "seconds": Infinity', "inf seconds: they must"),
        ('"step": 1, "seconds": NaN', "nan seconds: they must"),
    ],
)
def test_a_step_and_seconds_out_of_bounds_are_refused_with_value_and_bound(fields: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(b"{" + fields.encode() + b"}\n")
    assert said in caught.value.message


@pytest.mark.parametrize(
    "line",
    [
        b'{"a":' * 12_000,
        b'{"step":' + b"[" * 60_000,
        b'{"step": ' + b"9" * 5000 + b"}",
        b'{"step": 1, \x00\xff\xfe',
        b'{"step": 1, "pad": "' + b"x" * LONGEST_LINE + b'"}',
        b"\x80" * 1000,
    ],
)
def test_what_cannot_be_read_is_passed_over_and_the_next_line_is_read(line: bytes) -> None:
    assert read(line + b'\n{"step": 7}\n') == [Report(7, {})]


def test_names_that_nobody_can_print_are_passed_over() -> None:
    names = ["fine", "x" * (LONGEST_NAME + 1), "\x1b[31m", "\ud800", "a\nb"]
    assert read(json.dumps({"step": 1} | dict.fromkeys(names, 0.5)).encode() + b"\n") == [Report(1, {"fine": 0.5})]


def test_a_stream_without_the_end_of_a_line_takes_no_memory() -> None:
    reader, chunk = ReportReader({}), b"x" * LONGEST_LINE
    tracemalloc.start()
    try:
        for _ in range(1000):
            assert not list(reader.feed(chunk))
        assert tracemalloc.get_traced_memory()[1] < 8 * LONGEST_LINE
    finally:
        tracemalloc.stop()
    assert list(reader.feed(b'\n{"step": 1}\n')) == [Report(1, {})]


def test_a_log_has_shorter_lines_than_json_for_expressions_take_the_square_of_them() -> None:
    long = b"x" * (LONGEST_LOG_LINE - 10) + b" step 1\n"
    assert [report.step for report in read(long, expressions=LOG)] == [1]
    assert read(b"x" * 10 + long, expressions=LOG) == []
