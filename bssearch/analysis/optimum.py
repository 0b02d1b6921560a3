"""Which batch size is optimal, from confirmation runs where there are any, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from bssearch.analysis.time_to_target import Estimate, estimate, ratio_upper_bound, seconds_to_target
from bssearch.records import Configuration, Phase, TrialRecord, TrialState

FLAT = 1.05
Regime = Literal["perfect", "diminishing", "maximal"]


@dataclass(frozen=True)
class Candidate:
    """One configuration with all the runs that count for it: confirmation runs, or its one search trial."""

    configuration: Configuration
    runs: tuple[TrialRecord, ...]

    @cached_property
    def estimate(self) -> Estimate:
        """Return the time-to-target over the runs."""
        return estimate(self.runs)

    @property
    def is_confirmed(self) -> bool:
        """Return whether the runs are confirmation runs."""
        return self.runs[0].phase is Phase.CONFIRM

    @property
    def seconds(self) -> float:
        """Return the median seconds to the target, infinite where half of the runs or more missed it."""
        return math.inf if self.estimate.median is None else self.estimate.median

    @property
    def watched_seconds(self) -> float:
        """Return the train seconds at which the target was last seen to be missed, in the longest run."""
        return max((missed_until(run) or 0.0 for run in self.runs), default=0.0)

    @property
    def lower_bound_s(self) -> float | None:
        """Return what the median is longer than, where it is not known: the median with last misses for times.

        None where a run says nothing (it diverged) or shared its device, so that its seconds are not comparable.
        """
        if self.estimate.median is not None:
            return None
        known = [seconds_to_target(run, "measured") or missed_until(run) for run in self.runs]
        return statistics.median([value for value in known if value]) if all(known) else None

    @property
    def fits(self) -> bool:
        """Return whether a run came to an end of its own, without running out of memory."""
        return any(run.state is not TrialState.OOM for run in self.runs)


def missed_until(run: TrialRecord) -> float | None:
    """Return the train seconds at which a stopped run was last seen to miss the target, on a device of its own."""
    if run.outcome is None or not run.state.is_censored or run.outcome.contended:
        return None
    return run.outcome.last_miss_seconds


@dataclass(frozen=True)
class Verdict:
    """The optimum and what it is compared with. ``by_batch`` holds each batch size's best candidate, ascending.

    ``confirmed``: the optimum was chosen among confirmation runs; otherwise from single search trials.
    """

    optimal: Candidate
    by_batch: Mapping[int, Candidate]
    confirmed: bool

    @cached_property
    def flat_range(self) -> tuple[int, int]:
        """Return the batch sizes around the optimum whose median is within 5 % of it, without a gap."""
        sizes = list(self.by_batch)
        low = high = sizes.index(self.optimal.configuration.batch_size)
        while low > 0 and self._is_flat(sizes[low - 1]):
            low -= 1
        while high < len(sizes) - 1 and self._is_flat(sizes[high + 1]):
            high += 1
        return sizes[low], sizes[high]

    @cached_property
    def tied(self) -> list[int]:
        """Return the batch sizes *shown* to be within 5 %: the upper bound of the ratio is. The optimum is one."""
        found = []
        for size, candidate in self.by_batch.items():
            bound = ratio_upper_bound(candidate.estimate, self.optimal.estimate)
            if candidate is self.optimal or (bound is not None and bound <= FLAT):
                found.append(size)
        return found

    def _is_flat(self, batch_size: int) -> bool:
        candidate = self.by_batch[batch_size]
        return (candidate.is_confirmed or not self.confirmed) and candidate.seconds <= FLAT * self.optimal.seconds


def repeats(trials: Sequence[TrialRecord]) -> list[Candidate]:
    """Return the configurations of the trials that say something, the repeats of each together, each seed once."""
    groups: dict[str, dict[int, TrialRecord]] = {}
    for trial in trials:
        groups.setdefault(trial.configuration.key, {}).setdefault(trial.seed, trial)
    return [Candidate(next(iter(runs.values())).configuration, tuple(runs.values())) for runs in groups.values()]


def decide(trials: Sequence[TrialRecord], confirmation_runs: int) -> Verdict | None:
    """Return the verdict over a study's trials, or None where no trial reached the target.

    Where every finalist has had its confirmation runs, they alone decide; a batch size without any keeps its best
    search trial in ``by_batch``, for the table. A confirmation half done decides nothing, and a configuration whose
    fresh seeds missed the target is not recommended for the one seed that reached it.
    """
    counted = [trial for trial in trials if trial.state.is_finished and not trial.state.is_missing]
    confirmed = repeats([trial for trial in counted if trial.phase is Phase.CONFIRM])
    if not is_complete(trials, confirmation_runs):
        confirmed = []
    refuted = {one.configuration.key for one in confirmed if not math.isfinite(one.seconds)}
    searched = [Candidate(trial.configuration, (trial,)) for trial in counted if trial.phase is Phase.SEARCH]
    if refuted:
        searched = [one for one in searched if one.configuration.key not in refuted]
    sizes = sorted({one.configuration.batch_size for one in [*confirmed, *searched]})
    by_batch = {}
    for size in sizes:
        for pool in (confirmed, searched):
            here = [one for one in pool if one.configuration.batch_size == size]
            if here:
                by_batch[size] = min(here, key=lambda one: (one.seconds, -one.watched_seconds))
                break
    finished = [one for one in confirmed if math.isfinite(one.seconds)]
    pool = finished or [one for one in searched if math.isfinite(one.seconds)]
    if not pool:
        return None
    optimal = min(pool, key=lambda one: one.seconds)
    by_batch[optimal.configuration.batch_size] = optimal
    return Verdict(optimal=optimal, by_batch=by_batch, confirmed=bool(finished))


def is_complete(trials: Sequence[TrialRecord], confirmation_runs: int) -> bool:
    """Return whether every configuration in confirmation has had its runs; failed ones count, lost ones do not."""
    seeds: dict[str, set[int]] = {}
    for trial in trials:
        if trial.phase is Phase.CONFIRM:
            had = seeds.setdefault(trial.configuration.key, set())
            if trial.state.is_finished and trial.state not in {TrialState.LOST, TrialState.CANCELLED}:
                had.add(trial.seed)
    return all(len(had) >= confirmation_runs for had in seeds.values())


def regime(batch_sizes: Sequence[int], steps: Sequence[float | None], index: int) -> Regime | None:
    """Return how steps-to-target respond to the batch size there: the slope of log steps over log batch.

    perfect: steps halve as the batch doubles (slope below −0.75); maximal: they no longer fall (above −0.25);
    diminishing between (Shallue et al. 2019, arXiv 1811.03600). Taken from the next smaller batch size with steps.
    """
    here = steps[index]
    for smaller in range(index - 1, -1, -1):
        before = steps[smaller]
        if here and before:
            slope = math.log(here / before) / math.log(batch_sizes[index] / batch_sizes[smaller])
            return "perfect" if slope < -0.75 else "maximal" if slope > -0.25 else "diminishing"
    return None


def fastest(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the trial with the least time-to-target among those that reached it."""
    reached = [(value, trial.number, trial) for trial in trials if (value := seconds_to_target(trial)) is not None]
    return min(reached)[2] if reached else None
