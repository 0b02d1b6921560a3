"""What the commands show of a trial, of a study that runs, and how the process ends."""

from __future__ import annotations

import atexit
import gc
import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from bssearch.cli import app as application
from bssearch.cli import query as trial_commands
from bssearch.commands.display import Display, Lines, batch_table, ended_line
from bssearch.commands.trials import trial_document
from bssearch.errors import NotFoundError, UsageError
from bssearch.history import History
from bssearch.records import Phase, TrialRecord, TrialState
from tests.factories import make_curve, make_environment, make_probe, make_spec, make_trial

SPEC = make_spec(budget={"trials": 20, "trial_train_seconds": 10.0})
SIZES = (16, 32, 64)


# How the process ends ------------------------------------------------------------------------------------------------


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`main` tunes the garbage collector of its process for a short life: this one lives on."""
    before = gc.get_threshold()
    monkeypatch.setattr(atexit, "register", lambda function: function)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (UsageError("wrong", hint="the other way"), UsageError.exit_code),
        (NotFoundError("nothing there"), NotFoundError.exit_code),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 0),
    ],
)
def test_each_way_to_end_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: BaseException, code: int
) -> None:
    def fails() -> None:
        raise raised

    monkeypatch.setattr(application, "app", fails)
    monkeypatch.setattr(application, "end_of_pipe", lambda: sys.exit(0))
    with pytest.raises(SystemExit) as caught:
        application.main()
    assert caught.value.code == code
    told = capsys.readouterr()
    assert told.out == ""
    for said in (str(raised), getattr(raised, "hint", None)):
        assert (said or "") in told.err
    assert "None" not in told.err


@pytest.mark.usefixtures("_as_before")
def test_other_errors_go_through_with_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(application, "app", fails)
    with pytest.raises(ZeroDivisionError):
        application.main()


# One trial ------------------------------------------------------------------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], trial: TrialRecord, *curve: tuple[float, float], **place: Any) -> str:
    environment = make_environment(**place) if place else None
    trial_commands._print_trial("toy", trial, make_curve(*curve), environment)
    return capsys.readouterr().out


def test_a_trial_is_shown_with_its_curve_from_first_to_last(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, make_trial(7), (0.0, 0.111), (1.5, 0.5), (2.75, 0.888))
    curve = told.splitlines()[-2:]
    assert "0.111" in curve[0] and "0.888" in curve[0]
    assert "3" in curve[1].split() and "2.75" in curve[1].split()
    without = shown(capsys, make_trial(7))
    assert len(without.splitlines()) == len(told.splitlines()) - 2


def test_what_is_known_of_a_trial_is_shown_and_what_is_not_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    ended = shown(capsys, make_trial(7, learning_rate=0.1234, warnings=("slow data", "a hot device")))
    assert ended.splitlines()[0].startswith("trial 7 of toy")
    for said in ("search", "reached", "as the test has it", "0.1234", "slow data", "a hot device"):
        assert said in ended
    assert "retry_of" not in ended and "None" not in ended
    running = shown(capsys, make_trial(7, state=TrialState.RUNNING))
    assert "running" in running and "as the test has it" not in running


def test_a_trial_is_shown_with_where_it_ran_and_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, make_trial(7), device_name="Some GPU", cuda_version=None)
    assert "Some GPU" in told and "cuda_version" not in told
    assert "Some GPU" not in shown(capsys, make_trial(7))
    failed = make_trial(7, state=TrialState.FAILED, traceback="Traceback: it broke here")
    assert "it broke here" in shown(capsys, failed)


def test_the_document_of_a_trial_has_every_evaluation_and_its_device() -> None:
    curve = make_curve((0.0, 0.1), (1.5, 0.9))
    found = trial_document(make_trial(7), curve, make_environment(libraries=("timm 1.0",)), {"seed": 3})
    assert found["observations"] == [
        {"step": one.step, "train_seconds": one.train_seconds, "metric": one.metric, "loss": one.loss} for one in curve
    ]
    assert found["environment"]["device_name"] == "Test CPU"
    assert (found["environment"]["libraries"], found["spec"]) == ({"timm": "1.0"}, {"seed": 3})
    assert found["traceback"] is None
    assert trial_document(make_trial(7), [], None, None)["environment"] is None


# A study that runs ----------------------------------------------------------------------------------------------------


def history(*trials: TrialRecord) -> History:
    return History(SPEC, trials, {size: make_probe(size) for size in SIZES})


def rows(of: History) -> list[list[str]]:
    table = batch_table(of)
    return [list(row) for row in zip(*(list(column.cells) for column in table.columns), strict=True)]


def test_the_table_counts_the_trials_of_each_batch_size_and_marks_the_incumbent() -> None:
    past = history(
        make_trial(1, batch_size=16, seconds=3.0),
        make_trial(2, batch_size=16, seconds=2.0),
        make_trial(3, batch_size=16, state=TrialState.CAPPED),
        make_trial(4, batch_size=32, seconds=1.5),
        make_trial(5, batch_size=16, state=TrialState.LOST),
    )
    first, second, third = rows(past)
    assert (first[:3], second[:3], third[:3]) == (["16", "3", "2"], ["32", "1", "1"], ["64", "0", "0"])
    assert past.figure_text(past.all_trials[1]) in first[3] and past.figure_text(past.all_trials[3]) in second[3]
    assert [("←" in row[3]) for row in (first, second, third)] == [False, True, False]


@pytest.mark.parametrize(
    ("trial", "parts"),
    [
        (make_trial(7, seconds=1.25), ("after 1.25 train seconds", "1/20")),
        (make_trial(7, state=TrialState.CAPPED), ("capped", "as the test has it", "1/20")),
        (make_trial(7, state=TrialState.LOST), ("lost", "0/20")),
        (make_trial(7, phase=Phase.CONFIRM), ("confirm", "after 1 train seconds")),
    ],
)
def test_the_end_of_a_trial_is_one_line_with_its_time_or_its_reason(trial: TrialRecord, parts: tuple[str, ...]) -> None:
    line = ended_line(trial, history(trial))
    assert all(part in line for part in ("trial 7", "batch 32", "0.1", *parts))
    assert "\n" not in line
    assert ("/20" in line) is (trial.phase is Phase.SEARCH)
    assert ("as the test has it" in line) is (trial.state is not TrialState.REACHED)


class Screen:
    """A display with what it has printed above, and its footer."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.text = io.StringIO()
        console = Console(file=self.text, width=200)
        self.display = Display(console, Live(console=console, auto_refresh=False), lambda: self.seconds)

    def footer(self, *trials: TrialRecord) -> str:
        return self.display.footer(history(*trials))


def test_the_time_left_is_the_pace_of_the_search_over_the_trials_that_are_left() -> None:
    screen = Screen()
    assert " s of search left" not in screen.footer(), "no trial has ended"
    six = [make_trial(number, seconds=5.0) for number in range(1, 7)]
    # 5 s a trial, pauses between them left out, and 14 of 20 are left.
    assert "about 70 s of search left" in screen.footer(*six)
    assert "6 of 20" in screen.footer(*six)
    screen.seconds += 30.0
    assert "about 70 s of search left" in screen.footer(*six), "while nothing ends nothing tells another pace"
    spent = [make_trial(number) for number in range(1, 21)]
    assert " s of search left" not in screen.footer(*spent)


def test_below_the_table_stand_the_incumbent_and_what_runs() -> None:
    screen = Screen()
    best = make_trial(1, batch_size=64, seconds=1.25)
    assert "64" not in screen.footer()
    assert "batch 64" in screen.footer(best) and history().figure_text(best) in screen.footer(best)
    running = make_trial(9, batch_size=16, state=TrialState.RUNNING)
    screen.display.started(running, history(running))
    assert screen.footer().endswith("9 (batch 16)")
    ended = make_trial(9, batch_size=16)
    screen.display.ended(ended, history(ended))
    assert "batch 16" not in screen.footer().splitlines()[-1]


@pytest.mark.parametrize(
    ("trial", "is_printed"),
    [
        (make_trial(7), False),
        (make_trial(7, state=TrialState.CAPPED), False),
        (make_trial(7, phase=Phase.CONFIRM), True),
        (make_trial(7, state=TrialState.FAILED), True),
    ],
)
def test_above_the_table_stand_confirmation_runs_and_what_went_wrong(trial: TrialRecord, is_printed: bool) -> None:
    screen = Screen()
    screen.display.ended(trial, history(trial))
    assert ("trial 7" in screen.text.getvalue()) is is_printed


def test_without_a_terminal_every_end_is_a_line_and_nothing_in_it_is_markup() -> None:
    text = io.StringIO()
    lines = Lines(Console(file=text, width=200))
    lines.ended(make_trial(7), history(make_trial(7)))
    lines.note("[bold]as it is[/bold]")
    first, second = text.getvalue().splitlines()
    assert first == ended_line(make_trial(7), history(make_trial(7)))
    assert second == "[bold]as it is[/bold]"
