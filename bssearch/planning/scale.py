"""The time, cost and efficiency of data parallelism on 1 … N devices."""

# Step seconds: k·(α + β·micro-batch) for k accumulation steps, plus a ring all-reduce, 2(n − 1) messages of 1/n of the
# gradients (Patarasu & Yuan 2009). Samples to the target: E(B) = E_min (1 + B / B_crit) (McCandlish et al. 2018, arXiv
# 1812.06162).

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from bssearch.errors import UsageError, require
from bssearch.planning.requests import (
    LARGEST_COUNT,
    MANY_STEPS,
    Database,
    Note,
    NotNegative,
    Parameters,
    Plan,
    Positive,
    Request,
    notes_on,
    planned,
)
from bssearch.records import LARGE_BATCH
from bssearch.records.text import plural
from bssearch.registry import Option
from bssearch.spec import TINY_BATCH, batch_norm_caveats, split_batch

LARGEST_BATCH = 10**9

Batch = Annotated[int, Field(ge=1, le=LARGEST_BATCH)]
Micro = Annotated[int, Field(ge=1, le=10**6)]  # the plan tries all micro-batches up to the limit


class AccumulationRequest(Request):
    """A batch size, with the devices that share the batch."""

    batch: Annotated[
        Batch, Option("Samples of an optimizer step, over all devices.", label="Wanted batch", unit="samples")
    ]
    micro: Annotated[
        Micro | None, Option("Samples per micro-batch on each device.", label="Exact micro-batch", unit="samples")
    ] = None
    max_micro: Annotated[
        Micro | None,
        Option(
            "Instead of micro: largest micro-batch that fits a device. The plan takes a divisor of a device's share.",
            label="Largest micro-batch",
            unit="samples",
        ),
    ] = None
    devices: Annotated[Batch, Option("Number of devices that share the batch.")] = 1
    batch_norm_layers: Annotated[
        Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None,
        Option("Number of the model's batch normalisation layers.", shown_default="unknown"),
    ] = None

    @model_validator(mode="after")
    def _has_one_micro_batch(self) -> Self:
        require(
            self.micro is None or self.max_micro is None,
            f"micro = {self.micro} and max_micro = {self.max_micro} contradict each other; give only one option",
        )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationPlan(Plan):
    """``batch`` = ``micro_batch`` × ``accumulation_steps`` × ``devices`` samples per step."""

    micro_batch: int
    accumulation_steps: int
    devices: int
    batch: int
    notes: list[Note]


@planned(AccumulationRequest)
def plan_accumulation(asked: AccumulationRequest) -> AccumulationPlan:
    """Split a batch exactly into micro-batches on ``devices`` devices.

    If ``micro`` is missing, the micro-batch is the largest divisor of a device's share up to ``max_micro``. If no split
    exists, the `UsageError` names the nearest batches.

    Example: ``bssearch.plan_accumulation(batch=1024, max_micro=48, devices=2)``
    """
    share = _share(asked.batch, asked.micro or 1, asked.devices)
    size = asked.micro or split_batch(share, asked.max_micro)[0]
    return AccumulationPlan(
        micro_batch=size,
        accumulation_steps=share // size,
        devices=asked.devices,
        batch=asked.batch,
        notes=list(_notes(size, share // size, asked)),
    )


def _share(batch: int, micro: int, devices: int) -> int:
    unit = micro * devices
    if batch % unit == 0:
        return batch // devices
    below, above = batch // unit * unit, -(-batch // unit) * unit
    near = " or ".join(f"{size} ({plural(size // unit, 'accumulation step')})" for size in (below, above) if size)
    count, hint = plural(devices, "device"), None
    if batch % devices == 0:
        whole = split_batch(batch // devices, micro)[0]
        hint = f"use a micro-batch of {whole}, the largest up to {micro} that splits {batch} on {count} exactly"
    raise UsageError(
        f"batch = {batch} must be a multiple of {unit} for micro-batches of {micro} on {count}; use a batch of {near}",
        hint=hint,
    )


def _notes(micro: int, steps: int, asked: AccumulationRequest) -> Iterator[Note]:
    is_split = steps > 1 or asked.devices > 1
    if asked.batch_norm_layers is None and (is_split or micro < TINY_BATCH):
        yield Note(
            "batch_norm",
            f"batch normalisation over {micro} samples trains another model than over a larger batch; use GroupNorm or "
            "ghost batches",
        )
    for caveat in batch_norm_caveats(asked.batch_norm_layers or 0, micro, accumulates=is_split, ghost_batch_size=None):
        yield Note(*caveat)
    if micro < TINY_BATCH and steps > 1:
        yield Note(
            "tiny_micro_batch",
            f"micro-batches of {micro} seldom fill a device; measure the step time with `bssearch probe step-time`",
        )
    if is_split:
        yield Note(
            "token_weighted_loss",
            "if samples have different numbers of tokens, the mean of micro-batch means is not the batch's mean; "
            "divide the summed loss by the batch's number of tokens (huggingface/transformers#34191)",
        )
    if asked.devices > 1 and steps > 1:
        yield Note("no_sync", "use DDP's no_sync, so that devices exchange gradients only after the last micro-batch")
    yield from notes_on({"accumulation_not_stale": steps > MANY_STEPS, "accumulation_cost": steps > 1})


MOST_DEVICES = 4096  # most devices of a plan

LARGEST_MICRO = 65_536

SHOWN_ROWS = 16  # most rows in a table; longer plans show powers of two and the last row

# More devices pay if each does at least this share of a single device's work; at B_crit, half the samples are waste
PAYS = 0.5

SECONDS_PER_HOUR = 3600

_split = lru_cache(maxsize=MOST_DEVICES)(split_batch)


class ScaleRequest(Request):
    """The input of a scale plan. A micro-batch of m samples takes ``alpha_s`` + ``beta_s``·m seconds."""

    devices: Annotated[
        Annotated[int, Field(ge=1, le=MOST_DEVICES)],
        Option("Largest number of devices to plan for.", label="Devices to plan for"),
    ]
    batch: Annotated[
        Batch | None,
        Option("Samples of a step over all devices.", label="Wanted batch", unit="samples"),
    ] = None
    per_device_batch: Annotated[
        Batch | None,
        Option(
            "Instead of batch: samples per device, so that the batch grows with the devices.",
            label="Batch of each device",
            unit="samples",
        ),
    ] = None
    max_micro: Annotated[
        Annotated[int, Field(ge=1, le=LARGEST_MICRO)] | None,
        Option("Largest micro-batch of a device.", label="Largest micro-batch", unit="samples"),
    ] = None
    alpha_s: Annotated[
        NotNegative | None, Option("Constant part of the step time in seconds.", label="α, of any step", unit="s")
    ] = None
    beta_s: Annotated[
        Positive | None, Option("Part of the step time for each sample, in seconds.", label="β, of a sample", unit="s")
    ] = None
    step_times: Annotated[
        Annotated[Path, Field(strict=False)] | None,
        Option("Instead of alpha_s and beta_s: a CSV with batch_size and step_seconds."),
    ] = None
    parameters: Annotated[Parameters, Option("Number of model parameters, such as 25000000 or 25M.", metavar="N")] = (
        None
    )
    gradient_bytes: Annotated[
        Positive, Option("Bytes per gradient: 4 in fp32, 2 in bf16.", label="Bytes of a gradient", unit="B")
    ] = 4.0
    bandwidth_gb_s: Annotated[
        Positive | None,
        Option(
            "Network bandwidth per device for the all-reduce, in 10⁹ bytes per second.", label="Bandwidth", unit="GB/s"
        ),
    ] = None
    latency_us: Annotated[
        NotNegative, Option("Network latency per message, in microseconds.", label="Latency", unit="µs")
    ] = 0.0
    overlap: Annotated[
        Annotated[float, Field(ge=0, le=1)],
        Option("Share of communication that overlaps with computing, from 0 to 1."),
    ] = 0.0
    b_crit: Annotated[
        Positive | None, Option("Critical batch size in samples.", label="Critical batch size", unit="samples")
    ] = None
    b_crit_low: Annotated[
        Positive | None,
        Option("Lower end of the interval of b_crit.", label="Critical batch size, low end", unit="samples"),
    ] = None
    b_crit_high: Annotated[
        Positive | None,
        Option("Upper end of the interval of b_crit.", label="Critical batch size, high end", unit="samples"),
    ] = None
    samples_to_target: Annotated[
        Positive | None,
        Option("Samples to the target; if missing, times are relative.", unit="samples"),
    ] = None
    at_batch: Annotated[
        Batch | None,
        Option(
            "Batch size at which samples_to_target was measured.",
            label="Counted at batch",
            unit="samples",
            shown_default="the batch of one device",
        ),
    ] = None
    price_per_device_hour: Annotated[
        Positive | None,
        Option("Price per device-hour.", label="Price of a device", unit="an hour"),
    ] = None
    study: Annotated[
        str | None,
        Option("Stored study, for missing step times, B_crit, samples and, on several devices, bandwidth."),
    ] = None
    db: Database = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        low, high = self.b_crit_low, self.b_crit_high
        require(
            (self.batch is None) != (self.per_device_batch is None),
            f"batch = {self.batch} and per_device_batch = {self.per_device_batch}; give exactly one of these options",
        )
        require(
            self.step_times is None or (self.alpha_s is None and self.beta_s is None),
            f"step_times = {self.step_times} and alpha_s, beta_s contradict each other; give only one source",
        )
        require(
            (self.alpha_s is None) == (self.beta_s is None),
            f"alpha_s = {self.alpha_s} and beta_s = {self.beta_s}; give both options, because a micro-batch of m "
            "samples takes alpha_s + beta_s·m seconds",
        )
        require(
            self.b_crit or (low is None and high is None),
            f"b_crit_low = {low} and b_crit_high = {high} need b_crit; give b_crit, too",
        )
        require(
            not low or not self.b_crit or low <= self.b_crit, f"b_crit_low = {low} must be <= b_crit = {self.b_crit}"
        )
        require(
            not high or not self.b_crit or high >= self.b_crit,
            f"b_crit_high = {high} must be >= b_crit = {self.b_crit}",
        )
        require(
            self.samples_to_target or self.study or self.price_per_device_hour is None,
            f"price_per_device_hour = {self.price_per_device_hour} needs samples_to_target; give "
            "samples_to_target, too",
        )
        require(
            self.samples_to_target or self.at_batch is None,
            f"at_batch = {self.at_batch} needs samples_to_target; give samples_to_target, too",
        )
        require(
            self.devices == 1 or self.study or (self.bandwidth_gb_s and self.parameters),
            f"devices = {self.devices} needs the seconds to exchange gradients; give bandwidth_gb_s and parameters, or "
            "a study that ran on several devices",
        )
        return self

    def share(self, devices: int) -> int | None:
        return self.per_device_batch if self.batch is None or self.batch % devices else self.batch // devices

    def all_reduce_seconds(self, devices: int) -> float:
        """Return the seconds of a ring all-reduce; 0 if the bandwidth is unknown."""
        if devices == 1 or self.bandwidth_gb_s is None:
            return 0.0
        message = self.parameters * self.gradient_bytes / devices / (self.bandwidth_gb_s * 1e9)
        return 2 * (devices - 1) * (self.latency_us * 1e-6 + float(message))

    def bandwidth_of(self, devices: int, seconds: float) -> float:
        """Return the bandwidth (GB/s) at which a ring all-reduce without latency takes ``seconds``."""
        return 2 * (devices - 1) / devices * (self.parameters or 1) * self.gradient_bytes / (seconds * 1e9)

    def exposed_seconds(self, devices: int, compute_s: float) -> float:
        """Return the seconds of communication that do not overlap with computing."""
        communication = self.all_reduce_seconds(devices)
        return communication - min(self.overlap * communication, compute_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """The step time and the time to the target on a number of devices."""

    devices: int
    batch: int
    micro_batch: int
    accumulation_steps: int
    compute_s: float
    communication_s: float  # without communication during computing
    step_s: float
    samples_per_s: float
    throughput_efficiency: float  # from samples per second
    relative_samples: float
    speedup: float
    efficiency: float  # speedup per device
    time_to_target_s: float | None
    device_hours: float | None
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleInterval:
    """A number with an interval. None means unknown or unlimited."""

    estimate: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan(Plan):
    """The plan for 1 … ``devices`` devices."""

    devices: int
    b_crit: ScaleInterval
    rows: list[ScaleRow]
    passes_b_crit: ScaleInterval  # fewest devices with a batch above B_crit, with the interval
    pays_up_to: ScaleInterval  # most devices if each does at least half of a single device's work
    fastest: int
    notes: list[Note]

    def rows_for_people(self) -> list[ScaleRow]:
        """Return all rows; if many, only powers of two, the last row, and rows that the text names."""
        if len(self.rows) <= SHOWN_ROWS:
            return self.rows
        kept = {1, self.fastest, self.pays_up_to.estimate, self.passes_b_crit.estimate, self.rows[-1].devices}
        return [row for row in self.rows if row.devices in kept or row.devices.bit_count() == 1]


def plan_devices(asked: ScaleRequest) -> ScalePlan:
    """Plan for 1 … ``devices`` devices, or only for divisors of ``batch`` if given."""
    b_crit = ScaleInterval(estimate=asked.b_crit, low=asked.b_crit_low, high=asked.b_crit_high)
    rows = _device_rows(asked, asked.b_crit or 1.0)
    pays_up_to = _range(b_crit, lambda value: _pays(_device_rows(asked, value)))
    return ScalePlan(
        devices=asked.devices,
        b_crit=b_crit,
        rows=rows,
        passes_b_crit=_range(b_crit, lambda value: _passes(asked, value)),
        pays_up_to=pays_up_to,
        fastest=max(rows, key=lambda row: row.speedup).devices,
        notes=[
            *(Note("plan", remark) for remark in _remarks(asked, rows, pays_up_to)),
            *notes_on({"largest_not_best": True, "layerwise_not_needed": rows[-1].batch >= LARGE_BATCH}),
        ],
    )


def _device_rows(asked: ScaleRequest, b_crit: float) -> list[ScaleRow]:
    shares = [(count, share) for count in range(1, asked.devices + 1) if (share := asked.share(count)) is not None]
    single = _row(*shares[0], asked, b_crit, None)
    return [single, *(_row(*one, asked, b_crit, single) for one in shares[1:])]


def _row(devices: int, share: int, asked: ScaleRequest, b_crit: float, single: ScaleRow | None) -> ScaleRow:
    micro, steps = _split(share, asked.max_micro)
    compute = steps * ((asked.alpha_s or 0.0) + (asked.beta_s or 0.0) * micro)
    exposed = asked.exposed_seconds(devices, compute)
    step, batch = compute + exposed, share * devices
    samples = 1 + batch / b_crit
    throughput = batch / step
    faster = 1.0 if single is None else throughput / single.samples_per_s
    speedup = faster if single is None else faster * single.relative_samples / samples
    at = asked.at_batch or asked.batch or asked.per_device_batch or 1
    seconds = asked.samples_to_target and asked.samples_to_target * samples / (1 + at / b_crit) / throughput
    hours = seconds and devices * seconds / SECONDS_PER_HOUR
    return ScaleRow(
        devices=devices,
        batch=batch,
        micro_batch=micro,
        accumulation_steps=steps,
        compute_s=compute,
        communication_s=exposed,
        step_s=step,
        samples_per_s=throughput,
        throughput_efficiency=faster / devices,
        relative_samples=samples,
        speedup=speedup,
        efficiency=speedup / devices,
        time_to_target_s=seconds,
        device_hours=hours,
        cost=hours and asked.price_per_device_hour and hours * asked.price_per_device_hour,
    )


def _range(b_crit: ScaleInterval, devices_at: Callable[[float], int | None]) -> ScaleInterval:
    estimate, low, high = (
        None if end is None else devices_at(end) for end in (b_crit.estimate, b_crit.low, b_crit.high)
    )
    return ScaleInterval(estimate=estimate, low=low, high=high)


def _passes(asked: ScaleRequest, b_crit: float) -> int | None:
    if asked.per_device_batch is None:
        return 1 if (asked.batch or 0) > b_crit else None
    return math.floor(b_crit / asked.per_device_batch) + 1


def _pays(rows: Sequence[ScaleRow]) -> int:
    return [rows[0], *itertools.takewhile(lambda row: row.efficiency >= PAYS, rows[1:])][-1].devices


def _remarks(asked: ScaleRequest, rows: Sequence[ScaleRow], pays_up_to: ScaleInterval) -> Iterator[str]:
    batch, b_crit = asked.batch, asked.b_crit or 0.0
    if batch is not None and len(rows) < asked.devices:
        yield (
            f"of 1 to {asked.devices} devices, only {', '.join(str(row.devices) for row in rows)} divide batch {batch}"
        )
    if batch is not None and batch > b_crit:
        yield (
            f"batch {batch} is above B_crit = {b_crit:.4g} on any number of devices; use a smaller batch to waste "
            "fewer samples"
        )
    if len(rows) > 1 and pays_up_to.estimate == rows[-1].devices:
        yield (
            f"even on {rows[-1].devices} devices, each device does at least half of a single device's work; plan for "
            "more devices to find the limit"
        )
    if any(row.accumulation_steps > 1 for row in rows):
        yield "the plan counts α for each accumulated micro-batch; the real time may be shorter"
    if asked.samples_to_target is None:
        yield "times are relative to one device; for seconds, give samples_to_target"


BEYOND = 8  # batch sizes extend by this factor beyond B_crit, the optimum and the micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint:
    """A batch size on one device. Relative values are multiples of the least value of all points."""

    row: ScaleRow
    relative_time: float
    relative_samples: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """The time and the samples to the target by batch size."""

    points: Sequence[ScalePoint]
    fastest: ScalePoint  # the least time
    optimum: float  # batch size √(B_crit·α/β), without accumulation
    b_crit: float


def plan_trade_off(asked: ScaleRequest) -> TradeOff:
    alpha, beta, b_crit, micro = asked.alpha_s or 0.0, asked.beta_s or 1.0, asked.b_crit or 1.0, asked.max_micro or 0
    optimum = math.sqrt(b_crit * alpha / beta)
    marked = [one for one in (b_crit, optimum, micro) if one]
    low, high = _exponent(math.floor, min(marked) / BEYOND), _exponent(math.ceil, max(marked) * BEYOND)
    rows = [
        _device_rows(asked.model_copy(update={"devices": 1, "per_device_batch": None, "batch": 2**exponent}), b_crit)[0]
        for exponent in range(low, high + 1)
    ]
    seconds = [row.relative_samples / row.samples_per_s for row in rows]
    points = [
        ScalePoint(
            row=row,
            relative_time=one / min(seconds),
            relative_samples=row.relative_samples / rows[0].relative_samples,
        )
        for row, one in zip(rows, seconds, strict=True)
    ]
    return TradeOff(
        points=points,
        fastest=min(points, key=lambda point: point.relative_time),
        optimum=optimum,
        b_crit=b_crit,
    )


def _exponent(whole: Callable[[float], int], size: float) -> int:
    return max(0, min(LARGEST_BATCH.bit_length() - 1, whole(math.log2(max(1.0, size)))))
