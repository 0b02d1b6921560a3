"""The space of batches that grow during a trial: where they begin, where they end, and when."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from bssearch.records.batch_schedule import MOST_STAGES, BatchScheduleName
from bssearch.records.scaling import LearningRateRule
from bssearch.spec.space.domains import Domain, Range, StrictModel, bounds, check_bounds, domain_kind
from bssearch.spec.space.parts import BatchSize

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
