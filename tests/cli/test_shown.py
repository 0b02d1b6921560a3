"""What commands show of an answer, of a trial, of a study that runs, whatever texts are stored; stored answers stay."""

import atexit
import csv
import gc
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from rich.console import Console
from rich.live import Live
from rich.text import Text

from bssearch import Launch, NotFoundError, UsageError, open_store, run_study
from bssearch.analysis.answer import Answer, NextStep
from bssearch.analysis.shape import Notice
from bssearch.cli import app as application, main, output, trial as trial_commands
from bssearch.cli.answer import SCREEN_COLUMNS, SCREEN_LINES, batch_rows, exported, print_answer, screen
from bssearch.cli.output import note
from bssearch.cli.run import print_quick
from bssearch.cli.study import MEANINGS
from bssearch.commands.display import (
    BAR,
    BETWEEN_LINES,
    CONFIRMATION_RUNS,
    LIMIT_SHARE,
    Display,
    Lines,
    LiveTable,
    batch_table,
    ended_line,
    in_hours,
)
from bssearch.commands.trials import status
from bssearch.exchange.trial_rows import trial_document
from bssearch.files import Row, write_csv
from bssearch.records import (
    Observation,
    Phase,
    TrialObserved,
    TrialOutcome,
    TrialRecord,
    TrialRequest,
    TrialState,
    trainings_of,
)
from bssearch.search.history import History
from bssearch.search.pruners.base import PruningController
from tests.analysis.test_report import answer, confirmed, default_runs
from tests.cli.task import bssearch
from tests.factories import (
    EPOCH,
    make_curve,
    make_environment,
    make_probe,
    make_quick,
    make_spec,
    make_trial,
    not_none,
    with_outcome,
)
from tests.search.law import LawExecutor

SPEC = make_spec(budget={"trials": 20, "trial_train_seconds": 10.0})
SIZES = (16, 32, 64)


@pytest.mark.parametrize("reason", ["target met", "日本語", "why " * 80])
def test_a_long_table_has_the_cells_of_a_short_one(
    reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Row] = [{"number": 1, "reason": reason}, {"number": 200, "reason": None}]
    printed = []
    for most in (0, len(rows)):
        monkeypatch.setattr(output, "LONG_TABLE", most)
        output.print_table(rows, ("number", "reason"))
        printed.append(capsys.readouterr().out.splitlines())
    long, short = ([line.split() for line in lines if "─" not in line] for lines in printed)
    assert long == short


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
    monkeypatch.setattr(application, "app", Mock(side_effect=raised))
    monkeypatch.setattr(output, "end_of_pipe", lambda: sys.exit(0))
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code
    told = capsys.readouterr()
    assert told.out == ""
    assert [said for said in (str(raised), getattr(raised, "hint", None)) if (said or "") not in told.err] == []
    assert "None" not in told.err


@pytest.mark.usefixtures("_as_before")
def test_other_errors_go_through_with_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "app", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        main()


# One trial ------------------------------------------------------------------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], trial: TrialRecord, *curve: tuple[float, float], **place: Any) -> str:
    trial_commands._print_trial("toy", trial, make_curve(*curve), make_environment(**place) if place else None)
    return capsys.readouterr().out


def test_a_trial_is_shown_with_its_curve_from_first_to_last(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, make_trial(7), (0.0, 0.111), (1.5, 0.5), (2.75, 0.888))
    curve = told.splitlines()[-2:]
    assert "0.111" in curve[0] and "0.888" in curve[0]
    assert "3" in curve[1].split() and "2.75" in curve[1].split()
    assert len(shown(capsys, make_trial(7)).splitlines()) == len(told.splitlines()) - 2


def test_what_is_known_of_a_trial_is_shown_and_what_is_not_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    ended = shown(capsys, make_trial(7, learning_rate=0.1234, warnings=("slow data", "a hot device")))
    assert ended.splitlines()[0].startswith("trial 7 of toy")
    assert [
        said
        for said in ("search", "reached", "as the test has it", "0.1234", "slow data", "a hot device")
        if said not in ended
    ] == []
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
    return [list(row) for row in zip(*(list(column.cells) for column in batch_table(of).columns), strict=True)]


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
    one, other = list(past.all_trials)[1], list(past.all_trials)[3]
    assert past.figure_text(one) in first[3] and past.figure_text(other) in second[3]
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
        self.display = Display(console, Live(console=console, auto_refresh=False).update, lambda: self.seconds)

    def footer(self, *trials: TrialRecord) -> str:
        return self.display.footer(history(*trials))


@pytest.fixture(name="screen")
def an_empty_screen() -> Screen:
    return Screen()


def test_the_progress_has_the_elapsed_and_the_expected_time_of_search_and_confirmation(screen: Screen) -> None:
    screen.seconds += 30.0
    guess = LIMIT_SHARE * SPEC.budget.trial_train_seconds
    guessed, with_one = (in_hours(30 + (trials + CONFIRMATION_RUNS) * guess) for trials in (20, 19))
    assert f"0 of 20 search trials · 0:00:30 of about {guessed}\nno trial" in screen.footer(), "no trial has ended"
    six = [
        replace(make_trial(n, seconds=10.0 if n == 1 else 5.0), ended_at=EPOCH + timedelta(seconds=5 * n))
        for n in range(1, 7)
    ]
    assert f"of about {with_one}\n" in screen.footer(six[0]), "the default alone tells little"
    whole = 30 + 5 * 14 + 35 / 6 * CONFIRMATION_RUNS
    assert f"6 of 20 search trials · 0:00:30 of about {in_hours(whole)}\nbest single run" in screen.footer(*six)
    assert " · cost 7 trainings" in screen.footer(*six), "each as long as the best"
    assert " · cost 1 training\n" in screen.footer(six[0])
    filled = screen.footer(*six).count("█")
    assert filled == round(BAR * 30 / whole) > 0
    screen.seconds += 300.0
    assert screen.footer(*six).count("█") > filled


def test_below_the_table_stand_the_incumbent_and_what_runs(screen: Screen) -> None:
    best = make_trial(1, batch_size=64, seconds=1.25)
    assert "64" not in screen.footer()
    assert "batch 64" in screen.footer(best) and history().figure_text(best) in screen.footer(best)
    running = make_trial(9, batch_size=16, state=TrialState.RUNNING)
    screen.display.started(running, history(running))
    assert screen.footer().endswith("9 (batch 16)")
    ended = make_trial(9, batch_size=16)
    screen.display.ended(ended, history(ended))
    assert "batch 16" not in screen.footer().splitlines()[-1]


def test_confirmation_refines_the_answer_that_the_search_gave(screen: Screen) -> None:
    searched = [make_trial(1, batch_size=64, seconds=1.0), make_trial(2, batch_size=32, seconds=1.25)]
    screen.display.search_ended("the budget is spent", history(*searched))
    assert "so far: best single run: batch 64, 1 s" in screen.text.getvalue()
    fresh = [
        make_trial(10 * size + seed, batch_size=size, seconds=seconds, phase=Phase.CONFIRM, seed=seed)
        for size, seconds in ((64, 2.0), (32, 1.5))
        for seed in range(3)
    ]
    assert "batch 32, median 1.5 s over 3 fresh seeds" in screen.footer(*searched, *fresh)
    assert [row[4] for row in rows(history(*searched, *fresh))] == ["–", "1.5 s over 3", "2 s over 3"]


@pytest.mark.parametrize(("state", "is_printed"), [(TrialState.CAPPED, False), (TrialState.FAILED, True)])
def test_above_the_table_stands_what_went_wrong_and_every_end_if_asked(
    state: TrialState, is_printed: bool, screen: Screen
) -> None:
    trial = make_trial(7, state=state)
    screen.display.ended(trial, history(trial))
    assert ("trial 7" in screen.text.getvalue()) is is_printed
    text = io.StringIO()
    Lines(Console(file=text, width=200), verbose=True).ended(trial, history(trial))
    assert text.getvalue() == f"{ended_line(trial, history(trial))}\n"


def test_without_a_terminal_progress_is_a_line_now_and_then_and_nothing_in_it_is_markup() -> None:
    text, seconds = io.StringIO(), [0.0]
    lines = Lines(Console(file=text, width=200), clock=lambda: seconds[0])
    lines.note("[bold]as it is[/bold]")
    for seconds[0] in (1.0, BETWEEN_LINES, BETWEEN_LINES + 1.0, 2 * BETWEEN_LINES):
        lines.ended(make_trial(7), history(make_trial(7)))
    first, *progress = text.getvalue().splitlines()
    assert first == "[bold]as it is[/bold]"
    assert [line.partition(" of about")[0] for line in progress] == [
        "1 of 20 search trials · 0:00:10",
        "1 of 20 search trials · 0:00:20",
    ]


def test_a_long_trial_shows_progress_with_its_evaluations() -> None:
    observed = TrialObserved(1, make_curve((5.0, 0.5))[0])
    text, seconds, shown = io.StringIO(), [0.0], list[object]()
    console, running = Console(file=text, width=200), make_trial(1, state=TrialState.RUNNING)
    for listener in (Lines(console, clock=lambda: seconds[0]), Display(console, shown.append, lambda: seconds[0])):
        seconds[0] = 0.0
        listener.observed(observed)
        listener.started(running, history(running))
        for seconds[0] in (1.0, BETWEEN_LINES, BETWEEN_LINES + 1.0, 2 * BETWEEN_LINES):
            listener.observed(observed)
    assert [line.split(" · ")[1][:7] for line in text.getvalue().splitlines()] == ["0:00:10", "0:00:20"]
    assert len(shown) == 3, "its start and two evaluations"


def on_terminal(text: str) -> list[str]:
    """Lines that a terminal shows after a text with movements of the cursor."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[?\d]*\w|\n|[^\x1b\n]+", text):
        if moved := re.fullmatch(r"\x1b\[(\d+)([AB])", part):
            row += int(moved[1]) * (1 if moved[2] == "B" else -1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif not part.startswith("\x1b"):
            lines[row] += part.strip("\r")
    return lines


def test_a_terminal_redraws_only_lines_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text, written = io.StringIO(), []
    console = Console(file=text, force_terminal=True, color_system=None, width=40, height=8)
    table = LiveTable(console)
    with table.live:
        for width, *lines in (
            (40, "one", "two", "three", "four"),
            (40, "one", "2", "three", "4"),
            (40, "one", "two", "three", "4"),
            (40, "one", "2", "3", "4", "five"),
            (30, "one", "2", "3", "4", "six"),
            (30, "one", "2", "3", "4", "seven"),
        ):
            console.width, before = width, len(text.getvalue())
            table.show(Text("\n".join(lines)))
            assert on_terminal(text.getvalue())[-len(lines) :] == lines
            written.append(set(re.findall(r"\w+", re.sub(r"\x1b\[\d*\w", "", text.getvalue()[before:]))))
            if lines[-1] == "six":
                console.print("a note")
                assert on_terminal(text.getvalue())[-len(lines) - 1 :] == ["a note", *lines]
    assert written[1] == {"2", "4"} and written[2] == {"two"} and written[5] == {"seven"}, "other lines stay"
    assert "one" in written[3] and "one" in written[4], "another number of lines, another width"
    assert [line for line in on_terminal(text.getvalue()) if line] == ["a note"], "the table goes"


def test_every_state_of_a_trial_is_explained() -> None:
    assert set(MEANINGS) == set(TrialState)


# The answer -----------------------------------------------------------------------------------------------------------


def test_the_answer_says_what_the_study_cost_in_trainings() -> None:
    found = answer([*confirmed(16, 2.0, 2.1, 1.9), *confirmed(64, 1.0, 1.1, 0.9)])
    cost = not_none(found.cost)
    assert cost.train_seconds == pytest.approx(9.0)
    assert not_none(cost.trainings) * not_none(found.optimal.time_to_target_s).median == pytest.approx(9.0)
    assert f"study cost: {cost.trainings:.0f} trainings" in "\n".join(screen(found))


def test_waits_for_a_cpu_do_not_count_in_trainings() -> None:
    quiet = confirmed(64, 1.0, 1.1, 0.9)
    waited = [with_outcome(one, train_seconds=3.0, undelayed_train_seconds=1.0) for one in quiet]
    assert trainings_of(waited, 1.0) == pytest.approx(3.0)


def test_the_host_bound_share_is_a_column_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [*confirmed(16, 2.0, 2.1, 1.9), *confirmed(64, 1.0, 1.1, 0.9, host_bound_share=0.256)]
    print_answer(answer(runs), details=True)
    printed = capsys.readouterr().out
    heading, *rows = [line for line in printed.splitlines() if "ms/step" in line or line.startswith((" 16 ", " 64 "))]
    assert heading.index("ms/step") < heading.index("host-bound") < heading.index(" lr ")
    assert ["26 %" in row for row in rows[:2]] == [False, True]
    print_answer(answer(confirmed(64, 1.0, 1.1, 0.9)), details=True)
    assert "host-bound" not in capsys.readouterr().out


def test_another_objective_than_time_has_a_column_before_the_batch_size() -> None:
    found = answer(confirmed(64, 1.0, 1.1, 0.9))
    of_time, of_samples = (
        list(batch_rows(found.model_copy(update={"objective": one}))[0])
        for one in ("time_to_target", "samples_to_target")
    )
    assert of_samples == ["samples_to_target", *of_time]
    assert of_time[:2] == ["batch", "time_to_target"]


def eight_batch_sizes(*further: TrialRecord, **changes: Any) -> Answer:
    """Return an answer about eight batch sizes with more notes than a screen has lines."""
    runs = [run for n in range(8) for run in confirmed(2 ** (n + 3), 1.0 + n, 1.1 + n, 0.9 + n)]
    notes = [Notice(code=f"note_{n}", message=f"note {n} is long: {'word ' * 20}") for n in range(9)]
    return answer([*runs, *further]).model_copy(update={"warnings": notes, **changes})


@pytest.mark.parametrize("provisional", [False, True])
def test_an_answer_about_eight_batch_sizes_fits_on_one_screen(provisional: bool) -> None:
    step = NextStep(command="bssearch study confirm digits --max-runs 45", why="up to 45 runs should settle the answer")
    sure = {"within_5_percent": 0.95, "configuration_within_5_percent": 0.5}
    unsure = {"within_5_percent": 0.5, "would_settle": "runs", "next": [step]}
    found = eight_batch_sizes(
        *default_runs(9.0, 9.1, 9.2), provisional=provisional, **(unsure if provisional else sure)
    )
    lines = screen(found)
    assert len(found.batches) == 8
    assert [line.split()[:2] for line in lines if "default " in line] == [["default", "9.1"]]
    assert len(lines) <= SCREEN_LINES
    assert max(len(line) for line in lines if "next:" not in line) <= SCREEN_COLUMNS  # a command is not broken
    assert lines[0].startswith(f"Train with batch {found.optimal.batch_size}.")


@pytest.mark.parametrize("confirmed", [False, True])
def test_a_provisional_answer_of_unknown_certainty_names_the_reason(confirmed: bool) -> None:
    found = eight_batch_sizes(provisional=True, within_5_percent=None)
    rows = [row.model_copy(update={"confirmed": confirmed}) for row in found.batches]
    (line,) = [one for one in screen(found.model_copy(update={"batches": rows})) if one.startswith("Provisional")]
    assert ("fresh seeds" in line, "probability" in line) == (not confirmed, confirmed)


def test_a_grave_note_is_on_the_screen_however_many_lines_there_are() -> None:
    grave = Notice(code="unconfirmed", message="no run repeats it")
    found = eight_batch_sizes()
    assert not any("no run repeats it" in line for line in screen(found))
    lines = screen(found.model_copy(update={"warnings": [*found.warnings, grave]}))
    assert "note: no run repeats it" in lines
    assert len(lines) <= SCREEN_LINES


def test_the_details_have_every_note_once(capsys: pytest.CaptureFixture[str]) -> None:
    notes = [Notice(code="unconfirmed", message="no run repeats it"), Notice(code="x", message="something else")]
    print_answer(eight_batch_sizes().model_copy(update={"warnings": notes}), details=True)
    printed = capsys.readouterr().out
    assert [printed.count(f"note: {one.message}\n") for one in notes] == [1, 1]
    assert "--details" not in printed


def test_bars_grow_with_the_figure_and_show_its_interval() -> None:
    found = eight_batch_sizes()
    bars = [line for line in screen(found) if "█" in line]
    assert [int(line.replace("▶", " ").split()[0]) for line in bars] == [row.batch_size for row in found.batches]
    solid, whole = [line.count("█") for line in bars], [sum(map(line.count, "█▓░")) for line in bars]
    assert solid == sorted(solid) and whole == sorted(whole)
    assert solid[0] < whole[0]


def test_the_default_has_a_row_if_another_configuration_of_its_batch_size_is_better() -> None:
    def default_row(*default: TrialRecord) -> list[str]:
        lines = screen(answer([*confirmed(64, 1.0, 1.05, 1.1), *default]))
        return [re.sub(r"[█·\s]+", " ", line) for line in lines if line.startswith(" default")]

    retuned, own = confirmed(32, 1.5, 1.6, 1.4), default_runs(3.0, 3.1, 3.2)
    unreached = confirmed(32, 10.0, 10.0, 10.0, start=300, state=TrialState.EXHAUSTED)
    missed = [replace(one, configuration=own[0].configuration) for one in unreached]
    assert default_row(*retuned, *own) == [" default 3.1 with batch 32"]
    assert default_row(*retuned, *missed) == [" default > 10 with batch 32"]
    assert default_row(*retuned) == [], "never run"
    assert default_row(*own) == default_row(*missed) == []
    (row,) = [line for line in screen(answer([*confirmed(64, 1.0, 1.05, 1.1), *own])) if " 32 " in line]
    assert row.endswith("3 seeds, default size")


def test_each_batch_size_says_whether_it_may_be_best() -> None:
    found = eight_batch_sizes()
    lines = {int(line.replace("▶", " ").split()[0]): line for line in screen(found) if "█" in line}
    slower = [size for size, line in lines.items() if line.endswith("3 seeds, slower")]
    assert slower == found.worse and slower
    assert all(
        line.endswith(("within 5 %", "may be best", "tuned", "3 seeds"))
        for size, line in lines.items()
        if size not in slower
    )


# Quick ----------------------------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    print_quick(make_quick().model_copy(update=changes))
    return " ".join(capsys.readouterr().out.split())


def test_the_first_word_says_that_it_is_unverified_and_all_that_it_rests_on_follows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = printed(capsys)
    assert out.startswith("Unverified: batch 128 (lr 0.05, 2 micro-batches of 64) should reach accuracy 0.97")
    assert [
        part
        for part in (
            "1.6× faster than your default of 256",
            "90 % interval of the optimum is 64 to 200",
            "1 run in 42 s",
            "noise scale not measured",
            "retune the learning rate between 0.01 and 0.2",
            "note: only one batch size came there",
            "fine-tuning",
        )
        if part not in out
    ] == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gain": 1.01}, "Your default of 256 should take at most 5 % longer"),
        ({"default_batch_size": 128}, "This batch size is your default"),
        ({"learning_rate_gain": 3.0}, "took 3× as long with the learning rate of the scaling rule"),
    ],
    ids=["no gain", "the default's batch size", "a faster learning rate than the rule's"],
)
def test_a_quick_answer_says_how_it_compares(
    capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    assert said in printed(capsys, **changes)


# Whatever texts it holds ----------------------------------------------------------------------------------------------


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
    told = exported(named(text), "yaml")
    assert yaml.safe_load(told)["batch_size"] == 64
    assert yaml.safe_load(told) == yaml.safe_load(exported(answer(confirmed(64, 1.0, 1.1, 0.9)), "yaml"))
    assert "\x1b" not in told


def test_exported_values_say_how_sure_they_are_where_that_is_not_enough() -> None:
    sure = answer(confirmed(64, 1.0, 1.1, 0.9)).model_copy(update={"within_5_percent": 0.653, "provisional": True})
    note = "# note: provisional: batch 64 is within 5 % of the best with a probability of 65 %\n"
    assert note in exported(sure, "yaml")
    assert "provisional" not in exported(sure.model_copy(update={"provisional": False}), "yaml")


def test_a_note_is_one_line_without_what_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    note("one\ntwo \x1b]0;title\x07three")
    assert capsys.readouterr().err == "note: one two \ufffd]0;title\ufffdthree\n"


# While a study runs ---------------------------------------------------------------------------------------------------


LIVE = make_spec(budget={"trials": 12, "trial_train_seconds": 100.0}, confirm={"top": 1, "runs": 3})


class Footers(Display):
    """A display that keeps what it showed; each look at its clock is half a second after the one before."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.shown: list[str] = []
        super().__init__(Console(file=io.StringIO(), width=200), None, self.tick)  # type: ignore[arg-type]

    def tick(self) -> float:
        self.seconds += 0.5
        return self.seconds

    def _show(self, history: History) -> None:
        self.shown.append(self.footer(history))


def slowing(request: TrialRequest, outcome: TrialOutcome) -> TrialOutcome:
    """Have each confirmation run take longer than the one before."""
    return replace(outcome, wall_seconds=outcome.wall_seconds * (request.number if request.plan.is_tested else 1))


def run(folder: Path, listener: Any, spec: Any = LIVE) -> None:
    executor = LawExecutor(ended_as=slowing)
    run_study(spec, Launch(db=f"sqlite:///{folder}/study.db", listener=listener, make_executor=lambda *_: executor))


@pytest.mark.slow
def test_the_display_tells_that_the_search_ended_and_counts_confirmation_runs(tmp_path: Path) -> None:
    display = Footers()
    run(tmp_path, display)
    over = next(place for place, text in enumerate(display.shown) if "12 search trials, 0 confirmation runs" in text)
    assert any(" of 12 search trials" in text for text in display.shown[:over])
    assert not any(" of 12 search trials" in text for text in display.shown[over:])
    runs = [int(found[1]) for text in display.shown[over:] if (found := re.search(r"(\d+) confirmation run", text))]
    assert runs == sorted(runs) and runs[-1] > 6


def test_every_line_of_a_log_gives_the_same_seconds_of_the_fastest_trial() -> None:
    fastest = make_trial(1, seconds=7.13, contended=True, product=4.022)
    late = make_trial(2, state=TrialState.RUNNING)
    history = History(LIVE, (), {32: make_probe(32)})
    pruning = PruningController(LIVE, history)
    for trial in (fastest, late):
        history.take(trial)
        pruning.take(trial)
    history.observe(2, [(40.0, 0.2)])
    seen = Observation(step=10, samples=320, train_seconds=40.0, metric=0.2, loss=None, learning_rate=0.1)
    halt = pruning.judge(2, seen, uncapped=False)
    assert halt is not None and "7.13 train seconds" in halt.reason


def test_status_says_that_the_search_has_ended_and_why_until_it_goes_on(tmp_path: Path) -> None:
    run(tmp_path, Lines(Console(file=io.StringIO())))
    with open_store(f"sqlite:///{tmp_path / 'study.db'}") as store:
        found = status(store, "toy")
        assert found.search_ended == "the budget of 12 trials is spent; raise budget.trials to continue"
        spec = dict(store.studies.get("toy").spec)
        store.studies.update_spec("toy", {**spec, "budget": {**spec["budget"], "trials": 20}})  # type: ignore[dict-item]
        assert status(store, "toy").search_ended is None, "a larger budget asks for more"


STORED = Path(__file__).parents[1] / "data" / "stored"


def close_to(number: str) -> Any:
    """Return a number that equals those with the same first digits: the last ones depend on the processor."""
    return pytest.approx(float(number), rel=1e-6)


@pytest.mark.parametrize("name", ["stored_digits", "stored_samples", "stored_runs"])
def test_the_answer_of_a_stored_study_stays_as_it_was(name: str, tmp_path: Path) -> None:
    call = partial(bssearch, cwd=tmp_path)
    imported = call("import", "study", str(STORED / f"{name}.study"))
    assert imported.returncode == 0, imported.stderr
    answer = json.loads(call("best", name, "--format", "json").stdout)
    assert answer == json.loads((STORED / f"{name}.json").read_text(encoding="utf-8"), parse_float=close_to)
