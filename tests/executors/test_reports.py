"""The output of a program, parsed as reports: whole lines, pieces of lines, and other output."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace

import pytest

from bssearch.errors import UsageError
from bssearch.executors.programs import command
from bssearch.executors.programs.command import ReportedTrial
from bssearch.executors.programs.reports import LONGEST_LINE, LONGEST_LOG_LINE, LONGEST_NAME, Report, ReportReader
from bssearch.records import COULD_NOT_PAUSE, Goal, Observation, SecondsBasis, Target, TrialRequest, TrialState
from tests.executors.line_workload import request_trial
from tests.factories import changed

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
        ({**COLUMNS, "step": r"^(\d+)"}, b"5 128 0.5\n", "or the expression match the text after"),
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


# Reported trials ------------------------------------------------------------------------------------------------------


REQUEST = replace(request_trial(1, seconds=10.0), target=Target(metric="accuracy", value=0.9))


class Told:
    """A trial with its observations; reports come after its start at 100 s."""

    def __init__(self, request: TrialRequest = REQUEST, *, needs_samples: bool = False) -> None:
        self.observed: list[Observation] = []
        self.trial = ReportedTrial(request, self.observed.append, 100.0, needs_samples=needs_samples)

    def takes(self, at: float, step: int, seconds: float | None = None, **values: float) -> Told:
        self.trial.take(Report(step, values, seconds), 100.0 + at)
        return self

    @property
    def curve(self) -> list[tuple[int, float, float]]:
        return [(one.step, one.train_seconds, one.metric) for one in self.observed]

    @property
    def state(self) -> TrialState | None:
        return None if self.trial.ending is None else self.trial.ending.state


def test_seconds_of_the_program_are_those_that_count() -> None:
    told = Told().takes(5.0, 10, 1.0, accuracy=0.5).takes(50.0, 20, 2.0, accuracy=0.95, loss=0.25)
    assert told.curve == [(10, 1.0, 0.5), (20, 2.0, 0.95)] and told.observed[1].loss == 0.25
    outcome = told.trial.outcome()
    assert (outcome.state, outcome.seconds_basis) == (TrialState.REACHED, SecondsBasis.REPORTED)
    assert outcome.time_to_target_s == pytest.approx(1.0 + 0.4 / 0.45)
    assert outcome.samples == 20 * REQUEST.plan.configuration.batch_size


def test_samples_of_the_program_are_those_that_count_and_others_are_assumed() -> None:
    size = REQUEST.plan.configuration.batch_size
    told = Told().takes(5.0, 10, samples=7.0, accuracy=0.5).takes(6.0, 20, accuracy=0.6).takes(7.0, 30, accuracy=0.7)
    assert [one.samples for one in told.observed] == [7, 7 + 10 * size, 7 + 20 * size]
    for samples in (6.0, math.nan, 7 + 20 * size + 0.5):
        with pytest.raises(UsageError, match="samples at step 40"):
            told.takes(8.0, 40, samples=samples, accuracy=0.5)
    assert told.trial.failed(TrialState.FAILED, "as the test has it").samples == 7 + 20 * size


@pytest.mark.parametrize(("needs", "warnings"), [({}, 1), ({"samples": 30.0}, 0)])
def test_a_study_about_samples_warns_of_a_program_that_does_not_report_them(
    needs: dict[str, float], warnings: int
) -> None:
    told = Told(needs_samples=True).takes(5.0, 10, 1.0, accuracy=0.95, **needs)
    assert len([one for one in told.trial.outcome().warnings if "samples_to_target" in one]) == warnings
    assert not Told().takes(5.0, 10, 1.0, accuracy=0.95).trial.outcome().warnings


@pytest.mark.parametrize("micro_batch_size", [8, 32])
def test_gradient_norms_in_reports_near_the_target_tell_the_noise_scale(micro_batch_size: int) -> None:
    split = replace(
        REQUEST.plan.configuration,
        batch_size=32,
        micro_batch_size=micro_batch_size,
        accumulation_steps=32 // micro_batch_size,
    )
    told = Told(changed(REQUEST, configuration=split, train_seconds_limit=99.0))
    norms = {"micro_gradient_norm": (1 + 40 / 8) ** 0.5, "gradient_norm": (1 + 40 / 32) ** 0.5}
    for step in range(20):
        told.takes(step, step, float(step), accuracy=0.89 if step else 0.1, **norms)
    told.trial.left(0)
    noise = told.trial.outcome().noise
    if micro_batch_size == 8:
        assert noise.passes == 19 and noise.scale == pytest.approx(40)
    else:
        assert noise.passes is None


def test_the_wall_clock_begins_with_step_0() -> None:
    told = Told().takes(5.0, 0, accuracy=0.1).takes(6.5, 10, accuracy=0.5)
    assert told.curve == [(0, 0.0, 0.1), (10, 1.5, 0.5)]
    states = []
    for now in (110.0, 115.5):
        told.trial.look(None, now)
        states.append(told.state)
    assert states == [None, TrialState.EXHAUSTED]
    assert told.trial.outcome().seconds_basis is SecondsBasis.WALL


def test_steps_before_the_first_report_count_at_the_pace_of_those_after_it() -> None:
    told = Told().takes(5.0, 10, accuracy=0.5)
    assert told.curve == []
    told.takes(7.0, 30, accuracy=0.6)
    assert [one.step for one in told.observed] == [10, 30]
    assert [one.train_seconds for one in told.observed] == pytest.approx([1.0, 3.0])


def test_a_lone_report_counts_by_the_time_since_the_start() -> None:
    told = Told().takes(5.0, 10, accuracy=0.95)
    told.trial.left(1)
    assert told.curve == [(10, 5.0, 0.95)]
    assert told.state is TrialState.REACHED, "whatever the program did after it"


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([(1, 10, None), (2, 10, None)], "step 10 after step 10: steps must rise"),
        ([(1, 10, 1.0), (2, 5, 2.0)], "step 5 after step 10"),
        ([(1, 0, None), (2, 10, 1.0)], "seconds only sometimes: step 10"),
        ([(1, 0, 0.0), (2, 10, None)], "seconds only sometimes: step 10"),
        ([(1, 10, 2.0), (2, 20, 1.5)], "1.5 seconds after 2"),
    ],
)
def test_what_runs_backwards_or_comes_at_times_is_refused(
    reports: list[tuple[float, int, float | None]], said: str
) -> None:
    told = Told().takes(*reports[0], accuracy=0.1)
    with pytest.raises(UsageError, match=said) as caught:
        told.takes(*reports[1], accuracy=0.2)
    outcome = told.trial.failed(TrialState.FAILED, caught.value.message)
    assert (outcome.state, outcome.steps, outcome.final_metric) == (TrialState.FAILED, reports[0][1], 0.1)
    assert outcome.last_miss_step == reports[0][1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"accuracy": math.nan}, "accuracy = nan is not finite"),
        ({"accuracy": 1e200}, "accuracy = 1e+200 is beyond 1e+100"),
        ({"accuracy": 0.99, "loss": math.inf}, "the loss = inf is not finite"),
        ({"loss": math.nan}, "the loss = nan is not finite"),
    ],
)
def test_what_is_no_number_diverges(values: dict[str, float], said: str) -> None:
    told = Told().takes(1.0, 0, accuracy=0.1).takes(2.0, 10, **values)
    assert told.trial.ending is not None and told.state is TrialState.DIVERGED
    assert told.trial.ending.reason.startswith(f"{said}: batch size 8, learning rate 0.05, step 10")
    assert len(told.observed) == 1


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_metric_at_times_is_observed_at_those_and_the_limit_counts_at_all(told: Told) -> None:
    for step, values in ((0, {"accuracy": 0.1}), (10, {"loss": 2.0}), (20, {"accuracy": 0.3}), (30, {"loss": 1.0})):
        told.takes(step / 10, step, step / 10, **values)
    assert [step for step, *_ in told.curve] == [0, 20]
    told.takes(4.0, 40, 10.5, loss=0.5)
    outcome = told.trial.outcome()
    assert (outcome.state, outcome.steps, outcome.train_seconds) == (TrialState.EXHAUSTED, 40, 10.5)
    assert (outcome.last_miss_step, outcome.last_miss_seconds) == (20, 2.0)


def test_a_trial_that_trains_on_keeps_where_it_crossed() -> None:
    told = Told(changed(REQUEST, stop_at_target=False))
    for step, accuracy in ((0, 0.1), (10, 0.95), (20, 0.97)):
        told.takes(step, step, step / 10, accuracy=accuracy)
    told.trial.left(0)
    outcome = told.trial.outcome()
    assert (outcome.state, outcome.first_hit_step, outcome.best_metric) == (TrialState.REACHED, 10, 0.97)


@pytest.mark.parametrize(("code", "state"), [(0, TrialState.EXHAUSTED), (1, None)])
def test_a_program_that_leaves_has_an_end_by_what_it_said(code: int, state: TrialState | None) -> None:
    """The exit code decides the end of a failed program."""
    told, silent = Told(), Told()
    told.takes(1.0, 10, 1.0, accuracy=0.5)
    told.trial.left(code)
    assert told.state is state
    silent.takes(1.0, 10, 1.0, loss=0.5)
    with pytest.raises(UsageError, match="without a report of accuracy"):
        silent.trial.left(0)


@pytest.mark.parametrize(
    ("asked", "state"), [(TrialState.CANCELLED, TrialState.CANCELLED), (TrialState.PAUSED, TrialState.PRUNED)]
)
def test_a_stop_is_one_and_a_pause_becomes_one(asked: TrialState, state: TrialState) -> None:
    told = Told().takes(1.0, 0, accuracy=0.1)
    told.trial.look((asked, "asked"), 102.0)
    outcome = told.trial.outcome()
    told.takes(3.0, 10, accuracy=0.99)
    assert len(told.observed) == 1, "what comes later is passed over"
    assert outcome.state is state
    assert (COULD_NOT_PAUSE in outcome.reason) is (asked is TrialState.PAUSED)


def test_reports_in_bursts_make_the_wall_clock_coarse_and_are_told() -> None:
    steady, bursts, own = Told(), Told(), Told()
    for index in range(12):
        steady.takes(1.0 + 0.1 * index, index, accuracy=0.1)
        bursts.takes(1.0 + 0.8 * (index // 6) + 1e-5 * index, index, accuracy=0.1)
        own.takes(1.0 + 0.8 * (index // 6) + 1e-5 * index, index, 0.1 * index, accuracy=0.1)
    for told in (steady, bursts, own):
        told.trial.left(0)
    assert steady.trial.outcome().warnings == own.trial.outcome().warnings == ()
    (warning,) = bursts.trial.outcome().warnings
    assert "came in bursts up to 0.8 s apart" in warning


def test_evaluations_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MOST_OBSERVATIONS", 3)
    told = Told()
    for step in range(3):
        told.takes(step, step, accuracy=0.1)
    with pytest.raises(UsageError, match="accuracy more than 3 times") as caught:
        told.takes(4.0, 4, accuracy=0.1)
    assert caught.value.hint is not None and "{evaluate_every}" in caught.value.hint


def test_steps_that_took_no_time_are_refused() -> None:
    told = Told().takes(0.0, 0, 0.0, accuracy=0.1)
    with pytest.raises(UsageError, match="0 seconds of training after step 5"):
        told.takes(1.0, 5, 0.0, accuracy=0.5)


@pytest.mark.parametrize(("wall", "is_refused"), [(0.5, True), (0.01, False)], ids=["of an epoch", "of a coarse clock"])
def test_seconds_that_stand_still_are_of_an_epoch(wall: float, is_refused: bool, told: Told) -> None:
    for number in range(1, 6):
        told.takes(wall * number, 10 * number, 0.4, accuracy=0.5)
    if is_refused:
        with pytest.raises(UsageError, match=r"0\.4 seconds in 6 reports, up to step 60"):
            told.takes(wall * 6, 60, 0.4, accuracy=0.95)
    else:
        assert told.takes(wall * 6, 60, 0.4, accuracy=0.95).state is TrialState.REACHED


@pytest.mark.parametrize(("seconds", "warns"), [(9.0, False), (250.0, True)])
def test_more_seconds_than_have_passed_are_warned_of(
    seconds: float, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 109.5)
    told = Told(changed(REQUEST, train_seconds_limit=1e3))
    told.takes(1.0, 10, 1.0, accuracy=0.5).takes(9.5, 20, seconds, accuracy=0.95)
    assert any("milliseconds" in one for one in told.trial.outcome().warnings) is warns


@pytest.mark.parametrize(
    ("target", "metric", "is_refused"),
    [
        (Target(metric="accuracy", value=0.9), 52.0, True),
        (Target(metric="accuracy", value=0.9), 0.95, False),
        (Target(metric="error", value=5.0, goal=Goal.MINIMIZE), 0.48, True),
        (Target(metric="loss", value=5.0, goal=Goal.MINIMIZE), 0.48, False),
        (Target(metric="score", value=0.9), 152.0, False),
    ],
)
def test_a_first_evaluation_that_is_met_in_another_unit_is_refused(
    target: Target, metric: float, is_refused: bool
) -> None:
    told = Told(replace(REQUEST, target=target))
    if is_refused:
        with pytest.raises(UsageError, match="in percent"):
            told.takes(1.0, 10, 1.0, **{target.metric: metric})
    else:
        assert told.takes(1.0, 10, 1.0, **{target.metric: metric}).state is TrialState.REACHED


@pytest.mark.parametrize(("epochs", "warns"), [((1, 2, 3), True), ((1, 1, 2), False)])
def test_steps_that_are_the_epochs_are_warned_of(epochs: tuple[int, ...], warns: bool, told: Told) -> None:
    for step, epoch in enumerate(epochs, start=1):
        told.takes(float(step), step, accuracy=0.95 if step == 3 else 0.5, epoch=epoch)
    assert any("step and epoch are the same" in one for one in told.trial.outcome().warnings) is warns
