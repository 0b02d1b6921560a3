"""The law as an answer has it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bssearch.analysis.numbers import ends, number
from bssearch.analysis.shape import Model


class CriticalBatch(Model):
    """The critical batch size with its 90 % interval; null where the runs do not bound it on that side."""

    estimate: float
    low: float | None
    high: float | None

    @property
    def in_words(self) -> str:
        """Return what is known of it: an estimate with its interval, or a bound where the runs show no bend."""
        if self.low is None and self.high is None:
            return "not bounded by these runs"
        if self.high is None:
            return f"≥ {number(self.low or 0.0)}"
        if self.low is None:
            return f"≤ {number(self.high)}"
        return f"{number(self.estimate)}{ends(self.low, self.high)} (90 %)"


BatchRange = Annotated[list[int], Field(min_length=2, max_length=2)]
"""The smallest and the largest batch size of a range."""


class Predicted(Model):
    """The optimum by law × step time, among the sizes that can be run, and the sizes within 5 % of it.

    ``interval`` holds the optima of all laws in the 95 % confidence region of the fit, ``surely_flat`` the sizes around
    the optimum that are within 5 % by all of them; null where the runs bound no region, or nothing is sure.
    """

    batch_size: int
    micro_batch_size: int
    time_to_target_s: float
    flat_range: BatchRange
    interval: BatchRange | None = None
    surely_flat: BatchRange | None = None

    @property
    def in_words(self) -> str:
        """Return the optimum with its interval, its seconds, and what is as good by every law that the runs allow."""
        interval = "" if self.interval is None else f" [{self.interval[0]}, {self.interval[1]}]"
        text = f"batch {self.batch_size}{interval}, {number(self.time_to_target_s)} s"
        flat = self.flat_range if self.interval is None else self.surely_flat
        return text if flat is None or flat[0] == flat[1] else f"{text}; all from {flat[0]} to {flat[1]} within 5 %"


class Law(Model):
    """The law S = S_min (1 + B_crit / B) for steps to the target, its residuals by batch size, and how good it is."""

    s_min: float
    b_crit: CriticalBatch
    max_residual: float
    verdict: Literal["fits", "poor", "too_few_points"]
    residuals: dict[int, float]


class Fit(Law):
    """The law fitted to the batch sizes that are tuned; ``including_untuned`` is the fit to all where they differ.

    With step times t = α + β·B: ``b_star`` is where the predicted time to the target is least, no larger than the
    largest batch size run. ``noise_scale_ratio`` is the gradient noise scale over the critical batch size.
    """

    alpha_s: float | None
    beta_s: float | None
    b_star: float | None
    predicted: Predicted | None
    including_untuned: Law | None
    noise_scale_ratio: float | None
