"""Which trial a script trains: that of the search which started it, or one of its own where nobody did."""

from __future__ import annotations

import os
import traceback

import torch

from bssearch.errors import TrialStopped, UsageError
from bssearch.executors.loaded import failed, program_refused
from bssearch.executors.messages import Describe, Reply, Run, TrialEnded
from bssearch.integrations.alone import Alone
from bssearch.integrations.line import TRIAL_VARIABLE, SocketLine
from bssearch.integrations.measuring import Looked
from bssearch.integrations.own_loop import LoopTrial
from bssearch.integrations.trial_run import TrialRun
from bssearch.integrations.work import work_of
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
        assign = self.assign
        device = torch.device(assign.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if assign.memory_limit_bytes is not None:
            limit_memory(device, assign.memory_limit_bytes)
        if not isinstance(assign.work, Describe):
            torch.set_num_threads(assign.work.request.threads)
        self.work = work_of(assign, {**given, **assign.parameters}, self.line)
        return self.work

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
            self.line.send(self._failure(error))

    @property
    def steps(self) -> int:
        """Return the steps that the trial has taken."""
        return 0 if self.trial is None else self.trial.steps

    def _failure(self, error: BaseException) -> Reply:
        asked = self.assign.work
        if isinstance(asked, Run):
            return TrialEnded(number=asked.request.number, outcome=failed(error))
        return program_refused(error, self.assign.memory_limit_bytes)


_session: Session | None = None


def session() -> Session | None:
    """Return the session of this process; None where no search has started it."""
    global _session
    if _session is None and (descriptor := os.environ.pop(TRIAL_VARIABLE, None)) is not None:
        _session = Session(SocketLine(int(descriptor)))
    return _session


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

    Alone the script trains with the values given here, is evaluated after every ``evaluate_every`` steps (None: never)
    and ends after ``steps`` of them (None: where its loop does); under a search with those of its trial.
    ``parameters`` are more of the script's own: where the study sets one of these names ``trial.parameters`` has the
    study's value. Raises `UsageError` where it is called a second time under a search, and for a value that no training
    can have.
    """
    found = session()
    if found is None:
        if batch_size < 1:
            raise UsageError(f"current_trial(batch_size={batch_size}): must be >= 1")
        configuration = Configuration(batch_size=batch_size, learning_rate=learning_rate, micro_batch_size=batch_size)
        trial = LoopTrial(Alone(configuration, seed, parameters, evaluate_every, steps))
    else:
        trial = found.trial = LoopTrial(found.take(parameters))
    seed_everything(trial.seed)
    return trial
