"""The shape of an answer: what ``bssearch best --format json`` prints and its JSON Schema describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from bssearch.analysis.certainty import Settles
from bssearch.analysis.generalisation import Generalisation, MetricOverSeeds
from bssearch.analysis.law.fitted import Fit
from bssearch.analysis.law.quick import Promise
from bssearch.analysis.law.regimes import Regime
from bssearch.analysis.measured import BatchNoise, Measured
from bssearch.analysis.objectives.base import Objective, make_objective
from bssearch.analysis.objectives.seconds import Basis
from bssearch.analysis.optimum import Rule
from bssearch.analysis.rules.regret import Regret
from bssearch.analysis.shape import Interval, Model, Notice, Parameters
from bssearch.records import MemoryBasis, Target
from bssearch.records.batch_schedule import BatchScheduleName
from bssearch.records.scaling import LearningRateRule

SavesTime = Literal["yes", "no", "undecided", "not_run"]
"""Whether letting the batch grow saves time."""


class Device(Model):
    """Where it was measured; the answer holds for this kind of device.

    ``threads`` of a CPU are those that each trial had. ``compile_mode`` says how steps were computed: ``none`` is
    eager, ``own`` the business of a program, and of imported runs it is ``unknown``. Of a device for which an answer is
    predicted only the name is known: its type is ``unknown``, the rest null.
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
        """Return the device with what of it the figures hold for."""
        said = [self.name]
        if self.threads is not None:
            said.append(f"{self.threads} thread{'' if self.threads == 1 else 's'}")
        if self.compile_mode not in {None, "none", "own", "unknown"}:
            said.append(f"compile {self.compile_mode}")
        return ", ".join(said)


class Figure(Model):
    """The figure of the objective, in its own unit, over the seeds that count.

    The median, and its 95 % interval: null below three runs, or if a run missed the target.
    """

    median: float
    low: float | None
    high: float | None
    runs: int


class Time(Figure):
    """Seconds over seeds, and how they were measured."""

    basis: Basis


class Ratio(Model):
    """A ratio of medians with its 95 % interval, null as in `Time`; ``at_least`` where the slower side never finished.

    The interval is Welch's on logarithms over the seeds of both sides, widened to hold the ratio.
    """

    value: float
    at_least: bool
    low: float | None = None
    high: float | None = None

    @property
    def is_shown(self) -> bool:
        """Return whether the two sides are shown to differ, or nothing is known of how sure the ratio is."""
        return self.low is None or self.high is None or not self.low <= 1 <= self.high


class Restricted(Model):
    """Repeats of which some missed the target: the mean of min(seconds, horizon), and the share that reached by then.

    By Kaplan and Meier; ``median_s`` is null where half of the runs or more did not reach.
    """

    mean_s: float
    horizon_s: float
    median_s: float | None
    reached_share: float


class Optimal(Model):
    """The recommended configuration, whole; tokens where the workload counts them.

    ``further_metrics`` are those that the workload reports beside the target's, on the test part like ``test_metric``.
    ``peak_memory_basis`` says what the peak memory is the peak of: what tensors held on the ``device``, or the growth
    of the process's ``resident`` set.
    """

    batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    parameters: Parameters
    time_to_target_s: Time | None
    objective_value: Figure | None
    steps_to_target: int | None
    samples_to_target: float | None
    tokens_to_target: float | None
    test_metric: float | None
    peak_memory_bytes: int | None
    trial_numbers: list[int]
    peak_memory_basis: MemoryBasis | None = None
    further_metrics: dict[str, Figure] = Field(default_factory=dict)


class Largest(Model):
    """The largest batch size that ran without accumulation; the reason names what ran out of memory.

    It is the largest that fits where ``bounded_by_memory``: at most twice as many samples ran out. Otherwise nobody
    knows whether a larger one would, and it is the largest tried.
    """

    batch_size: int
    time_to_target_s: Time | None
    lower_bound_s: float | None
    reason: str
    bounded_by_memory: bool = False

    @property
    def in_words(self) -> str:
        """Return what it is the largest of."""
        return "largest that fits" if self.bounded_by_memory else "largest tried"


class Speedup(Model):
    """How much faster the optimum is.

    Over the default it is the product of two: ``from_retuning`` the rest at the default's own batch size, and
    ``from_batch_size`` what the batch size adds then; null where one is not known.
    """

    over_largest: Ratio | None
    over_default: Ratio | None
    from_retuning: Ratio | None = None
    from_batch_size: Ratio | None = None


class BestTrial(Model):
    """The configuration whose time-to-target stands for a batch size, and its fastest trial."""

    trial: int
    parameters: Parameters


class Batch(Model):
    """One batch size: its best tuned figures, or why it has none; medians over the runs of ``best``'s configuration.

    ``untuned``, for the reasons in ``untuned_because``: the learning rate lies at an end of its range (of imported
    runs: of those tried), the steps rise from the next smaller batch size, or a single configuration has reached the
    target. ``lower_bound_s`` is the last moment at which the target was seen to be missed, ``objective_lower_bound``
    the same in the unit of the objective; ``restricted`` is there where some of several runs missed it. Samples and the
    product of steps and step time are of the median steps, ``steps_to_target`` is rounded up. Energy is of the device,
    over the train seconds to the target. ``predicted_s`` is law × step time with the errors of both, where the law fits
    and no further than it was seen to. ``peak_memory_basis`` as in `Optimal`. ``generalisation`` is the metric on
    samples that no training saw, over the same runs; ``noise_scale`` is that of the gradient near the target, over all
    trials of the batch size. ``host_bound_share`` is the share of the train seconds, 0 to 1, in which the host did not
    wait for a CUDA device: the median of these runs, or of the steps timed in isolation; null where neither tells.

    ``slope`` is that of log steps over log batch from the next smaller batch size: −1 if steps halve as the batch
    doubles.
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
    """Why this batch size: it has the ``least`` median, is the smallest shown to be within 5 % of it, or by the law.

    ``least_batch_size`` has the least median.
    """

    rule: Rule
    least_batch_size: int


class Settle(Model):
    """The seed noise of the confirmation runs, and how many runs a batch size tell two of them apart by 5 and 10 %.

    ``undecided`` are the batch sizes of which more runs could change what the runs alone recommend, which is another
    one where the law decides; ``settled`` where none is.
    """

    coefficient_of_variation: float
    runs_for_5_percent: int
    runs_for_10_percent: int
    settled: bool
    undecided: list[int]


class FrontPoint(Model):
    """What reaching the target takes at a batch size; ``on_front`` where no other is better in time and in cost.

    The cost is the price of the device-hours where the spec gives one, else the samples: what is computed. Once batch
    sizes are confirmed, only these are on the front and count against others: as in the recommendation, a single search
    trial is not held against a median of confirmation runs.
    """

    batch_size: int
    time_to_target_s: float
    cost: float
    on_front: bool


class NextStep(Model):
    """A command that would tell more, or use the answer, and why."""

    command: str
    why: str


class StageAnswer(Model):
    """Steps of ``batch_size`` samples from ``start_samples`` seen on; null where the trial decides when.

    ``steps`` and ``seconds`` are those to the target in the median run: null where they are not known, seconds by the
    step times.
    """

    start_samples: int | None
    batch_size: int
    micro_batch_size: int
    learning_rate: float
    steps: float | None
    seconds: float | None


class BatchScheduleAnswer(Model):
    """The best way to let the batch grow, and what it saves against the best batch that stays.

    ``ratio`` is its figure over that of the optimum, paired by seed where both have runs with it. ``saves_time`` is yes
    where the whole interval is below 1, no where it is above, ``not_run`` where no run repeats it. ``time_to_target``
    is the median over ``runs``. ``trials`` are those of the search for it.
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
    """Which batch size is optimal, and the evidence.

    ``tied`` are the batch sizes shown to be within 5 % of the least, ``worse`` those shown not to be; of the others the
    runs show neither. ``within_5_percent`` is the probability that the recommendation costs at most 5 % more than the
    best confirmed batch size, pooled through the law where it fits; null without confirmation runs. The answer is
    ``provisional`` below 0.9; ``would_settle`` says what would tell most then, ``runs_to_settle`` how many runs of each
    batch size in all, where these would. ``next`` are the commands that would help most now. Costs are in the currency
    of ``price_per_device_hour``; where it is null they are device-hours. ``quick`` is the quick answer
    that came before the search, ``batch_schedule`` the best way to let the batch grow, null where none was run.

    `bssearch.commands.answer` adds ``plot``, ``frame`` and what a notebook shows.
    """

    plot: ClassVar[Callable[[Answer], Any]]
    frame: ClassVar[Any]
    _repr_html_: ClassVar[Callable[[Answer], str]]

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
    worse: list[int] = Field(default_factory=list)
    provisional: bool = True
    within_5_percent: float | None = None
    would_settle: Settles | None = None
    runs_to_settle: int | None = None
    next: list[NextStep] = Field(default_factory=list)
    imported: bool = False
    generalisation: Generalisation | None
    quick: Promise | None = None
    batch_schedule: BatchScheduleAnswer | None = None
    warnings: list[Notice]

    @property
    def is_predicted(self) -> bool:
        """Whether the figures are predicted for another device instead of measured."""
        return any(warning.code == "predicted" for warning in self.warnings)

    @property
    def clock(self) -> str | None:
        """Whose clock the seconds are by; None if bssearch measured them."""
        time = self.optimal.time_to_target_s
        return time.basis if time is not None and time.basis in {"wall", "reported"} else None

    @property
    def settling(self) -> NextStep | None:
        """Return the command that would settle a provisional answer; None where it is settled, or nothing would."""
        return self.next[0] if self.next and self.would_settle is not None else None


NO_NEXT_STEP: Mapping[str, object] = {"next": [], "would_settle": None, "runs_to_settle": None}
"""The fields of an answer derived from a study's, whose commands are about another question."""


def objective_in(answer: Answer) -> Objective:
    """Return the objective of an answer, with its words."""
    return make_objective(answer.objective, answer.target, answer.price_per_device_hour)
