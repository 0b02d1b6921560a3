"""The law of steps joined with step times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from bssearch.analysis.answer import Time
from bssearch.analysis.law.affine_step_time import fit_step_time
from bssearch.analysis.law.batch_model import LawFit, LawPoint, RunnableStep, fit_law, predict_optimum
from bssearch.analysis.law.fitted import CriticalBatch, Fit, Law
from bssearch.analysis.measured import NoiseAnswer
from bssearch.analysis.objectives.base import Objective
from bssearch.records import ProbeRecord
from bssearch.records.intervals import student_t

SIZES_PER_OCTAVE = 16
"""4 % apart, below the 5 % that counts."""


def fit_and_predict(
    points: Sequence[LawPoint], probes: Collection[ProbeRecord], noise: NoiseAnswer | None
) -> tuple[LawFit | None, Fit | None]:
    """Fitted law, and its form in the answer."""
    law = fit_law(points)
    if law is None:
        return None, None
    line = fit_step_time(list(probes))
    optimum = predict_optimum(law, runnable_steps(probes, law.largest_batch))
    scale = None if noise is None else noise.scale
    fit = Fit(
        **_law(law).model_dump(),
        alpha_s=None if line is None else line.alpha_seconds,
        beta_s=None if line is None else line.beta_seconds,
        b_star=None if optimum is None else float(optimum.batch_size),
        predicted=optimum,
        including_untuned=None if law.including_untuned is None else _law(law.including_untuned),
        noise_scale_ratio=None if scale is None or law.b_crit_high is None else scale / law.b_crit,
    )
    return law, fit


def runnable_steps(probes: Collection[ProbeRecord], largest: int) -> list[RunnableStep]:
    """Step times up to ``largest``: measured, and interpolated between sizes without accumulation."""
    found = [
        RunnableStep(one.batch_size, one.micro_batch_size, one.step_seconds)
        for one in sorted(probes, key=lambda one: one.batch_size)
        if one.step_seconds is not None and one.batch_size <= largest
    ]
    whole = [one for one in found if one.batch_size == one.micro_batch_size]
    between = [one for pair in itertools.pairwise(whole) for one in _between(*pair)]
    return sorted([*found, *between], key=lambda one: one.batch_size)


def _between(low: RunnableStep, high: RunnableStep) -> list[RunnableStep]:
    count = SIZES_PER_OCTAVE * math.log2(high.batch_size / low.batch_size)
    sizes = {round(low.batch_size * 2 ** (index / SIZES_PER_OCTAVE)) for index in range(1, math.ceil(count))}
    slope = (high.step_seconds - low.step_seconds) / (high.batch_size - low.batch_size)
    return [
        RunnableStep(size, size, low.step_seconds + slope * (size - low.batch_size))
        for size in sorted(sizes - {low.batch_size, high.batch_size})
    ]


def predicted_figures(
    law: LawFit, step_seconds: Mapping[int, float], batch_sizes: Collection[int], objective: Objective
) -> dict[int, float]:
    """Figures by batch size, if law and step time determine them."""
    sizes = [size for size in batch_sizes if size <= law.largest_batch]
    found = {size: objective.predicted(law.steps(size), size, step_seconds.get(size)) for size in sizes}
    return {size: figure for size, figure in found.items() if figure is not None}


def predicted_times(law: LawFit, probes: Collection[ProbeRecord]) -> dict[int, Time]:
    """Law × step time of each timed batch size, with both errors."""
    found: dict[int, Time] = {}
    for probe in probes:
        size, seconds = probe.batch_size, probe.step_seconds
        if seconds is None or size > law.largest_batch:
            continue
        steps, ends = law.steps(size), law.steps_interval(size)
        error = 0.0 if probe.error is None else math.hypot(probe.error.own, probe.error.common)
        of_step = 0.0 if probe.error is None else error * student_t(probe.error.freedom)
        low, high = (None, None) if ends is None else (math.log(steps / ends[0]), math.log(ends[1] / steps))
        found[size] = Time(
            median=steps * seconds,
            low=None if low is None else steps * seconds * math.exp(-math.hypot(low, of_step)),
            high=None if high is None else steps * seconds * math.exp(math.hypot(high, of_step)),
            runs=0,
            basis="steps_x_step_time",
        )
    return found


def _law(law: LawFit) -> Law:
    return Law(
        s_min=law.s_min,
        b_crit=CriticalBatch(estimate=law.b_crit, low=law.b_crit_low, high=law.b_crit_high),
        max_residual=law.max_residual,
        verdict=law.verdict,
        residuals=dict(law.residuals),
    )
