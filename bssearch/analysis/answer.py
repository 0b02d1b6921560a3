"""Models of the answer that ``bssearch best --format json`` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from bssearch.analysis.generalisation import Generalisation, MetricOverSeeds
from bssearch.analysis.law.quick import Promise
from bssearch.analysis.measured import BatchNoise, Measured
from bssearch.analysis.objectives import Basis, Objective, make_objective
from bssearch.analysis.optimum import Regime, Rule, Settles
from bssearch.analysis.rules.rule_book import Regret
from bssearch.analysis.shape import Beyond, Fit, Interval, Model, Notice, Parameters
from bssearch.records import BatchScheduleName, LearningRateRule, MemoryBasis, Target
from bssearch.records.text import device_in_words, plural

SavesTime = Literal["yes", "no", "undecided", "not_run"]


class Device(Model):
    """The device of the answer's times.

    In a prediction for another device, only the name is known.

    Attributes:
        threads: CPU threads per trial; null unless the device is a CPU.
        compile_mode: Mode of ``torch.compile``, ``none``, ``own`` if the program compiles, or ``unknown`` if imported.
    """

    name: str
    type: str
    memory_bytes: int | None
    precision: str | None
    torch_version: str | None
    threads: int | None = None
    compile_mode: str | None = None

    @property
    def in_words(self) -> str:
        threads = None if self.threads is None else plural(self.threads, "thread")
        mode = None if self.compile_mode in {None, "none", "own", "unknown"} else f"compile {self.compile_mode}"
        return ", ".join(filter(None, (device_in_words(self.name), threads, mode)))


class Figure(Model):
    """The median over seeds with the 95 % interval, or a prediction if ``runs`` is 0.

    The interval is null if unknown, for example with fewer than three runs.
    """

    median: float
    low: float | None
    high: float | None
    runs: int

    @property
    def origin(self) -> str:
        return plural(self.runs, "run") if self.runs else "predicted"


class Time(Figure):
    """Seconds to the target."""

    basis: Basis | Literal["predicted"]


class Ratio(Model):
    """The ratio of two medians with the 95 % interval.

    ``at_least`` marks a lower bound: at least half of the worse configuration's runs missed the target. The posterior
    gives the interval between the best configurations of two confirmed batch sizes. Otherwise, the interval is from
    Welch's t-test; null if unknown.
    """

    value: float
    at_least: bool
    low: float | None = None
    high: float | None = None

    @property
    def is_shown(self) -> bool:
        return self.low is None or self.high is None or not self.low <= 1 <= self.high


class Restricted(Model):
    """Kaplan–Meier estimates of the seconds to the target, if a run missed the target.

    Attributes:
        mean_s: Mean of min(seconds, ``horizon_s``).
    """

    mean_s: float
    horizon_s: float
    median_s: float | None
    reached_share: float


class Optimal(Model):
    """The recommended configuration.

    ``test_metric`` and ``further_metrics`` are on the test part, except metrics with names that begin with "training".
    """

    batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    world_size: int = 1
    parameters: Parameters
    time_to_target_s: Time | None
    objective_value: Figure
    steps_to_target: int | None
    samples_to_target: float | None
    tokens_to_target: float | None
    test_metric: float | None
    peak_memory_bytes: int | None
    trial_numbers: list[int]
    peak_memory_basis: MemoryBasis | None = None
    further_metrics: dict[str, Figure] = Field(default_factory=dict)

    @property
    def values(self) -> Parameters:
        split = {"micro_batch_size": self.micro_batch_size, "accumulation_steps": self.accumulation_steps}
        return {"batch_size": self.batch_size, **(split if self.accumulation_steps > 1 else {}), **self.parameters}


class Largest(Model):
    """The largest batch size that ran, preferably without accumulation.

    ``bounded_by_memory`` is true if a micro-batch up to the next batch size, or up to 2 × ``batch_size``, ran out of
    memory.
    """

    batch_size: int
    time_to_target_s: Time | None
    lower_bound_s: float | None
    reason: str
    bounded_by_memory: bool = False

    @property
    def in_words(self) -> str:
        return "largest that fits" if self.bounded_by_memory else "largest tried"


class Speedup(Model):
    """The speedups over other configurations.

    ``over_default`` is ``from_retuning`` × ``from_batch_size``. Retuning keeps the default's batch size.
    """

    default_batch_size: int | None = None
    over_largest: Ratio | None
    over_default: Ratio | None
    from_retuning: Ratio | None = None
    from_batch_size: Ratio | None = None


class BestTrial(Model):
    """The best configuration's trial with the best objective value."""

    trial: int
    parameters: Parameters


class Cost(Model):
    """The train seconds of all trials; ``trainings`` is this time / the time of one training at the optimum."""

    train_seconds: float
    trainings: float | None


class Batch(Model):
    """A batch size, with medians over the runs of the best configuration.

    Attributes:
        lower_bound_s: Lower bound of the seconds to the target if the median is unknown.
        predicted_s: The law's steps × the step time.
        host_bound_share: Share of train seconds in which the host did not wait for a CUDA device.
        slope: d log steps / d log batch size from the next smaller batch size.
    """

    batch_size: int
    trials: int
    reached: int
    best: BestTrial | None
    time_to_target_s: Time | None
    lower_bound_s: float | None
    steps_to_target: int | None
    step_time_s: float | None
    final_metric: float | None
    regime: Regime | None
    untuned: bool
    ended: dict[str, int]
    micro_batch_size: int | None
    objective_value: Figure | None
    objective_lower_bound: float | None
    steps_x_step_time_s: float | None
    samples_to_target: float | None
    samples_per_s: float | None
    peak_memory_bytes: int | None
    energy_joules: float | None
    restricted: Restricted | None
    confirmed: bool
    untuned_because: list[str]
    slope: Interval | None = None
    predicted_s: Time | None = None
    peak_memory_basis: MemoryBasis | None = None
    generalisation: MetricOverSeeds | None = None
    noise_scale: BatchNoise | None = None
    host_bound_share: float | None = None


class Recommendation(Model):
    """The rule that chose the batch size: least median, smallest size within 5 % of the best, or the law."""

    rule: Rule
    least_batch_size: int


class Settle(Model):
    """The seed-to-seed spread, and the runs per batch size that would show a difference of 5 % or 10 %."""

    coefficient_of_variation: float
    runs_for_5_percent: int
    runs_for_10_percent: int
    settled: bool
    undecided: list[int]


class FrontPoint(Model):
    """The time and the cost of a batch size; ``on_front`` is true on the Pareto front.

    The cost is device-hours × price, or samples if no price is set. Only confirmed sizes are on the front, if any size
    is confirmed.
    """

    batch_size: int
    time_to_target_s: float
    cost: float
    on_front: bool


class OnDevices(Model):
    """The best batch size on ``world_size`` devices; ``cost`` is in device-seconds.

    Attributes:
        predicted_s: Steps to the target × the probed step time.
        seconds: The median seconds to the target on the study's devices. On more devices, steps × the runs' step time;
            ``predicted_s`` if no run exists.
        reduce_share: Share of the step time that is due to more devices at an equal micro-batch size, mostly to
            gradient reduction.
        on_front: True on the Pareto front of seconds and cost.
        contenders: Pairs (batch size, micro-batch size) to run next.
    """

    world_size: int
    batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    learning_rate: float | None
    seconds: float
    low: float | None
    high: float | None
    runs: int
    predicted_s: float
    step_seconds: float
    reduce_share: float | None
    speedup: Ratio
    efficiency: float
    cost: float
    on_front: bool
    contenders: list[tuple[int, int]] = Field(default_factory=list)


class NextStep(Model):
    """The command to run next, and the reason."""

    command: str
    why: str


class StageAnswer(Model):
    """A stage of a batch schedule; ``start_samples`` is null if the measured gradient noise decides the start."""

    start_samples: int | None
    batch_size: int
    micro_batch_size: int
    learning_rate: float
    steps: float | None
    seconds: float | None


class BatchScheduleAnswer(Model):
    """The best schedule of growing batches, compared with the best constant batch size.

    Attributes:
        ratio: The schedule's objective value / the optimum's, paired by seed if possible.
        saves_time: "yes" if the ratio's interval is below 1, "no" if above.
    """

    name: BatchScheduleName
    stages: list[StageAnswer]
    rate_rule: LearningRateRule
    noise_share: float | None
    parameters: Parameters
    time_to_target: float | None
    low: float | None
    high: float | None
    runs: int
    reached: int
    ratio: Regret | None
    saves_time: SavesTime
    reason: str
    trials: int
    trial_numbers: list[int]


class Answer(Model):
    """The recommended batch size with the evidence.

    Attributes:
        tied: Batch sizes shown to be within 5 % of the best.
        worse: Batch sizes shown to be more than 5 % worse than the best.
        within_5_percent: Probability that the recommended batch size costs at most 5 % more than the best, if all sizes
            are fully tuned.
        provisional: True if ``within_5_percent`` is unknown or below 0.9, or if training ignores the seed.
        configuration_within_5_percent: ``within_5_percent`` if the recommended values are not tuned further.

    ::

        answer: bssearch.Answer = bssearch.best("digits")
        print(answer.optimal.batch_size, answer.speedup.over_default)
    """

    # set by `bssearch.commands.best`
    plot: ClassVar[Callable[[Answer], Any]]
    frame: ClassVar[Any]
    _repr_html_: ClassVar[Callable[[Answer], str]]
    _repr_mimebundle_: ClassVar[Callable[..., dict[str, str]]]

    schema_version: Literal[1] = 1
    study: str
    objective: str
    price_per_device_hour: float | None = None
    target: Target
    device: Device
    optimal: Optimal
    flat_range: Annotated[list[int], Field(min_length=2, max_length=2)]
    tied: list[int]
    largest_that_fits: Largest
    speedup: Speedup
    batches: list[Batch]
    fit: Fit | None
    measured: Measured
    recommendation: Recommendation
    settle: Settle | None
    front: list[FrontPoint]
    by_devices: list[OnDevices] = Field(default_factory=list)
    worse: list[int] = Field(default_factory=list)
    provisional: bool = True
    within_5_percent: float | None = None
    configuration_within_5_percent: float | None = None
    would_settle: Settles | None = None
    runs_to_settle: int | None = None
    next: list[NextStep] = Field(default_factory=list)
    imported: bool = False
    generalisation: Generalisation | None
    quick: Promise | None = None
    batch_schedule: BatchScheduleAnswer | None = None
    cost: Cost | None = None
    predicted: Beyond | None = None
    warnings: list[Notice]

    def __repr__(self) -> str:
        from bssearch.analysis.headline import headline

        return headline(self)

    __str__ = __repr__

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        return self.model_dump(mode="json")

    @property
    def is_predicted(self) -> bool:
        """True if the values are predictions for another device or a harder target."""
        return any(warning.code == "predicted" for warning in self.warnings)

    @property
    def clock(self) -> str | None:
        """The seconds' basis if it is ``wall`` or ``reported``; otherwise None."""
        time = self.optimal.time_to_target_s
        return time.basis if time is not None and time.basis in {"wall", "reported"} else None

    @property
    def settling(self) -> NextStep | None:
        """The next command to settle the answer, if any."""
        first = next(iter(self.next), None)
        has_missing_runs = self.imported and first is not None and "--to spec" in first.command
        return first if self.would_settle is not None or has_missing_runs else None


# An answer for another target or device proposes no commands.
NO_NEXT_STEP: Mapping[str, object] = {"next": [], "would_settle": None, "runs_to_settle": None}


def objective_in(answer: Answer) -> Objective:
    return make_objective(answer.objective, answer.target, answer.price_per_device_hour)
