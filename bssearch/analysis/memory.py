"""The peak memory as a line over the micro-batch size, fitted to the sizes that ran."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bssearch.records import MemoryUse


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
