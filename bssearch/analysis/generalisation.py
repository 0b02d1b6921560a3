"""Final metrics of batch sizes after equal train seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from bssearch.analysis.objectives import ran_to_its_end
from bssearch.analysis.optimum import Verdict, first_runs, half_width, of_runs, says_something
from bssearch.analysis.shape import Interval, Model, Parameters, parameters_of
from bssearch.records import (
    FEWEST_RUNS,
    REGULARISERS,
    Configuration,
    Goal,
    Phase,
    Target,
    TrialRecord,
    grouped,
    median_known,
)
from bssearch.records.text import NOTHING, ends


class MetricOverSeeds(Model):
    """The target's metric over runs; on the ``validation`` part, the best metric of each run."""

    part: Literal["test", "validation"]
    median: float
    standard_deviation: float | None
    runs: int

    @property
    def in_words(self) -> str:
        spread = "" if self.standard_deviation is None else f" ± {self.standard_deviation:.2g}"
        return f"{self.median:.4g}{spread}"


class FinalMetrics(Model):
    """Median metrics of a configuration after the full limit of train seconds.

    The medians leave out ``ended_early`` runs. ``gap`` is the distance from the best batch size's final metric.
    """

    batch_size: int
    parameters: Parameters
    runs: int
    ended_early: int
    contended: int
    final_metric: float | None
    test_metric: float | None
    gap: Interval | None
    trial_numbers: list[int]


class Generalisation(Model):
    """Batch sizes trained for equal ``train_seconds``.

    Attributes:
        more_regularised: The largest batch size, rerun with more regularisation, if any.
        closed: True if ``more_regularised`` closes the gap; null if unknown or if the largest size has no notable gap.
    """

    train_seconds: float
    best_batch_size: int
    notable_gap: float
    batches: list[FinalMetrics]
    more_regularised: FinalMetrics | None
    closed: bool | None


POINTS = 0.02  # the least notable gap: 0.02 for shares, 2 % of the target for other metrics


def generalisation(trials: Sequence[TrialRecord], verdict: Verdict, target: Target) -> Generalisation | None:
    """Return each batch size's final metric after equal train seconds; None if no `TO_BUDGET` run is complete."""
    whole = [trial for trial in trials if is_to_budget(trial) and ran_to_its_end(trial)]
    newest = max(whole, key=lambda one: one.number, default=None)
    if newest is None:
        return None
    limit = newest.train_seconds_limit
    groups = _repeats([trial for trial in trials if is_to_budget(trial, limit)], target)
    chosen = _one_a_batch(groups, verdict)
    best, largest = max(chosen, key=lambda one: one.gain), chosen[-1]
    harder = next((one for one in groups if one.is_more_regularised_than(largest)), None)
    notable = notable_gap(target, [metric for one in groups for metric in one.finals])
    return Generalisation(
        train_seconds=limit,
        best_batch_size=best.configuration.batch_size,
        notable_gap=notable,
        batches=[one.described(best) for one in chosen],
        more_regularised=None if harder is None else harder.described(best),
        closed=_is_closed(largest.gap_to(best), None if harder is None else harder.gap_to(best), notable),
    )


def is_to_budget(trial: TrialRecord, limit: float | None = None) -> bool:
    """True if a trial trains past the target, for ``limit`` train seconds if given."""
    return trial.phase is Phase.TO_BUDGET and limit in (None, trial.train_seconds_limit)


def over_seeds(runs: Iterable[TrialRecord]) -> MetricOverSeeds | None:
    """Return the metric over runs on the test part, else on the validation part; None if no metric is known."""
    outcomes = [run.outcome for run in runs if run.outcome is not None]
    tested = [one.test_metric for one in outcomes if one.test_metric is not None]
    known = tested or [one.best_metric for one in outcomes if one.best_metric is not None]
    if not known:
        return None
    return MetricOverSeeds(
        part="test" if tested else "validation",
        median=statistics.median(known),
        standard_deviation=statistics.stdev(known) if len(known) > 1 else None,
        runs=len(known),
    )


def final_rows(found: Generalisation) -> list[list[str]]:
    rows = [_final_row(one, " (best)" * (one.batch_size == found.best_batch_size)) for one in found.batches]
    return rows if found.more_regularised is None else [*rows, _final_row(found.more_regularised, ", more regularised")]


def _final_row(one: FinalMetrics, remark: str) -> list[str]:
    metrics = [NOTHING if metric is None else f"{metric:.4g}" for metric in (one.final_metric, one.test_metric)]
    worse = NOTHING if one.gap is None else f"{one.gap.value:.3g}{ends(one.gap.low, one.gap.high)}"
    early = f" ({one.ended_early} ended early)" if one.ended_early else ""
    return [f"{one.batch_size}{remark}", *metrics, worse, f"{one.runs}{early}"]


def notable_gap(target: Target, metrics: Iterable[float]) -> float:
    if target.goal is Goal.MAXIMIZE and all(0 <= metric <= 1 for metric in [target.value, *metrics]):
        return POINTS
    return POINTS * abs(target.value)


@dataclass(frozen=True)
class _Repeats:
    configuration: Configuration
    runs: tuple[TrialRecord, ...]
    target: Target

    @cached_property
    def whole(self) -> list[TrialRecord]:
        return [run for run in self.runs if ran_to_its_end(run)]

    @cached_property
    def finals(self) -> list[float]:
        outcomes = [run.outcome for run in self.whole if run.outcome is not None]
        return [one.final_metric for one in outcomes if one.final_metric is not None]

    @property
    def gain(self) -> float:
        return self.target.gain(statistics.median(self.finals)) if self.finals else -math.inf

    def gap_to(self, best: _Repeats) -> Interval | None:
        if self is best or not self.finals:
            return None
        value, sides = best.gain - self.gain, (self.finals, best.finals)
        if min(map(len, sides)) < FEWEST_RUNS:
            return Interval(value=value, low=None, high=None)
        own, its = [statistics.fmean(side) for side in sides]
        half = half_width([one for side in sides for one in of_runs(statistics.stdev(side), 0.0, len(side))])
        middle = self.target.gain(its) - self.target.gain(own)
        return Interval(value=value, low=middle - half, high=middle + half)

    def described(self, best: _Repeats) -> FinalMetrics:
        return FinalMetrics(
            batch_size=self.configuration.batch_size,
            parameters=parameters_of(self.configuration),
            runs=len(self.finals),
            ended_early=len(self.runs) - len(self.whole),
            contended=sum(run.outcome is not None and run.outcome.contended for run in self.whole),
            final_metric=median_known(self.finals),
            test_metric=median_known([run.outcome.test_metric for run in self.whole if run.outcome is not None]),
            gap=self.gap_to(best),
            trial_numbers=[run.number for run in self.runs],
        )

    def is_more_regularised_than(self, other: _Repeats) -> bool:
        mine, theirs = self.configuration, other.configuration
        levels = {name: getattr(theirs, name) for name in REGULARISERS}
        more = all(getattr(mine, name) >= level for name, level in levels.items())
        return more and not mine.trains_like(theirs) and replace(mine, **levels).trains_like(theirs)


def _repeats(trials: Sequence[TrialRecord], target: Target) -> list[_Repeats]:
    alike = first_runs(filter(says_something, trials), lambda one: one.in_micro_batches(1).key)
    return [_Repeats(runs[0].configuration, runs, target) for runs in alike]


def _one_a_batch(groups: Sequence[_Repeats], verdict: Verdict) -> list[_Repeats]:
    # The verdict's configuration of each batch size if run, else the best configuration
    def rank(one: _Repeats) -> tuple[bool, float]:
        candidate = verdict.by_batch.get(one.configuration.batch_size)
        return candidate is not None and one.configuration.trains_like(candidate.configuration), one.gain

    by_size = grouped((one.configuration.batch_size, one) for one in groups)
    return [max(here, key=rank) for _, here in sorted(by_size.items())]


def _is_closed(plain: Interval | None, regularised: Interval | None, notable: float) -> bool | None:
    return None if plain is None or regularised is None or plain.value <= notable else regularised.value <= notable
