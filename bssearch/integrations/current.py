"""Which trial a script trains: that of the search which started it, or one of its own where nobody did."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from dataclasses import replace
from types import TracebackType

import torch

from bssearch.errors import TrialStopped, UsageError
from bssearch.executors.messages import (
    TRIAL_VARIABLE,
    Assign,
    Describe,
    Run,
    decode_command,
    encode,
)
from bssearch.integrations.alone import Alone
from bssearch.integrations.line import SocketLine
from bssearch.integrations.measuring import Looked
from bssearch.integrations.own_loop import LoopTrial
from bssearch.integrations.ranks import Follower, Leader, Ranks, RankTrial, SilentAlone, ranks_of
from bssearch.integrations.trial_run import TrialRun
from bssearch.integrations.work import failure_of, work_of
from bssearch.records import Configuration, ParameterValue
from bssearch.training.memory import limit_memory
from bssearch.training.trainer import seed_everything


class Session:
    """What a process was asked for, over its line to a search: one piece of work, with at most one trial."""

    def __init__(self, line: SocketLine) -> None:
        self.line = line
        self.assign = line.assignment()
        self.work: TrialRun | Looked | None = None
        self.trial: LoopTrial | None = None

    def take(self, given: dict[str, ParameterValue]) -> TrialRun | Looked:
        """Return the work; ``given`` are parameters of the script's own, which stand where the study sets none."""
        if self.work is not None:
            raise UsageError("current_trial() is called twice: a script trains one trial")
        prepare(self.assign)
        self.work = work_of(self.assign, {**given, **self.assign.parameters}, self.line)
        return self.work

    def lead(self, given: dict[str, ParameterValue], ranks: Ranks) -> Leader:
        """Return the work of several ranks, of which this is the first; see `take`."""
        if isinstance(self.assign.work, Run) and self.assign.work.request.branch is not None:
            raise UsageError("a training of several ranks cannot branch off a checkpoint: start it in one process")
        prepare(self.assign)
        leader = Leader(self.assign, {**given, **self.assign.parameters}, self.line, ranks)
        self.work = leader.work
        return leader

    def ended(self, script: str, error: BaseException | None) -> None:
        """Tell how the script ended, with an ``error`` or by itself."""
        work = self.work
        if work is not None and work.is_over:
            if error is not None and not isinstance(error, TrialStopped):
                traceback.print_exception(error)  # while it cleaned up: its trial has ended before
            work.finish()
            return
        if error is None and work is None:
            error = UsageError(
                f"{script} has ended without asking for its trial",
                hint="trial = bssearch.current_trial(batch_size=64, learning_rate=3e-4)",
            )
        if error is None and work is not None:
            try:
                work.looped(self.steps)
            except UsageError as refused_end:
                error = refused_end
        if work is not None and work.is_over:
            work.finish()
        elif error is not None and not (work is not None and work.failed(error)):
            self.line.send(failure_of(self.assign, error))

    @property
    def steps(self) -> int:
        """Return the steps that the trial has taken."""
        return 0 if self.trial is None else self.trial.steps


_session: Session | None = None


def session() -> Session | None:
    """Return the session of this process; None where no search has started it."""
    global _session
    if _session is None and (line := os.environ.pop(TRIAL_VARIABLE, None)) is not None:
        if line.isdecimal():
            _session = Session(SocketLine(int(line)))
        else:
            _session = Session(SocketLine.at(line))
            _tell_the_end(_session)
    return _session


def _tell_the_end(found: Session) -> None:
    """Have a process that nobody but itself ends tell its search how it does, when it does."""
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
    """Set the device of this process, its memory limit and its threads, as they are assigned."""
    device = torch.device(assign.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if assign.memory_limit_bytes is not None:
        limit_memory(device, assign.memory_limit_bytes)
    if not isinstance(assign.work, Describe):
        torch.set_num_threads(assign.work.request.threads)


def current_trial(
    *,
    batch_size: int,
    learning_rate: float,
    seed: int = 0,
    evaluate_every: int | None = None,
    steps: int | None = None,
    **parameters: ParameterValue,
) -> LoopTrial:
    """Return the trial that this script is to train, and set all random generators to its seed.

    Alone the script trains with the values given here, is evaluated after every ``evaluate_every`` steps (None: after
    each pass of `LoopTrial.batches`) and ends after ``steps`` of them (None: where its loop does); under a search with
    those of its trial.
    ``parameters`` are more of the script's own: where the study sets one of these names ``trial.parameters`` has the
    study's value.

    Under a launcher such as torchrun every rank calls it, once torch.distributed is initialised: the first one asks,
    all get the same trial, and are seeded alike. Raises `UsageError` where it is called a second time under a search,
    where ``WORLD_SIZE`` is more than 1 and torch.distributed is not initialised, for a batch that the ranks cannot
    share, and for a value that no training can have; `LaunchError` where the search that started it no longer listens.
    """
    if batch_size < 1:
        raise UsageError(f"current_trial(batch_size={batch_size}): must be >= 1")
    ranks = None if _session is not None else ranks_of(os.environ)
    kind = Alone if ranks is None or ranks.rank == 0 else SilentAlone
    configuration = Configuration(batch_size=batch_size, learning_rate=learning_rate, micro_batch_size=batch_size)
    alone = kind(configuration, seed, parameters, evaluate_every, steps)
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


def _trial_of_one(alone: Alone, given: dict[str, ParameterValue]) -> LoopTrial:
    """Return the trial of a process that trains by itself: ``alone`` where no search has started it."""
    found = session()
    if found is None:
        return LoopTrial(alone)
    work, assign = found.take(given), found.assign
    found.trial = LoopTrial(work, searched=assign.searched, needs_samples=assign.needs_samples)
    return found.trial


def _trial_of_several(alone: Alone, given: dict[str, ParameterValue], ranks: Ranks) -> RankTrial:
    """Return the trial of one of several ranks: ``alone`` where no search has started them."""
    found = session() if ranks.rank == 0 else None
    os.environ.pop(TRIAL_VARIABLE, None)  # the others' line is the first one's
    said = ranks.share(None if found is None else encode(found.assign))
    if said is None:
        alone.device = ranks.device_of(alone.device)
        return RankTrial(alone, ranks)
    assign = decode_command(said)
    assert isinstance(assign, Assign), "the first rank shares what it is assigned"
    assign = replace(assign, device=ranks.device_of(assign.device))
    if found is None:
        prepare(assign)
        return RankTrial(Follower(assign, {**given, **assign.parameters}, ranks), ranks)
    found.assign = assign
    leader = found.lead(given, ranks)
    trial = RankTrial(leader, ranks, searched=assign.searched, needs_samples=assign.needs_samples)
    found.trial = trial
    return trial
