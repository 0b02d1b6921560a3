"""The gradient noise scale, measured in separate passes or from the ranks' gradients.

A separate pass computes gradients of a few small batches in fp32 and changes no training state.
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
from bssearch.training.batches import Growth, TokenBatches, random_state_kept
from bssearch.training.computation import buffers_kept
from bssearch.training.course import Approach
from bssearch.training.gradient_norms import adam_divisors, measured_every, pass_of, sum_of_squares
from bssearch.training.memory import is_out_of_memory
from bssearch.training.optimizers import trained_by
from bssearch.training.trainer import Trainer, seed_everything
from bssearch.workloads.base import WeightedLoss
from bssearch.workloads.data import TokenPart, moved

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
    """Return a small batch's size in samples, or 0 if the training part is too small."""
    # ‖G‖²'s variance falls faster with the small batch than with passes: short passes use half a micro-batch, long
    # passes an eighth.
    micro = configuration.micro_batch_size
    return min(micro, max(SMALLEST, micro // min(small_batches, SMALL_BATCHES)), LARGEST, samples // small_batches)


class GradientPasses:
    """Measures gradient norms of a trainer's model in separate passes. ``generator`` draws the samples."""

    def __init__(self, trainer: Trainer, seed: int) -> None:
        self._trainer = trainer
        trained = itertools.chain.from_iterable(map(trained_by, trainer.optimizers))
        self._parameters = [one for one in trained if one.requires_grad]
        self.generator = np.random.default_rng(seed)

    def small_batch(self, small_batches: int) -> int:
        """Return a small batch's size in samples, or in tokens with padding.

        Returns 0 if the training part is too small.
        """
        train, configuration = self._trainer.train, self._trainer.configuration
        if isinstance(train, TokenPart):
            size = max(max(train.lengths), configuration.micro_batch_size // min(small_batches, SMALL_BATCHES))
            return size if small_batches * size <= len(train) else 0
        size = small_batch_size(configuration, len(train), small_batches)
        group = self._trainer.computation.settings.ghost_batch_size
        # Drop the samples that would form a ghost batch too small to normalise.
        return size if group is None or size <= group else size - size % group

    def measure(self, small_batches: int = SMALL_BATCHES) -> Pass | None:
        """Measure a pass and wait for the device. Return None if the pass is unusable."""
        batches = self._drawn(small_batches, self.generator)
        with _exact(self._trainer, seed=int(self.generator.integers(2**31))):
            return self._pass(batches)

    def load_kernels(self, small_batches: int) -> None:
        with _exact(self._trainer, seed=0):
            self._pass(self._drawn(small_batches, np.random.default_rng(0))[:1])

    def _drawn(self, small_batches: int, generator: np.random.Generator) -> Sequence[torch.Tensor]:
        train, size = self._trainer.train, self.small_batch(small_batches)
        if isinstance(train, TokenPart):
            batches = TokenBatches(train.lengths, size, small_batches, int(generator.integers(2**31)))
            return [torch.tensor(rows) for rows in next(batches.epoch())]
        rows = generator.choice(len(train), small_batches * size, replace=False)
        return torch.split(torch.from_numpy(rows).to(train.device), size)

    def _pass(self, batches: Sequence[torch.Tensor]) -> Pass | None:
        train, device = self._trainer.train, self._trainer.computation.device
        divisors = adam_divisors(self._trainer.optimizers)
        small, weights = torch.zeros(2, dtype=torch.float64, device=device), []
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for rows in batches:
            gradients, weight = self._gradients(rows)
            small += sum_of_squares(gradients.items(), divisors, device)
            weights.append(weight)
            for parameter, gradient in gradients.items():
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
        weighed, big = torch.stack(weights), sum_of_squares(sums.items(), divisors, device)
        norms = torch.stack([small, big, torch.stack([weighed.square().sum(), weighed.sum()])])
        of_small, of_sum, (squared, weight) = norms.tolist()
        batch = weight if isinstance(train, TokenPart) else sum(map(len, batches))
        return pass_of(of_small, of_sum, (squared, weight), batch=batch, samples=len(train), divisors=divisors)

    def _gradients(self, rows: torch.Tensor) -> tuple[dict[nn.Parameter, torch.Tensor], torch.Tensor]:
        # gradient of the batch's summed loss, and the weight of the sum
        trainer, computation = self._trainer, self._trainer.computation
        inputs, targets = moved(trainer.train.gather(rows), computation.device)
        loss = trainer.loss(computation.inputs(trainer.augment(inputs)), targets)
        if not isinstance(loss, WeightedLoss):
            loss = WeightedLoss(loss * len(rows), len(rows))
        found = torch.autograd.grad(loss.total, self._parameters, allow_unused=True)
        pairs = zip(self._parameters, found, strict=True)
        weight = torch.as_tensor(loss.weight, dtype=torch.float64, device=computation.device)
        return {parameter: gradient for parameter, gradient in pairs if gradient is not None}, weight.detach()


@dataclass(slots=True)
class NoiseBudget:
    """The seconds that one process may spend on passes: `NOISE_SHARE` of the process's train seconds.

    ``pass_seconds`` maps (small batches, samples per small batch) to the seconds of the last pass.
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
        """Measure passes if the metric is near the target and the budget allows.

        Measurements end when the target is first met or memory runs out.
        """
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
        return {
            "generator": dict(self._make.generator.bit_generator.state),
            "first_metric": self._approach.first,
            "ended": self._ended,
            "small_batches": self._small_batches,
            "passes": list(map(asdict, self._passes)),
            "made": self._made,
            "spent": self._spent,
            "earned": self._earned,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._make.generator.bit_generator.state = state["generator"]
        self._approach.first = state["first_metric"]
        self._ended = state["ended"]
        self._passes += map(_restored, state["passes"])
        self._made, self._spent = state["made"], state["spent"]
        self._small_batches, self._earned = state["small_batches"], state["earned"]

    def result(self) -> GradientNoise:
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


def _restored(saved: dict[str, Any]) -> Pass:
    adam = None if saved["adam"] is None else Norms(**saved["adam"])
    return Pass(**{**saved, "plain": Norms(**saved["plain"]), "adam": adam})


# Of the train seconds, which include the ranks' norms: a measured step of 2 ranks took 1.3 to 1.8 times as long.
RANK_NOISE_SHARE = 0.01
RANK_NOISE_STEPS = 0.3  # expected added time of a measured step, in steps, before the time is known

RANKS_LEAST_EVERY = 8  # steps, because the host's seconds do not include a GPU's


class RankNoise:
    """Measures a trial's noise scale in the training steps near the target.

    Each rank's gradient counts as a small batch.
    """

    def __init__(self, trainer: Trainer, target: Target) -> None:
        self._trainer = trainer
        self._approach = Approach(target)
        self._passes: list[Pass] = []
        self._spent = 0.0

    def after_evaluation(self, metric: float, train_seconds: float) -> None:
        """Measure some of the next steps if the metric is near the target but has not met the target."""
        self._take()
        every = 0
        if self._approach.is_near(metric) and not self._approach.target.is_met_by(metric):
            added, step_seconds = RANK_NOISE_STEPS, 1.0
            if self._passes and train_seconds > 0:
                added, step_seconds = self._spent / len(self._passes), train_seconds / self._trainer.steps
            every = max(RANKS_LEAST_EVERY, measured_every(added, step_seconds, RANK_NOISE_SHARE))
        if every != self._trainer.noise_every:
            self._trainer.measure_noise(every)

    def state(self) -> dict[str, Any]:
        self._take()
        return {
            "first_metric": self._approach.first,
            "every": self._trainer.noise_every,
            "spent": self._spent,
            "passes": list(map(asdict, self._passes)),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._approach.first, self._spent = state["first_metric"], state["spent"]
        self._passes += map(_restored, state["passes"])
        self._trainer.measure_noise(state["every"])

    def result(self) -> GradientNoise:
        self._take()
        return gradient_noise(self._passes, self._spent if self._passes else None)

    def _take(self) -> None:
        self._passes += self._trainer.take_passes()
        self._spent += self._trainer.noise_seconds
        self._trainer.noise_seconds = 0.0


@contextmanager
def _exact(trainer: Trainer, seed: int) -> Iterator[None]:
    computation = trainer.computation
    with buffers_kept(trainer.model), random_state_kept(computation.device), computation.exact():
        seed_everything(seed)
        yield


PASSES = 2  # passes after each evaluation; a fixed number, so that a repeated request takes the same steps

REMEMBERED = 8  # number of averaged passes: only the newest, because the noise scale grows in training


class NoiseGrowth:
    """Grows the batch after evaluations, to the largest scheduled size within a share of the noise scale."""

    def __init__(self, passes: GradientPasses, growth: Growth) -> None:
        self._make = passes
        self._growth = growth
        assert growth.schedule is not None, "the trial has a schedule"
        self._share = growth.schedule.noise_share or 0.0
        self._moments: list[tuple[float, float]] = []

    def after_evaluation(self) -> None:
        if self._growth.next_size is None:
            return
        made = [self._make.measure(SMALL_BATCHES) for _ in range(PASSES)]
        self._moments += [moments(one, one.adam or one.plain) for one in made if one is not None]
        del self._moments[:-REMEMBERED]
        scale = self.noise_scale
        while scale is not None and (size := self._growth.next_size) is not None and size <= self._share * scale:
            self._growth.grow()

    @property
    def noise_scale(self) -> float | None:
        """The noise scale of recent passes in samples, or None if unknown or possibly infinite."""
        if not self._moments:
            return None
        trace, square = (statistics.fmean(column) for column in zip(*self._moments, strict=True))
        return max(0.0, trace / square) if square > 0 else None

    def state(self) -> dict[str, Any]:
        return {
            "generator": dict(self._make.generator.bit_generator.state),
            "moments": [list(pair) for pair in self._moments],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._make.generator.bit_generator.state = state["generator"]
        self._moments = [(trace, square) for trace, square in state["moments"]]


def noise_meter(request: TrialRequest, trainer: Trainer, budget: NoiseBudget | None) -> NoiseMeter | RankNoise | None:
    """Return the trial's noise meter.

    Returns None for a branch, or if settings or workload rule out the measurement.
    """
    if request.branch is not None or not trainer.computation.settings.measure_noise or not trainer.has_noise:
        return None
    if trainer.computation.ranks is not None:
        return RankNoise(trainer, request.target)
    return NoiseMeter(trainer, request.target, request.plan.seed, budget=budget)


def noise_growth(request: TrialRequest, trainer: Trainer) -> NoiseGrowth | None:
    if not trainer.growth.is_measured:
        return None
    needs = "batch_schedule = 'noise_scale' measures the gradient noise scale, which needs"
    hint = "name another batch_schedule, or train with a constant batch"
    require(
        trainer.has_noise,
        f"{needs} a workload that has loss(), but neither training_step() nor train_batches()",
        hint=hint,
        error=WorkloadError,
    )
    require(
        small_batch_size(trainer.configuration, len(trainer.train)),
        f"{needs} at least {SMALL_BATCHES} training samples; the workload has {len(trainer.train)}",
        hint=hint,
        error=WorkloadError,
    )
    return NoiseGrowth(GradientPasses(trainer, request.plan.seed), trainer.growth)
