"""Words for endings and exceptions, and messages through a pipe."""

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bssearch.errors import BSSearchError, LaunchError, UsageError, WorkloadError
from bssearch.executors import base, process
from bssearch.executors.base import (
    Command,
    ExecutorSettings,
    LineSplitter,
    Program,
    Reply,
    decode_command,
    decode_reply,
    encode,
)
from bssearch.executors.failures import failed, not_measured, refused
from bssearch.executors.process import (
    describe_exception,
    describe_exit,
    judge_exit,
    printed,
    tail,
    words_of_no_memory,
)
from bssearch.executors.rank_workers import _failure
from bssearch.records import (
    MOST_TEST_METRICS,
    Environment,
    MemoryRequest,
    MetricInfo,
    ModelDescription,
    Observation,
    StepTime,
    StepTimeRequest,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRequest,
    TrialState,
    TrialStop,
    WorkloadDescription,
)
from bssearch.records.text import LONGEST_TEXT
from bssearch.workloads.fashion_mnist import read_idx
from tests.executors.line_workload import request_trial
from tests.factories import changed


@pytest.mark.parametrize(
    ("return_code", "words"),
    [
        (0, "the worker exited with code 0"),
        (3, "the worker exited with code 3"),
        (-signal.SIGSEGV, "the worker was killed by SIGSEGV (signal 11)"),
        (-signal.SIGKILL, "the worker was killed by SIGKILL (signal 9)"),
        (-signal.SIGRTMIN - 1, f"the worker was killed by a signal (signal {signal.SIGRTMIN + 1})"),
    ],
)
def test_an_exit_is_told_by_its_code_or_signal(return_code: int, words: str) -> None:
    assert describe_exit(return_code) == words


@pytest.mark.parametrize("kind", [WorkloadError, LaunchError])
def test_the_hint_of_an_error_reaches_the_driver(kind: type[BSSearchError]) -> None:
    error = kind("no data", hint="name the data")
    request = MemoryRequest(configuration=request_trial(1).plan.configuration)
    assert failed(error).reason == "no data; name the data"
    assert not_measured(error, request).as_error().hint == "name the data"
    assert failed(_failure(error, 1).error).reason == "rank 1: no data; name the data"


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
    assert ("host memory ran out" in reason) == (state is TrialState.OOM)


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


@pytest.mark.parametrize(("error", "lacks_memory"), [(MemoryError("full"), True), (ValueError("wrong"), False)])
def test_an_error_that_is_its_own_cause_is_refused(error: Exception, lacks_memory: bool) -> None:
    error.__cause__ = error
    assert refused(error, None).out_of_memory is lacks_memory


def test_a_batch_norm_over_one_sample_has_a_remedy() -> None:
    with pytest.raises(ValueError) as caught:
        nn.BatchNorm1d(3)(torch.zeros(1, 3))
    assert "drop_last=True" in describe_exception(caught.value)


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


# Messages -------------------------------------------------------------------------------------------------------------


REQUEST = changed(
    request_trial(7),
    configuration=replace(
        request_trial(7).plan.configuration,
        parameters={"momentum": 0.9, "nesterov": True, "horizon": 100, "name": "1", "one": 1.0, "none": None},
    ),
)
OBSERVATION = Observation(step=4, samples=32, train_seconds=0.1 + 0.2, metric=1e-17, loss=None, learning_rate=0.1)
DESCRIPTION = WorkloadDescription(
    train_samples=1,
    validation_samples=2,
    test_samples=3,
    metrics={"accuracy": MetricInfo(low=0.0, chance=0.1), "loss": MetricInfo()},
    environment=Environment(
        device_name="Grünes Gerät",
        device_type="cpu",
        device_memory_bytes=1 << 40,
        precision="float32",
        compile_mode="off",
        torch_version="2",
        cuda_version=None,
        driver_version=None,
        python_version="3",
        host="here",
        workload_revision=None,
    ),
    model=ModelDescription(parameters=4, batch_norm_layers=1, initial_metrics={"accuracy": 0.1, "loss": None}),
    tokens_per_sample=64,
)
STEP_TIME = StepTime(
    batch_size=8,
    micro_batch_size=4,
    step_seconds=0.1,
    evaluation_seconds=None,
    steps_timed=3,
    peak_memory_bytes=None,
)
OUTCOME = TrialOutcome(state=TrialState.REACHED, reason="two\nlines", steps_to_target=3, traceback="a\n\tb\u2028c")


def test_an_outcome_that_a_worker_sends_is_bounded() -> None:
    long = replace(OUTCOME, reason="x" * LONGEST_TEXT, traceback="y" * LONGEST_TEXT)
    line = encode(TrialEnded(number=7, outcome=long)).replace(b"xxx", b"xxxx").replace(b"yyy", b"yyyy")
    reply = decode_reply(line)
    assert isinstance(reply, TrialEnded) and reply.outcome.traceback is not None
    assert len(reply.outcome.reason) == len(reply.outcome.traceback) == LONGEST_TEXT
    metrics = ", ".join(f'"m{number}": 1.0' for number in range(MOST_TEST_METRICS + 1))
    line = encode(TrialEnded(number=7, outcome=OUTCOME))
    with pytest.raises(ValueError, match="1,001 test metrics"):
        decode_reply(line.replace(b'"further_test_metrics": null', f'"further_test_metrics": {{{metrics}}}'.encode()))
    with pytest.raises(ValueError, match=r"test metric mm.* has 1,001 characters"):
        replace(OUTCOME, further_test_metrics={"m" * 1001: 1.0})


def kind_of(message: Command | Reply) -> str:
    return message if isinstance(message, str) else type(message).__name__


COMMANDS: list[Command] = [
    base.Load(
        settings=ExecutorSettings(
            workload="a.py:B",
            workload_settings={"x": 1, "y": "2"},
            folder=Path("/a b"),
            slots="auto",
            threads=2,
            program=Program(default=REQUEST.plan.configuration, metric="accuracy", command=("train", "{seed}")),
            log_folder=Path("logs"),
        ),
        slot=1,
    ),
    base.Assign(
        work=MemoryRequest(configuration=REQUEST.plan.configuration, reserve=True),
        program=Program(default=REQUEST.plan.configuration, metric="accuracy", script="train.py"),
        given={"momentum": 0.9},
        device="cpu",
        revision="0",
    ),
    MemoryRequest(configuration=REQUEST.plan.configuration),
    "describe",
    StepTimeRequest(configuration=REQUEST.plan.configuration, threads=3),
    REQUEST,
    TrialStop(number=3, state=TrialState.PRUNED, reason="too slow"),
    "exit",
]
REPLIES: list[Reply] = [
    base.Loaded(device="cuda:1"),
    DESCRIPTION,
    base.Refused(error="workload", message="no", hint=None),
    "heartbeat",
    STEP_TIME,
    TrialObserved(number=3, observation=OBSERVATION),
    TrialEnded(number=3, outcome=OUTCOME, broken=True),
]


@pytest.mark.parametrize("message", [*COMMANDS, *REPLIES], ids=kind_of)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert (decode_command if message in COMMANDS else decode_reply)(line) == message


def test_parameters_keep_their_types_and_with_them_the_configurations_key() -> None:
    decoded = decode_command(encode(REQUEST))
    assert isinstance(decoded, TrialRequest)
    found, sent = decoded.plan.configuration, REQUEST.plan.configuration
    assert [type(value) for value in found.parameters.values()] == [type(value) for value in sent.parameters.values()]
    assert found.key == sent.key


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_are_refused(metric: float) -> None:
    with pytest.raises(ValueError):
        encode(TrialObserved(number=1, observation=replace(OBSERVATION, metric=metric)))


@pytest.mark.parametrize("line", [b"", b"hello", b"{}", b'{"kind": "run"}', b'{"kind": "heartbeat"}'])
def test_what_is_no_command_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode_command(line)


def test_refusals_become_the_error_they_name() -> None:
    workload = base.Refused(error="workload", message="a", hint="b").as_error()
    launch = base.Refused(error="launch", message="c").as_error()
    assert isinstance(workload, WorkloadError) and (workload.message, workload.hint) == ("a", "b")
    assert isinstance(launch, LaunchError) and (launch.message, launch.hint) == ("c", None)


def test_lines_are_put_together_from_any_chunks() -> None:
    stream = b"one\ntwo\n\nunfinished"
    lines = LineSplitter()
    found = [line for byte in stream for line in lines.feed(bytes([byte]))]
    assert found == [b"one", b"two", b""]
    assert LineSplitter().feed(stream) == found
