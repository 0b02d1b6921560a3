"""Trains a model, without a clock or a stopping rule."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.swa_utils import get_ema_multi_avg_fn

from bssearch.errors import BSSearchError, WorkloadError, require
from bssearch.records import FIRST_LOSS, Configuration, constant_configurations, parameters_of_group
from bssearch.records.noise_scale import Pass
from bssearch.spec.space import OPTIONAL
from bssearch.training.batches import Growth, micro_batches, placement_of, seed_of
from bssearch.training.computation import Computation, autocast
from bssearch.training.gradient_norms import Divisors, adam_divisors, pass_of, sum_of_squares
from bssearch.training.memory import is_out_of_memory
from bssearch.training.optimizers import (
    Optimizers,
    built_optimizers,
    flat,
    ignored_learning_rate,
    take_over_states,
    trained_by,
)
from bssearch.training.schedule import schedule_for
from bssearch.workloads.base import TrainingStep, WeightedLoss, Workload, measure, metric_value
from bssearch.workloads.data import Batch, BatchStream, Data, Part, TokenPart

if TYPE_CHECKING:
    from bssearch.training.ranks import GradientSum, Ranks


class AveragedWeights:
    """The exponential moving average (EMA) of a model's parameters and floating-point buffers.

    After each step: average ← decay · average + (1 − decay) · weights (Polyak & Juditsky 1992; Tarvainen & Valpola
    2017, eq. 2). The average skips integer buffers and buffers that are not finite.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        buffers = (buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.isfinite().all())
        self._weights = [tensor.detach() for tensor in (*model.parameters(), *buffers)]
        self.averages = [tensor.clone() for tensor in self._weights]
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def update(self) -> None:
        self._average(self.averages, self._weights, None)

    def restore(self, averages: list[torch.Tensor] | None) -> None:
        torch._foreach_copy_(self.averages, self._weights if averages is None else averages)

    def averages_of(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        places = {tensor.data_ptr() for tensor in tensors}
        pairs = zip(self._weights, self.averages, strict=True)
        return [average for weight, average in pairs if weight.data_ptr() in places]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the model's weights by the averages within the block."""
        kept = [tensor.clone() for tensor in self._weights]
        torch._foreach_copy_(self._weights, self.averages)
        try:
            yield
        finally:
            torch._foreach_copy_(self._weights, kept)


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Clear gradients like ``zero_grad()``, but without the base method's profiler and compiler calls (10 to 20 µs)."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


class Updates:
    """Optimizers with fp16 loss scaling, clipping and weight averaging.

    ``skipped`` counts the updates that loss scaling skipped.
    """

    def __init__(
        self, model: nn.Module, optimizers: Optimizers, configuration: Configuration, computation: Computation
    ) -> None:
        self.optimizers = optimizers
        self._model = model
        self._learning_rate = self._peak_learning_rate = configuration.learning_rate
        self._peak_rates = [[group["lr"] for group in one.param_groups] for one in optimizers]
        clip_norm, decay = (configuration.parameters.get(name) for name in OPTIONAL)
        self._clip_norm = None if clip_norm is None else float(clip_norm)
        self.average = None if decay is None else AveragedWeights(model, float(decay))
        self.scaler = computation.new_scaler()
        self._step: Any = methodcaller("step") if self.scaler is None else self.scaler.step
        self.skipped = torch.zeros((), device=computation.device)
        self._left_out = torch.zeros_like(self.skipped)
        self._was_scaled = False

    def begin(self, factor: float) -> None:
        """Clear the gradients, and set the learning rates to ``factor`` × the initial rates."""
        learning_rate = self._peak_learning_rate * factor
        if learning_rate != self._learning_rate:
            self._learning_rate = learning_rate
            for optimizer, rates in zip(self.optimizers, self._peak_rates, strict=True):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
        for optimizer in self.optimizers:
            clear_gradients(optimizer)

    def backward(self, loss: torch.Tensor) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def apply(self, only: torch.optim.Optimizer | None = None) -> None:
        """Clip the gradients, step all optimizers and call `end`.

        With ``only``, step only this optimizer, and do not call `end`.
        """
        stepped = self.optimizers if only is None else [only]
        if self.scaler is not None:
            self._was_scaled = True
            for optimizer in stepped:
                self.scaler.unscale_(optimizer)
                for found in self.scaler._found_inf_per_device(optimizer).values():
                    self._left_out = torch.maximum(self._left_out, found)
        if self._clip_norm is not None:
            parameters = self._model.parameters() if only is None else trained_by(only)
            torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm)
        for optimizer in stepped:
            self._step(optimizer)
        if only is None:
            self.end()

    def apply_each(self) -> None:
        for optimizer in self.optimizers:
            if any(parameter.grad is not None for parameter in trained_by(optimizer)):
                self.apply(optimizer)
        self.end()

    def end(self) -> None:
        if self.scaler is not None and self._was_scaled:
            self.scaler.update()
            self.skipped = self.skipped + self._left_out
            self._left_out = torch.zeros_like(self.skipped)
            self._was_scaled = False
        if self.average is not None:
            self.average.update()

    def state(self) -> dict[str, Any]:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return {
            "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers,
            "learning_rate": self._learning_rate,
            "average": None if self.average is None else self.average.averages,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "skipped": self.skipped,
        }

    def take_over(self, optimizer: Any, average: list[torch.Tensor] | None) -> None:
        """Load another run's optimizer states and averaged weights, but keep this run's options."""
        if optimizer is not None:
            take_over_states(self.optimizers, optimizer, self._model)
        if self.average is not None:
            self.average.restore(average)

    def restore(self, state: dict[str, Any]) -> None:
        optimizers = [state["optimizer"]] if len(self.optimizers) == 1 else state["optimizer"]
        for optimizer, saved in zip(self.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(saved)
        self._learning_rate = state["learning_rate"]
        if self.average is not None:
            self.average.restore(state["average"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.skipped = state["skipped"].to(self.skipped.device)


FINITE = "all parameters and gradients are finite"

Take = Callable[[TrainingStep], Any]
T = TypeVar("T")


def own_training_step(workload: Workload, computation: Computation) -> Take | None:
    step: Take | None = getattr(workload, "training_step", None)
    require(
        step is None or not computation.replays_graphs,
        f"training.compile = {computation.settings.compile!r} must be 'default' or 'none' for a workload with a "
        "training_step, because CUDA graphs reuse memory of the step",
    )
    return step


def _scalar(loss: Any, method: str, wanted: str) -> torch.Tensor:
    scalar = loss.total if isinstance(loss, WeightedLoss) else loss
    if not isinstance(scalar, torch.Tensor) or scalar.ndim:
        shape = f" of shape {tuple(scalar.shape)}" if isinstance(scalar, torch.Tensor) else ""
        outer = "WeightedLoss whose total is " if isinstance(loss, WeightedLoss) else ""
        raise WorkloadError(f"{method}() returned {outer}{type(scalar).__name__}{shape}; expected {wanted}")
    return scalar


class Trainer(AbstractContextManager["Trainer"]):
    """Trains a fresh model. The seed fixes initialisation, data order, augmentation and dropout.

    ``now`` is the last step's configuration. ``dropped_samples`` is per epoch, and None with streams, token batches or
    a growing batch. ``noise_every`` is the number of steps between noise measurements, or 0 if off.
    ``noise_seconds`` counts the host's seconds for noise measurements.
    """

    def __init__(
        self, workload: Workload, configuration: Configuration, train: Part, computation: Computation, seed: int
    ) -> None:
        check_ranks(configuration, workload, computation)
        require(
            configuration.batch_size <= len(train),
            f"batch_size = {configuration.batch_size} must be <= {len(train)}, the number of training "
            f"{'tokens' if isinstance(train, TokenPart) else 'samples'}",
            error=WorkloadError,
        )
        self._ranks = computation.ranks
        with self.together("build", configuration, seed, computation.compiles):
            seed_everything(seed)
            self.steps = 0
            self.growth = Growth(configuration, len(train) if train.has_rows else None)
            is_counted = train.has_rows and self.growth.schedule is None
            self.dropped_samples = len(train) % configuration.batch_size if is_counted else None
            self.data_placement = placement_of(train, computation)
            self.schedule = schedule_for(workload, configuration, len(train))
            self.model = computation.build_model(
                workload, configuration.dropout, parameters_of_group(configuration.parameters, "model")
            )
            self._gradients = None if self._ranks is None else self._shared_model(self._ranks, seed)
            self._built = built_optimizers(workload, self.model, configuration, computation.fused)
            self.updates = Updates(self.model, flat(self._built, self.model), configuration, computation)
            self.optimizers = self.updates.optimizers
            self._statistics = [] if self._ranks is None else self._running_statistics()
            self._own_step = own_training_step(workload, computation)
            self._workload = workload
            augment: Callable[..., Any] = getattr(workload, "augment", None) or (lambda inputs, **_: inputs)
            self.augment = partial(augment, **parameters_of_group(configuration.parameters, "augmentation"))
            self._of_loss: dict[str, Any] = parameters_of_group(configuration.parameters, "loss")
            self._configurations = constant_configurations(configuration)
            self.configuration, self.now = configuration, self._configurations[0]
            self.computation = computation
            self.train = train
            self._seed = seed
            self._last_factor: float | None = None
            self._batches = micro_batches(self.train, self.computation, self._seed, self.growth)
            self._losses = LossSum(computation.device)
            self.noise_every = 0
            self.noise_seconds = 0.0
            self._passes: list[Callable[[], Pass | None]] = []

    def _shared_model(self, ranks: Ranks, seed: int) -> GradientSum:
        ranks.copy_from_first([*self.model.parameters(), *self.model.buffers()])
        if ranks.rank > 0:
            seed_everything(seed_of(seed, ranks.rank))  # dropout and augmentation differ from rank 0's
        return ranks.gradient_sum(self.model)

    def _running_statistics(self) -> list[torch.Tensor]:
        norms = [module for module in self.model.modules() if isinstance(module, _NormBase)]
        pairs = [(norm.running_mean, norm.running_var) for norm in norms]
        found = [tensor for pair in pairs for tensor in pair if tensor is not None]
        average = self.updates.average
        return found if average is None else [*found, *average.averages_of(found)]

    def loss(self, inputs: Any, targets: Any) -> torch.Tensor | WeightedLoss:
        smoothing = self.configuration.label_smoothing
        return self._workload.loss(self.model, inputs, targets, label_smoothing=smoothing, **self._of_loss)

    def together(self, order: str, *arguments: Any) -> AbstractContextManager[None]:
        return nullcontext() if self._ranks is None else self._ranks.together(order, *arguments)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the loader processes. Evaluations remain possible."""
        self._batches.close()
        # from Python 3.12 on, a generator that is closed before its first batch keeps its loader
        none: tuple[Batch, ...] = ()
        self._batches = (batch for batch in none)

    @property
    def is_over(self) -> bool:
        return self.schedule.is_over(self.growth.position)

    def has_seen_again(self, samples: int) -> bool:
        """True at step 0, or if the last step completed another ``samples`` samples."""
        return self.growth.samples % samples < self.now.batch_size

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last step or, before any step, of the first step."""
        return self.configuration.learning_rate * (self._factor if self._last_factor is None else self._last_factor)

    @property
    def skipped_steps(self) -> int | None:
        """The steps that loss scaling skipped, or None without loss scaling. The property waits for the device."""
        return None if self.updates.scaler is None else int(self.updates.skipped.item())

    @property
    def has_noise(self) -> bool:
        """True if the workload can give gradients of arbitrary samples."""
        return self._own_step is None and not isinstance(self.train, BatchStream)

    def measure_noise(self, every: int) -> None:
        """Measure the ranks' gradients in every ``every``-th step from now on. Measure no step if ``every`` is 0."""
        with self.together("measure_noise", every):
            self.noise_every = every

    def take_passes(self) -> list[Pass]:
        """Return the passes measured since the last call. The call waits for the device."""
        passes, self._passes = [one() for one in self._passes], []
        return [one for one in passes if one is not None]

    def step(self) -> None:
        with self.together("step"):
            self.now, self._last_factor = self._configurations[self.growth.place], self._factor
            self.updates.begin(self._last_factor)
            if self._own_step is None:
                self._accumulate()
                self.updates.apply()
            else:
                self._losses.add(self._take_own_step(self._own_step))
                self.updates.end()
            self.steps += 1
            self.growth.stepped()

    def _take_own_step(self, take: Take) -> torch.Tensor | WeightedLoss:
        total = self.now.accumulation_steps
        taken = itertools.islice(self._augmented(), total)
        step = TrainingStep(
            model=self.model,
            optimizers=self._built,
            configuration=self.now,
            number=self.steps,
            micro_batches=taken,
            backward=self._outside_autocast(self.updates.backward),
            update=self._outside_autocast(self.updates.apply),
        )
        # keep no casts, because weights change within the step
        with autocast(self.computation.precision, self.computation.device, keep_casts=False):
            loss = take(step)
        if left := len(list(taken)):
            raise WorkloadError(f"training_step() took {total - left} of {total} micro-batches; take all micro-batches")
        if isinstance(loss, int | float) and not isinstance(loss, bool):
            return torch.tensor(float(loss))
        _scalar(loss, "training_step", "the loss to log: a scalar tensor, a number or a WeightedLoss")
        return loss  # type: ignore[no-any-return]

    def _outside_autocast(self, function: Callable[[T], None]) -> Callable[[T], None]:
        def called(argument: T) -> None:
            with torch.autocast(self.computation.device.type, enabled=False):
                function(argument)

        return called

    def update(self) -> None:
        with self.together("update"):
            if self._own_step is None:
                self.updates.apply()
            else:
                self.updates.apply_each()

    def state(self) -> dict[str, Any]:
        model = self.model
        return {
            "steps": self.steps,
            "model": {name: one.detach() for name, one in (*model.named_parameters(), *model.named_buffers())},
            "extra": {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")},
            **self.updates.state(),
            "losses": self._losses.state(),
            "growth": {**self.growth.state(), "last": self._configurations.index(self.now)},
            "factor": self._last_factor,
        }

    def restore(self, state: dict[str, Any]) -> None:
        restore_model(self.model, state["model"], state["extra"])
        self.updates.restore(state)
        self._losses.restore(state["losses"])
        self.steps = state["steps"]
        self._last_factor = state["factor"]
        self.growth.restore(state["growth"])
        self.now = self._configurations[state["growth"]["last"]]
        self._batches.close()
        self._batches = micro_batches(self.train, self.computation, self._seed, self.growth)

    def take_mean_loss(self) -> float | None:
        """Return the mean loss since the last call, if any. The call waits for the device."""
        mean = self._mean_loss(takes=True)
        self._losses = LossSum(self._losses.device)
        return mean

    def state_of_rank(self) -> dict[str, Any]:
        return {"losses": self._losses.state(), "statistics": self._statistics}

    def restore_of_rank(self, state: dict[str, Any]) -> None:
        """Restore `state_of_rank`. Call `restore` first."""
        self._losses.restore(state["losses"])
        if self._statistics:
            torch._foreach_copy_(self._statistics, state["statistics"])

    def average_statistics(self) -> None:
        if self._ranks is not None and self._statistics:
            with self._ranks.together("average_statistics"):
                self._ranks.average(self._statistics)

    def losses_of_rank(self, *, takes: bool) -> tuple[float, float]:
        """Return this rank's sums of losses and weights. ``takes`` resets the sums."""
        losses = self._losses
        if takes:
            self._losses = LossSum(losses.device)
        return losses.sums()

    def _mean_loss(self, *, takes: bool) -> float | None:
        return self._losses.mean([] if self._ranks is None else self._ranks.ask("losses", takes))

    def first_step_problem(self) -> str | None:
        """Describe the first step's loss if not finite. The call waits for the device."""
        loss = self._mean_loss(takes=False)
        if loss is None or math.isfinite(loss):
            return None
        configuration = self.configuration
        # A workload's own step may update parameters before the step returns the loss.
        first = FIRST_LOSS if self._own_step is None else f"with the workload's own step {FIRST_LOSS}"
        return (
            f"{first} {loss}: batch size {configuration.batch_size}, "
            f"learning rate {configuration.learning_rate:.4g}; {self.first_non_finite() or FINITE}"
        )

    def first_non_finite(self) -> str | None:
        named = list(self.model.named_parameters())
        tensors = {f"parameter: {name}": parameter.detach() for name, parameter in named}
        tensors |= {f"gradient: {name}": parameter.grad for name, parameter in named if parameter.grad is not None}
        finite = torch.stack([tensor.isfinite().all() for tensor in tensors.values()]).tolist()
        return next(
            (f"first non-finite {name}" for name, is_finite in zip(tensors, finite, strict=True) if not is_finite), None
        )

    def evaluate(self, part: Part, metric: str) -> float:
        return self.metrics(part, [metric])[metric]

    def metrics(self, part: Part, names: Sequence[str]) -> dict[str, float]:
        """Return metrics over a whole part, with the averaged weights if any."""
        self.average_statistics()
        weights = nullcontext() if self.updates.average is None else self.updates.average.in_place()
        with weights, self.computation.evaluating():
            found = measure(self._workload, self.model, part)
            return {name: metric_value(self._workload, found, name) for name in names}

    def _accumulate(self) -> None:
        weights: list[torch.Tensor | float] = []
        left = self.now.accumulation_steps
        total = left if self._ranks is None else left * self._ranks.size
        accumulates = total > 1
        for inputs, targets in itertools.islice(self._augmented(), left):
            loss = self._micro_batch_loss(inputs, targets)
            if isinstance(loss, WeightedLoss):
                # divide by the batch's samples until the last micro-batch gives the weight, to keep fp16 in range
                share = loss.total / (self.now.batch_size if accumulates else loss.weight)
                weights.append(loss.weight)
            else:
                share = loss / total if accumulates else loss
            left -= 1
            if self._gradients is not None and left == 0:
                self._gradients.begin()
            self.updates.backward(share)
            self._losses.add(loss)
        if self._gradients is not None and self._ranks is not None:
            if self.noise_every and self.steps % self.noise_every == 0:
                self._add_measured(self._gradients, self._ranks, weights)
            else:
                self._gradients.end()
        if weights and accumulates:
            require(
                len(weights) == self.now.accumulation_steps,
                "loss() returned a WeightedLoss for only some micro-batches; return a WeightedLoss for all inputs",
                error=WorkloadError,
            )
            none = torch.zeros((), dtype=torch.float64, device=self._losses.device)
            whole = torch.as_tensor(sum(weights, start=none))
            if self._ranks is not None:
                self._ranks.add(whole)
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            torch._foreach_mul_(gradients, torch.as_tensor(self.now.batch_size / whole, dtype=gradients[0].dtype))

    def _add_measured(self, gradients: GradientSum, ranks: Ranks, weights: Sequence[torch.Tensor | float]) -> None:
        # add the ranks' gradients, and keep a pass in which each rank's gradient is a small batch
        started = time.perf_counter()
        device, divisors = self.computation.device, adam_divisors(self.optimizers)
        weight = sum(weights) / self.now.batch_size if weights else 1 / ranks.size
        weighed = torch.as_tensor(weight, dtype=torch.float64, device=device).detach()
        trained = list(itertools.chain.from_iterable(map(trained_by, self.optimizers)))
        own = sum_of_squares(((one, one.grad) for one in trained), divisors, device)
        sums = torch.stack([own, torch.stack([weighed.square(), weighed])])
        self.noise_seconds -= time.perf_counter()
        gradients.end()
        self.noise_seconds += time.perf_counter()
        ranks.add(sums)
        norms = torch.stack([*sums, sum_of_squares(((one, one.grad) for one in trained), divisors, device)])
        if ranks.rank == 0:
            self._passes.append(partial(self._pass, norms, self.now.batch_size, divisors))
        self.noise_seconds += time.perf_counter() - started

    def _pass(self, norms: torch.Tensor, batch_size: int, divisors: Divisors | None) -> Pass | None:
        small, (squared, weight), big = norms.tolist()
        batch = weight * batch_size if isinstance(self.train, TokenPart) else batch_size
        return pass_of(small, big, (squared, weight), batch=batch, samples=len(self.train), divisors=divisors)

    @property
    def _factor(self) -> float:
        return self.schedule.factor(self.growth.position) * self.growth.rate_factor

    def _augmented(self) -> Iterator[Batch]:
        for inputs, targets in self._batches:
            yield self.computation.inputs(self.augment(inputs)), targets

    def _micro_batch_loss(self, inputs: Any, targets: Any) -> torch.Tensor | WeightedLoss:
        with self.computation.training():
            loss = self.loss(inputs, targets)
        require(
            _scalar(loss, "loss", "a scalar tensor or a WeightedLoss with a scalar total").requires_grad,
            "loss() returned a tensor without a gradient; let the loss depend on the model",
            error=WorkloadError,
        )
        require(
            isinstance(loss, WeightedLoss) or not isinstance(self.train, TokenPart),
            "training.batch_unit = tokens: loss() returned no WeightedLoss, so the batch's tokens are unknown",
            hint="return bssearch.WeightedLoss(total=losses.sum(), weight=number of tokens)",
            error=WorkloadError,
        )
        return loss


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # quicker, because `manual_seed` keeps a call with a formatted stack for each absent kind of device
        torch.default_generator.manual_seed(seed)


def check_ranks(configuration: Configuration, workload: Workload, computation: Computation) -> None:
    """Raise `UsageError` if a trial cannot train on its number of devices."""
    size, processes = configuration.world_size, 1 if computation.ranks is None else computation.ranks.size
    require(
        size == processes,
        f"world_size = {size} must be {processes}, the number of this trial's processes",
        hint="use executor local to train a workload on several devices",
    )
    unsupported = {
        "fp16 (choose bf16)": computation.precision == "fp16",
        "its own training_step()": hasattr(workload, "training_step"),
        "a batch_schedule": configuration.grows,
    }
    found = [name for name, is_used in unsupported.items() if is_used]
    require(size == 1 or not found, f"world_size = {size} must be 1 for a trial with {' and '.join(found)}")


class LossSum:
    """The sums of micro-batch losses and weights. A loss without a weight has weight 1."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # On a CPU, numbers cost less than tensors; elsewhere, reading a number would wait for the device.
        self._reads = device.type == "cpu"
        self._total: torch.Tensor | float = 0.0
        self._weight: torch.Tensor | float = 0.0
        self._losses = 0

    def add(self, loss: torch.Tensor | WeightedLoss) -> None:
        total, weight = (loss.total, loss.weight) if isinstance(loss, WeightedLoss) else (loss, 1.0)
        self._losses += 1
        self._total += self._value(total)
        self._weight += self._value(weight)

    def _value(self, found: torch.Tensor | float) -> torch.Tensor | float:
        if not isinstance(found, torch.Tensor):
            return found
        return found.item() if self._reads else found.detach().reshape(()).double()

    def state(self) -> dict[str, Any]:
        return {"total": self._total, "weight": self._weight, "losses": self._losses}

    def restore(self, state: dict[str, Any]) -> None:
        self._total, self._weight = (
            one.to(self.device, copy=True) if isinstance(one, torch.Tensor) else one
            for one in (state["total"], state["weight"])
        )
        self._losses = state["losses"]

    def sums(self) -> tuple[float, float]:
        return float(self._total), float(self._weight)

    def mean(self, others: Sequence[tuple[float, float]] = ()) -> float | None:
        """Return the mean loss, with other ranks' sums, or None before the first loss.

        The call waits for the device.
        """
        if not self._losses:
            return None
        totals, weights = zip((self._total, self._weight), *others, strict=True)
        return float(torch.as_tensor(sum(totals), dtype=torch.float64) / sum(weights))


@torch.no_grad()
def restore_model(model: torch.nn.Module, saved: Mapping[str, torch.Tensor], extra: dict[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        if name not in saved or saved[name].shape != parameter.shape:
            was = f"of shape {tuple(saved[name].shape)}" if name in saved else "missing"
            raise WorkloadError(
                f"the parameter {name} of shape {tuple(parameter.shape)} is {was} in the checkpoint; let build_model() "
                "create the same parameters in each call"
            )
    device = next(model.parameters()).device
    for name, tensor in saved.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        present = getattr(owner, leaf, None)
        if isinstance(present, torch.Tensor) and present.shape == tensor.shape and present.dtype == tensor.dtype:
            present.copy_(tensor)
        else:  # training created or replaced a buffer
            owner.register_buffer(leaf, tensor.to(device))
    model.load_state_dict(extra, strict=False)


WARM_UP_STEPS = 2


def warm_up(
    workload: Workload, configuration: Configuration, data: Data, computation: Computation, metric: str, seed: int
) -> None:
    """Run each batch size of a trial on a throw-away model, before the trial's train seconds start.

    The warm-up evaluates once, and takes two steps per batch size on the trial's samples. On one device, if only the
    compiled model fails, the warm-up gives up compilation. The call changes the global random state.
    """
    try:
        _take_first_steps(workload, configuration, data, computation, metric, seed)
    except BSSearchError:
        raise
    except Exception as error:
        if not computation.compiles or computation.ranks is not None or is_out_of_memory(error):
            raise
        computation.compiles = False
        try:
            _take_first_steps(workload, configuration, data, computation, metric, seed)
        finally:
            computation.compiles = True
        computation.fallback(error)


def _take_first_steps(
    workload: Workload, configuration: Configuration, data: Data, computation: Computation, metric: str, seed: int
) -> None:
    # Use the trial's own rows, because made-up rows, or the first rows of a part sorted by length, may have no token.
    for place, one in enumerate(constant_configurations(replace(configuration, warmup_epochs=0.0))):
        with Trainer(workload, one, data.train, computation, seed) as trainer:
            if place == 0:
                trainer.evaluate(data.validation, metric)
            for _ in range(WARM_UP_STEPS):
                trainer.step()
            ignored = ignored_learning_rate(workload, trainer.model, one)
            if ignored is not None:
                computation.warn(ignored)
