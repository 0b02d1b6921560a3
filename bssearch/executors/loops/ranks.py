"""A loop in several processes, the ranks of torch.distributed: the first reports, and all stop at the same step.

What the search says comes to the first rank alone. After each evaluation that one tells the others whether the trial is
over, and after which step the next evaluation is due; between two evaluations the ranks go on without a word. So a stop
or a limit takes effect at the next evaluation, and no rank waits for one that has left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, TypeVar

import torch
from torch import distributed

from bssearch.errors import UsageError
from bssearch.executors.loops.assignment import Assignment, Evaluate, Line, Metrics
from bssearch.executors.loops.measuring import Looked, TimedLoop, work_of
from bssearch.executors.loops.own_loop import LoopTrial
from bssearch.executors.loops.passes import RankSampler, SeededSampler
from bssearch.executors.loops.trial_run import TrialRun
from bssearch.executors.messages import Assign
from bssearch.records import TrialRequest

T = TypeVar("T")


class Ranks(Protocol):
    """The processes that train together, of which this is the one with the number ``rank``, from 0."""

    rank: int
    size: int

    def share(self, said: T | None) -> T | None:
        """Return to each rank what the first one says."""

    def wait(self) -> None:
        """Wait for all ranks."""

    def device_of(self, device: str) -> str:
        """Return the device of this rank, where the first one's is such."""


class DistributedRanks:
    """The ranks of torch.distributed's default group; see `Ranks`."""

    def __init__(self, local_rank: int) -> None:
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self._local_rank = local_rank
        self._uses_cuda = "nccl" in distributed.get_backend()
        if self._uses_cuda:
            torch.cuda.set_device(local_rank)

    def share(self, said: T | None) -> T | None:
        """Return to each rank what the first one says."""
        box = [said]
        distributed.broadcast_object_list(box, src=0)
        return box[0]

    def wait(self) -> None:
        """Wait for all ranks."""
        distributed.barrier(device_ids=[self._local_rank] if self._uses_cuda else None)

    def device_of(self, device: str) -> str:
        """Return the device of this rank: on CUDA the one with its number on this machine."""
        return f"cuda:{self._local_rank}" if torch.device(device).type == "cuda" else device


def ranks_of(environment: Mapping[str, str]) -> DistributedRanks | None:
    """Return the ranks that a launcher such as torchrun has started; None where this process trains by itself.

    Raises `UsageError` where ``WORLD_SIZE`` or ``LOCAL_RANK`` is no number, and where torch.distributed is not
    initialised.
    """
    if _number(environment, "WORLD_SIZE", 1) <= 1:
        return None
    if not distributed.is_available() or not distributed.is_initialized():
        raise UsageError(
            f"WORLD_SIZE = {environment['WORLD_SIZE']}, and torch.distributed is not initialised",
            hint='torch.distributed.init_process_group("gloo"), or "nccl", before bssearch.current_trial()',
        )
    return DistributedRanks(_number(environment, "LOCAL_RANK", 0))


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environment.get(name, str(otherwise))
    if not text.isdecimal():
        raise UsageError(f"{name} = {text!r} in the environment must be a whole number, from 0")
    return int(text)


@dataclass(frozen=True, slots=True)
class Word:
    """What the first rank tells the others: how the loop goes on.

    ``due`` are the steps after which the next evaluation is due; the loop may pass over all but the last. ``tests``
    says that a trial that is over evaluates its test part.
    """

    is_over: bool
    due: tuple[int, ...]
    tests: bool = False


class Follower(Assignment):
    """The assignment of a rank that is not the first."""

    def __init__(self, assign: Assign, ranks: Ranks) -> None:
        super().__init__(assign.configuration, assign)
        self.is_look = not isinstance(assign.work, TrialRequest)
        self.seed = assign.work.plan.seed if isinstance(assign.work, TrialRequest) else 0
        self._ranks = ranks
        self._steps = 0
        self._word = _heard(ranks)

    def begin(self) -> None:
        """Wait until all ranks begin."""
        self._ranks.wait()

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due, as the first rank has said."""
        return step in self._word.due

    def stepped(self, step: int, samples: int | None) -> None:
        """Raise `UsageError` where an evaluation was passed over."""
        check_evaluated(self._word, self._steps)
        self._steps = step

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        """Hear whether the trial is over; what this rank has found does not count."""
        self._ranks.wait()
        self._word = _heard(self._ranks)
        self.is_over = self._word.is_over

    def test(self, evaluate: Evaluate) -> None:
        """Evaluate the test part with the first rank."""
        if self._word.tests:
            evaluate()

    def looped(self, step: int, because: str = "") -> None:
        """The first rank tells of it."""
        self.is_over = True


class Leader(Assignment):
    """The assignment of the first rank, which does the ``work``.

    The trial ends at an evaluation alone, where all ranks hear of it, and nothing of it is paused.
    """

    def __init__(self, assign: Assign, line: Line, ranks: Ranks) -> None:
        super().__init__(assign.configuration, assign)
        self.work = _led_work(assign, line)
        self.seed = self.work.seed
        self.is_look = self.work.is_look
        self._ranks = ranks
        self._steps = 0
        first = self._due_after(-1)
        self._word = Word(False, (first, self._due_after(first)) if first == 0 else (first,))
        ranks.share(self._word)

    def begin(self) -> None:
        """Begin the training's time once all ranks do."""
        self._ranks.wait()
        self.work.begin()

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due, as the other ranks know it."""
        return step in self._word.due

    def pause(self) -> None:
        """Leave the training's time."""
        self.work.pause()

    def resume(self) -> None:
        """Go on with the training's time."""
        self.work.resume()

    def stepped(self, step: int, samples: int | None) -> None:
        """Count steps; raise `UsageError` where an evaluation was passed over."""
        check_evaluated(self._word, self._steps)
        self._steps = step
        self.work.stepped(step, samples)

    def waited(self, seconds: float) -> None:
        """Count a wait for data within the training."""
        self.work.waited(seconds)

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        """Take in an evaluation once all ranks have made it, and tell them whether the trial is over."""
        self._ranks.wait()  # within the evaluation's time: the next step would wait for them
        self.work.evaluated(step, metrics, loss)
        self.is_over = self.work.is_over
        tests = isinstance(self.work, LedRun) and self.work.awaits_test
        self._word = Word(self.is_over, () if self.is_over else (self._due_after(step),), tests)
        self._ranks.share(self._word)

    def test(self, evaluate: Evaluate) -> None:
        """Evaluate the test part, where it is asked for and the others do so too: not after a loop that they left."""
        if self._word.tests:
            self.work.test(evaluate)

    def warned(self, sentence: str) -> None:
        """Keep a sentence for the outcome."""
        self.work.warned(sentence)

    def keep(self, objects: Mapping[str, Any]) -> tuple[int, int]:
        """Take note of what is to stay finite; nothing is saved."""
        return self.work.keep(objects)

    def looped(self, step: int, because: str = "") -> None:
        """Take note that the loop ended by itself."""
        self.work.looped(step, because)
        self.is_over = self.work.is_over

    def _due_after(self, step: int) -> int:
        return next(later for later in count(step + 1) if self.work.is_due(later))


class LedRun(TrialRun):
    """A trial of several ranks: it ends at an evaluation alone, and is stopped where it would be paused."""

    @property
    def awaits_test(self) -> bool:
        """Return whether the test part is to be evaluated."""
        return self._is_tested and not self._has_ended

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        """Take in an evaluation; end the trial where that says so, or where it is asked to or is late."""
        super().evaluated(step, metrics, loss)
        self.settle()

    def _save(self, path: str) -> str:
        return "a trial of several ranks is not saved"


class RankTrial(LoopTrial):
    """The trial of one of several ranks: ``batch_size`` is that of all together, ``micro_batch_size`` its own.

    Raises `UsageError` where the ranks cannot share a micro-batch evenly.
    """

    def __init__(
        self,
        assignment: Assignment,
        ranks: Ranks,
        *,
        searched: Collection[str] = (),
        needs_samples: bool = False,
    ) -> None:
        super().__init__(assignment, searched=searched, needs_samples=needs_samples)
        self._ranks = ranks
        self._stages.refuse(f"a training of {ranks.size} ranks", "they share batches of one size")
        size, accumulation = self._configuration.batch_size, self._configuration.accumulation_steps
        self._share, rest = divmod(size, accumulation * ranks.size)
        if rest:
            raise UsageError(
                f"batch_size = {size} must be a multiple of {accumulation * ranks.size}: it takes {accumulation} "
                f"micro-batches a step, each shared by {ranks.size} ranks"
            )

    @property
    def _samples_at_once(self) -> int:
        return self._share

    @property
    def _sharers(self) -> int:
        return self._ranks.size

    def sampler(self, dataset: Any) -> SeededSampler:
        """Return a sampler of this rank's share of each micro-batch; together the ranks have `LoopTrial.sampler`'s.

        For a `DataLoader`'s ``sampler``, with ``batch_size=trial.micro_batch_size``.
        """
        self._sampler = RankSampler(
            len(dataset),
            self._configuration.batch_size,
            self.seed,
            share=self._share,
            rank=self._ranks.rank,
            ranks=self._ranks.size,
            after_steps=self._samples_behind // self._configuration.batch_size,
        )
        return self._sampler


def check_evaluated(word: Word, step: int) -> None:
    """Raise `UsageError` if a step follows ``step``, and the evaluation that was due by then was not made.

    The ranks would never hear that the trial is over.
    """
    if step >= word.due[-1]:
        raise UsageError(
            f"no evaluation after step {word.due[-1]}, where one was due",
            hint="every rank: batches(loader, evaluate=...), or: if trial.evaluation_due: trial.report(accuracy=...)",
        )


def _led_work(assign: Assign, line: Line) -> TrialRun | Looked:
    """Return the work of the first rank; the other ranks count as its own use of the machine."""
    work = work_of(assign, line)
    if isinstance(assign.work, TrialRequest):
        work = LedRun(assign.work, assign, line)
    if isinstance(work, TrialRun | TimedLoop):
        work.contention.count_siblings()
    return work


def _heard(ranks: Ranks) -> Word:
    word: Word | None = ranks.share(None)
    assert word is not None, "the first rank has said it"
    return word
