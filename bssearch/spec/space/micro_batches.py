"""The split of a batch into micro-batches that fit into memory.

The boundary is monotone: where a micro-batch ran out of memory, so does every larger one. A batch that does not fit at
once accumulates smaller micro-batches, so that only a model of which not even one sample fits cannot run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from bssearch.records import ProbeRecord
from bssearch.records.batch_schedule import MOST_STAGES, BatchScheduleName
from bssearch.records.scaling import (
    LearningRateRule,
    half_life,
    sde_beta,
    sde_epsilon,
    sqrt_weight_decay,
    timescale_weight_decay,
)
from bssearch.spec.space.domains import Domain, Range, StrictModel, bounds, check_bounds, domain_kind
from bssearch.spec.space.parts import BatchSize


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBoundary:
    """The bounds of the micro-batch size: the largest that ``fits`` and the smallest that is ``too_large``.

    Either is None where no size is known to be so; nothing is known of the sizes between them.
    """

    fits: int | None = None
    too_large: int | None = None

    @classmethod
    def of(cls, fitting: Iterable[int], too_large: Iterable[int]) -> Self:
        """Return the boundary that micro-batch sizes which ran, and which ran out of memory, give.

        A size that ran, but no smaller than one that ran out of memory, does not count as fitting.
        """
        bound = min(too_large, default=None)
        return cls(fits=max((size for size in fitting if bound is None or size < bound), default=None), too_large=bound)

    def may_fit(self, micro_batch_size: int) -> bool:
        """Return whether a size is smaller than all that ran out of memory."""
        return self.too_large is None or micro_batch_size < self.too_large

    def without(self, micro_batch_size: int) -> MemoryBoundary:
        """Return the boundary after a size ran out of memory."""
        fitting = [] if self.fits is None else [self.fits]
        too_large = [] if self.too_large is None else [self.too_large]
        return MemoryBoundary.of(fitting, [*too_large, micro_batch_size])

    @property
    def nothing_fits(self) -> bool:
        """Whether not even a micro-batch of one sample fits."""
        return self.too_large is not None and self.too_large <= 1


UNKNOWN = MemoryBoundary()
"""The boundary where nothing was ever run."""


def split_batch(batch_size: int, max_micro_batch_size: int | None) -> tuple[int, int]:
    """Return (micro-batch, accumulation steps): the largest divisor of the batch size that may run at once."""
    if max_micro_batch_size is None or batch_size <= max_micro_batch_size:
        return batch_size, 1
    micro = _largest_divisor(batch_size, max_micro_batch_size)
    return micro, batch_size // micro


def _largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number up to ``most``, which is below it, in about √number divisions."""
    root = isqrt(number)
    for count in range(-(-number // most), root + 1):
        if number % count == 0:
            return number // count
    return next(size for size in range(min(most, root), 0, -1) if number % size == 0)


def choose_micro_batch(batch_size: int, max_micro_batch_size: int | None, memory: MemoryBoundary) -> int | None:
    """Return the micro-batch size to run a batch size with, None where nothing fits.

    It is the largest divisor below the boundary and within the given maximum. Where the boundary is known, and that
    divisor is not known to fit, the largest that is known to fit is taken instead, unless it is less than half of it.
    """
    if memory.nothing_fits:
        return None
    limits = [max_micro_batch_size] if max_micro_batch_size is not None else []
    if memory.too_large is not None:
        limits.append(memory.too_large - 1)
    micro, _ = split_batch(batch_size, min(limits, default=None))
    if memory.too_large is None or memory.fits is None or micro <= memory.fits:
        return micro
    known, _ = split_batch(batch_size, memory.fits)
    return known if 2 * known >= micro else micro


def in_force(timed: Iterable[ProbeRecord], memory: MemoryBoundary) -> dict[int, ProbeRecord]:
    """Return by batch size the step time of the split that its trials run with, of all that were timed.

    It is the one with the largest micro-batch below the boundary; of several with it the first that had the device to
    itself, else the first; always with the first one's cadence, which trials keep. Batch sizes of which no such split
    was timed are left out.
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


# How betas, the average of the weights and weight decay follow the batch size, where a space says so.


class BatchRules(StrictModel):
    """Rules that carry what a space gives at ``learning_rate.reference_batch`` over to another batch size.

    κ is the batch size over the reference batch, η/η0 the factor of the learning rate's own rule.

    - ``betas``: ``half_life`` makes β₂ into β₂^κ, whose half-life in samples stays (Marek et al. 2025, arXiv
      2507.07101); ``sde`` makes both β into 1 − κ(1 − β), at least 0, and ε into ε/√κ, which with the learning rate ∝
      √κ keeps Adam's stochastic differential equation (Malladi et al. 2022, arXiv 2205.10287).
    - ``ema_decay``: ``half_life`` makes ρ into ρ^κ (Busbridge et al. 2023, arXiv 2307.13813).
    - ``weight_decay``: ``sqrt`` makes λ into λ√κ; ``timescale`` into λκ·η0/η, which keeps AdamW's averaging time (Wang
      & Aitchison 2024, arXiv 2405.13698).
    """

    betas: Literal["none", "half_life", "sde"] = "none"
    ema_decay: Literal["none", "half_life"] = "none"
    weight_decay: Literal["none", "sqrt", "timescale"] = "none"

    @property
    def followed(self) -> dict[str, str]:
        """Return the rules in force, by the names of their fields."""
        return {name: rule for name, rule in self if rule != "none"}

    def carried(self, values: Mapping[str, Any], ratio: float, rate_factor: float) -> dict[str, Any]:
        """Return values by their bare names with those that a rule is about made what they are at κ = ``ratio``.

        ``rate_factor`` is η/η0. The way back is that with 1/κ and η0/η.
        """
        rules = self._rules(ratio, rate_factor)
        return {
            name: rules[name](value) if name in rules and value is not None else value for name, value in values.items()
        }

    def check(self, parameters: Collection[str]) -> None:
        """Raise `ValueError` for a rule about what no trial of the space has; ``parameters`` are what some have."""
        for field, about in (("betas", "beta2"), ("ema_decay", "ema_decay"), ("weight_decay", "weight_decay")):
            if field in self.followed and about not in parameters:
                raise ValueError(f"batch_rules.{field} = {self.followed[field]}: the space has no {about}")

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


# How batch normalisation distorts a comparison of batch sizes.

TINY_BATCH = 16
"""Below this many samples batch normalisation's statistics are poor (Wu & He 2018, arXiv 1803.08494, figure 1)."""

REMEDY = "GroupNorm, or a fixed training.ghost_batch_size, compares batch sizes fairly"


def batch_norm_caveats(
    layers: int, micro_batch_size: int, *, accumulates: bool, ghost_batch_size: int | None
) -> Iterator[tuple[str, str]]:
    """Yield how batch normalisation distorts a comparison at a micro-batch size, as (code, sentence).

    With ghost batches the statistics are over ``ghost_batch_size`` samples, or over the micro-batch where that is
    smaller.
    """
    if not layers:
        return
    samples = micro_batch_size if ghost_batch_size is None else min(micro_batch_size, ghost_batch_size)
    if samples < TINY_BATCH:
        yield (
            "batch_norm_small_batch",
            f"the model has {layers} batch normalisation layers, whose statistics are poor over {samples} samples: "
            + REMEDY,
        )
    if ghost_batch_size is None and accumulates:
        yield (
            "batch_norm_accumulation",
            "batch normalisation sees micro-batches, not batches: accumulated batch sizes train another model; "
            + REMEDY,
        )
    if ghost_batch_size is not None and micro_batch_size < ghost_batch_size:
        yield (
            "ghost_batch_not_filled",
            f"a micro-batch of {micro_batch_size} does not fill a ghost batch of {ghost_batch_size}: its statistics "
            "are over fewer samples than at larger batch sizes",
        )


# The space of batches that grow during a trial: where they begin, where they end, and when.

SHARES = (0.0, 100.0, "must be in [0, 100]")
NOISE_SHARES = (math.nextafter(0.0, 1.0), math.inf, "must be > 0")
RETUNED = Range(low=0.5, high=2.0, log=True)
"""What the learning rate of the first batch size is multiplied by, beside the best that is known there: a choice."""

Milestones = Annotated[
    dict[Annotated[int, Field(ge=1, lt=10**15)], BatchSize], Field(min_length=1, max_length=MOST_STAGES - 1)
]
BatchSizes = BatchSize | Annotated[tuple[BatchSize, ...], Field(min_length=1)]


class BatchGrowth(StrictModel):
    """How batches may grow, along the sizes of ``space.batch_size``, in trials that follow the search.

    ``geometric`` and ``linear`` rise from ``start`` to ``end``, sizes of the space (default: any), between ``begin``
    and ``until``: shares of the samples that the tuned batch size that stays takes to the target. ``milestones`` gives
    the size from so many samples on, ``noise_scale`` the largest size within ``noise_share`` × the gradient noise scale
    as the trial measures it. The learning rate follows ``rate_rule`` from one size to the next (default: the space's
    rule), and is tuned anew for the first.
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
            raise ValueError(f"name lists {max(self.names, key=self.names.count)!r} twice")
        if ("milestones" in self.names) != (self.milestones is not None):
            have = "is given" if self.milestones is not None else "is missing"
            raise ValueError(f"milestones {have}; name is {', '.join(self.names)}")
        if bounds(self.begin)[0] >= bounds(self.until)[1]:
            raise ValueError(f"begin >= {bounds(self.begin)[0]:g} must be < until <= {bounds(self.until)[1]:g}")
        changes = sorted((self.milestones or {}).items())
        for (samples, size), (after, _) in itertools.pairwise(changes):
            if after < samples + size:
                raise ValueError(f"milestones: {after} must be >= {samples + size}, one step of {size} after {samples}")
        sizes = [size for _, size in changes]
        if any(after <= before for before, after in itertools.pairwise(sizes)):
            raise ValueError(f"milestones = {sizes}: a batch must grow, it may not shrink")
        return self

    @property
    def names(self) -> tuple[BatchScheduleName, ...]:
        """Return the kinds of schedule to choose from."""
        return self.name if isinstance(self.name, tuple) else (self.name,)

    def check(self, rungs: Sequence[int]) -> None:
        """Raise `ValueError` where sizes are named that the space has not, or nothing can grow."""
        for name, size in self._named():
            if size not in rungs:
                raise ValueError(f"batch_schedule.{name}: {size} is not one of {', '.join(map(str, rungs))}")
        if not self.pairs(rungs) and set(self.names) != {"milestones"}:
            raise ValueError(
                f"batch_schedule: no start of {list(self.starts(rungs))} is below an end of {list(self.ends(rungs))}"
            )
        if self.milestones and min(self.milestones.values()) <= min(self.starts(rungs)):
            first = min(self.milestones.values())
            raise ValueError(f"batch_schedule.milestones: {first} must be > {min(self.starts(rungs))}, where it starts")
        if self.milestones:
            start = max(size for size in self.starts(rungs) if size < min(self.milestones.values()))
            if min(self.milestones) < start:
                raise ValueError(
                    f"batch_schedule.milestones: {min(self.milestones)} must be >= {start}, its first step"
                )

    def starts(self, rungs: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes with which a trial may begin, ascending."""
        return _listed(self.start, rungs)

    def ends(self, rungs: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes to which it may grow, ascending."""
        return _listed(self.end, rungs)

    def pairs(self, rungs: Sequence[int]) -> list[tuple[int, int]]:
        """Return each start with each end above it."""
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
