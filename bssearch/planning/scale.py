"""How many devices are worth it: time, cost and efficiency of 1 … N of them, by data parallelism.

The seconds of a step are those of computing, k·(α + β·micro-batch) for k accumulation steps, and of a ring all-reduce
of the gradients: 2(n − 1) messages of 1/n of them each (Patarasu & Yuan 2009, "Bandwidth optimal all-reduce algorithms
for clusters of workstations"). The samples to the target are E(B) = E_min (1 + B / B_crit) (McCandlish et al. 2018,
arXiv 1812.06162).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from bssearch.errors import UsageError
from bssearch.planning.claims import Claim, claims_about_devices
from bssearch.planning.given import check_count, check_not_negative, check_positive, check_share
from bssearch.space import split_batch

MOST_DEVICES = 4096
"""The most devices that are planned: a choice."""

LARGEST_BATCH = 10**9
LARGEST_MICRO = 65_536
"""The largest batch and micro-batch that are planned: choices."""

SHOWN_ROWS = 16
"""Rows of a plan for people at most; of more only powers of two and the last: a choice."""

PAYS = 0.5
"""More devices pay while each does at least this share of what a single one would: at B_crit itself half of the samples
are spent on nothing. A choice."""

SECONDS_PER_HOUR = 3600

_split = lru_cache(maxsize=MOST_DEVICES)(split_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The critical batch size in samples with its interval; a side that is not bounded is None."""

    estimate: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no interval; raise `UsageError`."""
        check_positive("b_crit", self.estimate)
        for name, value in (("b_crit_low", self.low), ("b_crit_high", self.high)):
            if value is not None:
                check_positive(name, value)
        if self.low is not None and self.low > self.estimate:
            raise UsageError(f"b_crit_low = {self.low:g} must be <= b_crit = {self.estimate:g}")
        if self.high is not None and self.high < self.estimate:
            raise UsageError(f"b_crit_high = {self.high:g} must be >= b_crit = {self.estimate:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A device and its links.

    A step of m samples that accumulates nothing takes ``alpha_s`` + ``beta_s``·m seconds. ``bandwidth_gb_s`` are the
    10⁹ bytes a second that a device sends, ``latency_us`` the microseconds of one message, and ``overlap`` is the share
    of the communication that is hidden behind computing, no longer than that takes.
    """

    alpha_s: float
    beta_s: float
    gradient_bytes: float = 0.0
    bandwidth_gb_s: float | None = None
    latency_us: float = 0.0
    overlap: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no device has; raise `UsageError`."""
        check_not_negative("alpha_s", self.alpha_s)
        check_positive("beta_s", self.beta_s)
        check_not_negative("gradient_bytes", self.gradient_bytes)
        check_not_negative("latency_us", self.latency_us)
        check_share("overlap", self.overlap)
        if self.bandwidth_gb_s is not None:
            check_positive("bandwidth_gb_s", self.bandwidth_gb_s)

    def all_reduce_seconds(self, devices: int) -> float:
        """Return 2(n − 1)·(latency + bytes / (n·bandwidth)), the seconds of a ring all-reduce; 0 on one device."""
        if devices == 1 or self.bandwidth_gb_s is None:
            return 0.0
        message = self.gradient_bytes / devices / (self.bandwidth_gb_s * 1e9)
        return 2 * (devices - 1) * (self.latency_us * 1e-6 + message)

    def exposed_seconds(self, devices: int, compute_s: float) -> float:
        """Return the seconds of communication that are not hidden behind ``compute_s`` of computing."""
        communication = self.all_reduce_seconds(devices)
        return communication - min(self.overlap * communication, compute_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is trained: a ``batch`` over all devices or a ``per_device_batch``, in micro-batches of ``max_micro``.

    ``samples_to_target`` are those that a training at ``at_batch`` took; None where nobody knows, and times are then
    relative only. ``price_per_device_hour`` is in the user's currency.
    """

    batch: int | None = None
    per_device_batch: int | None = None
    max_micro: int | None = None
    samples_to_target: float | None = None
    at_batch: int | None = None
    price_per_device_hour: float | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that are none, and both kinds of batch, or neither; raise `UsageError`."""
        if (self.batch is None) == (self.per_device_batch is None):
            raise UsageError(
                f"batch = {self.batch} and per_device_batch = {self.per_device_batch}: give one of them, the batch "
                "over all devices or that of each"
            )
        for name in ("batch", "per_device_batch", "at_batch"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), most=LARGEST_BATCH)
        if self.max_micro is not None:
            check_count("max_micro", self.max_micro, most=LARGEST_MICRO)
        for name in ("samples_to_target", "price_per_device_hour"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.price_per_device_hour is not None and self.samples_to_target is None:
            raise UsageError(
                f"price_per_device_hour = {self.price_per_device_hour:g} needs samples_to_target: without them "
                "no time, and so no cost, is known"
            )
        if self.at_batch is not None and self.samples_to_target is None:
            raise UsageError(f"at_batch = {self.at_batch} says where samples_to_target were counted: they are missing")

    def share(self, devices: int) -> int | None:
        """Return the samples of each device; None where the batch cannot be split exactly."""
        if self.per_device_batch is not None:
            return self.per_device_batch
        assert self.batch is not None, "one of the two is given"
        return self.batch // devices if self.batch % devices == 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A number of devices: its step, and what it takes to the target.

    ``communication_s`` is the part that is not hidden. ``speedup`` is the time of one device over this one's,
    ``efficiency`` that over the devices; ``throughput_efficiency`` counts samples a second alone. Times,
    ``device_hours`` and ``cost`` are null where the samples to the target, or the price, are not known.
    """

    devices: int
    batch: int
    micro_batch: int
    accumulation_steps: int
    compute_s: float
    communication_s: float
    step_s: float
    samples_per_s: float
    throughput_efficiency: float
    relative_samples: float
    speedup: float
    efficiency: float
    time_to_target_s: float | None
    device_hours: float | None
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRange:
    """A number of devices with the interval that B_crit's gives it; null where there is none, or a side is open."""

    estimate: int | None
    low: int | None
    high: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan:
    """1 … ``devices`` devices.

    ``passes_b_crit`` is the fewest devices whose batch is above B_crit, ``pays_up_to`` the most of which each still
    does half of what a single one would (the last of ``rows`` where none falls below), both by the estimate of B_crit
    and by its ends. ``fastest`` has the least time.
    """

    devices: int
    b_crit: Interval
    rows: list[Row]
    passes_b_crit: DeviceRange
    pays_up_to: DeviceRange
    fastest: int
    remarks: list[str]
    claims: list[Claim]

    def rows_for_people(self) -> list[Row]:
        """Return the rows, or where they are many powers of two, the last, and those that the plan speaks of."""
        if len(self.rows) <= SHOWN_ROWS:
            return self.rows
        kept = {1, self.fastest, self.pays_up_to.estimate, self.passes_b_crit.estimate, self.rows[-1].devices}
        return [row for row in self.rows if row.devices in kept or row.devices.bit_count() == 1]

    def document(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        notes = [{"code": "plan", "message": one} for one in self.remarks]
        return {
            "devices": self.devices,
            "b_crit": asdict(self.b_crit),
            "rows": [asdict(one) for one in self.rows],
            "passes_b_crit": asdict(self.passes_b_crit),
            "pays_up_to": asdict(self.pays_up_to),
            "fastest": self.fastest,
            "notes": [*notes, *({"code": one.code, "message": one.message} for one in self.claims)],
        }


def plan_devices(devices: int, hardware: Hardware, load: Load, b_crit: Interval) -> ScalePlan:
    """Return the plan of 1 … ``devices`` devices; of a fixed batch those that divide it exactly.

    Raises `UsageError` for more than `MOST_DEVICES`, and where several devices are asked for and their bandwidth or the
    bytes of their gradients are not given.
    """
    check_count("devices", devices, most=MOST_DEVICES)
    if devices > 1 and (hardware.bandwidth_gb_s is None or not hardware.gradient_bytes):
        raise UsageError(
            f"devices = {devices} exchange gradients: bandwidth_gb_s, and gradient_bytes or parameters, must be given"
        )
    rows = _rows(devices, hardware, load, b_crit.estimate)
    return ScalePlan(
        devices=devices,
        b_crit=b_crit,
        rows=rows,
        passes_b_crit=_range(b_crit, lambda value: _passes(load, value)),
        pays_up_to=_range(b_crit, lambda value: _pays(_rows(devices, hardware, load, value))),
        fastest=max(rows, key=lambda row: row.speedup).devices,
        remarks=list(_remarks(devices, rows, load, b_crit)),
        claims=list(claims_about_devices(rows[-1].batch)),
    )


def _rows(devices: int, hardware: Hardware, load: Load, b_crit: float) -> list[Row]:
    shares = ((count, load.share(count)) for count in range(1, devices + 1))
    found: list[Row] = []
    for count, share in shares:
        if share is not None:
            found.append(_row(count, share, hardware, load, b_crit, found[0] if found else None))
    return found


def _row(devices: int, share: int, hardware: Hardware, load: Load, b_crit: float, single: Row | None) -> Row:
    micro, steps = _split(share, load.max_micro)
    compute = steps * (hardware.alpha_s + hardware.beta_s * micro)
    exposed = hardware.exposed_seconds(devices, compute)
    step, batch = compute + exposed, share * devices
    samples = 1 + batch / b_crit
    throughput = batch / step
    speedup = 1.0 if single is None else throughput / single.samples_per_s * _samples(single.batch, b_crit) / samples
    gained = 1.0 if single is None else throughput / single.samples_per_s / devices
    seconds = None if load.samples_to_target is None else _total(load, batch, b_crit) / throughput
    hours = None if seconds is None else devices * seconds / SECONDS_PER_HOUR
    price = load.price_per_device_hour
    return Row(
        devices=devices,
        batch=batch,
        micro_batch=micro,
        accumulation_steps=steps,
        compute_s=compute,
        communication_s=exposed,
        step_s=step,
        samples_per_s=throughput,
        throughput_efficiency=gained,
        relative_samples=samples,
        speedup=speedup,
        efficiency=speedup / devices,
        time_to_target_s=seconds,
        device_hours=hours,
        cost=None if hours is None or price is None else hours * price,
    )


def _samples(batch: int, b_crit: float) -> float:
    """Return E(B) / E_min."""
    return 1 + batch / b_crit


def _total(load: Load, batch: int, b_crit: float) -> float:
    """Return the samples to the target at a batch size, from those at the size where they were counted."""
    assert load.samples_to_target is not None, "the caller has looked"
    at = load.at_batch or load.batch or load.per_device_batch or 1
    return load.samples_to_target * _samples(batch, b_crit) / _samples(at, b_crit)


def _range(b_crit: Interval, devices_at: Any) -> DeviceRange:
    low, high = (None if end is None else devices_at(end) for end in (b_crit.low, b_crit.high))
    return DeviceRange(estimate=devices_at(b_crit.estimate), low=low, high=high)


def _passes(load: Load, b_crit: float) -> int | None:
    """Return the fewest devices whose batch is larger than B_crit; None where no number of them makes it so."""
    if load.per_device_batch is not None:
        return math.floor(b_crit / load.per_device_batch) + 1
    return 1 if load.batch is not None and load.batch > b_crit else None


def _pays(rows: Sequence[Row]) -> int:
    """Return the devices of the last row before the first that is less efficient than `PAYS`."""
    paying = rows[0].devices
    for row in rows:
        if row.efficiency < PAYS:
            break
        paying = row.devices
    return paying


def _remarks(devices: int, rows: Sequence[Row], load: Load, b_crit: Interval) -> Iterator[str]:
    if load.batch is not None and len(rows) < devices:
        yield (
            f"batch {load.batch} is split exactly on {', '.join(str(row.devices) for row in rows)} of 1 to {devices} "
            "devices; others would train another batch"
        )
    if load.batch is not None and load.batch > b_crit.estimate:
        yield (
            f"batch {load.batch} is above B_crit = {b_crit.estimate:.4g} on any number of devices: a smaller one "
            "wastes fewer samples"
        )
    if len(rows) > 1 and _pays(rows) == rows[-1].devices:
        yield f"all of these pay: where more stop to pay lies beyond {rows[-1].devices} devices"
    if any(row.accumulation_steps > 1 for row in rows):
        yield "accumulated micro-batches are counted with a whole step's α each: with less of it they are faster"
    if load.samples_to_target is None:
        yield "without samples_to_target times are relative to one device's"
