"""`current_trial` for loops inside and outside a search."""

import atexit
import importlib
import os
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from bssearch.errors import LaunchError, TrialStopped, UsageError, require, required
from bssearch.executors.base import (
    CHUNK_BYTES,
    HEARTBEAT_SECONDS,
    TRIAL_VARIABLE,
    Assign,
    LineSplitter,
    Reply,
    decode_command,
    encode,
)
from bssearch.executors.loops.assignment import Alone
from bssearch.executors.loops.measuring import Looked, end_work, failure_of, work_of
from bssearch.executors.loops.own_loop import Trial
from bssearch.executors.loops.ranks import FollowerWork, LaunchedRanks, LeaderWork, check_ranks, ranks_of
from bssearch.executors.loops.trial_run import TrialRun
from bssearch.records import MAKE_TRAINER, Configuration, ParameterValue, TrialRequest, TrialState, TrialStop
from bssearch.training.memory import limit_memory
from bssearch.training.trainer import seed_everything
from bssearch.workloads.base import import_file

LOOK_SECONDS = 0.02  # least interval between checks for a stop, because each check takes a microsecond


class SocketLine:
    """A program's connection to its search."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        self._lines = LineSplitter()
        self._waiting: list[bytes] = []
        self._stop: tuple[TrialState, str] | None = None
        self._sent = self._looked = time.monotonic()

    @classmethod
    def at(cls, path: str) -> Self:
        """Connect to a search. Raises `LaunchError` if the connection fails."""
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(path)
        except OSError as error:
            line.close()
            raise LaunchError(
                f"cannot connect to a search at {path}: {error}",
                hint="let only one program call current_trial(), once, before the first report; "
                "if the path is too long, set TMPDIR to a shorter path",
            ) from error
        return cls(line.detach())

    def assignment(self) -> Assign:
        """Wait for the assignment. Raises `ValueError` if the search sends another message or ends."""
        while not self._waiting:
            chunk = self._socket.recv(CHUNK_BYTES)
            if not chunk:
                raise ValueError("the search closed the connection")
            self._waiting += self._lines.feed(chunk)
        found = decode_command(self._waiting.pop(0))
        if not isinstance(found, Assign):
            raise ValueError(f"the first message is a {type(found).__name__}; expected an Assign")
        return found

    def send(self, reply: Reply) -> None:
        """Send a reply, or exit if the search is gone."""
        try:
            self._socket.sendall(encode(reply))
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)
        self._sent = time.monotonic()

    def progressed(self) -> None:
        if time.monotonic() - self._sent >= HEARTBEAT_SECONDS:
            self.send("heartbeat")

    def asked_to_stop(self) -> tuple[TrialState, str] | None:
        now = time.monotonic()
        if self._stop is None and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._look()
        return self._stop

    def _look(self) -> None:
        try:
            chunk = self._socket.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            os._exit(1)
        if not chunk:
            os._exit(1)
        for line in self._lines.feed(chunk):
            command = decode_command(line)
            if isinstance(command, TrialStop):
                self._stop = command.state, command.reason


class Session:
    """The work that a search gives to this process."""

    def __init__(self, line: SocketLine) -> None:
        self.line = line
        self.assign = line.assignment()
        self.work: TrialRun | Looked | None = None
        self.trial: Trial | None = None

    def take(
        self, given: dict[str, ParameterValue], ranks: LaunchedRanks | None = None
    ) -> TrialRun | Looked | LeaderWork:
        """Return the assigned work, as a `LeaderWork` if there are ``ranks``.

        Raises `UsageError` at a second call, or if several ranks must branch off a checkpoint.
        """
        require(
            self.work is None,
            "the script calls current_trial() twice: call current_trial() once, because a script trains one trial",
        )
        prepare(self.assign)
        self.assign = replace(self.assign, given=given)
        if ranks is None:
            self.work = work_of(self.assign, self.line)
            return self.work
        require(
            not isinstance(self.assign.work, TrialRequest) or self.assign.work.branch is None,
            f"{ranks.size} ranks cannot branch off a checkpoint; start one process",
        )
        leader = LeaderWork(self.assign, self.line, ranks)
        self.work = leader.work
        return leader

    def ended(self, script: str, error: BaseException | None) -> None:
        work = self.work
        if work is None:
            error = error or UsageError(
                f"{script} has ended without calling current_trial()",
                hint="call bssearch.current_trial(batch_size=64, learning_rate=3e-4)",
            )
            self.line.send(failure_of(self.assign, error))
            return
        if work.is_over and error is not None and not isinstance(error, TrialStopped):
            traceback.print_exception(error)  # from the script's clean-up after the trial
        end_work(
            work, self.assign, self.line, error, lambda: work.looped(0 if self.trial is None else self.trial.steps)
        )


_session: Session | None = None


def session() -> Session | None:
    """Return this process's session, or None outside a search."""
    global _session
    if _session is None and (line := os.environ.pop(TRIAL_VARIABLE, None)) is not None:
        if line.isdecimal():
            _session = Session(SocketLine(int(line)))
        else:
            _session = Session(SocketLine.at(line))
            _tell_the_end(_session)
    return _session


def _tell_the_end(found: Session) -> None:
    process, show = os.getpid(), sys.excepthook
    raised: list[BaseException] = []

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        raised.append(error)
        show(kind, error, trace)

    def tell() -> None:
        if os.getpid() == process:
            found.ended(sys.argv[0], raised[0] if raised else None)

    sys.excepthook = note
    atexit.register(tell)


def prepare(assign: Assign) -> None:
    device = torch.device(assign.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if assign.memory_limit_bytes is not None:
        limit_memory(device, assign.memory_limit_bytes)
    if assign.plan is not None:
        torch.set_num_threads(assign.plan.threads)


def current_trial(
    *,
    batch_size: int,
    learning_rate: float,
    seed: int = 0,
    evaluate_every: int | None = None,
    steps: int | None = None,
    **parameters: ParameterValue,
) -> Trial:
    """Return the trial to train, and seed Python, NumPy and PyTorch.

    Outside a search, the trial has the given values.

    Args:
        batch_size: samples (or tokens) per optimizer step, of all ranks together.
        evaluate_every: steps between evaluations outside a search; by default an evaluation follows each pass.
        steps: steps outside a search; by default the run continues until the loop ends.
        parameters: defaults of ``trial.parameters``.

    Every rank of a launcher such as torchrun must call this function after initialising torch.distributed.

    Raises:
        UsageError: a second call in a search, uninitialised torch.distributed, a wrong number of ranks, a batch size
            that the number of ranks does not divide, or an invalid value.
        LaunchError: the connection to the search fails.

    ::

        trial = bssearch.current_trial(batch_size=64, learning_rate=0.1)
        for x, y in trial.batches(make_loader, evaluate=lambda: {"accuracy": accuracy(model)}):
            train_step(model, x, y, trial.learning_rate)
    """
    require(batch_size >= 1, f"current_trial(): batch_size = {batch_size} must be >= 1")
    ranks = None if _session and _session.assign.configuration.world_size == 1 else ranks_of(os.environ)
    size = 1 if ranks is None else ranks.size
    require(
        batch_size % size == 0,
        f"current_trial(): batch_size = {batch_size} must be a multiple of {size}, the number of ranks",
    )
    configuration = Configuration(
        batch_size=batch_size, learning_rate=learning_rate, micro_batch_size=batch_size // size, world_size=size
    )
    alone = Alone(configuration, seed, parameters, evaluate_every, steps, prints=ranks is None or ranks.rank == 0)
    trial = _trial_of_one(alone, parameters) if ranks is None else _trial_of_several(alone, parameters, ranks)
    trial.given = {
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "evaluate_every": evaluate_every,
        "steps": steps,
        **parameters,
    }
    seed_everything(trial.seed)
    return trial


def _trial_of_one(alone: Alone, given: dict[str, ParameterValue]) -> Trial:
    found = session()
    if found is None:
        return Trial(alone)
    check_ranks(1, found.assign.configuration.world_size)
    found.trial = Trial(found.take(given))
    return found.trial


def _trial_of_several(alone: Alone, given: dict[str, ParameterValue], ranks: LaunchedRanks) -> Trial:
    found = session() if ranks.rank == 0 else None
    os.environ.pop(TRIAL_VARIABLE, None)  # only rank 0 connects to the search
    said = ranks.share(None if found is None else encode(found.assign))
    if said is None:
        alone.device = ranks.device_of(alone.device)
        return Trial(alone, rank=ranks.rank)
    assign = decode_command(said)
    assert isinstance(assign, Assign), "rank 0 shared a message that is not an Assign"
    check_ranks(ranks.size, assign.configuration.world_size)
    assign = replace(assign, device=ranks.device_of(assign.device))
    if found is None:
        prepare(assign)
        return Trial(FollowerWork(replace(assign, given=given), ranks), rank=ranks.rank)
    found.assign = assign
    found.trial = Trial(found.take(given, ranks))
    return found.trial


# (package, class) of a Trainer: module whose ``fit_made(trial, made)`` trains with the Trainer
FITTERS = {
    ("lightning", "Trainer"): "bssearch.executors.loops.lightning",
    ("pytorch_lightning", "Trainer"): "bssearch.executors.loops.lightning",
    ("transformers", "Trainer"): "bssearch.executors.loops.transformers",
}


def train_made(name: str, default: Configuration) -> None:
    """Train with the result of a file's ``make_trainer(trial)``.

    ``default`` holds the code's own batch size and learning rate.
    """
    file, function = Path(name.removesuffix(MAKE_TRAINER)), MAKE_TRAINER.removeprefix(":")
    make: Any = getattr(import_file(name, file), function, None)
    require(
        callable(make),
        f"{file.name} has no function {function}",
        hint=f"write def {function}(trial): return trainer, ...",
    )
    trial = current_trial(batch_size=default.batch_size, learning_rate=default.learning_rate)
    fit_made(trial, make(trial))


def fit_made(trial: Trial, made: Any) -> None:
    """Train with a ``make_trainer`` result. Raises `UsageError` if the trainer's class is unknown."""
    trainer = made[0] if isinstance(made, tuple) and made else made
    kinds = ((one.__module__.partition(".")[0], one.__name__) for one in type(trainer).__mro__)
    found = required(
        next((FITTERS[kind] for kind in kinds if kind in FITTERS), None),
        f"make_trainer(trial) returned {type(trainer).__name__}; expected a trainer",
        hint=f"return a known trainer: {', '.join(sorted('.'.join(name) for name in FITTERS))}",
    )
    importlib.import_module(found).fit_made(trial, made)
