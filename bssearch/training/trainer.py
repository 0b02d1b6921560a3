"""A model being trained: one optimizer step after the other, without a clock and without an end."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from bssearch.errors import BSSearchError, UsageError, WorkloadError
from bssearch.records import Configuration, MetricInfo, parameters_of_group
from bssearch.training.averaging import AveragedWeights, ema_decay_of
from bssearch.training.batches import micro_batches, placement_of
from bssearch.training.computation import Computation
from bssearch.training.losses import LossSum, loss_of
from bssearch.training.memory import is_out_of_memory
from bssearch.training.optimizers import build_optimizer
from bssearch.training.schedule import schedule_of
from bssearch.workloads.base import Data, Part, WeightedLoss, Workload

WARM_UP_STEPS = 2


class Trainer:
    """Trains a freshly initialised model; the seed fixes initialisation, data order, augmentation and dropout.

    Each epoch is a new permutation of the training part; its last, incomplete batch is dropped. ``dropped_samples``
    says how many samples that is, ``data_placement`` whether the training part lies on the ``device`` or on the
    ``host``. Close it, or leave its ``with`` block, to end the processes that load the data of the latter.
    """

    def __init__(
        self, workload: Workload, configuration: Configuration, train: Part, computation: Computation, seed: int
    ) -> None:
        _check(configuration, len(train))
        seed_everything(seed)
        self.steps = 0
        self.dropped_samples = len(train) % configuration.batch_size
        self.data_placement = placement_of(train, computation)
        self.schedule = schedule_of(configuration, len(train))
        own = parameters_of_group(configuration.parameters, "model")
        self.model = computation.build_model(workload, configuration.dropout, own)
        self.optimizer = build_optimizer(self.model, configuration, fused=computation.fused)
        self._workload = workload
        self._augment = getattr(workload, "augment", None)
        self._loss = loss_of(workload, configuration)
        self._configuration = configuration
        self._computation = computation
        self._accumulation_steps = configuration.accumulation_steps
        self._clip_norm = _clip_norm(configuration)
        decay = ema_decay_of(configuration)
        self._average = None if decay is None else AveragedWeights(self.model, decay)
        self._scaler = computation.new_scaler()
        self._skipped = torch.zeros((), device=computation.device)
        self._train = train
        self._seed = seed
        self._batches = micro_batches(train, configuration, computation, seed)
        self._learning_rate = configuration.learning_rate
        self._losses = LossSum(computation.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what loads the data; no step can follow, evaluations can."""
        self._batches.close()

    @property
    def samples(self) -> int:
        """Return how many training samples have been seen."""
        return self.steps * self._configuration.batch_size

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the last step, or of the first one before it has run."""
        factor = self.schedule.factor(max(0, self.steps - 1))
        return self._configuration.learning_rate * factor

    @property
    def skipped_steps(self) -> int | None:
        """Return how many steps the loss scaling left out, None without one. Waits for the device.

        They count as steps all the same: the data were seen and the schedule moved on.
        """
        return None if self._scaler is None else int(self._skipped.item())

    def step(self) -> None:
        """Run one optimizer step: all its micro-batches, then clipping, update and average once."""
        self._set_learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        weights: list[torch.Tensor | float] = []
        for _ in range(self._accumulation_steps):
            inputs, targets = next(self._batches)
            loss = self._micro_batch_loss(inputs, targets)
            self._add_gradient(loss)
            self._losses.add(loss)
            if isinstance(loss, WeightedLoss):
                weights.append(loss.weight)
        if weights and self._accumulation_steps > 1:
            self._divide_gradient(weights)
        self.update()
        self.steps += 1

    def update(self) -> None:
        """Apply the gradient that lies there: clip, optimizer, average; once per step whatever the accumulation."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
            for found in self._scaler._found_inf_per_device(self.optimizer).values():
                self._skipped = self._skipped + found
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        if self._average is not None:
            self._average.update()

    def state(self) -> dict[str, Any]:
        """Return all that the next steps hang on but the random state, to be saved; the tensors are those in use."""
        return {
            "steps": self.steps,
            "model": {name: tensor.detach() for name, tensor in _named_tensors(self.model)},
            "extra": _extra_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "learning_rate": self._learning_rate,
            "average": None if self._average is None else self._average.state(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "skipped": self._skipped,
            "losses": self._losses.state(),
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where a trainer of the same configuration and seed was saved; the random state is the caller's.

        Raises `WorkloadError` where the model is another one.
        """
        _check_parameters(self.model, state["model"])
        for name, tensor in state["model"].items():
            _put(self.model, name, tensor.to(self._computation.device))
        self.model.load_state_dict(state["extra"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self._learning_rate = state["learning_rate"]
        if self._average is not None:
            self._average.restore(state["average"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        self._skipped = state["skipped"].to(self._computation.device)
        self._losses.restore(state["losses"])
        self.steps = state["steps"]
        self._batches.close()
        self._batches = micro_batches(
            self._train, self._configuration, self._computation, self._seed, after_steps=self.steps
        )

    def take_mean_loss(self) -> float | None:
        """Return the mean training loss since the last call, None without a step. Waits for the device."""
        mean = self._losses.mean()
        self._losses.clear()
        return mean

    def first_step_problem(self) -> str | None:
        """Return what is wrong with the first step, to be asked right after it: None where its loss is finite.

        Waits for the device. A step that fp16's loss scaling left out is no problem: its loss was finite.
        """
        loss = self._losses.mean()
        if loss is None or math.isfinite(loss):
            return None
        configuration = self._configuration
        return (
            f"the loss of the first step is {loss}: batch size {configuration.batch_size}, "
            f"learning rate {configuration.learning_rate:.4g}; {self.first_non_finite() or 'no non-finite parameter'}"
        )

    def first_non_finite(self) -> str | None:
        """Return the name of the first parameter that is not finite, or else of the first gradient, in words.

        None where all are finite. Waits for the device.
        """
        named = list(self.model.named_parameters())
        tensors = {f"parameter: {name}": parameter.detach() for name, parameter in named}
        tensors |= {f"gradient: {name}": parameter.grad for name, parameter in named if parameter.grad is not None}
        finite = torch.stack([tensor.isfinite().all() for tensor in tensors.values()]).tolist()
        return next(
            (f"first non-finite {name}" for name, is_finite in zip(tensors, finite, strict=True) if not is_finite), None
        )

    def evaluate(self, part: Part, metric: str) -> float:
        """Return a metric over a whole part, in evaluation mode and without gradients.

        Where weights are averaged it is the metric of the average. Raises `WorkloadError` where the workload does not
        return that metric as a number.
        """
        weights = nullcontext() if self._average is None else self._average.in_place()
        with weights, self._computation.evaluating():
            return metric_value(self._workload, measure(self._workload, self.model, part), metric)

    def _micro_batch_loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | WeightedLoss:
        if self._augment is not None:
            inputs = self._augment(inputs)
        with self._computation.training():
            loss = self._loss(self.model, self._computation.inputs(inputs), targets)
        scalar = loss.total if isinstance(loss, WeightedLoss) else loss
        if not isinstance(scalar, torch.Tensor):
            raise WorkloadError(
                f"loss() returned a {type(scalar).__name__}; it must be a scalar tensor or a WeightedLoss of one"
            )
        if scalar.ndim != 0:
            raise WorkloadError(f"loss() returned a tensor of shape {tuple(scalar.shape)}; it must be a scalar")
        if not scalar.requires_grad:
            raise WorkloadError("loss() returned a tensor without a gradient; it must depend on the model")
        return loss

    def _add_gradient(self, loss: torch.Tensor | WeightedLoss) -> None:
        """Add the gradient of a micro-batch's share in the loss of the batch.

        The weight of a batch is known after its last micro-batch: until then its number of samples stands for it,
        which keeps the gradients in the range of fp16.
        """
        accumulates = self._accumulation_steps > 1
        if isinstance(loss, WeightedLoss):
            share = loss.total / (self._configuration.batch_size if accumulates else loss.weight)
        else:
            share = loss / self._accumulation_steps if accumulates else loss
        if self._scaler is not None:
            share = self._scaler.scale(share)
        share.backward()  # type: ignore[no-untyped-call]

    def _divide_gradient(self, weights: list[torch.Tensor | float]) -> None:
        """Divide the gradient by the weight of the whole batch, in place of its number of samples."""
        if len(weights) < self._accumulation_steps:
            raise WorkloadError("loss() returned a WeightedLoss for some micro-batches of a batch and not for others")
        whole = sum(weights, start=torch.zeros((), dtype=torch.float64, device=self._computation.device))
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        factor = torch.as_tensor(self._configuration.batch_size / whole, dtype=gradients[0].dtype)
        torch._foreach_mul_(gradients, factor)

    def _set_learning_rate(self) -> None:
        learning_rate = self._configuration.learning_rate * self.schedule.factor(self.steps)
        if learning_rate != self._learning_rate:
            self._learning_rate = learning_rate
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate


def measure(workload: Workload, model: torch.nn.Module, part: Part) -> Mapping[str, Any]:
    """Return what a workload's ``evaluate`` says of a whole part, and leave the model in training mode.

    Raises `WorkloadError` where that is no mapping; what is in it `metric_value` checks.
    """
    model.eval()
    with torch.no_grad():
        metrics = workload.evaluate(model, part)
    model.train()
    if not isinstance(metrics, Mapping):
        raise WorkloadError(f"evaluate() returned a {type(metrics).__name__}; it must be a mapping of metrics")
    return metrics


def metric_value(workload: Workload, metrics: Mapping[str, Any], metric: str) -> float:
    """Return one of the metrics as a float, which may be NaN.

    Raises `WorkloadError` where it is missing, no number, or outside the bounds that the workload declares.
    """
    if metric not in metrics:
        offered = ", ".join(sorted(metrics)) or "nothing"
        raise WorkloadError(f"evaluate() returned no metric {metric!r}; it offers {offered}")
    try:
        value = float(metrics[metric])
    except (TypeError, ValueError) as error:
        raise WorkloadError(f"evaluate() returned {metrics[metric]!r} as {metric!r}: not a number") from error
    info = workload.metrics.get(metric, MetricInfo())
    if (info.low is not None and value < info.low) or (info.high is not None and value > info.high):
        raise WorkloadError(f"evaluate() returned {metric} = {value:g}, outside the [{info.low}, {info.high}] declared")
    return value


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _extra_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return what modules keep beside tensors (``get_extra_state``)."""
    return {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")}


def _check_parameters(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name not in saved or saved[name].shape != parameter.shape:
            was = f"of shape {tuple(saved[name].shape)}" if name in saved else "missing"
            raise WorkloadError(f"the parameter {name} of shape {tuple(parameter.shape)} was saved {was}")


def _put(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Give a parameter or buffer its value where it lies; a buffer that the first steps made or replaced is made."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    present = getattr(owner, leaf, None)
    if isinstance(present, torch.Tensor) and present.shape == value.shape and present.dtype == value.dtype:
        present.copy_(value)
    else:
        owner.register_buffer(leaf, value)


def warm_up(
    workload: Workload, configuration: Configuration, data: Data, computation: Computation, metric: str, seed: int
) -> None:
    """Let the device and the libraries meet every shape of a trial before its time starts.

    A throw-away model evaluates the validation part once and takes the first two steps of the trial, on the rows that
    its seed draws for them: no batch is met here that the trial does not meet itself. Where it fails compiled and not
    uncompiled, compiling is given up. It changes the random state: build the trial's own trainer afterwards, which
    seeds it and is then what it would be without the warm-up. Raises `WorkloadError` where a batch is larger than the
    training part.
    """
    _check(configuration, len(data.train))
    try:
        _take_first_steps(workload, configuration, data, computation, metric, seed)
    except BSSearchError:
        raise
    except Exception as error:
        if not computation.compiles or is_out_of_memory(error):
            raise
        with computation.uncompiled():
            _take_first_steps(workload, configuration, data, computation, metric, seed)
        computation.fallback(error)


def _take_first_steps(
    workload: Workload, configuration: Configuration, data: Data, computation: Computation, metric: str, seed: int
) -> None:
    # The trial's own rows: made-up ones, or the first of a part that is sorted by length, may hold not a single token.
    with Trainer(workload, replace(configuration, warmup_epochs=0.0), data.train, computation, seed) as trainer:
        trainer.evaluate(data.validation, metric)
        for _ in range(WARM_UP_STEPS):
            trainer.step()


def seed_everything(seed: int) -> None:
    """Seed every global generator that a model or a loss may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _clip_norm(configuration: Configuration) -> float | None:
    value = configuration.parameters.get("clip_norm")
    if value is None:
        return None
    if isinstance(value, bool | str) or not value > 0 or not math.isfinite(value):
        raise UsageError(f"clip_norm = {value!r} must be a number > 0, or none for no clipping")
    return float(value)


def _check(configuration: Configuration, train_samples: int) -> None:
    batch_size = configuration.batch_size
    micro, accumulation = configuration.micro_batch_size, configuration.accumulation_steps
    if configuration.world_size != 1:
        raise UsageError(f"world_size = {configuration.world_size} must be 1: a trial trains on one device")
    if micro * accumulation != batch_size:
        raise UsageError(
            f"batch_size = {batch_size} must be micro_batch_size × accumulation_steps = {micro} × {accumulation}"
        )
    if batch_size > train_samples:
        raise WorkloadError(f"batch_size = {batch_size} must be <= {train_samples}, the number of training samples")
