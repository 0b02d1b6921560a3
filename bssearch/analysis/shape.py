"""Models for parts of an answer."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bssearch.records import Configuration, Target
from bssearch.records.text import ends, number
from bssearch.spec import TRAINING_PARAMETERS

Parameters = dict[str, bool | int | float | str | None]


class Model(BaseModel):
    """A part of an answer, with finite numbers and null for missing values."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def document(self) -> dict[str, Any]:
        """Return the part as JSON values."""
        return self.model_dump(mode="json")

    def __dir__(self) -> list[str]:  # without pydantic's methods
        own = {name for kind in type(self).__mro__ if issubclass(kind, Model) for name in vars(kind)}
        return sorted({*type(self).model_fields, *(name for name in own if not name.startswith(("_", "model_")))})


class Interval(Model):
    """A value with an interval of 95 % unless stated otherwise; unknown ends are null."""

    value: float
    low: float | None
    high: float | None


class Notice(Model):
    """A caveat with a code and a sentence."""

    code: str
    message: str


def parameters_of(configuration: Configuration) -> Parameters:
    named: Parameters = {"learning_rate": configuration.learning_rate}
    named |= {name: getattr(configuration, name) for name in TRAINING_PARAMETERS}
    return {**named, "optimizer": configuration.optimizer, **configuration.parameters}


class CriticalBatch(Model):
    """The critical batch size with the 90 % interval, null on an unbounded side."""

    estimate: float
    low: float | None
    high: float | None

    @property
    def in_words(self) -> str:
        if self.low is None and self.high is None:
            return "unknown from these runs"
        if self.high is None:
            return f"≥ {number(self.low or 0.0)}"
        if self.low is None:
            return f"≤ {number(self.high)}"
        return f"{number(self.estimate)}{ends(self.low, self.high)} (90 %)"


BatchRange = Annotated[list[int], Field(min_length=2, max_length=2)]


class Predicted(Model):
    """The optimum among runnable sizes, by the law's steps × step time.

    ``interval`` contains the optimum with a probability of 95 %. Each size in ``surely_flat`` is within 5 % of the best
    with a probability of at least 95 %.
    """

    batch_size: int
    micro_batch_size: int
    time_to_target_s: float
    flat_range: BatchRange
    interval: BatchRange | None = None
    surely_flat: BatchRange | None = None

    @property
    def name(self) -> str:
        return f"batch {self.batch_size}" + ("" if self.interval is None else f" {self.interval}")

    @property
    def in_words(self) -> str:
        text = f"{self.name}, {number(self.time_to_target_s)} s"
        flat = self.flat_range if self.interval is None else self.surely_flat
        return text if flat is None or flat[0] == flat[1] else f"{text}; {flat[0]} to {flat[1]} are within 5 %"


class Law(Model):
    """The law of steps to the target: S = S_min (1 + B_crit / B) (McCandlish et al. 2018)."""

    s_min: float
    b_crit: CriticalBatch
    max_residual: float
    verdict: Literal["fits", "poor", "too_few_points"]
    residuals: dict[int, float]


class Fit(Law):
    """The law, fitted to tuned batch sizes if three tuned sizes reached the target, else to all sizes.

    ``including_untuned`` is the fit to all batch sizes, null if all are tuned. ``b_star`` is the batch size with the
    least predicted time. ``noise_scale_ratio`` is gradient noise scale / critical batch size.
    """

    alpha_s: float | None
    beta_s: float | None
    b_star: float | None
    predicted: Predicted | None
    including_untuned: Law | None
    noise_scale_ratio: float | None


class BeyondLevel(Model):
    """The law of steps to a metric on the learning curves."""

    metric: float
    s_min: float
    b_crit: float


class BeyondBatch(Model):
    """The predicted steps and seconds of a batch size."""

    batch_size: int
    micro_batch_size: int
    steps: Interval
    time_to_target_s: Interval


class Beyond(Model):
    """The prediction for a harder target or more samples, with 90 % intervals.

    Attributes:
        reachable: Probability that the metric can reach the target.
        b_crit_measured: B_crit at the study's target.
        growth: Exponent p of B_crit ∝ samples^p.
        test_batch_size: Most informative batch size for a test run.
    """

    metric: Interval
    samples: Interval
    reachable: float
    s_min: float
    b_crit: CriticalBatch
    b_crit_measured: float
    growth: Interval
    optimal_batch_size: int
    flat_range: BatchRange
    optimum_interval: BatchRange
    test_batch_size: int
    batches: list[BeyondBatch]
    levels: list[BeyondLevel]

    def of(self, batch_size: int) -> BeyondBatch:
        return next(one for one in self.batches if one.batch_size == batch_size)


class BeyondPlan(Beyond):
    """The answer of ``bssearch plan beyond``; ``measured`` is the study's target."""

    study: str
    measured: Target
    measured_batch_size: int
    notes: list[Notice]


class ScaleOfLaw(Model):
    """The measured B_crit of a study, B_crit by the law, and AdamW's timescale τ = B/(ηλD) (Wang & Aitchison 2024)."""

    study: str
    parameters: float
    samples: float
    b_crit: float
    b_crit_by_law: Interval
    timescale: float | None


class LeftOutScale(Model):
    """The largest scale, predicted from the other scales.

    ``steps_ratio`` is the geometric mean of predicted / measured steps.
    """

    study: str
    b_crit: Interval
    b_crit_measured: float
    steps_ratio: float


class ScaleCheck(Model):
    """The predicted B_crit after ``samples`` of the planned run, with the 90 % interval."""

    samples: float
    b_crit: Interval


class LargerPlan(Model):
    """The answer of ``bssearch plan larger``, with 90 % intervals.

    B_crit grows as samples^``power``. ``schedule`` has the spec's fields of the learning-rate schedule. Epochs count
    passes over the largest study's data.
    """

    parameters: float
    samples: float
    power: Interval
    b_crit: Interval
    batch_size: int
    flat_range: BatchRange | None
    steps: Interval
    time_s: Interval | None
    learning_rate: float
    weight_decay: float | None
    beta2: float | None
    beta2_half_life_samples: float | None
    timescale: float | None
    schedule: Parameters
    left_out: LeftOutScale
    scales: list[ScaleOfLaw]
    checks: list[ScaleCheck]
    notes: list[Notice]
