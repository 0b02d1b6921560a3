"""What a workload's ``evaluate`` says of a part, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bssearch.errors import WorkloadError
from bssearch.records import MetricInfo
from bssearch.workloads.base import Part, Workload


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
