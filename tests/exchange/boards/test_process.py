"""The boards' process: reports arrive; a board that hangs, raises or dies delays nobody, and its losses are counted."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bssearch.exchange.boards import base
from bssearch.exchange.boards.base import BoardProcess
from bssearch.settings import BOARD_PROCESS
from tests.exchange.boards.conftest import Notebook
from tests.waiting import wait_for

Start = Callable[..., BoardProcess]
FOREVER = 1e9


def report_study(boards: BoardProcess) -> None:
    about = {"target": "accuracy >= 0.9", "objective": "time_to_target", "device": "cpu", "spec": ""}
    boards.report("opened", name="task", mark="0123", metric="accuracy", about=about)


def opened(boards: BoardProcess) -> BoardProcess:
    """Return boards that have been told of the study."""
    report_study(boards)
    return boards


def report_trial(boards: BoardProcess, number: int, **parameters: object) -> None:
    boards.report("started", number=number, at=5.0, parameters={"batch_size": 8, **parameters})


def report_point(boards: BoardProcess, number: int, step: int) -> None:
    boards.report("observed", number=number, points=[(step, 5.0, {"accuracy": 0.5, "train_seconds": 0.1})])


def report_end(boards: BoardProcess, number: int) -> None:
    figures = {"steps": 3.0}
    boards.report("ended", number=number, state="reached", reason="there", at=9.0, figures=figures, is_elsewhere=False)


@pytest.fixture(autouse=True)
def _no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests wait for boards however slow the machine is, unless they call `at_the_deadline`."""
    monkeypatch.setattr(base, "SILENT_SECONDS", FOREVER)
    monkeypatch.setattr(base, "LAST_SECONDS", FOREVER)


def at_the_deadline(monkeypatch: pytest.MonkeyPatch, which: str = "SILENT_SECONDS") -> None:
    monkeypatch.setattr(base, which, 0.0)


def test_a_board_takes_everything_in_order_and_evaluations_together(start: Start, notebook: Notebook) -> None:
    boards = opened(start("Gated", "Keeping"))
    report_trial(boards, 1)
    for step in range(500):
        report_point(boards, 1 + step % 2, step)
    report_end(boards, 1)
    wait_for(lambda: boards.delivered["Keeping"] == boards.asked)  # then all of it waits for the other board, too
    assert boards.delivered["Gated"] == 0
    notebook.open_gate()
    boards.close()
    observed = [call for call in notebook.calls("Gated") if call["call"] == "observed"]
    assert len(observed) <= 4, "of two trials, before the gate and after it"
    for trial in (1, 2):
        points = [point for call in observed if call["number"] == trial for point in call["points"]]
        assert [step for step, _, _ in points] == list(range(trial - 1, 500, 2))
    others = [name for name in notebook.names("Gated") if name != "observed"]
    assert (others, notebook.names("Gated")[-2:]) == (["opened", "started", "ended", "close"], ["ended", "close"])
    assert boards.delivered == {"Gated": 503, "Keeping": 503}
    assert not boards.notes


@pytest.mark.parametrize("deadline", ["SILENT_SECONDS", "LAST_SECONDS"])
def test_a_board_that_sleeps_forever_is_killed_at_the_deadline_and_another_has_everything(
    start: Start, notebook: Notebook, monkeypatch: pytest.MonkeyPatch, deadline: str
) -> None:
    boards = opened(start("Sleeping", "Keeping"))
    report_trial(boards, 1)
    report_end(boards, 1)
    wait_for(lambda: notebook.names("Sleeping") == ["opened"] and boards.delivered["Keeping"] == 3)
    at_the_deadline(monkeypatch, deadline)
    boards.close()
    assert (boards.asked, boards.delivered) == (3, {"Sleeping": 0, "Keeping": 3})
    (note,) = boards.notes
    assert note.startswith("Sleeping: 3 of 3 ")
    assert not psutil.pid_exists(boards.pid)


def test_a_board_that_holds_the_interpreter_delays_no_report_and_all_losses_are_counted(
    start: Start, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = opened(start("Holding", capacity=100))
    wait_for(lambda: notebook.names("Holding") == ["opened"])
    for step in range(20_000):
        report_point(boards, 1, step)
    at_the_deadline(monkeypatch)
    boards.close()
    assert (boards.asked, boards.delivered) == (20_001, {"Holding": 0})
    full, lost = boards.notes
    assert full.startswith("Holding: ") and "100 reports" in full
    assert lost.startswith("Holding: 20001 of 20001 ")
    assert not psutil.pid_exists(boards.pid)


def test_a_pipe_that_nobody_reads_delays_no_report(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    boards = start("Keeping")
    os.kill(boards.pid, signal.SIGSTOP)
    for number in range(200):  # more than the pipe takes
        report_trial(boards, number, text="x " * 5_000)
    at_the_deadline(monkeypatch)
    boards.close()
    assert boards.asked - boards.delivered["Keeping"] > 0
    assert len(boards.notes) == 1


def test_a_full_queue_drops_what_follows_and_says_so_once_and_the_count_at_the_end(
    start: Start, notebook: Notebook
) -> None:
    boards = opened(start("Gated", "Keeping", capacity=3))
    for number in range(1, 6):
        wait_for(lambda: boards.delivered["Keeping"] == boards.asked)  # its queue is empty
        report_trial(boards, number)
    notebook.open_gate()
    boards.close()
    assert (boards.asked, boards.delivered) == (6, {"Gated": 3, "Keeping": 6})
    assert [call["number"] for call in notebook.calls("Gated") if call["call"] == "started"] == [1, 2]
    full, lost = boards.notes
    assert full.startswith("Gated: ") and "3 reports" in full
    assert lost.startswith("Gated: 3 of 6 ")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Absent", "ImportError: libboard.so: cannot open shared object file"),
        ("Missing", "No module named 'no_such_module'"),
        ("Leaving", "SystemExit: no licence"),
    ],
)
def test_a_board_that_raises_at_construction_is_named_with_its_reason_and_another_has_everything(
    start: Start, notebook: Notebook, name: str, reason: str
) -> None:
    boards = opened(start(name, "Keeping"))
    report_end(boards, 1)
    boards.close()
    assert boards.delivered == {name: 0, "Keeping": 2}
    why, lost = boards.notes
    assert why.startswith(f"{name}: ") and reason in why
    assert lost.startswith(f"{name}: 2 of 2 ")
    assert notebook.names("Absent") in ([], ["made"] * 3)


def test_a_board_that_raises_later_is_asked_three_times_and_its_password_is_in_no_note(
    start: Start, notebook: Notebook
) -> None:
    boards = opened(start("Away"))
    for number in (1, 2):
        report_trial(boards, number)
    report_end(boards, 1)
    boards.close()
    assert notebook.names("Away") == ["opened", *["started"] * 6, "ended", "close"]
    assert (boards.asked, boards.delivered) == (4, {"Away": 2})
    why, lost = boards.notes
    assert "ConnectionError: postgresql://ada:***@board/runs" in why
    assert lost.startswith("Away: 2 of 4 ")


def test_a_board_that_crashes_is_named_with_its_last_words(start: Start, notebook: Notebook) -> None:
    boards = opened(start("Crashing"))
    for number in range(1, 6):
        report_trial(boards, number)
    wait_for(lambda: boards.notes)
    assert boards.notes.popleft().endswith("the board's library has a fault")
    report_trial(boards, 6)
    boards.close()
    assert (boards.asked, boards.delivered) == (7, {"Crashing": 3})
    (lost,) = boards.notes
    assert lost.startswith("Crashing: 4 of 7 ")
    assert [call["number"] for call in notebook.calls("Crashing") if call["call"] == "started"] == [1, 2, 3]


def test_a_board_that_holds_the_interpreter_at_exit_is_killed_and_nothing_is_lost(
    start: Start, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = opened(start("HoldingAtExit"))
    closing = threading.Thread(target=boards.close)
    closing.start()
    wait_for(lambda: notebook.names("HoldingAtExit") == ["opened", "close", "exit"])
    assert closing.is_alive()
    at_the_deadline(monkeypatch)
    closing.join()
    assert boards.delivered == {"HoldingAtExit": 1}
    assert not boards.notes
    assert not psutil.pid_exists(boards.pid)


def test_boards_that_were_told_nothing_are_ended_at_once(start: Start) -> None:
    boards = start("Sleeping")
    boards.close()
    assert not boards.notes
    assert not psutil.pid_exists(boards.pid)


def test_what_a_board_prints_and_reads_does_not_touch_its_line(start: Start, notebook: Notebook) -> None:
    boards = opened(start("Printing"))
    report_trial(boards, 1)
    boards.close()
    assert (boards.delivered, list(boards.notes)) == ({"Printing": 2}, [])
    assert notebook.names("Printing") == ["opened", "read", "started", "close"]
    assert notebook.calls("Printing")[1]["text"] == ""


def test_passwords_in_urls_do_not_reach_a_board(start: Start, notebook: Notebook) -> None:
    boards = start("Keeping")
    url = "postgresql://ada:secret@host/data"
    report_trial(boards, 1, **{"data": url, url: 1})
    boards.close()
    assert "secret" not in (notebook.folder / "Keeping").read_text()
    assert notebook.calls("Keeping")[0]["parameters"]["data"] == "postgresql://ada:***@host/data"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_board_has_its_own_settings_but_no_database_no_gpu_one_thread_and_what_cpu_is_left(
    start: Start, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BSSEARCH_DB_URL", "postgresql://ada:secret@host/data")
    monkeypatch.setenv("PGPASSWORD", "secret")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "its own")
    boards = opened(start("Environment"))
    boards.close()
    found = notebook.calls("Environment")[0]
    variables = found["variables"]
    assert "BSSEARCH_DB_URL" not in variables and "PGPASSWORD" not in variables
    assert (variables["MLFLOW_TRACKING_TOKEN"], variables["CUDA_VISIBLE_DEVICES"]) == ("its own", "")
    assert variables["OMP_NUM_THREADS"] == "1"
    assert (found["name"], found["nice"]) == (BOARD_PROCESS, 19)


DRIVER = """
import sys, time
sys.path.insert(0, {root!r})
from bssearch.exchange.boards.base import BoardProcess
from tests.exchange.boards.test_process import report_study
boards = BoardProcess(["{kind}"])
report_study(boards)
print(boards.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Keeping", "Holding"])
def test_no_process_is_left_of_boards_whose_driver_is_killed(kind: str, notebook: Notebook) -> None:
    root = str(Path(__file__).resolve().parents[3])
    code = textwrap.dedent(DRIVER).format(root=root, kind=kind)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        board = psutil.Process(int(driver.stdout.readline()))
        wait_for(lambda: notebook.names(kind) == ["opened"])
        family = [board, *board.children(recursive=True)]
        os.kill(driver.pid, signal.SIGKILL)
    assert len(family) == 2, "the boards, and the shell that watches over them"
    assert not psutil.wait_procs(family, timeout=300)[1]
    if kind == "Keeping":
        assert notebook.names(kind)[-1] == "close", "what it was told is written"
