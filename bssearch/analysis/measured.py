"""What was measured of the device and the model besides trials: step time, memory, gradient noise."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from bssearch.analysis.law.affine_step_time import fit_step_time, throughput_knee
from bssearch.analysis.memory import fit_memory
from bssearch.analysis.model import Model
from bssearch.records import GradientNoise, MemoryUse, NoiseMeasurement, ProbeRecord, TrialRecord
from bssearch.space import MemoryBoundary


class StepTimeAnswer(Model):
    """Seconds of a step without accumulation, α + β·B, and the smallest batch with 90 % of the highest throughput."""

    alpha_s: float
    beta_s: float
    max_residual: float
    throughput_knee: int


class MemoryAnswer(Model):
    """Micro-batch sizes that were run; null where none was too large, or the peaks give no line."""

    largest_that_fits: int
    smallest_that_does_not: int | None
    fixed_bytes: float | None
    bytes_per_sample: float | None


class NoiseAnswer(Model):
    """The gradient noise scale in samples with its 95 % interval; without ``scale`` it is ``low`` or more.

    From a probe at ``step``, or from ``trial``. ``far_from_target`` says why the probe was not near the target. The
    ``adam`` figures are null under other optimizers.
    """

    batch_size: int
    scale: float | None
    low: float
    high: float | None
    adam_scale: float | None
    adam_low: float | None
    adam_high: float | None
    passes: int
    step: int | None = None
    trial: int | None = None
    far_from_target: str | None = None


class Measured(Model):
    """What probes and trials found beside times to the target; null where nothing was measured."""

    step_time: StepTimeAnswer | None = None
    memory: MemoryAnswer | None = None
    noise_scale: NoiseAnswer | None = None


def measured(
    probes: Collection[ProbeRecord],
    uses: Sequence[MemoryUse],
    memory: MemoryBoundary,
    noise: Sequence[NoiseMeasurement],
    runs: Sequence[TrialRecord],
) -> Measured:
    """Return what is known: ``noise`` has the probes, the newest first, and ``runs`` are the trials of the optimum.

    Of the noise scales, a probe near the target comes first, then the measurement in a training run, the one with the
    most passes, then a probe far from the target.
    """
    return Measured(step_time=_step_time(probes), memory=_memory(uses, memory), noise_scale=_noise(noise, runs))


def _step_time(probes: Collection[ProbeRecord]) -> StepTimeAnswer | None:
    fit, knee = fit_step_time(list(probes)), throughput_knee(list(probes))
    if fit is None or knee is None:
        return None
    return StepTimeAnswer(
        alpha_s=fit.alpha_seconds, beta_s=fit.beta_seconds, max_residual=fit.max_residual, throughput_knee=knee
    )


def _memory(uses: Sequence[MemoryUse], memory: MemoryBoundary) -> MemoryAnswer | None:
    if memory.fits is None:
        return None
    fit = fit_memory(uses)
    return MemoryAnswer(
        largest_that_fits=memory.fits,
        smallest_that_does_not=memory.too_large,
        fixed_bytes=None if fit is None else fit.fixed_bytes,
        bytes_per_sample=None if fit is None else fit.bytes_per_sample,
    )


def _noise(probed: Sequence[NoiseMeasurement], runs: Sequence[TrialRecord]) -> NoiseAnswer | None:
    known = [one for one in probed if one.noise.low is not None]
    near = next((one for one in known if one.reason is None), None)
    in_passing = [run for run in runs if _noise_of(run).low is not None]
    if near is None and in_passing:
        run = max(in_passing, key=lambda run: _noise_of(run).passes or 0)
        return NoiseAnswer(batch_size=run.configuration.batch_size, **_figures(_noise_of(run)), trial=run.number)
    probe = near or next(iter(known), None)
    if probe is None:
        return None
    return NoiseAnswer(
        batch_size=probe.batch_size, **_figures(probe.noise), step=probe.step, far_from_target=probe.reason
    )


def _noise_of(run: TrialRecord) -> GradientNoise:
    return run.outcome.noise if run.outcome is not None else GradientNoise()


def _figures(noise: GradientNoise) -> dict[str, Any]:
    return {**asdict(noise), "passes": noise.passes or 0}
