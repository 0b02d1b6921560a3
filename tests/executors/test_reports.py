"""The output of a program, parsed as reports: whole lines, pieces of lines, and other output."""

import json
import math
import tracemalloc
from collections.abc import Mapping

import pytest

from bssearch.errors import UsageError
from bssearch.executors.programs.reports import LONGEST_LINE, LONGEST_LOG_LINE, LONGEST_NAME, Report, ReportReader

LOG = {"step": r"step (\d+)", "accuracy": r"acc=(\S+)", "seconds": r"after ([0-9.]+) s"}


def read(*chunks: bytes, expressions: Mapping[str, str] | None = None) -> list[Report]:
    reader = ReportReader(expressions or {}, "accuracy")
    return [report for chunk in chunks for report in reader.feed(chunk)]


def refused(*chunks: bytes, expressions: Mapping[str, str] | None = None) -> str:
    """Return the message of the error that reading raises."""
    with pytest.raises(UsageError) as caught:
        read(*chunks, expressions=expressions)
    return str(caught.value)


def test_a_json_line_is_a_report_and_other_lines_are_none() -> None:
    said = b'{"step": 100, "accuracy": 0.91, "seconds": 3.2, "loss": "0.4", "note": "x", "best": true, "l": [1]}\n'
    assert read(b"epoch 1\n", b"  " + said, b'[1]\n"step"\n{"accuracy": 1}\n') == [
        Report(100, {"accuracy": 0.91, "loss": 0.4}, 3.2)
    ]


def test_lines_come_in_any_pieces_and_end_with_any_end() -> None:
    said = b'{"step": 1, "a": 1}\n{"step": 2, "a": 2}\r\n{"step": 3, "a": 3}\r50%\r{"step": 4, "a": 4}\n{"step": 5}'
    whole = read(said)
    assert [report.step for report in whole] == [1, 2, 3, 4], "the last line has no end yet"
    assert read(*(bytes([one]) for one in said)) == whole


def test_what_several_expressions_find_is_one_report_when_the_step_comes() -> None:
    lines = b"acc=0.5\nacc=0.6 after 1.5 s\nnothing\nloss=1 step 10\nstep 20 acc=nan\nstep 30\n"
    first, second, third = read(lines, expressions=LOG)
    assert first == Report(10, {"accuracy": 0.6}, 1.5)
    assert second.step == 20 and math.isnan(second.values["accuracy"])
    assert third == Report(30, {})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ('"step": -1', "step -1: a step must be a whole number from 0 to"),
        ('"step": 1.5', "step 1.5: a step must be"),
        ('"step": 1e300', "step 1e+300: a step must be"),
        ('"step": NaN', "step nan: a step must be"),
        ('"step": ' + "9" * 4000, "step inf: a step must be"),
        ('"step": 1, "seconds": -0.5', "-0.5 seconds: seconds must be from 0 to"),
        ('"step": 1, "seconds": Infinity', "inf seconds: seconds must"),
        ('"step": 1, "seconds": NaN', "nan seconds: seconds must"),
    ],
)
def test_a_step_and_seconds_out_of_bounds_are_refused_with_value_and_bound(fields: str, said: str) -> None:
    assert said in refused(b"{" + fields.encode() + b"}\n")


@pytest.mark.parametrize(
    "line",
    [
        b'{"a":' * 12_000,
        b'{"history": [' + b'{"step": 1}, ' * LONGEST_LINE,
        b"{'step': 3, 'accuracy': 0.5}",
        b'{"step 4',
        b'INFO {"step": 3, "accuracy": 0.5}',
        b"x" * LONGEST_LINE + b'{"step": 3}',
        b"\x80" * 1000,
    ],
)
def test_a_line_that_is_no_report_is_passed_over_and_the_next_line_is_read(line: bytes) -> None:
    assert read(line + b'\n{"step": 7}\n') == [Report(7, {})]


NUMBERS = [("1,000", 1000), ("12,345,678", 12_345_678), ("1_000", 1000), ("+1,000.0", 1000), ("1e3", 1000)]


@pytest.mark.parametrize(("text", "step"), NUMBERS)
def test_a_step_with_a_separator_between_thousands_is_read(text: str, step: int) -> None:
    assert read(f"step={text} acc=0.5\n".encode(), expressions=WORDS) == [Report(step, {"accuracy": 0.5})]
    assert read(json.dumps({"step": text, "accuracy": 0.5}).encode() + b"\n") == [Report(step, {"accuracy": 0.5})]


@pytest.mark.parametrize(("text", "value"), [("1,234.5", 1234.5), ("-1,234,567", -1_234_567), ("1_0.5", 10.5)])
def test_another_value_with_a_separator_is_read_if_it_has_one_meaning(text: str, value: float) -> None:
    assert read(f"acc={text} step 3\n".encode(), expressions=LOG) == [Report(3, {"accuracy": value})]


NO_NUMBERS = ["1,0x0", "10,00", "1,00,000", "0,950", "0,95", "1,000,00", "12,3", ",100", "1 000", "1.000,5", "", "9k"]


@pytest.mark.parametrize("text", [*NO_NUMBERS, "91%", "None", "0x10", "1\u202f000"])
@pytest.mark.parametrize("name", ["step", "accuracy", "seconds", "lr"])
def test_what_an_expression_finds_that_is_no_number_is_refused_by_name_also_later(name: str, text: str) -> None:
    expressions = {one: rf"{one}=([^;]*);" for one in ("step", "accuracy", "seconds", "lr")}
    lines = [{"step": step, "accuracy": 0.5, "seconds": step, "lr": 0.1} for step in (1, 2)]
    good, bad = ("".join(f"{one}={value};" for one, value in fields.items()) + "\n" for fields in lines)
    reader = ReportReader(expressions, "accuracy")
    assert [report.step for report in reader.feed(good.encode())] == [1]
    value = lines[1][name]
    with pytest.raises(UsageError) as caught:
        list(reader.feed(bad.replace(f"{name}={value};", f"{name}={text};").encode()))
    assert caught.value.message.startswith(f"report.{name} found {text!r}, not a number")


@pytest.mark.parametrize("value", ["1,234", "999,999"])
def test_a_comma_that_may_be_of_thousands_or_a_decimal_one_is_refused_except_in_a_step(value: str) -> None:
    assert f"report.accuracy found '{value}'" in refused(f"acc={value} step 3\n".encode(), expressions=LOG)
    assert "accuracy" in refused(json.dumps({"step": 3, "accuracy": value}).encode() + b"\n")


CUT = {"step": r"step=(\d+)", "accuracy": r"acc=([\d.]+)"}
WORDS = {"step": r"step=(\S+)", "accuracy": r"acc=(\S+)"}
COLUMNS = {"step": r"^(\d+) ", "accuracy": r"(\S+)$"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("step=1,000 acc=0.5", "report.step found '1'"),
        ("step=12,000,000 acc=0.5", "report.step found '12'"),
        ("step=1_000 acc=0.5", "report.step found '1'"),
        ("step=12k acc=0.5", "report.step found '12'"),
        ("step=1.2k acc=0.5", "report.step found '1'"),
        ("step=10 acc=1e-05", "report.accuracy found '1'"),
        ("step=10 acc=1,234.5", "report.accuracy found '1'"),
        ("step=10 000 acc=0.5", "report.step found '10'"),
        ("step=10'000 acc=0.5", "report.step found '10'"),
        ("step=10.000 acc=0.5", "report.step found '10'"),
        ("step=10\u202f000 acc=0.5", "report.step found '10'"),
    ],
)
def test_an_expression_that_takes_the_beginning_of_a_number_is_refused(line: str, found: str) -> None:
    assert found in refused(line.encode() + b"\n", expressions=CUT)


FORMS = {
    "step": r"(?:step|iter)[ =](\d+) ",
    "accuracy": r"acc=(?P<value>0\.\d+)(?=[%;])",
    "loss": r"loss[(]([\d.]+)[)]",
}


@pytest.mark.parametrize(
    ("line", "report"),
    [
        ("step=1,000 acc=0.5;", Report(1000, {"accuracy": 0.5})),
        ("iter 12\u202f500 acc=0.5;", None),
        ("step=1.2k acc=0.5;", None),
        ("step=1e3 acc=1.0000;", Report(1000, {"accuracy": 1.0})),
        ("step=990 acc=9.5e-05%", Report(990, {"accuracy": 9.5e-05})),
        ("step=990 loss(-0.25)", Report(990, {"loss": -0.25})),
        ("step=990 loss(Infinity)", Report(990, {"loss": math.inf})),
        ("step=990 loss(0,25)", None),
        ("step=990 acc=n/a;", Report(990, {})),
        ("step=one acc=0.5;", "later"),
        ("7.5 seconds", "later"),
    ],
)
def test_a_number_of_another_form_than_an_expression_takes_is_read_or_refused(
    line: str, report: Report | str | None
) -> None:
    reader = ReportReader(FORMS, "accuracy")
    assert list(reader.feed(b"step=980 acc=0.5; loss(0.5)\n")) == [Report(980, {"accuracy": 0.5, "loss": 0.5})]
    if report is None:
        with pytest.raises(UsageError, match="not a number"):
            list(reader.feed(line.encode() + b"\n"))
    else:
        assert list(reader.feed(line.encode() + b"\n")) == [report] * (report != "later")


@pytest.mark.parametrize("text", [r"^(\d+) ", r"step ((?:\d+,)*\d+)$", r"[(\]](\d+)", r"step (\d+)(?! )"])
def test_an_expression_that_matches_finds_what_it_names(text: str) -> None:
    said = {r"^": "5 0.5", r"[": "step ]5"}.get(text[0], "step 5")
    assert read(f"{said}\n1.5 y\n".encode(), expressions={"step": text}) == [Report(5, {})]


@pytest.mark.parametrize(
    ("expressions", "line", "said"),
    [
        (WORDS, b"step=10.000 acc=0.5\n", "may be 10 or 10000"),
        ({**COLUMNS, "step": r"^(\d+)"}, b"5 128 0.5\n", "the expression must match the text after"),
        ({"step": r"step=(\d+)?"}, b"step= acc=1\n", "report.step: the group is empty"),
    ],
    ids=["dots in a step", "no end of a column", "a group without a match"],
)
def test_an_ambiguous_number_is_refused(expressions: dict[str, str], line: bytes, said: str) -> None:
    assert said in refused(line, expressions=expressions)


@pytest.mark.parametrize(
    ("expressions", "line", "report"),
    [
        (COLUMNS, b"5 128 0.5\n", Report(5, {"accuracy": 0.5})),
        ({"step": r"^(\d+),", "accuracy": r",([\d.]+)$"}, b"980,100,0.5\n", Report(980, {"accuracy": 0.5})),
        (
            {"step": r"step (\d+)", "accuracy": r"acc ([\d.]+)", "seconds": r"in ([\d.]+)"},
            b"step 980, 100 images, acc 91.5% in 12.5ms\n",
            Report(980, {"accuracy": 91.5}, 12.5),
        ),
        ({}, b'{"step": 2, "accuracy": null, "seconds": null, "loss": 1.0}\n', Report(2, {"loss": 1.0})),
    ],
    ids=["columns", "commas", "units", "null"],
)
def test_a_number_in_its_place_is_read(expressions: dict[str, str], line: bytes, report: Report) -> None:
    assert read(line, expressions=expressions) == [report]


@pytest.mark.parametrize("value", ['"1,0x0"', '"0,95"', '""', "true", "[1]", '{"mean": 1}'])
@pytest.mark.parametrize("name", ["step", "accuracy", "seconds", "loss"])
def test_a_json_value_that_is_no_number_is_refused_by_name_also_later(name: str, value: str) -> None:
    fields = {"step": "2", "accuracy": "0.5", "seconds": "2.0", "loss": "1.0"} | {name: value}
    line = ", ".join(f'"{one}": {text}' for one, text in fields.items())
    reader = ReportReader({}, "accuracy")
    assert [report.step for report in reader.feed(b'{"step": 1, "accuracy": 0.5}\n')] == [1]
    with pytest.raises(UsageError) as caught:
        list(reader.feed(f"{{{line}}}\n".encode()))
    assert f"{name} = " in caught.value.message and "not a number" in caught.value.message


def test_a_step_of_null_is_refused() -> None:
    assert "step = null" in refused(b'{"step": null, "accuracy": 0.5}\n')


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '"nan"', "1" + "0" * 400])
def test_a_metric_that_is_not_finite_is_a_report(value: str) -> None:
    (report,) = read(f'{{"step": 1, "accuracy": {value}}}\n'.encode())
    assert not math.isfinite(report.values["accuracy"])


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 1,000, "accuracy": 0.5}',
        b'{"accuracy": 0.5, "step": 1,000}',
        b'{"step": 3, "accuracy": nan}',
        b'{"step": 3, "accuracy": 0,95}',
        b'{"step": 3, "accuracy": 0.5',
        b'{"step": 3}{"step": 4}',
        b'{"step": 3, \x00\xff\xfe',
        b'{"step":' + b"[" * 60_000,
        b'{"step": ' + b"9" * 5000 + b"}",
        b'{"step": 3, "pad": "' + b"x" * LONGEST_LINE + b'"}',
    ],
)
def test_a_json_line_with_a_step_that_cannot_be_read_is_refused(line: bytes) -> None:
    message = refused(b'{"step": 1}\n' + line + b"\n")
    assert "step" in message and len(message) < 500
    assert refused(*(bytes([one]) for one in line + b"\n")) == message, "in pieces"


def test_a_report_on_the_line_of_a_progress_bar_is_read() -> None:
    said = b'{"step": 1}\n\r 10%|# | 1/10\r 20%|## | 2/10{"step": 2}\n\r 30%|### | 3/10{"step": 3}\r\n'
    assert [report.step for report in read(said)] == [1, 2, 3]
    assert "'1k'" in refused(b'\r 20%|## | 2/10{"step": "1k"}\n').replace('"', "'")


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


@pytest.mark.parametrize("pieces", [1, 1000])
def test_a_line_too_long_for_expressions_is_refused_if_one_matches_at_its_beginning(pieces: int) -> None:
    long = b"step 1 acc=0.5 " + b"x" * LONGEST_LOG_LINE + b"\n"
    chunks = [long[at : at + len(long) // pieces + 1] for at in range(0, len(long), len(long) // pieces + 1)]
    assert f"more than {LONGEST_LOG_LINE} bytes" in refused(*chunks, expressions=LOG)
    reader = ReportReader(LOG)
    assert [report.step for report in reader.feed(b"x" * len(long) + b"\nstep 2\n")] == [2]


KERAS = b"step 7 - loss: 0.3 - accuracy: 0.91 - val_loss: 0.4 - val_accuracy: 0.85\n"


def test_an_expression_that_also_matches_another_number_of_the_line_is_refused() -> None:
    step = r"step (\d+)"
    said = refused(KERAS, expressions={"step": step, "accuracy": r"accuracy: (\S+)"})
    assert "'accuracy: 0.91'" in said and "'accuracy: 0.85'" in said
    for expression in (r"val_accuracy: (\S+)", r" accuracy: (\S+)", r".*accuracy: (\S+)"):
        (report,) = read(KERAS, expressions={"step": step, "accuracy": expression, "loss": r"loss: (\S+)"})
        assert report.values["accuracy"] in {0.91, 0.85} and report.values["loss"] == 0.3
    (report,) = read(
        b"step 7 accuracy: 0.9 (best accuracy: 0.9)\n", expressions={"step": step, "accuracy": r"cy: (\S+) "}
    )
    assert report.values["accuracy"] == 0.9
