"""The gradient noise scale of a model in training, measured in separate passes.

A pass computes gradients of a few small batches in fp32 and changes no training state.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from bssearch.errors import WorkloadError, require
from bssearch.records import Configuration, GradientNoise, Target, TrialRequest
from bssearch.records.noise_scale import FEWEST_PASSES, Norms, Pass, gradient_noise, moments
from bssearch.training.batches import Growth, random_state_kept
from bssearch.training.computation import buffers_kept
from bssearch.training.course import Approach
from bssearch.training.memory import is_out_of_memory
from bssearch.training.optimizers import trained_by
from bssearch.training.trainer import Trainer, seed_everything
from bssearch.workloads.base import WeightedLoss
from bssearch.workloads.data import moved

# Small batches in a long pass. ‖G‖² limits the estimate, and at equal samples, fewer and longer passes estimate ‖G‖²
# better, but an interval needs several passes.
SMALL_BATCHES = 8

FEWEST_SMALL_BATCHES = 2  # small batches in a short pass; a single small batch has no second norm

# Samples of a small batch. The estimator's variance falls with the size (Gray et al. 2024), but launch-bound devices
# gain no time from small sizes, and batch normalisation needs some samples.
SMALLEST, LARGEST = 16, 256

# Largest share of a process's train seconds for passes. Loading a shape's kernels on a GPU does not count, because a
# slow first pass would rule out the next passes for long.
NOISE_SHARE = 0.03

# Seconds of a small batch ÷ seconds of a training micro-batch, expected for a shape's first pass: at most 1 if both
# compute in the same way (CPU, fp32, uncompiled), more under other precision or kernels, most if training is compiled.
SLOWDOWN, SLOWDOWN_OF_OTHER, SLOWDOWN_OF_COMPILED = 1, 2, 10

PASSES_AT_ONCE = 2 * FEWEST_PASSES  # most passes after one evaluation, so that passes spread over the window


def small_batch_size(configuration: Configuration, samples: int, small_batches: int = SMALL_BATCHES) -> int:
    """Samples of a small batch; 0 if the training part is too small."""
    # ‖G‖²'s variance falls faster with the small batch than with passes: short passes use half a micro-batch, long
    # passes an eighth.
    micro = configuration.micro_batch_size
    return min(micro, max(SMALLEST, micro // min(small_batches, SMALL_BATCHES)), LARGEST, samples // small_batches)


class GradientPasses:
    """Measures a trainer's gradient norms; ``generator`` draws the samples."""

    def __init__(self, trainer: Trainer, seed: int) -> None:
        self._trainer = trainer
        trained = itertools.chain.from_iterable(map(trained_by, trainer.optimizers))
        self._parameters = [one for one in trained if one.requires_grad]
        self.generator = np.random.default_rng(seed)

    def small_batch(self, small_batches: int) -> int:
        """Samples of each of ``small_batches``; 0 if the training part has too few."""
        size = small_batch_size(self._trainer.configuration, len(self._trainer.train), small_batches)
        group = self._trainer.computation.settings.ghost_batch_size
        # Drop the samples that would form a ghost batch too small to normalise.
        return size if group is None or size <= group else size - size % group

    def measure(self, small_batches: int = SMALL_BATCHES) -> Pass | None:
        """Make a pass; None for a non-finite gradient. Waits for the device."""
        small_batch = self.small_batch(small_batches)
        train = self._trainer.train
        rows = self.generator.choice(len(train), small_batches * small_batch, replace=False)
        with _exact(self._trainer, seed=int(self.generator.integers(2**31))):
            plain, adam = self._norms(torch.split(torch.from_numpy(rows).to(train.device), small_batch))
        if not plain.are_finite or (adam is not None and not adam.are_finite):
            return None
        return Pass(small_batch=small_batch, small_batches=small_batches, samples=len(train), plain=plain, adam=adam)

    def load_kernels(self, small_batches: int) -> None:
        """Load a GPU's kernels."""
        rows = torch.arange(self.small_batch(small_batches), device=self._trainer.train.device)
        with _exact(self._trainer, seed=0):
            self._norms((rows,))

    def _norms(self, batches: tuple[torch.Tensor, ...]) -> tuple[Norms, Norms | None]:
        divisors = adam_divisors(self._trainer.optimizers)
        kinds = [None] if divisors is None else [None, divisors]
        small: list[list[torch.Tensor]] = [[] for _ in kinds]
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for batch in batches:
            gradients = self._gradients(batch)
            for squares, kind in zip(small, kinds, strict=True):
                squares.append(_square(gradients, kind))
            for parameter, gradient in gradients.items():
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
        rows = [
            torch.stack([torch.stack(squares).mean(), _square(sums, kind) / len(batches) ** 2])
            for squares, kind in zip(small, kinds, strict=True)
        ]
        norms = [Norms(*row) for row in torch.stack(rows).tolist()]
        return norms[0], norms[1] if len(norms) > 1 else None

    def _gradients(self, batch: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        trainer, computation = self._trainer, self._trainer.computation
        inputs, targets = moved(trainer.train.gather(batch), computation.device)
        loss = trainer.loss(trainer.model, computation.inputs(trainer.augment(inputs)), targets)
        mean = loss.total / loss.weight if isinstance(loss, WeightedLoss) else loss
        pairs = zip(self._parameters, torch.autograd.grad(mean, self._parameters, allow_unused=True), strict=True)
        return {parameter: gradient for parameter, gradient in pairs if gradient is not None}


@dataclass(slots=True)
class NoiseBudget:
    """Seconds for passes in one process: `NOISE_SHARE` of all trials' train seconds.

    ``pass_seconds``: of the last pass by (small batches, samples of each).
    """

    train_seconds: float = 0.0
    spent: float = 0.0
    pass_seconds: dict[tuple[int, int], float] = field(default_factory=dict)


class NoiseMeter:
    """Measures a trial's noise scale near the target."""

    def __init__(
        self,
        trainer: Trainer,
        target: Target,
        seed: int,
        *,
        budget: NoiseBudget | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._make = GradientPasses(trainer, seed)
        self._loads_kernels = trainer.computation.device.type == "cuda"
        computation = trainer.computation
        is_alike = computation.device.type == "cpu" and computation.precision == "fp32"
        slowdown = SLOWDOWN if is_alike else SLOWDOWN_OF_OTHER
        self._slowdown = SLOWDOWN_OF_COMPILED if computation.compiles else slowdown
        self._trainer = trainer
        self._approach = Approach(target)
        self._budget = budget or NoiseBudget()
        self._now = now
        self._ended = self._make.small_batch(FEWEST_SMALL_BATCHES) == 0
        self._small_batches: int | None = None
        self._passes: list[Pass] = []
        self._made = 0
        self._spent = 0.0
        self._earned = 0.0

    def after_evaluation(self, metric: float, train_seconds: float) -> None:
        """Make passes if the metric is near the target and the budget allows them."""
        self._budget.train_seconds += train_seconds - self._earned
        self._earned = train_seconds
        if not self._approach.is_near(metric) or self._ended:
            return
        self._ended = self._approach.target.is_met_by(metric)
        if self._small_batches is None:
            is_long = self._make.small_batch(SMALL_BATCHES) > 0
            interval_seconds = FEWEST_PASSES * self._expected_seconds(SMALL_BATCHES, train_seconds)
            affords_long = is_long and interval_seconds <= NOISE_SHARE * train_seconds
            self._small_batches = SMALL_BATCHES if affords_long else FEWEST_SMALL_BATCHES
        for _ in range(PASSES_AT_ONCE):
            if not self._affords_a_pass(self._small_batches, train_seconds):
                return
            try:
                self._measure(self._small_batches)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._ended = True
                return

    def state(self) -> dict[str, Any]:
        """Passes to save."""
        return {
            "generator": dict(self._make.generator.bit_generator.state),
            "first_metric": self._approach.first,
            "ended": self._ended,
            "small_batches": self._small_batches,
            "passes": [asdict(one) for one in self._passes],
            "made": self._made,
            "spent": self._spent,
            "earned": self._earned,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore saved passes."""
        self._make.generator.bit_generator.state = state["generator"]
        self._approach.first = state["first_metric"]
        self._ended = state["ended"]
        for one in state["passes"]:
            adam = None if one["adam"] is None else Norms(**one["adam"])
            self._passes.append(Pass(**{**one, "plain": Norms(**one["plain"]), "adam": adam}))
        self._made, self._spent = state["made"], state["spent"]
        self._small_batches, self._earned = state["small_batches"], state["earned"]

    def result(self) -> GradientNoise:
        """The noise scale and its moments."""
        return gradient_noise(self._passes, self._spent if self._made else None)

    def _affords_a_pass(self, small_batches: int, train_seconds: float) -> bool:
        seconds = self._expected_seconds(small_batches, train_seconds)
        is_within_own_share = self._spent + seconds <= NOISE_SHARE * train_seconds
        is_affordable = self._budget.spent + seconds <= NOISE_SHARE * self._budget.train_seconds
        return seconds > 0 and is_affordable and (is_within_own_share or not self._made)

    def _expected_seconds(self, small_batches: int, train_seconds: float) -> float:
        if self._made and small_batches == self._small_batches:
            return self._spent / self._made
        known = self._budget.pass_seconds.get(self._shape(small_batches))
        micro_batch_seconds = train_seconds / max(
            1, self._trainer.steps * self._trainer.configuration.accumulation_steps
        )
        return small_batches * self._slowdown * micro_batch_seconds if known is None else known

    def _shape(self, small_batches: int) -> tuple[int, int]:
        return small_batches, self._make.small_batch(small_batches)

    def _measure(self, small_batches: int) -> None:
        shape = self._shape(small_batches)
        if self._loads_kernels and shape not in self._budget.pass_seconds:
            self._make.load_kernels(small_batches)
        entered = self._seconds()
        measured = self._make.measure(small_batches)
        seconds = self._seconds() - entered
        self._spent += seconds
        self._budget.spent += seconds
        self._budget.pass_seconds[shape] = seconds
        self._made += 1
        if measured is not None:
            self._passes.append(measured)

    def _seconds(self) -> float:
        device = self._trainer.computation.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return self._now()


@contextmanager
def _exact(trainer: Trainer, seed: int) -> Iterator[None]:
    computation = trainer.computation
    with buffers_kept(trainer.model), random_state_kept(computation.device), computation.exact():
        seed_everything(seed)
        yield


Divisors = dict[nn.Parameter, Callable[[], torch.Tensor]]


def adam_divisors(optimizers: Sequence[torch.optim.Optimizer]) -> Divisors | None:
    """Functions for Adam's √v̂ + ε by parameter; None unless all groups have betas and epsilon."""

    def divisor(state: dict[str, torch.Tensor], beta2: float, epsilon: float) -> Callable[[], torch.Tensor]:
        return lambda: (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + epsilon

    found = {
        parameter: divisor(optimizer.state[parameter], group["betas"][1], group["eps"])
        for optimizer in optimizers
        if all({"betas", "eps"} <= group.keys() for group in optimizer.param_groups)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if {"exp_avg_sq", "step"} <= optimizer.state.get(parameter, {}).keys()
    }
    return found or None


def _square(gradients: dict[nn.Parameter, torch.Tensor], divisors: Divisors | None) -> torch.Tensor:
    norms = [
        torch.linalg.vector_norm(
            gradient if divisors is None else gradient / divisors[parameter](), dtype=torch.float64
        )
        for parameter, gradient in gradients.items()
        if divisors is None or parameter in divisors
    ]
    return torch.stack(norms).square().sum()


PASSES = 2  # passes after each evaluation; a fixed number, so that a repeated request takes the same steps

REMEMBERED = 8  # number of averaged passes: only the newest, because the noise scale grows in training


class NoiseGrowth:
    """Grows the batch, after evaluations, to the largest size within a share of the noise scale."""

    def __init__(self, passes: GradientPasses, growth: Growth) -> None:
        self._make = passes
        self._growth = growth
        assert growth.schedule is not None, "the trial has a schedule"
        self._share = growth.schedule.noise_share or 0.0
        self._moments: list[tuple[float, float]] = []

    def after_evaluation(self) -> None:
        """Measure; begin the stages that the noise scale allows."""
        if self._growth.next_size is None:
            return
        for _ in range(PASSES):
            measured = self._make.measure(SMALL_BATCHES)
            if measured is not None:
                self._moments.append(moments(measured, measured.adam or measured.plain))
        del self._moments[:-REMEMBERED]
        scale = self.noise_scale
        while scale is not None and (size := self._growth.next_size) is not None and size <= self._share * scale:
            self._growth.grow()

    @property
    def noise_scale(self) -> float | None:
        """Noise scale (samples) of recent passes; None for a scale that may be infinite."""
        if not self._moments:
            return None
        trace, square = (statistics.fmean(column) for column in zip(*self._moments, strict=True))
        return max(0.0, trace / square) if square > 0 else None

    def state(self) -> dict[str, Any]:
        """Moments and generator."""
        return {
            "generator": dict(self._make.generator.bit_generator.state),
            "moments": [list(pair) for pair in self._moments],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self._make.generator.bit_generator.state = state["generator"]
        self._moments = [(trace, square) for trace, square in state["moments"]]


def noise_meter(request: TrialRequest, trainer: Trainer, budget: NoiseBudget | None) -> NoiseMeter | None:
    """A trial's noise meter, if wanted and possible."""
    if request.branch is not None or not trainer.computation.settings.measure_noise or not trainer.has_noise:
        return None
    return NoiseMeter(trainer, request.target, request.plan.seed, budget=budget)


def noise_growth(request: TrialRequest, trainer: Trainer) -> NoiseGrowth | None:
    """Growth by noise scale if scheduled; `WorkloadError` without a noise meter."""
    if not trainer.growth.is_measured:
        return None
    reason = None if trainer.has_noise else "the workload gives no gradients of single samples"
    if reason is None and small_batch_size(trainer.configuration, len(trainer.train)) == 0:
        reason = f"the training part has too few samples for {SMALL_BATCHES} gradients"
    require(
        reason is None,
        f"batch_schedule = 'noise_scale' measures the gradient noise scale: {reason}",
        error=WorkloadError,
    )
    return NoiseGrowth(GradientPasses(trainer, request.plan.seed), trainer.growth)
