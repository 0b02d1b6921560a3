"""Which runs a quick answer makes, one after the other, and how long each may train."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from bssearch.analysis.law.critical_batch import (
    CriticalBatchPosterior,
    ExpectedOptimum,
    critical_batch,
    expected_optimum,
)
from bssearch.analysis.law.joint import runnable_steps
from bssearch.analysis.law.likelihood import LawPoint, law_point
from bssearch.commands.enqueue import any_configuration_of, configuration_of
from bssearch.errors import UsageError
from bssearch.history import History
from bssearch.records import Configuration, Phase, TrialOutcome, TrialPlan, TrialRecord, TrialState
from bssearch.search.confirmation import repeat
from bssearch.search.engine import NextRun
from bssearch.search.seeds import trial_seed

SHARE_OF_A_RUN = 0.25
"""The share of the time that one run may train: four find out whether the default trains and what others need."""

NOISE_SHARE = 0.1
"""The share of the time in which gradients are measured, once near the target."""

LEAST_NOISE_SHARE = 0.25
"""The share of that which is spent on it even where the time is up."""

SLOWER = 1.5
"""How much longer than the fastest a run at another batch size trains: one that is slower is not the optimum."""

STEP = 4
"""The ratio of the batch sizes of two neighbouring runs: an octave says little beside the noise of a seed."""

CLOSE = 3.0
"""The ratio of the ends of the optimum's interval at which no further run is needed: a choice."""

RATE_STEP = 3.0
"""The ratio of two learning rates that are compared: less is told apart by no single run."""

FASTER = 1.25
"""How much sooner a run with another learning rate must be there to count, as seeds differ too: a choice."""

LONGER = 2.0
"""How much longer a default that was stopped on the way must be allowed to train to run once more: a choice."""

AS_FAR = 1.2
"""A run with another learning rate trains for this times what it is to beat."""


class QuickPlan:
    """The runs of a quick answer that may take ``seconds``, of which some have passed since it ``began``."""

    def __init__(self, seconds: float, began: float) -> None:
        self.seconds = seconds
        self._began = began

    @property
    def left(self) -> float:
        """Return the seconds that are left, at least 0."""
        return max(0.0, self.seconds - self.passed)

    @property
    def passed(self) -> float:
        """Return the seconds since it began."""
        return time.monotonic() - self._began

    def next_size(self, history: History) -> TrialPlan | None:
        """Return the next run with a learning rate by the rule: the default's, then those of other batch sizes.

        None begins where there is no time for as long a run as the fastest before gradients are measured, or where the
        optimum is known within `CLOSE`. A default that was stopped in a quick answer of less time runs once more.
        """
        spec = history.spec
        default = ended_run(history, spec.default_configuration)
        if default is None or self._is_too_short(default, spec.budget.trial_train_seconds):
            return self._run(history, spec.default_configuration, self.seconds)
        fastest = _fastest(history)
        if default.state is TrialState.DIVERGED or fastest is None:
            return None
        left = self.left - (0.0 if spec.is_program else NOISE_SHARE * self.seconds + fastest.wall_seconds)
        size = next_size(history, by_rule(history)) if left >= fastest.wall_seconds else None
        if size is None:
            return None
        share = fastest.train_seconds / max(fastest.train_seconds, fastest.wall_seconds)
        return self._run(history, rule_configuration(history, size), min(share * left, SLOWER * fastest.train_seconds))

    def noise_seconds(self, history: History) -> float:
        """Return the seconds in which gradients are to be measured, once a run as long as the fastest is near there."""
        fastest, share = _fastest(history), NOISE_SHARE * self.seconds
        before = 0.0 if fastest is None else fastest.wall_seconds
        return max(LEAST_NOISE_SHARE * share, min(share, self.left - before))

    def next_rate(self, batch_size: int) -> NextRun:
        """Return the plan of runs at a batch size with other learning rates, as long as they get faster."""

        def plan(history: History) -> TrialPlan | None:
            times = seconds_by_rate(history, batch_size)
            fastest = min(times.values(), default=math.inf)
            rate = next_rate(times, rule_configuration(history, batch_size).learning_rate)
            if rate is None or self.left < fastest:
                return None
            with suppress(UsageError):  # A rate beyond the space is none that a search could go on from.
                configuration = configuration_of(history.spec, {"batch_size": batch_size, "learning_rate": rate})
                return self._run(history, configuration, min(self.left, AS_FAR * fastest))
            return None

        return plan

    def once(self, configuration: Configuration) -> NextRun:
        """Return the plan of one run of a configuration, none where it has been run."""

        def plan(history: History) -> TrialPlan | None:
            done = ended_run(history, configuration) is not None
            return None if done else self._run(history, configuration, self.seconds)

        return plan

    def _is_too_short(self, run: TrialRecord, full: float) -> bool:
        """Return whether a run was stopped where it might now train much further; ``full`` seconds at most."""
        trained = 0.0 if run.outcome is None else run.outcome.train_seconds
        longest = max(trained, run.train_seconds_limit)
        return run.state is TrialState.CAPPED and LONGER * longest <= min(full, SHARE_OF_A_RUN * self.seconds)

    def _run(self, history: History, configuration: Configuration, limit: float) -> TrialPlan:
        return run_plan(history, configuration, limit, share=SHARE_OF_A_RUN * self.seconds)


def run_plan(history: History, configuration: Configuration, limit: float, *, share: float) -> TrialPlan:
    """Return the plan of one run, which trains no longer than the ``limit`` and its ``share``, in seconds.

    One that may take its whole share counts as evidence of how long its batch size takes, as an uncapped trial does.
    """
    spec = history.spec
    full = spec.budget.trial_train_seconds
    limit, share = min(full, share, limit), min(full, share)
    seed = trial_seed(spec.seed, Phase.SEARCH, history.length)
    return replace(
        repeat(history, history.as_run(configuration), seed, Phase.SEARCH),
        train_seconds_limit=limit,
        limit_state=TrialState.EXHAUSTED if limit >= full else TrialState.CAPPED,
        uncapped=limit >= share,
    )


def rule_configuration(history: History, batch_size: int) -> Configuration:
    """Return the default at a batch size, with the learning rate by the space's rule."""
    return any_configuration_of(history.spec, {"batch_size": batch_size})


def ended_run(history: History, configuration: Configuration) -> TrialRecord | None:
    """Return the first search trial of a configuration that has ended by itself, or else got the furthest of all."""
    runs = [run for run in _ended(history) if run.configuration.trains_like(configuration)]
    whole = next((run for run in runs if run.state is not TrialState.CAPPED), None)
    return whole or max(runs, key=lambda run: run.train_seconds_limit, default=None)


def by_rule(history: History) -> list[TrialRecord]:
    """Return the trials that have ended by themselves of the default and of it at other batch sizes by the rule."""
    rules = {size: rule_configuration(history, size) for size in history.feasible}
    runs = [run for run in _ended(history) if run.configuration.batch_size in rules]
    return [run for run in runs if run.configuration.trains_like(rules[run.configuration.batch_size])]


def next_size(history: History, runs: Sequence[TrialRecord]) -> int | None:
    """Return the batch size to run next, None where the optimum is known well enough or nothing is left to run.

    `STEP` times the default's and as much below it, that first which is expected to be sooner at the target; then the
    farthest from these within the optimum's interval, and last what would be recommended. ``runs`` are those of the
    default and of it at other batch sizes by the rule.
    """
    run = {trial.configuration.batch_size for trial in runs}
    optimum = expected(history, law_points(runs), None)[1]
    if neighbours := _neighbours(history) - run:
        return min(neighbours, key=optimum.relative_times.__getitem__)
    low, high = optimum.interval
    left = [size for size in history.feasible if size not in run and low <= size <= high]
    if left and high > CLOSE * low:
        return max(left, key=lambda size: _gap(size, run))
    return None if optimum.step.batch_size in run else optimum.step.batch_size


def next_rate(seconds: Mapping[float, float], rule: float) -> float | None:
    """Return the learning rate to try next beside those tried, with their seconds to the target (∞: missed).

    `RATE_STEP` times the ``rule``'s, further up as long as that is faster; where it is not, the same downwards. None
    where both neighbours of the fastest have been tried.
    """
    if not math.isfinite(min(seconds.values(), default=math.inf)):
        return None
    fastest = min(seconds, key=seconds.__getitem__)
    up, down = fastest * RATE_STEP, fastest / RATE_STEP
    wanted = (up, down) if fastest >= rule else (down, up)
    return next((rate for rate in wanted if not any(math.isclose(rate, one) for one in seconds)), None)


def seconds_by_rate(history: History, batch_size: int) -> dict[float, float]:
    """Return the least seconds to the target of the rule's learning rate and others at a batch size; ∞: missed."""
    least: dict[float, float] = {}
    for run in _at_any_rate(history, batch_size):
        hit = None if run.outcome is None else run.outcome.time_to_target_s
        rate = run.configuration.learning_rate
        least[rate] = min(least.get(rate, math.inf), math.inf if hit is None else hit)
    return least


def with_other_rates(history: History, batch_size: int) -> list[TrialRecord]:
    """Return the runs at a batch size that differ from the rule's configuration in the learning rate alone."""
    rule = rule_configuration(history, batch_size).learning_rate
    return [run for run in _at_any_rate(history, batch_size) if run.configuration.learning_rate != rule]


def _at_any_rate(history: History, batch_size: int) -> Iterator[TrialRecord]:
    rule = rule_configuration(history, batch_size)
    for run in _ended(history):
        if run.configuration.trains_like(replace(rule, learning_rate=run.configuration.learning_rate)):
            yield run


def law_points(runs: Sequence[TrialRecord]) -> list[LawPoint]:
    """Return the samples to the target of runs that follow the default's rule, by batch size."""
    sizes = sorted({run.configuration.batch_size for run in runs})
    points = [law_point(size, [run for run in runs if run.configuration.batch_size == size]) for size in sizes]
    return [point for point in points if point.samples or point.missed_at]


def expected(
    history: History, points: Sequence[LawPoint], noise: float | None
) -> tuple[CriticalBatchPosterior, ExpectedOptimum]:
    """Return what the runs and a noise scale say of the critical batch size, and the optimum by it."""
    feasible = history.feasible
    posterior = critical_batch(feasible, noise, points)
    steps = runnable_steps(list(history.probes.values()), max(feasible))
    return posterior, expected_optimum(posterior, steps, feasible)


def _ended(history: History) -> Iterator[TrialRecord]:
    return (trial for trial in history.trials if trial.state.is_finished and not trial.state.is_missing)


def _neighbours(history: History) -> set[int]:
    """Return the batch sizes nearest to `STEP` times the default's and as much below it, if they are not its own."""
    default = history.spec.default_configuration.batch_size
    near = {
        min(history.feasible, key=lambda size: abs(math.log(size / end))) for end in (STEP * default, default / STEP)
    }
    return {size for size in near if abs(math.log(size / default)) > math.log(STEP) / 2}


def _gap(size: int, run: set[int]) -> float:
    """Return how far a batch size is from all that have been run, in nats."""
    return min(abs(math.log(size / other)) for other in run)


def _fastest(history: History) -> TrialOutcome | None:
    """Return the end of the run that was soonest at the target, else that of the default, None before it trains."""
    ends = [run.outcome for run in by_rule(history) if run.outcome is not None]
    reached = [end for end in ends if end.state is TrialState.REACHED and end.train_seconds > 0]
    default = ended_run(history, history.spec.default_configuration)
    known = None if default is None else default.outcome
    return min(reached, key=lambda end: end.train_seconds, default=known if known and known.train_seconds > 0 else None)
