"""The optimal batch size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import numpy as np

from bssearch.analysis.confirmation_runs import ENOUGH_RUNS, begun_late, fewest_runs, ignore_their_seeds
from bssearch.analysis.law.batch_model import around
from bssearch.analysis.objectives.base import Objective
from bssearch.analysis.objectives.samples_to_target import samples_after
from bssearch.analysis.objectives.seconds import Basis, seconds_to_target
from bssearch.analysis.objectives.time_to_target import TIME
from bssearch.analysis.time_to_target import Estimate, estimate, pooled_deviation, ratio_interval
from bssearch.records import Configuration, Phase, TrialRecord, TrialState
from bssearch.records.intervals import FLAT_RATIO
from bssearch.records.step_times import StepSeconds

BOOTSTRAPS = 1000
"""A bias of a few per cent is known to a tenth of a per cent."""

Rule = Literal["least", "smallest_shown_within_5_percent", "law"]

Settles = Literal["runs", "tuning", "step_times"]
"""What would settle a provisional answer."""


@dataclass(frozen=True)
class Candidate:
    """One configuration with its confirmation runs, or its one search trial.

    ``selection``: mean bias of the log figure, because the candidate is the least of several.
    """

    configuration: Configuration
    runs: tuple[TrialRecord, ...]
    objective: Objective = TIME
    selection: float = 0.0

    @cached_property
    def estimate(self) -> Estimate:
        """The figure over the runs; the interval's upper end includes `selection`."""
        known, objective = estimate(self.runs, self.objective), self.objective
        high = objective.log(known.high) if known.high is not None and self.selection else None
        return known if high is None else replace(known, high=objective.from_log(high + self.selection))

    @cached_property
    def time(self) -> Estimate:
        """Time-to-target, whatever the objective."""
        return self.estimate if self.objective.name == TIME.name else estimate(self.runs, self._times)

    @property
    def _times(self) -> Objective:
        return replace(TIME, common=self.objective.common)

    @property
    def is_confirmed(self) -> bool:
        """True if the runs are confirmation runs."""
        return self.runs[0].phase is Phase.CONFIRM

    @property
    def value(self) -> float:
        """Median figure; infinite if half of the runs or more missed the target."""
        return math.inf if self.estimate.median is None else self.estimate.median

    @property
    def mean(self) -> float:
        """Mean log figure, to break ties; infinite without any."""
        return self.estimate.log_mean if self.estimate.reached else math.inf

    @property
    def watched_seconds(self) -> float:
        """Train seconds of the last miss, in the longest run."""
        return max((self._times.bound(run) or 0.0 for run in self.runs), default=0.0)

    @property
    def lower_bound(self) -> float | None:
        """Lower bound of an unknown median."""
        return self._lower_bound(self.objective, self.estimate)

    @property
    def lower_bound_s(self) -> float | None:
        """Lower bound of an unknown median of seconds."""
        return self._lower_bound(self._times, self.time)

    def _lower_bound(self, objective: Objective, known: Estimate) -> float | None:
        if known.median is not None:
            return None
        values = [
            seconds_to_target(run, "measured") if objective == TIME else objective.figure(run) for run in self.runs
        ]
        ends = [objective.bound(run) if one is None else one for one, run in zip(values, self.runs, strict=True)]
        told = [one for one in ends if one is not None]
        return statistics.median(told) if len(told) == len(ends) else None

    @property
    def fits(self) -> bool:
        """True if a run did not run out of memory."""
        return any(run.state is not TrialState.OOM for run in self.runs)


@dataclass(frozen=True)
class Verdict:
    """The optimum, and the best candidate of each batch size, ascending.

    ``least`` has the least median, ``optimal`` is recommended by the ``rule``. ``confirmed``: from confirmation runs.
    ``others``: further confirmed configurations.
    """

    optimal: Candidate
    least: Candidate
    rule: Rule
    by_batch: Mapping[int, Candidate]
    confirmed: bool
    others: tuple[Candidate, ...] = ()

    @cached_property
    def flat_range(self) -> tuple[int, int]:
        """Range around the optimum of medians within 5 % of the least; at least the optimum itself."""
        sizes = list(self.by_batch)
        own = sizes.index(self.optimal.configuration.batch_size)
        first, last = around(own, np.array([self._is_flat(size) for size in sizes])) or (own, own)
        return sizes[first], sizes[last]

    @cached_property
    def tied(self) -> list[int]:
        """Batch sizes *shown* to be within 5 % of the least (upper end of the ratio)."""
        own = {self.least.configuration.batch_size}
        return [size for size, one in self.by_batch.items() if size in own or is_shown_flat(one, self.least)]

    @cached_property
    def worse(self) -> list[int]:
        """Batch sizes *shown* not to be (lower end of the ratio)."""
        found = {size: ratio_interval(one.estimate, self.least.estimate) for size, one in self.by_batch.items()}
        return [size for size, ratio in found.items() if ratio is not None and ratio[0] > FLAT_RATIO]

    @cached_property
    def seed_deviation(self) -> float | None:
        """Seed-to-seed standard deviation of the log figure, pooled over confirmed configurations."""
        return pooled_deviation(one.estimate for one in self.by_batch.values() if one.is_confirmed)

    @cached_property
    def ignores_seeds(self) -> bool:
        """True if a configuration's confirmation runs are equal."""
        return ignore_their_seeds(one.runs for one in self.by_batch.values() if one.is_confirmed)

    def recommending(self, batch_size: int, best: int) -> Verdict:
        """Verdict for another confirmed batch size, the smallest that is as good as ``best``."""
        if batch_size == self.optimal.configuration.batch_size:
            return self
        rule: Rule = "smallest_shown_within_5_percent" if batch_size < best else "law"
        if batch_size == self.least.configuration.batch_size:
            rule = "least"
        return replace(self, optimal=self.by_batch[batch_size], rule=rule)

    def seconds_of(self, trials: Iterable[TrialRecord]) -> dict[int, CountedSeconds]:
        """Seconds to the target as the answer counts them, by trial number."""
        times = replace(TIME, common=self.optimal.objective.common)
        counted = {run.number for one in self.by_batch.values() for run in one.runs}
        return {
            one.number: CountedSeconds(times.figure(one), times.basis(one), one.number in counted) for one in trials
        }

    def _is_flat(self, batch_size: int) -> bool:
        candidate = self.by_batch[batch_size]
        return (candidate.is_confirmed or not self.confirmed) and candidate.objective.is_flat(
            candidate.value, self.least.value
        )


@dataclass(frozen=True, slots=True)
class CountedSeconds:
    """A trial's seconds to the target; ``counts`` if they are in the answer's median of its batch size."""

    seconds: float | None
    basis: Basis
    counts: bool


def is_shown_flat(one: Candidate, least: Candidate) -> bool:
    """True if shown to be within 5 % of ``least``."""
    interval = ratio_interval(one.estimate, least.estimate)
    return interval is not None and interval[1] <= FLAT_RATIO


def repeats(trials: Sequence[TrialRecord], objective: Objective = TIME) -> list[Candidate]:
    """One candidate per configuration, each seed once."""
    groups: dict[str, dict[int, TrialRecord]] = {}
    for trial in trials:
        groups.setdefault(trial.configuration.key, {}).setdefault(trial.seed, trial)
    return [
        Candidate(next(iter(runs.values())).configuration, tuple(runs.values()), objective) for runs in groups.values()
    ]


def decide(
    trials: Sequence[TrialRecord],
    confirmation_runs: int,
    objective: Objective = TIME,
    step_seconds: StepSeconds = MappingProxyType({}),
) -> Verdict | None:
    """Verdict over a study's trials; None if no trial reached the target.

    Only confirmation runs decide once every finalist has `ENOUGH_RUNS` (or all) of them; until then search trials do.
    Late neighbours are ignored until complete. A configuration whose fresh seeds missed the target is not recommended.

    Recommended is the smallest batch size shown to be within 5 % of the least median, else the least. If many
    confirmation runs were contended, all are compared by steps × ``step_seconds``; see `Objective.between`.
    """
    trials = _without_refused(trials)
    counted = [trial for trial in trials if trial.state.is_finished and not trial.state.is_missing]
    fresh = [trial for trial in counted if trial.phase is Phase.CONFIRM]
    if fewest_runs(trials, confirmation_runs, objective) < min(confirmation_runs, ENOUGH_RUNS):
        before = _before_the_neighbours(trials, confirmation_runs, objective, step_seconds)
        if before is not None:
            return before
        fresh = []
    objective = objective.between(fresh, step_seconds, counted)
    confirmed = repeats(fresh, objective)
    refuted = {one.configuration.key for one in confirmed if not math.isfinite(one.value)}
    searched = [Candidate(trial.configuration, (trial,), objective) for trial in counted if trial.phase is Phase.SEARCH]
    if refuted:
        searched = [one for one in searched if one.configuration.key not in refuted]
    sizes = sorted({one.configuration.batch_size for one in [*confirmed, *searched]})
    by_batch = {}
    for size in sizes:
        pools = ([one for one in pool if one.configuration.batch_size == size] for pool in (confirmed, searched))
        here = next(filter(None, pools))
        by_batch[size] = min(here, key=lambda one: (one.value, one.mean, -one.watched_seconds))
    finished = [one for one in confirmed if math.isfinite(one.value)]
    pool = finished or [one for one in searched if math.isfinite(one.value)]
    if not pool:
        return None
    least = min(pool, key=lambda one: (one.value, one.mean))
    if finished:
        least = replace(least, selection=_selection_bias(finished))
    by_batch[least.configuration.batch_size] = least
    keys = {one.configuration.key for one in by_batch.values()}
    shown = [one for one in by_batch.values() if finished and one.is_confirmed and is_shown_flat(one, least)]
    optimal = min([least, *shown], key=lambda one: one.configuration.batch_size)
    return Verdict(
        optimal=optimal,
        least=least,
        rule="least" if optimal is least else "smallest_shown_within_5_percent",
        by_batch=by_batch,
        confirmed=bool(finished),
        others=tuple(one for one in confirmed if one.configuration.key not in keys),
    )


def _without_refused(trials: Sequence[TrialRecord]) -> Sequence[TrialRecord]:
    confirmed = {one.configuration.key for one in trials if one.phase is Phase.CONFIRM and not one.is_refused}
    refused = [one.configuration for one in trials if one.is_refused and one.configuration.key not in confirmed]
    if not refused:
        return trials
    return [one for one in trials if not any(one.configuration.trains_like(other) for other in refused)]


def _before_the_neighbours(
    trials: Sequence[TrialRecord], confirmation_runs: int, objective: Objective, step_seconds: StepSeconds
) -> Verdict | None:
    late = begun_late(trials, confirmation_runs, objective)
    others = [trial for trial in trials if trial.phase is not Phase.CONFIRM or trial.configuration.key not in late]
    found = decide(others, confirmation_runs, objective, step_seconds) if late else None
    if found is None or not found.confirmed:
        return None
    sizes = sorted({*found.by_batch, *late.values()})
    place = sizes.index(found.optimal.configuration.batch_size)
    return found if all(abs(sizes.index(size) - place) == 1 for size in late.values()) else None


def _selection_bias(candidates: Sequence[Candidate]) -> float:
    known = [one.estimate for one in candidates]
    deviation = pooled_deviation(known)
    if len(known) < 2 or deviation is None:
        return 0.0
    means = np.array([one.log_mean for one in known])
    errors = np.array(
        [math.hypot(deviation / math.sqrt(one.reached), one.unresolved, one.step_time_error) for one in known]
    )
    draws = means + errors * np.random.default_rng(0).standard_normal((BOOTSTRAPS, len(means)))
    chosen = draws.argmin(axis=1)
    return max(0.0, float((means[chosen] - draws[np.arange(BOOTSTRAPS), chosen]).mean()))


def median_steps(candidate: Candidate) -> float | None:
    """Median steps to the target; None if half of the runs or more missed."""
    return _median_of_all([run.outcome.steps_to_target for run in candidate.runs if run.outcome])


def median_samples(candidate: Candidate) -> float | None:
    """Median samples to the target; None as `median_steps`."""
    runs = [(run, run.outcome.steps_to_target) for run in candidate.runs if run.outcome]
    return _median_of_all([samples_after(run, steps) for run, steps in runs])


def _median_of_all(values: Sequence[float | None]) -> float | None:
    median = statistics.median([math.inf if value is None else value for value in values])
    return median if math.isfinite(median) else None


def runs_to_settle(log_deviation: float, ratio: float) -> int:
    """Runs per side that separate a ratio of two medians from 1, to 2 %.

    t-test on logarithms at 5 % with 80 % power, by the noncentral t.
    """
    from scipy.special import nctdtr, stdtrit  # scipy.stats takes half a second to import

    effect = abs(math.log(ratio)) / log_deviation if log_deviation > 0 else math.inf
    runs = 2
    while math.isfinite(effect) and runs < 100_000:
        freedom = 2 * (runs - 1)
        # NaN if the effect is huge
        if not nctdtr(freedom, effect * math.sqrt(runs / 2), stdtrit(freedom, 0.975)) > 0.2:
            break
        runs += max(1, runs // 50)
    return runs


def fastest(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """Trial with the least time-to-target."""
    return least_of(trials, TIME)


def least_of(trials: Sequence[TrialRecord], objective: Objective) -> TrialRecord | None:
    """Trial with the least figure."""
    known = [(value, trial.number, trial) for trial in trials if (value := objective.figure(trial)) is not None]
    return min(known)[2] if known else None
