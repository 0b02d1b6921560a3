"""Regret: the ratio of two configurations' figures."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from bssearch.analysis.optimum import Candidate, ratio_interval
from bssearch.analysis.shape import Interval
from bssearch.records import TrialState
from bssearch.records.intervals import FEWEST_RUNS, FLAT_RATIO, student_t
from bssearch.records.step_times import StepSeconds

Finding = Literal["held", "broke", "undecided", "not_run"]

HELD = FLAT_RATIO  # a rule holds if the regret's upper end is below

BROKE = 1.10  # a rule breaks if the lower end is above: twice the 5 %


class Regret(Interval):
    """A ratio of two figures; ``at_least``: the value is a lower bound."""

    at_least: bool


NONE = Regret(value=1.0, low=1.0, high=1.0, at_least=False)


@dataclass(frozen=True)
class Judgement:
    """The judgement of a rule by its runs."""

    finding: Finding
    reason: str
    regret: Regret | None = None

    def reversed(self) -> Judgement:
        """Judgement of the opposite rule."""
        other: dict[Finding, Finding] = {"held": "broke", "broke": "held"}
        return Judgement(other.get(self.finding, self.finding), self.reason, self.regret)


def judge(
    rule: Candidate, tuned: Candidate, step_seconds: StepSeconds = MappingProxyType({}), *, wanted: int, limit: float
) -> Judgement:
    """Judge a rule's configuration against the tuned one.

    Held if the regret's upper end is below `HELD`. Broke if its lower end is above `BROKE`, or if all ``wanted`` runs
    missed the target (contended: only if their steps show that).
    """
    objective = tuned.objective.between((*rule.runs, *tuned.runs), step_seconds)
    rule, tuned = replace(rule, objective=objective), replace(tuned, objective=objective)
    basis = "" if objective.common is None else f" by {objective.common.in_words}"
    made, reached = len(rule.runs), rule.estimate.reached
    if not reached:
        regret = _at_least(rule, tuned, limit)
        counted = f"0 of {made} runs reached the target" if made > 1 else "its only run missed the target"
        if made < wanted:
            return Judgement("undecided", f"{counted}; {made} of {wanted} runs made", regret)
        if basis and not _has_diverged(rule) and (regret is None or regret.value <= BROKE):
            return Judgement("undecided", f"{counted}, but other work used the device", regret)
        return Judgement("broke", counted, regret)
    missed = [
        f"{one.estimate.runs - one.estimate.reached} of {one.estimate.runs} runs {of} missed the target"
        for one, of in ((rule, "of the rule"), (tuned, "of the tuned optimum"))
        if one.estimate.reached < one.estimate.runs
    ]
    if missed:
        return Judgement("undecided", f"{' and '.join(missed)}: no interval", _medians(rule, tuned, limit))
    regret, method = _regret(rule, tuned)
    method += basis
    if regret.low is None or regret.high is None:
        return Judgement("undecided", f"{method}; {made} of {wanted} runs made" if made < wanted else method, regret)
    if regret.high < HELD:
        return Judgement("held", method, regret)
    return Judgement("broke" if regret.low > BROKE else "undecided", method, regret)


def _regret(rule: Candidate, tuned: Candidate) -> tuple[Regret, str]:
    """Paired t from three common seeds, else Welch's."""
    mine, theirs = _log_figures(rule), _log_figures(tuned)
    pairs = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    if len(pairs) >= FEWEST_RUNS:
        mean = statistics.fmean(pairs)
        half = student_t(len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
        regret = Regret(value=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), at_least=False)
        return regret, f"paired by {len(pairs)} seeds"
    value = math.exp(rule.estimate.log_mean - tuned.estimate.log_mean)
    interval = ratio_interval(rule.estimate, tuned.estimate)
    if interval is None:
        counts = f"{len(mine)} against {len(theirs)} runs"
        return Regret(value=value, low=None, high=None, at_least=False), f"{counts} (an interval takes {FEWEST_RUNS})"
    low, high = interval
    return (
        Regret(value=value, low=low, high=high, at_least=False),
        f"{len(mine)} against {len(theirs)} runs, by Welch",
    )


def _log_figures(candidate: Candidate) -> dict[int, float]:
    figures = {run.seed: candidate.objective.figure(run) for run in candidate.runs}
    logs = {seed: candidate.objective.log(one) for seed, one in figures.items() if one is not None}
    return {seed: log for seed, log in logs.items() if log is not None}


def _medians(rule: Candidate, tuned: Candidate, limit: float) -> Regret | None:
    if not math.isfinite(tuned.value):
        return None
    if not math.isfinite(rule.value):
        return _at_least(rule, tuned, limit)
    return Regret(value=tuned.objective.ratio(rule.value, tuned.value), low=None, high=None, at_least=False)


def _at_least(rule: Candidate, tuned: Candidate, limit: float) -> Regret | None:
    objective, bound = rule.objective, rule.lower_bound
    if bound is None:
        bounds = [known for run in rule.runs if (known := objective.bound(run)) is not None]
        bound = min(bounds, default=None)
    figure = tuned.value
    if _has_diverged(rule) and objective.trials_race:
        bound, figure = limit, tuned.time.median or math.inf
    if bound is None or not math.isfinite(figure) or bound <= 0:
        return None
    return Regret(value=bound / figure, low=None, high=None, at_least=True)


def _has_diverged(rule: Candidate) -> bool:
    return all(run.state is TrialState.DIVERGED for run in rule.runs)
