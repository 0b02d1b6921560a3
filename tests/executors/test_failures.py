"""How endings are told apart and put into words."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bssearch.errors import UsageError
from bssearch.executors import process
from bssearch.executors.process import (
    describe_exception,
    describe_exit,
    judge_exit,
    kernel_memory_kills,
    printed,
    tail,
    words_of_no_memory,
)
from bssearch.records import TrialState
from bssearch.workloads.fashion_mnist import read_idx


@pytest.mark.parametrize(
    ("return_code", "words"),
    [
        (0, "worker exited with code 0"),
        (3, "worker exited with code 3"),
        (-signal.SIGSEGV, "worker killed by SIGSEGV (signal 11)"),
        (-signal.SIGKILL, "worker killed by SIGKILL (signal 9)"),
        (-signal.SIGRTMIN - 1, f"worker killed by a signal (signal {signal.SIGRTMIN + 1})"),
    ],
)
def test_an_exit_is_told_by_its_code_or_signal(return_code: int, words: str) -> None:
    assert describe_exit(return_code) == words


@pytest.mark.parametrize(
    ("return_code", "before", "after", "state"),
    [
        (-signal.SIGKILL, 4, 5, TrialState.OOM),
        (-signal.SIGKILL, 4, 4, TrialState.FAILED),
        (-signal.SIGKILL, None, None, TrialState.FAILED),
        (-signal.SIGSEGV, 4, 5, TrialState.FAILED),
        (1, 4, 5, TrialState.FAILED),
    ],
)
def test_a_sigkill_while_the_kernel_killed_for_memory_is_out_of_memory(
    return_code: int,
    before: int | None,
    after: int | None,
    state: TrialState,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "kernel_memory_kills", lambda: after)
    found, reason = judge_exit(return_code, before)
    assert found is state
    assert reason.startswith(describe_exit(return_code))
    assert ("out of host memory" in reason) == (state is TrialState.OOM)


@pytest.mark.parametrize(
    ("return_code", "printed", "state"),
    [
        (-signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'", TrialState.OOM),
        (1, "libgomp: Out of memory allocating 800 bytes", TrialState.OOM),
        (-signal.SIGABRT, "corrupted double-linked list", TrialState.FAILED),
        (-signal.SIGSEGV, "Fatal Python error: Segmentation fault", TrialState.FAILED),
        (-signal.SIGKILL, "std::bad_alloc", TrialState.FAILED),
    ],
)
def test_a_death_is_out_of_memory_where_the_last_words_say_so_however_long_the_stack_after_them(
    return_code: int, printed: str, state: TrialState, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    before = "std::bad_alloc, caught in the trial before\n"
    log.write_text(f"{before}{printed}\n" + "  File x.py, line 1 in f\n" * 100)
    found, reason = judge_exit(return_code, None, words_of_no_memory(log, len(before)))
    assert found is state
    assert (printed in reason) == (state is TrialState.OOM)


def test_the_kernels_counter_is_a_number_or_not_there() -> None:
    kills = kernel_memory_kills()
    assert kills is None or kills >= 0


def test_an_exception_is_told_with_the_users_own_line_not_the_librarys(tmp_path: Path) -> None:
    code = tmp_path / "own.py"
    code.write_text("import json\n\ndef read():\n    return json.loads('nonsense')\n")
    names: dict[str, object] = {}
    exec(compile(code.read_text(), str(code), "exec"), names)
    with pytest.raises(ValueError) as caught:
        names["read"]()  # type: ignore[operator]
    words = describe_exception(caught.value)
    assert words.startswith("JSONDecodeError: ")
    assert words.endswith(f"({code}:4: return json.loads('nonsense'))")


@pytest.mark.parametrize(
    ("mistake", "place"),
    [
        (lambda: json.loads("nonsense"), f"({__file__}:"),
        (lambda: describe_exit("not a number"), f"({__file__}:"),  # type: ignore[arg-type]
        (lambda: read_idx("no path", 1), f"{os.sep}workloads{os.sep}fashion_mnist.py:"),  # type: ignore[arg-type]
    ],
    ids=["beside the package", "in the package", "a shipped workload"],
)
def test_the_line_of_an_exception_is_the_users_or_that_of_a_shipped_workload(
    mistake: Callable[[], object], place: str
) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)) as caught:
        mistake()
    assert place in describe_exception(caught.value)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError(), "KeyError"),
        (ValueError("no such table"), "ValueError: no such table"),
        (UsageError("batch_size = 0 must be > 0"), "batch_size = 0 must be > 0"),
    ],
)
def test_an_exception_without_a_line_of_the_user_is_told_by_its_type_and_one_of_our_own_by_itself(
    error: Exception, told: str
) -> None:
    assert describe_exception(error) == told


def test_a_batch_of_one_sample_names_the_layer_of_batch_normalisation() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.body(inputs)

    for model, named in ((Net(), "'body.1' (BatchNorm1d)"), (nn.BatchNorm1d(3), "(BatchNorm1d)")):
        with pytest.raises(ValueError) as caught:
            model(torch.zeros(1, 3))
        words = describe_exception(caught.value)
        assert named in words and "drop_last=True" in words


def test_a_tail_is_the_last_lines_from_a_place_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"before\n" + b"".join(b"line %d\n" % number for number in range(100)) + b"\xff\n")
    lines = tail(log, len(b"before\n")).splitlines()
    assert len(lines) == 40
    assert lines[0] == "line 61" and lines[-1] == "\N{REPLACEMENT CHARACTER}"
    assert "before" not in tail(log, len(b"before\n"))
    assert tail(log, log.stat().st_size) == ""


def test_of_a_long_log_the_beginning_and_the_end_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "slot.log"
    log.write_bytes(b"before\n" + b"first" + b"." * 200_000 + b"last")
    text = printed(log, start=7)
    assert text.startswith("first..")
    assert text.endswith("..last")
    assert f"… {200_009 - 49_152} bytes left out …" in text
    assert len(text) < 66_000
    assert printed(log, start=log.stat().st_size) == ""
    log.write_bytes(b"x" * 49_152)
    assert printed(log, start=0) == "x" * 49_152, "as much as is kept is whole"
