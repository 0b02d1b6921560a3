"""What measures the gradient noise beside a trial's training, made before its time starts."""

from __future__ import annotations

from bssearch.errors import WorkloadError
from bssearch.records import TrialRequest
from bssearch.training.computation import Computation
from bssearch.training.gradient_noise import SMALL_BATCHES, NoiseBudget, NoiseMeter, small_batch_size
from bssearch.training.growing.by_noise import NoiseGrowth
from bssearch.training.trainer import Trainer
from bssearch.workloads.base import Part, Workload


def noise_meter(
    request: TrialRequest,
    workload: Workload,
    computation: Computation,
    trainer: Trainer,
    train: Part,
    budget: NoiseBudget | None,
) -> NoiseMeter | None:
    """Return what measures the noise scale near a trial's target; None where nobody asked, or it cannot be."""
    if request.branch is not None or not computation.settings.measure_noise or not trainer.has_noise:
        return None
    given = workload, computation, trainer, request.configuration, train, request.target, request.seed
    return NoiseMeter(*given, budget=budget)


def noise_growth(
    request: TrialRequest, workload: Workload, computation: Computation, trainer: Trainer, train: Part
) -> NoiseGrowth | None:
    """Return what lets a batch grow with the noise scale, None where it does not; `WorkloadError` where it cannot."""
    if not trainer.growth.is_measured:
        return None
    small = small_batch_size(request.configuration, len(train)) if trainer.has_noise else 0
    if small == 0:
        why = f"the training part has too few samples for {SMALL_BATCHES} gradients"
        reason = why if trainer.has_noise else "the gradient of single samples cannot be taken"
        raise WorkloadError(f"batch_schedule = 'noise_scale' measures the gradient noise scale: {reason}")
    return NoiseGrowth(workload, computation, trainer, request.configuration, train, request.seed)
