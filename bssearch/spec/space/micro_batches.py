"""Micro-batches that fit into memory, rules that carry values between batch sizes, and growing batches.

If a micro-batch runs out of memory, all larger micro-batches count as too large.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from bssearch.records import (
    LearningRateRule,
    ProbeRecord,
    half_life,
    sde_beta,
    sde_epsilon,
    sqrt_weight_decay,
    timescale_weight_decay,
)
from bssearch.records.batch_schedule import MOST_STAGES, SEESAW, BatchScheduleName
from bssearch.records.text import plural
from bssearch.spec.space.domains import (
    FOLLOWED,
    BatchSize,
    Domain,
    Range,
    StrictModel,
    bounds,
    check_bounds,
    domain_kind,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBoundary:
    """The largest micro-batch size that ``fits``, and the smallest size that is ``too_large``; None if unknown."""

    fits: int | None = None
    too_large: int | None = None

    @classmethod
    def of(cls, fitting: Iterable[int], too_large: Iterable[int]) -> Self:
        """Return the boundary of tested sizes; ``fitting`` sizes above the smallest ``too_large`` size do not count."""
        bound = min(too_large, default=None)
        return cls(fits=max((size for size in fitting if bound is None or size < bound), default=None), too_large=bound)

    def may_fit(self, micro_batch_size: int) -> bool:
        return self.too_large is None or micro_batch_size < self.too_large

    def without(self, micro_batch_size: int) -> MemoryBoundary:
        too_large = micro_batch_size if self.too_large is None else min(self.too_large, micro_batch_size)
        return MemoryBoundary.of([] if self.fits is None else [self.fits], [too_large])

    @property
    def nothing_fits(self) -> bool:
        return self.too_large is not None and self.too_large <= 1


UNKNOWN = MemoryBoundary()


def split_batch(batch_size: int, max_micro_batch_size: int | None) -> tuple[int, int]:
    """The micro-batch size, which is the largest allowed divisor, and the accumulation steps."""
    if max_micro_batch_size is None or batch_size <= max_micro_batch_size:
        return batch_size, 1
    micro = _largest_divisor(batch_size, max_micro_batch_size)
    return micro, batch_size // micro


def _largest_divisor(number: int, most: int) -> int:
    root = isqrt(number)
    for count in range(-(-number // most), root + 1):
        if number % count == 0:
            return number // count
    return next(size for size in range(min(most, root), 0, -1) if number % size == 0)


def choose_micro_batch(batch_size: int, max_micro_batch_size: int | None, memory: MemoryBoundary) -> int | None:
    """The micro-batch size for a batch size; None if no size fits.

    The size is the largest allowed divisor. After a failure, the size is the largest divisor known to fit, unless the
    allowed divisor is over twice as large.
    """
    if memory.nothing_fits:
        return None
    limits = (max_micro_batch_size, None if memory.too_large is None else memory.too_large - 1)
    micro, _ = split_batch(batch_size, min((limit for limit in limits if limit is not None), default=None))
    if memory.too_large is None or memory.fits is None or micro <= memory.fits:
        return micro
    known, _ = split_batch(batch_size, memory.fits)
    return known if 2 * known >= micro else micro


def in_force(timed: Iterable[ProbeRecord], memory: MemoryBoundary) -> dict[int, ProbeRecord]:
    """The measured step times in the micro-batches that trials use, by batch size.

    Of the largest micro-batch that may fit, the first uncontended measurement counts, or else the first measurement.
    The first measurement sets the steps between evaluations.
    """
    found: dict[int, ProbeRecord] = {}
    for probe in timed:
        if probe.out_of_memory or not memory.may_fit(probe.micro_batch_size):
            continue
        known = found.get(probe.batch_size)
        if known is None or probe.micro_batch_size > known.micro_batch_size:
            found[probe.batch_size] = probe
        elif probe.micro_batch_size == known.micro_batch_size and known.contended and not probe.contended:
            found[probe.batch_size] = replace(probe, eval_every_steps=known.eval_every_steps)
    return found


class BatchRules(StrictModel):
    """Rules that carry values from ``learning_rate.reference_batch`` to another batch size.

    κ is the batch ratio, and η/η0 is the learning rate's factor.

    - ``betas``: ``half_life`` makes β₂ into β₂^κ, which keeps the half-life in samples (Marek et al. 2025, arXiv
      2507.07101). ``sde`` makes both β into max(0, 1 − κ(1 − β)) and ε into ε/√κ. With learning rate ∝ √κ, ``sde``
      keeps Adam's SDE (Malladi et al. 2022, arXiv 2205.10287).
    - ``ema_decay``: ``half_life`` makes ρ into ρ^κ (Busbridge et al. 2023, arXiv 2307.13813).
    - ``weight_decay``: ``sqrt`` makes λ into λ√κ (folklore). ``timescale`` makes λ into λκ·η0/η, which keeps AdamW's
      averaging time (Wang & Aitchison 2024, arXiv 2405.13698).
    """

    betas: Literal["none", "half_life", "sde"] = "none"
    ema_decay: Literal["none", "half_life"] = "none"
    weight_decay: Literal["none", "sqrt", "timescale"] = "none"

    @property
    def followed(self) -> dict[str, str]:
        return {name: rule for name, rule in self if rule != "none"}

    def carried(self, values: Mapping[str, Any], ratio: float, rate_factor: float) -> dict[str, Any]:
        """Apply the rules to values at κ = ``ratio`` and η/η0 = ``rate_factor``. 1/κ and η0/η invert the rules."""
        rules = self._rules(ratio, rate_factor)
        return {
            name: rules[name](value) if name in rules and value is not None else value for name, value in values.items()
        }

    def check(self, parameters: Collection[str]) -> None:
        """Raise `ValueError` for a rule if ``parameters`` lacks the rule's parameter."""
        for field, about in (("betas", "beta2"), ("ema_decay", "ema_decay"), ("weight_decay", "weight_decay")):
            if field in self.followed and about not in parameters:
                raise ValueError(
                    f"batch_rules.{field} = {self.followed[field]}: the space has no {about} > 0; remove the rule or "
                    f"add {about} > 0"
                )

    def _rules(self, ratio: float, rate_factor: float) -> dict[str, Callable[[float], float]]:
        found: dict[str, Callable[[float], float]] = {}
        if self.betas == "half_life":
            found["beta2"] = lambda beta: half_life(beta, ratio)
        if self.betas == "sde":
            found["beta1"] = found["beta2"] = lambda beta: sde_beta(beta, ratio)
            found["epsilon"] = lambda epsilon: sde_epsilon(epsilon, ratio)
        if self.ema_decay == "half_life":
            found["ema_decay"] = lambda decay: half_life(decay, ratio)
        if self.weight_decay == "sqrt":
            found["weight_decay"] = lambda decay: sqrt_weight_decay(decay, ratio)
        if self.weight_decay == "timescale":
            found["weight_decay"] = lambda decay: timescale_weight_decay(decay, ratio, 1 / rate_factor)
        return found


# Below this many samples batch-normalisation statistics are poor (Wu & He 2018, arXiv 1803.08494, figure 1).
TINY_BATCH = 16

GROUP_NORM = "use GroupNorm to compare batch sizes fairly"
REMEDY = "use GroupNorm or a fixed training.ghost_batch_size to compare batch sizes fairly"


def batch_norm_caveats(
    layers: int, micro_batch_size: int, *, accumulates: bool, ghost_batch_size: int | None, remedy: str = REMEDY
) -> Iterator[tuple[str, str]]:
    """Yield how batch normalisation distorts a comparison, as (code, sentence) pairs."""
    if not layers:
        return
    samples = micro_batch_size if ghost_batch_size is None else min(micro_batch_size, ghost_batch_size)
    if samples < TINY_BATCH:
        yield (
            "batch_norm_small_batch",
            f"the statistics of {plural(layers, 'batch normalisation layer')} are poor over "
            f"{plural(samples, 'sample')}; {remedy}",
        )
    if ghost_batch_size is None and accumulates:
        yield (
            "batch_norm_accumulation",
            f"batch normalisation sees micro-batches, so splitting a batch by accumulation or over devices trains a "
            f"different model; {remedy}",
        )
    if ghost_batch_size is not None and micro_batch_size < ghost_batch_size:
        yield (
            "ghost_batch_not_filled",
            f"a micro-batch of {micro_batch_size} does not fill a ghost batch of {ghost_batch_size}, so the "
            "statistics cover fewer samples than at larger batch sizes; lower training.ghost_batch_size",
        )


SHARES = (0.0, 100.0, "must be in [0, 100]")
NOISE_SHARES = (math.nextafter(0.0, 1.0), math.inf, "must be > 0")
# Range of the factor on the first batch size's best known learning rate.
RETUNED = Range(low=0.5, high=2.0, log=True)

Milestones = Annotated[
    dict[Annotated[int, Field(ge=1, lt=10**15)], BatchSize], Field(min_length=1, max_length=MOST_STAGES - 1)
]
BatchSizes = BatchSize | Annotated[tuple[BatchSize, ...], Field(min_length=1)]


class BatchGrowth(StrictModel):
    """How batch sizes may grow along ``space.batch_size``, in trials after the search.

    ``geometric`` and ``linear`` rise from ``start`` to ``end`` between ``begin`` and ``until``. ``begin`` and ``until``
    are shares of the samples that the tuned fixed batch size needs. ``milestones`` sets sizes at sample counts.
    ``noise_scale`` takes the largest size ≤ ``noise_share`` × the measured gradient noise scale. ``seesaw`` (Meterez et
    al. 2025, arXiv 2510.14717) follows the space's ``schedule``. When the schedule has divided the rate by k,
    ``seesaw`` multiplies the size by k and the rate by √k. For other schedules, the rate follows ``rate_rule``
    (default: the space's rule). If ``learning_rate`` is a range, trials retune the rate of the first size.
    """

    name: (
        Annotated[BatchScheduleName, Tag("fixed")]
        | Annotated[tuple[BatchScheduleName, ...], Field(min_length=1), Tag("choices")]
    ) = Field(default="geometric", discriminator=Discriminator(domain_kind))
    start: BatchSizes | None = None
    end: BatchSizes | None = None
    begin: Domain = 0.0
    until: Domain = Range(low=0.1, high=1.0)
    milestones: Milestones | None = None
    noise_share: Domain = Range(low=0.25, high=4.0)
    rate_rule: LearningRateRule | None = None

    @field_validator("begin", "until", "noise_share")
    @classmethod
    def _within_limits(cls, domain: Domain, info: Any) -> Domain:
        check_bounds(domain, NOISE_SHARES if info.field_name == "noise_share" else SHARES)
        return domain

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"name lists {max(self.names, key=self.names.count)!r} twice; list each name once")
        if ("milestones" in self.names) != (self.milestones is not None):
            have, remedy = ("is given", "remove") if self.milestones is not None else ("is missing", "add")
            raise ValueError(f"milestones {have}, but name is {', '.join(self.names)}; {remedy} milestones")
        if bounds(self.begin)[0] >= bounds(self.until)[1]:
            raise ValueError(
                f"least begin {bounds(self.begin)[0]:g} must be < greatest until {bounds(self.until)[1]:g}"
            )
        changes = sorted((self.milestones or {}).items())
        for (samples, size), (after, _) in itertools.pairwise(changes):
            if after < samples + size:
                raise ValueError(
                    f"milestones: {after} must be >= {samples + size}, one step of {size} samples after {samples}"
                )
        sizes = [size for _, size in changes]
        if any(after <= before for before, after in itertools.pairwise(sizes)):
            raise ValueError(f"milestones = {sizes}: a batch may only grow; list rising sizes")
        return self

    @property
    def names(self) -> tuple[BatchScheduleName, ...]:
        return self.name if isinstance(self.name, tuple) else (self.name,)

    def check(self, rungs: Sequence[int], schedules: Sequence[str]) -> None:
        """Raise `ValueError` if a size or milestone is wrong, no batch can grow, or seesaw finds no decay."""
        if SEESAW in self.names and not set(schedules) & set(FOLLOWED):
            raise ValueError(
                f"batch_schedule.name = seesaw follows a decay; set space.schedule to one of {', '.join(FOLLOWED)}, "
                f"not {', '.join(schedules)}"
            )
        for name, size in self._named():
            if size not in rungs:
                raise ValueError(f"batch_schedule.{name}: {size} is not one of {', '.join(map(str, rungs))}")
        if not self.pairs(rungs) and set(self.names) != {"milestones"}:
            raise ValueError(
                f"batch_schedule: no start of {list(self.starts(rungs))} is below an end of {list(self.ends(rungs))}; "
                "lower a start or raise an end"
            )
        if self.milestones and min(self.milestones.values()) <= min(self.starts(rungs)):
            raise ValueError(
                f"batch_schedule.milestones: {min(self.milestones.values())} must be > {min(self.starts(rungs))}, "
                "the start"
            )
        if self.milestones:
            start = max(size for size in self.starts(rungs) if size < min(self.milestones.values()))
            if min(self.milestones) < start:
                raise ValueError(
                    f"batch_schedule.milestones: {min(self.milestones)} must be >= {start}, the first step's samples"
                )

    def starts(self, rungs: Sequence[int]) -> tuple[int, ...]:
        return _listed(self.start, rungs)

    def ends(self, rungs: Sequence[int]) -> tuple[int, ...]:
        return _listed(self.end, rungs)

    def pairs(self, rungs: Sequence[int]) -> list[tuple[int, int]]:
        return [(start, end) for start in self.starts(rungs) for end in self.ends(rungs) if start < end]

    def _named(self) -> Iterator[tuple[str, int]]:
        for name in ("start", "end"):
            given = getattr(self, name)
            yield from ((name, size) for size in ((given,) if isinstance(given, int) else given or ()))
        yield from (("milestones", size) for size in (self.milestones or {}).values())


def _listed(given: int | tuple[int, ...] | None, rungs: Sequence[int]) -> tuple[int, ...]:
    if given is None:
        return tuple(rungs)
    return (given,) if isinstance(given, int) else tuple(sorted(set(given)))
