"""Trials in several processes, the ranks of torch.distributed.

Only rank 0 talks to the search. After each evaluation, rank 0 broadcasts the trial's end or the next evaluation's step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar, cast

import torch
from torch import distributed, nn

from bssearch.errors import require
from bssearch.executors.base import Assign
from bssearch.executors.loops.assignment import Assignment, Evaluate, Line, Metrics
from bssearch.executors.loops.measuring import MeasuredNoise, TimedLoop, work_of
from bssearch.executors.loops.trial_run import NoiseNearTarget, TrialRun
from bssearch.records import NoiseRequest, TrialRequest
from bssearch.training.advisor import Weights

T = TypeVar("T")


class LaunchedRanks:
    """The ranks of torch.distributed's default group. ``rank`` is this process's number."""

    def __init__(self, local_rank: int) -> None:
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self._local_rank = local_rank
        self._uses_cuda = "nccl" in distributed.get_backend()
        if self._uses_cuda:
            torch.cuda.set_device(local_rank)

    def share(self, said: T | None) -> T | None:
        box = [said]
        distributed.broadcast_object_list(box, src=0)
        return box[0]

    def agree(self, value: object) -> bool:
        """Wait for all ranks, and return whether all ranks pass equal values."""
        said: list[object] = [None] * self.size
        distributed.all_gather_object(said, value)
        return all(one == said[0] for one in said)

    def wait(self) -> None:
        distributed.barrier(device_ids=[self._local_rank] if self._uses_cuda else None)

    def device_of(self, device: str) -> str:
        return f"cuda:{self._local_rank}" if torch.device(device).type == "cuda" else device


def ranks_of(environment: Mapping[str, str]) -> LaunchedRanks | None:
    """Return the ranks, or None if there is one process. Raises `UsageError` if torch.distributed is uninitialised."""
    if int(environment.get("WORLD_SIZE", 1)) <= 1:
        return None
    require(
        distributed.is_available() and distributed.is_initialized(),
        f"WORLD_SIZE = {environment['WORLD_SIZE']}, but the script has not initialised torch.distributed",
        hint='call torch.distributed.init_process_group("gloo"), or "nccl", before bssearch.current_trial()',
    )
    return LaunchedRanks(int(environment.get("LOCAL_RANK", 0)))


def check_ranks(ranks: int, devices: int) -> None:
    """Raise `UsageError` unless a program has one rank for each of a trial's devices."""
    require(
        ranks == devices,
        f"the program has {ranks} rank{'s' if ranks > 1 else ''}, but the trial needs {devices} (executor.devices)",
        hint=f"set executor.devices: {ranks if ranks > 1 else devices} in the spec, and command: "
        "[torchrun, '--nproc-per-node={devices}', ...]",
    )


@dataclass(frozen=True, slots=True)
class Word:
    """Rank 0's message to the other ranks."""

    is_over: bool
    due: tuple[int, ...]  # steps of the next evaluations; only the last is mandatory
    tests: bool = False  # whether the test split follows
    measures_noise: bool = False  # whether the ranks measure the next steps' gradient noise


def sizes_of(modules: Sequence[nn.Module]) -> tuple[int, ...]:
    return tuple(one.numel() for each in modules for one in each.parameters() if one.requires_grad)


class RankWork(Assignment):
    """A rank's work, with evaluations after the steps that rank 0 announces in ``_word``."""

    _word: Word
    _sizes: tuple[int, ...] = ()  # of trained parameters; if the ranks' sizes differ, no rank measures gradient noise

    def is_due(self, step: int) -> bool:
        return step in self._word.due


class FollowerWork(RankWork):
    """The work of each rank except rank 0."""

    def __init__(self, assign: Assign, ranks: LaunchedRanks) -> None:
        super().__init__(assign.configuration, assign)
        self._request = asked = assign.work
        self.is_look = not isinstance(asked, TrialRequest)
        if isinstance(asked, TrialRequest | NoiseRequest):
            self.seed = asked.plan.seed if isinstance(asked, TrialRequest) else asked.seed
        self._ranks = ranks
        self._noise: NoiseNearTarget | None = None
        self._word = cast(Word, ranks.share(None))

    def modelled(self, modules: Sequence[nn.Module], tokens: Weights) -> None:
        self._sizes = sizes_of(modules)
        if self._sizes and isinstance(self._request, TrialRequest | NoiseRequest):
            target = self._request.target
            self._noise = NoiseNearTarget(modules, self.configuration, target, tokens, holds=self.is_look)

    def begin(self) -> None:
        self._ranks.agree(self._sizes)

    def stepped(self, step: int, samples: int | None) -> None:
        if self._noise is not None:
            self._noise.stepped()

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        self._ranks.wait()
        self._word = cast(Word, self._ranks.share(None))
        self.is_over = self._word.is_over
        if self._noise is not None:
            self._noise.measure(self._word.measures_noise)

    def test(self, evaluate: Evaluate) -> None:
        if self._word.tests:
            evaluate()

    def diverged(self, reason: str) -> bool:
        # all ranks skip the same steps
        self.is_over = not self.is_look
        return self.is_over

    def looped(self, step: int, because: str = "") -> None:
        """End this rank's work."""
        self.is_over = True


class LeaderWork(RankWork):
    """Rank 0's work. A stop request or a limit ends the trial only at an evaluation."""

    def __init__(self, assign: Assign, line: Line, ranks: LaunchedRanks) -> None:
        super().__init__(assign.configuration, assign)
        asked = assign.work
        self.work = LedRun(asked, assign, line) if isinstance(asked, TrialRequest) else work_of(assign, line)
        if isinstance(self.work, TrialRun | TimedLoop):
            self.work.contention.count_siblings()
        self.seed = self.work.seed
        self.is_look = self.work.is_look
        self._ranks = ranks
        first = self._due_after(-1)
        self._word = Word(False, (first, self._due_after(first)) if first == 0 else (first,))
        ranks.share(self._word)

    def begin(self) -> None:
        if not self._ranks.agree(self._sizes) and isinstance(self.work, TrialRun | MeasuredNoise):
            self.work.noise = None
        self.work.begin()

    def pause(self) -> None:
        self.work.pause()

    def resume(self) -> None:
        self.work.resume()

    def stepped(self, step: int, samples: int | None) -> None:
        self.work.stepped(step, samples)

    def waited(self, seconds: float) -> None:
        self.work.waited(seconds)

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        """Record the evaluation of all ranks, and announce the next evaluation or the end."""
        self._ranks.wait()  # the wait counts as evaluation, not as the next step
        self.work.evaluated(step, metrics, loss)
        self.is_over = self.work.is_over
        if not self.is_over:
            self.work.pause()  # the evaluation includes its announcement
        tests = isinstance(self.work, LedRun) and self.work.awaits_test
        noise = self.work.noise if isinstance(self.work, TrialRun | MeasuredNoise) else None
        measures = noise is not None and noise.is_near
        self._word = Word(self.is_over, () if self.is_over else (self._due_after(step),), tests, measures)
        self._ranks.share(self._word)

    def test(self, evaluate: Evaluate) -> None:
        if self._word.tests:
            self.work.test(evaluate)

    def warned(self, sentence: str) -> None:
        self.work.warned(sentence)

    def first_rate(self, is_peak: bool) -> None:
        self.work.first_rate(is_peak)

    def keep(self, objects: Mapping[str, Any]) -> tuple[int, int]:
        return self.work.keep(objects)

    def diverged(self, reason: str) -> bool:
        self.is_over = self.work.diverged(reason)
        return self.is_over

    def modelled(self, modules: Sequence[nn.Module], tokens: Weights) -> None:
        self._sizes = sizes_of(modules)
        self.work.modelled(modules, tokens)

    def looped(self, step: int, because: str = "") -> None:
        self.work.looped(step, because)
        self.is_over = self.work.is_over

    def _due_after(self, step: int) -> int:
        return next(later for later in count(step + 1) if self.work.is_due(later))


class LedRun(TrialRun):
    """A trial of several ranks, which never pauses."""

    @property
    def awaits_test(self) -> bool:
        return self._is_tested and not self._has_ended

    def evaluated(self, step: int, metrics: Metrics, loss: float | None) -> None:
        super().evaluated(step, metrics, loss)
        self.settle()

    def _save(self, path: str) -> str:
        return "bssearch cannot checkpoint a trial of several ranks"
