"""The line through measured step times, its residuals, and the batch size where throughput levels off."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bssearch.records import MemoryUse, StepTime
from bssearch.records.intervals import FEWEST_SIZES

KNEE_SHARE = 0.9
"""Throughput has levelled off at this share of the highest one measured: a choice."""


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """t(B) = α + β·B in seconds, for steps that accumulate nothing.

    ``alpha_seconds`` is the fixed cost of a step, ``beta_seconds`` the cost of a sample; ``max_residual``
    is the largest |fit / measured − 1|. ``measured`` holds the seconds by batch size that the fit was made of.
    """

    alpha_seconds: float
    beta_seconds: float
    max_residual: float
    measured: Mapping[int, float]

    @property
    def half_saturation_batch(self) -> float:
        """Return α/β, the batch size at which throughput is half of its limit at large batch sizes."""
        return self.alpha_seconds / self.beta_seconds

    def predict(self, batch_size: int, micro_batch_size: int, update_seconds: float) -> float:
        """Return the seconds of a step, of ``update_seconds`` which are spent once for all micro-batches.

        A step of k micro-batches takes k·(t(micro-batch) − update) + update, with the micro-batch's own time as it was
        measured, or else by the line. Without accumulation it is the line.
        """
        accumulation = batch_size // micro_batch_size
        micro = self.alpha_seconds + self.beta_seconds * micro_batch_size
        if accumulation == 1:
            return micro
        return accumulation * (self.measured.get(micro_batch_size, micro) - update_seconds) + update_seconds


def fit_step_time(probes: Sequence[StepTime], fewest: int = FEWEST_SIZES) -> StepTimeFit | None:
    """Fit the line to the step times without accumulation, by least squares of the relative error, with α ≥ 0.

    None where fewer than ``fewest`` such sizes were timed, where a larger batch is no slower (β ≤ 0), and for times so
    short that their inverse is beyond all numbers.
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
    alpha, beta = np.linalg.lstsq(terms, np.ones(len(sizes)))[0]
    if alpha < 0:
        alpha, beta = 0.0, terms[:, 1].sum() / (terms[:, 1] ** 2).sum()
    if beta <= 0:
        return None
    residuals = terms @ np.array([alpha, beta]) - 1
    return StepTimeFit(float(alpha), float(beta), float(np.abs(residuals).max()), measured)


def throughput_knee(probes: Sequence[StepTime]) -> int | None:
    """Return the smallest batch size timed with at least 90 % of the largest samples per second; None without any."""
    throughputs = {
        probe.batch_size: probe.batch_size / probe.step_seconds for probe in probes if probe.step_seconds is not None
    }
    enough = KNEE_SHARE * max(throughputs.values(), default=0.0)
    return min((size for size, throughput in throughputs.items() if throughput >= enough), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """The line peak = fixed + per sample × micro-batch through the sizes that fit, in bytes.

    ``largest_residual`` is the largest distance of a peak from it, as a share of the peak.
    """

    fixed_bytes: float
    bytes_per_sample: float
    largest_residual: float


def fit_memory(uses: Sequence[MemoryUse]) -> MemoryFit | None:
    """Return the line of least squares through the peaks of the sizes that fit; None below three sizes."""
    peaks = {use.micro_batch_size: use.peak_memory_bytes for use in uses if use.fits and use.peak_memory_bytes}
    if len(peaks) < 3:
        return None
    slope, fixed = statistics.linear_regression(list(peaks), list(peaks.values()))
    residuals = [abs(fixed + slope * size - peak) / peak for size, peak in peaks.items()]
    return MemoryFit(fixed_bytes=fixed, bytes_per_sample=slope, largest_residual=max(residuals))
