"""Advice on a training loop's batch size, from the gradient noise scale."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from bssearch.errors import require
from bssearch.records import GradientNoise
from bssearch.records.noise_scale import (
    CRITICAL_BATCH_OCTAVES,
    ENDLESS,
    FEWEST_PASSES,
    STEPS_DEVIATION,
    Pass,
    estimate,
    gradient_noise,
    moments,
)
from bssearch.records.text import noise_scale, percent, plural
from bssearch.training.course import first_line
from bssearch.training.gradient_norms import Divisors, adam_divisors, measured_every, pass_of, squares

SHARE = 0.01  # largest share of the training time for measurements

WINDOW = 128  # measured steps in the present noise scale: only the newest, because the noise scale grows in training

FIRST_EVERY = 8  # steps between measurements until the cost of a measurement is known

FEWEST_TIMED = 3  # measured steps before their cost counts as known, because the first measurement loads kernels

TIMED = 32  # number of newest steps whose median is the step time; measured and other steps have separate medians

Weights = Callable[[], Sequence[Sequence[float]]]  # of each sample of each micro-batch; empty if unknown

STEPS_RANGE = 2 * math.sqrt(2) * STEPS_DEVIATION  # two deviations of the ratio of two sizes' steps

FARTHEST_SUM = 0.02  # relative distance of the halves' sum from the whole gradient, above bfloat16's rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAdvice:
    """The findings of a `BatchAdvisor` so far.

    Attributes:
        batch_size: Samples per optimizer step, summed over all ranks.
        noise_scale: Noise scale in samples with a 95 % interval, over the newest measured steps. With Adam, the scale
            describes Adam's updates.
        step_seconds: Median seconds of a step, if known.
        reason: The latest reason for an unmeasured step, and the remedy.
    """

    batch_size: int
    samples: int
    measured_steps: int
    noise_scale: GradientNoise
    step_seconds: float | None
    reason: str = ""

    def saved_steps(self, factor: float = 2.0) -> tuple[float | None, float, float] | None:
        """Return (share, low, high) of the steps that ``factor`` × the batch size saves.

        The share is None if only the range is known. Returns None if the range is unknown.

        Steps ∝ 1 + B_crit / B (McCandlish et al. 2018, arXiv 1812.06162). The range widens the noise scale's interval
        at each end by two deviations of B_crit (2 × `CRITICAL_BATCH_OCTAVES`). In quadrature, the range also adds two
        deviations of the measured ratio of steps (√2 × `STEPS_DEVIATION`).
        """

        def share(b_crit: float) -> float:
            per_batch = b_crit / self.batch_size
            return 1 - (1 + per_batch / factor) / (1 + per_batch)

        known, apart, most = self.noise_scale, 4**CRITICAL_BATCH_OCTAVES, 1 - 1 / factor
        if known.low is None:
            return None
        middle = None if known.scale is None else share(known.scale)
        ends = sorted([share(known.low / apart), most if known.high is None else share(known.high * apart)])
        middles = sorted([share(known.low), most]) if middle is None else [middle, middle]
        low, high = (
            1 - (1 - centre) * math.exp(sign * math.hypot(math.log((1 - end) / (1 - centre)), STEPS_RANGE))
            for sign, centre, end in zip((1, -1), middles, ends, strict=True)
        )
        return middle, low, high

    def __str__(self) -> str:
        known, size = self.noise_scale, self.batch_size
        saved, halved = self.saved_steps(), self.saved_steps(0.5)
        if self.measured_steps == 0:
            return f"noise scale unknown: {self.reason}"
        if self.measured_steps < FEWEST_PASSES:
            measured = plural(self.measured_steps, "measured step")
            return f"noise scale unknown: {measured}, but at least {FEWEST_PASSES} are needed; keep training"
        if saved is None or halved is None or known.low is None:
            return (
                f"noise scale unknown: {self.measured_steps} measured steps cannot separate the gradient from "
                "noise; keep training"
            )
        if saved[0] is None or halved[0] is None:
            return (
                f"noise scale {noise_scale(None, known.low, None)} samples after {self.samples:,} samples: batch "
                f"{2 * size} instead of {size} saves at least {percent(max(0.0, saved[1]))} of the steps"
            )
        parts = [
            f"noise scale {noise_scale(known.scale, known.low, known.high)} samples after {self.samples:,} "
            f"samples: batch {2 * size} instead of {size} saves {percent(saved[0])} [{100 * saved[1]:.0f}, "
            f"{100 * saved[2]:.0f}] of the steps and takes {percent(1 - 2 * saved[0])} more samples"
        ]
        if self.step_seconds is not None:
            longest = self.step_seconds / (1 - saved[0])
            parts.append(
                f"batch {2 * size} pays if a step takes less than {longest:.3g} s; a step of batch {size} takes "
                f"{self.step_seconds:.3g} s"
            )
        if known.scale is not None and known.scale < size and size > 1:
            fewer = (1 + halved[0]) / 2
            parts.append(
                f"batch {size // 2} takes {percent(-halved[0])} more steps and saves {percent(fewer)} of the samples"
            )
        return "; ".join(parts)


class BatchAdvisor:
    """Measures the gradient noise scale of any PyTorch loop, and reports the steps that other batch sizes save.

    In some steps, hooks measure the norms of each micro-batch's (or DistributedDataParallel rank's) gradient and of the
    summed gradient. If a step has one micro-batch, a second backward pass takes the gradient of half the output's rows.
    All samples must then have equally many rows.

    ::

        advisor = bssearch.BatchAdvisor(model, batch_size=256, optimizer=optimizer)
        for x, y in loader:
            loss(model(x), y).backward()
            advisor.step()  # before clipping and optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        print(advisor.report())

    Args:
        batch_size: Samples per optimizer step, summed over all ranks.
        optimizer: One or several optimizers. With Adam, the noise scale describes Adam's updates.
        dataset_size: Number of training samples.
        micro_batches: Backward passes per step, summed over all ranks. The advisor skips steps with more or fewer
            passes. If ``weights`` is given, the length of its result counts instead.
        weights: Function that returns each sample's weight, such as tokens, for each of this rank's micro-batches. The
            noise scale then counts weights instead of samples. Divide the summed loss by the step's total weight.
        aside: Function that returns a context manager for the second backward passes.
        share: Largest share of training time that measurements may take.
        now: Clock in seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_size: int,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        dataset_size: int | None = None,
        micro_batches: int | None = None,
        weights: Weights = tuple,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
        share: float = SHARE,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._parameters = list(model.parameters())  # all, because a loop may freeze parameters later
        _check_size("BatchAdvisor", batch_size)
        require(
            any(one.requires_grad for one in self._parameters),
            f"BatchAdvisor: {type(model).__name__} has no parameter with requires_grad; pass a model with trainable "
            "parameters",
        )
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        require(
            all(isinstance(one, Optimizer) for one in self._optimizers),
            f"BatchAdvisor(optimizer={optimizer!r}) must be one torch.optim.Optimizer, or a list of optimizers",
        )
        self._batch_size = self._first_batch_size = batch_size
        self._samples = 0
        self._dataset_size = dataset_size or ENDLESS
        self._weights = weights
        self._halves = _Halves(model, self._parameters, aside)
        self._splits = micro_batches == 1
        self._now = now
        self._share = share
        self._began: float | None = None
        self._seconds: dict[bool, deque[float]] = {kind: deque(maxlen=TIMED) for kind in (False, True)}
        self._left = FIRST_EVERY
        self._read_at: tuple[float, int] | None = None  # seconds and steps at the end of the last measured step
        self._paces: deque[float] = deque(maxlen=TIMED)  # seconds per step from one measured step to the next
        self._steps = 0
        self._norms: _StepNorms | None = None
        self._reason = (
            f"step() recorded fewer than {FIRST_EVERY + 1} steps; keep training"  # reason that a step was not measured
        )
        self._expected = micro_batches
        self._micro_batches = 0  # largest number in a step; an epoch's last step may have fewer
        self._passes: list[tuple[int, Pass]] = []  # samples seen and norms of each measured step

    def step(self, batch_size: int | None = None) -> None:
        """Record an optimizer step. Call after backward and before clipping.

        Pass ``batch_size`` if the size changed.
        """
        if batch_size is not None and batch_size != self._batch_size:
            _check_size("BatchAdvisor.step", batch_size)
            self._batch_size, self._micro_batches = batch_size, 0
        self._steps += 1
        self._samples += self._batch_size
        was_measured = self._norms is not None
        if self._norms is not None:
            self._note(self._norms)
            self._norms = None
        seconds = self._now()
        if self._began is not None:
            self._seconds[was_measured].append(seconds - self._began)
        self._began = seconds
        if was_measured:
            # Reading the norms waited for the device; other steps may return before the device has finished.
            if self._read_at is not None:
                self._paces.append((seconds - self._read_at[0]) / (self._steps - self._read_at[1]))
            self._read_at = seconds, self._steps
            self._left = self._interval()
            if ranks_together() > 1:
                shared = torch.tensor([self._left], device=self._parameters[0].device)
                dist.broadcast(shared, src=0)
                self._left = int(shared)
        self._left -= 1
        if self._left <= 0:
            self._halves.open(self._batch_size, self._weights, splits=self._splits and ranks_together() == 1)
            self._norms = _StepNorms(self._parameters, adam_divisors(self._optimizers), self._halves)

    def close(self) -> None:
        """Remove the remaining hooks. Call at the end of training."""
        if self._norms is not None:
            self._norms.close()
            self._norms = None

    def report(self) -> BatchAdvice:
        """Return the findings so far."""
        return BatchAdvice(
            batch_size=self._batch_size,
            samples=self._samples,
            measured_steps=len(self._passes),
            noise_scale=_noise_scale(self._passes),
            step_seconds=statistics.median(self._paces) if self._paces else None,
            reason=self._reason,
        )

    @property
    def measured_steps(self) -> int:
        """The number of measured steps."""
        return len(self._passes)

    @property
    def noise(self) -> GradientNoise:
        """The noise scale over all measured steps."""
        return gradient_noise([one for _, one in self._passes])

    def stages(self, largest: int, share: float = 1.0) -> list[tuple[int, int]]:
        """Return a batch schedule for another run, as (samples, batch size) of each doubling up to ``largest``.

        The batch doubles once the noise scale stays at or above the doubled size / ``share``.
        """
        scales = []
        for end in range(FEWEST_PASSES, len(self._passes) + 1, FEWEST_PASSES):
            known = _noise_scale(self._passes[max(0, end - WINDOW) : end])
            scales.append((self._passes[end - 1][0], known.low or 0.0 if known.scale is None else known.scale))
        found: list[tuple[int, int]] = []
        size = 2 * self._first_batch_size
        while size <= largest:
            below = [place for place, (_, scale) in enumerate(scales) if share * scale < size]
            later = scales[below[-1] + 1 if below else 0 :]
            if not later:
                break
            start, _ = later[0]
            while found and found[-1][0] + found[-1][1] > start:
                found.pop()  # this stage would not last one step
            found.append((start, size))
            size *= 2
        return found

    def _note(self, norms: _StepNorms) -> None:
        found = norms.take(self._batch_size, self._weights(), self._dataset_size, self._expected)
        self._splits = norms.backward_passes == 1
        if isinstance(found, str):
            self._reason = found
        elif norms.small_batches >= self._micro_batches:
            self._micro_batches = norms.small_batches
            self._passes.append((self._samples, found))

    def _interval(self) -> int:
        plain, measured = statistics.median(self._seconds[False] or [0.0]), self._seconds[True]
        if plain <= 0 or len(measured) < FEWEST_TIMED:
            return FIRST_EVERY
        # On a busy machine most of a few steps may be slow, and would delay the first interval by hundreds of steps.
        typical = statistics.median if len(measured) >= FEWEST_PASSES else min
        return measured_every(typical(measured) - plain, plain, self._share)


def batch_stages(stages: Iterable[tuple[int, int]]) -> str:
    """Return stages in the form of a study's ``batch_stages``, such as ``8192:64 16384:128``."""
    return " ".join(f"{samples}:{size}" for samples, size in stages)


def megatron_schedule(batch_size: int, stages: Iterable[tuple[int, int]], sequence_length: int) -> str:
    """Return stages for Megatron-LM's ``--step-batch-size-schedule``, in tokens, such as ``0:32 16777216:64``."""
    return batch_stages([(0, batch_size), *((sequence_length * samples, size) for samples, size in stages)])


def _noise_scale(passes: Sequence[tuple[int, Pass]]) -> GradientNoise:
    newest = [moments(one, one.adam or one.plain) for _, one in passes[-WINDOW:]]
    return estimate(newest) if len(newest) >= FEWEST_PASSES else GradientNoise()


class _Halves:
    # Gradient of half of the rows of the model's last output

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], aside: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._aside = aside
        self._hooks: list[RemovableHandle] = []
        self._row_hook: RemovableHandle | None = None
        self._is_checked = False  # true once the halves of a step add up to the whole gradient; else there is a problem
        self._missed = self._whole = 0.0
        self.problem = ""
        self.is_splitting = self.was_open = False
        self.splits = 0
        self.rows = 0, 0  # samples of each half
        self.first: dict[nn.Parameter, torch.Tensor | None] = {}
        self._second: dict[nn.Parameter, torch.Tensor | None] = {}

    def open(self, batch_size: int, weights: Weights, *, splits: bool) -> None:
        self._batch_size, self._weights, self.splits, self.was_open = batch_size, weights, 0, splits
        modules = self._model.modules() if splits and not self.problem else ()
        self._hooks = [one.register_forward_hook(self._note) for one in modules]

    def close(self) -> None:
        self._watch(None)
        for hook in self._hooks:
            hook.remove()
        if self.splits == 1 and not self._is_checked:
            self._is_checked = True
            if self._missed > FARTHEST_SUM**2 * self._whole:
                self.problem = "the loss depends on more than the model's last output"
        self._hooks, self.first, self._second = [], {}, {}

    def parts(self, parameter: nn.Parameter, gradient: torch.Tensor) -> list[torch.Tensor]:
        if parameter not in self.first or self.splits != 1:
            return [gradient]
        zero = torch.zeros_like(gradient)
        first, second = (zero if one is None else one for one in (self.first[parameter], self._second.get(parameter)))
        if not self._is_checked:
            self._missed += float((gradient - first - second).double().norm()) ** 2
            self._whole += float(gradient.double().norm()) ** 2
        return [first, gradient - first]

    def shares(self, weights: Sequence[Sequence[float]]) -> list[float]:
        if not weights:
            return [*map(float, self.rows)]
        return [float(sum(weights[0][: self.rows[0]])), float(sum(weights[0][self.rows[0] :]))]

    def _note(self, module: nn.Module, given: object, output: object) -> None:
        size = next(map(len, self._weights()), self._batch_size)
        for one in tree_leaves(output) if size > 1 and torch.is_grad_enabled() else ():
            if isinstance(one, torch.Tensor) and one.requires_grad and one.ndim and len(one) % size == 0 < len(one):
                self._watch(one)
                self.rows = size // 2, size - size // 2
                return

    def _watch(self, rows: torch.Tensor | None) -> None:
        # Only the last output counts: earlier outputs do not lead to all of the loss.
        if self._row_hook is not None:
            self._row_hook.remove()
        self._row_hook = None if rows is None else rows.register_hook(partial(self._split, rows))  # type: ignore[no-untyped-call]

    def _split(self, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        self._watch(None)
        self.splits += 1
        first = gradient.clone()
        first[len(gradient) // sum(self.rows) * self.rows[0] :] = 0
        self.is_splitting = True
        try:
            with self._aside():
                self.first = self._gradients(rows, first)
                self._second = {} if self._is_checked else self._gradients(rows, gradient - first)
        except RuntimeError as error:  # a graph that cannot run twice, or no memory
            self.problem = first_line(error)
        finally:
            self.is_splitting = False

    def _gradients(self, rows: torch.Tensor, gradient: torch.Tensor) -> dict[nn.Parameter, torch.Tensor | None]:
        trained = [one for one in self._parameters if one.requires_grad]
        found = torch.autograd.grad(rows, trained, gradient, retain_graph=True, allow_unused=True)
        return dict(zip(trained, found, strict=True))


class _StepNorms:
    # Squared gradient norms of micro-batches, or halves, and their sum, plain and under Adam

    def __init__(self, parameters: Sequence[nn.Parameter], divisors: Divisors | None, halves: _Halves) -> None:
        self._divisors = divisors
        self._halves = halves
        self._device = parameters[0].device
        self._counts: Counter[nn.Parameter] = Counter()
        self._newest: dict[nn.Parameter, list[torch.Tensor]] = {}
        self._small: list[torch.Tensor] = []
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._awaits_average = False
        self._hooks: list[RemovableHandle] = []
        self.backward_passes = self.small_batches = 0  # of all ranks, once `take` has returned
        for one in (one for one in parameters if one.requires_grad):
            self._hooks.append(one.register_hook(partial(self._take_one, one)))  # type: ignore[no-untyped-call]
            self._hooks.append(one.register_post_accumulate_grad_hook(self._take_sum))  # type: ignore[no-untyped-call]

    def _take_one(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if not self._halves.is_splitting:
            parts = self._halves.parts(parameter, gradient.detach())
            self._newest[parameter] = [self._squares(parameter, one) for one in parts]

    def _take_sum(self, parameter: nn.Parameter) -> None:
        # A gradient counts once PyTorch adds the gradient to the sum, unlike the gradient inside a gradient penalty.
        if found := self._newest.pop(parameter, None):
            self._counts[parameter] += 1
            self._small += found
        # Read the sum before the loop may clip or clear gradients. With several ranks, DistributedDataParallel averages
        # gradients in a callback at the end of the backward pass; a callback that a callback queues runs later.
        if ranks_together() == 1:
            self._read(parameter)
        elif not self._awaits_average:
            self._awaits_average = True
            queue = Variable._execution_engine.queue_callback
            queue(partial(queue, self._read_averages))

    def _read_averages(self) -> None:
        self._awaits_average = False
        for one in self._counts:
            self._read(one)

    def _read(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            self._sums[parameter] = self._squares(parameter, parameter.grad)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._halves.close()

    def take(
        self, batch_size: int, weights: Sequence[Sequence[float]], samples: int, expected: int | None
    ) -> Pass | str:
        # The step's pass, or the reason why the step was not measured
        self.close()
        ranks, halves = ranks_together(), self._halves
        passes = max(self._counts.values(), default=0)
        self.backward_passes = passes * ranks
        is_split = halves.splits == self.backward_passes == 1 and not halves.problem
        self.small_batches = count = 2 if is_split else self.backward_passes
        shares = halves.shares(weights) if is_split else [float(sum(one)) for one in weights] or [1.0] * passes
        weighed = torch.tensor([sum(one**2 for one in shares), sum(shares)], dtype=torch.float64, device=self._device)
        found = torch.stack([self._total(self._small), self._total(self._sums.values()), weighed])
        of_ranks = [found]
        if ranks > 1:
            of_ranks = [torch.empty_like(found) for _ in range(ranks)]
            dist.all_gather(of_ranks, found)
        each = torch.stack(of_ranks)
        if count == 0:
            return "a step had no backward pass; call step() after backward()"
        if count == 1 and not halves.was_open:
            return "a step had one micro-batch; keep training, so that the advisor can split another micro-batch"
        if count == 1:
            problem = halves.problem or "the micro-batch has one sample, or no output has equally many rows per sample"
            return f"a step had one micro-batch: {problem}; train with at least two micro-batches per step"
        if halves.splits and not is_split:
            return f"a step had {count} backward passes instead of one; keep training"
        if weights:
            expected = len(weights) * ranks
        if expected not in {None, self.backward_passes}:
            wrong = "weights" if weights else "micro_batches"
            had = plural(self.backward_passes, "backward pass")
            return f"a step had {had} instead of {expected}; correct {wrong}"
        if not weights and not is_split and batch_size % count:
            return (
                f"batch {batch_size} is not a multiple of the step's {count} micro-batches; pass batch_size to step()"
            )
        if not torch.allclose(each[:, 1], each[:1, 1], equal_nan=True):
            return "the ranks have different gradients after backward(); use DistributedDataParallel"
        small, (squared, weight) = each[:, 0].sum(dim=0) / ranks**2, each[:, 2].sum(dim=0).tolist()
        found_pass = pass_of(
            small.tolist(),
            each[0, 1].tolist(),
            (squared / weight**2, 1.0) if weight else (0.0, 0.0),
            batch=weight if weights else batch_size,
            samples=samples,
            divisors=self._divisors,
        )
        if found_pass is None and weight**2 <= squared:
            return "a step had fewer than two micro-batches with a positive weight; keep training, or correct weights"
        return found_pass or "a gradient was not finite; keep training, or lower the learning rate"

    def _total(self, norms: Iterable[torch.Tensor]) -> torch.Tensor:
        none = torch.zeros(2, dtype=torch.float64, device=self._device)
        return torch.stack([none, *(one.to(self._device) for one in norms)]).sum(dim=0)

    def _squares(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        return squares(parameter, gradient, self._divisors)


def _check_size(where: str, batch_size: Any) -> None:
    require(
        isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size >= 1,
        f"{where}(batch_size={batch_size!r}): batch_size must be a whole number >= 1",
    )


def ranks_together() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
