"""The model of a workload before training: its parameters, its layers, its first metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bssearch.errors import WorkloadError
from bssearch.records import ModelDescription, ParameterValue
from bssearch.training.computation import NO_PARAMETERS, Computation
from bssearch.training.trainer import seed_everything
from bssearch.workloads.base import Data, Workload
from bssearch.workloads.evaluation import measure, metric_value


def describe_model(
    workload: Workload,
    data: Data,
    computation: Computation,
    *,
    dropout: float = 0.0,
    seed: int = 0,
    own: Mapping[str, ParameterValue] = NO_PARAMETERS,
) -> ModelDescription:
    """Build a model from a seed, evaluate it on the validation part, and return what was found.

    ``own`` are the user's own parameters of the model.
    Every metric that the workload declares is in ``initial_metrics``. Raises `WorkloadError` where ``evaluate`` does
    not return one of them, and lets the workload's own exceptions through. It changes the random state.
    """
    seed_everything(seed)
    model = computation.build_model(workload, dropout, own)
    with computation.evaluating():
        metrics = measure(workload, model, data.validation)
    values = {name: metric_value(workload, metrics, name) for name in workload.metrics}
    return ModelDescription(
        parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        batch_norm_layers=batch_norm_layers(model),
        initial_metrics={name: value if math.isfinite(value) else None for name, value in values.items()},
    )


def tokens_per_sample(workload: Workload) -> int | None:
    """Return the tokens of a training sample, None where the workload does not count them.

    Raises `WorkloadError` where it is no whole number of at least one.
    """
    tokens = getattr(workload, "tokens_per_sample", None)
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise WorkloadError(f"tokens_per_sample = {tokens!r} must be a whole number >= 1, or left out")
    return tokens


def batch_norm_layers(model: nn.Module) -> int:
    """Return how many layers of a model take their statistics from the batch."""
    return sum(map(_normalises_over_the_batch, model.modules()))


def _normalises_over_the_batch(module: nn.Module) -> bool:
    """Return whether a module of a model in training mode takes its statistics from the batch.

    A batch norm that the model keeps in evaluation mode uses its running ones, where it has them.
    """
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
