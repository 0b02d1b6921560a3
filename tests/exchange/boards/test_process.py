"""The boards' process: reports arrive, faulty boards delay no run, and lost reports are counted."""

import importlib.metadata
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

import bssearch as library
from bssearch import SpecError, StudySpec, UsageError, load_spec, open_store, registry
from bssearch.exchange.boards import base
from bssearch.exchange.boards.base import LIBRARIES, BoardProcess, boards_of, check_boards, without_secrets
from bssearch.records import TrialRecord, grouped
from bssearch.settings import BOARD_PROCESS
from tests.cli.task import INLINE, SPEC, refused, write_task
from tests.exchange.boards.conftest import Notebook
from tests.factories import make_spec, not_none
from tests.search.law import LawExecutor
from tests.waiting import Ear, wait_for

Start = Callable[..., BoardProcess]
FOREVER = 1e9


def report_study(boards: BoardProcess) -> None:
    about = {"target": "accuracy >= 0.9", "objective": "time_to_target", "device": "cpu", "spec": ""}
    boards.report("opened", name="task", mark="0123", metric="accuracy", about=about)


def opened(boards: BoardProcess) -> BoardProcess:
    """Report the study to boards."""
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
    """Tests wait for slow boards, unless they call `at_the_deadline`."""
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
    wait_for(lambda: boards.delivered["Keeping"] == boards.asked)  # then all reports wait for the other board, too
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
def test_a_sleeping_board_is_killed_at_the_deadline_and_the_other_has_all_reports(
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


def test_a_board_that_holds_the_interpreter_delays_no_report(
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


def test_a_full_pipe_delays_no_report(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    boards = start("Keeping")
    os.kill(boards.pid, signal.SIGSTOP)
    for number in range(200):  # more than the pipe takes
        report_trial(boards, number, text="x " * 5_000)
    at_the_deadline(monkeypatch)
    boards.close()
    assert boards.asked - boards.delivered["Keeping"] > 0
    assert len(boards.notes) == 1


def test_a_full_queue_drops_further_reports_and_counts_them(start: Start, notebook: Notebook) -> None:
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
def test_a_board_that_raises_at_construction_is_named_with_its_reason(
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


def test_a_failing_report_is_tried_three_times_without_its_password_in_a_note(start: Start, notebook: Notebook) -> None:
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


def test_a_board_that_crashes_is_named_with_its_last_line(start: Start, notebook: Notebook) -> None:
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


def test_boards_without_reports_end_at_once(start: Start) -> None:
    boards = start("Sleeping")
    boards.close()
    assert not boards.notes
    assert not psutil.pid_exists(boards.pid)


def test_a_board_may_print_and_read(start: Start, notebook: Notebook) -> None:
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
def test_a_board_has_its_settings_but_no_database_no_gpu_and_low_priority(
    start: Start, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BSSEARCH_DB_URL", "postgresql://ada:secret@host/data")
    monkeypatch.setenv("PGPASSWORD", "secret")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "its own")
    opened(start("Environment")).close()
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
    code = textwrap.dedent(DRIVER).format(root=str(Path(__file__).resolve().parents[3]), kind=kind)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        board = psutil.Process(int(not_none(driver.stdout).readline()))
        wait_for(lambda: notebook.names(kind) == ["opened"])
        family = [board, *board.children(recursive=True)]
        os.kill(driver.pid, signal.SIGKILL)
    assert len(family) == 2, "the boards, and the shell that kills them"
    assert not psutil.wait_procs(family, timeout=300)[1]
    if kind == "Keeping":
        assert notebook.names(kind)[-1] == "close", "its reports are written"


# Boards of a study ----------------------------------------------------------------------------------------------------


def run(folder: Path, *boards: str) -> tuple[library.Answer, list[TrialRecord], list[str]]:
    """Run a study; return its answer, its trials and its boards' notes."""
    url, ear = f"sqlite:///{folder / '-'.join(['study', *boards])}.db", Ear()
    spec = make_spec(log=list(boards), budget={"trials": 8, "trial_train_seconds": 10.0})
    answer = library.run_study(spec, library.Launch(db=url, make_executor=lambda *_: LawExecutor(), listener=ear))
    with open_store(url, write=False) as store:
        return answer, store.trials.of(spec.name), [note for note in ear.notes if note.partition(":")[0] in boards]


@pytest.mark.slow
@pytest.mark.parametrize("board", ["Sleeping", "Holding", "Unmade", "Absent", "Missing", "Away", "Crashing"])
def test_a_study_with_a_bad_board_is_the_study_without_it(
    board: str, tmp_path: Path, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "SILENT_SECONDS", 0.0)
    answer, trials, notes = run(tmp_path, board)
    alone, trials_alone, _ = run(tmp_path)
    assert answer.optimal.batch_size == alone.optimal.batch_size
    assert [(one.state, one.configuration) for one in trials] == [
        (one.state, one.configuration) for one in trials_alone
    ]
    assert len([note for note in notes if " of " in note]) == 1, "the count is reported once"


def test_a_board_gets_the_stored_trials(tmp_path: Path, notebook: Notebook) -> None:
    answer, trials, notes = run(tmp_path, "Keeping")
    assert notes == []
    with open_store(f"sqlite:///{tmp_path}/study-Keeping.db", write=False) as store:
        curves = store.trials.curves(answer.study, [trial.number for trial in trials])
    calls = notebook.calls("Keeping")
    of = grouped((call["call"], call) for call in calls)
    assert [calls[0]["call"], calls[-2]["call"], calls[-1]["call"]] == ["opened", "answered", "close"]
    assert set(calls[0]["about"]) == {"target", "objective", "device", "spec"}
    assert [call["number"] for call in of["started"]] == [trial.number for trial in trials]
    for trial, start, end in zip(trials, of["started"], of["ended"], strict=True):
        assert start["at"] == trial.created_at.timestamp()
        expected = {"batch_size": trial.configuration.batch_size, "phase": trial.phase, "seed": trial.seed}
        assert expected.items() <= start["parameters"].items()
        assert (end["number"], end["state"], end["is_elsewhere"]) == (trial.number, trial.state, False)
        assert end["figures"]["train_seconds"] == not_none(trial.outcome).train_seconds
        points = [point for call in of["observed"] if call["number"] == trial.number for point in call["points"]]
        for (step, at, figures), stored in zip(points, curves[trial.number], strict=True):
            assert (step, figures["accuracy"], figures["samples"]) == (stored.step, stored.metric, stored.samples)
            assert at == pytest.approx(start["at"] + stored.train_seconds)
    last = of["answered"][-1]
    assert last["trials"] == len(trials)
    assert library.Answer.model_validate_json(last["words"]["document"]).optimal == answer.optimal
    assert last["figures"]["optimal_batch_size"] == last["parameters"]["batch_size"] == answer.optimal.batch_size
    assert (last["figures"]["flat_range_low"], last["figures"]["flat_range_high"]) == tuple(answer.flat_range)


def test_a_process_that_cannot_start_fails_no_study(
    tmp_path: Path, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bssearch.commands.reporting.BoardProcess", Mock(side_effect=OSError("no process left")))
    _, trials, _ = run(tmp_path, "Keeping")
    assert trials
    assert notebook.calls("Keeping") == []


# Which boards ---------------------------------------------------------------------------------------------------------


def test_the_variable_adds_to_the_boards_of_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(log=["mlflow"])
    assert boards_of(spec) == ("mlflow",)
    monkeypatch.setenv("BSSEARCH_LOG", " tensorboard,mlflow ,")
    assert boards_of(spec) == ("mlflow", "tensorboard")


def test_an_unknown_board_is_refused_with_the_known_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="tensorboard, mlflow, wandb"):
        load_spec({**SPEC, "log": ["mflow"]})
    with pytest.raises(SpecError, match="'mlflow'"):
        load_spec({**SPEC, "log": ["mlflow", "mlflow"]})
    monkeypatch.setenv("BSSEARCH_LOG", "tensorbord")
    with pytest.raises(
        UsageError, match=r"BSSEARCH_LOG names the unknown board 'tensorbord'.* tensorboard, mlflow, wandb"
    ):
        boards_of(make_spec())


@pytest.mark.usefixtures("notebook")
def test_a_board_of_another_package_needs_no_library_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSSEARCH_LOG", "Away")
    names = boards_of(make_spec(log=["Keeping"]))
    assert names == ("Keeping", "Away")
    check_boards(names)


def test_boards_are_no_part_of_the_question() -> None:
    assert make_spec(log=["mlflow"]).question_hash == make_spec().question_hash


def installed(monkeypatch: pytest.MonkeyPatch, *versions: str) -> None:
    """Pretend that each distribution is installed in these versions."""
    found = [SimpleNamespace(version=version) for version in versions]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: found)


@pytest.mark.parametrize("command", [("run",), ("run", "--dry-run"), ("check",)], ids=" ".join)
def test_a_board_that_is_not_installed_is_refused_before_the_run(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch)
    error = refused(tmp_path, *command, write_task(tmp_path, log=["mlflow"], executor=INLINE).name, code=2)
    assert "board mlflow needs mlflow-skinny >= 3; installed: no version" in error
    assert "pip install 'bssearch[mlflow]'" in error
    assert not (tmp_path / "bssearch.db").exists()


@pytest.mark.parametrize(("name", "oldest", "older"), [("mlflow", "3.0", "2.22.0"), ("wandb", "0.19.10", "0.19.9")])
def test_a_board_whose_library_is_too_old_is_refused(
    name: str, oldest: str, older: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, oldest)
    check_boards([name])
    installed(monkeypatch, older)
    with pytest.raises(UsageError, match=rf"{name} .*; installed: {older}") as refused:
        check_boards([name])
    assert refused.value.hint == f"pip install 'bssearch[{name}]'"


def test_every_built_in_board_has_a_library_and_is_in_the_schema() -> None:
    names = list(registry.BUILT_IN["boards"])
    assert set(names) == set(LIBRARIES)
    items = StudySpec.model_json_schema()["properties"]["log"]["items"]
    assert items == {"anyOf": [{"enum": names}, {"type": "string"}]}


def test_texts_with_the_name_of_a_secret_are_masked() -> None:
    values = {
        "workload_settings": {"password": "x", "hf_token": "x", "tokens": 5, "tokenizer": "bpe", "n": [1, 2]},
        "command": ["./train", "--api-key=x", "--password", "x", "--lr", "0.1"],
    }
    assert without_secrets(values) == {
        "workload_settings": {"password": "***", "hf_token": "***", "tokens": 5, "tokenizer": "bpe", "n": [1, 2]},
        "command": ["./train", "--api-key=***", "--password", "***", "--lr", "0.1"],
    }
