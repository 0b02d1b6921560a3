"""The steps by which an Optuna study reports: optimizer steps or epochs, from 0 or from 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


FEW = 10
"""Report gaps up to this are rarely optimizer steps: an evaluation would take longer than the training between two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSteps:
    """The report steps of a study: the ``first`` of any trial, and the smallest and largest gap between two reports.

    The gaps are None if no trial has two reports.
    """

    first: int = 1
    smallest_gap: int | None = None
    largest_gap: int | None = None

    @classmethod
    def of(cls, trials: Iterable[FrozenTrial]) -> Self:
        """Return the report steps of some trials."""
        steps = [sorted(trial.intermediate_values) for trial in trials if trial.intermediate_values]
        gaps = [later - earlier for one in steps for earlier, later in pairwise(one)]
        return cls(
            first=min((one[0] for one in steps), default=1),
            smallest_gap=min(gaps, default=None),
            largest_gap=max(gaps, default=None),
        )

    @property
    def may_be_epochs(self) -> bool:
        """Whether the trials report as often as every few epochs would."""
        return self.largest_gap is not None and self.largest_gap <= FEW and self.first <= FEW

    @property
    def are_epochs(self) -> bool:
        """Whether the trials report at 0, 1, 2, … or at 1, 2, 3, …; a report may be missing."""
        return self.may_be_epochs and self.smallest_gap == 1 and self.first <= 1

    @property
    def epochs_before_first(self) -> int:
        """Epochs that a report's number lacks: 1 if they are counted from 0, so that 0 is the end of the first epoch.

        A study that reports every five epochs counts from 0 if its reports are 4, 9, 14, … Reports at 0, 100, 200, …
        are more likely steps, with an evaluation before the first.
        """
        gap = self.smallest_gap or 1
        return int((self.first == 0 and gap <= FEW) or (gap > 1 and self.first == gap - 1))
