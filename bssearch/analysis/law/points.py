"""The samples that the runs of a batch size took: what the law of steps is fitted to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bssearch.records import TrialRecord


@dataclass(frozen=True, slots=True)
class LawPoint:
    """The runs of the tuned configuration at one batch size.

    ``samples`` are those to the target of the runs that reached it, ``missed_at`` those at which the others were last
    seen to miss it: they need more. ``untuned``: known not to be retuned, for its steps rise or its learning rate lies
    at an edge.
    """

    batch_size: int
    samples: tuple[float, ...]
    missed_at: tuple[float, ...] = ()
    untuned: bool = False


def law_point(batch_size: int, runs: Iterable[TrialRecord]) -> LawPoint:
    """Return the samples to the target of runs at a batch size; one that was stopped needs more than it had seen."""
    outcomes = [run.outcome for run in runs if run.outcome is not None]
    reached = [one.steps_to_target * batch_size for one in outcomes if one.steps_to_target]
    missed = [one.last_miss_step * batch_size for one in outcomes if one.state.is_censored and one.last_miss_step]
    return LawPoint(batch_size, tuple(map(float, reached)), tuple(map(float, missed)))
