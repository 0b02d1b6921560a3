"""A board's process: what it is told arrives, and whatever it does, nobody waits for it and nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bssearch.boards import process
from bssearch.boards.events import Event, StudyOpened, TrialEnded, TrialObserved, TrialStarted
from bssearch.boards.process import BoardProcess
from bssearch.settings import BOARD_PROCESS
from tests.boards.fakes import FILE
from tests.cli.task import environment

STUDY = StudyOpened(
    name="task",
    mark="0123",
    metric="accuracy",
    target="accuracy ≥ 0.9",
    objective="time_to_target",
    device="cpu",
    spec="",
)


def started(number: int) -> TrialStarted:
    return TrialStarted(number=number, phase="search", seed=1, started_at=5.0, parameters={"batch_size": 8})


def observed(number: int, step: int) -> TrialObserved:
    return TrialObserved(number=number, step=step, train_seconds=step / 10, value=0.5, figures={"loss": 1.5})


def ended(number: int) -> TrialEnded:
    return TrialEnded(number=number, state="reached", reason="it is there", ended_at=9.0, figures={"steps": 3.0})


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what a fake board was told."""
    monkeypatch.setenv(FILE, str(tmp_path / "told.jsonl"))
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    return tmp_path / "told.jsonl"


@pytest.fixture
def board(file: Path) -> Iterator[Callable[..., BoardProcess]]:
    """Starts a fake board by its class, waits until it is ready, and ends it with the test."""
    made: list[BoardProcess] = []

    def start(kind: str, **settings: Any) -> BoardProcess:
        made.append(BoardProcess("fake", f"tests.boards.fakes:{kind}", **settings))
        made[-1].wait_until_ready(time.monotonic() + 60)
        return made[-1]

    yield start
    for one in made:
        if one._process.returncode is None:
            one.close()


def told(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come about")


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SILENT_SECONDS", 1.0)


def test_a_board_is_told_everything_in_order_and_evaluations_together(
    board: Callable[..., BoardProcess], file: Path
) -> None:
    one = board("Keeping")
    events: list[Event] = [STUDY, started(1), *(observed(1, step) for step in range(500)), ended(1)]
    for event in events:
        one.report(event)
    one.close()
    calls = told(file)
    assert [call["call"] for call in calls if call["call"] != "observed"] == ["opened", "started", "ended", "close"]
    points = [call for call in calls if call["call"] == "observed"]
    assert [step for call in points for step in call["steps"]] == list(range(500))
    assert len(points) < 50
    assert one.take_notes() == []


def test_a_board_that_hangs_is_killed_at_the_end_and_what_it_did_not_take_is_told(
    board: Callable[..., BoardProcess], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    one = board("Hanging")
    for event in (STUDY, started(1), ended(1)):
        one.report(event)
    one.close()
    assert one.take_notes() == ["fake: 3 of 3 reports were dropped; it did not answer for 1 s, and was killed"]
    assert not psutil.pid_exists(one.pid)


def test_what_a_full_queue_cannot_take_is_dropped_and_told_once_and_counted_at_the_end(
    board: Callable[..., BoardProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    one = board("Hanging", capacity=100)
    one.report(STUDY)
    events = 20_000  # more than a pipe and the queue take
    for step in range(events):
        one.report(observed(1, step))
    (note,) = one.take_notes()
    assert note.startswith("fake: reports are dropped: 100 wait, and the board has not answered for ")
    one.close()
    (note,) = one.take_notes()
    assert note.startswith(f"fake: {events + 1} of {events + 1} reports were dropped; it did not answer")


def test_a_board_that_cannot_start_is_told_with_its_reason_and_nobody_waits_for_it(
    board: Callable[..., BoardProcess],
) -> None:
    one = board("Absent")
    assert one.take_notes() == [
        "fake: the board has ended; nothing more is reported to it: "
        "ImportError: libboard.so: cannot open shared object file"
    ]
    one.report(STUDY)
    one.close()
    assert one.take_notes() == ["fake: 1 of 1 report was dropped"]


def test_a_board_that_crashes_later_is_told_with_its_last_words(board: Callable[..., BoardProcess], file: Path) -> None:
    one = board("Crashing")
    events: list[Event] = [STUDY, *map(started, range(1, 6))]
    for event in events:
        one.report(event)
    wait_for(lambda: one._is_gone)
    (note,) = one.take_notes()
    assert note == "fake: the board has ended; nothing more is reported to it: the board's library has a fault"
    one.report(started(6))
    one.close()
    assert one.take_notes() == ["fake: 4 of 7 reports were dropped"]
    assert [call["number"] for call in told(file) if call["call"] == "started"] == [1, 2, 3]


@pytest.mark.slow
def test_a_report_that_fails_is_tried_again_and_then_dropped_without_its_password_in_the_note(
    board: Callable[..., BoardProcess], file: Path
) -> None:
    one = board("Away")
    for event in (STUDY, started(1), ended(1)):
        one.report(event)
    one.close()
    assert one.take_notes() == [
        "fake: a report failed; it is tried again, then dropped: "
        "ConnectionError: postgresql://ada:***@board/runs refused the connection",
        "fake: 1 of 3 reports was dropped",
    ]
    assert [call["call"] for call in told(file)] == ["opened", "ended", "close"]


def test_a_slow_board_is_waited_for_as_long_as_it_answers(
    board: Callable[..., BoardProcess], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    one = board("Slow")
    events: list[Event] = [STUDY, *map(started, range(60))]
    for event in events:  # three seconds
        one.report(event)
    one.close()
    assert one.take_notes() == []
    assert sum(call["call"] == "started" for call in told(file)) == 60


def test_what_a_board_prints_and_reads_does_not_touch_its_line(board: Callable[..., BoardProcess], file: Path) -> None:
    one = board("Printing")
    for event in (STUDY, started(1), ended(1)):
        one.report(event)
    one.close()
    assert one.take_notes() == []
    assert [call["call"] for call in told(file)] == ["opened", "read", "started", "ended", "close"]
    assert told(file)[1]["text"] == ""


def test_passwords_in_urls_do_not_reach_a_board(board: Callable[..., BoardProcess], file: Path) -> None:
    one = board("Keeping")
    url = "postgresql://ada:secret@host/data"
    one.report(TrialStarted(number=1, phase="search", seed=1, started_at=0, parameters={"data": url, url: 1}))
    one.close()
    assert "secret" not in file.read_text()
    assert told(file)[0]["parameters"]["data"] == "postgresql://ada:***@host/data"


def test_a_board_has_its_own_settings_but_no_database_no_gpu_one_thread_and_what_cpu_is_left(
    board: Callable[..., BoardProcess], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BSSEARCH_DB_URL", "postgresql://ada:secret@host/data")
    monkeypatch.setenv("PGPASSWORD", "secret")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "its own")
    one = board("Environment")
    one.report(STUDY)
    wait_for(lambda: one.is_idle)  # at its end it stands back no longer
    one.close()
    found = told(file)[0]
    variables = found["variables"]
    assert "BSSEARCH_DB_URL" not in variables and "PGPASSWORD" not in variables
    assert (variables["MLFLOW_TRACKING_TOKEN"], variables["CUDA_VISIBLE_DEVICES"]) == ("its own", "")
    assert variables["OMP_NUM_THREADS"] == "1"
    assert found["name"] == BOARD_PROCESS
    assert found["policy"] == os.SCHED_IDLE


def test_a_board_that_is_to_end_stands_back_no_longer_where_that_is_allowed(
    board: Callable[..., BoardProcess], file: Path
) -> None:
    one = board("Environment")
    one.report(STUDY)
    wait_for(lambda: one.is_idle)
    one.close()
    back = "import os; [os.sched_setscheduler(0, one, os.sched_param(0)) for one in (os.SCHED_IDLE, os.SCHED_OTHER)]"
    is_allowed = subprocess.run([sys.executable, "-c", back], capture_output=True, check=False).returncode == 0
    assert told(file)[-1]["policy"] == (os.SCHED_OTHER if is_allowed else os.SCHED_IDLE)


DRIVER = """
import sys, time
sys.path.insert(0, {root!r})
from bssearch.boards.process import BoardProcess
from tests.boards.test_process import STUDY
board = BoardProcess("fake", "tests.boards.fakes:{kind}")
board.wait_until_ready(time.monotonic() + 60)
board.report(STUDY)
print(board.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("kind", ["Keeping", pytest.param("Hanging", marks=pytest.mark.slow)])
def test_no_process_is_left_of_a_board_whose_driver_is_killed(kind: str, file: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    code = textwrap.dedent(DRIVER).format(root=root, kind=kind)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        board = psutil.Process(int(driver.stdout.readline()))
        wait_for(lambda: [call["call"] for call in told(file)] == ["opened"])
        family = [board, *board.children(recursive=True)]
        os.kill(driver.pid, signal.SIGKILL)
    assert len(family) == 2, "the board, and the shell that watches over it"
    alive = psutil.wait_procs(family, timeout=60)[1]
    assert not alive
    if kind == "Keeping":
        assert told(file)[-1]["call"] == "close", "what it was told is written"


def test_a_board_that_was_told_nothing_is_ended_at_once(
    board: Callable[..., BoardProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SILENT_SECONDS", 1e9)
    monkeypatch.setattr(process, "LAST_SECONDS", 1e9)
    one = board("Hanging")
    one.close()
    assert one.take_notes() == []
    assert not psutil.pid_exists(one.pid)


def test_the_first_trial_waits_for_a_board_only_so_long(file: Path) -> None:
    one = BoardProcess("fake", "tests.boards.fakes:Keeping")
    one.wait_until_ready(time.monotonic())
    one.report(STUDY)
    one.close()
    assert one.take_notes() == ["fake: not ready after 0 s; the study goes on, and its reports wait"]
    assert [call["call"] for call in told(file)] == ["opened", "close"]
