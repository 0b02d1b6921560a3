"""Messages survive the way through a pipe, and NaN does not get onto it."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from bssearch.errors import LaunchError, WorkloadError
from bssearch.executors import base
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
from bssearch.records import (
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
from bssearch.records.measured import MOST_TEST_METRICS
from bssearch.records.text import LONGEST_TEXT
from tests.executors.line_workload import request_trial
from tests.factories import changed

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


@pytest.mark.parametrize("command", COMMANDS, ids=kind_of)
def test_a_command_arrives_as_it_was_sent(command: Command) -> None:
    line = encode(command)
    assert line.count(b"\n") == 1
    assert decode_command(line) == command


@pytest.mark.parametrize("reply", REPLIES, ids=kind_of)
def test_a_reply_arrives_as_it_was_sent(reply: Reply) -> None:
    line = encode(reply)
    assert line.count(b"\n") == 1
    assert decode_reply(line) == reply


def test_parameters_keep_their_types_and_with_them_the_configurations_key() -> None:
    decoded = decode_command(encode(REQUEST))
    assert isinstance(decoded, TrialRequest)
    parameters = decoded.plan.configuration.parameters
    assert {name: type(value) for name, value in parameters.items()} == {
        name: type(value) for name, value in REQUEST.plan.configuration.parameters.items()
    }
    assert decoded.plan.configuration.key == REQUEST.plan.configuration.key


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
