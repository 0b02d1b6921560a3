"""``target``: a proposal for it, from the default configuration run to its limit with several seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

from bssearch.analysis.shape import Model
from bssearch.commands.opening import ExecutorFactory, Launch, described
from bssearch.commands.unstored import run_default, step_time_of_default
from bssearch.curves import first_crossing
from bssearch.errors import LaunchError, UsageError
from bssearch.executors.base import Executor
from bssearch.records import Goal, Observation, Target, TrialState
from bssearch.spec import StudySpec

MARGIN = 0.02
"""The least margin, as a share of the way from an untrained model's metric to the median best: a choice."""

LEAST = 0.5
"""A proposal lies at least this share of the way above an untrained model, however badly one seed went: a choice."""

WAY = (0.5, 0.8, 0.9, 0.95, 0.98, 1.0)
"""Targets to compare, as shares of the same way: a choice, denser where the last per cents get dear."""

LATE = 0.5
"""A target that takes the default more than this share of the limit leaves slower ones little room: a choice."""


class Run(Model):
    """One run of the default configuration to its limit."""

    seed_index: int
    best_metric: float
    best_at_s: float
    train_seconds: float


class Row(Model):
    """One target: the runs that reach it, and their median time to it (null where half or more miss it)."""

    target: float
    reached: int
    time_to_target_s: float | None
    share_of_limit: float | None


class Advice(Model):
    """A target proposed, and how the time to it changes with it."""

    metric: str
    goal: Goal
    untrained: float
    median_best: float
    margin: float
    proposed: float
    limit_s: float
    runs: list[Run]
    targets: list[Row]
    notes: list[str]


def advise_target(
    spec: StudySpec,
    *,
    runs: int = 5,
    margin: float | None = None,
    on_run: Callable[[Run], None] = lambda run: None,
    folder: Path | str = ".",
    data_dir: Path | str | None = None,
    allow_busy: bool = False,
    make_executor: ExecutorFactory | None = None,
) -> Advice:
    """Run the default configuration to its limit with several seeds and propose a target; nothing is stored.

    The spec's own target may be anything. ``on_run`` gets each run as it ends. See `advise`.
    """
    launch = Launch(folder=folder, data_dir=data_dir, allow_busy=allow_busy, make_executor=make_executor)
    with described(spec, launch) as (executor, found):
        advice = advise(spec, executor, runs=runs, margin=margin, on_run=on_run)
    return advice if found.notice is None else advice.model_copy(update={"notes": [*advice.notes, found.notice]})


def advise(
    spec: StudySpec,
    executor: Executor,
    *,
    runs: int,
    margin: float | None = None,
    on_run: Callable[[Run], None] = lambda run: None,
) -> Advice:
    """Run the default configuration ``runs`` times to the study's limit and propose a target.

    The proposal is the median best metric less ``margin``, rounded towards the easier side. The margin, if none is
    given, is the larger of `MARGIN` of the way from the untrained metric to the median best, and the distance from the
    median to the worst run: so every run reaches the proposal, unless it would lie below `LEAST` of the way.
    Raises `LaunchError` where the default cannot be run, `UsageError` for a margin as wide as the way.
    """
    if runs < 1:
        raise UsageError(f"runs = {runs} must be >= 1")
    if margin is not None and not 0 <= margin < math.inf:
        raise UsageError(f"margin = {margin:g} must be a finite number >= 0")
    target, limit = spec.record_target, spec.budget.trial_train_seconds
    probe = step_time_of_default(spec, executor, spec.default.batch_size)
    curves, made = [], []
    for index in range(runs):
        outcome, curve = run_default(spec, executor, index, probe=probe, limit=limit, stop_at_target=False)
        if not curve or outcome.state is TrialState.DIVERGED:
            raise LaunchError(f"the default configuration does not train: {outcome.reason}")
        best = max(curve, key=lambda one: target.gain(one.metric))
        made.append(
            Run(
                seed_index=index,
                best_metric=best.metric,
                best_at_s=best.train_seconds,
                train_seconds=outcome.train_seconds,
            )
        )
        curves.append(curve)
        on_run(made[-1])
    return summarise(target, limit, made, curves, margin)


def summarise(
    target: Target, limit: float, runs: Sequence[Run], curves: Sequence[Sequence[Observation]], margin: float | None
) -> Advice:
    """Return the proposal and its alternatives from the runs' curves; see `advise`."""
    # The luckiest of the untrained models: none of them shall meet the proposal.
    untrained = max((curve[0].metric for curve in curves), key=target.gain)
    bests = [run.best_metric for run in runs]
    median_best = statistics.median(bests)
    way = target.gain(median_best) - target.gain(untrained)
    if way <= 0:
        raise LaunchError(
            f"{target.metric} never got better than an untrained model's {untrained:.4g}",
            hint="another learning rate in default, or a longer budget.trial_train_seconds",
        )
    if margin is None:
        margin = max(MARGIN * way, float(_difference(target.gain(median_best), min(map(target.gain, bests)))))
        margin = min(margin, (1 - LEAST - MARGIN) * way)  # MARGIN is what rounding takes at most
    proposed = towards_easier(target, median_best, margin, way)
    if target.gain(proposed) <= target.gain(untrained):
        raise UsageError(
            f"margin = {margin:g} leads to a target of {proposed:g}, which an untrained model meets: it has "
            f"{target.metric} = {untrained:.4g}, {way:.4g} from the median best of {median_best:.4g}"
        )
    sign = 1.0 if target.goal is Goal.MAXIMIZE else -1.0
    values = {target.gain(untrained + sign * share * way): untrained + sign * share * way for share in WAY}
    values[target.gain(proposed)] = proposed
    rows = [_row(target, values[gain], limit, curves) for gain in sorted(values)]
    return Advice(
        metric=target.metric,
        goal=target.goal,
        untrained=untrained,
        median_best=median_best,
        margin=margin,
        proposed=proposed,
        limit_s=limit,
        runs=list(runs),
        targets=rows,
        notes=_notes(target, proposed, limit, rows, runs),
    )


def towards_easier(target: Target, best: float, margin: float, way: float) -> float:
    """Return ``best`` less the margin, rounded to the margin's decimal place, never to a harder value.

    The place is no coarser than that of `MARGIN` of ``way`` > 0; without a margin it is that of a thousandth of it.
    """
    unit = Fraction(10) ** math.floor(math.log10(min(margin or way / 1000, MARGIN * way)))
    return target.gain(float(_difference(target.gain(best), margin) // unit * unit))


def _difference(one: float, other: float) -> Fraction:
    """Return the difference in decimals, where 0.3 - 0.1 is 0.2: rounding it down must not take a whole unit more."""
    return Fraction(str(one)) - Fraction(str(other))


def _row(target: Target, value: float, limit: float, curves: Sequence[Sequence[Observation]]) -> Row:
    asked = Target(metric=target.metric, value=value, goal=target.goal)
    crossings = [first_crossing(curve, asked) for curve in curves]
    seconds = [one.train_seconds if one else math.inf for one in crossings]
    median = statistics.median(seconds)
    known = math.isfinite(median)
    return Row(
        target=value,
        reached=sum(map(math.isfinite, seconds)),
        time_to_target_s=median if known else None,
        share_of_limit=median / limit if known else None,
    )


def _notes(target: Target, proposed: float, limit: float, rows: Sequence[Row], runs: Sequence[Run]) -> list[str]:
    notes = []
    row = next(row for row in rows if row.target == proposed)
    if row.reached < len(runs):
        notes.append(f"{len(runs) - row.reached} of {len(runs)} runs of the default miss the proposal")
    if row.share_of_limit is not None and row.share_of_limit > LATE:
        notes.append(
            f"the default takes {row.share_of_limit:.0%} of budget.trial_train_seconds = {limit:g} to the proposal: "
            "slower batch sizes will not be seen to reach it; raise the limit, or take an easier target"
        )
    late = statistics.median(run.best_at_s for run in runs)
    if late > 0.9 * limit:
        notes.append(
            f"{target.metric} was still getting better when the limit of {limit:g} train seconds ended: "
            "with a higher limit a harder target is possible"
        )
    if target.gain(target.value) > target.gain(proposed):
        notes.append(f"the spec's target of {target.value:g} is harder than the proposal")
    return notes
