"""A model being trained: one optimizer step after the other, without a clock and without an end."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bssearch.errors import UsageError, WorkloadError
from bssearch.records import Configuration, MetricInfo
from bssearch.training.computation import Computation
from bssearch.training.optimizers import build_optimizer
from bssearch.training.schedule import schedule_of
from bssearch.workloads.base import Data, Part, Workload

WARM_UP_STEPS = 2


class Trainer:
    """Trains a freshly initialised model; the seed fixes initialisation, data order and dropout.

    Each epoch is a new permutation of the training part; its last, incomplete batch is dropped. ``dropped_samples``
    says how many samples that is.
    """

    def __init__(
        self, workload: Workload, configuration: Configuration, train: Part, computation: Computation, seed: int
    ) -> None:
        _check(configuration, len(train))
        seed_everything(seed)
        self.steps = 0
        self.dropped_samples = len(train) % configuration.batch_size
        self.schedule = schedule_of(configuration, len(train))
        self.model = computation.build_model(workload, configuration.dropout)
        self.optimizer = build_optimizer(self.model, configuration)
        self._workload = workload
        self._configuration = configuration
        self._train = train
        self._accumulation_steps = configuration.accumulation_steps
        self._clip_norm = _clip_norm(configuration)
        self._batches = _batches(len(train), configuration, computation.device, seed)
        self._learning_rate = configuration.learning_rate
        self._loss_sum: torch.Tensor | None = None
        self._losses = 0

    @property
    def samples(self) -> int:
        """Return how many training samples have been seen."""
        return self.steps * self._configuration.batch_size

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the last step, or of the first one before it has run."""
        factor = self.schedule.factor(max(0, self.steps - 1))
        return self._configuration.learning_rate * factor

    def step(self) -> None:
        """Run one optimizer step: all its micro-batches, then clipping, schedule and update once."""
        self._set_learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        for indices in next(self._batches):
            loss = self._micro_batch_loss(self._train.inputs[indices], self._train.targets[indices])
            share = loss / self._accumulation_steps if self._accumulation_steps > 1 else loss
            share.backward()  # type: ignore[no-untyped-call]
            self._add_loss(loss.detach())
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self.optimizer.step()
        self.steps += 1

    def take_mean_loss(self) -> float | None:
        """Return the mean training loss since the last call, None without a step. Waits for the device."""
        if self._loss_sum is None:
            return None
        mean = self._loss_sum.item() / self._losses
        self._loss_sum, self._losses = None, 0
        return mean

    def evaluate(self, part: Part, metric: str) -> float:
        """Return a metric over a whole part, in evaluation mode and without gradients.

        Raises `WorkloadError` where the workload does not return that metric as a number.
        """
        return metric_value(self._workload, measure(self._workload, self.model, part), metric)

    def _micro_batch_loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self._workload.loss(self.model, inputs, targets, label_smoothing=self._configuration.label_smoothing)
        if not isinstance(loss, torch.Tensor):
            raise WorkloadError(f"loss() returned a {type(loss).__name__}; it must be a scalar tensor")
        if loss.ndim != 0:
            raise WorkloadError(f"loss() returned a tensor of shape {tuple(loss.shape)}; it must be a scalar")
        if not loss.requires_grad:
            raise WorkloadError("loss() returned a tensor without a gradient; it must depend on the model")
        return loss

    def _set_learning_rate(self) -> None:
        learning_rate = self._configuration.learning_rate * self.schedule.factor(self.steps)
        if learning_rate != self._learning_rate:
            self._learning_rate = learning_rate
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate

    def _add_loss(self, loss: torch.Tensor) -> None:
        self._loss_sum = loss if self._loss_sum is None else self._loss_sum + loss
        self._losses += 1


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


def warm_up(
    workload: Workload, configuration: Configuration, data: Data, computation: Computation, metric: str, seed: int
) -> None:
    """Let the device and the libraries meet every shape of a trial before its time starts.

    A throw-away model evaluates the validation part once and takes two steps on zeros of the real shapes. It changes
    the random state: build the trial's own trainer afterwards, which seeds it.
    """
    _check(configuration, len(data.train))
    zeros = Part(
        torch.zeros_like(data.train.inputs[: configuration.batch_size]),
        torch.zeros_like(data.train.targets[: configuration.batch_size]),
    )
    trainer = Trainer(workload, replace(configuration, warmup_epochs=0.0), zeros, computation, seed)
    trainer.evaluate(data.validation, metric)
    for _ in range(WARM_UP_STEPS):
        trainer.step()


def seed_everything(seed: int) -> None:
    """Seed every global generator that a model or a loss may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _batches(
    samples: int, configuration: Configuration, device: torch.device, seed: int
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the indices of each batch as those of its micro-batches, epoch after epoch.

    The order is drawn on the CPU from a generator of its own, so that it is the same on every device and whatever
    dropout draws.
    """
    generator = torch.Generator().manual_seed(seed)
    whole = samples - samples % configuration.batch_size
    while True:
        order = torch.randperm(samples, generator=generator)[:whole].to(device)
        for batch in torch.split(order, configuration.batch_size):
            yield torch.split(batch, configuration.micro_batch_size)


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
