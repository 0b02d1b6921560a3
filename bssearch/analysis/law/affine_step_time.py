"""Linear fits of step time and memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bssearch.records import MemoryUse, StepTime
from bssearch.records.intervals import FEWEST_SIZES

KNEE_SHARE = 0.9  # of the highest measured throughput


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """Step time t(B) = α + β·B without accumulation.

    ``max_residual``: the largest |fit / measured − 1|. ``measured``: seconds by batch size.
    """

    alpha_seconds: float
    beta_seconds: float
    max_residual: float
    measured: Mapping[int, float]

    @property
    def half_saturation_batch(self) -> float:
        """α/β: batch size with half of the limiting throughput."""
        return self.alpha_seconds / self.beta_seconds

    def predict(self, batch_size: int, micro_batch_size: int, update_seconds: float) -> float:
        """Seconds of a step: t(B), or with k micro-batches k·(t(micro-batch) − update) + update.

        A measured micro-batch time overrides the fitted line.
        """
        accumulation = batch_size // micro_batch_size
        micro = self.alpha_seconds + self.beta_seconds * micro_batch_size
        if accumulation == 1:
            return micro
        return accumulation * (self.measured.get(micro_batch_size, micro) - update_seconds) + update_seconds


def fit_step_time(probes: Sequence[StepTime], fewest: int = FEWEST_SIZES) -> StepTimeFit | None:
    """Fit step times without accumulation by least squares of the relative error, with α ≥ 0.

    None below ``fewest`` timed sizes, if β ≤ 0, or if 1 / t overflows.
    """
    measured = {
        probe.batch_size: probe.step_seconds
        for probe in probes
        if probe.step_seconds is not None and probe.batch_size == probe.micro_batch_size
    }
    if len(measured) < fewest:
        return None
    sizes, seconds = np.array(list(measured), dtype=float), np.array(list(measured.values()))
    with np.errstate(over="ignore"):
        terms = np.column_stack([1 / seconds, sizes / seconds])
    if not np.isfinite(terms).all():
        return None
    alpha, beta = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)[0]
    if alpha < 0:
        alpha, beta = 0.0, terms[:, 1].sum() / (terms[:, 1] ** 2).sum()
    if beta <= 0:
        return None
    residuals = terms @ np.array([alpha, beta]) - 1
    return StepTimeFit(float(alpha), float(beta), float(np.abs(residuals).max()), measured)


def throughput_knee(probes: Sequence[StepTime]) -> int | None:
    """Smallest batch size with at least 90 % of the highest throughput."""
    throughputs = {
        probe.batch_size: probe.batch_size / probe.step_seconds for probe in probes if probe.step_seconds is not None
    }
    enough = KNEE_SHARE * max(throughputs.values(), default=0.0)
    return min((size for size, throughput in throughputs.items() if throughput >= enough), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Peak memory = fixed + per sample × micro-batch, in bytes."""

    fixed_bytes: float
    bytes_per_sample: float
    largest_residual: float


def fit_memory(uses: Sequence[MemoryUse]) -> MemoryFit | None:
    """Fit the peaks of the sizes that fit by least squares; None below three sizes."""
    peaks = {use.micro_batch_size: use.peak_memory_bytes for use in uses if use.fits and use.peak_memory_bytes}
    if len(peaks) < 3:
        return None
    slope, fixed = statistics.linear_regression(list(peaks), list(peaks.values()))
    residuals = [abs(fixed + slope * size - peak) / peak for size, peak in peaks.items()]
    return MemoryFit(fixed_bytes=fixed, bytes_per_sample=slope, largest_residual=max(residuals))
